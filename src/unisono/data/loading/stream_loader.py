"""Batches from a stream: data that can only be read from its beginning, such as torch's ``IterableDataset``.

The contract of resuming. A stream has no order that could be computed, so where a run goes on is found by reading up to there:
``global_batch`` samples per step that is behind. That the samples are then the same is up to the stream: ``iter`` must give the
same sequence each time (each epoch's own, where it has ``set_epoch``). Every rank reads the whole stream and keeps its share of
each step, so that all numbers of ranks see the same. Where that costs too much, a data set with a length is what is needed.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sized
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import IterableDataset

from unisono.data.dataset import check_sample, collate
from unisono.data.loading.batch_builder import BuiltBatch, Transform
from unisono.data.loading.loader import StepBatch, needs_pinned_memory, rank_range, to_tensors
from unisono.data.order.permutation import sample_generator
from unisono.errors import DataError

_PATIENCE_S = 5.0


def is_stream(data: Any) -> bool:
    """Whether ``data`` can only be read from its beginning: an ``IterableDataset``, or anything to iterate without length."""
    return isinstance(data, IterableDataset) or (not isinstance(data, Sized) and isinstance(data, Iterable))


@runtime_checkable
class EpochAwareStream(Protocol):
    """A stream that differs from epoch to epoch."""

    def set_epoch(self, epoch: int, /) -> None: ...


class StreamLoader:
    """Feeds one rank from ``stream``, whose items are samples as of ``from_map_style``. Iterates like ``Loader.iterate``.

    An epoch ends where the stream does, inside a step if need be; the next begins at once. ``transform(sample, rng)`` draws from
    a generator keyed by seed, epoch and the sample's number in the stream. Raises DataError for an empty stream, and naming the
    step where reading fails.
    """

    def __init__(
        self,
        stream: Iterable[Any],
        *,
        seed: int,
        global_batch: int,
        micro_batch: int | None = None,
        rank: int = 0,
        world: int = 1,
        prefetch_depth: int = 2,
        transform: Transform | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._stream, self._seed, self._transform = stream, seed, transform
        self._prefetch_depth, self._pin = prefetch_depth, needs_pinned_memory(device)
        self._global_batch = global_batch
        self._rank, self._world = rank, world
        self._own = rank_range(global_batch, rank, world)
        self._micro_batch = micro_batch or max(1, len(self._own))

    def iterate(self, start_step: int, stop_step: int) -> Generator[StepBatch, None, None]:
        """The batches of steps ``start_step`` up to ``stop_step`` (not included), ``prefetch_depth`` ahead; what is before is
        read and dropped. Closing it ends its thread."""
        made = self._made(start_step, stop_step)
        if self._prefetch_depth == 0:
            yield from made
            return
        ready: queue.Queue[StepBatch | BaseException | None] = queue.Queue(self._prefetch_depth)
        closed = threading.Event()
        # A daemon, because a consumer that dies with an exception may never close us, and must not hang at exit.
        reader = threading.Thread(target=_read, args=(made, ready, closed), name="unisono-stream", daemon=True)
        reader.start()
        try:
            while True:
                begin = time.perf_counter()
                item = ready.get()
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                yield replace(item, wait_s=time.perf_counter() - begin)
        finally:
            closed.set()
            patience = time.monotonic() + _PATIENCE_S
            while reader.is_alive() and time.monotonic() < patience:  # it may be waiting for room, or inside the stream
                with suppress(queue.Empty):
                    ready.get(timeout=0.01)

    def close(self) -> None:
        """Nothing is kept between iterations."""

    def _made(self, start_step: int, stop_step: int) -> Iterator[StepBatch]:
        numbered = self._from(start_step * self._global_batch)
        for step in range(start_step, stop_step):
            begin = time.perf_counter()
            mine: list[tuple[int, int, Any]] = []
            try:
                for slot, item in enumerate(islice(numbered, self._global_batch)):
                    if slot in self._own:
                        mine.append(item)
                parts = [
                    self._part(mine[low : low + self._micro_batch]) for low in range(0, len(mine), self._micro_batch)
                ]
            except DataError:
                raise
            except Exception as error:
                raise _unreadable(step, error) from error
            ids = np.array([number for _, number, _ in mine], np.int64)
            waited = time.perf_counter() - begin
            unit = step * self._world + self._rank
            yield StepBatch(
                step=step, batch_shard=unit, sample_ids=ids, micro_batches=parts, wait_s=waited, skipped_ids=[]
            )

    def _part(self, items: list[tuple[int, int, Any]]) -> dict[str, Any]:
        samples = [check_sample(item) for _, _, item in items]
        if self._transform is not None:
            keys = [(epoch, number) for epoch, number, _ in items]
            pairs = zip(samples, keys, strict=True)
            samples = [
                check_sample(self._transform(sample, sample_generator(self._seed, *key))) for sample, key in pairs
            ]
        batch = collate(samples, [number for _, number, _ in items])
        return to_tensors(BuiltBatch(arrays=batch, skipped_ids=[]), pin=self._pin)[0]

    def _from(self, sample: int) -> Iterator[tuple[int, int, Any]]:
        """(epoch, number in the epoch, item) from the run's ``sample``-th on."""
        epoch, ahead = 0, sample
        while True:
            count = 0
            if isinstance(self._stream, EpochAwareStream):
                self._stream.set_epoch(epoch)
            for item in self._stream:
                if ahead:
                    ahead -= 1
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


def _read(
    made: Iterator[StepBatch], ready: queue.Queue[StepBatch | BaseException | None], closed: threading.Event
) -> None:
    """Fill the queue until the end, an error, or until nobody wants more."""
    try:
        for batch in made:
            if closed.is_set():
                return
            ready.put(batch)
        ready.put(None)
    except BaseException as error:  # whatever it is, the consumer waits for it
        ready.put(error)


def _unreadable(step: int, error: Exception) -> DataError:
    return DataError(
        given=f"reading step {step} from a stream failed with {type(error).__name__}: {error}",
        rule="every sample of a step is readable",
        consequence=f"step {step} cannot run, and a stream cannot go on behind its error",
        nearest="mend the stream, or make it leave out what it cannot read, alike each time",
    )
