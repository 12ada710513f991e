"""Which blocks go into which piece of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from unisono.errors import PlanError


def balance_stages(blocks: Sequence[float], before: float, after: float, pieces: int) -> tuple[int, ...]:
    """How many blocks each piece gets so that the heaviest piece is as light as can be (dynamic programming, exact).

    ``blocks`` are their weights, ``before`` and ``after`` those of what the first and the last piece have besides. Every piece
    has a block. Among equals the first pieces are the shorter ones. Raises PlanError where there are too few.
    """
    if pieces > len(blocks):
        raise PlanError(
            given=f"a model of {len(blocks)} blocks in {pieces} pieces",
            rule="every piece of a pipeline has at least one block",
            consequence="a stage would only pass data on",
            nearest=f"at most {len(blocks)} pieces: a smaller plan.pp, or schedule='1f1b' with one piece per rank",
        )
    sums = [0.0, *accumulate(blocks)]
    count = len(blocks)
    # heaviest[k]: of the best way to spread the first k blocks over the pieces so far; cuts[p][k]: where its last piece begins
    heaviest = [before + total for total in sums]
    cuts: list[list[int]] = []
    for piece in range(2, pieces + 1):
        extra = after if piece == pieces else 0.0
        here, best = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(piece, count + 1):
            here[end], best[end] = min(
                (max(heaviest[cut], sums[end] - sums[cut] + extra), cut) for cut in range(piece - 1, end)
            )
        heaviest = here
        cuts.append(best)
    ends = [count]
    for best in reversed(cuts):
        ends.insert(0, best[ends[0]])
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))
