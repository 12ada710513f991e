"""The optimizers of a run: built from options, or any ``torch.optim.Optimizer`` of the user's.

A user's optimizer creates its state in its first step. So its state is not in the memory plan, a resumed run creates it from
the checkpoint, and a skipped first step reads the flag on the host (``skippable``). ``trial`` finds out beforehand, on a small
tensor, what the optimizer keeps and whether it works on shards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.errors import ConfigError, Problem, nearest_name
from unisono.optim.skippable import make_skippable, non_tensor_state
from unisono.optim.state import state_tensors

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
# an optimizer of the model's parameters, a class or function that builds one, or several by name pattern
GivenOptimizer = Optimizer | OptimizerFactory | Mapping[str, OptimizerFactory]


# key of a parameter group: the number of steps, from the first of the run, in which it is not trained
FROZEN_UNTIL = "frozen_until_step"


class RunOptimizer:
    """One or several optimizers, each of its own parameters, that make one step together.

    Args:
        members: Optimizers that obey ``make_skippable``. Their parameters are disjoint.
        state_names: For each optimizer the names of a parameter's state after a step. None: all state exists already, as
            ``build_optimizer`` creates it.
    """

    def __init__(self, members: Sequence[Optimizer], state_names: Sequence[frozenset[str]] | None = None) -> None:
        self.members = tuple(members)
        self._state_names = state_names

    @property
    def eager_state(self) -> bool:
        """Whether the state exists before the first step."""
        return self._state_names is None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers; changes of a group's values act on its optimizer."""
        return [group for member in self.members for group in member.param_groups]

    def frozen(self, step: int) -> list[nn.Parameter]:
        """The parameters of groups whose ``frozen_until_step`` is after the 0-based ``step``."""
        return [p for group in self.param_groups if step < group.get(FROZEN_UNTIL, 0) for p in group["params"]]

    def step(self, grad_scale: Tensor, found_inf: Tensor) -> None:
        """Divide gradients by ``grad_scale`` [] and update; where ``found_inf`` [] is not 0 nothing changes."""
        for member in self.members:
            member.grad_scale = grad_scale  # pyright: ignore[reportAttributeAccessIssue]
            member.found_inf = found_inf  # pyright: ignore[reportAttributeAccessIssue]
            member.step()

    def state_tensors(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """The live state as ``optim/<state>/<parameter name>``. Raises CheckpointError for state that is no tensor."""
        return {path: tensor for member in self.members for path, tensor in state_tensors(parameters, member).items()}

    def create_state(
        self, parameters: Mapping[str, nn.Parameter], saved: Mapping[str, tuple[torch.Size, torch.dtype]]
    ) -> None:
        """Create the state that ``saved`` lists by path and that does not exist yet; values are to be loaded.

        ``saved`` has the shapes of the global tensors. A tensor of a parameter's global shape gets the shape of its shard. Where
        the names are those of another optimizer, nothing is created.
        """
        by_parameter: dict[str, set[str]] = {}
        for path in saved:
            _, state, name = path.split("/", 2)
            by_parameter.setdefault(name, set()).add(state)
        for member, state_names in zip(self.members, self._state_names or (), strict=self._state_names is not None):
            own = {p: group for group in member.param_groups for p in group["params"]}
            for path, (shape, dtype) in saved.items():
                _, state, name = path.split("/", 2)
                parameter = parameters.get(name)
                if parameter is None or parameter not in own or state in member.state.get(parameter, {}):
                    continue
                if not by_parameter[name] <= state_names:
                    continue
                group = own[parameter]
                on_host = state == "step" and not (group.get("fused") or group.get("capturable"))
                member.state[parameter][state] = (
                    torch.zeros(shape, dtype=dtype, device="cpu" if on_host else parameter.device)
                    if not shape or shape.numel() == 1 or not _is_parameter_like(member, parameter, shape)
                    else torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
                )


def _is_parameter_like(member: Optimizer, parameter: nn.Parameter, shape: torch.Size) -> bool:
    """Whether a state tensor of the global ``shape`` is one value per element of the parameter, of which this may be a shard."""
    return len(shape) == parameter.ndim and (shape == parameter.shape or shape.numel() > parameter.numel())


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What a few steps on a small tensor showed of an optimizer.

    Attributes:
        state: Names of the state tensors of a parameter's shape.
        others: Names of the other state tensors, such as counts.
        elementwise: Whether shards of a tensor, each with an optimizer of its own, move like the tensor.
    """

    state: tuple[str, ...]
    others: tuple[str, ...]
    elementwise: bool

    @property
    def names(self) -> frozenset[str]:
        """Names of all state tensors."""
        return frozenset((*self.state, *self.others))


def build_user_optimizer(
    factories: Sequence[tuple[OptimizerFactory, Collection[str]]],
    parameters: Mapping[str, nn.Parameter],
    state_names: Sequence[frozenset[str]],
) -> RunOptimizer:
    """Build the optimizers of this rank's shards.

    Args:
        factories: Classes or functions of a list of parameters that return an optimizer, each with names of its parameters.
        parameters: The shards to update, by name. A pipeline stage has those of its blocks only.
        state_names: Names of the state tensors of each optimizer (``try_optimizer``).

    Raises:
        ConfigError: An optimizer has other parameters than it was given.
    """
    members: list[Optimizer] = []
    names_of_members: list[frozenset[str]] = []
    for (factory, names), state in zip(factories, state_names, strict=True):
        params = [parameters[name] for name in parameters if name in names]
        if params:
            members.append(make_skippable(_build(factory, params)))
            names_of_members.append(state)
    return RunOptimizer(members, names_of_members)


def adopt_optimizer(
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    parameters: Mapping[str, nn.Parameter],
    state_names: frozenset[str],
) -> RunOptimizer:
    """Use an optimizer of the model's parameters, whose places this rank's shards take.

    Args:
        names: Name of each parameter of the model before it was sharded.
        parameters: This rank's shards by name. A pipeline stage has those of its blocks only.
        state_names: Names of its state tensors (``try_optimizer``).

    Raises:
        ConfigError: The optimizer has parameters that are not the model's.
    """
    foreign = [p for group in optimizer.param_groups for p in group["params"] if p not in names]
    if foreign:
        raise ConfigError(
            given=f"optimizer {type(optimizer).__name__} has {len(foreign)} parameters that the model has not, the first of "
            f"shape {list(foreign[0].shape)}",
            rule="an optimizer that is passed was made of this model's parameters",
            consequence="values would be updated that the model does not use",
            nearest="make it from model.parameters() of the model that is passed",
        )
    for group in optimizer.param_groups:
        group["params"] = [parameters[names[p]] for p in group["params"] if names[p] in parameters]
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    return RunOptimizer([make_skippable(optimizer)], [state_names])


def assign_by_pattern(names: Iterable[str], patterns: Sequence[str], what: str) -> dict[str, list[str]]:
    """The names of each pattern (``fnmatch``), of which the first match wins.

    Raises ConfigError for a pattern without a name of its own, and for names that no pattern matches.
    """
    all_names = list(names)
    members: dict[str, list[str]] = {pattern: [] for pattern in patterns}
    unmatched: list[str] = []
    for name in all_names:
        first = next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)
        (unmatched if first is None else members[first]).append(name)
    problems = [empty_pattern(pattern, patterns, all_names, what) for pattern in patterns if not members[pattern]]
    if unmatched:
        more = f", and {len(unmatched) - 1} more" if len(unmatched) > 1 else ""
        problems.append(
            Problem(
                given=f"parameter {unmatched[0]!r}{more}: no pattern of {what} ({', '.join(patterns)}) matches",
                rule="every parameter that requires a gradient has one optimizer",
                consequence="it would never change",
                nearest="a last pattern '*', or requires_grad_(False) on it",
            )
        )
    if problems:
        raise ConfigError(*problems)
    return members


def empty_pattern(pattern: str, patterns: Sequence[str], names: Sequence[str], what: str) -> Problem:
    """The problem of a pattern that gets no parameter: none matches, or earlier patterns took them all."""
    matching = [name for name in names if fnmatchcase(name, pattern)]
    earlier = next((other for other in patterns if matching and fnmatchcase(matching[0], other)), "")
    return Problem(
        given=f"{what} has the pattern {pattern!r}, "
        + (f"whose parameters {earlier!r} takes before it" if matching else "which matches no parameter"),
        rule="the first pattern that matches a name wins, and each pattern gets at least one parameter",
        consequence="it would change nothing",
        nearest=f"put {pattern!r} before {earlier!r}" if matching else nearest_name(pattern, names),
    )


def _call(factory: OptimizerFactory, params: list[nn.Parameter]) -> Optimizer:
    """The optimizer that the factory builds. Raises ConfigError if it returns something else."""
    optimizer = factory(params)
    if not isinstance(optimizer, Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            given=f"optimizer {_name(factory)} returned {type(optimizer).__name__}",
            rule="it is a torch.optim.Optimizer class, or a function of a list of parameters that returns an optimizer",
            consequence="there is nothing to train with",
            nearest="optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)",
        )
    return optimizer


def _build(factory: OptimizerFactory, params: list[nn.Parameter]) -> Optimizer:
    if not params:
        raise ConfigError(
            given="a model without a parameter that requires a gradient",
            rule="an optimizer needs something to train",
            consequence="training would change nothing",
            nearest="requires_grad_(True) on the layers to train",
        )
    optimizer = _call(factory, params)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if {id(p) for p in held} != {id(p) for p in params}:
        raise ConfigError(
            given=f"optimizer {_name(factory)} has {len(held)} parameters, and was given {len(params)}",
            rule="it has exactly the parameters it is given, which may be shards of the model's",
            consequence="some would not be trained, or values would be updated that the model does not use",
            nearest="optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)",
        )
    return optimizer


def try_optimizer(given: Optimizer | OptimizerFactory) -> Trial:
    """Make steps with the optimizer on a small tensor, and on its halves. Raises ConfigError if it cannot be used."""
    if not isinstance(given, Optimizer):
        return _try(given, _name(given))
    return merge_trials([_try(_same_kind(given, group), type(given).__name__) for group in given.param_groups])


def merge_trials(trials: Sequence[Trial]) -> Trial:
    """The state of all, which is element-wise if all are."""
    return Trial(
        state=tuple(dict.fromkeys(name for trial in trials for name in trial.state)),
        others=tuple(dict.fromkeys(name for trial in trials for name in trial.others)),
        elementwise=all(trial.elementwise for trial in trials),
    )


def _same_kind(optimizer: Optimizer, group: Mapping[str, Any]) -> OptimizerFactory:
    """A function that builds another optimizer of this class with the constants of ``group``."""
    group = {name: value for name, value in group.items() if name != "params"}
    return lambda params: type(optimizer)([{"params": list(params), **group}])  # pyright: ignore[reportCallIssue]


_TRIAL_STEPS = 3


def _try(factory: OptimizerFactory, name: str) -> Trial:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, 6, generator=generator)
    gradients = [torch.randn(4, 6, generator=generator) for _ in range(_TRIAL_STEPS)]

    def run(rows: slice) -> tuple[Tensor, Optimizer]:
        parameter = nn.Parameter(start[rows].clone())
        optimizer = _call(factory, [parameter])
        for gradient in gradients:
            parameter.grad = gradient[rows].clone()
            optimizer.step()
        return parameter.detach(), optimizer

    try:
        whole, optimizer = run(slice(0, 4))
        name = type(optimizer).__name__
        halves = torch.cat([run(slice(a, b))[0] for a, b in pairwise((0, 2, 4))])
    except (TypeError, RuntimeError, ValueError) as error:
        raise ConfigError(
            given=f"optimizer {name}: its step on a tensor with a dense gradient fails: {error}",
            rule="an optimizer updates dense parameters from their gradients, by step() without a closure",
            consequence="it cannot train this model",
            nearest="one of torch.optim's others, such as torch.optim.AdamW",
        ) from error
    state: dict[str, Any] = next(iter(optimizer.state.values()), {})
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise ConfigError(non_tensor_state(optimizer, key, value))
    return Trial(
        state=tuple(key for key, value in state.items() if value.shape == start.shape),
        others=tuple(key for key, value in state.items() if value.shape != start.shape),
        elementwise=bool(torch.allclose(whole, halves, rtol=1e-5, atol=1e-7)),
    )


def check_frozen_until(optimizer: RunOptimizer) -> int:
    """The largest ``frozen_until_step`` of the parameter groups. Raises ConfigError for one that is no number of steps."""
    steps = [group[FROZEN_UNTIL] for group in optimizer.param_groups if FROZEN_UNTIL in group]
    for value in steps:
        if not isinstance(value, int) or value < 0:
            raise ConfigError(
                given=f"a parameter group has frozen_until_step = {value!r}",
                rule="it is the number of steps, a whole number from 0 on, in which the group is not trained",
                consequence="nothing was started",
                nearest="frozen_until_step=1000",
            )
    if steps and min(steps) and len(steps) == len(optimizer.param_groups):
        raise ConfigError(
            given=f"every parameter group has frozen_until_step, the lowest is {min(steps)}",
            rule="at least one parameter is trained in every step",
            consequence=f"the first {min(steps)} steps would change nothing",
            nearest="a group without frozen_until_step",
        )
    return max(steps, default=0)


def require_elementwise(trial: Trial, name: str, layout: str) -> None:
    """Raise ConfigError for an optimizer that needs whole tensors under ``layout``, where a rank has shards."""
    if not trial.elementwise:
        raise ConfigError(
            given=f"optimizer {name} with {layout}",
            rule="a rank updates its shard of each parameter, so an update of an element may not depend on other elements",
            consequence="shards would be trained differently from the whole parameter",
            nearest="an element-wise optimizer such as torch.optim.AdamW, OptimOptions(kind='lamb'), or no sharding",
        )


def optimizer_name(given: GivenOptimizer) -> str:
    """Names of the optimizer classes or functions, for reports and error texts."""
    if isinstance(given, Mapping):
        return ", ".join(f"{pattern}: {_name(factory)}" for pattern, factory in given.items())
    return _name(given)


def _name(factory: Any) -> str:
    factory = getattr(factory, "func", factory)  # functools.partial
    return str(getattr(factory, "__qualname__", type(factory).__qualname__))
