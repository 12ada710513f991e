"""The parts of a trainer's run, from what it was given, in the order in which they are made.

The model, its data, its shards, the training state. ``loop_assembly`` makes the loop of them.
"""

from __future__ import annotations

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
from unisono.data.loading.loader import Loader
from unisono.data.loading.stream_loader import StreamLoader
from unisono.dist import StopNotice, World, agree
from unisono.errors import ConfigError
from unisono.kvstore import GradientSync, KVStore
from unisono.observe.events import EventLog
from unisono.observe.meters import StepTimers
from unisono.observe.options import ObserveOptions
from unisono.optim.run_optimizer import check_frozen_until
from unisono.parallel.batch_norm import batch_norms
from unisono.parallel.deferred_init import DeferredModel, allocate_shards, deferred_init, materialize
from unisono.parallel.device import set_backend
from unisono.parallel.expert import expert_parameters
from unisono.parallel.memory_ledger import MemoryLedger, build_ledger, check_ledger
from unisono.parallel.mesh import ParallelDims
from unisono.parallel.pipeline.executor import PipelineExecutor
from unisono.parallel.sharding import ShardedParameters
from unisono.parallel.transforms import ParallelModel, parallelize
from unisono.plan.plan import Plan
from unisono.plan.resolve import worker_plan
from unisono.train.callbacks import Every
from unisono.train.code_record import ModelRecord
from unisono.train.distillation import (
    Distillation,
    DistilledObjective,
    check_distillation,
    prepare_teacher,
    shard_teacher,
)
from unisono.train.distilled_features import FeatureOutputs, find_projections, paired_modules, with_projections
from unisono.train.ema import WeightAverage
from unisono.train.gradient_sync import build_gradient_sync, check_train_options
from unisono.train.guard import StepGuard
from unisono.train.input_pipeline import InputPipeline, build_loader, with_steps
from unisono.train.loss_scaler import LossScaler
from unisono.train.metrics import Metric
from unisono.train.objectives import Objective, check_objective
from unisono.train.optimizers import OptimizerSetup
from unisono.train.options import TrainOptions
from unisono.train.settings import count_modules
from unisono.train.setup import (
    PlanOfModel,
    build_kvstore,
    complete_plan_for_model,
    step_timers,
)
from unisono.train.state import StageTensors, TrainState, seed_generators
from unisono.train.step import Batch, input_selector
from unisono.train.whole_model import meta_copy


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
    distill: Distillation | None = None

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

    ``unsharded`` is the model before it was sharded, without values if the plan shards it. ``profile_steps`` is that of
    ``ObserveOptions``. ``distilled`` is the objective of a run with a teacher.
    """

    inputs: RunInputs
    world: World
    plan: Plan
    device: torch.device
    events: EventLog
    stop_notice: StopNotice | None
    loader: Loader | StreamLoader
    built: BuiltModel
    unsharded: nn.Module
    sharded: ShardedModel
    ledger: MemoryLedger
    state: TrainState
    sync: GradientSync
    timers: StepTimers
    profile_steps: str
    distilled: DistilledObjective | None = None


def agree_on_run(given: RunInputs, plan: Plan, world: World) -> KVStore:
    """Require the same plan and configuration on all ranks, prepare torch for the plan, and open the store."""
    agree(world, "plan", plan.decisions())
    agree(world, "configuration", given.provenance.get("config_hash"))
    set_backend(plan)
    check_train_options(plan, given.options)
    check_objective(given.objective, plan)
    if given.distill is not None:
        check_distillation(given.distill, given.given_objective, plan)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _WholeTeacher:
    """A teacher before it is sharded.

    Attributes:
        model: The teacher.
        digest: Digest of its values.
        features: Names of the modules of student and teacher whose outputs are compared.
        student: The student, or what builds it, with the projections that the features need.
    """

    model: nn.Module
    digest: str
    features: list[tuple[str, str]]
    student: nn.Module | Callable[[], nn.Module]


def _whole_teacher(
    given: RunInputs, distill: Distillation, plan: Plan, world: World, device: torch.device, store: KVStore
) -> _WholeTeacher:
    """The teacher, and the student as it is trained with it. Raises ConfigError."""
    teacher, digest = prepare_teacher(distill, plan, device, store)
    student, features = given.model, list[tuple[str, str]]()
    if distill.options.features:
        with unset_fake_temporarily():
            whole = student if isinstance(student, nn.Module) else deferred_init(student).model
            features = paired_modules(whole, teacher, distill.options.feature_pairs)
            alone = replace(given.input, options=replace(given.input.options, num_workers=0))
            dims = ParallelDims(worker_plan(plan), world)
            with closing(
                build_loader(
                    alone, plan, data_rank=dims.data_rank, seed=given.seed, device=device, batch_statistics=False
                )
            ) as loader:
                batch = first_micro_batch(loader)
            student = with_projections(student, find_projections(whole, teacher, features, batch), given.seed)
    return _WholeTeacher(model=teacher, digest=digest, features=features, student=student)


def first_micro_batch(loader: Loader | StreamLoader) -> Mapping[str, Tensor]:
    """This rank's first micro-batch of the first step."""
    with closing(loader.iterate(0, 1)) as steps:
        return next(steps).micro_batches[0]


