from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.checkpoint.coverage_check import first_coverage_error
from unisono.checkpoint.manifest import PieceEntry, TensorEntry, pieces_fault
from unisono.storage.limits import MAX_PIECE_DIMS

EXTENTS = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def counted(shape, blocks):
    """The same answer by writing every block into an array."""
    cover = np.zeros(shape, dtype=int)
    for offset, extents in blocks:
        cover[tuple(slice(begin, begin + extent) for begin, extent in zip(offset, extents, strict=True))] += 1
    wrong = np.argwhere(cover != 1)
    return (wrong[0].tolist(), int(cover[tuple(wrong[0])])) if len(wrong) else None


@st.composite
def boxes(draw, shape):
    """Any block inside ``shape``, with no elements now and then."""
    begins = [draw(st.integers(0, extent)) for extent in shape]
    return tuple(begins), tuple(
        draw(st.integers(0, extent - begin)) for begin, extent in zip(begins, shape, strict=True)
    )


def grid(shape, cuts):
    """All blocks between the cuts of each dim."""
    edges = [
        list(zip([0, *at], [*at, extent], strict=True))
        for at, extent in zip([sorted(each) for each in cuts], shape, strict=True)
    ]
    return [(tuple(b for b, _ in cell), tuple(e - b for b, e in cell)) for cell in product(*edges)]


@st.composite
def tilings(draw):
    """A tensor cut askew: one block after the other is cut in two, each time along another dim."""
    shape = draw(EXTENTS)
    blocks = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 8)) if shape else 0):
        offset, extents = blocks.pop(draw(st.integers(0, len(blocks) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, extents[dim]))
        blocks.append((offset, (*extents[:dim], at, *extents[dim + 1 :])))
        behind = (*offset[:dim], offset[dim] + at, *offset[dim + 1 :])
        blocks.append((behind, (*extents[:dim], extents[dim] - at, *extents[dim + 1 :])))
    return shape, draw(st.permutations(blocks))


@settings(max_examples=150, deadline=None)
@given(tiling=tilings())
def test_what_tiles_a_tensor_has_no_fault(tiling):
    assert first_coverage_error(*tiling) is None


@settings(max_examples=200, deadline=None)
@given(tiling=tilings(), data=st.data())
def test_the_first_element_that_is_wrong_is_the_one_that_counting_finds(tiling, data):
    """A block less, one more, one in another place, or any blocks at all."""
    shape, blocks = tiling[0], list(tiling[1])
    kind = data.draw(st.sampled_from(["less", "more", "moved", "any"]))
    if kind in ("less", "moved"):
        blocks.pop()
    if kind in ("more", "moved"):
        blocks.append(data.draw(boxes(shape)))
    if kind == "any":
        blocks = data.draw(st.lists(boxes(shape), max_size=4))
    assert first_coverage_error(shape, blocks) == counted(shape, blocks)


def test_a_grid_of_many_ranks_is_counted_in_steps_as_many_as_blocks():
    steps = []

    class Counting(tuple):
        __slots__ = ()

        def __iter__(self):
            steps.append(1)
            return super().__iter__()

    blocks = grid((64, 5, 64), [range(1, 64), [], range(1, 64)])
    assert first_coverage_error((64, 5, 64), [(Counting(offset), extents) for offset, extents in blocks]) is None
    assert len(steps) == len(blocks) == 64 * 64
    assert first_coverage_error((64, 5, 64), blocks[:-1]) == ([63, 0, 63], 0)


def entry(shape, *blocks):
    pieces = tuple(PieceEntry(file="f", key=f"k{i}", offset=o, shape=s) for i, (o, s) in enumerate(blocks))
    return TensorEntry(shape=shape, dtype="F32", pieces=pieces)


@pytest.mark.parametrize(
    ("shape", "blocks", "fault"),
    [
        ((4, 3), [((0, 0), (2, 3)), ((2, 0), (2, 2)), ((2, 2), (2, 1))], ""),
        ((), [((), ())], ""),
        ((0, 4), [((0, 0), (0, 4))], ""),
        ((4,), [((0,), (1,)), ((2,), (2,))], "its 2 pieces do not make up [4]: element [1] is in none of them"),
        # as many elements as the whole, each piece in another place
        (
            (2, 4),
            [((0, 0), (2, 2)), ((0, 1), (2, 2))],
            "its 2 pieces do not make up [2, 4]: element [0, 1] is in 2 of them",
        ),
        ((), [((), ()), ((), ())], "its 2 pieces do not make up []: element [] is in 2 of them"),
        ((3,), [((0,), (2,))], "its 1 pieces do not make up [3]: element [2] is in none of them"),
        ((3,), [], "its 0 pieces do not make up [3]"),
        ((0,), [], "its 0 pieces do not make up [0]"),
        ((0,), [((0,), (0,)), ((0,), (0,))], "its 2 pieces do not make up [0]"),
        ((0, 4), [((0, 0), (1, 4))], "piece 'k0' of f, from [0, 0] on, lies outside of [0, 4]"),
        ((4,), [((0,), (2,)), ((2,), (3,))], "piece 'k1' of f, from [2] on, lies outside of [4]"),
        ((4,), [((-1,), (5,))], "piece 'k0' of f, from [-1] on, lies outside of [4]"),
        ((4,), [((0, 0), (4, 1))], "piece 'k0' of f has another number of dims than [4]"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_the_place(shape, blocks, fault):
    assert pieces_fault(entry(shape, *blocks)) == fault


def test_more_dims_than_tensors_have_are_refused_before_they_are_counted():
    shape = (2,) * 5000
    low, high = ((0,) * 5000, (1, *shape[1:])), ((1, *[0] * 4999), (1, *shape[1:]))
    assert pieces_fault(entry(shape, low, high)).endswith(f": a tensor in pieces has at most {MAX_PIECE_DIMS} dims")
    assert pieces_fault(entry(shape, ((0,) * 5000, shape))) == ""
