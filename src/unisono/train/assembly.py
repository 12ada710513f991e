"""The parts of a trainer's run, from what it was given, in the order in which they are made.

The model, its shards, the training state, the checkpoint to resume from, the loop.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode  # has no public name; torch 2.13 tested
from torch._subclasses.fake_tensor import unset_fake_temporarily  # neither

from unisono.checkpoint import CheckpointOptions
from unisono.data.dataset import Dataset
from unisono.data.loading.loader import Loader, StepBatch, to_device
from unisono.data.loading.stream_loader import StreamLoader
from unisono.device.torch_adapters import adapter_for, adapter_of
from unisono.dist import StopNotice, World, agree
from unisono.errors import ConfigError
from unisono.kvstore import GradientSync, KVStore
from unisono.measure.flops import CONVENTION
from unisono.observe.events import EVENT_SCHEMA, EventLog
from unisono.observe.host_memory import host_memory_limit_bytes
from unisono.observe.meters import GarbageTimer, RateMeter, StepTimers
from unisono.observe.options import ObserveOptions, parse_tap
from unisono.optim import ScheduleOptions
from unisono.optim.run_optimizer import check_frozen_until
from unisono.parallel.context import ContextParallel
from unisono.parallel.deferred_init import DeferredModel, allocate_shards, deferred_init, materialize
from unisono.parallel.device import set_backend
from unisono.parallel.expert import expert_parameters
from unisono.parallel.memory_ledger import MemoryLedger, build_ledger, check_ledger
from unisono.parallel.mesh import ParallelDims
from unisono.parallel.pipeline.executor import PipelineExecutor
from unisono.parallel.pipeline.partition import PipelinePartition
from unisono.parallel.sharding import ShardedParameters
from unisono.parallel.tensor.dtensor_placements import parameter_placements
from unisono.parallel.transforms import ParallelModel, parallelize
from unisono.plan.plan import Plan, precision_reason
from unisono.plan.resolve import worker_plan
from unisono.profile.window import window_of
from unisono.storage.run_folder import CHECKPOINTS_FOLDER
from unisono.train.async_loop import AsyncLoop
from unisono.train.async_worker import open_async_worker, require_random_access
from unisono.train.callbacks import Every
from unisono.train.code_record import ModelRecord, RunCode
from unisono.train.comm_stats import ReportsTraffic
from unisono.train.ema import WeightAverage
from unisono.train.evaluate import Evaluator
from unisono.train.gradient_sync import build_comm_stats, check_train_options
from unisono.train.guard import StepGuard
from unisono.train.input_pipeline import InputPipeline, with_steps
from unisono.train.loop import StepRunner, SyncLoop
from unisono.train.loss_scaler import LossScaler
from unisono.train.metrics import Metric
from unisono.train.metrics_reader import GradientStats, MetricsReader
from unisono.train.named_losses import NamedLosses
from unisono.train.nonfinite_search import NonfiniteSearch
from unisono.train.objectives import Objective, check_objective
from unisono.train.optimizers import OptimizerSetup
from unisono.train.options import TrainOptions, is_due
from unisono.train.profiling import ProfileScheduler
from unisono.train.replay import build_recorder
from unisono.train.run_checkpoints import RunCheckpoints, run_environment
from unisono.train.settings import count_modules, run_settings
from unisono.train.setup import baseline_of, build_kvstore, count_tokens, find_peak, throughput_unit
from unisono.train.state import StageTensors, TrainState
from unisono.train.state_digests import StateDigests
from unisono.train.step import Batch, ForwardBackward, TrainStep, input_selector
from unisono.train.taps import Taps, TapTarget
from unisono.train.verify import StepVerifier

# steps between two readings of loss, norm and flags; on the CPU there is nothing to wait for
ACCELERATOR_READ_STEPS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInputs:
    """What a trainer was given, with defaults in place (see ``Trainer``). ``objective`` is in the form that a step calls."""

    model: nn.Module | Callable[[], nn.Module]
    objective: Objective
    given_objective: Callable[..., Any]
    optim: OptimizerSetup
    options: TrainOptions
    checkpoint: CheckpointOptions
    run_dir: Path
    seed: int
    resume: str
    input: InputPipeline
    eval_data: Dataset | None
    metrics: Mapping[str, Metric]
    flops_per_token: float | Callable[[nn.Module], float]
    callbacks: Sequence[Every]
    observe: ObserveOptions
    provenance: Mapping[str, Any]
    shows_histograms: bool  # whether a tracker of this rank does

    def with_steps(self, plan: Plan) -> RunInputs:
        """The same with the length of the run in steps. Raises DataError; see ``input_pipeline.with_steps``."""
        last_batch, global_batch = self.input.options.last_batch, plan.batch.global_batch
        return replace(self, options=with_steps(self.options, self.input.data, last_batch, global_batch))


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltModel:
    """The model before it is sharded.

    Attributes:
        model: The model; on the meta device where it is deferred.
        deferred: The deferred model, whose values are materialized after sharding.
        dims: The mesh of the ranks.
        inputs: ``input_selector`` of the model.
        modules: ``count_modules`` of the model.
        paths: Names of the modules of the model.
        record: Attributes and code of its modules.
        num_trained: Elements of the parameters that are trained, in the whole model.
        flops_per_token: FLOPs of forward and backward per unit of weight; 0 where they are not known.
    """

    model: nn.Module
    deferred: DeferredModel | None
    dims: ParallelDims
    inputs: Callable[[Batch], dict[str, Tensor]]
    modules: dict[str, int]
    paths: tuple[str, ...]
    record: ModelRecord
    num_trained: int
    flops_per_token: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedModel:
    """This rank's part of the model; ``pipeline`` passes micro-batches through its stages, if it has some."""

    parallel: ParallelModel
    sharded: ShardedParameters
    pipeline: PipelineExecutor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunParts:
    """Everything that the loop of a run is made of; ``plan`` is the job's, ``built.dims.plan`` the one of these ranks.

    ``profile_steps`` is that of ``ObserveOptions``.
    """

    inputs: RunInputs
    world: World
    plan: Plan
    device: torch.device
    events: EventLog
    stop_notice: StopNotice | None
    loader: Loader | StreamLoader
    built: BuiltModel
    sharded: ShardedModel
    ledger: MemoryLedger
    state: TrainState
    sync: GradientSync
    timers: StepTimers
    profile_steps: str


