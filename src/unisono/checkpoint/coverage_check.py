"""Do blocks tile a box? Counted exactly, and without comparing every block with every other.

A sweep: along dim 0, what begins at a coordinate less what ends there is how the cover changes from there on, and where
the blocks (and the box itself, counted -1) cover nothing it must be nothing, as a function of the other dims; so for
those in turn. In a grid of N blocks what ends is what begins, and cancels: about 2 N steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

# Blocks that lie askew in all dims may take 2^dims steps each; no tensor that is cut has so many.
MOST_DIMS = 16

_Box = tuple[tuple[int, int], ...]  # (begin, end) in each dim


def first_coverage_error(
    shape: Sequence[int], blocks: Iterable[tuple[Sequence[int], Sequence[int]]]
) -> tuple[list[int], int] | None:
    """The first element of a tensor, in row-major order, that is not in exactly one of ``blocks``, and in how many it is.

    None where they hold each element once. ``blocks`` are (offset, shape) each and lie inside the tensor of ``shape``.
    """
    counts: dict[_Box, int] = {tuple((0, extent) for extent in shape): -1}
    for offset, extents in blocks:
        box = tuple((begin, begin + extent) for begin, extent in zip(offset, extents, strict=True))
        counts[box] = counts.get(box, 0) + 1
    found = _first_nonzero(counts)
    return None if found is None else (found[0], found[1] + 1)


def _first_nonzero(counts: Mapping[_Box, int]) -> tuple[list[int], int] | None:
    """The first element at which the counts of the boxes around it do not add up to zero, and what they add up to."""
    changes: dict[int, dict[_Box, int]] = {}
    for box, count in counts.items():
        if not count:
            continue
        if not box:
            return [], count
        (begin, end), rest = box[0], box[1:]
        for place, change in ((begin, count), (end, -count)):
            there = changes.setdefault(place, {})
            there[rest] = there.get(rest, 0) + change
    # what begins ends: the changes add up to nothing, so where all others are nothing the last one is
    for place in sorted(changes)[:-1]:
        found = _first_nonzero(changes[place])
        if found is not None:
            return [place, *found[0]], found[1]
    return None
