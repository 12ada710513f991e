"""Reads finished steps from the device at a declared cadence and turns them into events.

Between two readings nothing here touches the device. A reading is the one host synchronisation of the loop; it also learns
whether any rank was asked to stop, and whether too many steps in a row were skipped.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from unisono.data.loading.batch_builder import StageTimes
from unisono.device.torch_adapters import adapter_of
from unisono.errors import NumericsError
from unisono.measure.ceiling import PeakFlops
from unisono.measure.flops import utilization
from unisono.observe.events import EventLog
from unisono.observe.host_memory import PeakMemory, anonymous_memory_bytes
from unisono.observe.meters import GarbageTimer, RateMeter, StepTimers
from unisono.parallel.sharding import ShardedParameters
from unisono.train.comm_stats import CommStats
from unisono.train.histograms import histograms
from unisono.train.nonfinite_search import NonfiniteSearch
from unisono.train.step import COUNTED, GOOD, LOSS, NAMED, NORM, RANK_LOSS, STOP, Step

# the kernel takes as long to tell the memory of a process as all else of a short step's accounting
_HOST_MEMORY_EVERY_S: Final = 0.25
_HOST_MEMORY_EVERY_READINGS: Final = 12  # of steps so short that growth from step to step would not be seen


@dataclass(kw_only=True, slots=True)
class MetricsReader:
    """Collects steps and reads them ``every`` steps; ``flops_per_token`` 0 means no MFU is shown.

    ``epochs_total`` is the number of the epoch that the run ends in, None for a stream. Throughput is in ``unit``:
    ``samples_per_step`` a step, or if that is 0 the units that the step has counted.
    """

    events: EventLog
    timers: StepTimers
    garbage_timer: GarbageTimer
    rates: RateMeter
    every: int
    steps_total: int
    epochs_total: int | None
    max_skips: int
    device: torch.device
    memory_limit_bytes: int
    flops_per_token: float
    peak: PeakFlops | None
    comm_stats: CommStats | None
    weight_total: float
    skipped_total: int
    unit: str
    samples_per_step: int
    nonfinite_search: NonfiniteSearch | None = None  # finds the origin of a skipped step's non-finite values
    compiling: bool = False  # the next reading contains a step that compiled
    profiling: bool = False  # the next reading contains a step that was profiled
    stop_requested: bool = False
    profile_requested: bool = False
    loading: StageTimes = field(default_factory=StageTimes)  # work on the batches of the steps since the last reading
    _pending: list[Step] = field(default_factory=list[Step])
    _skips_in_a_row: int = 0
    _peak_memory: PeakMemory = field(default_factory=PeakMemory)  # of a run on the CPU
    _host_memory: dict[str, float] = field(default_factory=dict[str, float])  # the same, as it was last read
    _host_memory_read_at_s: float = 0.0
    _host_memory_age: int = 0  # readings since
    _last: tuple[Step, list[float]] | None = None  # the last step that was read, and its statistics

    def add(self, step: Step) -> None:
        """Take a finished step; reads all pending ones when the cadence says so. Raises NumericsError."""
        self._pending.append(step)
        if step.index % self.every == 0 or step.index == self.steps_total:
            self.read()

    def read(self) -> None:
        """Read every pending step now. Raises NumericsError."""
        if not self._pending:
            return
        steps, self._pending = self._pending, []
        adapter, index = adapter_of(self.device)
        if adapter.streams is not None:
            # the copy below waits too; waiting here first means that the timers can read all their events of these steps
            adapter.streams.current(index).synchronize()
        rows: list[list[float]] = torch.stack([step.stats for step in steps]).tolist()
        window_fields = self._end_window(steps, rows)
        for step, row in zip(steps, rows, strict=True):
            self.weight_total += row[COUNTED]
            self.stop_requested |= row[STOP] >= 1
            self.profile_requested |= row[STOP] % 1 > 0
            fields = {
                "step": step.index,
                "steps_total": self.steps_total,
                "unit": self.unit,
                "train/loss": row[LOSS],
                "train/lr": step.lr,
                "train/grad_norm": row[NORM],
                "train/tokens_total": self.weight_total,
                "train/epoch": step.epoch,
                **({} if self.epochs_total is None else {"epochs_total": self.epochs_total}),
                **{f"train/loss/{name}": value for name, value in zip(step.loss_names, row[NAMED:], strict=True)},
            }
            if row[GOOD]:
                self._skips_in_a_row = 0
            else:
                self._skip(step, row)
            fields["train/skipped_steps"] = self.skipped_total
            self.events.emit("step", **fields, **(window_fields if step is steps[-1] else {}))
        self._search(steps, rows)
        self._last = steps[-1], rows[-1]
        if self._skips_in_a_row >= self.max_skips:
            self._give_up(*self._last)

    def _end_window(self, steps: list[Step], rows: list[list[float]]) -> dict[str, float]:
        """End the window of these steps; returns its speed, memory, phases and loader times, fields of the last step's event."""
        counted = (
            self.samples_per_step * len(steps) if self.samples_per_step else round(sum(row[COUNTED] for row in rows))
        )
        self.rates.step_done(
            steps[-1].index, tokens=counted, steps=len(steps), exclude=self.compiling or self.profiling
        )
        self.compiling = self.profiling = False
        split, garbage_s = self.timers.take(), self.garbage_timer.take_s()
        fields = split.fields() | self._speed_and_memory(is_last=steps[-1].index == self.steps_total)
        if split.wall_s > 0:
            fields["time/gc_frac"] = garbage_s / split.wall_s
        fields |= self.loading.fields()
        self.loading = StageTimes()
        if self.comm_stats is not None:
            self.comm_stats.add(steps[-1].index, len(steps))
        return fields

    def finish(self) -> None:
        """Read the pending steps of a loop that has ended, and emit the remaining communication statistics.

        Raises NumericsError if the run has made all its steps and every one was skipped.
        """
        self.read()
        if self._last is not None and self.skipped_total >= self._last[0].index == self.steps_total:
            self._give_up(*self._last)
        if self.comm_stats is not None:
            self.comm_stats.emit()

    def _skip(self, step: Step, row: list[float]) -> None:
        self.skipped_total += 1
        self._skips_in_a_row += 1
        self.events.emit(
            "skipped_step",
            step=step.index,
            loss=row[LOSS],
            rank_loss=row[RANK_LOSS],
            grad_norm=row[NORM],
            samples=[int(i) for i in step.sample_ids[:64]],
        )

    def _search(self, steps: list[Step], rows: list[list[float]]) -> None:
        if self.nonfinite_search is None:
            return
        with self.rates.paused():
            for number, (step, row) in enumerate(zip(steps, rows, strict=True), start=1):
                if not row[GOOD]:
                    updates = sum(bool(later[GOOD]) for later in rows[number:])
                    self.nonfinite_search.search(step, row[LOSS], row[NORM], updates_since=updates)
        self.nonfinite_search.forget()

    def _give_up(self, step: Step, row: list[float]) -> None:
        if self.skipped_total >= step.index:
            overflow = "; a finite loss under fp16: a lower train.loss_scale, or more steps, in which it is halved"
            raise NumericsError(
                given=f"all {step.index} steps of the run were skipped, the last one with loss {row[LOSS]:g} and gradient norm "
                f"{row[NORM]:g}",
                rule="a step counts if its loss and gradient norm are finite",
                consequence="the run ends; no parameter has changed since its start",
                nearest="look at the model's outputs on the samples of the first skipped_step event, or plan.precision='fp32'"
                + (overflow if math.isfinite(row[LOSS]) else ""),
            )
        raise NumericsError(
            given=f"{self._skips_in_a_row} steps in a row were skipped, the last one step {step.index} "
            f"with loss {row[LOSS]:g} and gradient norm {row[NORM]:g}",
            rule=f"at most {self.max_skips - 1} in a row (train.max_skips={self.max_skips})",
            consequence="the run ends; parameters are those of the last good step and the newest checkpoint is kept",
            nearest="lower optim.lr, use a longer warm-up or plan.precision='fp32', or look at the samples of the "
            "skipped_step events",
        )

    def _speed_and_memory(self, *, is_last: bool) -> dict[str, float]:
        """Speed and memory since the last reading; ``is_last``: there will be no other."""
        fields: dict[str, float] = {}
        rates = self.rates.rates()
        if rates is not None:
            fields |= rates.fields()
            if self.peak is not None:
                speed = rates.tokens_per_s_device
                fields |= utilization(tokens_per_s_device=speed, flops_per_token=self.flops_per_token, peak=self.peak)
        adapter, index = adapter_of(self.device)
        memory = adapter.memory(index)
        if memory is None:
            now_s = time.monotonic()
            self._host_memory_age += 1
            is_old = now_s - self._host_memory_read_at_s >= _HOST_MEMORY_EVERY_S
            if is_last or is_old or self._host_memory_age >= _HOST_MEMORY_EVERY_READINGS:
                self._host_memory_read_at_s, self._host_memory_age = now_s, 0
                self._host_memory = {
                    "mem/now_bytes": anonymous_memory_bytes(),
                    "mem/peak_bytes": self._peak_memory.read(),
                    "mem/limit_bytes": self.memory_limit_bytes,
                }
            fields |= self._host_memory
        else:
            fields["mem/now_bytes"] = memory.now_bytes
            fields["mem/peak_bytes"] = memory.peak_bytes
            fields["mem/peak_reserved_bytes"] = memory.peak_reserved_bytes
            fields["mem/limit_bytes"] = memory.limit_bytes
            fields["mem/alloc_retries"] = memory.num_alloc_retries
        return fields


