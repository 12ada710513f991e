"""The step time of a plan, from times of its ranks on one device and the measured speed of the links between them.

    step = a rank's own work + messages and sums, one after the other + waiting for other stages and for the slowest rank

The ranks' own work is timed (``train.rank_timing``). What they exchange is counted, and takes as long as messages of that size
were measured to add to ranks that compute (``unisono plan calibrate``). Nothing is taken to overlap: on one host, what
communicates also computes.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

from unisono.errors import ConfigError
from unisono.measure.calibration import Calibration
from unisono.plan.plan import Plan
from unisono.train.comm_stats import expected_seconds
from unisono.train.rank_timing import RankTiming

# For each stage before or behind, the part of a rank's work on one micro-batch for which it waits: all of it where a rank has one
# stage; half where it has two; and where gradients of weights fill the gaps, half of a forward pass, which is a third
# (Narayanan et al. 2021, section 2.2; Qi et al. 2024, arXiv 2401.10241).
_BUBBLE: Final[Mapping[str, float]] = {"gpipe": 1.0, "1f1b": 1.0, "interleaved": 1 / 2, "zbv": 1 / 6}
_QUARTILES: Final = 1.349  # distance of the quartiles of a normal distribution, in standard deviations


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedPlan:
    """The predicted step of a plan.

    Attributes:
        work_s: Seconds of the rank whose own work takes longest.
        communication_s: Seconds of messages and sums by axis of the mesh.
        bubble_s: Seconds in which that rank waits for other pipeline stages.
        straggler_s: Seconds by which the slowest of all ranks is later than a usual one, as the times of one rank vary.
    """

    work_s: float
    communication_s: Mapping[str, float]
    bubble_s: float
    straggler_s: float

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.work_s + sum(self.communication_s.values()) + self.bubble_s + self.straggler_s


def predict_step(plan: Plan, timings: Sequence[RankTiming], links: Calibration) -> TimedPlan:
    """The step of ``plan``, whose ranks of each place in the pipeline took ``timings``.

    Args:
        plan: The plan.
        timings: Times of its ranks.
        links: What the links of this host were measured to do.

    Raises:
        ConfigError: The links that the plan uses were not measured.
    """
    slowest = max(timings, key=lambda timing: timing.step_s)
    communication_s: dict[str, float] = {}
    for group in slowest.traffic:
        seconds = expected_seconds(group, links, socket.gethostname(), operation="all_reduce_in_step")
        if seconds is None:
            raise ConfigError(
                given=f"a plan whose {group.ranks} ranks exchange bytes over {group.transport}",
                rule="the time of messages follows from what the link was measured to do",
                consequence="no step time was predicted",
                nearest=f"unisono plan calibrate --processes {group.ranks}, once on this machine",
            )
        communication_s[group.axis] = communication_s.get(group.axis, 0.0) + seconds
    stages = plan.mesh.pp
    each_s = slowest.step_s / plan.batch.accumulation
    bubble_s = _BUBBLE[plan.pipeline.schedule] * (stages - 1) * each_s if stages > 1 else 0.0
    return TimedPlan(
        work_s=slowest.step_s,
        communication_s=communication_s,
        bubble_s=bubble_s,
        straggler_s=_largest_of(plan.mesh.world_size) * slowest.spread_frac * slowest.step_s / _QUARTILES,
    )


def _largest_of(count: int) -> float:
    """The expected largest of ``count`` numbers from the standard normal distribution (Blom 1958, p. 71)."""
    return NormalDist().inv_cdf((count - 3 / 8) / (count + 1 / 4))
