"""The trainer: an iterator of optimizer steps that resumes, accumulates, synchronises, guards and saves by itself.

    with Trainer(model, data, plan, objective=…, optimizer=…, schedule=…) as run:
        for step in run:
            if step.index % 500 == 0:
                run.evaluate(held_out)

Entering it assembles a run, in the order to read it: world, plan, model, data, what the model adds to the plan, its sharding, the
training state, loop. ``step`` makes one step, ``loop`` and ``async_loop`` make them all, ``run_checkpoints`` resumes and saves.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from unisono.checkpoint import CheckpointOptions
from unisono.data.dataset import CollateFn, Dataset, MapStyle
from unisono.data.loading.batch_builder import BatchTransform, PairTransform, Transform
from unisono.data.options import LoaderOptions
from unisono.dist import StopNotice, World, agree, job_from_environ, record_failure
from unisono.kvstore import GradientSync
from unisono.kvstore.server.chunk_optimizer import ServerOptimizerSpec
from unisono.measure.flops import CONVENTION
from unisono.observe.events import EventLog
from unisono.observe.meters import RateMeter, StepTimers
from unisono.observe.monitor import host_memory_limit_bytes
from unisono.optim import OptimOptions, ScheduleOptions, build_optimizer, build_schedule, state_names
from unisono.optim.groups import parameter_roles
from unisono.parallel.batch_norm import batch_norms
from unisono.parallel.deferred_init import DeferredModel, allocate_shards, deferred_init, materialize
from unisono.parallel.device import set_backend
from unisono.parallel.expert import expert_parameters
from unisono.parallel.memory_ledger import MemoryLedger, build_ledger, check_ledger
from unisono.parallel.mesh import ParallelDims
from unisono.parallel.pipeline.executor import PipelineExecutor
from unisono.parallel.precision import LossScale
from unisono.parallel.sharding import ShardedParameters
from unisono.parallel.tensor.dtensor_placements import parameter_placements
from unisono.parallel.transforms import parallelize
from unisono.plan.options import PlanOptions
from unisono.plan.plan import Plan, precision_reason
from unisono.plan.resolve import worker_plan
from unisono.train.async_loop import AsyncLoop
from unisono.train.async_worker import AsyncWorker, async_run_spec, require_random_access
from unisono.train.comm_stats import ReportsTraffic
from unisono.train.ema import WeightAverage
from unisono.train.evaluate import Evaluator
from unisono.train.gradient_sync import (
    build_comm_stats,
    build_gradient_sync,
    check_sync_options,
)
from unisono.train.guard import StepGuard
from unisono.train.loop import StepRunner, SyncLoop
from unisono.train.metrics import Metric
from unisono.train.metrics_reader import GradientStats, MetricsReader
from unisono.train.objectives import Objective
from unisono.train.options import TrainOptions
from unisono.train.run_checkpoints import RunCheckpoints, run_environment
from unisono.train.setup import (
    InputPipeline,
    build_loader,
    complete_plan_for_model,
    find_peak,
    init_distributed,
    open_events,
    open_store,
    read_eval_source,
    read_source,
    resolve_plan,
)
from unisono.train.state import StageTensors, TrainState, seed_generators
from unisono.train.step import ForwardBackward, Step, TrainStep, input_selector

COLLECTIVE_TIMEOUT_S = 300.0
# steps between two readings of loss, norm and flags; on the CPU there is nothing to wait for
ACCELERATOR_READ_STEPS = 10


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


class Trainer:
    """Trains ``model`` on ``data`` as ``plan`` says. A context manager and an iterator; ``fit()`` is the whole run.

    Entering it joins the other ranks, resolves the plan, shards the model and resumes from a checkpoint. Iterating it trains:
    each item is a finished step. Leaving it saves the last step and closes everything that it opened. After entering,
    ``self.model`` is this rank's (part of the) model.

    Example::

        def objective(outputs, batch):
            losses = torch.nn.functional.cross_entropy(outputs, batch["targets"], reduction="none")  # [B]
            return losses.sum(), torch.tensor(float(len(losses)))

        data = from_map_style([(torch.randn(2), 0), (torch.randn(2), 1)])  # (inputs, target) pairs
        options = TrainOptions(steps=200)
        with Trainer(Net(), data, PlanOptions(global_batch=2), objective=objective, options=options) as run:
            for step in run:
                if step.index % 50 == 0:
                    print(step.index, run.evaluate(data)["loss"])

    Args:
        model: A module, whose values on rank 0 are broadcast, or a callable that builds one, the same on all ranks. Where the
            plan shards the model, the module that a callable builds is never whole on any rank (``parallel.deferred_init``).
            Batch entries whose names are parameters of ``model.forward`` are passed to it.
        data: A ``Dataset``, anything indexable with a length, an iterable (a stream), or torch's ``DataLoader`` (it is replaced).
        plan: The layout of model and batch on the ranks. ``PlanOptions`` (default: all defaults) are resolved into a plan for
            this job; a ``Plan`` is only validated.
        objective: ``(outputs, batch) -> (loss_sum, weight)``, two 0-dim tensors. The loss of a step is the sum of ``loss_sum``
            divided by the sum of ``weight``, both over all micro-batches and ranks.
        optimizer: Kind, learning rate, decay and clipping of the optimizer. Default: ``OptimOptions()``, AdamW.
        schedule: ScheduleOptions (default: ``ScheduleOptions()``), or a function of the step, from 0, that returns the
            learning rate itself.
        options: Length of the run, cadence of evaluations, early stopping, EMA and the guard against bad steps. Default:
            ``TrainOptions()``.
        checkpoint: When checkpoints are written and how many are kept. Default: ``CheckpointOptions()``.
        run_dir: Folder of this run: checkpoints, events and logs. It is created if it is missing.
        seed: Seed of data order, augmentation and dropout. It does not initialise a module that is passed or built.
        resume: ``auto`` resumes from the newest good checkpoint in ``run_dir`` or starts a new run; ``strict`` also refuses
            any difference that bit-exactness depends on; ``never`` refuses a folder with checkpoints; a path names a checkpoint.
        eval_data: Held-out samples with a length, for ``fit`` and ``evaluate``. Default: none, and ``fit`` does not evaluate.
        metrics: Metrics of an evaluation by name, in addition to ``loss``. Default: none.
        transform: ``(sample, rng) -> sample``, applied to each training sample; see ``Loader``.
        pair_transform: ``(a, b, rng) -> sample`` on two neighbours of the global batch, such as mixup; see ``Loader``.
        batch_transform: ``(batch) -> batch`` on all rows of a micro-batch; see ``Loader``.
        collate_fn: ``(list of samples) -> batch``, for ``data`` and ``eval_data``; see ``Loader``. Default: samples are stacked.
        loader: Workers, prefetching and the treatment of bad samples and last batches. Default: ``LoaderOptions()``.
        shuffle_block: Number of neighbouring samples that stay together when samples are shuffled, for storage that is slow at
            random access. 0 shuffles single samples.
        flops_per_token: FLOPs of forward and backward per unit of weight (per token in text), or a function of the unsharded
            model, which may be on the meta device. The default 0 reports no TFLOP/s and no utilization.
        world: The ranks to train on; the caller closes it. By default the environment of the process tells which rank this is,
            and entering joins the others.
        events: Event log to write to; the caller closes it. Default: a log of this rank under ``run_dir``.
        provenance: Facts, as JSON types by name, that are recorded in the ``run_start`` event and in every checkpoint. Its
            ``config_hash`` must be equal on all ranks. Default: none.

    Raises:
        PlanError: The plan does not fit the ranks, the model or a batch. Before the first step.
        DataError: The data or its loader settings cannot be used. Before the first step.
        CheckpointError: The checkpoint cannot be resumed from, or the last step cannot be saved.
        NumericsError: ``options.max_skips`` steps in a row were skipped.
        CommError: Ranks disagree, or one of them does not answer.
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
        eval_data: Dataset | MapStyle | None = None,
        metrics: Mapping[str, Metric] | None = None,
        transform: Transform | None = None,
        pair_transform: PairTransform | None = None,
        batch_transform: BatchTransform | None = None,
        collate_fn: CollateFn | None = None,
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
        source = read_source(data, plan=plan, loader=loader, collate_fn=collate_fn)
        self.data, self._given_plan = source.data, source.plan
        self.eval_data = read_eval_source(eval_data, source.collate_fn)
        self.options = options or TrainOptions()
        self.run_dir = Path(run_dir)
        self._objective = objective
        self._optim = optimizer or OptimOptions()
        self._given_schedule = schedule or ScheduleOptions()
        self._checkpoint = checkpoint or CheckpointOptions()
        self._seed, self._resume = seed, resume
        self._metrics = dict(metrics or {})
        self._input = InputPipeline(
            data=self.data,
            options=source.loader,
            transform=transform,
            pair_transform=pair_transform,
            batch_transform=batch_transform,
            shuffle_block=shuffle_block,
            shuffle=source.shuffle,
            collate_fn=source.collate_fn,
        )
        self._given_flops = flops_per_token
        self._given_world = world
        self._given_events = events
        self._provenance = dict(provenance or {})
        self._resources: list[Any] = []  # to be closed in this order

    # --- assembling a run, in order --------------------------------------------------------------------------------

    def __enter__(self) -> Trainer:
        self._open_world()
        try:
            self._agree_on_plan()
            deferred = self._build_model()
            self._open_data()
            self._complete_plan()
            self._shard_model(deferred)
            self._build_state()
            self._build_loop()
        except BaseException as error:
            self._close(error)
            raise
        return self

    def _open_world(self) -> None:
        """Set world, plan and device, open the event log, and listen for stop signals."""
        job = self._given_world.job if self._given_world else job_from_environ(os.environ)
        self.device, self.plan = resolve_plan(self._given_plan, job)  # a Plan is only validated
        self.world = self._given_world or init_distributed(self.plan, job, self.device.type, COLLECTIVE_TIMEOUT_S)
        self.events = self._given_events or open_events(self.run_dir, self.world)
        self._stop_notice = StopNotice() if threading.current_thread() is threading.main_thread() else None
        if self._stop_notice is not None:
            self._stop_notice.__enter__()

    def _agree_on_plan(self) -> None:
        """Require the same plan and configuration on all ranks, and prepare torch for the plan."""
        agree(self.world, "plan", self.plan.decisions())
        agree(self.world, "configuration", self._provenance.get("config_hash"))
        set_backend(self.plan)
        check_sync_options(self.plan, self.options)
        self.store = open_store(self.plan, self.world)

    def _build_model(self) -> DeferredModel | None:
        """Build ``self.model``. Returns the deferred model whose values are materialized after sharding, else None."""
        model, deferred = self._given_model, None
        if isinstance(model, nn.Module) or not self.plan.is_model_sharded:
            self.model = model if isinstance(model, nn.Module) else model()
            self.model.to(self.device)
            self.store.broadcast(self.model.state_dict())
        else:
            deferred = deferred_init(model)
            agree(self.world, "model", deferred.fingerprint)
            self.model = deferred.model
        flops = self._given_flops
        self._flops_per_token = flops(self.model) if callable(flops) else flops
        self._dims = ParallelDims(worker_plan(self.plan), self.world)
        self._roles = parameter_roles(self.model, self._optim.decay_exclude)
        self._inputs = input_selector(self.model)
        return deferred

    def _open_data(self) -> None:
        """Start the loader of this rank's part of each batch."""
        self._loader = build_loader(
            self._input,
            self.plan,
            data_rank=self._dims.data_rank,
            seed=self._seed,
            device=self.device,
            batch_statistics=bool(batch_norms(self.model)),
        )
        self._resources.append(self._loader)

    def _complete_plan(self) -> None:
        """Complete the plan with what only the model and a first micro-batch show."""
        self.plan, self._partition, self._context = complete_plan_for_model(
            self.plan, self.model, self._dims, self._first_micro_batch, self.events
        )

    def _shard_model(self, deferred: DeferredModel | None) -> None:
        """Apply the plan's transforms to the model, and materialize a deferred one."""
        parallel = parallelize(self._dims.plan, self.model.train(), self._dims, self._context, self._partition)
        model, self._shard_table, stages = parallel.model, parallel.table, parallel.stages
        if self.plan.tensor_parallel.placements:
            self.events.emit("placements", placed=parameter_placements(model))
        if deferred is not None:
            allocate_shards(model, self.device)
        self._pipeline = PipelineExecutor(stages, self._dims, self.device) if stages is not None else None
        duplicated = stages.duplicated_parameters if stages is not None else ()
        self._sharded = ShardedParameters(model, self._dims, self._shard_table, duplicated=duplicated)
        if deferred is not None:
            materialize(deferred, model, self._sharded)

    def _build_state(self) -> None:
        """Create the optimizer, all other state of the run, and the gradient synchronisation that has a part of it."""
        sharded, options = self._sharded, self.options
        self._optimizer = build_optimizer(
            self.model,
            self._optim,
            sharded_params=sharded.parameters,
            named_roles=self._roles,
            global_norms=sharded.global_norms if sharded.is_sharded else None,
        )
        self._ledger = self._check_memory()
        total_dtype = torch.float64 if self.device.type != "mps" else torch.float32
        scales = self.plan.precision.uses_loss_scale
        loss_scale = LossScale.create(self.device, initial=options.loss_scale if scales else 1.0, dynamic=scales)
        self.state = TrainState(
            model=self.model,
            sharded=sharded,
            optimizer=self._optimizer,
            loss_scale=loss_scale,
            guard=StepGuard(self.device, sigmas=options.spike_sigmas),
            average=WeightAverage(sharded.parameters, options.ema_decay) if options.ema_decay else None,
            weight_total=torch.zeros((), dtype=total_dtype, device=self.device),
        )
        if self.plan.mesh.pp > 1:
            self.state.stage_tensors = StageTensors(self.state, self._dims)
        self._sync, self.state.sync_state = build_gradient_sync(
            self._dims.plan,  # dist_async: the plan of one worker; else self.plan
            self.store,
            self.model,
            sharded,
            self._dims,
            optimizer=self._optim.kind,
            step=lambda: self.state.step,
            events=self.events,
        )
        self._resources.append(self._sync)
        seed_generators(self._seed, self._dims.rng_rank)

    def _check_memory(self) -> MemoryLedger:
        """Compare what this rank holds with what the plan predicts."""
        table = self._shard_table
        ledger = build_ledger(
            self._dims.plan,
            table.spec,
            self.world.rank,
            state=state_names(self._optim),
            shards=table.tensor_parallel,
            stacks=expert_parameters(self.model),
            layout=self._partition,
        )
        check_ledger(ledger, self._sharded.parameters, self._optimizer)
        return ledger

    def _build_loop(self) -> None:
        """Load the checkpoint to resume from, if there is one, and choose the loop."""
        self._timers = StepTimers()
        self._checkpoints = self._open_checkpoints()
        if self.plan.sync.kind != "dist_async":
            self._checkpoints.restore()
            self._loop = SyncLoop(runner=self._build_runner(self._sync), loader=self._loader)
            return
        loader = require_random_access(self._loader)
        options, optim = self.options, self._optim
        worker = AsyncWorker(
            self.plan,
            self.world.job,
            self.state,
            run_spec=async_run_spec(
                self.plan,
                self.world.job,
                self.state,
                optimizer=optim.kind,
                steps=options.steps,
                save_every=math.gcd(self._checkpoint.every_steps, options.eval_every_steps),
                labels={"plan": self.plan.hash, "configuration": str(self._provenance.get("config_hash"))},
            ),
            # a push brings its learning rate, and gradients are clipped here
            optimizer_spec=ServerOptimizerSpec(
                options=replace(optim, clip_norm=0.0),
                roles=dict(self._roles),
                staleness_lr_decay=self.plan.sync.staleness_lr_decay,
            ),
            events=self.events,
            timers=self._timers,
        )
        self._resources.append(worker)
        worker.start(self._checkpoints.restore)
        self._loop = AsyncLoop(runner=self._build_runner(worker), loader=loader, worker=worker)

    def _open_checkpoints(self) -> RunCheckpoints:
        """Open the folder of checkpoints, and emit ``run_start`` with the plan, the environment and the order of samples."""
        order = {
            "data": str(getattr(self.data, "fingerprint", type(self.data).__qualname__)),
            "samples": len(self.data) if isinstance(self.data, Dataset) else 0,
            "seed": self._seed,
            "global_batch": self.plan.batch.global_batch,
            "shuffle_block": self._input.shuffle_block,
            "last_batch": self._input.options.last_batch,
        }
        environment = run_environment(self.world, self.plan)
        checkpoints = RunCheckpoints(
            self.run_dir / "checkpoints",
            self.state,
            self._dims,
            options=self._checkpoint,
            resume=self._resume,
            meta={"order": order, "environment": environment, "provenance": self._provenance},
            seed=self._seed,
            events=self.events,
        )
        self._resources.append(checkpoints)
        self.events.emit(
            "run_start",
            plan=self.plan.to_json(),
            plan_text=self.plan.describe(),
            flops_convention=CONVENTION,
            precision_why=precision_reason(self.plan),
            device=str(self.device),
            parameters=self._sharded.num_parameters,
            held_bytes={
                "parameters": self._ledger.parameter_bytes,
                "gradients": self._ledger.gradient_bytes,
                # under dist_async the servers have it
                "optimizer": 0 if self.plan.sync.kind == "dist_async" else self._ledger.state_bytes,
            },
            steps_total=self.options.steps,
            epoch=self.world.job.restart_count,
            launcher=self.world.job.source,
            environment=environment,
            order=order,
            **self._provenance,
        )
        return checkpoints

    def _build_runner(self, traffic: GradientSync | ReportsTraffic) -> StepRunner:
        """One step of this run and everything that reports it; ``traffic`` counts what is sent for it."""
        plan = self._dims.plan  # dist_async: the plan of one worker; else self.plan
        options, schedule = self.options, self._given_schedule
        if isinstance(schedule, ScheduleOptions):
            schedule = build_schedule(schedule, options.steps, self._optim.lr)
        forward_backward = ForwardBackward(
            model=self.model,
            inputs=self._inputs,
            plan=plan,
            world=self.world,
            context=self._context,
            pipeline=self._pipeline,
        )
        stage_groups = self._pipeline.shared_parameter_groups if self._pipeline is not None else ()
        train_step = TrainStep(
            forward_backward=forward_backward,
            objective=self._objective,
            schedule=schedule,
            clip_norm=self._optim.clip_norm,
            plan=plan,
            state=self.state,
            sync=self._sync,
            partial_grad_groups=[*self._shard_table.partial_grad_groups, *stage_groups],
            timers=self._timers,
            stop_notice=self._stop_notice,
            observe_gradients=GradientStats(self._sharded, self.events, options.gradient_stats_every_steps),
        )
        rates = RateMeter(steps_total=options.steps, devices=self.world.world_size)
        return StepRunner(
            train_step=train_step,
            metrics_reader=self._build_metrics_reader(rates, traffic),
            rates=rates,
            timers=self._timers,
            events=self.events,
            checkpoints=self._checkpoints,
            evaluator=Evaluator(
                forward_backward=forward_backward,
                objective=self._objective,
                metrics=self._metrics,
                held_out=self.eval_data,
                options=options,
                state=self.state,
                device=self.device,
                data_rank=self._dims.data_rank,
                rates=rates,
                events=self.events,
            ),
            state=self.state,
            options=options,
            device=self.device,
            stop_notice=self._stop_notice,
        )

    def _build_metrics_reader(self, rates: RateMeter, traffic: GradientSync | ReportsTraffic) -> MetricsReader:
        return MetricsReader(
            events=self.events,
            timers=self._timers,
            rates=rates,
            every=1 if self.device.type == "cpu" else ACCELERATOR_READ_STEPS,
            steps_total=self.options.steps,
            max_skips=self.options.max_skips,
            device=self.device,
            memory_limit_bytes=host_memory_limit_bytes(),
            flops_per_token=self._flops_per_token,
            comm_stats=build_comm_stats(self.events, traffic),
            peak=find_peak(self.device, self.plan, self.world) if self._flops_per_token else None,
            weight_total=float(self.state.weight_total),
            skipped_total=int(self.state.guard.skipped),
            compiling=self.plan.backend.compile != "off",
        )

    def _first_micro_batch(self) -> Mapping[str, Tensor]:
        with closing(self._loader.iterate(0, 1)) as steps:
            return next(steps).micro_batches[0]

    # --- closing ---------------------------------------------------------------------------------------------------

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._loop.runner.metrics_reader.read()
                if self._loop.owns_final_state:
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
        for resource in self._resources:
            resource.close()
        if self._stop_notice is not None:
            self._stop_notice.__exit__(None, None, None)
        if self._given_events is None:
            self.events.close()
        if self._given_world is None:
            self.world.close()

    # --- training --------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Step]:
        """Steps from where the run stands to its end, to an early stop, or to the step all ranks agreed to stop at.

        A step's checkpoint is written after the loop's body has seen it, so that an evaluation of that step counts.
        """
        return iter(self._loop)

    @property
    def preempted(self) -> bool:
        """Whether a signal to any rank ended the loop; after ``with`` the state is committed, exit with 75."""
        return self._loop.preempted

    def fit(self) -> Result:
        """Train to the end, evaluating every ``eval_every_steps`` steps and at the end."""
        loop, evaluator = self._loop, self._loop.runner.evaluator
        for step in loop:
            if self.eval_data is not None and loop.evaluates_after(step.index):
                self.evaluate()
        reason = "preempted" if loop.preempted else "early_stop" if loop.stopped_early else "finished"
        if loop.owns_final_state:
            if self.eval_data is not None and reason == "finished" and evaluator.evaluated_step != self.state.step:
                self.evaluate()
            self.save(wait=True)
        values = evaluator.values
        self.events.emit(
            "run_end", step=self.state.step, reason=reason, **{f"eval/{name}": value for name, value in values.items()}
        )
        return Result(step=self.state.step, reason=reason, evaluation=values)

    def evaluate(self, data: Dataset | MapStyle | None = None) -> dict[str, float]:
        """Loss and metrics on ``data`` (default: the held-out set), with the averaged weights where ``ema_decay`` is set.

        On the held-out set it also decides about early stopping. All ranks must call it.
        """
        return self._loop.runner.evaluator.run(read_eval_source(data, self._input.collate_fn))

    def averaged_weights(self) -> AbstractContextManager[Any]:
        """A context in which the model has the weights that evaluation and export use."""
        return self.state.averaged_weights()

    def save(self, *, wait: bool = False) -> None:
        """Save the state of the last finished step, in the background unless ``wait``; a step is saved once."""
        self._loop.save(wait=wait)
