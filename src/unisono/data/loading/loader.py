"""Batches in an order that does not depend on ranks, made ready in the background.

Which samples a step has is a function of the step (``epochs``, ``draws``); what a batch holds is a function of its samples
(``recipe``); who makes it, and when, is up to the workers (``pool``). So every number of ranks and workers sees the same, and the
state of a loader is the step it is at.

Not here: moving batches to the device (``ahead``), streams that have no order (``stream``).
"""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.data.combined import OrderedDataset
from unisono.data.dataset import Dataset
from unisono.data.loading.batch_builder import (
    BatchBuilder,
    BatchTransform,
    BuiltBatch,
    MicroBatchSpec,
    PairTransform,
    Transform,
    check_batch,
)
from unisono.data.loading.cpu_cores import usable_cores
from unisono.data.loading.worker_pool import MicroBatchJob, ThreadWorker, WorkerPool
from unisono.data.loading.worker_process import ProcessWorker
from unisono.data.loading.worker_tuning import WorkerSetting, WorkerTuner
from unisono.data.options import LoaderOptions
from unisono.data.order.permutation import Permutation
from unisono.data.order.samplers import SampleOrder, SequentialOrder, ShuffledOrder
from unisono.data.order.step_schedule import StepSchedule
from unisono.errors import DataError

Tensors = dict[str, torch.Tensor]
Ids = NDArray[np.int64]
_Made = tuple[Tensors, list[int]]  # and the ids of samples that were skipped

_AHEAD_SAMPLES, _AHEAD_STEPS = 4096, 256  # whose order is computed at once
_JUDGED_FROM = 1000  # samples from which on a share of bad ones is a share


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """What one rank consumes in one step."""

    step: int
    batch_shard: int  # step * ranks + whose share it is
    sample_ids: NDArray[np.int64]  # of the share, in order
    micro_batches: list[Tensors]  # as many as its share needs, the last one may be smaller; none for an empty share
    wait_s: float  # how long the consumer waited for it
    skipped_ids: list[int]  # samples of this rank that could not be read and weigh 0


@dataclass(frozen=True, slots=True)
class _StepSamples:
    """A rank's slots ``[low, low + len(ids))`` of a step; ``own`` of them are its share, neighbours may be partners."""

    low: int
    rank_slots: range
    num_slots: int  # of the whole step
    num_real: int  # slots that are not filler
    sample_ids: Ids
    occurrences: Ids

    @property
    def rank_ids(self) -> Ids:
        return self.sample_ids[self.rank_slots.start - self.low : self.rank_slots.stop - self.low]


_NO_IDS, _NO_FLAGS = np.empty(0, np.int64), np.empty(0, np.bool_)


def rank_range(total: int, rank: int, world: int) -> range:
    """Rank ``rank``'s contiguous part of ``range(total)``; sizes differ by at most one, earlier ranks' are larger."""
    base, extra = divmod(total, world)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


