"""Build one micro-batch: a pure function of data set, transforms, seed and sample ids.

A thread, another process and a resumed rank get the same arrays. Errors name the sample. Where bad samples are allowed, a bad
one is replaced by another sample with loss weight 0, by a rule that gives the same result on every rank and in every rerun.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from unisono.data.dataset import (
    Batch,
    CollateFn,
    Dataset,
    Ids,
    apply_collate,
    check_batch,
    check_sample,
    collate,
    location_of,
    read_items,
    read_samples,
)
from unisono.data.order.permutation import pair_generator, sample_generator, sample_generators
from unisono.dist.progress import note_progress
from unisono.errors import DataError, UnisonoError

Transform = Callable[[Batch, np.random.Generator], Batch]
PairTransform = Callable[[Batch, Batch, np.random.Generator], tuple[Batch, Batch]]
BatchTransform = Callable[[Batch], Batch]

_NO_ROWS = np.empty(0, np.int64)
_MAX_REPLACEMENTS = 64  # samples after a bad one that are tried in its place


@runtime_checkable
class TwoPhaseTransform(Protocol):
    """A transform in two phases, whose result equals that of calling it on each sample.

    ``transform_sample`` runs on each sample, ``transform_batch`` on the collated results.
    """

    def __call__(self, sample: Batch, rng: np.random.Generator, /) -> Batch: ...

    def transform_sample(self, sample: Batch, rng: np.random.Generator, /) -> Batch: ...

    def transform_batch(self, batch: Batch, /) -> Batch: ...


@dataclass(kw_only=True, slots=True)  # not frozen: that doubles the time of making one
class MicroBatchSpec:
    """The samples of one micro-batch; not modified.

    The first ``num_rows`` of ``sample_ids`` are its rows. The others are partners of rows whose pair spans two micro-batches.
    The three pair arrays are empty without a pair transform.
    """

    step: int
    num_rows: int
    sample_ids: Ids
    occurrences: Ids  # with seed and id, the key of a sample's random generator
    is_filler: NDArray[np.bool_]  # [num_rows] padding of the batch, weight 0
    partner_rows: Ids  # [num_rows] row of the partner; the row itself if it has none
    pair_ids: Ids  # [num_rows] number of the pair, equal for both members
    is_first: NDArray[np.bool_]  # [num_rows] whether the row is the first of its pair


class ProgressMarker(Protocol):
    """Tells the consumer which sample a worker is reading."""

    @property
    def sample(self) -> int: ...

    def mark(self, sample: int) -> None: ...


@dataclass(slots=True)
class ThreadProgress:
    """A ``ProgressMarker`` for workers in the consumer's process; -1 before the first sample."""

    sample: int = -1

    def mark(self, sample: int) -> None:
        self.sample = sample
        note_progress()


@dataclass(slots=True)
class StageTimes:
    """Seconds of a worker's work on batches, by stage.

    Attributes:
        read_s: In the data set: reading, and what it does itself, such as decoding; stacking too, where nothing comes between.
        transform_s: In transforms of samples, pairs and batches.
        collate_s: In making a batch of its samples.
    """

    read_s: float = 0.0
    transform_s: float = 0.0
    collate_s: float = 0.0

    def add(self, other: StageTimes) -> None:
        """Add the seconds of ``other``."""
        self.read_s += other.read_s
        self.transform_s += other.transform_s
        self.collate_s += other.collate_s

    def fields(self) -> dict[str, float]:
        """The seconds under their names in events."""
        return {
            "time/loader_read_s": self.read_s,
            "time/loader_transform_s": self.transform_s,
            "time/loader_collate_s": self.collate_s,
        }


