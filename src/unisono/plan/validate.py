"""Validate a plan against the world size: report all problems at once. ``parallel`` checks a plan against a model."""

from __future__ import annotations

import math
from collections.abc import Iterator

from unisono.errors import PlanError, Problem, inert_problem
from unisono.plan.options import MOST_RANKS, PlanOptions
from unisono.plan.plan import BUCKET_BYTES, STAGES_PER_RANK, Plan
from unisono.plan.rules import axes_problem
from unisono.storage.limits import MAX_STEP_SAMPLES

_COUNTS = {
    "mesh": ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"),
    "batch": ("global_batch", "micro_batch", "accumulation"),
}
# settings that only one kind of synchronisation reads
_KIND_SETTINGS = {
    "dist_async": ("staleness", "staleness_lr_decay"),
    "dist_local": ("local_steps", "outer_lr", "outer_momentum", "num_fragments", "outer_delay_steps"),
}


def validate_plan(plan: Plan, world_size: int) -> None:
    """Check ``plan`` for ``world_size`` ranks. Raises PlanError with all problems."""
    checks = (_mesh, _batch, _block_costs, _pipeline, _recompute, _state, _compile, _choices, _placements, _sync)
    problems = list(_counts(plan)) or [problem for check in checks for problem in check(plan, world_size)]
    if problems:
        raise PlanError(*problems)


def _above_one(plan: Plan, *axes: str) -> dict[str, int]:
    """Sizes of those of the mesh ``axes`` that have more than one rank."""
    sizes = {axis: int(getattr(plan.mesh, axis)) for axis in axes}
    return {axis: size for axis, size in sizes.items() if size > 1}


def _counts(plan: Plan) -> Iterator[Problem]:
    counts = {name: int(getattr(getattr(plan, group), name)) for group, names in _COUNTS.items() for name in names}
    for name, count in counts.items():
        if count < 1:
            yield Problem(
                given=f"{name} {count}",
                rule=f"{', '.join(counts)} are at least 1",
                consequence="no rank would compute anything",
                nearest=f"{name}=1",
            )
        most = MAX_STEP_SAMPLES if name in _COUNTS["batch"] else MOST_RANKS
        if count > most:
            yield Problem(
                given=f"{name} {count}",
                rule=f"{name} is at most {most}",
                consequence="no job has so many ranks"
                if most == MOST_RANKS
                else "no memory holds the numbers of the samples",
                nearest=f"{name}={most}",
            )
    ranks = plan.mesh.world_size
    if ranks > MOST_RANKS and all(counts[name] <= MOST_RANKS for name in _COUNTS["mesh"]):
        yield Problem(
            given=f"pp x dp_replicate x dp_shard x cp x tp = {ranks} ranks",
            rule=f"a job has at most {MOST_RANKS} ranks",
            consequence="nothing could carry out the plan",
            nearest="fewer ranks along these axes",
        )


