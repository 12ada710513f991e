"""Training with rounded numbers: the same on any number of processes, exact resume, and what cannot be trained."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from plans import like_one_process, on_ranks
from pool import Pool

from unisono.dist import JobSpec, World

sys.path.append(str(Path(__file__).parents[2]))  # benchmarks are no part of what is installed

from benchmarks.smaller import rounded

OF_MODEL = ("aware", "num_layers", "num_experts", "balance")


def split(changes: dict[str, Any]) -> dict[str, Any]:
    """Settings of the model under ``sizes``, beside those of the plan."""
    sizes = {name: value for name, value in changes.items() if name in OF_MODEL}
    return {"sizes": sizes, **{name: value for name, value in changes.items() if name not in OF_MODEL}}


@pytest.mark.parametrize(
    "changes",
    [
        {"aware": "int4"},
        {"aware": "int4", "dp_shard": 2},
        {"aware": "int8", "pp": 2, "micro_batch": 2},
        pytest.param({"aware": "int8"}, marks=pytest.mark.full),
        pytest.param({"aware": "int4", "dp_shard": 2, "recompute": "full"}, marks=pytest.mark.full),
        pytest.param({"aware": "int4", "micro_batch": 2}, marks=pytest.mark.full),
        pytest.param({"aware": "int8", "dp_shard": 2, "num_experts": 2, "balance": "none"}, marks=pytest.mark.full),
        pytest.param(
            {"aware": "int8", "pp": 2, "micro_batch": 2, "schedule": "zbv", "num_layers": 4}, marks=pytest.mark.full
        ),
    ],
    ids=str,
)
def test_two_processes_train_like_one(pool: Pool, tmp_path: Path, changes: dict[str, Any]) -> None:
    like_one_process(pool, tmp_path, 2, **split(changes))


def test_with_rounded_activations_too(pool: Pool, tmp_path: Path) -> None:
    """The largest number of each token is between two steps of its grid: sums in another order may move it by one of 255."""
    sizes = {"aware": "int8_dynamic"}
    alone = on_ranks(World(JobSpec()), str(tmp_path / "alone"), {"sizes": sizes})
    together = pool.run(on_ranks, str(tmp_path / "run"), {"sizes": sizes, "dp_shard": 2}, ranks=2)
    assert together[0]["losses"] == pytest.approx(alone["losses"], rel=1e-3)
    plain = on_ranks(World(JobSpec()), str(tmp_path / "plain"), {})
    assert plain["losses"] != pytest.approx(alone["losses"], rel=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_learns_and_resumes_bitwise(tmp_path: Path, precision: str) -> None:
    changes = {"sizes": {"aware": "int4"}, "precision": precision}
    whole = tiny.complete(tmp_path / "whole", **changes)
    first = tiny.complete(tmp_path / "parts", stop_after=3, **changes)
    second = tiny.complete(tmp_path / "parts", **changes)
    assert first["losses"] + second["losses"] == whole["losses"]
    assert second["digest"] == whole["digest"]
    assert whole["losses"][-1] < whole["losses"][0]


def test_names_and_initial_values_are_those_of_the_plain_model() -> None:
    plain, aware = tiny.model().state_dict(), tiny.model(aware="int4").state_dict()
    assert list(plain) == list(aware)
    assert all(torch.equal(plain[name], aware[name]) for name in plain)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_int4_after_training_with_rounding_is_better_than_without(seed: int) -> None:
    """The same trained model, the same further steps in floating point or with rounded numbers, then int4; held-out loss."""
    losses = rounded(seed, 500, 100)
    assert losses["aware, int4"] == losses["aware"]
    assert losses["float"] < losses["aware, int4"] < losses["float, int4"]
