"""Orders that are no plain shuffle: what comes how often, and that any position can be asked for alone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.combined import balancing_weights, bucketed, mixture, weighted
from unisono.data.loading.loader import Loader
from unisono.data.order.permutation import Permutation
from unisono.data.order.samplers import (
    MIXTURE_PERIOD,
    BucketedOrder,
    MixtureOrder,
    SampleOrder,
    ShuffledOrder,
    WeightedOrder,
)
from unisono.errors import DataError


def some_draws() -> dict[str, SampleOrder]:
    rng = np.random.default_rng(0)
    return {
        "weighted": WeightedOrder(rng.random(50), seed=1),
        "mixed": MixtureOrder([7, 1000, 3], [1, 5, 0.5], seed=1),
        "bucketed": BucketedOrder(
            ShuffledOrder(Permutation(103, seed=1)), rng.integers(1, 99, 103), size=103, batch=8, window_batches=4
        ),
    }


@pytest.mark.parametrize("kind", ["weighted", "mixed", "bucketed"])
@settings(max_examples=30, deadline=None)
@given(start=st.integers(0, 10**12), seed=st.integers(0, 2**32))
def test_a_position_says_the_same_alone_and_among_others(kind: str, start: int, seed: int) -> None:
    positions = np.arange(start, start + 300)
    ids, visits = some_draws()[kind].samples_at(positions)
    chosen = np.random.default_rng(seed).integers(0, 300, 40)
    again = some_draws()[kind].samples_at(positions[chosen])
    assert again[0].tolist() == ids[chosen].tolist()
    assert again[1].tolist() == visits[chosen].tolist()
    together = set(zip(ids.tolist(), visits.tolist(), strict=True))
    assert len(together) == 300, "a sample that comes again has another visit, so it is augmented anew"


@settings(max_examples=40, deadline=None)
@given(
    weights=st.lists(st.floats(0, 100), min_size=1, max_size=40), epoch=st.integers(0, 10**6), seed=st.integers(0, 99)
)
def test_every_epoch_has_each_sample_as_often_as_its_weight_says(weights: list[float], epoch: int, seed: int) -> None:
    if sum(weights) < 1e-6:
        return
    n = len(weights)
    ids, _ = WeightedOrder(weights, seed=seed).samples_at(np.arange(epoch * n, (epoch + 1) * n))
    counts = np.bincount(ids, minlength=n)
    expected = np.array(weights) / sum(weights) * n
    assert (counts >= np.floor(expected - 1e-9)).all()
    assert (counts <= np.ceil(expected + 1e-9)).all()
    assert counts[np.array(weights) == 0].sum() == 0


def test_balanced_classes() -> None:
    labels = np.array([0] * 90 + [1] * 9 + [2])
    ids, _ = WeightedOrder(balancing_weights(labels), seed=3).samples_at(np.arange(300))
    assert np.abs(np.bincount(labels[ids]) - 100).max() <= 3, "within one per epoch"
    assert np.bincount(ids, minlength=100)[:90].max() <= 2, "the many take turns"


def test_a_mixtures_sources_keep_their_share_in_every_stretch() -> None:
    weights = [0.7, 0.2, 0.1]
    mixed = MixtureOrder([1000, 10, 500], weights, seed=0)
    ids, visits = mixed.samples_at(np.arange(3 * MIXTURE_PERIOD))
    sources = np.searchsorted([1000, 1010], ids, side="right")
    for length in (10, 100, 1000, MIXTURE_PERIOD):
        for start in (0, 17, 2 * MIXTURE_PERIOD - 50):
            counts = np.bincount(sources[start : start + length], minlength=3)
            assert np.abs(counts - np.array(weights) * length).max() < 3 + length / MIXTURE_PERIOD, (start, length)
    small = ids[sources == 1] - 1000
    for epoch in range(small.size // 10):
        assert sorted(small[epoch * 10 : epoch * 10 + 10]) == list(range(10)), "a small source is used up, then again"
    assert visits[sources == 1].tolist() == [i // 10 for i in range(small.size)]


def test_impossible_weights_are_refused() -> None:
    with pytest.raises(DataError) as caught:
        WeightedOrder([1, -1], seed=0)
    assert str(caught.value).startswith(
        "weights of shape [2] from -1.0 to 1.0\n  rule: one weight per sample, finite, >= 0"
    )
    for sizes, weights in (([5, 5], [1]), ([5, 0], [1, 1]), ([5, 5], [1, 1e-9]), ([5, 5], [1, float("nan")]), ([], [])):
        with pytest.raises(DataError, match="each source has samples and a weight of at least 1/4096"):
            MixtureOrder(sizes, weights, seed=0)
    with pytest.raises(DataError, match="3 weights for 2 samples"):
        weighted([{"x": 1}, {"x": 2}], [1, 2, 3])
    with pytest.raises(DataError, match="1 lengths for 2 samples"):
        bucketed([{"x": 1}, {"x": 2}], [1])


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 200), batch=st.integers(1, 20), window=st.integers(1, 8), seed=st.integers(0, 9))
def test_buckets_hold_each_sample_once_and_batches_of_like_length(
    size: int, batch: int, window: int, seed: int
) -> None:
    lengths = np.random.default_rng(seed).integers(1, 1000, size)
    draws = BucketedOrder(
        ShuffledOrder(Permutation(size, seed=seed)), lengths, size=size, batch=batch, window_batches=window, seed=seed
    )
    for epoch in (0, 7):
        ids, visits = draws.samples_at(np.arange(epoch * size, (epoch + 1) * size))
        assert sorted(ids.tolist()) == list(range(size))
        assert set(visits.tolist()) == {epoch}
        plain = Permutation(size, seed=seed)(np.arange(epoch * size, (epoch + 1) * size))
        for low in range(0, size, batch * window):
            rows = slice(low, low + batch * window)
            assert sorted(ids[rows].tolist()) == sorted(plain[rows].tolist()), "a window's samples are the shuffle's"
            inside = [ids[rows][i : i + batch] for i in range(0, len(ids[rows]), batch)]
            spans = sorted((lengths[b].min(), lengths[b].max()) for b in inside)
            assert all(a[1] <= b[0] for a, b in pairwise(spans)), "and its batches do not overlap"


def test_buckets_lower_padding() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 4096)

    def padding(draws: SampleOrder) -> float:
        batches = lengths[draws.samples_at(np.arange(4096))[0]].reshape(-1, 16)
        return 1 - batches.sum() / (batches.max(axis=1) * 16).sum()

    whole = ShuffledOrder(Permutation(4096, seed=0))
    assert padding(whole) > 0.4
    assert padding(BucketedOrder(whole, lengths, size=4096, batch=16, window_batches=64)) < 0.05


def test_composed_data_sets_feed_a_loader_alike_on_any_number_of_ranks() -> None:
    numbers = [{"x": i} for i in range(40)]
    others = [{"x": -i} for i in range(1, 6)]
    sets = {
        "mixture": mixture([numbers, others], [3, 1]),
        "weighted": weighted(numbers, [i % 3 for i in range(40)]),
        "bucketed": bucketed(numbers, [i % 7 for i in range(40)]),
    }
    assert len({data.fingerprint for data in sets.values()}) == 3
    for name, data in sets.items():

        def step(world: int, number: int, data: object = data) -> list[int]:
            loaders = [Loader(data, seed=2, global_batch=8, rank=rank, world_size=world) for rank in range(world)]  # type: ignore[arg-type]
            return [x for one in loaders for part in one.batch(number).micro_batches for x in part["x"].tolist()]

        alone = [step(1, number) for number in range(5, 9)]
        assert [step(3, number) for number in range(5, 9)] == alone, name
        if name == "mixture":
            assert [sum(x < 0 for x in xs) for xs in alone] == [2, 2, 2, 2]
