"""Both sides of every axis of a plan: the settings of our run, and the hand-written step it is compared with.

Neither imports the other's modules, so that a process of one side costs what that side costs.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.workload import Workload, run_config

if TYPE_CHECKING:
    from benchmarks.parallel.hand.common import Step

    from unisono import Trainer
    from unisono.dist import World

# losses of both sides may differ by as much, relatively: else one of them computes something else
LARGEST_DIFFERENCE = 1e-4
# wide enough for a step to be matrix products, and untied where a part of the model needs a head of its own
SIZE = ("model.dim=512", "model.num_heads=8", "model.num_kv_heads=4", "model.num_layers=4")
UNTIED = ("model.tied=false",)
MICRO_BATCHES = ("plan.micro_batch=2",)
# Small steps: where two experts score almost alike, rounding chooses; at the usual rate a few such tokens soon make another run.
MIXTURE = (
    "model.num_experts=8",
    "model.num_experts_per_token=2",
    "model.balance=none",
    "model.ffn_dim=512",
    "optim.lr=1e-5",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """``what`` the trainer is compared with; ``builder`` of ``benchmarks.parallel.hand.<module>`` makes its step.

    ``cuts``: a rank holds a part of the parameters only.
    """

    what: str
    settings: Sequence[str]
    module: str
    builder: str = "build"
    options: Mapping[str, Any] = field(default_factory=dict)
    cuts: bool = True


AXES = {
    "dp_replicate": Axis(what="DDP", settings=(), module="data", builder="replicated", cuts=False),
    "dp_shard": Axis(what="FSDP2", settings=("plan.dp_shard=2",), module="data", builder="sharded"),
    "tp": Axis(
        what="DTensor's parallel styles",
        settings=("plan.tp=2", *UNTIED),
        module="tensor",
        options={"sequence": False},
    ),
    "tp_sequence": Axis(
        what="DTensor's parallel styles, cut along the sequence between",
        settings=("plan.tp=2", "plan.sequence_parallel=true", *UNTIED),
        module="tensor",
        options={"sequence": True},
    ),
    "pp": Axis(
        what="torch.distributed.pipelining, 1F1B",
        settings=("plan.pp=2", "plan.schedule=1f1b", *MICRO_BATCHES, *UNTIED),
        module="pipeline",
        options={"parts_per_rank": 1},
    ),
    "pp_interleaved": Axis(
        what="torch.distributed.pipelining, interleaved 1F1B",
        settings=("plan.pp=2", "plan.schedule=interleaved", *MICRO_BATCHES, *UNTIED),
        module="pipeline",
        options={"parts_per_rank": 2},
    ),
    "cp": Axis(what="gathered keys by functional collectives, FSDP2", settings=("plan.cp=2",), module="context"),
    "ep": Axis(
        what="all_to_all_single_autograd, FSDP2", settings=("plan.dp_shard=2", "plan.ep=2", *MIXTURE), module="expert"
    ),
}


def by_hand(axis: Axis, workload: Workload) -> Step:
    """The hand-written step; torch.distributed is initialised."""
    module = importlib.import_module(f"benchmarks.parallel.hand.{axis.module}")
    return getattr(module, axis.builder)(workload, **axis.options)


@contextmanager
def by_trainer(
    settings: Sequence[str], folder: Path, world: World, steps: int, *, precision: str = "fp32"
) -> Iterator[tuple[Trainer, Iterator[Any]]]:
    """The trainer that ``unisono train`` would build, without checkpoints and evaluations, and its steps."""
    from unisono.train.build import build_data, build_trainer
    from unisono.train.setup import open_events, resolve_plan

    config = run_config(
        [
            *settings,
            "plan.device=cpu",
            f"plan.precision={precision}",
            f"train.steps={steps}",
            f"run.dir={folder}",
            "checkpoint.every_steps=0",
            "train.eval_every_steps=0",
        ]
    )
    with ExitStack() as stack:
        events = stack.enter_context(open_events(folder, world))
        plan = resolve_plan(config.plan, world.job)[1]
        trainer = build_trainer(config, build_data(config), plan, world=world, events=events, provenance={})
        run = stack.enter_context(trainer)
        yield run, stack.enter_context(closing(iter(run)))  # pyright: ignore[reportArgumentType]
