"""The order of samples is a bijection per epoch, the same everywhere, and looks random."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.order.permutation import Permutation, sample_generator
from unisono.errors import DataError

SIZES_TO_10_12 = st.one_of(st.integers(1, 5000), st.integers(1, 10**12), st.integers(10**12 - 50, 10**12 + 50))
SEEDS = st.integers(-(1 << 70), 1 << 70)


@pytest.mark.parametrize("block", [0, 1, 2, 5, 16, 63, 64, 65, 1000])
def test_every_epoch_of_every_small_size_is_a_permutation(block: int) -> None:
    for size in range(1, 66):
        order = Permutation(size, seed=size, block_size=block)
        epochs = order(np.arange(3 * size)).reshape(3, size)
        assert (np.sort(epochs, axis=1) == np.arange(size)).all(), (size, block)


@settings(deadline=None, max_examples=40)
@given(size=st.integers(1, 40_000), seed=SEEDS, block=st.integers(0, 300), epoch=st.integers(0, 1000))
def test_an_epoch_is_a_permutation(size: int, seed: int, block: int, epoch: int) -> None:
    samples = Permutation(size, seed=seed, block_size=block)(np.arange(epoch * size, (epoch + 1) * size))
    assert np.array_equal(np.sort(samples), np.arange(size))


@settings(deadline=None, max_examples=60)
@given(data=st.data(), size=SIZES_TO_10_12, seed=SEEDS, block=st.sampled_from([0, 0, 1, 7, 4096, 10**6]))
def test_a_window_has_no_duplicates_stays_in_range_and_inverts(
    data: st.DataObject, size: int, seed: int, block: int
) -> None:
    order = Permutation(size, seed=seed, block_size=block)
    epoch = data.draw(st.integers(0, 100_000))
    start = data.draw(st.integers(0, max(0, size - 2000)))
    positions = epoch * size + np.arange(start, min(size, start + 2000))
    samples = order(positions)
    assert samples.min() >= 0
    assert samples.max() < size
    assert np.unique(samples).size == samples.size
    assert np.array_equal(order.position_of(samples, epoch), positions)


@settings(deadline=None, max_examples=40)
@given(data=st.data(), size=st.integers(1, 10**12), seed=SEEDS, block=st.sampled_from([0, 3, 1000]))
def test_windows_far_apart_do_not_collide(data: st.DataObject, size: int, seed: int, block: int) -> None:
    positions = np.unique(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=200)))
    samples = Permutation(size, seed=seed, block_size=block)(positions)
    assert np.unique(samples).size == positions.size


@settings(deadline=None, max_examples=40)
@given(size=st.integers(1, 300), start=st.integers(0, 10**6), count=st.integers(0, 900), block=st.integers(0, 40))
def test_a_position_means_the_same_alone_and_in_company(size: int, start: int, count: int, block: int) -> None:
    order = Permutation(size, seed=9, block_size=block)
    together = order(np.arange(start, start + count))
    shuffled = np.random.default_rng(0).permutation(count)
    assert np.array_equal(order(start + shuffled), together[shuffled])
    alone = [int(order(np.array([p]))[0]) for p in range(start, start + min(count, 5))]
    assert alone == together[:5].tolist()


def test_a_long_call_equals_short_calls() -> None:
    order = Permutation(70_001, seed=4)
    positions = np.arange(69_000, 69_000 + 100_000)
    assert np.array_equal(order(positions), np.concatenate([order(part) for part in np.array_split(positions, 37)]))


def test_shape_is_kept() -> None:
    assert Permutation(10, seed=0)(np.arange(6).reshape(2, 3)).shape == (2, 3)
    assert Permutation(10, seed=0)(np.array([], np.int64)).shape == (0,)


def test_golden_values() -> None:
    """Every platform and every release computes these; a change would reorder the data of runs that resume."""
    assert Permutation(10, seed=0)(np.arange(20)).tolist() == [
        7,
        3,
        9,
        0,
        6,
        4,
        2,
        8,
        1,
        5,
        6,
        3,
        0,
        4,
        5,
        8,
        2,
        9,
        1,
        7,
    ]
    assert Permutation(1000, seed=1)(np.arange(8)).tolist() == [218, 388, 14, 63, 175, 808, 149, 969]
    assert Permutation(5000, seed=1)(np.arange(8)).tolist() == [4282, 4830, 4003, 1260, 2470, 362, 3394, 4747]
    around = np.arange(3 * 10**12 - 3, 3 * 10**12 + 3)
    assert Permutation(10**12, seed=2**63 + 5)(around).tolist() == [
        962467782305, 664343561574, 530911055556, 605401000227, 242168043982, 444892024823,
    ]  # fmt: skip
    assert Permutation((1 << 62) - 1, seed=-1)(np.arange(4)).tolist() == [
        1151846483528307915, 1444949648428691211, 4603979387867915630, 1241965463841594687,
    ]  # fmt: skip
    assert Permutation(10, seed=7, block_size=4)(np.arange(20)).tolist() == [
        8, 9, 0, 1, 2, 3, 5, 6, 4, 7, 6, 5, 4, 7, 0, 2, 3, 1, 9, 8,
    ]  # fmt: skip
    assert Permutation(10**12, seed=7, block_size=1000)(np.arange(998, 1003)).tolist() == [
        911662085907, 911662085394, 386181771009, 386181771083, 386181771392,
    ]  # fmt: skip


def test_blocks_keep_neighbours_together_and_are_shuffled() -> None:
    order = Permutation(1003, seed=5, block_size=100)
    blocks = order(np.arange(1003)) // 100
    runs = blocks[np.concatenate([[True], blocks[1:] != blocks[:-1]])]
    assert sorted(runs.tolist()) == list(range(11))
    assert runs.tolist() != list(range(11))
    turns = {
        int(Permutation(1003, seed=s, block_size=100).position_of(np.array([1000]), 0)[0]) // 100 for s in range(60)
    }
    assert len(turns) >= 9, "the short last block comes at any turn"
    inside = order(np.arange(1003))[:100] % 100
    assert not np.array_equal(inside, np.sort(inside))


def test_seeds_epochs_and_purposes_differ() -> None:
    positions = np.arange(1000)
    first = Permutation(1000, seed=1)(positions)
    assert (first == Permutation(1000, seed=2)(positions)).sum() < 20
    assert (first == Permutation(1000, seed=1)(positions + 1000)).sum() < 20
    assert np.array_equal(first, Permutation(1000, seed=1 + (1 << 64))(positions))
    assert not np.array_equal(np.arange(1000), first)


def _excess(counts: np.ndarray, expected: np.ndarray) -> float:
    """Standard deviations by which Pearson's statistic exceeds its mean."""
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize(
    ("size", "cells"), [(3, 3), (5, 5), (12, 12), (30, 30), (100, 20), (1025, 25), (10**6, 25), (10**12, 25)]
)
def test_places_and_neighbours_are_uniform(size: int, cells: int) -> None:
    """Place → sample and sample → next sample fill a grid as drawing without replacement would; fixed seed."""
    span = min(size, 40_000)
    epochs = 400_000 // span
    samples = Permutation(size, seed=77)(np.arange(epochs)[:, None] * size + np.arange(span))
    cell = samples * cells // size
    share = size // cells
    next_cell = (share - np.eye(cells)) / (size - 1) / cells
    pairs = np.bincount((cell[:, :-1] * cells + cell[:, 1:]).ravel(), minlength=cells * cells)
    assert _excess(pairs.reshape(cells, cells), next_cell * pairs.sum()) < 5
    place = np.broadcast_to(np.arange(span) * cells // span, cell.shape)
    places = np.bincount((place * cells + cell).ravel(), minlength=cells * cells)
    expected = np.bincount(np.arange(span) * cells // span, minlength=cells)[:, None] * epochs / cells
    assert _excess(places, np.broadcast_to(expected, (cells, cells)).ravel()) < 5


def test_neighbours_are_not_correlated() -> None:
    samples = Permutation(10**12, seed=3)(np.arange(10**9, 10**9 + 100_000)).astype(float)
    for lag in (1, 2, 64, 1024):
        assert abs(np.corrcoef(samples[:-lag], samples[lag:])[0, 1]) < 0.02
    assert abs(np.corrcoef(samples, np.arange(samples.size))[0, 1]) < 0.02


def test_impossible_orders() -> None:
    with pytest.raises(DataError) as caught:
        Permutation(0, seed=1)
    assert str(caught.value) == (
        "an order over 0 samples\n  rule: 1 <= size < 2^62\n  so:   there is no position to compute\n"
        "  try:  a dataset with at least one sample"
    )
    with pytest.raises(DataError, match=r"^block -1\n  rule: block >= 0\n"):
        Permutation(5, seed=1, block_size=-1)
    with pytest.raises(IndexError, match="position -3 is negative"):
        Permutation(5, seed=1)(np.array([1, -3]))
    with pytest.raises(IndexError, match=r"sample ids lie in \[0, 5\)"):
        Permutation(5, seed=1).position_of(np.array([5]), 0)


def test_sample_generator_is_keyed_by_seed_epoch_and_sample() -> None:
    assert sample_generator(3, 2, 0).bit_generator.random_raw(2).tolist() == [6386530735895896518, 1747198984366557606]
    draws = {
        sample_generator(seed, epoch, sample).bit_generator.random_raw()
        for seed in range(4)
        for epoch in range(4)
        for sample in (0, 1, 10**12)
    }
    assert len(draws) == 48
