"""Batches from a stream: data that can only be read from its beginning, such as torch's ``IterableDataset``.

A stream has no computable order. A resumed run reads and discards ``global_batch`` samples for every earlier step. The stream
must give the same samples again: ``iter`` gives the same sequence each time (per epoch, if it has ``set_epoch``). Every rank
reads the whole stream and keeps its share of each step, so the result does not depend on the number of ranks. Use a data set
with a length if that costs too much.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Sized
from dataclasses import replace
from itertools import islice, repeat
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import IterableDataset

from unisono.data.dataset import CollateFn, apply_collate, check_sample, collate
from unisono.data.loading.batch_builder import BuiltBatch, StageTimes, Transform
from unisono.data.loading.loader import StepBatch, needs_pinned_memory, to_tensors
from unisono.data.loading.micro_batch_specs import rank_range
from unisono.data.loading.worker_pool import FunctionWorker, WorkerPool
from unisono.data.order.permutation import sample_generator
from unisono.dist.progress import note_progress
from unisono.errors import DataError


def is_stream(data: Any) -> bool:
    """Whether ``data`` can only be read from its beginning: an ``IterableDataset``, or any iterable without a length."""
    return isinstance(data, IterableDataset) or (not isinstance(data, Sized) and isinstance(data, Iterable))


@runtime_checkable
class EpochAwareStream(Protocol):
    """A stream whose samples depend on the epoch."""

    def set_epoch(self, epoch: int, /) -> None: ...


class StreamLoader:
    """Loads one rank's batches from a stream; ``iterate`` works as that of ``Loader``.

    An epoch ends where the stream ends, within a step if need be, and the next one starts at once.
    ``StepBatch.sample_ids`` are the samples' numbers in their epoch.

    Args:
        stream: Iterable whose items are samples as in ``from_map_style``. ``iter`` must give the same sequence each
            time, or the same for each epoch if it has ``set_epoch``.
        seed: Any integer; keys the generators of ``transform``.
        global_batch: Samples of one step, over all ranks.
        micro_batch: Samples of one micro-batch. By default the rank's whole share.
        rank: This rank, from 0 to ``world_size`` - 1. Each rank reads the whole stream and uses its share.
        world_size: Number of ranks that share a step.
        prefetch_depth: Steps built ahead, by one thread; 0 builds each step when it is requested.
        transform: ``transform(sample, rng)`` gets one sample and a generator keyed by seed, epoch and the sample's
            number in the stream. Returns the new sample.
        collate_fn: Makes a micro-batch of a list of samples, as in ``Loader``.
        device: Device that the batches will be copied to. Batches stay in host memory; it is pinned if this is an
            accelerator with memory of its own.

    Raises:
        DataError: While iterating, the stream is empty, or reading fails; the error names the step.
    """

    def __init__(
        self,
        stream: Iterable[Any],
        *,
        seed: int,
        global_batch: int,
        micro_batch: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        prefetch_depth: int = 2,
        transform: Transform | None = None,
        collate_fn: CollateFn | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._stream, self._seed, self._transform, self._collate_fn = stream, seed, transform, collate_fn
        self._prefetch_depth, self._pin = prefetch_depth, needs_pinned_memory(device)
        self._global_batch = global_batch
        self._rank, self._world_size = rank, world_size
        self._share = rank_range(global_batch, rank, world_size)
        self._micro_batch = micro_batch or max(1, len(self._share))

    def iterate(self, start_step: int, stop_step: int) -> Generator[StepBatch, None, None]:
        """Batches of steps ``start_step`` to ``stop_step`` - 1, ``prefetch_depth`` ahead, after reading and discarding all
        earlier samples. Closing the generator ends its thread."""
        batches = self._batches(start_step, stop_step)
        if self._prefetch_depth == 0:
            yield from batches
            return
        # one thread, which reads the next batch for each job
        pool = WorkerPool(lambda: FunctionWorker(lambda _: next(batches, None)), name="unisono-stream")
        pool.resize(1)
        try:
            begin = time.perf_counter()
            for _, batch in pool.map_in_order(repeat(None), ahead=self._prefetch_depth + 1):
                if batch is None:
                    return
                yield replace(batch, wait_s=time.perf_counter() - begin)
                begin = time.perf_counter()
        finally:
            pool.close()

    def close(self) -> None:
        """Does nothing: a loader holds nothing between iterations."""

    def _batches(self, start_step: int, stop_step: int) -> Iterator[StepBatch]:
        items = self._items_from(start_step * self._global_batch)
        for step in range(start_step, stop_step):
            begin, stages = time.perf_counter(), StageTimes()
            share: list[tuple[int, int, Any]] = []
            epoch = 0
            try:
                for slot, item in enumerate(islice(items, self._global_batch)):
                    if slot == 0:
                        epoch = item[0]
                    if slot in self._share:
                        share.append(item)
                stages.read_s = time.perf_counter() - begin
                starts = range(0, len(share), self._micro_batch)
                micro_batches = [self._micro_batch_of(share[low : low + self._micro_batch], stages) for low in starts]
            except DataError:
                raise
            except Exception as error:
                raise DataError(
                    given=f"reading step {step} from a stream failed with {type(error).__name__}: {error}",
                    rule="every sample of a step is readable",
                    consequence=f"step {step} cannot run, and a stream cannot continue after an error",
                    nearest="repair the stream, or make it skip the same unreadable samples each time",
                ) from error
            yield StepBatch(
                step=step,
                epoch=epoch,
                batch_shard=step * self._world_size + self._rank,
                sample_ids=np.array([number for _, number, _ in share], np.int64),
                micro_batches=micro_batches,
                wait_s=time.perf_counter() - begin,
                skipped_ids=[],
                stages=stages,
            )

    def _micro_batch_of(self, items: list[tuple[int, int, Any]], stages: StageTimes) -> dict[str, torch.Tensor]:
        begin_s = time.perf_counter()
        samples = [item for _, _, item in items]
        if self._collate_fn is None or self._transform is not None:
            samples = [check_sample(sample) for sample in samples]
        if self._transform is not None:
            rngs = [sample_generator(self._seed, epoch, number) for epoch, number, _ in items]
            samples = [check_sample(self._transform(sample, rng)) for sample, rng in zip(samples, rngs, strict=True)]
        collating_s = time.perf_counter()
        if self._collate_fn is not None:
            batch = apply_collate(self._collate_fn, samples)
        else:
            batch = collate(samples, [number for _, number, _ in items])
        stages.add(StageTimes(transform_s=collating_s - begin_s, collate_s=time.perf_counter() - collating_s))
        return to_tensors(BuiltBatch(arrays=batch, skipped_ids=[]), pin=self._pin)[0]

    def _items_from(self, first: int) -> Iterator[tuple[int, int, Any]]:
        """(epoch, number in the epoch, item) from the run's sample number ``first`` on."""
        epoch, to_skip = 0, first
        while True:
            count = 0
            if isinstance(self._stream, EpochAwareStream):
                self._stream.set_epoch(epoch)
            for item in self._stream:
                note_progress()
                if to_skip:
                    to_skip -= 1
                else:
                    yield epoch, count, item
                count += 1
            if count == 0:
                raise DataError(
                    given=f"a stream that gave no sample in epoch {epoch}",
                    rule="iterating a stream gives its samples each time, not only the first",
                    consequence="there is nothing to train on",
                    nearest="an object whose __iter__ starts anew, not a generator",
                )
            epoch += 1
