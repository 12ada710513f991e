"""Sample orders: which sample is at which global position of a run.

All are pure functions of the position, like ``Permutation``: nothing is stored per position or replayed, so a run resumes at any
step on any number of ranks. An ``occurrence`` differs for each repetition of a sample. With the sample's id and the seed it keys
the sample's random generator, so a repeated sample is augmented differently each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from unisono.data.dataset import Ids
from unisono.data.order.permutation import Permutation, keyed_uniform
from unisono.errors import DataError

MIXTURE_PERIOD = 4096  # positions after which a mixture's pattern repeats; weights are rounded to multiples of 1/4096


class SampleOrder(Protocol):
    """Samples by global position; both results are int64 of the shape of ``positions``."""

    def samples_at(self, positions: Ids) -> tuple[Ids, Ids]:
        """Sample ids and occurrences at the positions."""
        ...


class SequentialOrder:
    """Samples in the data set's order in every epoch."""

    def __init__(self, size: int) -> None:
        self._size = size

    def samples_at(self, positions: Ids) -> tuple[Ids, Ids]:
        epochs, places = np.divmod(positions, self._size)
        return places, epochs


class ShuffledOrder:
    """Each sample once per epoch, in the permutation keyed by seed and epoch."""

    def __init__(self, permutation: Permutation) -> None:
        self._permutation = permutation

    def samples_at(self, positions: Ids) -> tuple[Ids, Ids]:
        return self._permutation(positions), positions // self._permutation.size


class WeightedOrder:
    """Draws sample i in proportion to ``weights[i]``; an epoch has as many draws as samples.

    Systematic sampling (Madow 1949): in each epoch sample i is drawn ⌊w⌋ or ⌈w⌉ times, where w = n · weights[i] / Σ weights, so
    classes are balanced within every epoch and not only on average. Takes 8 bytes per sample.
    Raises DataError for weights that are negative, not finite, or all 0.
    """

    def __init__(self, weights: NDArray[np.float64] | Sequence[float], *, seed: int) -> None:
        values = _checked_weights(weights)
        self._ends = np.cumsum(values) * (values.size / values.sum())  # on a line of length n
        self._last = int(np.flatnonzero(values)[-1])
        self._order = Permutation(values.size, seed=seed)
        self._seed = seed

    def samples_at(self, positions: Ids) -> tuple[Ids, Ids]:
        epochs = positions // self._order.size
        points = self._order(positions) + keyed_uniform(self._seed, epochs)  # an epoch's n points lie 1 apart
        return np.minimum(np.searchsorted(self._ends, points, side="right"), self._last), positions


class IndependentOrder:
    """Draws sample i with probability ``weights[i]`` / Σ weights at each position, independently of all others.

    Takes 8 bytes per sample. Raises DataError as ``WeightedOrder``.
    """

    def __init__(self, weights: NDArray[np.float64] | Sequence[float], *, seed: int) -> None:
        values = _checked_weights(weights)
        self._ends = np.cumsum(values) / values.sum()
        self._last = int(np.flatnonzero(values)[-1])
        self._seed = seed

    def samples_at(self, positions: Ids) -> tuple[Ids, Ids]:
        points = keyed_uniform(self._seed, np.ascontiguousarray(positions, np.int64))
        return np.minimum(np.searchsorted(self._ends, points, side="right"), self._last), positions


