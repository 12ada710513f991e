"""Learning rates as pure functions of the step.

Steps count from 0 and a run of ``total_steps`` has steps 0 … total_steps-1. With ``W = warmup_steps``:

* Warm-up: step ``t < W`` has ``lr * (t + 1) / W``; step ``W - 1`` is the first at full ``lr``. The rate of step 0 is not 0,
  because such a step would change nothing.
* Decay (linear, cosine, polynomial): progress is ``(t - W) / (total_steps - W)``, so step ``W`` has full ``lr``, and
  ``final_lr_frac`` would be reached at ``t = total_steps``, one past the last step; no step has rate 0 here either.
* wsd: full ``lr`` until ``total_steps - decay``, then linear with the same end.
* inverse_sqrt: ``lr * sqrt(max(W, 1) / (t + 1))``, which equals the warm-up at ``t = W - 1``.
* step: ``step_factor ** (t // step_every_steps)``, drops counted from step 0, warm-up included.

After the end a decay stays at its final value. There are no schedules that read the loss: they could not be resumed from a
step number alone.

Sources: cosine, Loshchilov & Hutter 2017 (without restarts); inverse square root, Vaswani et al. 2017; warmup-stable-decay,
Hu et al. 2024 (MiniCPM).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from unisono.errors import ConfigError, nearest_name
from unisono.optim.options import SCHEDULE_FIELDS, ScheduleOptions, decay_steps, schedule_problems

Schedule = Callable[[int], float]


def build_schedule(options: ScheduleOptions, total_steps: int, lr: float = 1.0) -> Schedule:
    """Return the learning rate as a function of the 0-based step.

    Args:
        total_steps: Steps of the run.
        lr: Peak learning rate; with the default 1 the function returns a factor.

    Raises:
        ConfigError: The kind is unknown, or warm-up and decay do not fit into ``total_steps``.

    Source:
        Loshchilov & Hutter 2017 (cosine), Vaswani et al. 2017 (inverse square root), Hu et al. 2024 (warmup-stable-decay).

    >>> rate = build_schedule(ScheduleOptions(kind="linear", warmup_steps=2, final_lr_frac=0.0), total_steps=6, lr=4.0)
    >>> [rate(step) for step in range(7)]
    [2.0, 4.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    """
    shapes: dict[str, Callable[[ScheduleOptions, int], Schedule]] = {
        "constant": constant,
        "linear": linear,
        "cosine": cosine,
        "polynomial": polynomial,
        "inverse_sqrt": inverse_sqrt,
        "wsd": warmup_stable_decay,
        "step": stepwise,
    }
    if options.kind not in shapes:
        raise ConfigError(
            given=f"schedule kind {options.kind!r}",
            rule="the kind is one of " + ", ".join(SCHEDULE_FIELDS),
            consequence="there is no learning rate",
            nearest=nearest_name(options.kind, SCHEDULE_FIELDS),
        )
    wrong = [problem for _, problem in schedule_problems(options, total_steps)]
    if wrong:
        raise ConfigError(*wrong)
    shape = shapes[options.kind](options, total_steps)
    warmup = options.warmup_steps

    def rate(step: int) -> float:
        return lr * (step + 1) / warmup if step < warmup else lr * shape(step)

    return rate


def constant(options: ScheduleOptions, total_steps: int) -> Schedule:
    """Constant rate of 1.

    >>> constant(ScheduleOptions(), 10)(7)
    1.0
    """
    return lambda step: 1.0


def linear(options: ScheduleOptions, total_steps: int) -> Schedule:
    """Linear decay from 1 to ``final_lr_frac``.

    >>> [linear(ScheduleOptions(final_lr_frac=0.5), 4)(step) for step in (0, 2, 4, 5)]
    [1.0, 0.75, 0.5, 0.5]
    """
    progress = _progress(options.warmup_steps, total_steps)
    return lambda step: _between(options.final_lr_frac, 1.0 - progress(step))


def cosine(options: ScheduleOptions, total_steps: int) -> Schedule:
    """Half a cosine period from 1 to ``final_lr_frac``.

    >>> [round(cosine(ScheduleOptions(final_lr_frac=0.0), 10)(step), 6) for step in (0, 5, 10, 11)]
    [1.0, 0.5, 0.0, 0.0]
    """
    progress = _progress(options.warmup_steps, total_steps)
    return lambda step: _between(options.final_lr_frac, 0.5 * (1.0 + math.cos(math.pi * progress(step))))


def polynomial(options: ScheduleOptions, total_steps: int) -> Schedule:
    """Polynomial decay ``(1 - progress) ** power`` from 1 to ``final_lr_frac``.

    >>> [polynomial(ScheduleOptions(power=2.0, final_lr_frac=0.0), 4)(step) for step in (0, 1, 2, 4)]
    [1.0, 0.5625, 0.25, 0.0]
    """
    progress = _progress(options.warmup_steps, total_steps)
    return lambda step: _between(options.final_lr_frac, (1.0 - progress(step)) ** options.power)


def inverse_sqrt(options: ScheduleOptions, total_steps: int) -> Schedule:
    """Inverse square root decay ``sqrt(warmup_steps / (step + 1))``, independent of the length of the run.

    >>> [inverse_sqrt(ScheduleOptions(warmup_steps=4), 100)(step) for step in (3, 15, 63)]
    [1.0, 0.5, 0.25]
    """
    start = max(options.warmup_steps, 1)
    return lambda step: math.sqrt(start / (step + 1))


def warmup_stable_decay(options: ScheduleOptions, total_steps: int) -> Schedule:
    """Rate of 1 until the last ``decay_frac`` of the run, then linear decay to ``final_lr_frac``.

    >>> [warmup_stable_decay(ScheduleOptions(decay_frac=0.4, final_lr_frac=0.0), 10)(step) for step in (5, 6, 8, 10)]
    [1.0, 1.0, 0.5, 0.0]
    """
    progress = _progress(total_steps - decay_steps(options, total_steps), total_steps)
    return lambda step: _between(options.final_lr_frac, 1.0 - progress(step))


def stepwise(options: ScheduleOptions, total_steps: int) -> Schedule:
    """Rate multiplied by ``step_factor`` every ``step_every_steps`` steps.

    >>> [stepwise(ScheduleOptions(step_every_steps=2, step_factor=0.5), 9)(step) for step in range(5)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    return lambda step: options.step_factor ** (step // options.step_every_steps)


def _progress(start: int, end: int) -> Schedule:
    """Linear progress: 0 up to ``start``, 1 from ``end`` on."""
    return lambda step: min(max((step - start) / max(end - start, 1), 0.0), 1.0)


def _between(low: float, weight: float) -> float:
    return low + (1.0 - low) * weight