class GradientStats:
    """Every ``every`` steps, one event with norm, largest magnitude and count of non-finite values of each gradient.

    The figures are of the reduced gradient of the mean loss, before clipping. Reading them waits for the device. With
    ``with_histograms``, the same on all ranks, rank 0 also emits those of gradients and of parameters before their update.
    """

    def __init__(
        self, sharded: ShardedParameters, events: EventLog, every: int, *, with_histograms: bool = False
    ) -> None:
        self._sharded = sharded
        self._names = [name for name, parameter in sharded.parameters.items() if parameter.requires_grad]
        self._events = events
        self._every = every
        self._with_histograms = with_histograms

    def __call__(self, step: int, gradients: list[Tensor], divisor: Tensor) -> None:
        """``step`` is 0-based; ``divisor`` turns the accumulated gradients into those of the mean loss."""
        if not self._every or (step + 1) % self._every:
            return
        trained = [p for p in self._sharded.parameters.values() if p.requires_grad]
        norms = self._sharded.global_norms(trained, torch.stack([g.norm() for g in gradients])) / divisor
        largest = self._sharded.max_over_shards(
            torch.stack([g.abs().amax() if g.numel() else g.new_zeros(()) for g in gradients])
        )
        bad = self._sharded.sum_over_shards(trained, torch.stack([(~g.isfinite()).sum() for g in gradients]))
        columns: list[list[float]] = [column.tolist() for column in (norms, largest / divisor, bad)]
        layers = {
            name: {"norm": norm, "max": largest, "nonfinite": int(bad)}
            for name, norm, largest, bad in zip(self._names, *columns, strict=True)
        }
        self._events.emit("gradient_stats", step=step + 1, layers=self._sharded.gather_stages(layers))
        if self._with_histograms:
            of_gradients = histograms(self._sharded, trained, gradients, divisor)
            of_parameters = histograms(self._sharded, trained, trained)
            both = self._sharded.gather_stages(
                dict(zip(self._names, zip(of_gradients, of_parameters, strict=True), strict=True))
            )
            if self._events.rank == 0:
                self._events.emit(
                    "histograms",
                    step=step + 1,
                    gradients={name: histogram for name, (histogram, _) in both.items()},
                    parameters={name: histogram for name, (_, histogram) in both.items()},
                )
