"""How one part of a batch is made: a pure function of data set, transforms, seed and positions.

Whoever calls it, a thread, another process, a rank that resumes, gets the same arrays. Errors name the sample; where some
may be bad, a bad one keeps its place, shows another sample's values and weighs 0, which every rank and every rerun decides alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from unisono.data.dataset import Batch, Dataset, check_sample, collate
from unisono.data.order.permutation import pair_generator, sample_generator, sample_generators
from unisono.errors import DataError, UnisonoError

Ids = NDArray[np.int64]
Transform = Callable[[Batch, np.random.Generator], Batch]
PairTransform = Callable[[Batch, Batch, np.random.Generator], tuple[Batch, Batch]]
BatchTransform = Callable[[Batch], Batch]

_SUBSTITUTES = 64  # samples after a bad one that are tried as its stand-in


@runtime_checkable
class PerSampleDataset(Protocol):
    """A data set that can give samples one by one, of different shapes, to be made alike by the transform."""

    def samples(self, indices: Ids) -> list[Batch]: ...


@runtime_checkable
class TwoPhaseTransform(Protocol):
    """A transform in two halves: ``finish`` of a batch of what ``begin`` gave is what calling it on each sample gives."""

    def transform_sample(self, sample: Batch, rng: np.random.Generator, /) -> Batch: ...

    def transform_batch(self, batch: Batch, /) -> Batch: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchSpec:
    """Rows of one micro-batch. The first ``count`` of ``ids`` are its own, the others partners of pairs that end elsewhere."""

    step: int
    num_rows: int
    sample_ids: Ids
    occurrences: Ids  # together with id and seed the key of a sample's randomness
    is_filler: NDArray[np.bool_]  # [count] repeats that only fill the batch up, and weigh 0
    partner_rows: Ids  # [count] row of the partner, or the row itself, paired with itself; empty without pairs
    pair_ids: Ids  # [count] number of the pair, equal for both members; empty without pairs
    is_first: NDArray[np.bool_]  # [count] which of the two the row is; empty without pairs


class ProgressMarker(Protocol):
    """Which sample a worker is at, for whoever waits for it."""

    @property
    def sample(self) -> int: ...

    def mark(self, sample: int) -> None: ...


@dataclass(slots=True)
class ThreadProgress:
    """A ``Watch`` inside one process."""

    sample: int = -1

    def mark(self, sample: int) -> None:
        self.sample = sample


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltBatch:
    """Arrays with first dim ``count``, and the ids of the samples that could not be read."""

    arrays: Batch
    skipped_ids: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchBuilder:
    """``transform(sample, rng)`` sees single samples, ``pair(a, b, rng)`` two neighbours of the global batch, ``finish(batch)``
    all rows at once. ``weighs`` says whether every batch has ``weights``, because some rows may weigh 0."""

    dataset: Dataset
    seed: int
    transform: Transform | None = None
    pair_transform: PairTransform | None = None
    batch_transform: BatchTransform | None = None
    replaces_bad: bool = False
    adds_weights: bool = False

    @property
    def _halves(self) -> TwoPhaseTransform | None:
        """The transform in its two halves, where nothing has to see whole samples in between."""
        if (
            self.transform is None
            or self.pair_transform is not None
            or not isinstance(self.transform, TwoPhaseTransform)
        ):
            return None
        return self.transform

    @property
    def _one(self) -> Transform | None:
        """What is done to each sample by itself."""
        halves = self._halves
        return self.transform if halves is None else halves.transform_sample

    def build(self, part: MicroBatchSpec, watch: ProgressMarker) -> BuiltBatch:
        """Raises DataError naming step and sample."""
        if part.num_rows == 0:
            return BuiltBatch(arrays={}, skipped_ids=[])
        separate = self.transform is not None or self.pair_transform is not None
        bad: dict[int, Exception] = {}
        watch.mark(int(part.sample_ids[0]))
        if separate:
            samples = self._samples(part, bad, watch)
            if self.pair_transform is not None:
                samples = self._paired(samples, part, watch)
            batch = _raise_with_step(
                part, lambda: collate(samples[: part.num_rows], part.sample_ids[: part.num_rows].tolist())
            )
        else:
            batch = self._read_whole(part, bad, watch)
        halves = self._halves
        for finish in (None if halves is None else halves.transform_batch, self.batch_transform):
            if finish is not None:
                batch = _raise_with_step(
                    part, lambda finish=finish, batch=batch: check_batch(finish(batch), part.num_rows)
                )
        rows_of_bad = [row for row in range(part.num_rows) if int(part.sample_ids[row]) in bad] if bad else []
        if self.adds_weights:
            silent = part.is_filler.copy()
            silent[rows_of_bad] = True
            batch["weights"] = _masked_weights(batch.get("weights"), silent)
        return BuiltBatch(arrays=batch, skipped_ids=[int(part.sample_ids[row]) for row in rows_of_bad])

    def _read_whole(self, part: MicroBatchSpec, bad: dict[int, Exception], watch: ProgressMarker) -> Batch:
        try:
            return check_batch(self.dataset.read(part.sample_ids), part.sample_ids.size)
        except Exception as error:
            rows = self._one_by_one(part, bad, watch, error)
        return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}

    def _one_by_one(
        self, part: MicroBatchSpec, bad: dict[int, Exception], watch: ProgressMarker, error: Exception
    ) -> list[Batch]:
        """Rows [1, …] after reading all together has failed, to name the bad ones or to go on without them."""
        rows: list[Batch] = []
        for row, sample in enumerate(part.sample_ids.tolist()):
            watch.mark(sample)
            try:
                rows.append(check_batch(self.dataset.read(part.sample_ids[row : row + 1]), 1))
            except Exception as own:
                instead = self._instead(sample, int(part.occurrences[row]), part, own, bad)
                rows.append({name: array[None] for name, array in instead.items()})
        if not bad:
            raise unreadable_error(part, None, error) from error
        return rows

    def _samples(self, part: MicroBatchSpec, bad: dict[int, Exception], watch: ProgressMarker) -> list[Batch]:
        try:
            raw = self._raw(part.sample_ids)
        except Exception:  # some sample is bad: reading each by itself tells which
            raw = None
        one = self._one
        samples: list[Batch] = []
        rngs = sample_generators(self.seed, part.occurrences, part.sample_ids)
        for row, (sample, rng) in enumerate(zip(part.sample_ids.tolist(), rngs, strict=True)):
            watch.mark(sample)
            try:
                whole = self._raw(part.sample_ids[row : row + 1])[0] if raw is None else raw[row]
                samples.append(whole if one is None else check_sample(one(whole, rng)))
            except Exception as error:
                samples.append(self._instead(sample, int(part.occurrences[row]), part, error, bad))
        return samples

    def _instead(
        self, sample: int, visit: int, part: MicroBatchSpec, error: Exception, bad: dict[int, Exception]
    ) -> Batch:
        """In place of a bad sample the first one after it that is not; raises DataError where none may be bad."""
        if not self.replaces_bad:
            raise unreadable_error(part, sample, error) from error
        bad[sample] = error
        size = len(self.dataset)
        for other in range(sample + 1, sample + 1 + min(_SUBSTITUTES, size - 1)):
            try:
                whole = self._raw(np.array([other % size]))[0]
                rng = sample_generator(self.seed, visit, other % size)
                return whole if self._one is None else check_sample(self._one(whole, rng))
            except Exception:  # the error worth telling is that of the sample asked for
                continue
        raise unreadable_error(part, sample, error) from error

    def _raw(self, ids: Ids) -> list[Batch]:
        if isinstance(self.dataset, PerSampleDataset):
            return self.dataset.samples(ids)
        batch = check_batch(self.dataset.read(ids), ids.size)
        return [{name: array[row] for name, array in batch.items()} for row in range(ids.size)]

    def _paired(self, samples: list[Batch], part: MicroBatchSpec, watch: ProgressMarker) -> list[Batch]:
        assert self.pair_transform is not None
        made: dict[int, tuple[Batch, Batch]] = {}
        mixed: list[Batch] = []
        rows = zip(part.partner_rows.tolist(), part.pair_ids.tolist(), part.is_first.tolist(), strict=True)
        for row, (partner, number, leads) in enumerate(rows):
            watch.mark(int(part.sample_ids[row]))
            if number not in made:
                first, second = (row, partner) if leads else (partner, row)
                rng = pair_generator(self.seed, number)
                try:
                    one, other = self.pair_transform(samples[first], samples[second], rng)
                    made[number] = check_sample(one), check_sample(other)
                except Exception as error:
                    raise unreadable_error(part, int(part.sample_ids[row]), error) from error
            mixed.append(made[number][0 if leads else 1])
        return mixed


def check_batch(batch: Batch, count: int) -> Batch:
    """``batch`` if each array's first dim is ``count``; raises DataError."""
    for name, array in batch.items():
        if array.ndim == 0 or len(array) != count:
            raise DataError(
                given=f"{name!r} of shape {list(array.shape)} from reading {count} samples",
                rule="the first dim of each array is the number of samples asked for",
                consequence="samples and values cannot be matched",
                nearest=f"return {name!r} with shape [{count}, …]",
            )
    return batch


