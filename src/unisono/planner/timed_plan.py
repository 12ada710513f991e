"""The step time of a plan, from times of its ranks on one device and the measured speed of the links between them.

    step = work of the slowest rank + its collectives + its wait for other pipeline stages + its wait for stragglers

Work is timed (``train.rank_timing``). Messages are counted, and each takes as long as one of its size was measured to add to
ranks that compute (``unisono plan calibrate``). No communication is taken to overlap with work: on one host the same
processors do both. The wait for other stages follows from the order of the passes and the time of each pass.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

from unisono.errors import ConfigError
from unisono.measure.calibration import Calibration
from unisono.parallel.traffic import GroupTraffic
from unisono.plan.pipeline_schedule import Kind, schedule_order
from unisono.plan.plan import Plan
from unisono.planner.pipeline_timeline import TimedPass, end_s, pipeline_timeline
from unisono.train.comm_stats import expected_seconds
from unisono.train.rank_timing import RankTiming

# nine of ten steps of two measured sweeps lay between the prediction divided and multiplied by 1 + this
# (benchmarks/planner/measured_layouts.py: 60 layouts on two ranks of one host, in November 2026)
SPREAD: Final = 0.18
_QUARTILES: Final = 1.349  # distance of the quartiles of a normal distribution, in standard deviations


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedPlan:
    """The predicted step of a plan.

    Attributes:
        work_s: Seconds of the rank whose own work takes longest.
        communication_s: Seconds of that rank's collectives, by axis of the mesh.
        bubble_s: Seconds in which that rank waits for other pipeline stages and their messages.
        straggler_s: Seconds by which the slowest of all ranks is later than a usual one, as the times of one rank vary.
        timeline: The passes of each pipeline rank; empty without a pipeline.
    """

    work_s: float
    communication_s: Mapping[str, float]
    bubble_s: float
    straggler_s: float
    timeline: Sequence[Sequence[TimedPass]] = ()

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.work_s + sum(self.communication_s.values()) + self.bubble_s + self.straggler_s

    @property
    def parts_s(self) -> dict[str, float]:
        """Seconds of each part that is not 0, by name; the name of an axis stands for its collectives."""
        others = {"pipeline": self.bubble_s, "slowest rank": self.straggler_s}
        parts = {"work": self.work_s, **self.communication_s, **others}
        return {name: seconds for name, seconds in parts.items() if seconds}


def predict_step(plan: Plan, timings: Sequence[RankTiming], links: Calibration) -> TimedPlan:
    """The step of ``plan``; ``timings`` has one rank for each pipeline rank.

    Args:
        plan: The plan.
        timings: Times of its ranks.
        links: What the links of this host were measured to do.

    Raises:
        ConfigError: The links that the plan uses were not measured.
    """
    slowest = max(timings, key=lambda timing: timing.step_s)
    communication_s: dict[str, float] = {}
    message_s = 0.0
    for group in slowest.traffic:
        seconds = _seconds_of(group, links)
        if group.operation == "send":
            message_s = max(message_s, seconds / sum(messages.count for messages in group.messages.values()))
        else:
            communication_s[group.axis] = communication_s.get(group.axis, 0.0) + seconds
    timeline = _timeline(plan, timings, message_s) if plan.mesh.pp > 1 else []
    own_s = sum(passes.seconds for passes in slowest.passes) * plan.batch.accumulation
    return TimedPlan(
        work_s=slowest.step_s,
        communication_s=communication_s,
        bubble_s=max(0.0, end_s(timeline) - own_s),
        straggler_s=_largest_of(plan.mesh.world_size) * slowest.spread_frac * slowest.step_s / _QUARTILES,
        timeline=timeline,
    )


def _seconds_of(group: GroupTraffic, links: Calibration) -> float:
    seconds = expected_seconds(group, links, socket.gethostname(), in_step=True)
    if seconds is None:
        raise ConfigError(
            given=f"a plan whose {group.ranks} ranks exchange bytes over {group.transport}",
            rule="the time of messages follows from what the link was measured to do",
            consequence="no step time was predicted",
            nearest=f"unisono plan calibrate --processes {group.ranks}, once on this machine",
        )
    return seconds


def _timeline(plan: Plan, timings: Sequence[RankTiming], message_s: float) -> list[list[TimedPass]]:
    """The passes of each pipeline rank."""
    seconds: dict[tuple[Kind, int], float] = {}
    for timing in timings:
        for kind, stage, taken in timing.passes:
            seconds[kind, stage] = max(taken, seconds.get((kind, stage), 0.0))
    order = schedule_order(plan.pipeline.schedule, plan.mesh.pp, plan.stages_per_rank, plan.batch.accumulation)
    return pipeline_timeline(order, seconds, message_s=message_s)


def _largest_of(count: int) -> float:
    """The expected largest of ``count`` numbers from the standard normal distribution (Blom 1958, p. 71)."""
    return NormalDist().inv_cdf((count - 3 / 8) / (count + 1 / 4))
