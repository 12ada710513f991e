"""Batches in an order that does not depend on ranks, made ready in the background.

The samples of step ``t`` are positions ``[t·global_batch, (t+1)·global_batch)`` of the order; a rank takes a contiguous
share of them. So a batch is a pure function of the step number, every number of ranks sees the same samples per step,
and the state of a loader is the step it is at. Which thread builds a batch changes nothing: ``prefetch_depth`` trades
memory for waiting only.

Not here: worker processes, and moving batches to the device (the step loop does, from pinned memory, without waiting).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.data.dataset import Batch, Dataset, collate
from unisono.data.order import Order, sample_generator
from unisono.errors import DataError, Problem, UnisonoError

Transform = Callable[[Batch, np.random.Generator], Batch]
Tensors = dict[str, torch.Tensor]

_ORDER_AHEAD = 4096  # samples whose order is computed at once


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """What one rank consumes in one step."""

    step: int
    sample_ids: NDArray[np.int64]  # this rank's, in order
    micro_batches: list[Tensors]  # as many as its share needs, the last one may be smaller; none for an empty share
    wait_s: float  # how long the consumer waited for it


def share(total: int, rank: int, world: int) -> range:
    """Rank ``rank``'s contiguous part of ``range(total)``; sizes differ by at most one, earlier ranks' are larger."""
    base, extra = divmod(total, world)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


class Loader:
    """Feeds one rank. Raises ``DataError`` where the arithmetic is impossible, or when a sample cannot be read.

    A dataset shorter than ``global_batch`` is legal: a step then spans several epochs. Ranks may have different numbers
    of micro-batches, or none. ``transform(sample, rng)`` gets one sample (arrays without the batch dim) and a generator
    keyed by (seed, epoch, sample id), so that what it draws is the same on any rank and after any resume.
    ``device``: where this is an accelerator with host memory of its own, batches are pinned for it.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        seed: int,
        global_batch: int,
        micro_batch: int,
        rank: int,
        world: int,
        prefetch_depth: int,
        shuffle: bool = True,
        block: int = 0,
        transform: Transform | None = None,
        device: torch.device | None = None,
    ) -> None:
        if not (global_batch >= 1 and micro_batch >= 1 and 0 <= rank < world and prefetch_depth >= 0):
            raise DataError(
                Problem(
                    given=f"global_batch {global_batch}, micro_batch {micro_batch}, rank {rank} of {world}, "
                    f"prefetch_depth {prefetch_depth}",
                    rule="batches hold at least one sample, ranks count from 0 to world - 1, depths from 0",
                    consequence="no batch can be made",
                    nearest=f"global_batch {max(1, global_batch)}, micro_batch {max(1, micro_batch)}, "
                    f"rank {min(max(0, rank), max(0, world - 1))} of {max(1, world)}, "
                    f"prefetch_depth {max(0, prefetch_depth)}",
                )
            )
        if len(dataset) == 0:
            raise DataError(
                Problem(
                    given="a dataset of 0 samples",
                    rule="a dataset has at least one sample",
                    consequence="there is nothing to train on",
                    nearest="check the path and the filters of the dataset",
                )
            )
        self._dataset = dataset
        self._seed = seed
        self._global_batch = global_batch
        self._micro_batch = micro_batch
        self._share = share(global_batch, rank, world)
        self._prefetch_depth = prefetch_depth
        self._order = Order(len(dataset), seed=seed, block=block) if shuffle else None
        self._ids = (0, np.empty((0, len(self._share)), np.int64))  # first step and samples [steps, share] of a stretch
        self._transform = transform
        self._pin = device is not None and device.type not in ("cpu", "mps", "meta")

    def sample_ids(self, step: int) -> NDArray[np.int64]:
        """This rank's samples of a step, in order; computed, nothing is read."""
        if self._order is None:
            return self._positions(step) % len(self._dataset)
        # A call of the order costs about the same for one step as for hundreds: keep the stretch this step lies in.
        stretch = max(1, _ORDER_AHEAD // max(1, len(self._share)))
        first, ids = self._ids
        if not first <= step < first + len(ids):
            first = step - step % stretch
            ids = self._order(self._positions(first) + np.arange(stretch)[:, None] * self._global_batch)
            self._ids = (first, ids)
        return ids[step - first]

    def batch(self, step: int) -> StepBatch:
        """One step's batch, built now, in this thread."""
        begin = time.perf_counter()
        ids = self.sample_ids(step)
        try:
            micro_batches = self._read(step, ids)
        except Exception as error:
            raise _unreadable(step, ids, error) from error
        return StepBatch(step=step, sample_ids=ids, micro_batches=micro_batches, wait_s=time.perf_counter() - begin)

    def iterate(self, start_step: int, stop_step: int) -> Generator[StepBatch, None, None]:
        """The batches of steps ``start_step`` up to ``stop_step`` (not included), at most ``prefetch_depth`` ahead.

        An error met ahead of time is raised when its step is asked for. Closing the generator ends its thread.
        """
        if self._prefetch_depth == 0:
            for step in range(start_step, stop_step):
                yield self.batch(step)
            return
        ready: queue.SimpleQueue[StepBatch | BaseException] = queue.SimpleQueue()
        room = threading.Semaphore(self._prefetch_depth)
        closed = threading.Event()

        def build() -> None:
            for step in range(start_step, stop_step):
                room.acquire()
                if closed.is_set():
                    return
                try:
                    ready.put(self.batch(step))
                except BaseException as error:  # whatever it is, the consumer waits for it
                    ready.put(error)
                    return

        # A daemon, because a consumer that dies with an exception may never close us, and must not hang at exit.
        builder = threading.Thread(target=build, name="unisono-prefetch", daemon=True)
        builder.start()
        try:
            for _ in range(start_step, stop_step):
                begin = time.perf_counter()
                item = ready.get()
                waited = time.perf_counter() - begin
                if isinstance(item, BaseException):
                    raise item
                room.release()
                yield replace(item, wait_s=waited)
        finally:
            closed.set()
            room.release()
            builder.join()

    def _positions(self, step: int) -> NDArray[np.int64]:
        first = step * self._global_batch
        return np.arange(first + self._share.start, first + self._share.stop, dtype=np.int64)

    def _read(self, step: int, ids: NDArray[np.int64]) -> list[Tensors]:
        if ids.size == 0:
            return []
        batch = _checked(self._dataset.read(ids), ids.size)
        if self._transform is not None:
            epochs = self._positions(step) // len(self._dataset)
            samples: list[Batch] = []
            for row, (epoch, sample) in enumerate(zip(epochs.tolist(), ids.tolist(), strict=True)):
                rng = sample_generator(self._seed, epoch, sample)
                samples.append(self._transform({name: array[row] for name, array in batch.items()}, rng))
            batch = collate(samples, ids.tolist())
        micro_batches = [
            {name: _tensor(name, array[low : low + self._micro_batch]) for name, array in batch.items()}
            for low in range(0, ids.size, self._micro_batch)
        ]
        if self._pin:
            return [{name: tensor.pin_memory() for name, tensor in part.items()} for part in micro_batches]
        return micro_batches


def eval_batches(
    dataset: Dataset, micro_batch: int, rank: int, world: int, limit: int | None = None
) -> Iterator[Tensors]:
    """A rank's share of the whole dataset in its own order, each sample once over all ranks; shares may be uneven.

    ``limit``: read only that many samples, spread evenly over the dataset.
    """
    total = len(dataset) if limit is None else min(limit, len(dataset))
    mine = share(total, rank, world)
    for low in range(mine.start, mine.stop, micro_batch):
        places = np.arange(low, min(low + micro_batch, mine.stop), dtype=np.int64)
        ids = places * len(dataset) // total
        yield {name: _tensor(name, array) for name, array in _checked(dataset.read(ids), ids.size).items()}


def _checked(batch: Batch, count: int) -> Batch:
    for name, array in batch.items():
        if array.ndim == 0 or len(array) != count:
            raise DataError(
                Problem(
                    given=f"{name!r} of shape {list(array.shape)} from reading {count} samples",
                    rule="the first dim of each array is the number of samples asked for",
                    consequence="samples and values cannot be matched",
                    nearest=f"return {name!r} with shape [{count}, …]",
                )
            )
    return batch


def _tensor(name: str, array: NDArray[Any]) -> torch.Tensor:
    if array.dtype.kind not in "biufc":
        raise DataError(
            Problem(
                given=f"{name!r} of dtype {array.dtype}",
                rule="batches hold numbers",
                consequence="it cannot become a tensor",
                nearest="encode it as integers in the dataset, or leave it out",
            )
        )
    return torch.as_tensor(array if array.flags.writeable else array.copy())  # shares the array's memory


def _unreadable(step: int, ids: NDArray[np.int64], error: Exception) -> DataError:
    shown = ", ".join(map(str, ids[:8].tolist())) + (f", … ({ids.size} in all)" if ids.size > 8 else "")
    what = "; ".join(p.given for p in error.problems) if isinstance(error, UnisonoError) else str(error)
    return DataError(
        Problem(
            given=f"reading step {step} failed with {type(error).__name__}: {what}",
            rule="every sample of a step is readable",
            consequence=f"step {step} cannot run; samples {shown}",
            nearest=f"read them alone: loader.batch({step}) raises the same error in the calling thread",
        )
    )