def unreadable_error(part: MicroBatchSpec, sample: int | None, error: Exception) -> DataError:
    """The error of a part that could not be made; ``sample`` where it is one sample's fault."""
    ids = part.sample_ids[: part.num_rows]
    shown = ", ".join(map(str, ids[:8].tolist())) + (f", … ({ids.size} in all)" if ids.size > 8 else "")
    what = "; ".join(p.given for p in error.problems) if isinstance(error, UnisonoError) else str(error)
    who = f"samples {shown}" if sample is None else f"sample {sample}"
    return DataError(
        given=f"reading {who} of step {part.step} failed with {type(error).__name__}: {what}",
        rule="every sample of a step is readable",
        consequence=f"step {part.step} cannot run",
        nearest="mend or leave out what is named; loader.max_bad_sample_frac lets some bad samples weigh 0 instead"
        if sample is not None
        else f"loader.batch({part.step}) raises the same error in the calling thread",
    )


def _raise_with_step(part: MicroBatchSpec, make: Callable[[], Batch]) -> Batch:
    try:
        return make()
    except Exception as error:
        raise unreadable_error(part, None, error) from error


def _masked_weights(weights: NDArray[Any] | None, silent: NDArray[np.bool_]) -> NDArray[Any]:
    """``weights`` [B, …], or ones [B], with 0 in the silent rows."""
    if weights is None:
        return np.where(silent, np.float32(0), np.float32(1))
    weights = weights if weights.flags.writeable else weights.copy()
    weights[silent] = 0
    return weights