@dataclass(kw_only=True, slots=True)  # not frozen: that doubles the time of making one
class BuiltBatch:
    """Arrays with first dim ``num_rows``, the ids of the samples that could not be read, and how long each stage took."""

    arrays: Batch
    skipped_ids: list[int]
    stages: StageTimes = field(default_factory=StageTimes)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchBuilder:
    """Builds micro-batches.

    ``transform(sample, rng)`` gets one sample, ``pair_transform(a, b, rng)`` two neighbours of the global batch,
    ``batch_transform`` all rows. ``collate_fn`` makes the batch of the samples, instead of ``collate``.
    ``replaces_bad``: replace samples that cannot be read. ``adds_weights``: every batch has ``weights``.
    """

    dataset: Dataset
    seed: int
    transform: Transform | None = None
    pair_transform: PairTransform | None = None
    batch_transform: BatchTransform | None = None
    collate_fn: CollateFn | None = None
    replaces_bad: bool = False
    adds_weights: bool = False

    @property
    def _two_phase(self) -> TwoPhaseTransform | None:
        """The transform, if its second phase may run on the batch: not where a pair transform needs finished samples."""
        transform = self.transform
        # not asked of None: isinstance of a protocol takes a tenth of the time of a small batch
        if (
            transform is not None
            and self.pair_transform is None
            and self.collate_fn is None
            and isinstance(transform, TwoPhaseTransform)
        ):
            return transform
        return None

    @property
    def _sample_transform(self) -> Transform | None:
        return self.transform if self._two_phase is None else self._two_phase.transform_sample

    def build(self, spec: MicroBatchSpec, progress: ProgressMarker) -> BuiltBatch:
        """Build the rows of ``spec``. Raises DataError naming step and sample."""
        if spec.num_rows == 0:
            return BuiltBatch(arrays={}, skipped_ids=[])
        bad: dict[int, Exception] = {}
        progress.mark(int(spec.sample_ids[0]))
        stages = StageTimes()
        begin_s = time.perf_counter()
        if self.transform is None and self.pair_transform is None and self.collate_fn is None:
            batch = self._read_together(spec, bad, progress)
            stages.read_s = time.perf_counter() - begin_s
        else:
            samples = self._samples(spec, bad, progress, stages)
            if self.pair_transform is not None:
                samples = self._transform_pairs(self.pair_transform, samples, spec, progress)
            collating_s = time.perf_counter()
            stages.transform_s = collating_s - begin_s - stages.read_s
            batch = _name_step(spec, lambda: self._collate(samples[: spec.num_rows], spec.sample_ids.tolist()))
            stages.collate_s = time.perf_counter() - collating_s
        begin_s = time.perf_counter()
        two_phase = self._two_phase
        for transform in (None if two_phase is None else two_phase.transform_batch, self.batch_transform):
            if transform is not None:
                batch = _name_step(spec, lambda f=transform, batch=batch: check_batch(f(batch), spec.num_rows))
        stages.transform_s += time.perf_counter() - begin_s
        own_ids = spec.sample_ids[: spec.num_rows]
        bad_rows = np.flatnonzero(np.isin(own_ids, list(bad))) if bad else _NO_ROWS
        if self.adds_weights:
            without_weight = spec.is_filler.copy()
            without_weight[bad_rows] = True
            if "weights" in batch:
                check_batch({"weights": batch["weights"]}, spec.num_rows)
            batch["weights"] = _masked_weights(batch.get("weights"), without_weight)
        return BuiltBatch(arrays=batch, skipped_ids=own_ids[bad_rows].tolist(), stages=stages)

    def _read_together(self, spec: MicroBatchSpec, bad: dict[int, Exception], progress: ProgressMarker) -> Batch:
        try:
            return check_batch(self.dataset.read(spec.sample_ids), spec.sample_ids.size)
        except Exception as error:
            samples = self._samples(spec, bad, progress, StageTimes())
            if not bad:
                raise unreadable_error(spec, None, error) from error
        return _name_step(spec, lambda: collate(samples, spec.sample_ids.tolist()))

    def _collate(self, samples: list[Batch], ids: list[int]) -> Batch:
        return collate(samples, ids) if self.collate_fn is None else apply_collate(self.collate_fn, samples)

    def _read_raw(self, indices: Ids) -> list[Any]:
        return read_samples(self.dataset, indices) if self.collate_fn is None else read_items(self.dataset, indices)

    def _samples(
        self, spec: MicroBatchSpec, bad: dict[int, Exception], progress: ProgressMarker, stages: StageTimes
    ) -> list[Batch]:
        begin_s = time.perf_counter()
        try:
            raw = self._read_raw(spec.sample_ids)
        except Exception:  # some sample is bad: read each by itself to find it
            raw = None
        stages.read_s = time.perf_counter() - begin_s
        samples: list[Batch] = []
        rngs = sample_generators(self.seed, spec.occurrences, spec.sample_ids)
        for row, (sample, rng) in enumerate(zip(spec.sample_ids.tolist(), rngs, strict=True)):
            progress.mark(sample)
            try:
                raw_sample = self._read_raw(spec.sample_ids[row : row + 1])[0] if raw is None else raw[row]
                samples.append(self._transformed(raw_sample, rng))
            except Exception as error:
                samples.append(self._replacement(spec, row, error, bad))
        return samples

    def _replacement(self, spec: MicroBatchSpec, row: int, error: Exception, bad: dict[int, Exception]) -> Batch:
        """The first good sample after a bad one. Raises DataError if bad samples are not allowed, or none is good."""
        sample, occurrence, size = int(spec.sample_ids[row]), int(spec.occurrences[row]), len(self.dataset)
        if not self.replaces_bad:
            raise unreadable_error(spec, sample, error, self.dataset) from error
        bad[sample] = error
        for other in range(sample + 1, sample + 1 + min(_MAX_REPLACEMENTS, size - 1)):
            try:
                raw_sample = self._read_raw(np.array([other % size]))[0]
                return self._transformed(raw_sample, sample_generator(self.seed, occurrence, other % size))
            except Exception:  # the error of the requested sample is the one to report
                continue
        raise unreadable_error(spec, sample, error, self.dataset) from error

    def _transformed(self, sample: Any, rng: np.random.Generator) -> Any:
        transform = self._sample_transform
        if self.collate_fn is not None and (transform is not None or self.pair_transform is not None):
            sample = check_sample(sample)  # transforms take named arrays
        return sample if transform is None else check_sample(transform(sample, rng))

    def _transform_pairs(
        self, transform: PairTransform, samples: list[Batch], spec: MicroBatchSpec, progress: ProgressMarker
    ) -> list[Batch]:
        pairs: dict[int, tuple[Batch, Batch]] = {}
        mixed: list[Batch] = []
        rows = zip(spec.partner_rows.tolist(), spec.pair_ids.tolist(), spec.is_first.tolist(), strict=True)
        for row, (partner, pair, is_first) in enumerate(rows):
            progress.mark(int(spec.sample_ids[row]))
            if pair not in pairs:
                first, second = (row, partner) if is_first else (partner, row)
                try:
                    one, other = transform(samples[first], samples[second], pair_generator(self.seed, pair))
                    pairs[pair] = check_sample(one), check_sample(other)
                except Exception as error:
                    raise unreadable_error(spec, int(spec.sample_ids[row]), error, self.dataset) from error
            mixed.append(pairs[pair][0 if is_first else 1])
        return mixed


