"""Layouts: MindSpore's own examples, tensors tiled whatever the grid, and what is refused."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.errors import PlanError
from unisono.plan.tensor_layout import Layout, TensorLayout

CUBE = Layout((2, 2, 2), ("dp", "sp", "mp"))


def test_tensor_maps_count_from_the_right() -> None:
    assert CUBE("mp", ("sp", "dp")).tensor_map == (0, (1, 2))
    assert CUBE("dp", "mp").tensor_map == (2, 0)
    assert CUBE("dp", ("sp", "mp")).tensor_map == (2, (1, 0))
    assert CUBE("None", "sp", "None").tensor_map == (-1, 1, -1)
    assert Layout((2, 4), ("dp", "mp"))(("dp", "mp"), "None").tensor_map == ((1, 0), -1)


def test_slices_by_hand() -> None:
    """Rank r = 4 dp + 2 sp + mp."""
    found = CUBE("mp", ("sp", "dp")).slices((4, 8), even=True)
    for rank, held in enumerate(found):
        dp, sp, mp = rank // 4, rank // 2 % 2, rank % 2
        at = 2 * (2 * sp + dp)
        assert held == (slice(2 * mp, 2 * mp + 2), slice(at, at + 2)), rank
    assert CUBE("None", "dp").slices((3, 4))[5] == (slice(0, 3), slice(2, 4))
    assert CUBE("mp", ("sp", "dp")).parts == (2, 4)


def test_a_rank_list_says_whose_place_it_is() -> None:
    turned = Layout((2, 2), ("dp", "mp"), rank_list=(3, 1, 0, 2))("dp", "mp").slices((2, 2))
    plain = Layout((2, 2), ("dp", "mp"))("dp", "mp").slices((2, 2))
    assert [turned[3], turned[1], turned[0], turned[2]] == plain


@pytest.mark.parametrize(
    ("size", "parts", "held"),
    [(7, 3, [3, 3, 1]), (4, 3, [2, 2, 0]), (2, 3, [1, 1, 0]), (9, 6, [2, 2, 2, 2, 1, 0]), (0, 2, [0, 0])],
)
def test_uneven_dims_are_cut_like_chunks(size: int, parts: int, held: list[int]) -> None:
    assert [s.stop - s.start for (s,) in Layout((parts,), ("x",))("x").slices((size,))] == held


@st.composite
def placed(draw: st.DrawFn) -> tuple[TensorLayout, tuple[int, ...]]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    names = [f"axis{number}" for number in range(len(sizes))]
    ranks = draw(st.none() | st.permutations(range(prod(sizes))))
    layout = Layout(tuple(sizes), tuple(names), None if ranks is None else tuple(ranks))
    dims: list[str | tuple[str, ...]] = []
    free = draw(st.permutations(names))
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.integers(0, len(free)))
        taken, free = free[:count], free[count:]
        dims.append(tuple(taken) if count > 1 or draw(st.booleans()) else taken[0] if taken else "None")
    return layout(*dims), tuple(draw(st.lists(st.integers(0, 9), min_size=len(dims), max_size=len(dims))))


@settings(deadline=None)
@given(placed())
def test_slices_tile_the_tensor(case: tuple[TensorLayout, tuple[int, ...]]) -> None:
    """Each element is held by as many ranks as there are copies."""
    tensor, shape = case
    times = np.zeros(shape, np.int64)
    for held in tensor.slices(shape):
        times[held] += 1
    assert (times == tensor.layout.ranks // prod(tensor.parts)).all()


@settings(deadline=None)
@given(placed(), st.randoms())
def test_a_permutation_of_ranks_permutes_the_slices(case: tuple[TensorLayout, tuple[int, ...]], random) -> None:
    tensor, shape = case
    grid = tensor.layout
    order = list(range(grid.ranks))
    random.shuffle(order)
    plain = Layout(grid.device_matrix, grid.aliases)(*tensor.dims).slices(shape)
    moved = Layout(grid.device_matrix, grid.aliases, tuple(order))(*tensor.dims).slices(shape)
    assert [moved[rank] for rank in order] == plain


def test_what_is_no_layout() -> None:
    with pytest.raises(PlanError) as caught:
        CUBE("mp", ("sp", "mp"))
    assert str(caught.value) == (
        "the alias 'mp' 2 times in ('mp', ('sp', 'mp'))\n"
        "  rule: an axis cuts one dim at most\n"
        "  so:   ranks would hold the diagonal blocks only\n"
        "  try:  'None' for one of them, or another alias"
    )
    with pytest.raises(PlanError) as caught:
        CUBE("mpp", "None")
    assert str(caught.value) == (
        "the alias 'mpp' in ('mpp', 'None')\n"
        "  rule: a dim is cut along aliases of the layout, dp, sp, mp, or is 'None'\n"
        "  so:   the dim would not be cut\n"
        "  try:  did you mean 'mp'?"
    )
    with pytest.raises(PlanError) as caught:
        CUBE("mp", ("sp", "dp")).slices((4, 6), even=True)
    assert str(caught.value) == (
        "dim 1 of 6 cut along sp x dp into 4 parts\n"
        "  rule: parts are equal here\n"
        "  so:   the last ranks would hold less\n"
        "  try:  a size of 8"
    )
    with pytest.raises(PlanError) as caught:
        CUBE("mp", "sp").slices((4,))
    assert "a tensor of shape [4] for a layout ('mp', 'sp')" in str(caught.value)


@pytest.mark.parametrize("ranks", [(0, 1, 2), (0, 1, 2, 2), (1, 2, 3, 4), ()])
def test_rank_lists_that_are_none(ranks: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match=r"it has each of the ranks 0\.\.3 once"):
        Layout((2, 2), ("dp", "mp"), ranks)


@pytest.mark.parametrize(
    ("sizes", "names", "given"),
    [
        ((), (), r"a device matrix \(\)"),
        ((2, 0), ("a", "b"), r"a device matrix \(2, 0\)"),
        ((2,), ("a", "b"), "every axis has a size"),
        ((2, 2), ("a", "a"), "the alias 'a' twice"),
        ((2,), ("None",), "'None', which stands for a dim that is not cut"),
        ((2, 2), ("a", "interleaved_parallel"), "which is a cut inside one device"),
    ],
)
def test_grids_that_are_none(sizes: tuple[int, ...], names: tuple[str, ...], given: str) -> None:
    with pytest.raises(PlanError, match=given):
        Layout(sizes, names)
