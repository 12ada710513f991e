"""Layouts that runs had, with the step times that they took, as the next search learns from them. Imports no torch.

A run is recorded with its layout and without a prediction: step times are predicted again with each search, by the constants and
the figures of the device as they are then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from unisono.planner.devices import Device
from unisono.planner.layout import Layout, LayoutError
from unisono.planner.layout_time import layout_time
from unisono.planner.learned import MOST_WAIT_FRAC, LearnedFactors, Ratio
from unisono.planner.model_shape import ModelShape

# Parameters of a model over those of another, up to which runs of one are a guide for the other: steps of tiny models are calls
# of kernels, which no constant is of.
ALIKE: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredLayout:
    """What a run took.

    Attributes:
        layout: The layout of its steps.
        step_s: Seconds per step, without pauses: the median over the logged steps.
        steps: Steady steps of which that is.
        data_wait_frac: Share of the time in which it waited for data, from 0 to 1.
        at_s: When the run ended, in seconds since 1970.
    """

    layout: Layout
    step_s: float
    steps: int
    data_wait_frac: float
    at_s: float

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that no run has."""
        if not (0 < self.step_s < math.inf and self.steps > 0 and 0 <= self.data_wait_frac <= 1 and self.at_s >= 0):
            raise ValueError(f"a run of {self.steps} steps of {self.step_s} s")


def predicted_steps_s(layouts: Sequence[Layout]) -> list[float]:
    """Seconds of a step of each of ``layouts``; NaN where its numbers, as a file may have them, give none."""
    try:
        with np.errstate(all="ignore"):
            steps_s = layout_time(layouts).total if layouts else np.zeros(0)
    except (ArithmeticError, ValueError):
        if len(layouts) == 1:
            return [math.nan]
        return [step_s for layout in layouts for step_s in predicted_steps_s([layout])]
    return [float(step_s) if 0 < step_s < math.inf else math.nan for step_s in steps_s]


def learned_factors(runs: Sequence[MeasuredLayout], model: ModelShape, device: Device) -> LearnedFactors:
    """The corrections for ``model`` on ``device``, by runs of models with a fourth to four times its parameters.

    Args:
        runs: What was recorded, from the oldest to the newest.
        model: The model that is planned for.
        device: The device, with its figures; runs were on one of the same name.
    """
    used: list[tuple[MeasuredLayout, Layout]] = []
    for run in runs:
        params = run.layout.model.params
        alike = params <= ALIKE * model.params and model.params <= ALIKE * params
        if run.layout.device.name == device.name and alike and run.data_wait_frac <= MOST_WAIT_FRAC:
            with suppress(LayoutError):  # the device was described otherwise then
                used.append((run, replace(run.layout, device=device, learned_factor=1.0)))
    predicted = predicted_steps_s([layout for _, layout in used])
    return LearnedFactors(
        ratios=[
            Ratio(prediction=repr(layout), axes=layout.shared_axes, ratio=run.step_s / step_s)
            for (run, layout), step_s in zip(used, predicted, strict=True)
            if not math.isnan(step_s)
        ]
    )
