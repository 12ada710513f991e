"""Silent corruption: single bits flip in a live run, and each is found, or the run ends with equal bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from flips import Flip, Injector, flip_bit, seeded
from pool import Pool, WorkersFailed
from torch import nn

from unisono import PlanOptions, Trainer, TrainOptions
from unisono.checkpoint import list_checkpoints
from unisono.diagnose import diagnose, read_run
from unisono.dist import World
from unisono.errors import CorruptionError
from unisono.train.objectives import next_token

STEP = 2  # the verified step
VERIFIED = replace(tiny.QUIET, verify_every_steps=STEP)
RUN: dict[str, Any] = {"steps": 3, "micro_batch": 4, "sizes": {"num_layers": 1}}


def injected(run_dir: str | Path, flip: Flip, world: World | None = None, **changes: Any) -> dict[str, Any]:
    """A run in which a bit flips: what was found, what was flipped, and the state at the end."""
    options = {**RUN, "observe": VERIFIED, "every_steps": STEP, **changes}
    try:
        with tiny.trainer(run_dir, world=world, **options) as run:
            injector = Injector(run, flip)
            for _ in run:
                injector.at_rest()
            outcome = {"digest": tiny.digest(run)}
    except CorruptionError as error:
        outcome = {"error": str(error), "ranks": list(error.ranks)}
    return outcome | {"target": injector.target}


def several(world: World, root: str, flips: list[Flip], changes: dict[str, Any]) -> list[dict[str, Any]]:
    return [injected(f"{root}/{number}", flip, world, **changes) for number, flip in enumerate(flips)]


def clean(world: World, run_dir: str, changes: dict[str, Any]) -> str:
    return tiny.complete(run_dir, world=world, **{**RUN, **changes})["digest"]


def committed(run_dir: Path) -> list[int]:
    return [entry.step for entry in list_checkpoints(run_dir / "checkpoints") if entry.state == "committed"]


def corruptions(run_dir: Path) -> list[dict[str, Any]]:
    return [event for event in tiny.events(run_dir) if event["kind"] == "corruption"]


def check_all(pool: Pool, root: Path, flips: list[Flip], ranks: int) -> Counter[str]:
    """Every flip was found, on its rank, and its state was not saved; or the run has the bits of one without it."""
    expected = pool.run(clean, str(root / "clean"), {}, ranks=ranks)[0]
    every = pool.run(several, str(root / "flips"), flips, {}, ranks=ranks, timeout_s=1500)
    counts: Counter[str] = Counter()
    for number, flip in enumerate(flips):
        folder, outcomes = root / "flips" / str(number), [each[number] for each in every]
        assert outcomes[flip.rank]["target"], flip  # it did flip
        if "error" not in outcomes[0]:
            assert [outcome["digest"] for outcome in outcomes] == [expected] * ranks, flip
            counts[f"{flip.kind}: masked"] += 1
            continue
        assert [outcome["ranks"] for outcome in outcomes] == [[flip.rank]] * ranks, (flip, outcomes)
        assert not any(step >= flip.step for step in committed(folder)), flip
        (event,) = corruptions(folder)
        assert (event["step"] - flip.step) in (0, -1), event
        assert (event["ranks"], event["certain"]) == ([flip.rank], True)
        if flip.kind in ("weight", "moment"):
            assert (event["source"], event["tensor"]) == ("memory", outcomes[flip.rank]["target"]), flip
        elif flip.when != "update":
            assert event["tensor"] == outcomes[flip.rank]["target"], flip
        counts[f"{flip.kind}: found"] += 1
    print(f"{ranks} rank(s): {json.dumps(counts)}")
    return counts


@pytest.mark.parametrize("ranks", [1, 2])
def test_flips_are_found_or_change_nothing(pool: Pool, tmp_path: Path, ranks: int) -> None:
    counts = check_all(pool, tmp_path, list(seeded(20, step=STEP, ranks=ranks, seed=ranks)), ranks)
    assert counts.total() == 20


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("ranks", "count"), [(1, 700), (2, 300)])
def test_a_thousand_flips(pool: Pool, tmp_path: Path, ranks: int, count: int) -> None:
    counts = check_all(pool, tmp_path, list(seeded(count, step=STEP, ranks=ranks, seed=17 * ranks)), ranks)
    assert counts.total() == count
    assert sum(number for name, number in counts.items() if name.endswith("found")) >= 0.9 * count


# --- what is verified changes nothing ----------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {"micro_batch": 2}),
    "dp": (2, {"micro_batch": 2}),
    "dp_shard": (2, {"dp_shard": 2, "micro_batch": 2}),
    "zero1": (2, {"dp_shard": 2, "zero": 1, "micro_batch": 2}),
    "hybrid": (4, {"dp_shard": 2}),
    "tp": (2, {"tp": 2}),
    "tp-sequence": (2, {"tp": 2, "sequence_parallel": True}),
    "cp": (2, {"cp": 2}),
    "pp": (2, {"pp": 2, "micro_batch": 2}),
    "zbv": (2, {"pp": 2, "schedule": "zbv", "micro_batch": 2}),
    "recompute": (2, {"dp_shard": 2, "recompute": "full"}),
    "fp16": (1, {"precision": "fp16", "loss_scale": 16.0}),
}
QUICK = {"alone", "dp", "dp_shard", "zero1", "tp", "pp"}
SIZES = {"num_layers": 4, "num_heads": 4, "num_kv_heads": 2}


def train(world: World, run_dir: str, every: int, changes: dict[str, Any]) -> dict[str, Any]:
    given = {"ema_decay": 0.9, "dropout": 0.1, "sizes": SIZES, **changes}
    observe = replace(tiny.QUIET, verify_every_steps=every, taps=("blocks.0@2",))
    return tiny.complete(
        run_dir, world=world, steps=5, observe=observe, every_steps=3, gradient_stats_every_steps=2, **given
    )


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in LAYOUTS]
)
def test_a_verified_run_has_the_bits_and_events_of_another(pool: Pool, tmp_path: Path, layout: str) -> None:
    ranks, changes = LAYOUTS[layout]
    verified = pool.run(train, str(tmp_path / "verified"), 2, changes, ranks=ranks)
    plain = pool.run(train, str(tmp_path / "plain"), 0, changes, ranks=ranks)
    assert verified == plain
    for rank in range(ranks):
        kinds = [
            Counter(event["kind"] for event in tiny.events(tmp_path / name, rank)) for name in ("verified", "plain")
        ]
        for counts in kinds:  # they come with the time
            counts.pop("system", None)
        assert kinds[0] == kinds[1]


@pytest.mark.parametrize("layout", ["dp_shard", "tp", "pp"])
def test_the_rank_that_computes_wrongly_where_ranks_share_a_model(pool: Pool, tmp_path: Path, layout: str) -> None:
    flips = [Flip(kind="activation", when="forward", step=2, rank=1, pick=pick, bit=21) for pick in (5, 12, 18)]
    changes = {"micro_batch": 2, "sizes": SIZES, **LAYOUTS[layout][1]}
    every = pool.run(several, str(tmp_path), flips, changes, ranks=2)
    targets = [outcome["target"] for outcome in every[1]]
    assert any(targets)  # a stage has no calls of the layers of others
    for number, target in enumerate(targets):
        for outcomes in every if target else []:
            assert outcomes[number]["ranks"] == [1], outcomes[number]
            assert f"{target!r} of rank 1" in outcomes[number]["error"]


def train_own_optimizer(world: World, run_dir: str, every: int) -> dict[str, Any]:
    """The optimizer creates its state in the first step, which is verified, and the schedule has state."""
    observe = replace(tiny.QUIET, verify_every_steps=every)
    network = tiny.model()
    with Trainer(
        network,
        tiny.RaggedTokens(),
        PlanOptions(device="cpu", global_batch=8, precision="fp32"),
        objective=next_token,
        optimizer=partial(torch.optim.NAdam, lr=1e-2),
        schedule=lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 1e-3, 1e-2, step_size_up=2),
        options=TrainOptions(steps=4, eval_every_steps=0),
        observe=observe,
        run_dir=run_dir,
        world=world,
    ) as run:
        rates = [(step.loss, step.lr) for step in run]
        return {"digest": tiny.digest(run), "rates": rates}


def test_optimizers_and_schedules_with_state_of_their_own(pool: Pool, tmp_path: Path) -> None:
    outcomes = [pool.run(train_own_optimizer, str(tmp_path / str(every)), every, ranks=2) for every in (1, 0)]
    assert outcomes[0] == outcomes[1]


class Noisy(nn.Module):
    """Adds noise of a generator that nobody knows of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.noise = nn.Linear(4, 1), np.random.default_rng(0)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs)[:, 0] + torch.from_numpy(self.noise.random(len(inputs), dtype=np.float32))


