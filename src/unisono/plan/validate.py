"""What keeps a number of ranks from carrying out a plan, all of it at once. What a model adds to it, ``parallel`` says."""

from __future__ import annotations

import math
from collections.abc import Iterator

from unisono.errors import PlanError, Problem
from unisono.plan.plan import BUCKET_BYTES, STAGES_PER_RANK, Plan
from unisono.plan.rules import ParameterPlacement
from unisono.plan.validate_sync import sync_problems

COUNTS = (
    "pp",
    "dp_replicate",
    "dp_shard",
    "cp",
    "tp",
    "ep",
    "global_batch",
    "micro_batch",
    "accumulation",
)


def validate_plan(plan: Plan, world: int) -> None:
    """Raises PlanError with everything that keeps ``world`` ranks from carrying out the plan."""
    problems = list(_counts(plan)) or [
        *_mesh(plan, world),
        *_batch(plan, world),
        *_weights(plan),
        *_pipeline(plan),
        *_recompute(plan),
        *_state(plan),
        *_choices(plan, world),
        *_placements(plan),
        *sync_problems(plan, world),
    ]
    if problems:
        raise PlanError(*problems)


def _counts(plan: Plan) -> Iterator[Problem]:
    for name in COUNTS:
        if getattr(plan, name) < 1:
            yield Problem(
                given=f"{name} {getattr(plan, name)}",
                rule=f"{', '.join(COUNTS)} are at least 1",
                consequence="no rank would compute anything",
                nearest=f"{name}=1",
            )


def _mesh(plan: Plan, world: int) -> Iterator[Problem]:
    axes = {"pp": plan.pp, "dp_replicate": plan.dp_replicate, "dp_shard": plan.dp_shard, "cp": plan.cp, "tp": plan.tp}
    if plan.world_size != world:
        near: dict[str, int] = {}
        left = world
        for name in ("tp", "cp", "pp", "dp_shard"):
            near[name] = largest_divisor(left, axes[name])
            left //= near[name]
        near["dp_replicate"] = left
        said = [name for name in axes if axes[name] > 1 or name.startswith("dp_")]
        changed = [name for name in axes if near[name] > 1 or name.startswith("dp_") or axes[name] > 1]
        yield Problem(
            given=f"{' x '.join(f'{name} {axes[name]}' for name in said)} on {world} ranks",
            rule="the product of the mesh axes is the number of ranks",
            consequence=f"the plan is for {plan.world_size} ranks",
            nearest=f"{', '.join(f'{name}={near[name]}' for name in changed)}, or launch.processes={plan.world_size}",
        )
    if plan.shard_degree % plan.ep:
        yield Problem(
            given=f"ep {plan.ep} with dp_shard {plan.dp_shard} x cp {plan.cp}",
            rule="experts are spread over ranks that share one copy of the state: ep divides dp_shard x cp",
            consequence="experts would have no place",
            nearest=f"ep={largest_divisor(plan.shard_degree, plan.ep)}, or dp_shard={plan.ep}",
        )