def agree_on_run(given: RunInputs, plan: Plan, world: World) -> KVStore:
    """Require the same plan and configuration on all ranks, prepare torch for the plan, and open the store."""
    agree(world, "plan", plan.decisions())
    agree(world, "configuration", given.provenance.get("config_hash"))
    set_backend(plan)
    check_train_options(plan, given.options)
    check_objective(given.objective, plan)
    given.optim.check(plan)
    return build_kvstore(plan, world)


def build_model(
    given: RunInputs, plan: Plan, world: World, device: torch.device, store: KVStore, events: EventLog
) -> BuiltModel:
    """Build the model, with the values of rank 0, or deferred if the plan shards what a callable builds. Raises ConfigError."""
    deferred = None
    if isinstance(given.model, nn.Module) or not plan.is_model_sharded:
        model = given.model if isinstance(given.model, nn.Module) else given.model()
        if any(tensor.device != device for tensor in (*model.parameters(), *model.buffers())):
            model.to(device)
        store.broadcast(model.state_dict())
    else:
        with unset_fake_temporarily():
            deferred = deferred_init(given.model)
        agree(world, "model", deferred.fingerprint)
        model = deferred.model
    flops_per_token = flops(model) if callable(flops := given.flops_per_token) else flops
    dims = ParallelDims(worker_plan(plan), world)
    given.optim.prepare_model(model, events)
    _refuse_gradient_hooks(model, plan)
    return BuiltModel(
        model=model,
        deferred=deferred,
        dims=dims,
        inputs=input_selector(model),
        modules=count_modules(model),  # before they are wrapped and sharded
        paths=tuple(path for path, _ in model.named_modules() if path),
        record=ModelRecord(model),
        num_trained=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        flops_per_token=flops_per_token,
    )


