"""The loop of a ``dist_async`` worker, which computes the batch shards that servers hand out (docs/adr/0010).

start   one worker sends the model as built, or a checkpoint, to the servers; the others pull it from them
shard   forward and backward of one worker's share of a step, push the gradients, pull the values
save    all shards before a step are done: one worker evaluates and saves the values that the servers hold then
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace

from unisono.data.loading.loader import Loader, StepBatch, to_device
from unisono.train.async_worker import AsyncWorker
from unisono.train.loop import StepRunner
from unisono.train.options import is_due
from unisono.train.step import COUNTED, Step


@dataclass(frozen=True, kw_only=True, slots=True)
class AsyncLoop:
    """Yields the batch shards that this worker computes as steps; servers update the parameters."""

    runner: StepRunner
    loader: Loader
    worker: AsyncWorker

    def __iter__(self) -> Generator[Step]:
        """See ``SyncLoop``. Ends when the servers end the run."""
        runner, timers = self.runner, self.runner.timers
        runner.begin()
        with runner.garbage_collection() as collect_garbage:
            while True:
                batches = self.worker.batches(self.loader)
                try:
                    while (batch := runner.next_batch(batches)) is not None:
                        step = self._run(batch)
                        yield step
                        with timers.phase("ckpt_stall"), runner.rates.paused():
                            runner.checkpoints.poll()
                        collect_garbage(step.index)
                finally:
                    batches.close()
                if not self._at_save():
                    break
        runner.metrics_reader.finish()
        if self.preempted:
            runner.report_preemption()

    def _run(self, batch: StepBatch) -> Step:
        """Compute one batch shard and push its gradients."""
        runner = self.runner
        with runner.timers.phase("h2d"):
            micro_batches = [to_device(micro_batch, runner.device) for micro_batch in batch.micro_batches]
        self.worker.start_batch_shard(batch)
        step = runner.run(replace(batch, micro_batches=micro_batches))
        with runner.timers.comm_exposed("dp"):
            self.worker.finish_batch_shard(batch.batch_shard, float(step.stats[COUNTED]))
            if runner.metrics_reader.stop_requested:
                self.worker.ask_to_stop()
        return step

    def _at_save(self) -> bool:
        """Evaluate and save where the servers stand at a step, as far as due; False if the run has ended."""
        worker, runner = self.worker, self.runner
        with runner.rates.paused():
            worker.pull_model()
        if worker.work_item.kind != "save":
            return False
        evaluates = is_due(runner.options.eval_every_steps, worker.step) or worker.step == runner.options.steps
        if runner.evaluator.held_out is not None and evaluates:
            runner.evaluator.run()
        if runner.evaluator.stopped_early:
            worker.ask_to_stop(finished=True)
        if worker.is_final_save or runner.checkpoints.is_due(worker.step):
            with runner.rates.paused():
                self.save(wait=worker.is_final_save)
        worker.finish_save()
        return True

    def evaluates_after(self, step: int) -> bool:
        """Never: a step is evaluated at its save, while no worker pushes."""
        return False

    def save(self, *, wait: bool) -> None:
        """See ``SyncLoop.save``. Servers send the optimizer's state for it."""
        runner = self.runner
        if runner.checkpoints.saved_step != runner.state.step and not runner.checkpoints.is_saved_by_another():
            with self.worker.optimizer_state():
                runner.checkpoints.save(score=runner.evaluator.current_loss)
        if wait:
            runner.checkpoints.wait()

    @property
    def preempted(self) -> bool:
        """Whether the servers ended the run because a worker was asked to stop."""
        return self.worker.work_item.kind == "stopped"

    @property
    def stopped_early(self) -> bool:
        """Whether this worker's evaluation, or another's, ended the run."""
        return self.runner.evaluator.stopped_early or self.runner.state.step < self.runner.options.steps

    @property
    def owns_final_state(self) -> bool:
        """True for the worker that the last save fell to."""
        return self.worker.owns_save