def shard_model(built: BuiltModel, completed: PlanOfModel, device: torch.device, events: EventLog) -> ShardedModel:
    """Apply the plan's transforms to the model, and materialize a deferred one."""
    dims, deferred = built.dims, built.deferred
    # where a step is traced, a deferred model stays on the meta device until it is allocated
    with nullcontext() if deferred is None else unset_fake_temporarily():
        parallel = parallelize(
            dims.plan,
            built.model.train(),
            dims,
            completed.context,
            completed.partition,
            cast_before_gather=completed.cast_before_gather,
        )
    model, stages = parallel.model, parallel.stages
    if dims.plan.tensor_parallel.placements:
        events.emit("placements", placed=parallel.placed)
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
        shard_dims=table.shard_dims,
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


def assemble(
    given: RunInputs,
    plan: Plan,
    *,
    world: World,
    store: KVStore,
    device: torch.device,
    events: EventLog,
    stop_notice: StopNotice | None,
    resources: list[Any],
) -> RunParts:
    """Make the parts of a run, each as soon as it can be made.

    Args:
        given: What the trainer was given, with the length of the run in steps.
        plan: The plan of the job.
        world: The ranks of the job.
        store: The store of ``agree_on_run``.
        device: The device of this rank.
        events: Event log of this rank.
        stop_notice: Tells of signals that ask the run to stop.
        resources: What is opened here is added, to be closed in this order, also after a failure.

    Raises:
        ConfigError, PlanError, DataError: The plan or the data do not fit the model or the ranks.
    """
    teacher = None
    if given.distill is not None:
        teacher = _whole_teacher(given, given.distill, plan, world, device, store)
        given = replace(given, model=teacher.student)
    built = build_model(given, plan, world, device, store, events)
    dims = built.dims
    unsharded = meta_copy(built.model) if plan.is_model_sharded else built.model
    loader = build_loader(
        given.input,
        plan,
        data_rank=dims.data_rank,
        seed=given.seed,
        device=device,
        batch_statistics=bool(batch_norms(built.model)),
    )
    resources.append(loader)
    # what only the model and a first micro-batch show
    given_plan = plan
    completed = complete_plan_for_model(plan, built.model, dims, lambda: first_micro_batch(loader), events)
    plan = completed.plan
    sharded = shard_model(built, completed, device, events)
    distilled = None
    if given.distill is not None and teacher is not None:
        passes = shard_teacher(teacher.model, given_plan, dims, lambda: first_micro_batch(loader), events)
        distilled = DistilledObjective(
            teacher=passes,
            task=given.objective,
            given=given.given_objective,
            options=given.distill.options,
            digest=teacher.digest,
            features=FeatureOutputs(built.model, passes.model, teacher.features) if teacher.features else None,
        )
        resources.append(distilled)
    state, ledger = build_state(given, built, sharded, plan, device, events)
    sync, state.sync_state = build_gradient_sync(
        dims.plan,  # dist_async: the plan of one worker; else that of the job
        store,
        built.model,
        sharded.sharded,
        dims,
        optimizer=given.optim.name,
        step=lambda: state.step,
        events=events,
    )
    resources.append(sync)
    seed_generators(given.seed, dims.rng_rank)
    return RunParts(
        inputs=given,
        world=world,
        plan=plan,
        device=device,
        events=events,
        stop_notice=stop_notice,
        loader=loader,
        built=built,
        unsharded=unsharded,
        sharded=sharded,
        ledger=ledger,
        state=state,
        sync=sync,
        timers=step_timers(device),
        profile_steps=given.observe.profile_steps,
        distilled=distilled,
    )
