"""Rows of published runs as layouts: what is completed, and what is refused."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest

from unisono.planner.layout import LayoutError
from unisono.planner.layout_columns import read_layout
from unisono.planner.model_presets import PRESETS
from unisono.planner.simulate import PREDICTED, predict_rows

ROWS = Path(__file__).parents[2] / "benchmarks/planner/published_runs.csv"
ROW = {"model": "llama-3-8b", "gpu_type": "H100", "gpus": "16"}


def published() -> Iterator[dict[str, str]]:
    with ROWS.open(newline="") as file:
        yield from csv.DictReader(file)


def test_a_row_needs_little() -> None:
    job = read_layout(ROW)
    assert job.model == PRESETS["llama-3-8b"]
    assert (job.seq_len, job.micro_batch, job.global_batch, job.precision) == (8192, 1, 16, "bf16")
    assert (job.tp, job.pp, job.cp, job.ep, job.state_ranks, job.recompute) == (1, 1, 1, 1, 16, "none")
    assert (job.zero, job.cut) == (1, "equal")


def test_what_a_row_says_wins_over_the_preset() -> None:
    job = read_layout(ROW | {"layers": "16", "hidden": "4096", "heads": "32", "seq_len": "2048"})
    assert (job.model.layers, job.model.ffn, job.model.kv_heads) == (16, 14336, 8)
    assert (job.seq_len, job.micro_batch) == (2048, 4)
    fewer = read_layout(ROW | {"layers": "16"}).model
    assert (fewer.layers, fewer.hidden, fewer.head_dim) == (16, 4096, 128)
    narrow = {"hidden": "2048", "heads": "32", "kv_heads": "4", "ffn": "8192", "vocab": "1000"}
    model = read_layout(ROW | narrow).model
    assert (model.layers, model.head_dim, model.kv_heads, model.ffn, model.vocab) == (32, 64, 4, 8192, 1000)
    experts = read_layout(ROW | {"model": "mixtral-8x7b", "layers": "8"}).model
    assert (experts.layers, experts.experts) == (8, 8)


def test_the_zero_stage_follows_from_the_ranks_that_share_states_unless_it_is_given() -> None:
    found = [
        read_layout(ROW | row)
        for row in (
            {"fsdp": "8"},
            {"fsdp": "8", "zero": "2"},
            {"zero": "0"},
            {"zero": "3", "cp": "2"},
            {"fsdp": "1", "cp": "4"},  # over the ranks of a sequence alone
            {"fsdp": "1"},
        )
    ]
    assert [(job.zero, job.state_ranks) for job in found] == [(3, 8), (2, 8), (0, 1), (3, 16), (3, 4), (1, 16)]
    assert read_layout(ROW | {"cut": "balanced"}).cut == "balanced"


def test_a_model_without_preset_has_the_shape_of_the_row() -> None:
    shape = {"layers": "24", "hidden": "2048", "heads": "16", "seq_len": "2048"}
    plain = read_layout(ROW | shape | {"model": "ours"}).model
    assert (plain.ffn, plain.gated, plain.kv_heads, plain.vocab) == (8192, False, 16, 51200)
    gated = read_layout(ROW | shape | {"model": "ours", "ffn": "5632", "kv_heads": "4", "vocab": "32000"}).model
    assert (gated.ffn, gated.gated, gated.kv_heads, gated.vocab) == (5632, True, 4, 32000)


def test_precision_and_recompute_are_words_of_many_programs() -> None:
    assert [read_layout(ROW | {"precision": text}).precision for text in ("BF16", "mxfp8", "fp8-cs", "")] == [
        "bf16",
        "fp8",
        "fp8",
        "bf16",
    ]
    assert read_layout(ROW | {"gpu_type": "V100"}).precision == "fp16"
    found = [read_layout(ROW | {"recompute": text}).recompute for text in ("Full", "selective-op", "none", "")]
    assert found == ["full", "selective", "none", "none"]
    partial = {"recompute": "partial", "pp": "2", "cut": "balanced", "notes": "VP=2"}
    blocks = [read_layout(ROW | partial | {"recomputed_blocks": text}).recomputed_blocks for text in ("3", "4, 3,2,1")]
    assert blocks == [(3, 3, 3, 3), (4, 3, 2, 1)]


def test_a_row_says_whether_the_output_matrix_is_the_embedding() -> None:
    models = [read_layout(ROW | {"tied": text}).model for text in ("", "false", "true")]
    assert [model.tied for model in models] == [False, False, True]
    own = {"model": "ours", "layers": "2", "hidden": "64", "heads": "4", "ffn": "128"}
    assert [read_layout(ROW | own | {"tied": text}).model.tied for text in ("", "true")] == [False, True]


@pytest.mark.parametrize("notes", ["VP=4; dp derived", "interleaved, VPP 4", "virtual stages: 4"])
def test_virtual_stages_are_in_the_notes(notes: str) -> None:
    assert read_layout(ROW | {"pp": "2", "notes": notes}).stages_per_rank == 4
    assert read_layout(ROW | {"notes": notes}).stages_per_rank == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "llama2-7b LoRA"}, "model 'llama2-7b LoRA', of which only adapters are trained: "),
        (
            {"model": "abacus"},
            "model 'abacus': it is a preset or a file, or layers, hidden and heads are given; layers, ",
        ),
        ({"model": "abacus", "layers": "2", "hidden": "8", "heads": "2", "ep": "2"}, "model 'abacus' with experts: "),
        ({"gpu_type": "Abacus"}, "gpu_type 'Abacus', a device without a preset: it is one of a100-40, "),
        ({"gpus": ""}, "gpus is empty: "),
        ({"gpus": "16.5"}, "gpus '16.5': it is a whole number above 0, or empty"),
        ({"gpus": "-8"}, "gpus '-8': it is a number above 0, or empty"),
        ({"gpus": "0"}, "gpus '0': it is a number above 0, or empty"),
        ({"gpus": "inf"}, "gpus 'inf': it is a number above 0, or empty"),
        ({"tp": "eight"}, "tp 'eight': it is a number above 0, or empty"),
        ({"tp": "3"}, "tp 3, pp 1, cp 1 on 16 devices: axes divide the devices"),
        ({"micro_batch": "1e400"}, "micro_batch '1e400': it is a number above 0, or empty"),
        ({"global_batch": "nan"}, "global_batch 'nan': it is a number above 0, or empty"),
        ({"global_batch": "8"}, "a global batch of 8 sequences: each of 16 replicas has a micro-batch of 1"),
        ({"precision": "int3"}, "precision 'int3': it has one of fp4, fp8, fp16, bf16 in it"),
        ({"gpu_type": "A100", "precision": "fp8"}, "precision fp8: a100-80 does not compute it"),
        (
            {"recompute": "partial"},
            "recompute partial with numbers of blocks for 0 stages: partial recompute has one for ",
        ),
        ({"recompute": "full", "recomputed_blocks": "4"}, "recompute full with numbers of blocks for 1 stages: "),
        (
            {"recompute": "partial", "recomputed_blocks": "4,4"},
            "recompute partial with numbers of blocks for 2 stages: ",
        ),
        (
            {"recompute": "partial", "recomputed_blocks": "some"},
            "recomputed_blocks 'some': it is a number for each stage",
        ),
        (
            {"recompute": "partial", "recomputed_blocks": "99"},
            "recomputed_blocks '99': they are among the blocks of a ",
        ),
        ({"recompute": "ful"}, "recompute 'ful': it is full, selective, partial or none"),
        ({"layers": "2", "hidden": "8", "heads": "3", "model": "ours"}, "heads 3 for hidden 8: heads divide hidden"),
        ({"schedule": "zigzag"}, "schedule 'zigzag': it is gpipe, 1f1b, interleaved, zbv or empty"),
        ({"schedule": "zbv"}, "schedule zbv with pp 1: it orders the passes of a pipeline"),
        (
            {"schedule": "zbv", "pp": "2", "notes": "VP=4"},
            "schedule zbv with 4 stages per rank: gpipe and 1f1b have one",
        ),
        ({"offload": "yes"}, "offload 'yes': it is true, false or empty"),
        ({"offload": "true", "gpu_type": "TPU v4"}, "offload on tpu-v4: no bandwidth between this device and its host"),
        ({"zero": "4"}, "zero '4': the ZeRO stage is 0, 1, 2 or 3, or empty"),
        ({"cut": "even"}, "cut 'even': it is balanced, equal or empty, or given with layers_per_stage"),
        ({"tied": "yes"}, "tied 'yes': it is true, false or empty"),
        (
            {"keeps": "repeated keys, everything"},
            "keeps 'everything': it has some of gathered inputs, norms in 32 bits, ",
        ),
        ({"ep": "2"}, "ep 2: it divides the model's 0 experts"),
    ],
)
def test_what_is_missing_or_wrong_is_said(changes: dict[str, str], reason: str) -> None:
    with pytest.raises(LayoutError) as raised:
        read_layout(ROW | changes)
    assert str(raised.value).startswith(reason)
    assert raised.value.nearest
    (answer,) = predict_rows([ROW | changes])
    assert answer["error"] == str(raised.value)
    assert all(answer[name] == "" for name in PREDICTED if name != "error")


def test_at_most_one_published_row_of_ten_has_no_prediction() -> None:
    rows = list(published())
    found = predict_rows(rows)
    assert [{name: row[name] for name in rows[0]} for row in found] == rows
    empty = [row for row in found if row["error"]]
    assert len(empty) <= len(rows) / 10
    assert all(float(row["pred_step_time_s"]) > 0 for row in found if not row["error"])


def test_a_schedule_has_its_number_of_stages_unless_the_notes_say_another() -> None:
    rows = ({"schedule": "zbv"}, {"schedule": "gpipe"}, {"schedule": "interleaved", "notes": "VP=4"}, {})
    found = [read_layout(ROW | {"pp": "2"} | row) for row in rows]
    assert [(each.schedule, each.passes, each.stages_per_rank) for each in found] == [
        ("zbv", "zbv", 2), ("gpipe", "gpipe", 1), ("interleaved", "interleaved", 4), (None, "1f1b", 0),
    ]  # fmt: skip
