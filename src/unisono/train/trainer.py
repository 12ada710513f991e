"""The trainer: an iterator of optimizer steps that resumes, accumulates, synchronises, guards and saves by itself.

    with Trainer(model, data, plan, objective=…, optimizer=…, schedule=…) as run:
        for step in run:
            if step.index % 500 == 0:
                run.evaluate(held_out)

What one step computes is in ``engine``; what is read from the device, and when, in ``readout``; how a run starts in ``resume``.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor, nn

from unisono.checkpoint import Checkpointer, CheckpointOptions
from unisono.data.dataset import Dataset, MapStyle, as_dataset
from unisono.data.loading.batch_builder import BatchTransform, PairTransform, Transform
from unisono.data.loading.device_prefetch import prefetch_to_device
from unisono.data.loading.loader import Loader, StepBatch
from unisono.data.loading.stream_loader import is_stream
from unisono.data.options import LoaderOptions
from unisono.dist import StopNotice, World, agree, fault_point, job_from_environ, record_failure
from unisono.measure.flops import CONVENTION
from unisono.observe.events import EventLog
from unisono.observe.meters import RateMeter, StepTimers
from unisono.observe.monitor import host_memory_limit_bytes
from unisono.optim import OptimOptions, ScheduleOptions, build_optimizer, state_names
from unisono.optim import build_schedule as schedule_of
from unisono.optim.groups import Role, parameter_roles
from unisono.parallel.batch_norm import batch_norms
from unisono.parallel.deferred_init import DeferredModel, allocate_shards, deferred_init, materialize
from unisono.parallel.device import find_device, set_backend
from unisono.parallel.expert import expert_dims
from unisono.parallel.fsdp import reshard
from unisono.parallel.loss_scale import LossScale
from unisono.parallel.memory_ledger import build_ledger, check_ledger
from unisono.parallel.mesh import ParallelDims
from unisono.parallel.pipeline.executor import PipelineExecutor
from unisono.parallel.replicated_grads import ReplicatedGradients
from unisono.parallel.shard_notes import blocks, replicated_grad_groups
from unisono.parallel.sharded_parameters import ShardedParameters
from unisono.parallel.sharding import TensorShard
from unisono.parallel.tensor.dtensor_placements import parameter_placements
from unisono.parallel.transforms import parallelize
from unisono.plan.options import PlanOptions
from unisono.plan.plan import Plan, precision_reason
from unisono.plan.validate import validate_plan
from unisono.train import resume as resuming
from unisono.train.async_worker import AsyncWorker, check_async_data, worker_plan
from unisono.train.build_loader import build_loader
from unisono.train.ema import WeightAverage
from unisono.train.evaluate import evaluate
from unisono.train.forward_backward import ForwardBackward
from unisono.train.gradient_stats import GradientStats
from unisono.train.gradient_sync import (
    LocalSGDSync,
    build_comm_stats,
    build_gradient_sync,
    check_sync_options,
    init_distributed,
    open_store,
)
from unisono.train.guard import StepGuard
from unisono.train.metrics import Metric
from unisono.train.metrics_reader import MetricsReader
from unisono.train.objectives import Objective
from unisono.train.options import TrainOptions, is_due
from unisono.train.setup import find_peak, infer_tp_rules, not_saved_error, open_events, resolve_for_model, resolve_plan
from unisono.train.state import StageTensors, TrainState, seed_generators
from unisono.train.step import WEIGHT, Step, TrainStep, input_selector

COLLECTIVE_TIMEOUT_S = 300.0
# steps between two readings of loss, norm and flags; on the CPU there is nothing to wait for
ACCELERATOR_READ_STEPS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """How ``fit`` ended: ``reason`` is finished, preempted or early_stop; ``evaluation`` is the last one, or empty."""

    step: int
    reason: str
    evaluation: Mapping[str, float]


class Trainer:
    """Trains ``model`` on ``data`` as ``plan`` says. A context manager and an iterator; ``fit()`` is the whole run.

    ``model`` is a module, of which rank 0's values count, or a callable that builds one, the same on all ranks. Where the
    plan spreads the model, what a callable builds is never whole on any rank (``parallel.deferred``). From entering on the
    module is ``self.model``. ``flops_per_token`` may be asked of the whole model, whose values it must not read.

    ``objective(outputs, batch) -> (loss_sum, weight)``. ``schedule`` is ScheduleOptions or ``step (from 0) -> learning
    rate``. The batch entries whose names are parameters of ``model.forward`` are passed to it. Without ``world`` the
    environment of the process says which rank this is.

    Raises PlanError, DataError, CheckpointError before the first step; NumericsError and CommError during it.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        data: Dataset | MapStyle | Iterable[Any],
        plan: Plan | PlanOptions | None = None,
        *,
        objective: Objective,
        optimizer: OptimOptions | None = None,
        schedule: ScheduleOptions | Callable[[int], float] | None = None,
        options: TrainOptions | None = None,
        checkpoint: CheckpointOptions | None = None,
        run_dir: str | Path = "runs/first",
        seed: int = 0,
        resume: str = "auto",
        eval_data: Dataset | None = None,
        metrics: Mapping[str, Metric] | None = None,
        transform: Transform | None = None,
        pair: PairTransform | None = None,
        finish: BatchTransform | None = None,
        loader: LoaderOptions | None = None,
        shuffle_block: int = 0,
        flops_per_token: float | Callable[[nn.Module], float] = 0.0,
        world: World | None = None,
        events: EventLog | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        self._given_model = model
        if isinstance(model, nn.Module):
            self.model = model
        self.data = cast("Iterable[Any]", data) if is_stream(data) else as_dataset(cast("Dataset | MapStyle", data))
        self.eval_data = eval_data
        self.options = options or TrainOptions()
        self.run_dir = Path(run_dir)
        self.evaluation: dict[str, float] = {}
        self._asked_plan = plan or PlanOptions()
        self._objective = objective
        self._optim = optimizer or OptimOptions()
        self._asked_schedule = schedule or ScheduleOptions()
        self._checkpoint = checkpoint or CheckpointOptions()
        self._seed, self._resume = seed, resume
        self._metrics = dict(metrics or {})
        self._transform, self._pair, self._finish = transform, pair, finish
        self._loading, self._shuffle_block = loader or LoaderOptions(), shuffle_block
        self._asked_flops = flops_per_token
        self._given_world = world
        self._given_events = events
        self._provenance = dict(provenance or {})
        self._saved_step = -1
        self._resumed_step = -1
        self._evaluated_step = -1
        self._early_stop = False

    # --- opening and closing ---------------------------------------------------------------------------------------

    def __enter__(self) -> Trainer:
        job = self._given_world.job if self._given_world else job_from_environ(os.environ)
        if isinstance(self._asked_plan, Plan):
            validate_plan(self._asked_plan, job.world_size)
            self.plan, self.device = self._asked_plan, find_device(self._asked_plan.mesh.device, job.local_rank)
        else:
            self.device, self.plan = resolve_plan(self._asked_plan, job)
        self.world = self._given_world or init_distributed(self.plan, job, self.device.type, COLLECTIVE_TIMEOUT_S)
        self.events = self._given_events or open_events(self.run_dir, self.world)
        self._stop = StopNotice() if threading.current_thread() is threading.main_thread() else None
        if self._stop is not None:
            self._stop.__enter__()
        try:
            self._open()
        except BaseException as error:
            self._close(error)
            raise
        return self

    def _open(self) -> None:
        agree(self.world, "plan", self.plan.decisions())
        agree(self.world, "configuration", self._provenance.get("config_hash"))
        set_backend(self.plan)
        check_sync_options(self.plan, self.options)
        self.store = open_store(self.plan, self.world)
        recipe = self._build()
        model = self.model
        asked_flops = self._asked_flops
        flops = asked_flops(model) if callable(asked_flops) else asked_flops
        mine = worker_plan(self.plan)
        self._grid = grid = ParallelDims(mine, self.world)
        named_roles = parameter_roles(model, self._optim.decay_exclude)
        inputs = input_selector(model)
        self._loader = build_loader(
            self.data,
            self._loading,
            self.plan,
            data_rank=grid.data_rank,
            seed=self._seed,
            device=self.device,
            transform=self._transform,
            pair=self._pair,
            finish=self._finish,
            shuffle_block=self._shuffle_block,
            batch_statistics=bool(batch_norms(model)),
        )
        if self.plan.mesh.tp > 1 and not (self.plan.tensor_parallel.rules or self.plan.tensor_parallel.placements):
            self.plan = grid.plan = infer_tp_rules(
                self.plan, model, lambda: inputs(self._first_micro_batch()), self.events
            )
            agree(self.world, "inferred rules", self.plan.decisions())
            mine = self.plan
        self.plan, layout, context = resolve_for_model(self.plan, model, grid, self._first_micro_batch)
        mine = self.plan if layout is not None else mine
        model, whole, stages = parallelize(mine, model.train(), grid, context, layout)
        if self.plan.tensor_parallel.placements:
            self.events.emit("placements", placed=parameter_placements(model))
        if recipe is not None:
            allocate_shards(model, self.device)
        pipeline = PipelineExecutor(stages, grid, self.device) if stages is not None else None
        pieces = ShardedParameters(
            model, grid, whole, repeated=stages.duplicated_parameters if stages is not None else ()
        )
        if recipe is not None:
            materialize(recipe, model, pieces)
        optimizer = build_optimizer(
            model,
            self._optim,
            pieces=pieces.parameters,
            named_roles=named_roles,
            whole_norms=pieces.global_norms if pieces.is_sharded else None,
        )
        self._ledger = build_ledger(
            mine,
            whole,
            self.world.rank,
            state=state_names(self._optim),
            blocks={whole.first_names[name]: block for name, block in blocks(model).items()},
            stacks=expert_dims(model),
            layout=layout,
        )
        check_ledger(self._ledger, pieces.parameters, optimizer)
        options = self.options
        self.state = TrainState(
            model=model,
            sharded=pieces,
            optimizer=optimizer,
            loss_scale=LossScale.create(self.device, initial=options.loss_scale)
            if self.plan.precision.uses_loss_scale
            else LossScale.off(self.device),
            guard=StepGuard(self.device, sigmas=options.spike_sigmas),
            average=WeightAverage(pieces.parameters, options.ema_decay) if options.ema_decay else None,
            weight_total=torch.zeros(
                (), dtype=torch.float64 if self.device.type != "mps" else torch.float32, device=self.device
            ),
        )
        if self.plan.mesh.pp > 1:
            self.state.stage_tensors = StageTensors(self.state.local_state(), grid)
        self._sync, self.state.sync_state = build_gradient_sync(
            mine,
            self.store,
            model,
            pieces,
            grid,
            optimizer=self._optim.kind,
            step=lambda: self.state.step,
            events=self.events,
        )
        seed_generators(self._seed, grid.rng_rank)
        self.checkpointer = Checkpointer(
            self.run_dir / "checkpoints",
            world=self.world,
            options=self._checkpoint,
            attempt=self.events.attempt,
            emit=self.events.emit,
            fault=lambda point: fault_point(point, self._saved_step),
        )
        self._order = {
            "data": str(getattr(self.data, "fingerprint", type(self.data).__qualname__)),
            "samples": len(self.data) if isinstance(self.data, Dataset) else 0,
            "seed": self._seed,
            "global_batch": self.plan.batch.global_batch,
            "shuffle_block": self._shuffle_block,
            "last_batch": self._loading.last_batch,
        }
        self._environment = resuming.run_environment(self.world, self.plan)
        self._emit_start()
        self._timers = StepTimers()
        self._dealt = self._connect(optimizer, named_roles) if self.plan.sync.kind == "dist_async" else None
        if self._dealt is None:
            self._restore()
        elif self._dealt.claim_start():
            self._dealt.publish(self.state, resumed=self._restore())
        else:
            self._dealt.pull_model()
        asked = self._asked_schedule
        self._engine = TrainStep(
            forward_backward=ForwardBackward(
                model=model, inputs=inputs, plan=mine, world=self.world, context=context, pipeline=pipeline
            ),
            objective=self._objective,
            schedule=schedule_of(asked, options.steps, self._optim.lr) if isinstance(asked, ScheduleOptions) else asked,
            clip_norm=self._optim.clip_norm,
            plan=mine,
            world=self.world,
            device=self.device,
            state=self.state,
            sharded=pieces,
            sync=self._sync,
            replicated_grads=ReplicatedGradients(
                [*replicated_grad_groups(model), *(pipeline.shared_parameter_groups if pipeline is not None else ())],
                self.world,
            ),
            timers=self._timers,
            stop=self._stop,
            observe_gradients=GradientStats(pieces, self.events, options.gradient_stats_every),
        )
        self._rates = RateMeter(steps_total=options.steps, devices=self.world.world_size)
        self._readout = MetricsReader(
            events=self.events,
            timers=self._timers,
            rates=self._rates,
            every=1 if self.device.type == "cpu" else ACCELERATOR_READ_STEPS,
            steps_total=options.steps,
            max_skips=options.max_skips,
            device=self.device,
            memory_limit_bytes=host_memory_limit_bytes(),
            flops_per_token=flops,
            comm_stats=build_comm_stats(self.events, self._dealt or self._sync),
            peak=find_peak(self.device, self.plan, self.world) if flops else None,
            weight_total=float(self.state.weight_total),
            skipped_total=int(self.state.guard.skipped),
            compiling=self.plan.backend.compile != "off",
        )

    def _restore(self) -> bool:
        """Go on from a checkpoint, if ``resume`` says so and there is one."""
        resumed = resuming.resume_from_checkpoint(
            self.state,
            self.run_dir / "checkpoints",
            self._resume,
            world=self.world,
            rank=self._grid.rng_rank,
            seed=self._seed,
            order=self._order,
            environment=self._environment,
            events=self.events,
        )
        self._saved_step = self._resumed_step = self.state.step if resumed else -1
        return resumed

    def _connect(self, optimizer: torch.optim.Optimizer, roles: Mapping[str, Role]) -> AsyncWorker:
        """To the servers, which from here on make the optimizer's steps."""
        check_async_data(self._loader)
        dealt = AsyncWorker(
            self.plan,
            self.world.job,
            self.state,
            optimizer,
            options=self._optim,
            roles=roles,
            steps=self.options.steps,
            save_every=math.gcd(self._checkpoint.every_steps, self.options.eval_every),
            about={"plan": self.plan.hash, "configuration": str(self._provenance.get("config_hash"))},
            events=self.events,
            timers=self._timers,
        )
        self.state.sync_state = dealt
        return dealt

    def _build(self) -> DeferredModel | None:
        """Make ``self.model`` equal on all ranks; where it has no values yet, what they are made by."""
        given = self._given_model
        if not isinstance(given, nn.Module):
            if self.plan.is_model_sharded:
                recipe = deferred_init(given)
                agree(self.world, "model", recipe.fingerprint)
                self.model = recipe.model
                return recipe
            self.model = given()
        self.model.to(self.device)
        self.store.broadcast(self.model.state_dict())
        return None

    def _emit_start(self) -> None:
        self.events.emit(
            "run_start",
            plan=self.plan.to_json(),
            plan_text=self.plan.describe(),
            flops_convention=CONVENTION,
            precision_why=precision_reason(self._asked_plan, self.plan),
            device=str(self.device),
            parameters=self.state.sharded.num_parameters,
            held_bytes={
                "parameters": self._ledger.parameter_bytes,
                "gradients": self._ledger.gradient_bytes,
                "optimizer": 0
                if self.plan.sync.kind == "dist_async"
                else self._ledger.state_bytes,  # the servers have it
            },
            steps_total=self.options.steps,
            epoch=self.world.job.restart_count,
            launcher=self.world.job.source,
            environment=self._environment,
            order=self._order,
            **self._provenance,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._readout.read()
                if self._dealt is None or self._dealt.owns_save:
                    self.save(wait=True)
        finally:
            self._close(error)

    def _close(self, error: BaseException | None) -> None:
        if error is not None:
            state = getattr(self, "state", None)
            logs = Path(os.environ.get("UNISONO_LOGS", self.run_dir / "logs"))  # where the launcher looks
            record_failure(logs, self.world.job, error, step=state.step if state else None)
            self.events.emit(
                "run_end",
                step=state.step if state else 0,
                reason="failed",
                error=type(error).__name__,
                message=str(error),
            )
        for name in ("_loader", "checkpointer", "_sync", "_dealt"):
            part = getattr(self, name, None)
            if part is not None:
                part.close()
        if self._stop is not None:
            self._stop.__exit__(None, None, None)
        if self._given_events is None:
            self.events.close()
        if self._given_world is None:
            self.world.close()

    def _first_micro_batch(self) -> Mapping[str, Tensor]:
        with closing(self._loader.iterate(0, 1)) as steps:
            return next(steps).micro_batches[0]

    # --- the loop --------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Step]:
        """Steps from where the run stands to its end, to an early stop, or to the step all ranks agreed to stop at.

        A step's checkpoint is written after the loop's body has seen it, so that an evaluation of that step counts.
        """
        self._rates.start()
        self._timers.take()
        batches = self._batches()
        try:
            while self._dealt is not None or not (self._early_stop or self._readout.stop_requested):
                with self._timers.phase("data_wait"):
                    batch = next(batches, None)
                if batch is None:
                    if self._dealt is None or not self._between(self._dealt):
                        break
                    batches = self._batches()
                    continue
                if batch.skipped_ids:
                    self.events.emit("data_skipped", step=batch.step + 1, samples=batch.skipped_ids)
                began_s, compiling = time.monotonic(), self._readout.compiling
                if self._dealt is not None:
                    self._dealt.start_shard(batch)
                step = self._engine.run(batch)
                self._readout.add(step)
                if compiling:
                    self.events.emit("compiled", step=step.index, first_step_s=time.monotonic() - began_s)
                if self._dealt is not None:
                    with self._timers.phase("comm_exposed"):
                        self._dealt.finish_shard(batch.batch_shard, float(step.stats[WEIGHT]))
                        if self._readout.stop_requested:
                            self._dealt.ask_to_stop()
                yield step
                if self.plan.uses_fsdp:
                    reshard(self.state.model)  # what the loop's body had it compute left parameters gathered
                with self._timers.phase("ckpt_stall"), self._rates.paused():
                    self.checkpointer.poll()
                    if self._dealt is None and is_due(self._checkpoint.every_steps, step.index):
                        self.save()
            self._readout.finish()
        finally:
            batches.close()
        if self.preempted:
            self.events.emit("preempt", step=self.state.step, signal=self._stop.signal_name if self._stop else None)

    def _batches(self) -> Generator[StepBatch]:
        if self._dealt is not None:
            return self._dealt.batches(cast(Loader, self._loader))
        return prefetch_to_device(self._loader.iterate(self.state.step, self.options.steps), self.device)

    def _between(self, dealt: AsyncWorker) -> bool:
        """What is due where an asynchronous run stands at a step; whether there is more to do."""
        with self._rates.paused():
            dealt.pull_model()
            if dealt.work_item.kind != "save":
                return False
            if self.eval_data is not None and (
                is_due(self.options.eval_every, dealt.step) or dealt.step == self.options.steps
            ):
                self.evaluate()
            if self._early_stop:
                dealt.ask_to_stop(finished=True)
            if dealt.is_final_save or is_due(self._checkpoint.every_steps, dealt.step):
                self.save(wait=dealt.is_final_save)
            dealt.finish_save()
        return True

    @property
    def preempted(self) -> bool:
        """Whether a signal to any rank ended the loop; after ``with`` the state is committed, exit with 75."""
        return self._readout.stop_requested if self._dealt is None else self._dealt.work_item.kind == "stopped"

    def fit(self) -> Result:
        """Train to the end, evaluating every ``eval_every`` steps and at the end."""
        alone = self._dealt is None  # else what is due at a step is done between units
        for step in self:
            if alone and self.eval_data is not None and is_due(self.options.eval_every, step.index):
                self.evaluate()
        early = self._early_stop or (not alone and self.state.step < self.options.steps)
        reason = "preempted" if self.preempted else "early_stop" if early else "finished"
        if alone and self.eval_data is not None and reason == "finished" and self._evaluated_step != self.state.step:
            self.evaluate()
        if self._dealt is None or self._dealt.owns_save:
            self.save(wait=True)
        self.events.emit(
            "run_end", step=self.state.step, reason=reason, **{f"eval/{k}": v for k, v in self.evaluation.items()}
        )
        return Result(step=self.state.step, reason=reason, evaluation=self.evaluation)

    def evaluate(self, data: Dataset | None = None) -> dict[str, float]:
        """Loss and metrics on ``data`` (default: the held-out set), with the averaged weights where ``ema_decay`` is set.

        On the held-out set it also decides about early stopping. All ranks must call it.
        """
        held_out = data is None
        chosen = data if data is not None else self.eval_data
        if chosen is None:
            raise ValueError("evaluate() needs a data set: none was given here or as eval_data")
        with self._rates.paused(), self.averaged_weights():
            values = evaluate(
                self._engine.forward_backward,
                chosen,
                objective=self._objective,
                metrics=self._metrics,
                device=self.device,
                data_rank=self._grid.data_rank,
                limit=self.options.num_eval_samples,
            )
        self.events.emit("eval", step=self.state.step, **{f"eval/{name}": value for name, value in values.items()})
        if held_out:
            self.evaluation, self._evaluated_step = values, self.state.step
            self._judge(values["loss"])
        return values

    def averaged_weights(self) -> Any:
        """A context in which the model has the weights that evaluation and export use."""
        average, memory = self.state.average, self.state.sync_state
        if isinstance(memory, LocalSGDSync):
            return memory.swapped_in()
        return average.swapped_in() if average is not None else torch.no_grad()

    def _judge(self, loss: float) -> None:
        state, patience = self.state, self.options.early_stop_patience
        if state.best_loss is None or loss < state.best_loss:
            state.best_loss, state.evaluations_without_gain = loss, 0
            return
        state.evaluations_without_gain += 1
        if patience and state.evaluations_without_gain >= patience:
            self._early_stop = True
            self.events.emit("early_stop", step=state.step, best_loss=state.best_loss, loss=loss, patience=patience)

    def save(self, *, wait: bool = False) -> None:
        """Save the state of the last finished step, in the background unless ``wait``; a step is saved once."""
        if self._saved_step != self.state.step:
            score = self.evaluation.get("loss") if self._evaluated_step == self.state.step else None
            meta = {
                "state": self.state.meta(),
                "order": self._order,
                "environment": self._environment,
                "provenance": self._provenance,
            }
            self._saved_step = self.state.step
            if self._dealt is not None:
                self._dealt.fetch_optimizer_state()
            shared = self.state.global_state()
            own = self.state.rank_state(self._grid.rng_rank) if self._grid.rank_along("tp") == 0 else {}
            parts = {name: each for name, each in shared.items() if isinstance(each, TensorShard)}
            whole = {name: each for name, each in shared.items() if not isinstance(each, TensorShard)}
            self.checkpointer.save(self.state.step, whole, own, meta, parts=parts, score=score)
            if self._dealt is not None:
                self._dealt.drop_optimizer_state()
        if wait:
            self.checkpointer.wait()
            committed = self.checkpointer.committed_step
            if self.state.step not in (committed, self._resumed_step):
                raise not_saved_error(self.state.step, committed, self.run_dir)
