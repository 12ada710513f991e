"""When each pass of a pipeline schedule begins and ends, from the durations of its passes. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from unisono.plan.pipeline_schedule import Action, Kind


class TimedPass(NamedTuple):
    """A pass of a rank, in seconds from the begin of the step."""

    action: Action
    begin_s: float
    end_s: float


def pipeline_timeline(
    order: Sequence[Sequence[Action]], seconds: Mapping[tuple[Kind, int], float], *, message_s: float = 0.0
) -> list[list[TimedPass]]:
    """The passes of each rank, each as early as its rank is free and what it needs has arrived.

    A forward pass needs the hidden state of the stage before, a backward pass that of its own stage and the gradient of the stage
    behind. The gradient of weights needs the pass that left it out.

    Args:
        order: The passes of each rank (``schedule_order``).
        seconds: Duration of a pass by kind and stage.
        message_s: What a hidden state or a gradient takes to another rank.

    Raises:
        ValueError: A pass waits for one that comes later: the order cannot be run.
    """
    rank_of = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    last_stage = max(rank_of)
    ends: dict[tuple[str, int, int], float] = {}
    timeline: list[list[TimedPass]] = [[] for _ in order]

    def ready_s(action: Action) -> float | None:
        """When what a pass needs has arrived; None if it is not sent yet."""
        arrives = 0.0
        for kind, stage in _needed(action, last_stage):
            end = ends.get((kind, stage, action.micro))
            if end is None:
                return None
            arrives = max(arrives, end + (message_s if rank_of[stage] != rank_of[action.stage] else 0.0))
        return arrives

    while any(len(done) < len(actions) for done, actions in zip(timeline, order, strict=True)):
        before = len(ends)
        for done, actions in zip(timeline, order, strict=True):
            free = done[-1].end_s if done else 0.0
            for action in actions[len(done) :]:
                ready = ready_s(action)
                if ready is None:
                    break
                begin = max(free, ready)
                free = begin + seconds[action.kind, action.stage]
                done.append(TimedPass(action, begin, free))
                # the gradient of a stage's inputs is what B and I have in common
                ends["B" if action.kind == "I" else action.kind, action.stage, action.micro] = free
        if len(ends) == before:
            waiting = [
                actions[len(done)] for done, actions in zip(timeline, order, strict=True) if len(done) < len(actions)
            ]
            raise ValueError(f"passes that wait for later ones: {waiting}")
    return timeline


def _needed(action: Action, last_stage: int) -> list[tuple[Kind, int]]:
    if action.kind == "F":
        return [("F", action.stage - 1)] if action.stage else []
    if action.kind == "W":
        return [("B", action.stage)]
    return [("F", action.stage), *([("B", action.stage + 1)] if action.stage < last_stage else [])]


def end_s(timeline: Sequence[Sequence[TimedPass]]) -> float:
    """When the last pass ends."""
    return max((passes[-1].end_s for passes in timeline if passes), default=0.0)
