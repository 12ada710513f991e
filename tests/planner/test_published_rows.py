"""Rows of published runs as layouts: what is completed, and what is refused."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest

from unisono.planner.model_presets import PRESETS
from unisono.planner.published_rows import RowError, read_layout
from unisono.planner.simulate import PREDICTED, predict_rows

ROWS = Path(__file__).parents[2] / "benchmarks/planner/published_runs.csv"
ROW = {"model": "llama-3-8b", "gpu_type": "H100", "gpus": "16"}


def published() -> Iterator[dict[str, str]]:
    with ROWS.open(newline="") as file:
        yield from csv.DictReader(file)


def test_a_row_needs_little() -> None:
    job = read_layout(ROW)
    assert job.model is PRESETS["llama-3-8b"]
    assert (job.seq_len, job.micro_batch, job.global_batch, job.arithmetic) == (8192, 1, 16, "bf16")
    assert (job.tp, job.pp, job.cp, job.ep, job.dp_shard, job.recompute) == (1, 1, 1, 1, 1, "none")


def test_what_a_row_says_wins_over_the_preset() -> None:
    job = read_layout(ROW | {"layers": "16", "hidden": "4096", "heads": "32", "seq_len": "2048"})
    assert (job.model.layers, job.model.ffn, job.model.kv_heads) == (16, 14336, 8)
    assert (job.seq_len, job.micro_batch) == (2048, 4)


def test_a_model_without_preset_has_the_shape_of_the_row() -> None:
    shape = {"layers": "24", "hidden": "2048", "heads": "16", "seq_len": "2048"}
    plain = read_layout(ROW | shape | {"model": "ours"}).model
    assert (plain.ffn, plain.gated, plain.kv_heads, plain.vocab) == (8192, False, 16, 51200)
    gated = read_layout(ROW | shape | {"model": "ours", "ffn": "5632", "kv_heads": "4", "vocab": "32000"}).model
    assert (gated.ffn, gated.gated, gated.kv_heads, gated.vocab) == (5632, True, 4, 32000)


@pytest.mark.parametrize("notes", ["VP=4; dp derived", "interleaved, VPP 4", "virtual stages: 4"])
def test_virtual_stages_are_in_the_notes(notes: str) -> None:
    assert read_layout(ROW | {"pp": "2", "notes": notes}).virtual_stages == 4
    assert read_layout(ROW | {"notes": notes}).virtual_stages == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "llama2-7b LoRA"}, "only adapters are trained"),
        ({"model": "abacus"}, "model 'abacus' has no preset, and the row lacks layers, hidden or heads"),
        (
            {"model": "abacus", "layers": "2", "hidden": "8", "heads": "2", "ep": "2"},
            "model 'abacus' has experts and no preset",
        ),
        ({"gpu_type": "Abacus"}, "device 'Abacus' has no preset"),
        ({"gpus": ""}, "column gpus is empty"),
        ({"gpus": "16.5"}, "column gpus is no count: '16.5'"),
        ({"gpus": "-8"}, "column gpus is negative: '-8'"),
        ({"gpus": "inf"}, "column gpus is no count: 'inf'"),
        ({"tp": "eight"}, "column tp is no number: 'eight'"),
        ({"tp": "3"}, "tp 3, pp 1, cp 1 do not divide 16 devices"),
        ({"micro_batch": "-1"}, "column micro_batch is negative: '-1'"),
        ({"global_batch": "nan"}, "column global_batch is no number: 'nan'"),
        ({"precision": "int3"}, "precision 'int3' is not known"),
        ({"gpu_type": "A100", "precision": "fp8"}, "a100-80 has no fp8"),
        ({"layers": "2", "hidden": "8", "heads": "3", "model": "ours"}, "heads 3 do not divide hidden 8"),
    ],
)
def test_what_is_missing_or_wrong_is_said(changes: dict[str, str], reason: str) -> None:
    with pytest.raises(RowError) as raised:
        read_layout(ROW | changes)
    assert str(raised.value) == reason
    (answer,) = predict_rows([ROW | changes])
    assert answer["error"] == reason
    assert all(answer[name] == "" for name in PREDICTED if name != "error")


def test_at_most_one_published_row_of_ten_has_no_prediction() -> None:
    rows = list(published())
    found = predict_rows(rows)
    assert [{name: row[name] for name in rows[0]} for row in found] == rows
    empty = [row for row in found if row["error"]]
    assert len(empty) <= len(rows) / 10
    assert all(float(row["pred_step_time_s"]) > 0 for row in found if not row["error"])
