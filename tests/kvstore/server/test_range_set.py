"""The set of applied numbers behaves as a set, and its spans stay disjoint and joined."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.kvstore.server.range_set import RangeSet


@given(st.lists(st.integers(0, 40)))
def test_is_a_set(numbers: list[int]) -> None:
    ours, theirs = RangeSet(), set()
    for number in numbers:
        assert ours.add(number) == (number not in theirs)
        theirs.add(number)
    assert [n for n in range(42) if n in ours] == sorted(theirs)
    spans = ours.to_json()
    assert all(left[1] < right[0] for left, right in pairwise(spans))  # neighbours are joined
    assert ours.prefix == next(n for n in range(43) if n not in theirs)
    assert RangeSet(spans).to_json() == spans


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)))
def test_the_numbers_that_another_lacks(numbers: set[int], others: set[int]) -> None:
    ours, theirs = RangeSet(), RangeSet()
    for number in numbers:
        ours.add(number)
    for number in others:
        theirs.add(number)
    left = ours.without(theirs)
    assert [n for n in range(42) if n in left] == sorted(numbers - others)
    assert RangeSet(left.to_json()).to_json() == left.to_json()


@pytest.mark.parametrize("spans", [[[1, 1]], [[3, 2]], [[0, 2], [1, 4]], [[4, 5], [0, 1]], [[0, 2], [2, 4]], [[-1, 3]]])
def test_refuses_spans_that_are_none(spans: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="sorted, disjoint"):
        RangeSet(spans)


def test_refuses_negative_numbers() -> None:
    with pytest.raises(ValueError, match="start at 0"):
        RangeSet().add(-1)
