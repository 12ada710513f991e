"""Blocks per piece: as even as can be, what is before and behind counted."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import PlanError
from unisono.plan.pipeline_split import balance_stages


def heaviest(blocks: list[int], before: int, after: int, splits: tuple[int, ...]) -> int:
    sums, start = [], 0
    for count in splits:
        sums.append(sum(blocks[start : start + count]))
        start += count
    sums[0] += before
    sums[-1] += after
    return max(sums)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(0, 30), st.integers(0, 30), st.data())
def test_no_other_split_is_lighter(blocks: list[int], before: int, after: int, data: st.DataObject) -> None:
    pieces = data.draw(st.integers(1, len(blocks)))
    chosen = balance_stages(blocks, before, after, pieces)
    assert len(chosen) == pieces
    assert sum(chosen) == len(blocks)
    assert min(chosen) >= 1
    every = [
        tuple(b - a for a, b in zip((0, *ends), (*ends, len(blocks)), strict=True))
        for ends in combinations(range(1, len(blocks)), pieces - 1)
    ]
    assert heaviest(blocks, before, after, chosen) == min(heaviest(blocks, before, after, each) for each in every)


def test_a_heavy_head_gets_fewer_blocks() -> None:
    assert balance_stages([1] * 8, 0, 2, 2) == (5, 3)
    with pytest.raises(PlanError, match="a model of 3 blocks in 4 pieces"):
        balance_stages([1, 1, 1], 0, 0, 4)