def unreadable_error(
    spec: MicroBatchSpec, sample: int | None, error: Exception, dataset: Dataset | None = None
) -> DataError:
    """The error for a micro-batch that could not be built; ``sample`` is None if no single sample caused it.

    ``dataset`` names the sample's file and row, if it knows them.
    """
    ids = spec.sample_ids[: spec.num_rows]
    shown = ", ".join(map(str, ids[:8].tolist())) + (f", … ({ids.size} in all)" if ids.size > 8 else "")
    who = f"samples {shown}" if sample is None else f"sample {sample}"
    where = "" if sample is None else location_of(dataset, sample)
    return DataError(
        given=_failed_read(who, f"step {spec.step}", where, error),
        rule="every sample of a step is readable",
        consequence=f"step {spec.step} cannot run",
        nearest="repair or leave out what is named; loader.max_bad_sample_frac lets some bad samples weigh 0 instead"
        if sample is not None
        else f"loader.batch({spec.step}) raises the same error in the calling thread",
    )


def check_held_out_samples(dataset: Dataset, ids: NDArray[np.int64]) -> None:
    """Raise DataError with the first of ``ids`` that cannot be read alone."""
    for sample in ids.tolist():
        try:
            dataset.read(np.array([sample]))
        except Exception as error:
            raise DataError(
                given=_failed_read(f"sample {sample}", "the held-out data", location_of(dataset, sample), error),
                rule="every held-out sample is readable",
                consequence="the model cannot be evaluated",
                nearest="repair or leave out what is named",
            ) from error


def _failed_read(who: str, of: str, where: str, error: Exception) -> str:
    reason = "; ".join(p.given for p in error.problems) if isinstance(error, UnisonoError) else str(error)
    return f"reading {who} of {of}{where and f', {where},'} failed with {type(error).__name__}: {reason}"


def not_numbers_error(name: str, array: NDArray[Any]) -> DataError:
    """The error for an array of a batch that cannot become a tensor."""
    return DataError(
        given=f"{name!r} of dtype {array.dtype}",
        rule="batches hold numbers",
        consequence="it cannot become a tensor",
        nearest="encode it as integers in the dataset, or leave it out",
    )


def _name_step(spec: MicroBatchSpec, build: Callable[[], Batch]) -> Batch:
    """Call ``build``; an error it raises names the step."""
    try:
        return build()
    except Exception as error:
        raise unreadable_error(spec, None, error) from error


def _masked_weights(weights: NDArray[Any] | None, mask: NDArray[np.bool_]) -> NDArray[Any]:
    """``weights`` [B, …], or ones [B], with 0 in the rows of ``mask``."""
    if weights is None:
        return np.where(mask, np.float32(0), np.float32(1))
    weights = weights if weights.flags.writeable else weights.copy()
    weights[mask] = 0
    return weights
