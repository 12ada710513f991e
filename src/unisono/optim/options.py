"""Settings of the optimizer and of its learning-rate schedule. Imports no torch.

A setting that the chosen ``kind`` does not read must be left at its default; ``problems`` reports it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from unisono.config import option
from unisono.config.fields import options_repr
from unisono.errors import Problem, inert_problem

OPTIMIZER_FIELDS: Mapping[str, frozenset[str]] = {
    "sgd": frozenset({"momentum", "nesterov"}),
    "adam": frozenset({"beta1", "beta2", "eps"}),
    "adamw": frozenset({"beta1", "beta2", "eps"}),
    "lamb": frozenset({"beta1", "beta2", "eps"}),
    "lars": frozenset({"momentum", "trust_coefficient"}),
}
SCHEDULE_FIELDS: Mapping[str, frozenset[str]] = {
    "constant": frozenset(),
    "linear": frozenset({"final_lr_frac"}),
    "cosine": frozenset({"final_lr_frac"}),
    "polynomial": frozenset({"final_lr_frac", "power"}),
    "inverse_sqrt": frozenset(),
    "wsd": frozenset({"final_lr_frac", "decay_frac"}),
    "step": frozenset({"step_every_steps", "step_factor"}),
}
# L2 decay (sgd, adam, lars) is added to the gradient; adamw and lamb shrink the weight itself by lr x weight_decay.
DEFAULT_WEIGHT_DECAY: Mapping[str, float] = {"sgd": 1e-4, "adam": 0.0, "adamw": 0.1, "lamb": 0.01, "lars": 1e-4}


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimOptions:
    """Section ``optim`` of a configuration: optimizer, its constants, weight decay and gradient clipping."""

    __repr__ = options_repr

    kind: str = option("adamw", "Optimizer.", applies_with="no components.optimizer", choices=tuple(OPTIMIZER_FIELDS))
    lr: float = option(
        2e-3, "Peak learning rate; the schedule multiplies it.", applies_with="no components.optimizer", gt=0
    )
    weight_decay: float | None = option(
        None,
        "Decay of weight matrices; unset: adamw 0.1, lamb 0.01, sgd and lars 1e-4, adam 0.",
        applies_with="no components.optimizer",
        ge=0,
    )
    decay_exclude: tuple[str, ...] = option(
        (), "More parameters without decay: patterns of names such as '*.pos'.", applies_with="a weight decay above 0"
    )
    groups: tuple[dict[str, str | float], ...] = option(
        (),
        "Groups of parameters, the first match wins: tables of match (a pattern of names), lr_scale, weight_decay and "
        "frozen_until_step (the number of first steps in which the group is not trained).",
        applies_with="no components.optimizer",
    )
    freeze: tuple[str, ...] = option(
        (),
        "Parameters that are not trained: patterns of names such as 'encoder.*'.",
        applies_with="no components.optimizer",
    )
    clip_norm: float = option(1.0, "Largest global gradient norm; 0 turns clipping off.", ge=0)
    beta1: float = option(
        0.9,
        "Decay of the gradient's running mean (adam, adamw, lamb).",
        applies_with="optim.kind = adam, adamw or lamb",
        ge=0,
        lt=1,
    )
    beta2: float = option(
        0.95,
        "Decay of the squared gradient's running mean (adam, adamw, lamb).",
        applies_with="optim.kind = adam, adamw or lamb",
        ge=0,
        lt=1,
    )
    eps: float = option(
        1e-8,
        "Added to the root of the second moment (adam, adamw, lamb).",
        applies_with="optim.kind = adam, adamw or lamb",
        gt=0,
    )
    momentum: float = option(0.9, "Momentum (sgd, lars).", applies_with="optim.kind = sgd or lars", ge=0, lt=1)
    nesterov: bool = option(False, "Nesterov's look-ahead (sgd).", applies_with="optim.kind = sgd")
    trust_coefficient: float = option(
        1e-3, "Layer step relative to the layer's norm (lars).", applies_with="optim.kind = lars", gt=0
    )

    @property
    def effective_weight_decay(self) -> float:
        """``weight_decay``, or the default of ``kind`` if it is unset."""
        return DEFAULT_WEIGHT_DECAY[self.kind] if self.weight_decay is None else self.weight_decay

    def problems(self) -> Iterator[tuple[str, Problem]]:
        """Fields that ``kind`` does not read, and Nesterov without momentum, by field name."""
        yield from _unused_fields(self, "optimizer", OPTIMIZER_FIELDS)
        for number, group in enumerate(self.groups, start=1):
            yield from (("groups", problem) for problem in _group_problems(number, group))
        if self.decay_exclude and self.kind in DEFAULT_WEIGHT_DECAY and not self.effective_weight_decay:
            yield (
                "decay_exclude",
                inert_problem(
                    f"decay_exclude {list(self.decay_exclude)} with weight decay 0",
                    "it names parameters that do not decay, and none does",
                    "optim.weight_decay=0.1, or leave optim.decay_exclude out",
                ),
            )
        if self.kind == "sgd" and self.nesterov and self.momentum == 0:
            yield (
                "nesterov",
                Problem(
                    given="nesterov = true with momentum = 0.0",
                    rule="Nesterov's look-ahead follows the momentum buffer, so momentum must be above 0",
                    consequence="there is nothing to look ahead along",
                    nearest="momentum = 0.9, or nesterov = false",
                ),
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleOptions:
    """Section ``schedule`` of a configuration: the learning rate over the run; ``schedules`` has the formulas."""

    __repr__ = options_repr

    kind: str = option(
        "cosine",
        "Shape of the learning rate after warm-up.",
        applies_with="no components.schedule",
        choices=tuple(SCHEDULE_FIELDS),
    )
    warmup_steps: int = option(
        0, "Steps of linear rise; step 0 has lr/warmup_steps, never 0.", applies_with="no components.schedule", ge=0
    )
    final_lr_frac: float = option(
        0.1,
        "Fraction of lr where the decay ends (linear, cosine, polynomial, wsd).",
        applies_with="schedule.kind = linear, cosine, polynomial or wsd",
        ge=0,
        le=1,
    )
    power: float = option(2.0, "Exponent (polynomial).", applies_with="schedule.kind = polynomial", gt=0)
    decay_frac: float = option(
        0.2,
        "Fraction of all steps spent in the final linear decay (wsd).",
        applies_with="schedule.kind = wsd",
        gt=0,
        le=1,
    )
    step_every_steps: int = option(
        1000, "Steps between two drops, counted from step 0 (step).", applies_with="schedule.kind = step", ge=1
    )
    step_factor: float = option(
        0.1, "Factor of each drop, or above 1 of each rise (step).", applies_with="schedule.kind = step", gt=0
    )

    def problems(self) -> Iterator[tuple[str, Problem]]:
        """Fields that ``kind`` does not read, by field name."""
        yield from _unused_fields(self, "schedule", SCHEDULE_FIELDS)


_GROUP_KEYS = ("lr_scale", "weight_decay", "frozen_until_step")


def _group_problems(number: int, group: Mapping[str, str | float]) -> Iterator[Problem]:
    """Problems of one table of ``optim.groups``."""
    example = 'match = "head.*", lr_scale = 10.0'
    wrong = ""
    if not isinstance(group.get("match"), str):
        wrong = "no match"
    elif unknown := sorted(group.keys() - {"match", *_GROUP_KEYS}):
        wrong = f"the unknown key {unknown[0]!r}"
    elif len(group) == 1:
        wrong = "none of lr_scale, weight_decay and frozen_until_step"
    else:
        for key in _GROUP_KEYS:
            value = group.get(key, 0)
            is_whole = key != "frozen_until_step" or (not isinstance(value, str) and value == value // 1)
            if isinstance(value, str) or not 0 <= value < float("inf") or not is_whole:
                wrong = f"{key} = {value!r}"
    if wrong:
        yield Problem(
            given=f"table {number} of optim.groups has {wrong}",
            rule="a table has match, a pattern of parameter names, and lr_scale or weight_decay, numbers from 0 on, or "
            "frozen_until_step, a whole number",
            consequence="it is unclear which parameters it changes, and how",
            nearest=f"[[optim.groups]] with {example}",
        )


def decay_steps(options: ScheduleOptions, total_steps: int) -> int:
    """Steps of the final decay of ``wsd``, at least 1."""
    return max(1, round(options.decay_frac * total_steps))


def schedule_problems(options: ScheduleOptions, total_steps: int) -> Iterator[tuple[str, Problem]]:
    """Problems of the schedule in a run of ``total_steps`` steps, by field of ``ScheduleOptions``."""
    if options.warmup_steps > total_steps:
        yield (
            "warmup_steps",
            Problem(
                given=f"warmup_steps = {options.warmup_steps} in a run of {total_steps} steps",
                rule="warm-up must end within the run",
                consequence="the learning rate would never reach lr",
                nearest=f"warmup_steps = {total_steps // 10}",
            ),
        )
    elif options.kind == "wsd" and options.warmup_steps + decay_steps(options, total_steps) > total_steps:
        last = decay_steps(options, total_steps)
        yield (
            "decay_frac",
            Problem(
                given=f"warmup_steps = {options.warmup_steps} and decay_frac = {options.decay_frac} "
                f"({last} steps) in a run of {total_steps} steps",
                rule="warm-up and final decay must not overlap",
                consequence=f"{options.warmup_steps + last - total_steps} steps would belong to both",
                nearest=f"decay_frac = {max(0, total_steps - options.warmup_steps) / total_steps:.3g}"
                if total_steps > options.warmup_steps
                else f"warmup_steps = {total_steps // 10}",
            ),
        )


def describe_rate(lr: float, schedule: object, total_steps: int) -> str:
    """The learning rate over the run in words; ``schedule`` may be the user's own."""
    rate = f"lr {lr:g}"
    if not isinstance(schedule, ScheduleOptions):
        rate += ", schedule of your own"
    elif schedule.kind == "constant":
        rate += " constant"
    elif "final_lr_frac" in SCHEDULE_FIELDS[schedule.kind]:
        rate += f" falling to {lr * schedule.final_lr_frac:g} at step {total_steps} ({schedule.kind})"
    else:
        rate += f" ({schedule.kind})"
    return rate


def _unused_fields(
    options: OptimOptions | ScheduleOptions, what: str, used_by: Mapping[str, frozenset[str]]
) -> Iterator[tuple[str, Problem]]:
    """Problems of fields that are set although ``kind`` does not read them."""
    read_fields = used_by.get(options.kind)
    if read_fields is None:  # an unknown kind is reported by its choices
        return
    special = frozenset[str]().union(*used_by.values())
    for field in fields(options):
        value: object = getattr(options, field.name)
        if field.name in special - read_fields and value != field.default:
            users = sorted(kind for kind, names in used_by.items() if field.name in names)
            yield (
                field.name,
                inert_problem(
                    f"{field.name} = {str(value).lower() if isinstance(value, bool) else value} "
                    f"with {what} kind {options.kind!r}",
                    f"{field.name} is read by {', '.join(users)}",
                    f"remove {field.name}, or choose kind = {users[0]!r}",
                ),
            )
