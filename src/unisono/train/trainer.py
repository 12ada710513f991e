"""The trainer: an iterator of optimizer steps that resumes, accumulates, synchronises, guards and saves by itself.

Entering it assembles a run, in the order to read it: world, plan, model, data, what the model adds to the plan, its sharding, the
training state, loop. ``step`` makes one step, ``loop`` and ``async_loop`` make them all, ``run_checkpoints`` resumes and saves.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from unisono.checkpoint import CheckpointOptions
from unisono.config import check_options
from unisono.data.dataset import CollateFn, Dataset, MapStyle
from unisono.data.loading.batch_builder import BatchTransform, PairTransform, Transform
from unisono.data.options import LoaderOptions
from unisono.dist import StopNotice, World, agree
from unisono.kvstore import GradientSync
from unisono.measure.flops import CONVENTION
from unisono.observe.events import EventLog
from unisono.observe.formatting import RunEndFacts
from unisono.observe.meters import RateMeter, StepTimers
from unisono.observe.monitor import host_memory_limit_bytes
from unisono.observe.options import ObserveOptions
from unisono.observe.outputs import RunOutputs
from unisono.optim import OptimOptions, ScheduleOptions
from unisono.optim.learning_rate import SchedulerFactory
from unisono.optim.run_optimizer import GivenOptimizer
from unisono.parallel.batch_norm import batch_norms
from unisono.parallel.deferred_init import DeferredModel, allocate_shards, deferred_init, materialize
from unisono.parallel.device import set_backend
from unisono.parallel.expert import expert_parameters
from unisono.parallel.memory_ledger import MemoryLedger, build_ledger, check_ledger
from unisono.parallel.mesh import ParallelDims
from unisono.parallel.pipeline.executor import PipelineExecutor
from unisono.parallel.sharding import ShardedParameters
from unisono.parallel.tensor.dtensor_placements import parameter_placements
from unisono.parallel.transforms import parallelize
from unisono.plan.options import PlanOptions
from unisono.plan.plan import Plan, precision_reason
from unisono.plan.resolve import worker_plan
from unisono.train.async_loop import AsyncLoop
from unisono.train.async_worker import open_async_worker, require_random_access
from unisono.train.comm_stats import ReportsTraffic
from unisono.train.ema import WeightAverage
from unisono.train.evaluate import Evaluator
from unisono.train.gradient_sync import build_comm_stats, build_gradient_sync, check_train_options
from unisono.train.guard import StepGuard
from unisono.train.loop import Result, StepRunner, SyncLoop
from unisono.train.loss_scaler import LossScaler
from unisono.train.metrics import Metric
from unisono.train.metrics_reader import GradientStats, MetricsReader
from unisono.train.objectives import MEAN_LOSS_NOTICE, Batch, Objective, as_objective, check_objective
from unisono.train.optimizers import OptimizerSetup
from unisono.train.options import TrainOptions
from unisono.train.run_checkpoints import RunCheckpoints, run_environment
from unisono.train.settings import count_modules, run_settings
from unisono.train.setup import (
    InputPipeline,
    build_loader,
    complete_plan_for_model,
    default_run_dir,
    find_peak,
    init_distributed,
    launched_job,
    open_events,
    open_store,
    read_eval_source,
    read_source,
    report_failure,
    resolve_plan,
    throughput_unit,
)
from unisono.train.state import StageTensors, TrainState, seed_generators
from unisono.train.step import ForwardBackward, Step, TrainStep, input_selector

COLLECTIVE_TIMEOUT_S = 300.0
# steps between two readings of loss, norm and flags; on the CPU there is nothing to wait for
ACCELERATOR_READ_STEPS = 10


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
            divided by the sum of ``weight``, both over all micro-batches and ranks. Or a loss of ``torch.nn``, or a function that
            returns the mean of a micro-batch (``train.objectives.as_objective``).
        optimizer: ``OptimOptions`` (default: ``OptimOptions()``, AdamW); a ``torch.optim`` optimizer of the model's parameters; a
            class or function of a list of parameters that builds one; or several by pattern of parameter names, of which the
            first match wins: ``{"*.bias": partial(SGD, lr=0.1), "*": AdamW}``.
        schedule: ``ScheduleOptions``; a function of the step, from 0, that returns the learning rate itself; or a
            ``torch.optim.lr_scheduler`` class, a partial of one, or ``lambda optimizer: …`` that builds one. Default:
            ``ScheduleOptions()``, cosine, with ``OptimOptions``, and a constant rate with another optimizer.
        clip_norm: Largest global gradient norm with an optimizer that is no ``OptimOptions``. Default: no clipping.
        options: Length of the run, cadence of evaluations, early stopping, EMA and the guard against bad steps. Default:
            ``TrainOptions()``.
        checkpoint: When checkpoints are written and how many are kept. Default: ``CheckpointOptions()``.
        run_dir: Folder of this run: checkpoints, events and logs. It is created if it is missing. Default:
            ``runs/<name of the script>``.
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
        observe: Console, trackers and report, which rank 0 makes of the events. Default: ``ObserveOptions()``.
        events: Event log to write to; the caller closes it, and makes what is to be seen of it. Default: a log under ``run_dir``.
        provenance: Facts, as JSON types by name, that are recorded in the ``run_start`` event and in every checkpoint. Its
            ``config_hash`` must be equal on all ranks; its ``settings`` are compared on resume. Default: none.

    Raises:
        ConfigError: Options are not legal, at construction; or the optimizer or schedule cannot be used.
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
        objective: Objective | Callable[[Any, Batch], Tensor],
        optimizer: OptimOptions | GivenOptimizer | None = None,
        schedule: ScheduleOptions | Callable[[int], float] | SchedulerFactory | None = None,
        clip_norm: float | None = None,
        options: TrainOptions | None = None,
        checkpoint: CheckpointOptions | None = None,
        run_dir: str | Path | None = None,
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
        observe: ObserveOptions | None = None,
        events: EventLog | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        check_options(options, checkpoint, loader, observe, plan if isinstance(plan, PlanOptions) else None)
        self._given_model = model
        if isinstance(model, nn.Module):
            self.model = model
        source = read_source(data, plan=plan, loader=loader, collate_fn=collate_fn)
        self.data, self._given_plan = source.data, source.plan
        self.eval_data = read_eval_source(eval_data, source.collate_fn)
        self.options = options or TrainOptions()
        self.run_dir = default_run_dir() if run_dir is None else Path(run_dir)
        self._given_objective = objective
        self._objective = as_objective(
            objective, lambda: self.events.emit("notice", step=self.state.step, **MEAN_LOSS_NOTICE)
        )
        self._optim = OptimizerSetup(
            given=OptimOptions() if optimizer is None else optimizer, schedule=schedule, clip_norm=clip_norm
        )
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
        self._observe = observe or ObserveOptions()
        self._outputs: RunOutputs | None = None
        self._ended = False
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
        job = self._given_world.job if self._given_world else launched_job()
        self.device, self.plan = resolve_plan(self._given_plan, job)  # a Plan is only validated
        self.world = self._given_world or init_distributed(self.plan, job, self.device.type, COLLECTIVE_TIMEOUT_S)
        self.events = self._given_events or open_events(self.run_dir, self.world)
        if self._given_events is None and self.world.job.rank == 0:
            self._outputs = RunOutputs(self.events, self._observe, self.run_dir)
        # the local launcher tells of a Ctrl-C for all its ranks
        notice = StopNotice(announce=self.world.rank == 0 and self.world.job.source != "unisono")
        self._stop_notice = notice if threading.current_thread() is threading.main_thread() else None
        if self._stop_notice is not None:
            self._stop_notice.__enter__()

    def _agree_on_plan(self) -> None:
        """Require the same plan and configuration on all ranks, and prepare torch for the plan."""
        agree(self.world, "plan", self.plan.decisions())
        agree(self.world, "configuration", self._provenance.get("config_hash"))
        set_backend(self.plan)
        check_train_options(self.plan, self.options)
        check_objective(self._objective, self.plan)
        self._optim.check(self.plan)
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
        self._flops_per_token = flops(self.model) if callable(flops := self._given_flops) else flops
        self._dims = ParallelDims(worker_plan(self.plan), self.world)
        self._optim.prepare_model(self.model, self.events)
        self._modules = count_modules(self.model)  # before they are wrapped and sharded
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
        self._optimizer = self._optim.build(self.model, sharded)
        self._ledger = self._check_memory()
        total_dtype = torch.float64 if self.device.type != "mps" else torch.float32
        scales = self.plan.precision.uses_loss_scale
        loss_scaler = LossScaler(self.device, initial=options.loss_scale if scales else 1.0, dynamic=scales)
        self.state = TrainState(
            model=self.model,
            sharded=sharded,
            optimizer=self._optimizer,
            learning_rates=self._optim.learning_rates(self._optimizer, options.steps),
            loss_scaler=loss_scaler,
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
            optimizer=self._optim.name,
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
            state=self._optim.state_names,
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
        options, optim = self.options, self._optim.options
        assert optim is not None  # OptimizerSetup.check
        worker = open_async_worker(
            self.plan,
            self.world.job,
            self.state,
            optimizer=optim,
            roles=self._optim.roles,
            steps=options.steps,
            save_every=math.gcd(self._checkpoint.every_steps, options.eval_every_steps),
            configuration=str(self._provenance.get("config_hash")),
            events=self.events,
            timers=self._timers,
        )
        self._resources.append(worker)
        worker.start(self._checkpoints.restore)
        self._loop = AsyncLoop(runner=self._build_runner(worker), loader=loader, worker=worker)

    def _open_checkpoints(self) -> RunCheckpoints:
        """Open the folder of checkpoints, and emit ``run_start`` with the plan, the environment and the order of samples."""
        order = self._input.order(self._seed, self.plan)
        environment = run_environment(self.world, self.plan)
        settings = run_settings(
            optimizer=self._optim.describe(self._optimizer),
            schedule=self._optim.used_schedule,
            options=self.options,
            functions={"objective": self._given_objective, **self._input.functions},
            model=self._modules,
            data=self._input.data_without_fingerprint,
            config=self._provenance.get("settings", {}),
        )
        checkpoints = RunCheckpoints(
            self.run_dir / "checkpoints",
            self.state,
            self._dims,
            options=self._checkpoint,
            resume=self._resume,
            meta={"order": order, "environment": environment, "settings": settings, "provenance": self._provenance},
            seed=self._seed,
            events=self.events,
        )
        self._resources.append(checkpoints)
        self.events.emit(
            "run_start",
            plan=self.plan.to_json(),
            plan_text=self.plan.describe(),
            optimization=self._optim.in_words(self._optimizer, self.options.steps),
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
        options = self.options
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
            clip_norm=self._optim.norm_limit,
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
            **throughput_unit(self._objective, self.data, self._dims.plan, self._flops_per_token),
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
                if self.state.step >= self.options.steps or self._loop.preempted or self._loop.stopped_early:
                    self._end()
        finally:
            self._close(error)

    def _close(self, error: BaseException | None) -> None:
        if error is not None:
            step = self.state.step if hasattr(self, "state") else None
            report_failure(self.events, self.run_dir, self.world.job, error, step)
        for resource in self._resources:
            resource.close()
        if self._stop_notice is not None:
            self._stop_notice.__exit__(None, None, None)
        if self._outputs is not None:
            if error is None and not self._loop.preempted:
                self._outputs.summary(RunEndFacts(report_path=self._outputs.write_report()))
            self._outputs.close()
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
        if loop.owns_final_state:
            finished = not (loop.preempted or loop.stopped_early)
            if self.eval_data is not None and finished and evaluator.evaluated_step != self.state.step:
                self.evaluate()
            self.save(wait=True)
        return Result(step=self.state.step, reason=self._end(), evaluation=evaluator.values)

    def _end(self) -> str:
        """Emit how the run ended, once; returns the reason."""
        loop, values = self._loop, self._loop.runner.evaluator.values
        reason = "preempted" if loop.preempted else "early_stop" if loop.stopped_early else "finished"
        if not self._ended:
            numbers = {f"eval/{name}": value for name, value in values.items()}
            self.events.emit("run_end", step=self.state.step, reason=reason, **numbers)
            self._ended = True
        return reason

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
