"""The learning rates of a run's parameter groups over its steps.

``ScheduledRates`` are a pure function of the step. ``TorchRates`` are torch's schedulers, which have state.
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, SupportsFloat, TypeGuard, cast

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from unisono.errors import ConfigError
from unisono.optim.options import ScheduleOptions
from unisono.optim.run_optimizer import FROZEN_UNTIL, RunOptimizer
from unisono.optim.schedules import build_schedule

SchedulerFactory = Callable[[Optimizer], LRScheduler]
# options, a function of the step that returns the learning rate, or a function of the optimizer that returns torch's scheduler
GivenSchedule = ScheduleOptions | Callable[[int], float] | SchedulerFactory


class LearningRates(Protocol):
    """Sets the learning rate of every parameter group before a step."""

    def apply(self, step: int) -> float:
        """Set the rates of 0-based ``step``; returns the rate to report."""
        ...

    def after_step(self) -> None:
        """Called after every step, also a skipped one."""
        ...

    def after_evaluation(self, loss: float) -> None:
        """Called with the loss of each evaluation of the held-out data."""
        ...

    def state(self) -> dict[str, Any]:
        """The mutable state as JSON; empty for a function of the step."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load ``state``."""
        ...


class ScheduledRates:
    """Rates that are a function of the step: each group has its own peak, and the same shape.

    Args:
        groups: Parameter groups; ``lr`` of each is its peak.
        schedule: Options, or the rate of the first group as a function of the 0-based step.
        total_steps: Steps of the run.
        base_lr: The peak that a function's rates belong to, and that ``apply`` reports.

    Raises:
        ConfigError: The schedule does not fit the steps.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        schedule: ScheduleOptions | Callable[[int], float],
        total_steps: int,
        base_lr: float,
    ) -> None:
        self._groups = groups

        def rate(peak: float) -> Callable[[int], float]:
            if isinstance(schedule, ScheduleOptions):
                return build_schedule(schedule, total_steps, peak)
            if peak == base_lr:
                return schedule
            function, scale = schedule, peak / base_lr
            return lambda step: function(step) * scale

        self._base = rate(base_lr)
        if not isinstance(schedule, ScheduleOptions):
            _require_rate(schedule)
        self._rates = [rate(float(group["lr"])) for group in groups]

    def apply(self, step: int) -> float:
        """See ``LearningRates``."""
        for group, rate in zip(self._groups, self._rates, strict=True):
            group["lr"] = rate(step)
        return float(self._base(step))

    def after_step(self) -> None:
        """See ``LearningRates``."""

    def after_evaluation(self, loss: float) -> None:
        """See ``LearningRates``."""

    def state(self) -> dict[str, Any]:
        """See ``LearningRates``."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See ``LearningRates``: a torch scheduler's state is not used."""