def first_micro_batch(loader: Loader | StreamLoader) -> Mapping[str, Tensor]:
    """This rank's first micro-batch of the first step."""
    with closing(loader.iterate(0, 1)) as steps:
        return next(steps).micro_batches[0]


def shard_model(
    built: BuiltModel,
    context: ContextParallel | None,
    partition: PipelinePartition | None,
    device: torch.device,
    events: EventLog,
) -> ShardedModel:
    """Apply the plan's transforms to the model, and materialize a deferred one."""
    dims, deferred = built.dims, built.deferred
    # where a step is traced, a deferred model stays on the meta device until it is allocated
    with nullcontext() if deferred is None else unset_fake_temporarily():
        parallel = parallelize(dims.plan, built.model.train(), dims, context, partition)
    model, stages = parallel.model, parallel.stages
    if dims.plan.tensor_parallel.placements:
        events.emit("placements", placed=parameter_placements(model))
    if deferred is not None:
        allocate_shards(model, device)
    pipeline = PipelineExecutor(stages, dims, device) if stages is not None else None
    duplicated = stages.duplicated_parameters if stages is not None else ()
    sharded = ShardedParameters(model, dims, parallel.table, duplicated=duplicated)
    if deferred is not None and active_fake_mode() is None:  # else the step is traced, without values
        materialize(deferred, model, sharded)
    return ShardedModel(parallel=parallel, sharded=sharded, pipeline=pipeline)


