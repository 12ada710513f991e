"""What a run can do beside training, under plans that cut stages, sequences and experts: all of it is as on one process."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from pool import Pool

from unisono.data.order.permutation import Permutation
from unisono.dist import JobSpec, World
from unisono.errors import PlanError
from unisono.train.metrics import METRICS

STEPS, BAD = 4, 3
SIZES = {"num_layers": 4, "num_heads": 4, "num_kv_heads": 2}
MOE = {**SIZES, "num_experts": 4, "num_experts_per_token": 2, "ffn_dim": 16}
FEATURES = {
    "micro_batch": 2,
    "ema_decay": 0.9,
    "gradient_stats_every_steps": 2,
    "clip_norm": 0.5,
    "max_skips": 9,
    "spike_sigmas": 4.0,
}
PLANS = {
    "pp": (2, {"pp": 2}),
    "zbv": (2, {"pp": 2, "schedule": "zbv"}),
    "pp-dp_shard": (4, {"pp": 2, "dp_shard": 2}),
    "pp-tp": (4, {"pp": 2, "tp": 2}),
    "cp": (2, {"cp": 2}),
    "pp-cp": (4, {"pp": 2, "cp": 2}),
    "ep": (2, {"dp_shard": 2, "ep": 2}),
    "pp-ep": (4, {"pp": 2, "dp_shard": 2, "ep": 2}),
    "tp": (4, {"tp": 4}),  # two ranks have the same head of keys
    "tp-ep": (4, {"dp_shard": 2, "tp": 2, "ep": 2}),
    "hybrid-ep": (4, {"dp_shard": 2, "ep": 2, "fsdp.shard_threshold_numel": 300}),
}


def poisoned() -> tiny.RaggedTokens:
    """One sample of step 3 has no usable loss."""
    place = Permutation(tiny.SAMPLES, seed=0)(np.arange(8 * BAD - 8, 8 * BAD))[5]
    return tiny.RaggedTokens(poison=int(place))


def everything(world: World, run_dir: str, sizes: dict, changes: dict) -> dict:
    found: dict = {"losses": [], "norms": [], "skipped": [], "evaluated": [], "bits": []}
    given = {**FEATURES, **changes}
    with tiny.trainer(
        run_dir, world=world, steps=STEPS, sizes=sizes, data=poisoned(), eval_data=tiny.RaggedTokens(7),
        metrics={name: METRICS[name] for name in ("accuracy", "top5", "bits_per_byte", "perplexity")}, **given,
    ) as run:  # fmt: skip
        for step in run:
            found["losses"].append(step.loss)
            found["norms"].append(float(step.stats[1]))
            found["skipped"].append(step.skipped)
            found["evaluated"].append(run.evaluate())
            kept = [p.detach() for p in run.state.sharded.parameters.values()]
            average = run.state.average
            assert average is not None
            found["bits"].append(torch.cat([t.flatten() for t in (*kept, *average.state().values())]).tolist())
    if world.rank == 0:
        found["layers"] = [e["layers"] for e in tiny.events(run_dir) if e["kind"] == "gradient_stats"]
    return found


@cache
def alone(folder: Path, experts: bool, kind: str) -> dict:
    lr = 0.5 if kind == "lars" else 1e-2
    return everything(World(JobSpec()), str(folder), MOE if experts else SIZES, {"kind": kind, "lr": lr})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("features")


SHORT = {("pp", "lamb"), ("cp", "adamw")}


@pytest.mark.parametrize(
    ("plan", "kind"),
    [
        pytest.param(plan, kind, marks=[] if (plan, kind) in SHORT else pytest.mark.full)
        for plan in PLANS
        for kind in ("adamw", "lamb", "lars")
    ],
)
def test_all_of_it_is_as_on_one_process(pool: Pool, folder: Path, tmp_path: Path, plan: str, kind: str) -> None:
    ranks, changes = PLANS[plan]
    experts = "ep" in plan.split("-")
    expected = alone(folder / f"{experts}-{kind}", experts, kind)
    assert expected["skipped"] == [step == BAD for step in range(1, STEPS + 1)]
    changes = {"kind": kind, "lr": 0.5 if kind == "lars" else 1e-2, **changes}
    outcomes = pool.run(everything, str(tmp_path), MOE if experts else SIZES, changes, ranks=ranks)
    for outcome in outcomes:
        assert outcome["losses"] == pytest.approx(expected["losses"], rel=1e-5, nan_ok=True)
        assert outcome["norms"] == pytest.approx(expected["norms"], rel=1e-4, nan_ok=True)
        assert outcome["skipped"] == expected["skipped"]
        bits = outcome["bits"]
        assert bits[BAD - 2] == bits[BAD - 1] != bits[BAD], "a step that does not count changes no bit"
        for ours, theirs in zip(outcome["evaluated"], expected["evaluated"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
    (layers, after), (whole, later) = outcomes[0]["layers"], expected["layers"]
    for ours, theirs in ((layers, whole), (after, later)):
        assert list(ours) == list(theirs)
        for name, figures in theirs.items():
            assert ours[name]["nonfinite"] == figures["nonfinite"] == 0, name
            for figure in ("norm", "max"):
                assert math.isclose(ours[name][figure], figures[figure], rel_tol=1e-4, abs_tol=1e-9), (name, figure)


class OneTargetEach(tiny.RaggedTokens):
    """A class for each sequence, as in classification."""

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        batch = super().read(indices)
        return {"tokens": batch["tokens"], "targets": batch["targets"][:, 0]}


class FewTargets(tiny.RaggedTokens):
    """Targets of three places of each sequence, as in masked language models."""

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {name: entry[:, :3] if name != "tokens" else entry for name, entry in super().read(indices).items()}


def told(world: World, run_dir: str) -> list[str]:
    found = []
    for data in (OneTargetEach(), FewTargets()):
        with pytest.raises(PlanError) as caught, tiny.trainer(run_dir, world=world, cp=2, data=data) as run:
            next(iter(run))
        found.append(str(caught.value))
    with tiny.trainer(f"{run_dir}-eval", world=world, steps=1, cp=2, eval_data=FewTargets()) as run:
        list(run)
        with pytest.raises(PlanError) as caught:
            run.evaluate()
        found.append(str(caught.value))
    return found


def test_targets_of_whole_sequences_are_refused_where_ranks_share_them(pool: Pool, tmp_path: Path) -> None:
    for one, few, evaluated in pool.run(told, str(tmp_path / "run"), ranks=2):
        assert "plan.cp=2 with targets [8], for sequences of 12 tokens" in one
        assert "counted on every rank" in one
        assert "plan.cp=2 with targets [8, 3], for sequences of 12 tokens" in few
        assert "with targets [8, 3]" in evaluated
