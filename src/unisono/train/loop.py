"""The loop over steps of ranks that step together, and the part that it shares with the asynchronous one (``async_loop``).

A loop is a generator of finished steps. The caller's loop body sees a step before that step's checkpoint is saved, so an
evaluation in the body is part of the checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from unisono.data.loading.loader import Loader, StepBatch, prefetch_to_device
from unisono.data.loading.stream_loader import StreamLoader
from unisono.dist import StopNotice
from unisono.dist.progress import at_work
from unisono.observe.events import EventLog
from unisono.observe.meters import RateMeter, StepTimers, collecting_every
from unisono.parallel.fsdp import reshard
from unisono.parallel.timed_collectives import recording_exposed_time
from unisono.train.callbacks import Every
from unisono.train.evaluate import Evaluator
from unisono.train.metrics_reader import MetricsReader
from unisono.train.options import TrainOptions, is_due
from unisono.train.profiling import ProfileScheduler
from unisono.train.replay_recorder import StepRecorder
from unisono.train.run_checkpoints import RunCheckpoints
from unisono.train.state import TrainState
from unisono.train.step import Step, TrainStep
from unisono.train.verify import StepVerifier


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """How ``fit`` ended.

    Attributes:
        step: Number of optimizer updates that the state has, from the first start of the run on.
        reason: ``finished``, ``preempted`` (a signal to any rank) or ``early_stop``.
        evaluation: Values of the last evaluation by name, ``loss`` included; empty if there was none.
    """

    step: int
    reason: str
    evaluation: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRunner:
    """Makes steps and reports them as events, for both loops."""

    train_step: TrainStep
    metrics_reader: MetricsReader
    profiler: ProfileScheduler
    rates: RateMeter
    timers: StepTimers
    events: EventLog
    checkpoints: RunCheckpoints
    evaluator: Evaluator
    state: TrainState
    options: TrainOptions
    device: torch.device
    stop_notice: StopNotice | None
    verifier: StepVerifier | None
    callbacks: Sequence[Every] = ()
    recorder: StepRecorder | None = None

    def begin(self) -> None:
        """Start to measure the speed of steps; emit a notice if all of them are made already."""
        step, steps_total = self.state.step, self.options.steps
        if step >= steps_total:
            self.events.emit(
                "notice",
                step=step,
                code="nothing_to_do",
                what=(
                    f"this run has made {step} of {steps_total} steps: no step is made"
                    if step == steps_total
                    else f"this run has made {step} steps, more than train.steps={steps_total}: no step is made or undone"
                ),
                why="a run that is found in its folder continues where it stands",
                cost="changed settings have no effect",
                fix=f"train.steps above {step} to continue, or another run.dir for a new run",
            )
        self.rates.start()
        self.timers.start()

    @contextmanager
    def garbage_collection(self) -> Generator[Callable[[int], None]]:
        """Inside, garbage collection is timed; the value is called after each step, for collections at fixed steps."""
        with self.metrics_reader.garbage_timer, collecting_every(self.options.gc_every_steps) as after_step:
            yield after_step

    def next_batch(self, batches: Generator[StepBatch]) -> StepBatch | None:
        """The next batch, None at the end; waiting for it is timed. A profile begins or ends before it."""
        if self.metrics_reader.profile_requested:
            self.metrics_reader.profile_requested = False
            self.profiler.start_requested()
        if self.state.step >= self.profiler.due:
            with at_work("the profiler", silent=True), self.rates.paused():
                self.profiler.at_boundary(self.state.step, self.checkpoints.finish_save)
        with self._beginning("the first batches"), self.timers.phase("data_wait"):
            batch = next(batches, None)
        if batch is not None and batch.skipped_ids:
            self.events.emit("data_skipped", step=batch.step + 1, samples=batch.skipped_ids)
        return batch

    def run(self, batch: StepBatch) -> Step:
        """Make one step of ``batch``. Raises NumericsError where too many steps in a row were skipped, and CorruptionError."""
        began_s, compiling = time.monotonic(), self.metrics_reader.compiling
        self.metrics_reader.profiling |= self.profiler.is_recording
        self.metrics_reader.loading.add(batch.stages)
        if self.metrics_reader.nonfinite_search is not None:
            self.metrics_reader.nonfinite_search.remember(batch)
        stats = self.metrics_reader.comm_stats
        # a step that is computed twice is no sample of the others
        sampling = nullcontext() if stats is None or self.verifier is not None else stats.sampling()
        traffic = None if stats is None else stats.traffic
        with self._beginning("the first steps"), recording_exposed_time(self.timers, traffic), sampling:
            if self.recorder is not None:
                step = self.recorder.run(self.train_step, batch)
            else:
                step = (self.verifier or self.train_step).run(batch)
        self.metrics_reader.add(step)
        if compiling:
            self.events.emit("compiled", step=step.index, first_step_s=time.monotonic() - began_s)
        with self.rates.paused():
            for callback in self.callbacks:
                callback.observe(step, self.train_step.forward_backward.model)
        return step

    def _beginning(self, name: str) -> AbstractContextManager[None]:
        """What takes longer in the first steps than later: workers start, libraries load, and models are compiled."""
        return at_work(name, silent=True) if self.rates.is_warming_up else nullcontext()

    def report_preemption(self) -> None:
        """Emit that a signal ended the loop."""
        self.events.emit(
            "preempt", step=self.state.step, signal=self.stop_notice.signal_name if self.stop_notice else None
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncLoop:
    """Every rank makes every step, each with its part of the global batch; all stop after the same one.

    Iterating makes and yields the steps from ``state.step`` to the end of the run, or to where it is stopped.
    """

    runner: StepRunner
    loader: Loader | StreamLoader

    def __iter__(self) -> Generator[Step]:
        runner = self.runner
        state, checkpoints = runner.state, runner.checkpoints
        runner.begin()
        timers = runner.timers
        batches = prefetch_to_device(
            self.loader.iterate(state.step, runner.options.steps), runner.device, lambda: timers.phase("h2d")
        )
        try:
            with runner.garbage_collection() as collect_garbage:
                while not (self.stopped_early or self.preempted):
                    batch = runner.next_batch(batches)
                    if batch is None:
                        break
                    step = runner.run(batch)
                    yield step
                    if runner.train_step.plan.uses_fsdp:
                        reshard(state.model)  # forward passes in the loop's body left parameters gathered
                    with runner.timers.phase("ckpt_stall"), runner.rates.paused():
                        checkpoints.poll()
                        if checkpoints.is_due(step.index):
                            self.save(wait=False)
                    collect_garbage(step.index)
            runner.metrics_reader.finish()
        finally:
            batches.close()
        if self.preempted:
            runner.report_preemption()

    def evaluates_after(self, step: int) -> bool:
        """Whether ``fit`` evaluates after this finished step."""
        return is_due(self.runner.options.eval_every_steps, step)

    def save(self, *, wait: bool) -> None:
        """Save the state of the last finished step; with ``wait`` until it is committed and uploaded.

        A collective. Raises CheckpointError, and CorruptionError for a state that must not be saved.
        """
        runner = self.runner
        if runner.verifier is not None and runner.checkpoints.saved_step != runner.state.step:
            runner.verifier.before_save()
        runner.checkpoints.save(score=runner.evaluator.current_loss)
        if wait:
            runner.checkpoints.wait()

    @property
    def preempted(self) -> bool:
        """Whether a signal to any rank ended the loop; all ranks know it from the last reading of metrics."""
        return self.runner.metrics_reader.stop_requested

    @property
    def stopped_early(self) -> bool:
        """Whether early stopping ended the loop, which all ranks decide alike in an evaluation."""
        return self.runner.evaluator.stopped_early

    @property
    def owns_final_state(self) -> bool:
        """Whether this process evaluates and saves the state that the loop ended with: always, all ranks do it together."""
        return True
