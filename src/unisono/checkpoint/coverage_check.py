"""Checks exactly whether blocks cover every element of a tensor once, without comparing all pairs of blocks.

A sweep along dim 0: at each coordinate, the blocks that begin there minus those that end there are the change of
coverage, as a function of the other dims. The tensor itself counts -1, so the coverage must be zero everywhere, which
is checked recursively in the remaining dims. In a grid of N blocks, begins and ends cancel: about 2 N steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

_Box = tuple[tuple[int, int], ...]  # (begin, end) in each dim


def first_coverage_error(
    shape: Sequence[int], blocks: Iterable[tuple[Sequence[int], Sequence[int]]]
) -> tuple[list[int], int] | None:
    """The first element, in row-major order, that is not in exactly one block, and the number of blocks it is in.

    None if every element is in one block. ``blocks`` are (offset, shape) pairs inside the tensor of ``shape``.
    """
    counts: dict[_Box, int] = {tuple((0, extent) for extent in shape): -1}
    for offset, extents in blocks:
        box = tuple((begin, begin + extent) for begin, extent in zip(offset, extents, strict=True))
        counts[box] = counts.get(box, 0) + 1
    error = _first_nonzero(counts)
    return None if error is None else (error[0], error[1] + 1)


def _first_nonzero(counts: Mapping[_Box, int]) -> tuple[list[int], int] | None:
    """The first element whose boxes' counts do not add up to zero, and that sum."""
    changes: dict[int, dict[_Box, int]] = {}
    for box, count in counts.items():
        if not count:
            continue
        if not box:
            return [], count
        (begin, end), rest = box[0], box[1:]
        for place, change in ((begin, count), (end, -count)):
            at_place = changes.setdefault(place, {})
            at_place[rest] = at_place.get(rest, 0) + change
    # every box that begins also ends: the changes add up to zero, so the last one is zero if all others are
    for place in sorted(changes)[:-1]:
        error = _first_nonzero(changes[place])
        if error is not None:
            return [place, *error[0]], error[1]
    return None
