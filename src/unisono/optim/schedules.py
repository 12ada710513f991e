"""Learning rates as pure functions of the step.

Steps count from 0 and a run of ``total_steps`` has steps 0 … total_steps-1. With ``W = warmup_steps``:

* Warm-up: step ``t < W`` has ``lr * (t + 1) / W``; step ``W - 1`` is the first at full ``lr``. The rate of step 0 is not 0,
  because such a step would change nothing.
* Decay (linear, cosine, polynomial): progress is ``(t - W) / (total_steps - W)``, so step ``W`` has full ``lr``, and
  ``final_lr_frac`` would be reached at ``t = total_steps``, one past the last step; no step has rate 0 here either.
* wsd: full ``lr`` until ``total_steps - decay``, then linear with the same end.
* inverse_sqrt: ``lr * sqrt(max(W, 1) / (t + 1))``, which equals the warm-up at ``t = W - 1``.
* step: ``step_factor ** (t // step_every_steps)``, drops counted from step 0, warm-up included. A factor above 1 rises.

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
    if options.kind not in SCHEDULE_FIELDS:
        raise ConfigError(
            given=f"schedule kind {options.kind!r}",
            rule="the kind is one of " + ", ".join(SCHEDULE_FIELDS),
            consequence="there is no learning rate",
            nearest=nearest_name(options.kind, SCHEDULE_FIELDS),
        )
    wrong = [problem for _, problem in schedule_problems(options, total_steps)]
    if wrong:
        raise ConfigError(*wrong)
    factor, warmup = _factor(options, total_steps), options.warmup_steps

    def rate(step: int) -> float:
        return lr * (step + 1) / warmup if step < warmup else lr * factor(step)

    return rate


def _factor(options: ScheduleOptions, total_steps: int) -> Schedule:
    """The factor of the learning rate after warm-up."""
    start = total_steps - decay_steps(options, total_steps) if options.kind == "wsd" else options.warmup_steps

    def progress(step: int) -> float:
        return min(max((step - start) / max(total_steps - start, 1), 0.0), 1.0)

    def decay(weight: float) -> float:
        return options.final_lr_frac + (1.0 - options.final_lr_frac) * weight

    shapes: dict[str, Schedule] = {
        "constant": lambda step: 1.0,
        "linear": lambda step: decay(1.0 - progress(step)),
        "cosine": lambda step: decay(0.5 * (1.0 + math.cos(math.pi * progress(step)))),
        "polynomial": lambda step: decay((1.0 - progress(step)) ** options.power),
        "inverse_sqrt": lambda step: math.sqrt(max(options.warmup_steps, 1) / (step + 1)),
        "wsd": lambda step: decay(1.0 - progress(step)),
        "step": lambda step: options.step_factor ** (step // options.step_every_steps),
    }
    return shapes[options.kind]