class TorchRates:
    """One of torch's schedulers for each optimizer, advanced after every step; ``ReduceLROnPlateau`` after every evaluation.

    Their state, and the numbers of all parameter groups (rates, and momenta that some schedulers change), are in the checkpoint;
    so is what both were before the first step. A run that resumes with other settings uses these as if it had from the start.
    """

    def __init__(
        self, optimizer: RunOptimizer, factory: SchedulerFactory, total_steps: int, *, has_evaluations: bool = True
    ) -> None:
        self._optimizer, self._total_steps, self._steps = optimizer, total_steps, 0
        try:
            self._schedulers = [factory(member) for member in optimizer.members]
        except (TypeError, ValueError) as error:
            raise ConfigError(
                given=f"a schedule that raised {type(error).__name__}: {error}",
                rule="it builds a torch scheduler of the optimizer alone",
                consequence="there is no learning rate",
                nearest="functools.partial(OneCycleLR, max_lr=0.1, total_steps=1000), which has all other arguments",
            ) from error
        for scheduler in self._schedulers:
            if not isinstance(scheduler, LRScheduler):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(
                    given=f"schedule returned {type(scheduler).__name__} for an optimizer",
                    rule="a function with the parameter 'optimizer' returns a torch.optim.lr_scheduler scheduler",
                    consequence="there is no learning rate",
                    nearest="schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)",
                )

            if isinstance(scheduler, ReduceLROnPlateau) and not has_evaluations:
                raise ConfigError(
                    given="schedule ReduceLROnPlateau without held-out data",
                    rule="it reads the held-out loss of each evaluation",
                    consequence="the learning rate would never change",
                    nearest="eval_data=…, or another schedule",
                )

            length = getattr(scheduler, "total_steps", None)
            if isinstance(length, int) and length < total_steps:
                raise ConfigError(
                    given=f"schedule {type(scheduler).__name__} of {length} steps for a run of {total_steps}",
                    rule="it has a learning rate for each step of the run",
                    consequence=f"step {length + 1} would have none",
                    nearest=f"total_steps={total_steps}, or TrainOptions(steps={length})",
                )
        self._initial = json.loads(json.dumps(self._values()))

    def apply(self, step: int) -> float:
        """See ``LearningRates``."""
        return float(self._optimizer.param_groups[0]["lr"])

    def after_step(self) -> None:
        """See ``LearningRates``."""
        self._steps += 1
        for scheduler in self._schedulers:
            if not isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step()

    def after_evaluation(self, loss: float) -> None:
        """See ``LearningRates``."""
        for scheduler in self._schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(loss)

    def state(self) -> dict[str, Any]:
        """See ``LearningRates``."""
        return self._values() | {"initial": self._initial, "steps": self._steps}

    def _values(self) -> dict[str, Any]:
        groups = [
            {name: value for name, value in group.items() if name not in ("params", FROZEN_UNTIL) and _is_json(value)}
            for group in self._optimizer.param_groups
        ]
        return {"schedulers": [_to_json(scheduler.state_dict()) for scheduler in self._schedulers], "groups": groups}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See ``LearningRates``. A checkpoint of another kind of schedule changes nothing."""
        saved = state.get("schedulers", [])
        if len(saved) != len(self._schedulers):
            return
        self._steps = int(state.get("steps", 0))
        if state.get("initial", self._initial) != self._initial:
            self._replay([_from_json(values) for values in saved], state)
            return
        for scheduler, values in zip(self._schedulers, saved, strict=True):
            scheduler.load_state_dict(_from_json(values))
        for group, values in zip(self._optimizer.param_groups, state["groups"], strict=True):
            for name, value in values.items():
                group[name] = tuple(value) if isinstance(group.get(name), tuple) else value

    def _replay(self, saved: list[dict[str, Any]], state: Mapping[str, Any]) -> None:
        """Advance the schedulers, whose settings are not those of the checkpoint, by as many steps as those had made."""
        for scheduler, values, now in zip(self._schedulers, saved, self._initial["schedulers"], strict=True):
            if not isinstance(scheduler, ReduceLROnPlateau):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the optimizer made its steps in an earlier process
                    for _ in range(min(self._steps, self._total_steps)):
                        scheduler.step()
            elif "num_bad_epochs" in values:
                # its rate follows from evaluations, which are not made again: the reductions of the rate so far stay
                settings = _from_json(now)
                counters = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")
                scheduler.load_state_dict(settings | {name: values[name] for name in counters})
                for group, then, last in zip(
                    self._optimizer.param_groups, state["initial"]["groups"], state["groups"], strict=False
                ):
                    group["lr"] *= last["lr"] / then["lr"] if then["lr"] else 1.0


def is_scheduler_factory(schedule: GivenSchedule) -> TypeGuard[SchedulerFactory]:
    """Whether ``schedule`` makes a torch scheduler of an optimizer: by its class, or by the name of its parameter."""
    if isinstance(schedule, ScheduleOptions):
        return False
    target: Any = schedule.func if isinstance(schedule, partial) else schedule
    if isinstance(target, type):
        return issubclass(target, LRScheduler)
    try:
        return next(iter(inspect.signature(schedule).parameters), "") == "optimizer"
    except (TypeError, ValueError):
        return False


def _require_rate(schedule: Callable[[int], object]) -> None:
    """Raises ConfigError if ``schedule`` gives no learning rate for the first step."""
    try:
        rate = schedule(0)
        wrong = "" if isinstance(rate, SupportsFloat) else f"returned {type(rate).__name__}"
    except Exception as error:
        wrong = f"raised {type(error).__name__}: {error}"
    if wrong:
        first = next(iter(inspect.signature(schedule).parameters), "")
        raise ConfigError(
            given=f"a schedule that {wrong} for step 0",
            rule="schedule(step) returns a learning rate; schedule(optimizer), by that name, returns a torch scheduler",
            consequence="there is no learning rate",
            nearest=f"the parameter {first!r} called 'optimizer', if it is one"
            if "Optimizer" in wrong
            else "schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 100), or lambda step: 0.1",
        )


_NON_FINITE = "float:"


def _is_json(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | None) or (
        isinstance(value, list | tuple) and all(map(_is_json, cast("list[Any]", value)))
    )


def _to_json(value: Any) -> Any:
    """JSON of a scheduler's state; infinities as text. Values that are no JSON, such as functions, are left out."""
    if isinstance(value, float) and value - value != 0:
        return f"{_NON_FINITE}{value}"
    if isinstance(value, Mapping):
        pairs = cast("Mapping[Any, Any]", value).items()
        # a list of pairs: keys of milestones are numbers
        return {"pairs": [[key, _to_json(item)] for key, item in pairs if _is_state(item)]}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in cast("list[Any]", value)]
    return value


def _is_state(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True
    if isinstance(value, list | tuple):
        return all(map(_is_state, cast("list[Any]", value)))
    return isinstance(value, bool | int | float | str | None)


def _from_json(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(_NON_FINITE):
        return float(value.removeprefix(_NON_FINITE))
    if isinstance(value, dict):
        return {key: _from_json(item) for key, item in cast("dict[str, Any]", value)["pairs"]}
    if isinstance(value, list):
        return [_from_json(item) for item in cast("list[Any]", value)]
    return value
