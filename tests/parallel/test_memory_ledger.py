"""What ranks hold is what follows from the plan, and a difference is an error that names it."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from pool import Pool

from unisono.dist import JobSpec, World
from unisono.errors import PlanError
from unisono.optim import OptimOptions, state_names
from unisono.parallel import fsdp
from unisono.parallel.memory_ledger import MemoryLedger, build_ledger, check_ledger, coordinates_of
from unisono.parallel.sharding import GlobalParameterSpec, TensorShard
from unisono.plan.options import PlanOptions
from unisono.plan.plan import Plan
from unisono.plan.resolve import derive_plan

WIDE = {"num_heads": 4, "num_kv_heads": 2, "vocab_size": 49}
# the dimension of each matrix of the reference GPT that tp cuts
DIMS = {"embedding": 0, "q": 0, "k": 0, "v": 0, "gate": 0, "up": 0, "out": 1, "down": 1}


def by_hand(whole: GlobalParameterSpec, plan: Plan, rank: int) -> dict[str, TensorShard]:
    """What tp leaves a rank, whose first ranks have one row more where it does not come out even."""
    found: dict[str, TensorShard] = {}
    for name, entry in whole.parameters.items():
        dim, index = DIMS.get(name.split(".")[-2]), coordinates_of(plan, rank)["tp"]
        if dim is not None and plan.mesh.tp > 1:
            size = entry.shape[dim]
            length = size // plan.mesh.tp + (index < size % plan.mesh.tp)
            start = index * (size // plan.mesh.tp) + min(index, size % plan.mesh.tp)
            found[name] = TensorShard.whole(entry.shape).select(dim, [(start, length)])
    return found


def expected(plan: Plan, rank: int, kind: str, blocks: dict | None = None) -> MemoryLedger:
    whole = GlobalParameterSpec.from_model(tiny.model(**WIDE))
    blocks = by_hand(whole, plan, rank) if blocks is None else blocks
    return build_ledger(plan, whole, rank, state=state_names(OptimOptions(kind=kind)), shards=blocks)


def compared(world: World, run_dir: str, changes: dict) -> tuple[int, int, str]:
    """(elements held, bytes of state, what is said when the tp rules are left out of the ledger)."""
    with tiny.trainer(run_dir, world=world, steps=1, sizes=WIDE, **changes) as run:
        kind, pieces, state = changes.get("kind", "adamw"), run.state.sharded.parameters, run.state
        found = expected(run.plan, world.rank, kind)
        held = {"parameters": found.parameter_bytes, "gradients": found.gradient_bytes, "optimizer": found.state_bytes}
        assert tiny.events(run_dir, world.rank)[0]["held_bytes"] == held
        check_ledger(found, pieces, state.optimizer)
        list(run)
        check_ledger(found, pieces, state.optimizer)
        try:
            check_ledger(expected(run.plan, world.rank, kind, blocks={}), pieces, state.optimizer)
        except PlanError as error:
            said = str(error)
        else:
            said = ""
        assert sum(p.numel() for p in pieces.values()) == found.numel
        assert sum(p.grad.nbytes for p in pieces.values() if p.grad is not None) in (0, found.parameter_bytes)
        return found.numel, found.state_bytes, said


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (1, {"kind": "sgd"}),
        (2, {"dp_shard": 2, "zero": 1, "kind": "lamb"}),
        pytest.param(3, {"dp_shard": 3, "global_batch": 9, "kind": "lars", "lr": 0.5}, marks=pytest.mark.full),
        (4, {"dp_shard": 2, "tp": 2}),
    ],
)
def test_ranks_hold_what_the_plan_says(pool: Pool, tmp_path: Path, ranks: int, changes: dict) -> None:
    for _, _, said in pool.run(compared, str(tmp_path / "run"), changes, ranks=ranks):
        if changes.get("tp"):
            assert "blocks.0.attention.q.weight is [4, 16] torch.float32, and should be [8, 16] torch.float32" in said
            assert "; and 12 more" in said
        else:
            assert said == ""


def plan(world: int, **options: object) -> Plan:
    return derive_plan(
        PlanOptions(device="cpu", global_batch=8 * world, **options), world_size=world, device="cpu", native_bf16=False
    )


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_all_ranks_together_hold_everything_once(zero: int) -> None:
    chosen = plan(6, dp_shard=3, tp=2, zero=zero)
    parts = [expected(chosen, rank, "adamw") for rank in range(6)]
    whole = GlobalParameterSpec.from_model(tiny.model(**WIDE)).parameters
    for name, entry in whole.items():
        copies = 1 if name.split(".")[-2] in DIMS else 2
        assert sum(part.parameters[name].numel for part in parts) == entry.numel * copies, name
    assert all(part.state_bytes == 2 * part.parameter_bytes + 4 * len(whole) for part in parts)
    assert all((part.gradient_bytes == part.parameter_bytes) == (zero > 1) for part in parts)


def test_experts_are_shared_along_their_own_line() -> None:
    chosen = plan(8, dp_shard=4, ep=2, tp=2)
    assert [coordinates_of(chosen, rank)["ep"] for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    whole = GlobalParameterSpec.from_model(torch.nn.Linear(6, 8, bias=False))
    half = {"weight": TensorShard.whole((8, 6)).select(1, [(3, 3)])}
    assert build_ledger(chosen, whole, 5, state=(), shards=half, stacks={"weight"}).parameters["weight"].shape == (2, 3)
    assert build_ledger(plan(8, dp_shard=8), whole, 5, state=(), stacks={"weight"}).parameters["weight"].shape == (1, 6)
    # where experts do not divide, their next dimension does
    assert build_ledger(plan(3, dp_shard=3), whole, 2, state=(), stacks={"weight"}).parameters["weight"].shape == (8, 2)
    assert build_ledger(plan(3, dp_shard=3), whole, 2, state=()).parameters["weight"].shape == (2, 6)


def test_frozen_parameters_have_no_gradient_and_no_state() -> None:
    model = torch.nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    held = build_ledger(
        plan(1), GlobalParameterSpec.from_model(model), 0, state=("step", "exp_avg", "exp_avg_sq")
    ).parameters
    assert (held["bias"].parameter_bytes, held["bias"].gradient_bytes, held["bias"].state_bytes) == (16, 0, 0)
    assert (held["weight"].gradient_bytes, held["weight"].state_bytes) == (64, 132)


def test_what_differs_is_named(tmp_path: Path) -> None:
    with tiny.trainer(tmp_path / "run", world=World(JobSpec()), steps=1, sizes=WIDE) as run:
        pieces = dict(run.state.sharded.parameters)
        found = expected(run.plan, 0, "sgd")
        with pytest.raises(PlanError) as raised:
            check_ledger(found, pieces, run.state.optimizer)
        numel = sum(p.numel() for p in pieces.values())
        assert str(raised.value) == (
            "the optimizer holds 6276 bytes for embedding.weight, and should hold 3136; "
            "the optimizer holds 132 bytes for blocks.0.attention_norm.weight, and should hold 64; "
            "the optimizer holds 2052 bytes for blocks.0.attention.q.weight, and should hold 1024; and 17 more\n"
            f"  rule: a rank holds what follows from the plan: {numel} elements, {4 * numel} bytes of parameters, "
            f"{4 * numel} of optimizer state\n"
            "  so:   another model than the plan's would be trained, or memory would not be what was planned\n"
            "  try:  parameters that one rule shards once, and an optimizer built from the shards"
        )
        stage = MemoryLedger(parameters={"norm.weight": found.parameters["norm.weight"]})
        with pytest.raises(PlanError, match=r"embedding.weight is held, and of another stage"):
            check_ledger(stage, pieces, run.state.optimizer)


def without_the_last_unit(world: World, run_dir: str) -> str:
    """What a run says whose last block was not cut."""
    cut = fsdp.fully_shard
    kept: list[torch.nn.Module] = []

    def once_less(module: torch.nn.Module, **how: object) -> None:
        kept.append(module)
        if len(kept) != 2:
            cut(module, **how | {"ignored_params": set(kept[1].parameters()) if len(kept) > 2 else set()})

    fsdp.fully_shard = once_less
    try:
        with tiny.trainer(run_dir, world=world, steps=1, sizes=WIDE, dp_shard=2):
            return "nothing"
    except PlanError as error:
        return str(error)
    finally:
        fsdp.fully_shard = cut


def test_a_run_that_holds_something_else_does_not_start(pool: Pool, tmp_path: Path) -> None:
    for said in pool.run(without_the_last_unit, str(tmp_path / "run"), ranks=2):
        assert "blocks.1.attention.q.weight is [16, 16] torch.float32, and should be [8, 16] torch.float32" in said
        assert "; and 6 more" in said