class MixtureOrder:
    """Draws from several sources in proportion to ``weights``; each source is shuffled by itself and repeated as needed.

    Ids number the samples of the concatenated sources. The pattern of sources repeats every 4096 positions and spreads each
    source evenly (smooth weighted round-robin): in any stretch the share of a source is within a few samples of its weight.
    Raises DataError for an empty source, or weights that are not positive or below 1/4096 of their sum.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], *, seed: int) -> None:
        shares = _integer_shares(sizes, weights)
        self._pattern = _round_robin(shares)  # [PERIOD] source
        hits = self._pattern[:, None] == np.arange(len(sizes))  # [PERIOD, sources]
        self._before = np.concatenate([np.zeros((1, len(sizes)), np.int64), np.cumsum(hits, axis=0)])[:-1]
        self._shares = shares
        self._starts = np.cumsum([0, *sizes[:-1]])
        self._orders = [Permutation(size, seed=seed + 0x9E37 * number) for number, size in enumerate(sizes)]

    def samples_at(self, positions: Ids) -> tuple[Ids, Ids]:
        flat = np.ascontiguousarray(positions, np.int64).reshape(-1)
        periods, places = np.divmod(flat, MIXTURE_PERIOD)
        sources = self._pattern[places]
        counts = periods * self._shares[sources] + self._before[places, sources]
        ids, occurrences = np.empty_like(flat), np.empty_like(flat)
        for source in np.unique(sources).tolist():
            rows = np.flatnonzero(sources == source)
            order = self._orders[source]
            ids[rows] = order(counts[rows]) + self._starts[source]
            occurrences[rows] = counts[rows] // order.size
        return ids.reshape(positions.shape), occurrences.reshape(positions.shape)


class BucketedOrder:
    """``order`` regrouped so that the samples of a batch have similar lengths: less padding, but a coarser shuffle.

    ``order`` determines the samples of each window of ``window_batches`` batches. A window is sorted by length and cut into
    batches, which are shuffled. An epoch has ``size`` samples, and no window spans two epochs.
    Sorts each window once; the last window is cached.
    """

    def __init__(
        self,
        order: SampleOrder,
        lengths: NDArray[np.int64],
        *,
        size: int,
        batch: int,
        window_batches: int = 64,
        seed: int = 0,
    ) -> None:
        self._order, self._lengths, self._size, self._batch, self._seed = order, lengths, size, batch, seed
        self._window = batch * window_batches
        self._cache: tuple[int, Ids, Ids] = (-1, np.empty(0, np.int64), np.empty(0, np.int64))

    def samples_at(self, positions: Ids) -> tuple[Ids, Ids]:
        flat = np.ascontiguousarray(positions, np.int64).reshape(-1)
        epochs, places = np.divmod(flat, self._size)
        windows = epochs * -(-self._size // self._window) + places // self._window
        ids, occurrences = np.empty_like(flat), np.empty_like(flat)
        for window in np.unique(windows).tolist():
            rows = np.flatnonzero(windows == window)
            _, window_ids, window_occurrences = self._sorted(window)
            inside = places[rows] % self._window
            ids[rows], occurrences[rows] = window_ids[inside], window_occurrences[inside]
        return ids.reshape(positions.shape), occurrences.reshape(positions.shape)

    def _sorted(self, window: int) -> tuple[int, Ids, Ids]:
        if self._cache[0] == window:
            return self._cache
        epoch, number = divmod(window, -(-self._size // self._window))
        low = number * self._window
        count = min(self._window, self._size - low)
        ids, occurrences = self._order.samples_at(epoch * self._size + low + np.arange(count))
        by_length = np.argsort(self._lengths[ids], kind="stable")
        batches = [by_length[i : i + self._batch] for i in range(0, count, self._batch)]
        # A short last batch stays last, so that all batches are aligned with steps. Members of a batch are shuffled: else the
        # ranks' shares of a batch would be sorted by length too.
        full = len(batches) - (len(batches[-1]) < self._batch)
        turns = [
            *(Permutation(full, seed=self._seed)(window * full + np.arange(full)) if full else []),
            *range(full, len(batches)),
        ]
        order = np.concatenate(
            [
                batches[turn][
                    Permutation(len(batches[turn]), seed=self._seed + 1)(
                        window * len(batches[turn]) + np.arange(len(batches[turn]))
                    )
                    % len(batches[turn])
                ]
                for turn in turns
            ]
        )
        self._cache = (window, ids[order], occurrences[order])
        return self._cache


def _checked_weights(weights: NDArray[np.float64] | Sequence[float]) -> NDArray[np.float64]:
    values = np.asarray(weights, np.float64)
    if values.ndim != 1 or not values.size or not np.isfinite(values).all() or values.min() < 0 or values.sum() <= 0:
        raise DataError(
            given=f"weights of shape {list(values.shape)} from {values.min(initial=0)} to {values.max(initial=0)}",
            rule="one weight per sample, finite, >= 0, at least one above 0",
            consequence="no sample can be drawn",
            nearest="1 / (size of the sample's class) balances classes; 0 leaves a sample out",
        )
    return values


def _integer_shares(sizes: Sequence[int], weights: Sequence[float]) -> Ids:
    """Multiples of 1/MIXTURE_PERIOD nearest to the weights, in sum MIXTURE_PERIOD (largest remainder)."""
    values = np.asarray(weights, np.float64)
    usable = len(sizes) == values.size > 0 and np.isfinite(values).all() and values.min() > 0 and min(sizes) > 0
    exact = values / values.sum() * MIXTURE_PERIOD if usable else values
    if not usable or exact.min() < 1:
        raise DataError(
            given=f"sources of {list(sizes)} samples with weights {values.tolist()}",
            rule=f"each source has samples and a weight of at least 1/{MIXTURE_PERIOD} of the sum",
            consequence="no mixture can be made",
            nearest="leave out sources that are not to be drawn; weights are relative to each other",
        )
    shares = np.floor(exact).astype(np.int64)
    short = MIXTURE_PERIOD - int(shares.sum())
    shares[np.argsort(shares - exact, kind="stable")[:short]] += 1
    return shares


def _round_robin(shares: Ids) -> Ids:
    """[MIXTURE_PERIOD] sources, ``shares[s]`` times s, evenly spread: the source furthest behind its share is next."""
    pattern = np.empty(MIXTURE_PERIOD, np.int64)
    credit = np.zeros(shares.size, np.int64)
    for place in range(MIXTURE_PERIOD):
        credit += shares
        pattern[place] = chosen = int(credit.argmax())
        credit[chosen] -= MIXTURE_PERIOD
    return pattern