def _batch(plan: Plan, world: int) -> Iterator[Problem]:
    ranks = plan.dp_world_size if plan.world_size == world else max(1, world // (plan.pp * plan.cp * plan.tp))
    if plan.global_batch < ranks:
        yield Problem(
            given=f"global_batch {plan.global_batch} on {ranks} ranks",
            rule="every rank gets at least one sample of each step",
            consequence=f"{ranks - plan.global_batch} ranks would never see data",
            nearest=f"plan.global_batch={ranks}, or launch.processes={plan.global_batch}",
        )
    elif plan.uses_fsdp and plan.global_batch % ranks:
        yield Problem(
            given=f"dp_shard {plan.dp_shard} with global_batch {plan.global_batch} on {ranks} ranks",
            rule="ranks that share one copy of the state run the same passes: global_batch is a multiple of the ranks",
            consequence="a rank that is done would keep the others waiting for its part of the parameters",
            nearest=f"plan.global_batch={plan.global_batch // ranks * ranks}",
        )
    share = -(-plan.global_batch // ranks)
    if plan.micro_batch > share:
        yield Problem(
            given=f"micro_batch {plan.micro_batch} with global_batch {plan.global_batch} on {ranks} ranks",
            rule="a micro-batch is part of a rank's share of the step",
            consequence=f"the share is only {share} samples",
            nearest=f"plan.micro_batch={share}, or plan.global_batch={plan.micro_batch * ranks}",
        )
    elif plan.accumulation != -(-share // plan.micro_batch):
        yield Problem(
            given=f"accumulation {plan.accumulation} of micro_batch {plan.micro_batch} for a share of {share} samples",
            rule="accumulation is the number of micro-batches in a rank's share of the step",
            consequence="the plan would not say what is computed",
            nearest=f"accumulation={-(-share // plan.micro_batch)}",
        )


def _weights(plan: Plan) -> Iterator[Problem]:
    """What blocks cost, in place of what is counted."""
    given = f"weights {list(plan.weights)}"
    if plan.weights and (plan.pp == 1 or plan.splits):
        yield Problem(
            given=f"{given} with splits {list(plan.splits)}" if plan.splits else f"{given} with pp 1",
            rule="the splits of a pipeline are derived from weights where they are not given themselves",
            consequence="they would change nothing",
            nearest="splits or weights" if plan.splits else "no weights, or pp above 1",
        )
    if plan.weights and (not all(0 <= each < math.inf for each in plan.weights) or not any(plan.weights)):
        yield Problem(
            given=given,
            rule="weights are what parts of the model cost beside each other: finite, 0 or more, and not all 0",
            consequence="no piece would be the heaviest",
            nearest="weights 1 for each block, and 0 before and behind them",
        )


def _pipeline(plan: Plan) -> Iterator[Problem]:
    """Rules of the schedules; see ``schedule`` for what they run."""
    if plan.splits and (plan.pp == 1 or len(plan.splits) % plan.pp):
        yield Problem(
            given=f"splits {list(plan.splits)} with pp {plan.pp}",
            rule="splits has one number of blocks for each piece of the model, equally many pieces per rank",
            consequence="there is one piece, the whole model" if plan.pp == 1 else "a rank would have no piece",
            nearest="no splits, or pp above 1"
            if plan.pp == 1
            else f"{plan.pp * STAGES_PER_RANK[plan.schedule]} numbers, or none (they are chosen by weight)",
        )
        return
    if any(blocks < 1 for blocks in plan.splits):
        yield Problem(
            given=f"splits {list(plan.splits)}",
            rule="every piece of the model has at least one block",
            consequence="a stage would only pass data on",
            nearest="move a block from a neighbour",
        )
    if plan.pp == 1:
        return
    one = STAGES_PER_RANK[plan.schedule] == 1
    if (plan.stages_per_rank == 1) != one or (plan.schedule == "zbv" and plan.stages_per_rank != 2):
        yield Problem(
            given=f"schedule {plan.schedule!r} with {plan.stages_per_rank} pieces of the model per rank",
            rule="gpipe and 1f1b run one piece per rank, zbv two, interleaved two or more",
            consequence="there is no such order of passes",
            nearest=f"{plan.pp * STAGES_PER_RANK[plan.schedule]} splits, or schedule={'interleaved' if one else '1f1b'!r}",
        )
    least = plan.pp if plan.schedule != "gpipe" else 1
    if plan.accumulation < least:
        yield Problem(
            given=f"accumulation {plan.accumulation} with pp {plan.pp}, schedule {plan.schedule!r}",
            rule=f"the schedule keeps {least} micro-batches under way at once",
            consequence="some ranks would never have work",
            nearest=f"micro_batch={max(1, plan.micro_batch * plan.accumulation // least)}, or "
            f"global_batch={least * plan.micro_batch * plan.dp_world_size} with micro_batch={plan.micro_batch}, "
            "or schedule='gpipe'",
        )
    elif plan.schedule == "interleaved" and plan.accumulation % plan.pp:
        yield Problem(
            given=f"accumulation {plan.accumulation} with pp {plan.pp}, schedule 'interleaved'",
            rule="interleaved stages take micro-batches in groups of pp",
            consequence="the last group would not be whole",
            nearest=f"accumulation {plan.accumulation // plan.pp * plan.pp}, by global_batch or micro_batch",
        )
    if plan.global_batch % plan.dp_world_size:
        yield Problem(
            given=f"pp {plan.pp} with global_batch {plan.global_batch} on {plan.dp_world_size} data ranks",
            rule="all pipelines run the same number of micro-batches: global_batch is a multiple of the data ranks",
            consequence="the schedules would not fit together",
            nearest=f"plan.global_batch={max(1, plan.global_batch // plan.dp_world_size) * plan.dp_world_size}",
        )


def _recompute(plan: Plan) -> Iterator[Problem]:
    """``recompute_blocks`` has the number of recomputed blocks, from the first on, of each piece of the model;
    ``recompute_modules`` names modules that are recomputed in place of blocks."""
    modules = f"recompute_modules {list(plan.recompute_modules)}"
    if plan.recompute_modules and plan.recompute == "none":
        yield Problem(
            given=f"{modules} with recompute 'none'",
            rule="it names the modules that recompute, each by the same rule",
            consequence="it would change nothing",
            nearest="recompute='full', or no recompute_modules",
        )
    if plan.recompute_modules and plan.recompute_blocks:
        yield Problem(
            given=f"{modules} with recompute_blocks {list(plan.recompute_blocks)}",
            rule="what is recomputed is named, or counted in blocks",
            consequence="it would be unclear which of the two counts",
            nearest="names of blocks among recompute_modules, or no recompute_modules",
        )
    pieces = plan.pp * plan.stages_per_rank if plan.pp > 1 else 1
    blocks = list(plan.recompute_blocks)
    if plan.recompute == "none" and blocks:
        yield Problem(
            given=f"recompute_blocks {blocks} with recompute 'none'",
            rule="it says how many blocks recompute, each by the same rule",
            consequence="it would change nothing",
            nearest="recompute='full', or no recompute_blocks",
        )
    elif blocks and (len(blocks) != pieces or min(blocks) < 0 or not any(blocks)):
        yield Problem(
            given=f"recompute_blocks {blocks} for {pieces} {'piece' if pieces == 1 else 'pieces'} of the model",
            rule="one number of blocks, 0 or more, for each piece, and not all 0",
            consequence="it would be unclear what is recomputed, or nothing would be",
            nearest=f"{[1] * pieces}, or none: then all blocks are recomputed",
        )
    if plan.recompute_keep and plan.recompute != "selective":
        yield Problem(
            given=f"recompute_keep {list(plan.recompute_keep)} with recompute {plan.recompute!r}",
            rule="it names operators whose results selective recompute keeps",
            consequence="it would change nothing",
            nearest="recompute='selective', or no recompute_keep",
        )


def _offload(plan: Plan) -> Iterator[Problem]:
    if not plan.offload:
        return
    if plan.device == "cpu":
        yield Problem(
            given="offload on the device 'cpu'",
            rule="it moves activations from an accelerator to the host",
            consequence="they would be copied to where they are",
            nearest="offload=False, and recompute to save memory",
        )
    if plan.recompute != "none" or plan.compile != "off":
        yield Problem(
            given=f"offload with recompute {plan.recompute!r}, compile {plan.compile!r}",
            rule="it moves what a block keeps; recomputed blocks keep next to nothing, compiled graphs choose for themselves",
            consequence="little or nothing would be moved",
            nearest="offload=False, or recompute='none' and compile='off'",
        )


def _state(plan: Plan) -> Iterator[Problem]:
    """How the state is cut and summed."""
    for name in ("shard_threshold_numel", "prefetch_blocks"):
        number: int = getattr(plan, name)
        if number < 0 or (number and not plan.uses_fsdp):
            yield Problem(
                given=f"{name} {number} with dp_shard {plan.dp_shard} x cp {plan.cp}",
                rule="it is 0 or more, and says something of a state that ranks share",
                consequence="it would change nothing",
                nearest=f"{name}=0, or dp_shard=2",
            )
    if plan.unsharded and not plan.uses_fsdp:
        yield Problem(
            given=f"unsharded {list(plan.unsharded)} with dp_shard {plan.dp_shard} x cp {plan.cp}",
            rule="it names modules that stay whole beside a state that ranks share",
            consequence="it would change nothing",
            nearest="unsharded=[], or dp_shard=2",
        )
    if plan.bucket_bytes < 1:
        yield Problem(
            given=f"bucket_bytes {plan.bucket_bytes}",
            rule="so many bytes of gradients, at least 1, are summed by one all-reduce (a larger gradient by one of its own)",
            consequence="nothing could be sent",
            nearest=f"bucket_bytes={BUCKET_BYTES}",
        )


def _choices(plan: Plan, world: int) -> Iterator[Problem]:
    for axis, what in (
        ("tp", "sums inside a layer"),
        ("cp", "gathering keys and values"),
        ("pp", "passing between stages"),
    ):
        size: int = getattr(plan, axis)
        if size > 1 and plan.compile != "off":
            yield Problem(
                given=f"{axis} {size} with compile {plan.compile!r}",
                rule=f"{what} between ranks cannot be traced by the compiler",
                consequence="the graph would break at each of them",
                nearest="compile='off'",
            )
    if plan.ep > 1 and plan.compile != "off":
        yield Problem(
            given=f"ep {plan.ep} with compile {plan.compile!r}",
            rule="sending tokens to experts on other ranks cannot be traced by the compiler",
            consequence="the graph would break in every block",
            nearest="compile='off'",
        )
    if plan.sequence_parallel and plan.tp == 1:
        yield Problem(
            given="sequence_parallel with tp 1",
            rule="it cuts what lies between layers that tp cuts",
            consequence="it would change nothing",
            nearest="sequence_parallel=False, or cp to share sequences",
        )
    yield from _offload(plan)
    if plan.precision == "fp8" and (plan.tp > 1 or (plan.schedule == "zbv" and plan.pp > 1)):
        yield Problem(
            given=f"precision 'fp8' with tp {plan.tp}, schedule {plan.schedule!r}",
            rule="layers that tp cuts, and those whose weight gradients zbv puts off, make their products in another way",
            consequence="they would not compute in fp8",
            nearest="precision='bf16', or dp_shard in place of tp and schedule='interleaved'",
        )
    if plan.schedule == "zbv" and plan.pp > 1 and plan.uses_fsdp:
        yield Problem(
            given=f"schedule 'zbv' with dp_shard {plan.dp_shard} x cp {plan.cp}",
            rule="zbv computes weight gradients after a block's backward pass, and sharded states reduce them at its end",
            consequence="gradients would be missing",
            nearest="schedule='interleaved', or dp_replicate in place of dp_shard",
        )


def _placements(plan: Plan) -> Iterator[Problem]:
    """What cannot be beside placements, and why."""
    if not plan.placements:
        return
    reasons = {
        "dp_shard": (plan.dp_shard > 1, "FSDP2 would cut each parameter again, along dims that DTensor has cut"),
        "cp": (plan.cp > 1, "attention over shared sequences runs on plain tensors, not on DTensors"),
        "pp": (plan.pp > 1, "stages pass on plain tensors, and each has some of the modules only"),
        "ep": (plan.ep > 1, "tokens are sent to experts as plain tensors"),
        "sequence_parallel": (plan.sequence_parallel, "DTensor decides how activations lie"),
        "rules": (bool(plan.rules), "a layer is cut by rules or by placements"),
    }
    for name, (there, why) in reasons.items():
        if there:
            yield Problem(
                given=f"placements with {name} {getattr(plan, name) if name != 'rules' else len(plan.rules)}",
                rule=why,
                consequence="the model could not be laid out both ways",
                nearest=f"no {name}, or plan.rules in place of placements" if name != "rules" else "one of the two",
            )
    for each in plan.placements:
        moves = bool(each.inputs) or each.outputs is not None
        if bool(each.parameter) == moves or bool(each.parameter) != bool(each.dims):
            yield Problem(
                given=f"a placement in {each.module or 'the model'!r} with {_set(each)}",
                rule="a placement has parameter and dims, or inputs and outputs (one of them at least)",
                consequence="it would be unclear what lies how",
                nearest='{"module": …, "parameter": …, "dims": […]}, and another for inputs and outputs',
            )
    if plan.tp == 1:
        yield Problem(
            given="placements with plan.tp=1",
            rule="they spread parameters over the ranks of tp",
            consequence="they would act on nothing",
            nearest="plan.tp=2, or no placements",
        )


def _set(placement: ParameterPlacement) -> str:
    names = [name for name in ("parameter", "dims", "inputs", "outputs") if getattr(placement, name)]
    return ", ".join(names) or "nothing else"


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of ``number`` that is at most ``limit``."""
    return max(n for n in range(1, min(number, limit) + 1) if number % n == 0)