class Loader:
    """Feeds one rank. Raises ``DataError`` where the arithmetic is impossible, or when a sample cannot be read.

    Everything is shuffled once per epoch, or with ``shuffle=False`` comes in the data set's own order, unless the data set
    brings an order (``mixture``, ``weighted``, ``bucketed``). ``transform(sample, rng)`` gets one sample (arrays without batch
    dim) and a generator, its own during the call, keyed by seed, epoch and sample id; ``pair(a, b, rng)`` two neighbours of the
    global batch (mixup); ``finish(batch)`` all rows of a micro-batch. ``shuffle_block`` > 0 keeps that many neighbours together,
    for storage that is slow at random. At least ``prefetch_depth`` steps are made ready ahead; 0 is none. ``device``: where this
    is an accelerator with host memory of its own, batches are pinned for it.

    With ``last_batch`` pad or ``max_bad_frac`` above 0 each batch has ``weights``, 0 where a row must not count; the objectives
    of ``train`` respect it, one's own must. Workers live until ``close()`` or until the loader is forgotten.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        seed: int,
        global_batch: int,
        micro_batch: int | None = None,
        rank: int = 0,
        world: int = 1,
        options: LoaderOptions | None = None,
        prefetch_depth: int = 2,
        shuffle: bool = True,
        shuffle_block: int = 0,
        transform: Transform | None = None,
        pair: PairTransform | None = None,
        finish: BatchTransform | None = None,
        device: torch.device | None = None,
    ) -> None:
        micro_batch = max(1, -(-global_batch // max(1, world))) if micro_batch is None else micro_batch
        if not (global_batch >= 1 and micro_batch >= 1 and 0 <= rank < world):
            raise DataError(
                given=f"global_batch {global_batch}, micro_batch {micro_batch}, rank {rank} of {world}",
                rule="batches hold at least one sample, ranks count from 0 to world - 1",
                consequence="no batch can be made",
                nearest=f"global_batch {max(1, global_batch)}, micro_batch {max(1, micro_batch)}, "
                f"rank {min(max(0, rank), max(0, world - 1))} of {max(1, world)}",
            )
        if len(dataset) == 0:
            raise DataError(
                given="a dataset of 0 samples",
                rule="a dataset has at least one sample",
                consequence="there is nothing to train on",
                nearest="check the path and the filters of the dataset",
            )
        self.options = options = options or LoaderOptions()
        self.schedule = StepSchedule(len(dataset), global_batch, options.last_batch)
        if isinstance(dataset, OrderedDataset):
            draws = dataset.sample_order(seed=seed, global_batch=global_batch)
        else:
            whole = Permutation(len(dataset), seed=seed, block_size=shuffle_block)
            draws = ShuffledOrder(whole) if shuffle else SequentialOrder(len(dataset))
        self._draws: SampleOrder = draws
        self._prefetch_depth = prefetch_depth
        self._micro_batch, self._rank, self._world = micro_batch, rank, world
        tolerant = options.max_bad_sample_frac > 0
        self._recipe = BatchBuilder(
            dataset=dataset,
            seed=seed,
            transform=transform,
            pair_transform=pair,
            batch_transform=finish,
            replaces_bad=tolerant,
            adds_weights=tolerant or options.last_batch == "pad",
        )
        # not a method: workers that know the loader would keep it from being forgotten
        self._deliver = partial(to_tensors, pin=needs_pinned_memory(device))
        self._ahead: tuple[range, list[_StepSamples]] = (range(0), [])
        self._inline = ThreadWorker(self._recipe)
        self._tuner = WorkerTuner(options, limit=usable_cores(os.environ), about=self._recipe)
        self._workers: _LoaderWorkers | None = None
        self._delivered = self._skipped = self._next_step = 0

    @property
    def worker_setting(self) -> WorkerSetting:
        """The kind and number of workers in use now; with ``workers=-1`` what tuning has come to."""
        return self._tuner.setting

    def sample_ids(self, step: int) -> Ids:
        """This rank's samples of a step, in order; computed, nothing is read."""
        return self._drawn(self._unit(step), self._world).rank_ids

    def batch(self, step: int) -> StepBatch:
        """One step's batch, built now, in this thread."""
        return self._built(self._unit(step), self._world)

    def iterate(self, start_step: int, stop_step: int) -> Generator[StepBatch, None, None]:
        """The batches of steps ``start_step`` up to ``stop_step`` (not included), at most ``prefetch_depth`` ahead, or as many
        as there are workers. An error met ahead of time is raised when its step is asked for."""
        coming = iter(range(self._unit(start_step), self._unit(stop_step), self._world))
        return self._follow(lambda wait: next(coming, None), self._world)

    def iterate_claimed(self, claim: Callable[[bool], int | None]) -> Generator[StepBatch, None, None]:
        """Batches of the shares of steps that somebody deals this process: unit ``u`` is share ``u % world`` of step
        ``u // world``, with the samples that rank ``u % world`` would have.

        ``claim(wait)`` gives the next unit. None ends it where ``wait`` is true; else there is none now, and it is asked
        again when one of those made ahead is used up.
        """
        return self._follow(claim, 1)

    def _follow(self, claim: Callable[[bool], int | None], stride: int) -> Generator[StepBatch, None, None]:
        if self._prefetch_depth == 0 or self.options.num_workers == 0:
            while (unit := claim(True)) is not None:
                yield self._built(unit, stride)
            return
        ahead: deque[tuple[int, list[MicroBatchJob]]] = deque()
        try:
            while True:
                begin = time.perf_counter()
                workers = self._have_workers()
                while len(ahead) <= workers.depth and (unit := claim(not ahead)) is not None:
                    ahead.append((unit, [workers.pool.submit(part) for part in self._parts(unit, stride)]))
                if not ahead:
                    return
                unit, jobs = ahead.popleft()
                made = [self._wait(job) for job in jobs]
                waited = time.perf_counter() - begin
                self._tuner.record_wait(waited)
                yield self._step_batch(unit, self._drawn(unit, stride).rank_ids, made, waited)
        finally:
            for _, jobs in ahead:
                for job in jobs:
                    job.future.cancel()

    def _built(self, unit: int, stride: int) -> StepBatch:
        begin = time.perf_counter()
        made = [self._deliver(self._inline(part)) for part in self._parts(unit, stride)]
        return self._step_batch(unit, self._drawn(unit, stride).rank_ids, made, time.perf_counter() - begin)

    def close(self) -> None:
        """End the workers. The loader can be used again and then starts new ones."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- in one's own loop -----------------------------------------------------------------------------------------

    def __iter__(self) -> Generator[Tensors, None, None]:
        """The micro-batches from where the loader stands to the end of that epoch, then the next call goes on behind it."""
        stop = (self._next_step // self.schedule.steps_per_epoch + 1) * self.schedule.steps_per_epoch
        with closing(self.iterate(self._next_step, stop)) as batches:
            for batch in batches:
                yield from batch.micro_batches
                self._next_step = batch.step + 1

    def __len__(self) -> int:
        """Steps of an epoch."""
        return self.schedule.steps_per_epoch

    def state_dict(self) -> dict[str, int]:
        """Where ``iter`` goes on: the number of the first step whose batches have not all been asked for."""
        return {"step": self._next_step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on at that step; nothing is read or skipped over."""
        self._next_step = int(state["step"])

    # --- which samples ---------------------------------------------------------------------------------------------

    def _unit(self, step: int) -> int:
        return step * self._world + self._rank

    def _drawn(self, unit: int, stride: int) -> _StepSamples:
        units, drawn = self._ahead
        if unit not in units:
            # A call of the order costs about the same for one share as for hundreds: draw the stretch this one lies in.
            mine = max(1, self.schedule.global_batch // self._world)
            length = stride * min(_AHEAD_STEPS, max(1, _AHEAD_SAMPLES // mine))
            first = unit - unit % length + unit % stride
            units = range(first, first + length, stride)
            drawn = self._draw(units)
            self._ahead = (units, drawn)
        return drawn[units.index(unit)]

    def _draw(self, units: range) -> list[_StepSamples]:
        wanted: list[tuple[int, range, int, int, Ids]] = []
        for unit in units:
            step, rank = divmod(unit, self._world)
            positions, real = self.schedule.positions(step)
            own = rank_range(len(positions), rank, self._world)
            low, high = (
                (own.start, own.stop) if self._recipe.pair_transform is None else _with_partners(own, len(positions))
            )
            wanted.append((low, own, len(positions), real, positions[low:high]))
        ids, visits = self._draws.samples_at(np.concatenate([positions for *_, positions in wanted]))
        ends = np.cumsum([len(positions) for *_, positions in wanted])[:-1]
        rows = zip(wanted, np.split(ids, ends), np.split(visits, ends), strict=True)
        return [_StepSamples(low, own, slots, real, i, v) for (low, own, slots, real, _), i, v in rows]

    def _parts(self, unit: int, stride: int) -> list[MicroBatchSpec]:
        step, drawn = unit // self._world, self._drawn(unit, stride)
        cuts = range(drawn.rank_slots.start, drawn.rank_slots.stop, self._micro_batch)
        return [
            self._part(step, drawn, range(low, min(low + self._micro_batch, drawn.rank_slots.stop))) for low in cuts
        ]

    def _part(self, step: int, drawn: _StepSamples, own: range) -> MicroBatchSpec:
        low, high = own.start - drawn.low, own.stop - drawn.low
        filler = np.zeros(len(own), np.bool_)
        filler[max(0, drawn.num_real - own.start) :] = True
        if self._recipe.pair_transform is None:
            ids, visits = drawn.sample_ids[low:high].copy(), drawn.occurrences[low:high].copy()
            partners, pairs, leads = _NO_IDS, _NO_IDS, _NO_FLAGS
        else:
            slots = np.arange(own.start, own.stop)
            first, last = _with_partners(own, drawn.num_slots)
            slots = np.concatenate([slots, np.arange(first, own.start), np.arange(own.stop, last)])
            ids, visits = drawn.sample_ids[slots - drawn.low], drawn.occurrences[slots - drawn.low]
            other = slots[: len(own)] ^ 1
            other = np.where(other < drawn.num_slots, other, slots[: len(own)])
            partners = np.argsort(slots)[np.searchsorted(np.sort(slots), other)]
            leads = slots[: len(own)] % 2 == 0
            pairs = step * self.schedule.global_batch + slots[: len(own)] - ~leads
        return MicroBatchSpec(
            step=step,
            num_rows=len(own),
            sample_ids=ids,
            occurrences=visits,
            is_filler=filler,
            partner_rows=partners,
            pair_ids=pairs,
            is_first=leads,
        )

    # --- who makes them --------------------------------------------------------------------------------------------

    def _have_workers(self) -> _LoaderWorkers:
        setting = self._tuner.setting
        if self._workers is None or not self._workers.owned_by_this_process:
            self._workers = _LoaderWorkers(self._recipe, self._deliver)
            weakref.finalize(self, self._workers.close)
        self._workers.apply_setting(setting, self._prefetch_depth)
        return self._workers

    def _wait(self, job: MicroBatchJob) -> _Made:
        try:
            return job.future.result(self.options.timeout_s)
        except TimeoutError as error:
            if job.future.done():
                raise  # the worker's own
            sample = job.progress.sample
            if self._workers is not None:
                self._workers.close(patience_s=0.1)
            raise DataError(
                given=f"sample {sample} of step {job.spec.step}: no answer in {self.options.timeout_s:g} s",
                rule="reading a step's samples ends within loader.timeout_s",
                consequence=f"step {job.spec.step} cannot run",
                nearest="look at that sample and the storage it is on; a larger loader.timeout_s",
            ) from error

    def _step_batch(self, unit: int, sample_ids: Ids, made: list[_Made], waited: float) -> StepBatch:
        step = unit // self._world
        skipped = [sample for _, ids in made for sample in ids]
        self._delivered += len(sample_ids)
        self._skipped += len(skipped)
        allowed = self.options.max_bad_sample_frac * max(self._delivered, _JUDGED_FROM)
        if self._skipped > allowed:
            raise DataError(
                given=f"{self._skipped} of {self._delivered} samples could not be read, at last {skipped[:8]}",
                rule=f"at most {self.options.max_bad_sample_frac:g} of the samples are skipped (loader.max_bad_sample_frac)",
                consequence=f"step {step} does not run",
                nearest="unisono data verify tells what is damaged in a record file; a larger loader.max_bad_sample_frac",
            )
        parts = [tensors for tensors, _ in made]
        return StepBatch(
            step=step, batch_shard=unit, sample_ids=sample_ids, micro_batches=parts, wait_s=waited, skipped_ids=skipped
        )


def _one_torch_thread() -> None:
    """In a worker: the cores are for the workers, one each, not for all threads of torch in each worker."""
    torch.get_num_threads()  # makes torch set up this thread, which it would do later, over what is set here
    torch.set_num_threads(1)


def needs_pinned_memory(device: torch.device | None) -> bool:
    """Whether copies to it are faster from pinned memory."""
    return device is not None and device.type not in ("cpu", "mps", "meta")


def to_tensors(built: BuiltBatch, *, pin: bool) -> tuple[Tensors, list[int]]:
    """A part as the consumer gets it."""
    tensors = {name: _tensor(name, array) for name, array in built.arrays.items()}
    return {name: tensor.pin_memory() for name, tensor in tensors.items()} if pin else tensors, built.skipped_ids


class _LoaderWorkers:
    """The pool a setting asks for; one that is replaced finishes what it has."""

    def __init__(self, recipe: BatchBuilder, finish: Callable[[BuiltBatch], _Made]) -> None:
        self._recipe, self._finish = recipe, finish
        self._setting: WorkerSetting | None = None
        self._retired: list[WorkerPool] = []
        self.depth = 0

    def apply_setting(self, setting: WorkerSetting, prefetch_depth: int) -> None:
        if setting == self._setting:
            return
        if self._setting is None or self._setting.kind != setting.kind:
            if self._setting is not None:
                self.pool.resize(0)
                self._retired.append(self.pool)
            recipe = self._recipe
            make = (lambda: ThreadWorker(recipe)) if setting.kind == "thread" else (lambda: ProcessWorker(recipe))
            self.pool = WorkerPool(make, _one_torch_thread, self._finish)
        threads = torch.get_num_threads()
        self.pool.resize(setting.workers)
        torch.set_num_threads(
            threads
        )  # what the workers set for themselves is also what later threads would start with
        self.depth = max(prefetch_depth, setting.workers)
        self._setting = setting

    @property
    def owned_by_this_process(self) -> bool:
        """False in a fork of the process that has the workers."""
        return self._setting is None or self.pool.owned_by_this_process

    def close(self, *, patience_s: float = 5.0) -> None:
        for pool in [*self._retired, *([self.pool] if self._setting is not None else [])]:
            pool.close(patience_s=patience_s)
        self._setting, self._retired = None, []


def eval_batches(
    dataset: Dataset, micro_batch: int, rank: int, world: int, limit: int | None = None
) -> Iterator[Tensors]:
    """A rank's share of the whole dataset in its own order, each sample once over all ranks; shares may be uneven.

    ``limit``: read only that many samples, spread evenly over the dataset.
    """
    total = len(dataset) if limit is None else min(limit, len(dataset))
    mine = rank_range(total, rank, world)
    for low in range(mine.start, mine.stop, micro_batch):
        places = np.arange(low, min(low + micro_batch, mine.stop), dtype=np.int64)
        ids = places * len(dataset) // total
        yield {name: _tensor(name, array) for name, array in check_batch(dataset.read(ids), ids.size).items()}


def _with_partners(own: range, slots: int) -> tuple[int, int]:
    """``own`` widened to whole pairs (0, 1), (2, 3), …"""
    return own.start - own.start % 2, min(slots, own.stop + own.stop % 2) if len(own) else own.stop


def _tensor(name: str, array: NDArray[Any]) -> torch.Tensor:
    if array.dtype.kind not in "biufc":
        raise DataError(
            given=f"{name!r} of dtype {array.dtype}",
            rule="batches hold numbers",
            consequence="it cannot become a tensor",
            nearest="encode it as integers in the dataset, or leave it out",
        )
    return torch.as_tensor(array if array.flags.writeable else array.copy())  # shares the array's memory
