"""Unions of intervals, against counting the points of a grid."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from unisono.profile.intervals import NONE, intersection, length, overlap, union, without

END = 40
pairs = st.lists(st.tuples(st.integers(0, END - 1), st.integers(0, 12)), max_size=12)


def points(intervals: np.ndarray) -> np.ndarray:
    """Which of the unit cells of [0, END + 12) the intervals cover."""
    cells = np.zeros(END + 12, bool)
    for begin, end in intervals:
        cells[int(begin) : int(end)] = True
    return cells


def united(given_pairs: list[tuple[int, int]]) -> np.ndarray:
    return union([begin for begin, _ in given_pairs], [begin + size for begin, size in given_pairs])


@given(pairs)
def test_a_union_covers_what_its_parts_cover(given_pairs: list[tuple[int, int]]) -> None:
    found = united(given_pairs)
    cells = points(np.array([(begin, begin + size) for begin, size in given_pairs]).reshape(-1, 2))
    assert (points(found) == cells).all()
    assert length(found) == cells.sum()
    assert (found[1:, 0] > found[:-1, 1]).all()


@given(pairs, pairs)
def test_shared_and_remaining_parts(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    first, second = united(one), united(other)
    assert (points(intersection(first, second)) == (points(first) & points(second))).all()
    assert overlap(first, second) == (points(first) & points(second)).sum()
    assert (points(without(first, second)) == (points(first) & ~points(second))).all()
    assert length(without(first, second)) + overlap(first, second) == length(first)


def test_short_gaps_can_be_bridged() -> None:
    assert union([0, 12, 30], [10, 20, 40], bridge=5).tolist() == [[0, 20], [30, 40]]
    assert union([], []).tolist() == NONE.tolist()
