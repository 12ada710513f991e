"""Simulates pipeline schedules: how long they take, and how many activations each rank holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from unisono.plan.pipeline_schedule import Action


def dependencies(action: Action, last: int) -> list[Action]:
    """The passes that must finish before ``action``; ``last`` is the index of the last stage."""
    kind, stage, micro = action
    if kind == "F":
        return [Action("F", stage - 1, micro)] if stage else []
    if kind == "W":
        return [Action("I", stage, micro)]
    above = [Action(kind, stage + 1, micro)] if stage < last else []
    return [Action("F", stage, micro), *above]


class Simulation(NamedTuple):
    """``makespan`` in the unit of the costs; ``peak`` is the largest number of activations that each rank holds at once."""

    makespan: float
    peak: tuple[int, ...]


def simulate(orders: Sequence[Sequence[Action]], costs: Callable[[Action], float]) -> Simulation:
    """Run ``orders`` with passes that take ``costs(action)`` and transfers that take no time.

    Raises ValueError if the ranks deadlock.
    """
    last = max(action.stage for order in orders for action in order)
    finished: dict[Action, float] = {}
    clock, place = [0.0] * len(orders), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while place[rank] < len(order):
                action = order[place[rank]]
                earlier = dependencies(action, last)
                if not finished.keys() >= set(earlier):
                    break
                start = max([clock[rank], *map(finished.__getitem__, earlier)])
                clock[rank] = finished[action] = start + costs(action)
                place[rank] += 1
                moved = True
    stuck = {rank: order[place[rank]] for rank, order in enumerate(orders) if place[rank] < len(order)}
    if stuck:
        raise ValueError(f"ranks wait for each other: {stuck}")
    return Simulation(max(clock), tuple(map(_peak, orders)))


def _peak(order: Sequence[Action]) -> int:
    held = peak = 0
    for action in order:
        held += action.kind == "F"
        peak = max(peak, held)
        held -= action.kind in ("B", "W")
    return peak
