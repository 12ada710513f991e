"""The distribution of tokens over experts in whole runs: biases and balance losses under every axis, and capacity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from pool import Pool

from unisono.dist import JobSpec, World
from unisono.models.gpt import GPT

AXES: dict[str, dict[str, Any]] = {
    "dp_replicate": {"micro_batch": 2},
    "dp_shard": {"dp_shard": 2, "micro_batch": 2},
    "ep": {"dp_shard": 2, "ep": 2, "micro_batch": 2},
    "tp": {"tp": 2},
    "sequence_parallel": {"tp": 2, "sequence_parallel": True},
    "cp": {"cp": 2},
    "pp": {"pp": 2, "micro_batch": 2},
    "recompute": {"cp": 2, "recompute": "full"},
}
TWO_CUTS = {"cp": 2, "tp": 2, "sequence_parallel": True}


def model(dtype: str, changes: dict[str, Any]) -> GPT:
    made = tiny.model(num_heads=4, num_kv_heads=2, num_experts=4, num_experts_per_token=2, ffn_dim=16, **changes)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "ffn." in name:
                parameter.mul_(20 if "router" in name else 5)  # far from ties, uneven, and seen in the loss
    return made.to(getattr(torch, dtype))


def runs(world: World, folder: str, cases: dict[str, tuple[dict, dict]], dtype: str, steps: int) -> dict[str, Any]:
    """Of each case (plan, sizes of the model) losses, norms, the biases that are here, and this rank's state."""
    found = {}
    for name, (plan, sizes) in cases.items():
        settings: dict[str, Any] = {"micro_batch": 4, "steps": steps, **plan}  # of 8 samples: accumulation in all
        network = model(dtype, sizes)
        with tiny.trainer(f"{folder}/{name}", world=world, network=network, **settings) as run:
            taken = [(step.loss, float(step.stats[1])) for step in run]
            buffers = run.state.model.named_buffers()
            found[name] = {
                "losses": [loss for loss, _ in taken],
                "norms": [norm for _, norm in taken],
                "biases": {key: buffer.tolist() for key, buffer in buffers if key.endswith("router.bias")},
                "digest": tiny.digest(run),
            }
    return found


def alone(folder: Path, cases: dict[str, tuple[dict, dict]], dtype: str, steps: int) -> dict[str, Any]:
    return runs(World(JobSpec()), str(folder / "alone"), cases, dtype, steps)


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, {"ep": AXES["ep"]}),
        pytest.param(2, {name: plan for name, plan in AXES.items() if name != "ep"}, marks=pytest.mark.full),
        pytest.param(4, {"two cuts": TWO_CUTS}, marks=pytest.mark.full),
    ],
    ids=["ep", "others", "two cuts"],
)
def test_biases_are_those_of_one_process(pool: Pool, tmp_path: Path, ranks: int, cases: dict[str, dict]) -> None:
    """Equal, not near: they move by counts of tokens. In float64, where no rounding decides between two experts."""
    expected = alone(tmp_path, {"": ({}, {})}, "float64", 20)[""]["biases"]
    assert len(expected) == 2
    assert all(any(bias) for bias in expected.values())
    plans = {name: (plan, {}) for name, plan in cases.items()}
    together = pool.run(runs, str(tmp_path), plans, "float64", 20, ranks=ranks, timeout_s=240)
    for name, plan in cases.items():
        here = [outcome[name]["biases"] for outcome in together]
        assert {path for biases in here for path in biases} == expected.keys(), name
        for biases in here:
            assert biases == {path: expected[path] for path in biases}, name
            assert len(biases) == (1 if "pp" in plan else 2)


@pytest.mark.full
def test_balance_losses_are_those_of_one_process(pool: Pool, tmp_path: Path) -> None:
    """Where ranks see parts of sequences too: the shares are those of whole sequences."""
    one = alone(tmp_path, {name: ({}, {"balance": name}) for name in ("loss", "none")}, "float32", 8)
    assert one["loss"]["norms"] != pytest.approx(one["none"]["norms"], rel=1e-3)  # it acts
    assert one["loss"]["losses"][0] == one["none"]["losses"][0]  # and is not reported
    for ranks, plans in ((2, {name: AXES[name] for name in ("sequence_parallel", "cp")}), (4, {"two cuts": TWO_CUTS})):
        cases = {name: (plan, {"balance": "loss"}) for name, plan in plans.items()}
        for outcome in pool.run(runs, str(tmp_path), cases, "float32", 8, ranks=ranks, timeout_s=240):
            for name in plans:
                assert outcome[name]["losses"] == pytest.approx(one["loss"]["losses"], rel=1e-5), name
                assert outcome[name]["norms"] == pytest.approx(one["loss"]["norms"], rel=1e-4), name


@pytest.mark.full
def test_what_a_capacity_leaves_equal(pool: Pool, tmp_path: Path) -> None:
    """The same plan gives the same bits, and a capacity for all tokens those of none. One that drops tokens depends on the
    micro-batch on a rank: ``ep`` differs from one process, ``tp`` and ``pp`` with its micro-batch do not."""
    tight, ample = {"capacity_factor": 1.0}, {"capacity_factor": 2.0}  # 2 = experts / experts_per_token
    cases = {
        "tight": (AXES["ep"], tight),
        "again": (AXES["ep"], tight),
        "ample": (AXES["ep"], ample),
        "none": (AXES["ep"], {}),
        "sequence_parallel": (AXES["sequence_parallel"], tight),
        "pp": ({"pp": 2, "micro_batch": 4}, tight),
    }
    together = pool.run(runs, str(tmp_path), cases, "float32", 6, timeout_s=240)
    one = alone(tmp_path, {"tight": ({}, tight), "parts": ({"micro_batch": 2}, tight)}, "float32", 6)
    for outcome in together:
        assert outcome["tight"] == outcome["again"]
        assert outcome["ample"] == outcome["none"]
        assert outcome["tight"]["losses"] != pytest.approx(outcome["none"]["losses"], rel=1e-4)  # tokens are dropped
        assert outcome["tight"]["losses"] != pytest.approx(one["tight"]["losses"], rel=1e-4)
        for axis in ("sequence_parallel", "pp"):
            assert outcome[axis]["losses"] == pytest.approx(one["tight"]["losses"], rel=1e-5), axis
            assert outcome[axis]["norms"] == pytest.approx(one["tight"]["norms"], rel=1e-4), axis
        assert outcome["tight"]["losses"] == pytest.approx(one["parts"]["losses"], rel=1e-5)
