"""Which ways of keeping ranks in step fit a plan. A setting that would act on nothing is an error, as everywhere."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.errors import Problem
from unisono.plan.options import PlanOptions
from unisono.plan.plan import Plan

# what each kind reads beside its own name
_OWN = {
    "dist_async": ("staleness", "damping"),
    "dist_local": ("local_steps", "outer_lr", "outer_momentum", "fragments", "overlap_steps"),
}


def sync_problems(plan: Plan, world: int) -> Iterator[Problem]:
    """What is wrong with ``plan.sync`` and its settings on ``world`` ranks."""
    if plan.sync == "local" and world > 1:
        yield Problem(
            given=f"sync 'local' on {world} ranks",
            rule="the local store sums inside one process only",
            consequence="ranks would train different models",
            nearest="plan.sync='dist_sync' (or leave it at 'auto')",
        )
    yield from _inert(plan)
    if plan.sync in _OWN:
        yield from _alone(plan)
    if plan.compression != "none":
        yield from _compression(plan)
        yield from _codec_of_kind(plan)
    if plan.sync == "dist_local":
        yield from _rounds(plan)


def _inert(plan: Plan) -> Iterator[Problem]:
    unset = PlanOptions()
    for kind, names in _OWN.items():
        for name in names:
            value = getattr(plan, name)
            if plan.sync != kind and value != getattr(unset, name):
                yield Problem(
                    given=f"{name} {value} with sync {plan.sync!r}",
                    rule=f"{name} is read by {kind}",
                    consequence="it would change nothing",
                    nearest=f"leave it out, or plan.sync={kind!r}",
                )


def _alone(plan: Plan) -> Iterator[Problem]:
    """Ranks that are not in step with each other cannot share a model, a sequence or a state."""
    others = [name for name in ("pp", "dp_shard", "cp", "tp") if getattr(plan, name) > 1]
    if others:
        yield Problem(
            given=f"sync {plan.sync!r} with {', '.join(f'{name} {getattr(plan, name)}' for name in others)}",
            rule="ranks that go on without each other hold the whole model: dp_replicate is the only axis above 1",
            consequence="some would wait in a collective for ranks that are elsewhere",
            nearest=f"plan.sync='dist_sync', or {', '.join(f'{name}=1' for name in others)}",
        )
    if plan.global_batch % plan.dp_world_size:
        yield Problem(
            given=f"sync {plan.sync!r} with global_batch {plan.global_batch} on {plan.dp_world_size} ranks",
            rule="each rank's gradient counts alike, so all have equally many samples",
            consequence="samples of smaller shares would weigh more",
            nearest=f"plan.global_batch={max(1, plan.global_batch // plan.dp_world_size) * plan.dp_world_size}",
        )
    if plan.sync == "dist_local" and plan.uses_loss_scale:
        yield Problem(
            given="sync 'dist_local' with fp16",
            rule="a loss scale is agreed in every step, and these ranks agree once a round",
            consequence="ranks would scale, and skip steps, differently",
            nearest="plan.precision='bf16', or plan.sync='dist_sync'",
        )


def _compression(plan: Plan) -> Iterator[Problem]:
    why = ""
    if plan.uses_fsdp:
        why = "FSDP2 reduces the gradients of sharded states itself"
    elif plan.placements:
        why = "DTensor reduces the gradients of placed parameters itself"
    elif plan.dp_replicate == 1:
        why = "no gradient is sent from rank to rank"
    if plan.uses_loss_scale:
        yield Problem(
            given=f"compression {plan.compression!r} with fp16",
            rule="what a codec holds back is in units of the gradients, which a loss scale changes from step to step",
            consequence="what was held back would come back too large or too small",
            nearest="plan.precision='bf16', or plan.compression='none'",
        )
    if why:
        yield Problem(
            given=f"compression {plan.compression!r} with dp_replicate {plan.dp_replicate}, dp_shard {plan.dp_shard}",
            rule=f"compression acts on what the store sends, and here {why}",
            consequence="it would act on nothing",
            nearest="plan.compression='none', or dp_replicate in place of dp_shard",
        )


def _codec_of_kind(plan: Plan) -> Iterator[Problem]:
    name = plan.compression.partition(":")[0]
    if plan.sync in _OWN and name == "powersgd":
        yield Problem(
            given=f"compression {plan.compression!r} with sync {plan.sync!r}",
            rule="its factors are of single gradients, summed over all ranks at once",
            consequence="there would be nothing to sum them with",
            nearest="plan.compression='int8' or 'topk:0.01', or plan.sync='dist_sync'",
        )
    if plan.sync == "dist_async" and name == "auto":
        yield Problem(
            given="compression 'auto' with sync 'dist_async'",
            rule="auto measures an all-reduce among the ranks, and asynchronous ones make none",
            consequence="there is nothing to decide by",
            nearest="plan.compression='int8', or 'none' (`unisono kvstore bench` compares them)",
        )


def _rounds(plan: Plan) -> Iterator[Problem]:
    if plan.local_steps % plan.fragments:
        near = max(each for each in range(1, plan.fragments + 1) if plan.local_steps % each == 0)
        yield Problem(
            given=f"fragments {plan.fragments} with local_steps {plan.local_steps}",
            rule="the fragments of a round are averaged at equal distances: fragments divides local_steps",
            consequence="some would be averaged more often than others",
            nearest=f"plan.fragments={near}, or plan.local_steps={-(-plan.local_steps // plan.fragments) * plan.fragments}",
        )
    elif plan.overlap_steps >= plan.local_steps:
        yield Problem(
            given=f"overlap_steps {plan.overlap_steps} with local_steps {plan.local_steps}",
            rule="an average is applied before the next one of the same parameters starts: overlap_steps < local_steps",
            consequence="two averages of one parameter would be under way",
            nearest=f"plan.overlap_steps={plan.local_steps - 1}",
        )
