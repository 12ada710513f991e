"""``unisono train --dry-run``: what it prints and refuses. Its numbers: tests/parallel/test_dry_run.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Desk

SMALL = ("model.dim=16", "model.num_heads=2", "data.seq_len=16")


def traced(desk: Desk, *arguments: str, settings: tuple[str, ...] = (), code: int = 0):
    sets = [f"--set={setting}" for setting in (*SMALL, *settings)]
    outcome = desk.here("train", "--dry-run", *arguments, *sets)
    assert outcome.code == code, outcome.err or outcome.out
    return outcome


def test_each_stage_has_a_row_and_nothing_is_written(desk: Desk) -> None:
    settings = ("plan.pp=2", "plan.dp_shard=2", "plan.micro_batch=1", "run.dir=nowhere")
    shown = traced(desk, "--processes", "4", settings=settings)
    rows = [line.split() for line in shown.out.splitlines() if line[:1].isdigit() and " x cpu" not in line]
    assert [row[:2] for row in rows] == [["0", "0"], ["2", "1"]]
    assert not (desk.folder / "nowhere").exists()


def test_one_process_holds_the_whole_model(desk: Desk) -> None:
    outcome = json.loads(traced(desk, "--json").out)
    (rank,) = outcome["ranks"]
    assert outcome["processes"] == 1
    # AdamW: two moments of each parameter and a step count for each of the parameters' tensors
    assert rank["gradients_bytes"] == rank["parameters_bytes"]
    assert 0 <= rank["optimizer_bytes"] - 2 * rank["parameters_bytes"] < 4 * 100
    assert rank["peak_bytes"] == sum(rank["peak_bytes_by_kind"].values()) > 4 * rank["parameters_bytes"]
    assert rank["peak_bytes_by_kind"]["optimizer"] == rank["optimizer_bytes"]


def test_a_rank_can_be_chosen_and_its_shard_is_smaller(desk: Desk) -> None:
    one = json.loads(traced(desk, "--json").out)["ranks"][0]
    settings = ("plan.dp_shard=16", "plan.global_batch=16")
    (rank,) = json.loads(traced(desk, "--json", "--processes=16", "--rank=15", settings=settings).out)["ranks"]
    assert rank["rank"] == 15
    assert rank["parameters_bytes"] < one["parameters_bytes"] / 8


def test_it_says_that_a_few_of_many_equal_blocks_were_traced(desk: Desk) -> None:
    settings = ("model.num_layers=24", "plan.micro_batch=8", "plan.global_batch=8")
    assert "traced 5 of 24 equal blocks" in traced(desk, settings=settings).out
    assert "equal blocks" not in traced(desk).out


def test_a_strategy_file_says_how_many_ranks(desk: Desk) -> None:
    desk.here("plan", "export", "--processes=6", "--set=plan.global_batch=6")
    assert json.loads(traced(desk, "--plan=plan.json", "--json").out)["processes"] == 6


@pytest.mark.parametrize(
    ("arguments", "settings", "said"),
    [
        (("--rank=2", "--processes=2"), (), "rank 2 of a job of 2"),
        ((), ("plan.sync=dist_async",), "dist_async"),
        (("--processes=3",), ("plan.tp=2",), "the product of the mesh axes"),
    ],
)
def test_what_cannot_be_traced_is_refused(desk: Desk, arguments, settings, said: str) -> None:
    assert said in traced(desk, *arguments, settings=settings, code=2).err


def test_ranks_without_a_dry_run_are_refused(desk: Desk) -> None:
    assert "without --dry-run" in desk.here("train", "--processes=2").err


def own_objective(desk: Desk, course: str) -> None:
    """Write own.py, whose objective reads the sum of the losses."""
    Path(desk.folder / "own.py").write_text(
        f"""
import torch
from unisono.train.config import Components, RunConfig

def objective(outputs, batch):
    losses = outputs[0].float().sum()
    {course}
    return losses, torch.tensor(1.0)

def config():
    return RunConfig(components=Components(objective=objective))
"""
    )


def test_code_that_reads_values_makes_a_real_step(desk: Desk) -> None:
    own_objective(desk, "losses = losses if losses.item() > 0 else -losses")
    small = ("model.num_layers=1", "plan.precision=fp32", "plan.global_batch=2")
    outcome = traced(desk, "own.py", "--trust-python", settings=small)
    assert "a real step on cpu, as aten._local_scalar_dense.default needs values" in outcome.out
    assert "of lower confidence than a trace" in outcome.out
    (rank,) = json.loads(traced(desk, "own.py", "--trust-python", "--json", settings=small).out)["ranks"]
    assert (rank["confidence"], rank["needs_values"]) == ("measured", "aten._local_scalar_dense.default")
    # the objective is as large with the same course, and without a question
    own_objective(desk, "losses = -losses")
    (same,) = json.loads(traced(desk, "own.py", "--trust-python", "--json", settings=small).out)["ranks"]
    assert (same["confidence"], same["needs_values"]) == ("exact", None)
    assert rank["peak_bytes"] == pytest.approx(same["peak_bytes"], rel=1e-3)
    assert rank["flops"] == same["flops"]


def test_a_real_step_that_does_not_fit_is_refused(desk: Desk) -> None:
    own_objective(desk, "losses = losses if losses.item() > 0 else -losses")
    settings = ("model.dim=65536", "model.num_layers=16")  # 13 TB
    shown = traced(desk, "own.py", "--trust-python", settings=settings, code=2)
    assert "parameters, gradients and optimizer state take" in shown.err
    assert "must not depend on the value of a tensor" in shown.err


def test_a_real_step_that_fails_says_why(desk: Desk) -> None:
    own_objective(desk, "assert losses.item() is None, 'own mistake'")
    shown = traced(desk, "own.py", "--trust-python", code=2)
    assert "whose step with values fails: AssertionError: own mistake" in shown.err