class Points:
    fingerprint = "points-1"

    def __len__(self) -> int:
        return 64

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        rows = np.random.default_rng(0).random((64, 4), dtype=np.float32)[indices]
        return {"inputs": rows, "targets": rows.sum(1)}


def train_noisy(world: World, run_dir: str) -> int:
    observe = replace(tiny.QUIET, verify_every_steps=2)
    torch.manual_seed(0)
    return tiny.complete(
        run_dir, world=world, steps=6, network=Noisy(), data=Points(), objective=nn.MSELoss(), observe=observe
    )["step"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_is_not_deterministic_is_no_corruption(pool: Pool, tmp_path: Path, ranks: int) -> None:
    assert pool.run(train_noisy, str(tmp_path), ranks=ranks) == [6] * ranks
    (notice,) = [event for event in tiny.events(tmp_path) if event.get("code") == "not_deterministic"]
    assert notice["step"] == 2
    assert not corruptions(tmp_path)
    assert committed(tmp_path) == [6]


# --- copies on several ranks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "named", "certain"), [(2, [0, 1], False), (3, [1], True)])
def test_copies_that_are_not_equal(pool: Pool, tmp_path: Path, ranks: int, named: list[int], certain: bool) -> None:
    flip = Flip(kind="moment", when="rest", step=2, rank=1, pick=12345, bit=30)  # no step that is verified
    changes = {"observe": replace(tiny.QUIET, verify_every_steps=4), "every_steps": 0, "steps": 6, "micro_batch": 1}
    every = pool.run(several, str(tmp_path), [flip], changes, ranks=ranks)
    assert [outcome["ranks"] for (outcome,) in every] == [named] * ranks
    (event,) = corruptions(tmp_path / "0")
    assert every[1][0]["target"] in event["tensors"]
    assert len(event["tensors"]) == 2  # the weight has moved, and nothing else
    assert (event["source"], event["step"], event["ranks"], event["certain"]) == ("replica", 4, named, certain)
    assert len(event["hosts"]) == len(named)
    assert committed(tmp_path / "0") == []


def save_between(world: World, run_dir: str, kind: str) -> str:
    """Saves after a step that is not verified; ``kind`` says what happens before."""
    observe = replace(tiny.QUIET, verify_every_steps=4)
    try:
        with tiny.trainer(run_dir, world=world, steps=6, observe=observe) as run:
            for step in run:
                weight = run.model.embedding.weight
                if step.index == 2 and kind == "flip" and world.rank == 1:
                    flip_bit(weight, 7, 12)
                if step.index == 4 and kind == "flip after it was verified" and world.rank == 1:
                    flip_bit(weight, 7, 12)
                if kind == "program":  # an operation of the user's, before each verified step as well
                    with torch.no_grad():
                        weight.clamp_(-0.05, 0.05)
                if step.index in (2, 4):
                    run.save(wait=True)
    except CorruptionError as error:
        return str(error)
    return ""


def test_a_state_is_compared_before_it_is_saved(pool: Pool, tmp_path: Path) -> None:
    for kind, saved, source in (
        ("flip", [], "replica"),
        ("flip after it was verified", [2], "memory"),
        ("program", [2, 4, 6], ""),
        ("nothing", [2, 4, 6], ""),
    ):
        root = tmp_path / kind
        errors = pool.run(save_between, str(root), kind, ranks=2)
        assert committed(root) == saved, kind
        assert [event["source"] for event in corruptions(root)] == ([source] if source else []), kind
        assert errors[0] == errors[1]
        assert ("model/embedding.weight" in errors[0]) == bool(source)


def test_a_run_that_goes_on_after_a_corruption_has_the_bits_of_one_without(pool: Pool, tmp_path: Path) -> None:
    flip = Flip(kind="activation", when="forward", step=4, rank=0, pick=5, bit=29)
    changes = {"steps": 5, "observe": VERIFIED}
    ((outcome,),) = pool.run(several, str(tmp_path), [flip], changes, ranks=1)
    assert "computations of the step" in outcome["error"]
    assert committed(tmp_path / "0") == [2]
    whole = pool.run(clean, str(tmp_path / "clean"), {"steps": 5}, ranks=1)
    assert pool.run(clean, str(tmp_path / "0"), {"steps": 5}, ranks=1) == whole
    assert [event["step"] for event in tiny.events(tmp_path / "0") if event["kind"] == "resumed"] == [2]


@pytest.mark.parametrize("changes", [{"sync": "dist_local"}, {"compression": "int8"}])
def test_steps_that_cannot_be_computed_again_are_refused(pool: Pool, tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(WorkersFailed, match="a step is computed again from a copy of its state"):
        pool.run(clean, str(tmp_path), {**changes, "observe": VERIFIED}, ranks=2)


# --- launched ----------------------------------------------------------------------------------------------------------


def launched(run_dir: Path, **changes: Any) -> tuple[int, str, list[dict[str, Any]]]:
    """Exit code, what it said, and the records of the attempts of a launch in which rank 1 computes wrongly in step 4."""
    flip = {"kind": "activation", "when": "forward", "step": 4, "rank": 1, "pick": 5, "bit": 29}
    settings = {"steps": 6, "every_steps": 2, "verify_every_steps": 2, "flip": flip, **changes}
    driver = Path(tiny.__file__).with_name("launch_tiny.py")
    done = subprocess.run(
        [sys.executable, str(driver), str(run_dir), "2", json.dumps(settings)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr, json.loads((run_dir / "launch.json").read_text())["attempts"]


def test_a_launch_continues_from_what_was_verified_and_names_the_rank(tmp_path: Path) -> None:
    code, said, attempts = launched(tmp_path / "run")
    assert code == 0, said
    cause, decision = attempts[0]["cause"], attempts[0]["decision"]
    assert (cause["kind"], cause["words"], cause["ranks"]) == ("corruption", "silent corruption", [1])
    assert "'output of " in cause["sentence"]
    assert decision["restart"] is True
    assert "compared before it was committed" in decision["why"]
    assert [event["step"] for event in tiny.events(tmp_path / "run") if event["kind"] == "resumed"] == [2]
    assert committed(tmp_path / "run")[-1] == 6
    (finding,) = [each for each in diagnose(read_run(tmp_path / "run")) if each.id == "SDC01"]
    assert finding.ranks == (1,)


@pytest.mark.full
def test_a_fault_that_comes_back_ends_the_launch(tmp_path: Path) -> None:
    code, said, attempts = launched(tmp_path / "run", flips_again=True)
    assert code == 1, said
    assert [attempt["decision"]["restart"] for attempt in attempts] == [True, False]
    assert "CorruptionError in step 4" in said
    assert "2 times in a row" in said
    assert committed(tmp_path / "run") == [2]