def _refuse_gradient_hooks(model: nn.Module, plan: Plan) -> None:
    """Refuse hooks of the user's on gradients of parameters that are replaced by shards, which do not have them."""
    if not plan.is_model_sharded:
        return
    layout = f"dp_shard {plan.mesh.dp_shard}" if plan.uses_fsdp else f"tp {plan.mesh.tp}"
    if not plan.uses_fsdp and plan.mesh.tp == 1:
        layout = f"pp {plan.mesh.pp}"
    for name, parameter in model.named_parameters():
        if any(getattr(parameter, hooks) for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks")):
            raise ConfigError(
                given=f"a gradient hook on {name!r} with {layout}",
                rule="a hook gets the gradient of a whole parameter, and no rank has the whole model",
                consequence="it would not be called, or with a part of the gradient; nothing was started",
                nearest="a plan without dp_shard, tp and pp, or a hook on the output of a module",
            )


def build_state(
    given: RunInputs, built: BuiltModel, model: ShardedModel, plan: Plan, device: torch.device, events: EventLog
) -> tuple[TrainState, MemoryLedger]:
    """The optimizer and all other state of the run; and what this rank holds, compared with what the plan predicts."""
    sharded, table, options = model.sharded, model.parallel.table, given.options
    optimizer = given.optim.build(built.model, sharded)
    frozen_until = check_frozen_until(optimizer)
    if frozen_until >= options.steps:
        events.emit(
            "notice",
            step=0,
            code="never_trained",
            what=f"a parameter group has frozen_until_step={frozen_until}, and the run has {options.steps} steps",
            why="it is trained from that step on",
            cost="its gradients and optimizer state have memory in vain",
            fix="optim.freeze, or more steps",
        )
    ledger = build_ledger(
        built.dims.plan,
        table.spec,
        built.dims.world.rank,
        state=given.optim.state_names,
        shards=table.tensor_parallel,
        stacks=expert_parameters(built.model),
        layout=model.parallel.partition,
    )
    check_ledger(ledger, sharded.parameters, optimizer)
    total_dtype = torch.float64 if device.type != "mps" else torch.float32
    scales = plan.precision.uses_loss_scale
    state = TrainState(
        model=built.model,
        sharded=sharded,
        optimizer=optimizer,
        learning_rates=given.optim.learning_rates(
            optimizer, options.steps, has_evaluations=given.eval_data is not None
        ),
        loss_scaler=LossScaler(device, init_scale=options.loss_scale if scales else 1.0, dynamic=scales),
        guard=StepGuard(device, sigmas=options.spike_sigmas),
        average=WeightAverage(sharded.parameters, options.ema_decay) if options.ema_decay else None,
        weight_total=torch.zeros((), dtype=total_dtype, device=device),
    )
    if plan.mesh.pp > 1:
        state.stage_tensors = StageTensors(state, built.dims)
    return state, ledger


def build_loop(parts: RunParts, resources: list[Any]) -> SyncLoop | AsyncLoop:
    """Load the checkpoint to resume from, if there is one, and choose the loop. What it opens is added to ``resources``."""
    given = parts.inputs
    facts = {
        "environment": run_environment(parts.world, parts.plan),
        "order": given.input.order(given.seed, parts.plan),
    }
    checkpoints = _open_checkpoints(parts, facts)
    resources.append(checkpoints)
    _emit_start(parts, facts)
    if parts.plan.sync.kind != "dist_async":
        checkpoints.restore()
        return SyncLoop(runner=_build_runner(parts, checkpoints, parts.sync), loader=parts.loader)
    loader = require_random_access(parts.loader)
    optim = given.optim.options
    assert optim is not None  # OptimizerSetup.check
    worker = open_async_worker(
        parts.plan,
        parts.world.job,
        parts.state,
        optimizer=optim,
        roles=given.optim.roles,
        steps=given.options.steps,
        save_every=math.gcd(given.checkpoint.every_steps, given.options.eval_every_steps),
        configuration=str(given.provenance.get("config_hash")),
        events=parts.events,
        timers=parts.timers,
    )
    resources.append(worker)
    worker.start(checkpoints.restore)
    return AsyncLoop(runner=_build_runner(parts, checkpoints, worker), loader=loader, worker=worker)


def _open_checkpoints(parts: RunParts, facts: Mapping[str, Any]) -> RunCheckpoints:
    given, optim, record = parts.inputs, parts.inputs.optim, parts.built.record
    schedule = optim.used_schedule
    functions = {"objective": given.given_objective, **given.input.functions}
    settings = run_settings(
        optimizer=optim.describe(parts.state.optimizer),
        schedule=schedule,
        options=given.options,
        functions=functions,
        model=parts.built.modules,
        data=given.input.data_without_fingerprint,
        config=given.provenance.get("settings", {}),
        loader=given.input.options,
    )
    return RunCheckpoints(
        given.run_dir / CHECKPOINTS_FOLDER,
        parts.state,
        parts.built.dims,
        options=given.checkpoint,
        resume=given.resume,
        meta={**facts, "settings": settings, "provenance": given.provenance},
        code=RunCode(
            functions if isinstance(schedule, ScheduleOptions) else {**functions, "schedule": schedule}, record
        ),
        seed=given.seed,
        events=parts.events,
        worker=parts.world.job.rank if parts.plan.sync.kind == "dist_async" else None,
    )


def _emit_start(parts: RunParts, facts: Mapping[str, Any]) -> None:
    """Emit ``run_start`` with the plan; ``facts`` are the environment and the order of samples."""
    given, plan, ledger = parts.inputs, parts.plan, parts.ledger
    parts.events.emit(
        "run_start",
        schema=EVENT_SCHEMA,
        plan=plan.to_json(),
        plan_text=plan.describe(),
        optimization=given.optim.in_words(parts.state.optimizer, given.options.steps),
        flops_convention=CONVENTION,
        precision_why=precision_reason(plan),
        device=str(parts.device),
        host=socket.gethostname(),
        parameters=parts.sharded.sharded.num_parameters,
        parameters_trained=parts.built.num_trained,
        held_bytes={
            "parameters": ledger.parameter_bytes,
            "gradients": ledger.gradient_bytes,
            # under dist_async the servers have it
            "optimizer": 0 if plan.sync.kind == "dist_async" else ledger.state_bytes,
        },
        **({"baseline_flops_per_s": baseline} if (baseline := baseline_of(parts.device)) else {}),
        steps_total=given.options.steps,
        **({"steps_per_epoch": loader.schedule.steps_per_epoch} if isinstance(loader := parts.loader, Loader) else {}),
        epoch=parts.world.job.restart_count,
        launcher=parts.world.job.source,
        **facts,
        **given.provenance,
    )


def _build_runner(parts: RunParts, checkpoints: RunCheckpoints, traffic: GradientSync | ReportsTraffic) -> StepRunner:
    """One step of this run and everything that reports it; ``traffic`` counts what is sent for it."""
    given, built, state = parts.inputs, parts.built, parts.state
    options, parallel, pipeline = given.options, parts.sharded.parallel, parts.sharded.pipeline
    plan = built.dims.plan  # dist_async: the plan of one worker; else parts.plan
    forward_backward = ForwardBackward(
        model=built.model,
        inputs=built.inputs,
        plan=plan,
        world=parts.world,
        context=parallel.context,
        pipeline=pipeline,
    )
    # only rank 0 has trackers, and its script may have given them on rank 0 alone
    with_histograms = (
        bool(options.gradient_stats_every_steps) and parts.world.all_gather_json(given.shows_histograms)[0]
    )
    adapter, index = adapter_of(parts.device)
    memory = adapter.memory(index)
    profiler = ProfileScheduler(
        run_dir=given.run_dir,
        world=parts.world,
        events=parts.events,
        timers=parts.timers,
        plan=plan,
        ledger=parts.ledger,
        state=state,
        device=parts.device,
        limit_bytes=host_memory_limit_bytes() if memory is None else memory.limit_bytes,
    )
    profiler.plan_window(window_of(parts.profile_steps, state.step))
    ranks_diverge = state.sync_state is not None and state.sync_state.params_diverge
    stage_groups = pipeline.shared_parameter_groups if pipeline is not None else ()
    train_step = TrainStep(
        forward_backward=forward_backward,
        objective=given.objective,
        named_losses=NamedLosses(parts.world, sums_ranks=not ranks_diverge),
        clip_norm=given.optim.norm_limit,
        plan=plan,
        state=state,
        sync=parts.sync,
        partial_grad_groups=[*parallel.table.partial_grad_groups, *stage_groups],
        timers=parts.timers,
        stop_notice=parts.stop_notice,
        profiler=profiler,
        observe_gradients=GradientStats(
            parts.sharded.sharded,
            parts.events,
            options.gradient_stats_every_steps,
            with_histograms=with_histograms,
        ),
        taps=_build_taps(parts, ranks_diverge=ranks_diverge),
        count_units=count_tokens(given.objective),
    )
    rates = RateMeter(steps_total=options.steps, devices=parts.world.world_size)
    return StepRunner(
        train_step=train_step,
        metrics_reader=_build_metrics_reader(parts, rates, traffic, _build_search(parts, train_step)),
        profiler=profiler,
        rates=rates,
        timers=parts.timers,
        events=parts.events,
        checkpoints=checkpoints,
        evaluator=Evaluator(
            forward_backward=forward_backward,
            objective=given.objective,
            metrics=given.metrics,
            held_out=given.eval_data,
            options=options,
            state=state,
            device=parts.device,
            data_rank=built.dims.data_rank,
            rates=rates,
            timers=parts.timers,
            events=parts.events,
        ),
        state=state,
        options=options,
        device=parts.device,
        stop_notice=parts.stop_notice,
        verifier=_build_verifier(parts, train_step, checkpoints, rates),
        callbacks=given.callbacks,
        recorder=build_recorder(parts),
    )


def _build_taps(parts: RunParts, *, ranks_diverge: bool) -> Taps:
    observe, built = parts.inputs.observe, parts.built
    target = TapTarget(
        model=built.model,
        paths=built.paths,
        sharded=parts.sharded.sharded,
        dims=built.dims,
        stages=parts.sharded.parallel.stages,
        ranks_diverge=ranks_diverge,
        updates_here=parts.plan.sync.kind != "dist_async",
    )
    taps = Taps(target, parts.events)
    for tap in observe.taps:
        pattern, every_steps = parse_tap(tap)
        taps.add((pattern,), every_steps)
    return taps


def _build_search(parts: RunParts, train_step: TrainStep) -> NonfiniteSearch | None:
    """The search for the origin of a skipped step; None where it is off, or ranks skip steps each on its own."""
    if not parts.inputs.observe.replay_nonfinite or parts.plan.sync.kind in ("dist_async", "dist_local"):
        return None
    loader = parts.loader

    def load(step: int) -> StepBatch:
        with closing(loader.iterate(step, step + 1)) as steps:
            batch = next(steps)
        return replace(batch, micro_batches=[to_device(part, parts.device) for part in batch.micro_batches])

    return NonfiniteSearch(
        train_step=train_step,
        load=load if isinstance(loader, Loader) else None,  # a stream would have to be read from its start
        events=parts.events,
        device=parts.device,
    )


def _build_verifier(
    parts: RunParts, train_step: TrainStep, checkpoints: RunCheckpoints, rates: RateMeter
) -> StepVerifier | None:
    """The verification of steps; None where it is off. Raises ConfigError where a step cannot be computed again."""
    every, last = parts.inputs.observe.verify_every_steps, parts.inputs.options.steps
    if not every:
        return None
    if parts.state.sync_state is not None or parts.plan.sync.kind == "dist_async":
        kind, codec = parts.plan.sync.kind, parts.plan.sync.compression
        raise ConfigError(
            given=f"observe.verify_every_steps {every} with plan.sync {kind!r} and compression {codec!r}",
            rule="a step is computed again from a copy of its state, all of which is on this rank and equal on its replicas",
            consequence="servers, averages or residuals of a codec would take the step twice; nothing was started",
            nearest="observe.verify_every_steps=0, or plan.sync=dist_sync without compression",
        )
    world = train_step.forward_backward.world
    return StepVerifier(
        train_step=train_step,
        digests=StateDigests(parts.state, world, parts.device),
        is_due=lambda step: is_due(every, step) or checkpoints.is_due(step) or step == last,
        rates=rates,
        events=parts.events,
        device=parts.device,
        stage=parts.built.dims.rank_along("pp"),
    )


def _build_metrics_reader(
    parts: RunParts, rates: RateMeter, traffic: GradientSync | ReportsTraffic, nonfinite_search: NonfiniteSearch | None
) -> MetricsReader:
    given, loader, flops_per_token = parts.inputs, parts.loader, parts.built.flops_per_token
    return MetricsReader(
        events=parts.events,
        timers=parts.timers,
        garbage_timer=GarbageTimer(),
        rates=rates,
        every=1 if adapter_for(parts.device.type).streams is None else ACCELERATOR_READ_STEPS,
        steps_total=given.options.steps,
        epochs_total=loader.schedule.epoch(given.options.steps - 1) + 1 if isinstance(loader, Loader) else None,
        max_skips=given.options.max_skips,
        device=parts.device,
        memory_limit_bytes=host_memory_limit_bytes(),
        flops_per_token=flops_per_token,
        comm_stats=build_comm_stats(parts.events, traffic, parts.built.dims),
        peak=find_peak(parts.device, parts.plan, parts.world) if flops_per_token else None,
        # of a run that begins both are 0, also where its step is traced without values
        weight_total=float(parts.state.weight_total) if parts.state.step else 0.0,
        skipped_total=int(parts.state.guard.skipped) if parts.state.step else 0,
        nonfinite_search=nonfinite_search,
        compiling=parts.plan.backend.compile != "off",
        **throughput_unit(given.objective, given.input.data, parts.built.dims.plan, flops_per_token),
    )