def _mesh(plan: Plan, world_size: int) -> Iterator[Problem]:
    mesh = plan.mesh
    axes = {"pp": mesh.pp, "dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard, "cp": mesh.cp, "tp": mesh.tp}
    if mesh.world_size != world_size:
        near: dict[str, int] = {}
        ranks = world_size
        for name in ("tp", "cp", "pp", "dp_shard"):
            near[name] = largest_divisor(ranks, axes[name])
            ranks //= near[name]
        near["dp_replicate"] = ranks
        shown = [name for name in axes if axes[name] > 1 or name.startswith("dp_")]
        changed = [name for name in axes if near[name] > 1 or name.startswith("dp_") or axes[name] > 1]
        yield Problem(
            given=f"{' x '.join(f'{name} {axes[name]}' for name in shown)} on {world_size} ranks",
            rule="the product of the mesh axes is the number of ranks",
            consequence=f"the plan is for {mesh.world_size} ranks",
            nearest=f"{', '.join(f'{name}={near[name]}' for name in changed)}, "
            f"or launch.num_processes={mesh.world_size} (of a script: unisono launch -n {mesh.world_size})",
        )
    if mesh.shard_degree % mesh.ep:
        yield Problem(
            given=f"ep {mesh.ep} with dp_shard {mesh.dp_shard} x cp {mesh.cp}",
            rule="experts are distributed over ranks that share one copy of the state: ep divides dp_shard x cp",
            consequence="some experts would be on no rank",
            nearest=f"ep={largest_divisor(mesh.shard_degree, mesh.ep)}, or dp_shard={mesh.ep}",
        )


def _batch(plan: Plan, world_size: int) -> Iterator[Problem]:
    mesh, batch = plan.mesh, plan.batch
    ranks = mesh.dp_world_size
    if mesh.world_size != world_size:
        ranks = max(1, world_size // (mesh.pp * mesh.cp * mesh.tp))
    if batch.global_batch < ranks:
        yield Problem(
            given=f"global_batch {batch.global_batch} on {ranks} ranks",
            rule="every rank gets at least one sample of each step",
            consequence=f"{ranks - batch.global_batch} ranks would never see data",
            nearest=f"plan.global_batch={ranks}, or launch.num_processes={batch.global_batch}",
        )
    elif plan.uses_fsdp and batch.global_batch % ranks:
        yield Problem(
            given=f"dp_shard {mesh.dp_shard} with global_batch {batch.global_batch} on {ranks} ranks",
            rule="ranks that share one copy of the state run the same passes: global_batch is a multiple of the ranks",
            consequence="a rank that is done would keep the others waiting for its part of the parameters",
            nearest=f"plan.global_batch={batch.global_batch // ranks * ranks}",
        )
    share = -(-batch.global_batch // ranks)
    if batch.micro_batch > share:
        yield Problem(
            given=f"micro_batch {batch.micro_batch} with global_batch {batch.global_batch} on {ranks} ranks",
            rule="a micro-batch is part of a rank's share of the step",
            consequence=f"the share is only {share} samples",
            nearest=f"plan.micro_batch={share}, or plan.global_batch={batch.micro_batch * ranks}",
        )
    elif batch.accumulation != -(-share // batch.micro_batch):
        yield Problem(
            given=f"accumulation {batch.accumulation} of micro_batch {batch.micro_batch} for a share of {share} samples",
            rule="accumulation is the number of micro-batches in a rank's share of the step",
            consequence="the plan would not say what is computed",
            nearest=f"accumulation={-(-share // batch.micro_batch)}",
        )


def _block_costs(plan: Plan, _world_size: int) -> Iterator[Problem]:
    costs, layers = plan.pipeline.block_costs, plan.pipeline.layers_per_stage
    given = f"block_costs {list(costs)}"
    if costs and (plan.mesh.pp == 1 or layers):
        yield Problem(
            given=f"{given} with layers_per_stage {list(layers)}" if layers else f"{given} with pp 1",
            rule="pipeline stages are balanced by block_costs where layers_per_stage is empty",
            consequence="they would change nothing",
            nearest="layers_per_stage or block_costs" if layers else "no block_costs, or pp above 1",
        )
    if costs and not (all(0 <= cost < math.inf for cost in costs) and any(costs)):
        yield Problem(
            given=given,
            rule="block_costs are relative costs of the parts of a model: finite, 0 or more, and not all 0",
            consequence="no stage would be the heaviest",
            nearest="a cost of 1 for each block, and 0 for what comes before and after them",
        )


def _pipeline(plan: Plan, _world_size: int) -> Iterator[Problem]:
    """Rules of the schedules; ``pipeline_schedule`` has their orders."""
    pp, batch = plan.mesh.pp, plan.batch
    schedule, layers = plan.pipeline.schedule, plan.pipeline.layers_per_stage
    default_stages = pp * STAGES_PER_RANK[schedule]
    if pp == 1 and schedule != PlanOptions().schedule:
        yield inert_problem(
            f"schedule {schedule!r} with pp 1",
            "it orders the passes of the stages of a pipeline",
            "plan.pp=2, or leave plan.schedule out",
        )
    if layers and (pp == 1 or len(layers) % pp):
        yield Problem(
            given=f"layers_per_stage {list(layers)} with pp {pp}",
            rule="layers_per_stage has the number of blocks of each pipeline stage, and each rank as many stages",
            consequence="there is one stage, the whole model" if pp == 1 else "a rank would have no stage",
            nearest="no layers_per_stage, or pp above 1"
            if pp == 1
            else f"{default_stages} numbers, or none (stages are balanced by cost)",
        )
        return
    if any(blocks < 1 for blocks in layers):
        yield Problem(
            given=f"layers_per_stage {list(layers)}",
            rule="every stage has at least one block",
            consequence="a stage would only pass data on",
            nearest="move a block from a neighbour",
        )
    if pp == 1:
        return
    single = STAGES_PER_RANK[schedule] == 1
    if (plan.stages_per_rank == 1) != single or (schedule == "zbv" and plan.stages_per_rank != 2):
        yield Problem(
            given=f"schedule {schedule!r} with {plan.stages_per_rank} stages per rank",
            rule="gpipe and 1f1b run one stage per rank, zbv two, interleaved two or more",
            consequence="there is no such order of passes",
            nearest=f"{default_stages} numbers in layers_per_stage, "
            f"or schedule={'interleaved' if single else '1f1b'!r}",
        )
    least = pp if schedule != "gpipe" else 1
    if batch.accumulation < least:
        yield Problem(
            given=f"accumulation {batch.accumulation} with pp {pp}, schedule {schedule!r}",
            rule=f"the schedule keeps {least} micro-batches in flight at once",
            consequence="some ranks would never have work",
            nearest=f"micro_batch={max(1, batch.micro_batch * batch.accumulation // least)}, or "
            f"global_batch={least * batch.micro_batch * plan.mesh.dp_world_size} with "
            f"micro_batch={batch.micro_batch}, or schedule='gpipe'",
        )
    elif schedule == "interleaved" and batch.accumulation % pp:
        yield Problem(
            given=f"accumulation {batch.accumulation} with pp {pp}, schedule 'interleaved'",
            rule="interleaved stages take micro-batches in groups of pp",
            consequence="the last group would be incomplete",
            nearest=f"accumulation {batch.accumulation // pp * pp}, by global_batch or micro_batch",
        )
    if batch.global_batch % plan.mesh.dp_world_size:
        yield Problem(
            given=f"pp {pp} with global_batch {batch.global_batch} on {plan.mesh.dp_world_size} data ranks",
            rule="all pipelines run the same number of micro-batches: global_batch is a multiple of the data ranks",
            consequence="the schedules would not fit together",
            nearest=f"plan.global_batch={_equal_shares(plan)}",
        )


def _recompute(plan: Plan, _world_size: int) -> Iterator[Problem]:
    mode, blocks = plan.recompute.mode, list(plan.recompute.blocks_per_stage)
    readers = {
        "modules": (mode != "none", "full", "it names the modules that are recomputed"),
        "blocks_per_stage": (mode != "none", "full", "it is the number of blocks that are recomputed"),
        "saved_ops": (
            mode == "selective",
            "selective",
            "it names the operators whose results selective recompute keeps",
        ),
    }
    for name, (is_read, reader, rule) in readers.items():
        value = list(getattr(plan.recompute, name))
        if value and not is_read:
            given, nearest = f"recompute.{name} {value} with recompute {mode!r}", f"recompute={reader!r}"
            yield inert_problem(given, rule, f"{nearest}, or no recompute.{name}")
    if plan.recompute.modules and blocks:
        yield Problem(
            given=f"recompute.modules {list(plan.recompute.modules)} with recompute.blocks_per_stage {blocks}",
            rule="recomputed modules are named, or counted in blocks",
            consequence="it would be unclear which of the two counts",
            nearest="names of blocks in recompute.modules, or no recompute.modules",
        )
    stages = plan.mesh.pp * plan.stages_per_rank if plan.mesh.pp > 1 else 1
    if mode != "none" and blocks and (len(blocks) != stages or min(blocks) < 0 or not any(blocks)):
        yield Problem(
            given=f"recompute.blocks_per_stage {blocks} for {stages} {'stage' if stages == 1 else 'stages'}",
            rule="one number of blocks, 0 or more, for each stage, and not all 0",
            consequence="it would be unclear what is recomputed, or nothing would be",
            nearest=f"{[1] * stages}, or none: then all blocks are recomputed",
        )
    if plan.recompute.offload and plan.mesh.device == "cpu":
        yield Problem(
            given="offload on the device 'cpu'",
            rule="it moves activations from an accelerator to the host",
            consequence="they would be copied to where they are",
            nearest="offload=False, and recompute to save memory",
        )
    if plan.recompute.offload and (mode != "none" or plan.backend.compile != "off"):
        yield Problem(
            given=f"offload with recompute {mode!r}, compile {plan.backend.compile!r}",
            rule="it moves what a block keeps; recomputed blocks keep next to nothing, compiled graphs choose for themselves",
            consequence="little or nothing would be moved",
            nearest="offload=False, or recompute='none' and compile='off'",
        )


def _state(plan: Plan, _world_size: int) -> Iterator[Problem]:
    """Sharding of the state, and buckets of gradients."""
    mesh = f"dp_shard {plan.mesh.dp_shard} x cp {plan.mesh.cp}"
    # dp_shard=0 means all ranks, which may be one
    if plan.fsdp.zero != PlanOptions().zero and not plan.uses_fsdp and "dp_shard" not in plan.pins:
        rule = "it says which part of the state is sharded over the ranks of dp_shard x cp"
        yield inert_problem(f"zero {plan.fsdp.zero} with {mesh}", rule, "plan.dp_shard=2, or leave plan.zero out")
    for name in ("shard_threshold_numel", "prefetch_blocks"):
        number: int = getattr(plan.fsdp, name)
        if number < 0 or (number and not plan.uses_fsdp):
            rule = "it is 0 or more, and acts on a state that ranks share"
            yield inert_problem(f"{name} {number} with {mesh}", rule, f"{name}=0, or dp_shard=2")
    if plan.fsdp.ignored_modules and not plan.uses_fsdp:
        yield inert_problem(
            f"fsdp.ignored_modules {list(plan.fsdp.ignored_modules)} with {mesh}",
            "it names modules that are replicated where ranks share the state",
            "fsdp.ignored_modules=[], or dp_shard=2",
        )
    if plan.sync.bucket_bytes < 1:
        yield Problem(
            given=f"bucket_bytes {plan.sync.bucket_bytes}",
            rule="one all-reduce sums this many bytes of gradients, at least 1 (a larger gradient has one of its own)",
            consequence="nothing could be sent",
            nearest=f"bucket_bytes={BUCKET_BYTES}",
        )


_UNTRACEABLE = {
    "tp": "sums inside a layer between ranks",
    "cp": "gathering keys and values between ranks",
    "pp": "passing between stages between ranks",
    "ep": "sending tokens to experts on other ranks",
}


def _compile(plan: Plan, _world_size: int) -> Iterator[Problem]:
    for axis, size in _above_one(plan, *_UNTRACEABLE).items() if plan.backend.compile != "off" else ():
        yield Problem(
            given=f"{axis} {size} with compile {plan.backend.compile!r}",
            rule=f"{_UNTRACEABLE[axis]} cannot be traced by the compiler",
            consequence="the graph would break " + ("in every block" if axis == "ep" else "at each of them"),
            nearest="compile='off'",
        )


def _choices(plan: Plan, _world_size: int) -> Iterator[Problem]:
    zbv = plan.pipeline.schedule == "zbv" and plan.mesh.pp > 1
    if plan.tensor_parallel.sequence_parallel and plan.mesh.tp == 1:
        yield inert_problem(
            "sequence_parallel with tp 1",
            "it shards the activations between layers that tp shards",
            "sequence_parallel=False, or cp to share sequences",
        )
    if plan.precision.compute == "fp8" and (plan.mesh.tp > 1 or zbv):
        yield Problem(
            given=f"precision 'fp8' with tp {plan.mesh.tp}, schedule {plan.pipeline.schedule!r}",
            rule="layers that tp shards, and layers whose weight gradients zbv delays, have no fp8 products",
            consequence="they would not compute in fp8",
            nearest="precision='bf16', or dp_shard in place of tp and schedule='interleaved'",
        )
    if zbv and plan.uses_fsdp:
        yield Problem(
            given=f"schedule 'zbv' with dp_shard {plan.mesh.dp_shard} x cp {plan.mesh.cp}",
            rule="zbv computes weight gradients after a block's backward pass, and sharded states reduce them at its end",
            consequence="gradients would be missing",
            nearest="schedule='interleaved', or dp_replicate in place of dp_shard",
        )


def _placements(plan: Plan, _world_size: int) -> Iterator[Problem]:
    """Settings that cannot be combined with placements, and placements without effect."""
    parallel = plan.tensor_parallel
    for placement in parallel.placements:
        where = f"{placement.parameter or 'the inputs and outputs'!r} of {placement.module or 'the model'!r}"
        values = [dims for dims in (*placement.inputs, placement.outputs) if dims is not None]
        found = [axes_problem(where, placement.dims), *(axes_problem(where, dims, ("tp",)) for dims in values)]
        yield from (problem for problem in found if problem is not None)
    if any("dp_shard" in placement.dims for placement in parallel.placements) and not plan.uses_fsdp:
        yield inert_problem(
            f"placements over dp_shard with dp_shard {plan.mesh.dp_shard}",
            "they say along which dim ranks that share states split a parameter",
            "plan.dp_shard=2, or no 'dp_shard' in placements",
        )
    if any("ep" in placement.dims for placement in parallel.placements) and plan.mesh.ep == 1:
        yield inert_problem(
            "placements over ep with ep 1",
            "they say that ranks share the experts of a stack",
            "plan.ep=2, or no 'ep' in placements",
        )
    if parallel.dtensor_placements:
        yield from _dtensor_placements(plan)


def _dtensor_placements(plan: Plan) -> Iterator[Problem]:
    parallel = plan.tensor_parallel
    if parallel.sequence_parallel:
        yield Problem(
            given="placements with sequence_parallel True",
            rule="DTensor decides how activations are sharded",
            consequence="the model could not be sharded both ways",
            nearest="no sequence_parallel, or tensor_parallel.rules in place of placements",
        )
    if plan.pipeline.schedule == "zbv" and plan.mesh.pp > 1:
        yield Problem(
            given="placements with schedule 'zbv'",
            rule="zbv computes gradients of weights from plain tensors, and placed layers compute with DTensors",
            consequence="the gradients could not be computed later",
            nearest="schedule='1f1b' or 'interleaved'",
        )
    if parallel.rules:
        yield Problem(
            given=f"placements with rules {len(parallel.rules)}",
            rule="a layer is sharded by rules or by placements",
            consequence="the model could not be sharded both ways",
            nearest="one of the two",
        )
    for placement in parallel.placements:
        redistributes = bool(placement.inputs) or placement.outputs is not None
        if bool(placement.parameter) == redistributes or bool(placement.parameter) != bool(placement.dims):
            fields = [name for name in ("parameter", "dims", "inputs", "outputs") if getattr(placement, name)]
            yield Problem(
                given=f"a placement in {placement.module or 'the model'!r} with {', '.join(fields) or 'nothing else'}",
                rule="a placement has parameter and dims, or inputs and outputs (one of them at least)",
                consequence="it would be unclear which tensors are placed",
                nearest='{"module": …, "parameter": …, "dims": […]}, and another for inputs and outputs',
            )
    if plan.mesh.tp == 1:
        yield Problem(
            given="placements with plan.tp=1",
            rule="they shard parameters over the ranks of tp",
            consequence="they would act on nothing",
            nearest="plan.tp=2, or no placements",
        )


# ---------------------------------------------------------------------------------------------- synchronisation


def _sync(plan: Plan, world_size: int) -> Iterator[Problem]:
    sync = plan.sync
    if sync.kind == "local" and world_size > 1:
        yield Problem(
            given=f"sync 'local' on {world_size} ranks",
            rule="the local store sums inside one process only",
            consequence="ranks would train different models",
            nearest="plan.sync='dist_sync' (or leave it at 'auto')",
        )
    defaults = PlanOptions()
    for kind, names in _KIND_SETTINGS.items():
        for name in names if sync.kind != kind else ():
            value = getattr(sync, name)
            if value != getattr(defaults, name):
                given, nearest = f"{name} {value} with sync {sync.kind!r}", f"leave it out, or plan.sync={kind!r}"
                yield inert_problem(given, f"{name} is read by {kind}", nearest)
    if sync.kind in _KIND_SETTINGS:
        yield from _divergent_ranks(plan)
    if sync.compression != "none":
        yield from _compression(plan)
        yield from _codec_of_kind(plan)
    if sync.kind == "dist_local":
        yield from round_problems(sync.local_steps, sync.num_fragments, sync.outer_delay_steps)


def _divergent_ranks(plan: Plan) -> Iterator[Problem]:
    """Ranks whose parameters diverge between synchronisations cannot share a model, a sequence or a state."""
    kind = plan.sync.kind
    axes = _above_one(plan, "pp", "dp_shard", "cp", "tp")
    if axes:
        yield Problem(
            given=f"sync {kind!r} with {', '.join(f'{name} {size}' for name, size in axes.items())}",
            rule="ranks that update without each other hold the whole model: dp_replicate is the only axis above 1",
            consequence="some would wait in a collective for ranks that are elsewhere",
            nearest=f"plan.sync='dist_sync', or {', '.join(f'{name}=1' for name in axes)}",
        )
    if plan.batch.global_batch % plan.mesh.dp_world_size:
        yield Problem(
            given=f"sync {kind!r} with global_batch {plan.batch.global_batch} on {plan.mesh.dp_world_size} ranks",
            rule="each rank's gradient has the same weight, so all have equally many samples",
            consequence="samples of smaller shares would weigh more",
            nearest=f"plan.global_batch={_equal_shares(plan)}",
        )
    if kind == "dist_local" and plan.precision.uses_loss_scale:
        yield Problem(
            given="sync 'dist_local' with fp16",
            rule="a loss scale is agreed on in every step, and these ranks agree once a round",
            consequence="ranks would scale, and skip steps, differently",
            nearest="plan.precision='bf16', or plan.sync='dist_sync'",
        )


def _compression(plan: Plan) -> Iterator[Problem]:
    codec, reason = plan.sync.compression, ""
    if plan.uses_fsdp:
        reason = "FSDP2 reduces the gradients of sharded states itself"
    elif plan.mesh.dp_replicate == 1:
        reason = "no gradient is sent from rank to rank"
    if plan.precision.uses_loss_scale:
        yield Problem(
            given=f"compression {codec!r} with fp16",
            rule="a codec's residual is in units of the gradients, which a loss scale changes from step to step",
            consequence="the residual would be added back too large or too small",
            nearest="plan.precision='bf16', or plan.compression='none'",
        )
    if reason:
        yield Problem(
            given=f"compression {codec!r} with dp_replicate {plan.mesh.dp_replicate}, dp_shard {plan.mesh.dp_shard}",
            rule=f"compression acts on what the store sends, and here {reason}",
            consequence="it would act on nothing",
            nearest="plan.compression='none', or dp_replicate in place of dp_shard",
        )


def _codec_of_kind(plan: Plan) -> Iterator[Problem]:
    kind, codec = plan.sync.kind, plan.sync.compression
    name = codec.partition(":")[0]
    if kind in _KIND_SETTINGS and name == "powersgd":
        yield Problem(
            given=f"compression {codec!r} with sync {kind!r}",
            rule="PowerSGD sums the factors of single gradients over all ranks at once",
            consequence="there would be nothing to sum them with",
            nearest="plan.compression='int8' or 'topk:0.01', or plan.sync='dist_sync'",
        )
    if kind == "dist_async" and name == "auto":
        yield Problem(
            given="compression 'auto' with sync 'dist_async'",
            rule="auto measures an all-reduce among the ranks, and asynchronous ones make none",
            consequence="there is nothing to decide by",
            nearest="plan.compression='int8', or 'none' (`unisono kvstore bench` compares them)",
        )


def round_problems(local_steps: int, num_fragments: int, outer_delay_steps: int) -> Iterator[Problem]:
    """Problems of rounds of ``local_steps`` that are averaged in fragments, each applied ``outer_delay_steps`` later."""
    if not 1 <= num_fragments <= max(local_steps, 1):
        yield Problem(
            given=f"num_fragments {num_fragments} with local_steps {local_steps}",
            rule="each fragment is averaged at a step of its own within a round: 1 <= num_fragments <= local_steps",
            consequence="two fragments would be averaged at one step, or none",
            nearest=f"num_fragments={max(1, min(num_fragments, local_steps))}, or local_steps={max(1, num_fragments)}",
        )
    if not 0 <= outer_delay_steps < max(local_steps, 1):
        yield Problem(
            given=f"outer_delay_steps {outer_delay_steps} with local_steps {local_steps}",
            rule="an average is applied before the next one of its fragment starts: 0 <= outer_delay_steps < local_steps",
            consequence="two averages of one parameter would be in flight",
            nearest=f"outer_delay_steps={max(0, min(outer_delay_steps, local_steps - 1))}",
        )


def _equal_shares(plan: Plan) -> int:
    """The nearest global batch that gives all data ranks the same number of samples."""
    ranks = plan.mesh.dp_world_size
    return max(1, plan.batch.global_batch // ranks) * ranks


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of ``number`` that is at most ``limit``."""
    return max(n for n in range(1, min(number, limit) + 1) if number % n == 0)
