"""Batches in an order that does not depend on the number of ranks or workers, built in the background.

Which samples a step has is a function of the step (``micro_batch_specs``). The content of a batch is a function of its samples
(``batch_builder``). Workers decide only when it is built (``worker_pool``). The state of a loader is therefore one step number.

Not here: streams without a computable order (``stream_loader``).
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from unisono.data.combined import OrderedDataset
from unisono.data.dataset import Batch, CollateFn, Dataset, Ids, check_batch
from unisono.data.loading.batch_builder import (
    BatchBuilder,
    BatchTransform,
    BuiltBatch,
    MicroBatchSpec,
    PairTransform,
    StageTimes,
    ThreadProgress,
    Transform,
    check_held_out_samples,
    not_numbers_error,
)
from unisono.data.loading.micro_batch_specs import SpecSource, rank_range
from unisono.data.loading.worker_pool import Job, PoolWorker, WorkerPool, usable_cores
from unisono.data.loading.worker_process import ProcessWorker, worker_starter
from unisono.data.loading.worker_start import WorkerStarter, WorkerStartError
from unisono.data.loading.worker_tuning import WorkerSetting, WorkerTuner
from unisono.data.nested import leaves, map_leaves
from unisono.data.options import LoaderOptions
from unisono.data.order.permutation import Permutation
from unisono.data.order.samplers import SampleOrder, SequentialOrder, ShuffledOrder
from unisono.data.order.step_schedule import StepSchedule
from unisono.device.adapter import DeviceEvent
from unisono.device.torch_adapters import adapter_of
from unisono.dist.progress import note_progress
from unisono.errors import DataError
from unisono.storage.limits import MAX_STEP_SAMPLES

Tensors = dict[str, torch.Tensor]
_Delivered = tuple[Tensors, list[int], StageTimes]  # and the ids of skipped samples
_Job = Job[MicroBatchSpec, _Delivered]
_Pool = WorkerPool[MicroBatchSpec, _Delivered]

_LOOK_S = 1.0  # how often a worker that lets others wait is looked at
_MIN_JUDGED_SAMPLES = 1000  # the share of bad samples is taken of at least this many
_LOG = logging.getLogger("unisono")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """One rank's share of one step.

    Attributes:
        step: Number of the step, from 0 over the whole run.
        epoch: Number of the epoch that it belongs to, from 0; that of its first sample, where it spans two.
        batch_shard: Number of the share: ``step * world_size + rank``.
        sample_ids: [samples] int64, ids of the share in order.
        micro_batches: Tensors by name, first dim = samples. The last micro-batch may be smaller; an empty share has
            none.
        wait_s: Seconds that the loader's iterator waited for this batch. Runs report the phase ``data_wait`` instead, which the
            training loop measures.
        skipped_ids: Samples of this rank that could not be read and have weight 0.
        stages: Seconds spent building it in each stage, by a worker or by this thread.
    """

    step: int
    epoch: int
    batch_shard: int
    sample_ids: Ids
    micro_batches: list[Tensors]
    wait_s: float
    skipped_ids: list[int]
    stages: StageTimes = field(default_factory=StageTimes)

    def __repr__(self) -> str:
        names = ", ".join(self.micro_batches[0]) if self.micro_batches else "none"
        samples, parts = len(self.sample_ids), len(self.micro_batches)
        return f"StepBatch(step={self.step}, {samples} samples in {parts} micro-batches, entries {names})"


class Loader:
    """Loads one rank's batches, in an order that does not depend on the number of ranks or workers.

    Samples are shuffled once per epoch. A data set may define its own order (``mixture``, ``weighted``, ``bucketed``),
    which replaces ``shuffle``. With ``last_batch`` pad or ``max_bad_sample_frac`` above 0, a batch has ``weights``, 0
    in rows that must not count; the objectives of ``train`` apply them. Workers live until ``close()`` or until the
    loader is garbage-collected.

    Args:
        dataset: The samples; ``as_dataset`` adapts a map-style dataset.
        seed: Any integer; keys the order of the samples and the generators of the transforms.
        global_batch: Samples of one step, over all ranks.
        micro_batch: Samples of one micro-batch. By default the rank's whole share: ``global_batch`` / ``world_size``,
            rounded up.
        rank: This rank, from 0 to ``world_size`` - 1.
        world_size: Number of ranks that share a step.
        options: Workers, incomplete last batches, unreadable samples and the time limit; by default
            ``LoaderOptions()``.
        prefetch_depth: Least number of steps built ahead; more workers build more. 0 builds each step when it is
            requested.
        shuffle: False keeps the data set's order in every epoch.
        shuffle_block: Above 0, keeps that many neighbouring samples together when shuffling, for storage that is slow
            at random access.
        transform: ``transform(sample, rng)`` gets one sample, arrays without a batch dim, and a generator keyed by
            seed, epoch and sample id, valid during the call. Returns the new sample.
        pair_transform: ``pair_transform(a, b, rng)`` gets two neighbours of the global batch and returns both (mixup).
        batch_transform: ``batch_transform(batch)`` gets all rows of a micro-batch and returns as many.
        collate_fn: Makes a micro-batch of a list of samples, as in ``torch.utils.data.DataLoader``. The samples are the
            data set's own items, or named arrays after a transform. It returns a dict, a dataclass or a pair (inputs,
            targets). By default samples are stacked.
        device: Device that the batches will be copied to. Batches stay in host memory; it is pinned if this is an
            accelerator with memory of its own.

    Raises:
        DataError: The batch sizes or ranks are impossible or the data set is empty; while iterating, a sample cannot be
            read.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        seed: int,
        global_batch: int,
        micro_batch: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        options: LoaderOptions | None = None,
        prefetch_depth: int = 2,
        shuffle: bool = True,
        shuffle_block: int = 0,
        transform: Transform | None = None,
        pair_transform: PairTransform | None = None,
        batch_transform: BatchTransform | None = None,
        collate_fn: CollateFn | None = None,
        device: torch.device | None = None,
    ) -> None:
        micro_batch = max(1, -(-global_batch // max(1, world_size))) if micro_batch is None else micro_batch
        _check_sizes(len(dataset), global_batch, micro_batch, rank, world_size)
        self.options = options = options or LoaderOptions()
        self.schedule = StepSchedule(len(dataset), global_batch, options.last_batch)
        if isinstance(dataset, OrderedDataset):
            order: SampleOrder = dataset.sample_order(seed=seed, global_batch=global_batch)
        elif shuffle:
            order = ShuffledOrder(Permutation(len(dataset), seed=seed, block_size=shuffle_block))
        else:
            order = SequentialOrder(len(dataset))
        self._specs = SpecSource(
            self.schedule, order, micro_batch=micro_batch, world_size=world_size, pairs=pair_transform is not None
        )
        self._prefetch_depth, self._rank, self._world_size = prefetch_depth, rank, world_size
        self._builder = BatchBuilder(
            dataset=dataset,
            seed=seed,
            transform=transform,
            pair_transform=pair_transform,
            batch_transform=batch_transform,
            collate_fn=collate_fn,
            replaces_bad=options.max_bad_sample_frac > 0,
            adds_weights=options.max_bad_sample_frac > 0 or options.last_batch == "pad",
        )
        # not a method: workers that refer to the loader would keep it alive
        self._deliver = partial(to_tensors, pin=needs_pinned_memory(device))
        self._inline = ThreadWorker(self._builder, self._deliver)
        self._tuner = WorkerTuner(
            replace(options, num_workers=0) if prefetch_depth == 0 else options,
            limit=usable_cores(os.environ),
            about=self._builder,
        )
        self._workers: _LoaderWorkers | None = None
        self._delivered = self._skipped = self._next_step = 0

    def __repr__(self) -> str:
        size, steps, setting = self.schedule.global_batch, len(self), self._tuner.setting
        workers = f"{setting.workers} {setting.kind} worker{'s' if setting.workers > 1 else ''}"
        workers = workers if setting.workers else "no workers"
        return (
            f"Loader({self._builder.dataset!r}, {steps} steps of {size} per epoch, rank {self._rank} of "
            f"{self._world_size}, {workers}, next step {self._next_step})"
        )

    @property
    def worker_setting(self) -> WorkerSetting:
        """The current kind and number of workers; with ``num_workers=-1`` tuning changes it.

        0 workers: the thread that asks for a batch builds it, without the limit of ``timeout_s``.
        """
        return self._tuner.setting

    def sample_ids(self, step: int) -> Ids:
        """This rank's sample ids of a step, in order, without reading data."""
        return self._specs.samples(self._batch_shard(step), self._world_size).own_ids

    def batch(self, step: int) -> StepBatch:
        """Build one step's batch in the calling thread."""
        return self._build(self._batch_shard(step), self._world_size)

    def iterate(self, start_step: int, stop_step: int) -> Generator[StepBatch, None, None]:
        """Batches of steps ``start_step`` to ``stop_step`` - 1, built ahead. An error is raised when its step is due."""
        batch_shards = iter(range(self._batch_shard(start_step), self._batch_shard(stop_step), self._world_size))
        return self._iterate(lambda wait: next(batch_shards, None), self._world_size)

    def iterate_claimed(self, claim: Callable[[bool], int | None]) -> Generator[StepBatch, None, None]:
        """Batches of the batch shards that ``claim`` assigns to this process, in the order it assigns them.

        Batch shard ``n`` has the samples of rank ``n % world_size`` in step ``n // world_size``. ``claim(wait)`` returns the
        next number. With ``wait`` true, None ends the iteration; else None means that none is free now, and ``claim`` is
        called again after the next batch.
        """
        return self._iterate(claim, 1)

    def _iterate(self, claim: Callable[[bool], int | None], stride: int) -> Generator[StepBatch, None, None]:
        """Build the shards that ``claim`` returns. ``stride``: distance between them, as ``SpecSource`` takes it."""
        pending: deque[tuple[int, list[_Job]]] = deque()
        again: deque[int] = deque()  # shards of processes that could not be started

        def next_shard(wait: bool) -> int | None:
            return again.popleft() if again else claim(wait)

        try:
            while True:
                begin = time.perf_counter()
                if self._tuner.setting.workers > 0:
                    self._submit(pending, next_shard, stride)
                elif not pending:
                    self.close()  # workers of an earlier setting
                    if (claimed := next_shard(True)) is None:
                        return
                    batch = self._build(claimed, stride)
                    self._tuner.record_wait(batch.wait_s)
                    yield batch
                    continue
                if not pending:
                    return
                batch_shard, jobs = pending.popleft()
                try:
                    delivered = [self._wait(job) for job in jobs]
                except WorkerStartError as error:
                    if not self._tuner.leave_processes_out():
                        raise
                    _LOG.warning("worker processes are not tried, threads go on: %s", error.problems[0].given)
                    again.extend([batch_shard, *(shard for shard, _ in pending)])
                    pending.clear()
                    self.close()
                    continue
                wait_s = time.perf_counter() - begin
                self._tuner.record_wait(wait_s)
                yield self._step_batch(batch_shard, stride, delivered, wait_s)
        finally:
            for _, jobs in pending:
                for job in jobs:
                    job.future.cancel()

    def _submit(self, pending: deque[tuple[int, list[_Job]]], claim: Callable[[bool], int | None], stride: int) -> None:
        """Give the workers as many batch shards as they build ahead."""
        workers = self._start_workers()
        while len(pending) <= workers.depth and (batch_shard := claim(not pending)) is not None:
            pending.append(
                (batch_shard, [workers.pool.submit(spec) for spec in self._specs.specs(batch_shard, stride)])
            )

    def _build(self, batch_shard: int, stride: int) -> StepBatch:
        begin = time.perf_counter()
        delivered = [self._inline(spec) for spec in self._specs.specs(batch_shard, stride)]
        return self._step_batch(batch_shard, stride, delivered, time.perf_counter() - begin)

    def close(self) -> None:
        """End the workers. A loader that is used again starts new ones."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- in your own training loop ---------------------------------------------------------------------------------

    def __iter__(self) -> Generator[Tensors, None, None]:
        """Micro-batches from the current step to the end of its epoch; the next call starts the next epoch."""
        stop = (self._next_step // self.schedule.steps_per_epoch + 1) * self.schedule.steps_per_epoch
        with closing(self.iterate(self._next_step, stop)) as batches:
            for batch in batches:
                yield from batch.micro_batches
                self._next_step = batch.step + 1

    def __len__(self) -> int:
        """The number of steps of one epoch."""
        return self.schedule.steps_per_epoch

    def state_dict(self) -> dict[str, int]:
        """The first step whose micro-batches have not all been consumed."""
        return {"step": self._next_step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at that step; nothing is read."""
        self._next_step = int(state["step"])

    # --- workers ---------------------------------------------------------------------------------------------------

    def _batch_shard(self, step: int) -> int:
        return step * self._world_size + self._rank

    def _start_workers(self) -> _LoaderWorkers:
        if self._workers is None or not self._workers.owned_by_this_process:
            self._workers = _LoaderWorkers(self._builder, self._deliver)
            weakref.finalize(self, self._workers.close)
        self._workers.apply_setting(self._tuner.setting, self._prefetch_depth)
        return self._workers

    def _wait(self, job: _Job) -> _Delivered:
        try:
            return _result(job, self.options.timeout_s)
        except TimeoutError as error:
            if job.future.done():
                raise  # the worker's own
            sample = _sample_of(job)
            if self._workers is not None:
                self._workers.close(patience_s=0.1)
            raise DataError(
                given=f"sample {sample} of step {job.request.step}: no answer in {self.options.timeout_s:g} s",
                rule="reading a step's samples ends within loader.timeout_s",
                consequence=f"step {job.request.step} cannot run",
                nearest="look at that sample and the storage it is on; a larger loader.timeout_s",
            ) from error

    def _step_batch(self, batch_shard: int, stride: int, delivered: list[_Delivered], wait_s: float) -> StepBatch:
        step = batch_shard // self._world_size
        sample_ids = self._specs.samples(batch_shard, stride).own_ids
        skipped = [sample for _, ids, _ in delivered for sample in ids]
        stages = StageTimes()
        for _, _, each in delivered:
            stages.add(each)
        self._delivered += len(sample_ids)
        self._skipped += len(skipped)
        if self._skipped > self.options.max_bad_sample_frac * max(self._delivered, _MIN_JUDGED_SAMPLES):
            raise DataError(
                given=f"{self._skipped} of {self._delivered} samples could not be read, at last {skipped[:8]}",
                rule=f"at most {self.options.max_bad_sample_frac:g} of the samples are skipped (loader.max_bad_sample_frac)",
                consequence=f"step {step} does not run",
                nearest="unisono data verify tells what is damaged in a record file; a larger loader.max_bad_sample_frac",
            )
        return StepBatch(
            step=step,
            epoch=self.schedule.epoch(step),
            batch_shard=batch_shard,
            sample_ids=sample_ids,
            micro_batches=[tensors for tensors, _, _ in delivered],
            wait_s=wait_s,
            skipped_ids=skipped,
            stages=stages,
        )


class ThreadWorker(PoolWorker[MicroBatchSpec, _Delivered]):
    """Builds micro-batches in the pool's thread: for code that releases the interpreter lock."""

    def __init__(self, builder: BatchBuilder, deliver: Callable[[BuiltBatch], _Delivered]) -> None:
        self._builder, self._deliver = builder, deliver
        self.progress = ThreadProgress()

    def __call__(self, request: MicroBatchSpec, /) -> _Delivered:
        return self._deliver(self._builder.build(request, self.progress))


class _LoaderWorkers:
    """The pool for the current setting; a pool that is replaced finishes its jobs."""

    def __init__(self, builder: BatchBuilder, deliver: Callable[[BuiltBatch], _Delivered]) -> None:
        self._builder, self._deliver = builder, deliver
        self._setting: WorkerSetting | None = None
        self._retired: list[tuple[_Pool, WorkerStarter | None]] = []
        self.depth = 0

    def apply_setting(self, setting: WorkerSetting, prefetch_depth: int) -> None:
        if setting == self._setting:
            return
        if self._setting is None or self._setting.kind != setting.kind:
            if self._setting is not None:
                self.pool.resize(0)
                self._retired.append((self.pool, self._starter))
            self._starter = None if setting.kind == "thread" else worker_starter(self._builder)
            if self._starter is None:
                make_worker: Callable[[], PoolWorker[MicroBatchSpec, _Delivered]] = partial(
                    ThreadWorker, self._builder, self._deliver
                )
            else:
                make_worker = partial(ProcessWorker[_Delivered], self._starter, self._deliver)
            self.pool: _Pool = WorkerPool(make_worker, name="unisono-loader", initialize=_use_one_torch_thread)
        if self._starter is not None:
            self._starter.expect(setting.workers)
        threads = torch.get_num_threads()
        try:
            self.pool.resize(setting.workers)
        except DataError:
            if self._starter is not None:
                self._starter.stop()
                self._starter.close()
            raise
        torch.set_num_threads(threads)  # the workers' setting is otherwise the default of later threads
        self.depth = max(prefetch_depth, setting.workers)
        self._setting = setting

    @property
    def owned_by_this_process(self) -> bool:
        """Whether the pool's threads are in this process; a fork has none of them."""
        return self._setting is None or self.pool.owned_by_this_process

    def close(self, *, patience_s: float = 5.0) -> None:
        for pool, starter in [*self._retired, *([(self.pool, self._starter)] if self._setting is not None else [])]:
            if starter is not None and pool.owned_by_this_process:
                starter.stop()
            pool.close(patience_s=patience_s)
            if starter is not None and pool.owned_by_this_process:
                starter.close()
        self._setting, self._retired = None, []


def _sample_of(job: _Job) -> int:
    """The sample that the job's worker reads; -1 if that is unknown."""
    return job.worker.progress.sample if isinstance(job.worker, ThreadWorker | ProcessWorker) else -1


def _result(job: _Job, timeout_s: float) -> _Delivered:
    """The outcome of a job. Samples that a worker process begins meanwhile are progress of this one. Raises TimeoutError."""
    deadline_s, sample = time.monotonic() + timeout_s, -1
    while (left_s := deadline_s - time.monotonic()) > _LOOK_S:
        try:
            return job.future.result(_LOOK_S)
        except TimeoutError:
            if job.future.done():
                return job.future.result()  # it has just ended, or the error is the worker's own
        before, sample = sample, _sample_of(job)
        if sample != before:
            note_progress()
    return job.future.result(max(0.0, left_s))


def eval_batches(
    dataset: Dataset, micro_batch: int, rank: int, world_size: int, limit: int | None = None
) -> Iterator[Tensors]:
    """Yield a rank's share of the data set in its own order; each sample is on one rank, and shares may differ in size.

    Args:
        dataset: The samples.
        micro_batch: Samples of one batch; the last batch may be smaller.
        rank: This rank, from 0 to ``world_size`` - 1.
        world_size: Number of ranks.
        limit: Read only that many samples in all, spread evenly over the data set. By default all.

    Yields:
        Tensors by name in host memory, first dim = samples.

    Raises:
        DataError: While iterating, a sample cannot be read.
    """
    total = len(dataset) if limit is None else min(limit, len(dataset))
    share = rank_range(total, rank, world_size)
    for low in range(share.start, share.stop, micro_batch):
        places = np.arange(low, min(low + micro_batch, share.stop), dtype=np.int64)
        ids = places * len(dataset) // total
        try:
            batch = dataset.read(ids)
        except Exception:
            check_held_out_samples(dataset, ids)
            raise
        yield tensors_of(check_batch(batch, ids.size))


def tensors_of(batch: Batch) -> Tensors:
    """The arrays of a batch as tensors in host memory, by name. Raises DataError for arrays of anything but numbers."""
    return {name: _tensor(name, array) for name, array in batch.items()}


def to_device(micro_batch: Mapping[str, torch.Tensor], device: torch.device) -> Tensors:
    """Copy a micro-batch to ``device``; from pinned memory the copy is asynchronous."""
    return {
        name: map_leaves(lambda tensor: tensor.to(device, non_blocking=True), entry)
        for name, entry in micro_batch.items()
    }


def prefetch_to_device(
    batches: Generator[StepBatch, None, None],
    device: torch.device,
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Generator[StepBatch, None, None]:
    """``batches`` with their tensors on ``device``, copied on a side stream while the previous batch is in use.

    Reads one batch ahead. The copy is asynchronous if the loader pinned the batch. On a CPU the batches are unchanged. Inside
    ``waiting()``, the stream that computes is made to wait for the copy.
    """
    adapter, index = adapter_of(device)
    with closing(batches):
        if adapter.streams is None:
            yield from batches
            return
        side, current = adapter.streams.new(index), adapter.streams.current(index)
        next_batch: tuple[StepBatch, DeviceEvent] | None = None
        for batch in batches:
            with side:
                parts = [to_device(part, device) for part in batch.micro_batches]
            copied = replace(batch, micro_batches=parts), side.record_event()
            if next_batch is not None:
                with waiting():
                    _wait_for_copy(*next_batch, current)
                yield next_batch[0]
            next_batch = copied
        if next_batch is not None:
            with waiting():
                _wait_for_copy(*next_batch, current)
            yield next_batch[0]


def _wait_for_copy(batch: StepBatch, copied: DeviceEvent, current: Any) -> None:
    """Make the stream ``current`` wait for the batch's copy."""
    current.wait_event(copied)
    for part in batch.micro_batches:
        for _, tensor in leaves(part, ""):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu":
                tensor.record_stream(current)  # the side stream must not reuse its memory before this stream is done


def needs_pinned_memory(device: torch.device | None) -> bool:
    """Whether copies to ``device`` are faster from pinned memory."""
    return device is not None and device.type not in ("cpu", "mps", "meta")


def to_tensors(built: BuiltBatch, *, pin: bool) -> _Delivered:
    """The arrays of a built micro-batch as tensors, the ids of its skipped samples, and the times of its stages."""
    note_progress()
    tensors = tensors_of(built.arrays)
    if pin:
        tensors = {name: map_leaves(torch.Tensor.pin_memory, tensor) for name, tensor in tensors.items()}
    return tensors, built.skipped_ids, built.stages


def _tensor(name: str, array: Any) -> Any:
    """An array as a tensor; a container with its arrays as tensors."""
    if not isinstance(array, np.ndarray):
        return map_leaves(partial(_tensor, name), array)
    if array.dtype.kind not in "biufc":
        raise not_numbers_error(name, array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())  # shares the array's memory


def _use_one_torch_thread() -> None:
    """Limit torch to one thread in the calling worker thread: workers share the cores."""
    torch.get_num_threads()  # makes torch initialise this thread now; later it would undo the next line
    torch.set_num_threads(1)


def _check_sizes(samples: int, global_batch: int, micro_batch: int, rank: int, world_size: int) -> None:
    if not (global_batch >= 1 and micro_batch >= 1 and 0 <= rank < world_size):
        raise DataError(
            given=f"global_batch {global_batch}, micro_batch {micro_batch}, rank {rank} of {world_size}",
            rule="batches hold at least one sample, ranks count from 0 to world - 1",
            consequence="no batch can be made",
            nearest=f"global_batch {max(1, global_batch)}, micro_batch {max(1, micro_batch)}, "
            f"rank {min(max(0, rank), max(0, world_size - 1))} of {max(1, world_size)}",
        )
    if global_batch > MAX_STEP_SAMPLES:
        raise DataError(
            given=f"global_batch {global_batch}",
            rule=f"a step has at most {MAX_STEP_SAMPLES} samples",
            consequence="their numbers alone would not fit into memory",
            nearest=f"global_batch {min(max(1, samples), MAX_STEP_SAMPLES)}",
        )
    if samples == 0:
        raise DataError(
            given="a dataset of 0 samples",
            rule="a dataset has at least one sample",
            consequence="there is nothing to train on",
            nearest="check the path and the filters of the dataset",
        )
