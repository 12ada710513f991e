"""The order in which the ranks of a pipeline run their passes: plain data, computed alike on every rank.

A model is cut into pieces (stages), several per rank where ``chunks`` is above 1. A step's micro-batches go through all of them.

gpipe          all forward passes, then all backward passes (Huang et al. 2019); every micro-batch's activations are held at once
1f1b           after a warm-up one forward, one backward (Narayanan et al. 2019): at most ``pp - rank`` micro-batches are held
interleaved    the same with ``chunks`` pieces per rank, dealt round: a bubble ``chunks`` times shorter (Narayanan et al. 2021)
zbv            two pieces per rank in a V, and the gradients of weights computed later, where a rank would wait (Qi et al. 2023,
               Zero Bubble; 2024, Controllable Memory): next to no bubble in the memory of 1f1b

Of one stage and kind, micro-batches come in ascending order in all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import count
from typing import Literal, NamedTuple, cast

from unisono.plan.options import Schedule

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One pass of one micro-batch through one stage: F forward, B backward; or backward in two, I for inputs, W for weights."""

    kind: Kind
    stage: int
    micro: int


def stage_index(schedule: Schedule, pp: int, rank: int, chunk: int) -> int:
    """The stage that pipeline rank ``rank`` runs as its piece number ``chunk``."""
    if schedule == "zbv" and chunk == 1:
        return 2 * pp - 1 - rank
    return chunk * pp + rank


@cache
def schedule_order(schedule: Schedule, pp: int, chunks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Each rank's passes in order, ranks in order. ``interleaved`` takes micro-batches in groups of ``pp``, whole ones."""
    if schedule == "interleaved" and micro_batches % pp:
        raise ValueError(
            f"{micro_batches} micro-batches are no multiple of {pp}: interleaved ranks would wait for each other"
        )
    if schedule == "zbv":
        return tuple(_zbv(pp, rank, micro_batches) for rank in range(pp))
    return tuple(_looped(schedule, pp, rank, chunks, micro_batches) for rank in range(pp))


def forward_order(schedule: Schedule, pp: int, rank: int, chunks: int, micro_batches: int) -> tuple[Action, ...]:
    """The passes of one rank where nothing is trained; any number of micro-batches."""
    turns = _turns(pp, chunks, micro_batches)
    return tuple(Action("F", stage_index(schedule, pp, rank, chunk), micro) for chunk, micro in turns)


def _turns(pp: int, chunks: int, micro_batches: int) -> list[tuple[int, int]]:
    """(chunk, micro-batch): ``pp`` micro-batches go through one chunk, then through the next; the last few may be fewer."""
    return [
        (chunk, micro)
        for start in range(0, micro_batches, pp)
        for chunk in range(chunks)
        for micro in range(start, min(start + pp, micro_batches))
    ]


def _looped(schedule: Schedule, pp: int, rank: int, chunks: int, micro_batches: int) -> tuple[Action, ...]:
    """Warm-up of forward passes, pairs of one forward and one backward pass, cool-down of backward passes."""
    forward = forward_order(schedule, pp, rank, chunks, micro_batches)
    turns = _turns(pp, chunks, micro_batches)
    backward = [Action("B", (chunks - 1 - chunk) * pp + rank, micro) for chunk, micro in turns]
    ahead = len(forward)
    if schedule == "1f1b":
        ahead = min(ahead, pp - 1 - rank)
    elif schedule == "interleaved":
        ahead = min(ahead, 2 * (pp - 1 - rank) + (chunks - 1) * pp)
    steady = [action for pair in zip(forward[ahead:], backward, strict=False) for action in pair]
    return (*forward[:ahead], *steady, *backward[len(forward) - ahead :])


def _zbv(pp: int, rank: int, micro_batches: int) -> tuple[Action, ...]:
    """The pattern of section 6 of Qi et al. 2023 (Zero Bubble): passes of kind and piece (0 down the V, 1 up), micro-batches
    numbered as they come. It holds ``2 pp`` pieces at most. Fewer micro-batches than fill the V leave their places empty.
    """
    many = max(micro_batches, 2 * pp - 1)
    steady = ("F0", "I0", "W0", "F1", "I1", "W1")
    pattern = [
        *("F0",) * (2 * (pp - rank) - 1),
        *("F1", "F0") * rank,
        *("F1", "I1", "W1") * (pp - rank),
        *steady * (many - 2 * pp + rank + 1),
        *steady[1:] * (pp - rank - 1),
        *("I0", "I1") * rank,
        *("I0", "W0") * (pp - rank),
        *("W1",) * rank,
        *("W0",) * rank,
    ]
    micros: dict[str, Iterator[int]] = defaultdict(count)
    stages = {piece: stage_index("zbv", pp, rank, int(piece)) for piece in "01"}
    actions = [Action(cast("Kind", name[0]), stages[name[1]], next(micros[name])) for name in pattern]
    return tuple(action for action in actions if action.micro < micro_batches)


def dependencies(action: Action, last: int) -> list[Action]:
    """What must be finished before ``action``, where ``last`` is the number of the last stage."""
    kind, stage, micro = action
    if kind == "F":
        return [Action("F", stage - 1, micro)] if stage else []
    if kind == "W":
        return [Action("I", stage, micro)]
    above = [Action(kind, stage + 1, micro)] if stage < last else []
    return [Action("F", stage, micro), *above]


class Simulation(NamedTuple):
    """``makespan`` in the unit of the costs; ``peak`` is, per rank, how many (stage, micro-batch) it held at most at once."""

    makespan: float
    peak: tuple[int, ...]


def simulate(orders: Sequence[Sequence[Action]], costs: Callable[[Action], float]) -> Simulation:
    """Run ``orders`` with passes that take ``costs(action)`` and transfers that take none.

    Raises ValueError where the ranks would wait for each other for ever.
    """
    last = max(action.stage for each in orders for action in each)
    finished: dict[Action, float] = {}
    clock, place = [0.0] * len(orders), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, mine in enumerate(orders):
            while place[rank] < len(mine):
                action = mine[place[rank]]
                waits = dependencies(action, last)
                if any(each not in finished for each in waits):
                    break
                start = max([clock[rank], *(finished[each] for each in waits)])
                clock[rank] = finished[action] = start + costs(action)
                place[rank] += 1
                moved = True
    stuck = {rank: mine[place[rank]] for rank, mine in enumerate(orders) if place[rank] < len(mine)}
    if stuck:
        raise ValueError(f"ranks wait for each other: {stuck}")
    return Simulation(max(clock), tuple(map(_peak, orders)))


def _peak(mine: Sequence[Action]) -> int:
    held = peak = 0
    for action in mine:
        held += action.kind == "F"
        peak = max(peak, held)
        held -= action.kind in ("B", "W")
    return peak
