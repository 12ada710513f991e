"""Pipeline schedules: the order in which each rank runs its passes, and the blocks of each stage. Plain data, equal on all ranks.

A model is split into stages, ``chunks`` per rank. The micro-batches of a step go through all of them.

gpipe          all forward passes, then all backward passes (Huang et al. 2019); activations of all micro-batches are held
1f1b           after a warm-up one forward, one backward (Narayanan et al. 2019): at most ``pp - rank`` micro-batches are held
interleaved    1f1b with ``chunks`` stages per rank, assigned in turn: the bubble is ``chunks`` times shorter (Narayanan et al.
               2021)
zbv            two stages per rank, in a V; weight gradients are computed later, when a rank would wait (Qi et al. 2023, Zero
               Bubble; 2024, Controllable Memory): almost no bubble, with the memory of 1f1b

In each of them, micro-batches of one stage and kind of pass run in ascending order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, count
from typing import Literal, NamedTuple, cast

from unisono.errors import PlanError
from unisono.plan.options import Schedule

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One pass of one micro-batch through one stage: F forward, B backward; or backward in two, I for inputs, W for weights."""

    kind: Kind
    stage: int
    micro: int


def stage_index(schedule: Schedule, pp: int, rank: int, chunk: int) -> int:
    """The stage that pipeline rank ``rank`` runs as its stage number ``chunk``."""
    if schedule == "zbv" and chunk == 1:
        return 2 * pp - 1 - rank
    return chunk * pp + rank


@cache
def schedule_order(schedule: Schedule, pp: int, chunks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """The passes of each rank, in order. Raises ValueError if ``interleaved`` gets no multiple of ``pp`` micro-batches."""
    if schedule == "interleaved" and micro_batches % pp:
        raise ValueError(
            f"{micro_batches} micro-batches are no multiple of {pp}: interleaved ranks would wait for each other"
        )
    if schedule == "zbv":
        return tuple(_zbv(pp, rank, micro_batches) for rank in range(pp))
    return tuple(_looped(schedule, pp, rank, chunks, micro_batches) for rank in range(pp))


def forward_order(schedule: Schedule, pp: int, rank: int, chunks: int, micro_batches: int) -> tuple[Action, ...]:
    """The forward passes of one rank, for evaluation, with any number of micro-batches."""
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
    """The pattern of section 6 of Qi et al. 2023 (Zero Bubble): kind of pass and stage (0 down the V, 1 up). Micro-batches are
    numbered as they come; at most ``2 pp`` activations are held. With fewer micro-batches than fill the V, passes are left out.
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
    stages = {chunk: stage_index("zbv", pp, rank, int(chunk)) for chunk in "01"}
    actions = [Action(cast("Kind", name[0]), stages[name[1]], next(micros[name])) for name in pattern]
    return tuple(action for action in actions if action.micro < micro_batches)


def balance_stages(blocks: Sequence[float], before: float, after: float, num_stages: int) -> tuple[int, ...]:
    """Number of blocks of each stage, such that the largest cost of a stage is minimal (exact, by dynamic programming).

    ``blocks`` has the cost of each block; ``before`` is added to the first stage and ``after`` to the last. Every stage has a
    block. Of equally good splits the one with the shorter first stages is taken. Raises PlanError if there are too few blocks.
    """
    if num_stages > len(blocks):
        raise PlanError(
            given=f"a model of {len(blocks)} blocks in {num_stages} stages",
            rule="every stage of a pipeline has at least one block",
            consequence="a stage would only pass data on",
            nearest=f"at most {len(blocks)} stages: a smaller plan.pp, or schedule='1f1b' with one stage per rank",
        )
    sums = [0.0, *accumulate(blocks)]
    count = len(blocks)
    # heaviest[k]: largest cost of the best split of the first k blocks into the stages so far
    # starts[s][k]: first block of the last stage of that split
    heaviest = [before + total for total in sums]
    starts: list[list[int]] = []
    for stages in range(2, num_stages + 1):
        extra = after if stages == num_stages else 0.0
        costs, best = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(stages, count + 1):
            costs[end], best[end] = min(
                (max(heaviest[start], sums[end] - sums[start] + extra), start) for start in range(stages - 1, end)
            )
        heaviest = costs
        starts.append(best)
    ends = [count]
    for best in reversed(starts):
        ends.insert(0, best[ends[0]])
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))
