"""``unisono plan simulate``: one job, or rows of a CSV file."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path

import pytest
from commands import Desk

JOB = ("model=llama-3-70b", "gpu_type=h100", "gpus=64", "tp=8", "pp=4", "micro_batch=1", "global_batch=64")


def test_a_job_has_a_time_an_interval_and_its_parts(desk: Desk) -> None:
    text = desk.here("plan", "simulate", *JOB)
    assert text.code == 0, text.err
    job, assumed, first, second, *parts = text.out.splitlines()
    assert "device=h100 params=70552387584 precision=bf16 num_devices=64 dp=2 zero=1 dp_shard=2 tp=8 pp=4" in job
    assert assumed.startswith("stages per rank are not given")
    assert first.startswith("step ")
    assert "nine of ten such runs lie between" in first
    assert "of its peak" in second
    assert parts[0].split()[0] == "matmul"
    assert any(line.startswith("memory ") and line.endswith(" of 80 GiB") for line in parts)
    found = json.loads(desk.here("plan", "simulate", "--json", *JOB).out)
    assert sum(found["parts_s"].values()) == pytest.approx(found["step_s"])
    assert found["job"] == dict(setting.split("=") for setting in JOB)
    assert (found["layout"]["seq_len"], found["layout"]["dp"]) == (8192, 2)
    unknown = desk.here("plan", "simulate", "model=llama-3-8b", "gpu_type=l40s", "gpus=8")
    assert "no published run was used for l40s/16-bit" in unknown.out
    slow = json.loads(desk.here("plan", "simulate", "--json", *JOB, "recompute=full").out)
    assert slow["step_s"] > found["step_s"]
    assert sum(found["memory"].values()) == pytest.approx(found["peak_bytes"])
    assert slow["peak_bytes"] < found["peak_bytes"]
    assert (
        "80 GiB, which does not fit"
        in desk.here("plan", "simulate", "model=llama-3-70b", "gpu_type=h100", "gpus=8").out
    )


def test_rows_come_back_with_predictions(desk: Desk) -> None:
    file = desk.folder / "rows.csv"
    file.write_text(
        '\ufeffmodel,gpu_type,gpus,tp,mine\nllama-3-8b,H100,8,1,"a, ""b"" é"\nnobody-1b,H100,8,,\nllama-3-8b,h100,8\n'
    )
    answer = desk.here("plan", "simulate", "--rows", str(file))
    assert answer.code == 0, answer.err
    first, second, third = csv.DictReader(io.StringIO(answer.out))
    assert list(first)[:5] == ["model", "gpu_type", "gpus", "tp", "mine"]
    assert first["mine"] == 'a, "b" é'
    assert float(first["pred_step_time_s"]) > 0
    assert float(first["pred_peak_mem_gib"]) > 0
    assert first["error"] == ""
    assert second["error"].startswith(
        "model 'nobody-1b': it is a preset or a file, or layers, hidden and heads are given"
    )
    assert third["pred_step_time_s"] == first["pred_step_time_s"]  # a short row: other columns are empty
    as_json = json.loads(desk.here("plan", "simulate", "--json", "--rows", str(file)).out)["rows"]
    assert as_json == [first, second, third]


def test_rows_of_models_as_files_name_them_as_given(desk: Desk) -> None:
    (desk.folder / "gpt.toml").write_text("[model]\nnum_layers = 2\n[data]\nseq_len = 64\n")
    (desk.folder / "bad").mkdir()
    (desk.folder / "bad/config.json").write_text('{"model_type": "gpt2", "n_embd": [[]]}')
    file = desk.folder / "rows.csv"
    file.write_text("model,gpu_type,gpus\ngpt.toml,h100,8\n./bad,h100,8\n./none,h100,8\nllama-3-8b,h100,8\n")
    rows = json.loads(desk.here("plan", "simulate", "--json", "--rows", str(file)).out)["rows"]
    assert [row["model"] for row in rows] == ["gpt.toml", "./bad", "./none", "llama-3-8b"]
    assert [bool(row["pred_step_time_s"]) for row in rows] == [True, False, False, True]
    assert rows[1]["error"].startswith("bad/config.json: n_embd = [[]]: it is a whole number from 1 to ")
    assert rows[2]["error"].startswith("model './none': there is no such file")
    one = json.loads(desk.here("plan", "simulate", "model=gpt.toml", "gpu_type=h100", "gpus=8", "--json").out)
    assert (one["job"]["model"], one["layout"]["seq_len"]) == ("gpt.toml", 64)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no job"),
        ((*JOB, "--rows", "rows.csv"), "both a job and --rows"),
        (("model",), "model\n  rule: a job is described by COLUMN=VALUE"),
        (("layer=2",), "layer=2\n  rule: a job is described by COLUMN=VALUE"),
        (
            ("model=llama-3-8b", "gpu_type=abacus", "gpus=8"),
            "gpu_type 'abacus', a device without a preset\n  rule: it is one of",
        ),
        (("gpus=8", "gpus=16"), "gpus=8 and gpus=16\n  rule: a column has one value"),
        (("--rows", "twice.csv"), "twice.csv: a column that is there twice"),
        (("--rows", "empty.csv"), "empty.csv: no column model, gpu_type, gpus"),
        (("--rows", "rows.csv"), "rows.csv: no column gpu_type, gpus"),
        (("--rows", "bytes.csv"), "rows are read from a CSV file of at most 16,777,216 bytes in UTF-8"),
        (("--rows", "quote.csv"), "rows are read from a CSV file of at most 16,777,216 bytes in UTF-8"),
    ],
)
def test_what_cannot_be_simulated_is_said(desk: Desk, arguments: tuple[str, ...], said: str) -> None:
    (desk.folder / "rows.csv").write_text("model\nllama-3-8b\n")
    (desk.folder / "bytes.csv").write_bytes(b"model,gpu_type,gpus\n\xff\xfe,H100,8\n")
    (desk.folder / "twice.csv").write_text("model,gpu_type,gpus,tp,tp\nllama-3-8b,H100,8,1,2\n")
    (desk.folder / "empty.csv").write_text("")
    (desk.folder / "quote.csv").write_text('model,gpu_type,gpus\n"a"b,H100,8\n')
    answer = desk.here("plan", "simulate", *arguments)
    assert answer.code == 2
    assert said in answer.err


def test_rows_without_an_end_are_not_read(desk: Desk, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "zero.csv").symlink_to("/dev/zero")
    (tmp_path / "large.csv").touch()
    os.truncate(tmp_path / "large.csv", 1 << 40)
    for name, said in {
        "pipe": "not a regular file",
        "zero": "not a regular file",
        "large": "more than 16,777,216 bytes",
    }.items():
        answer = desk.here("plan", "simulate", "--rows", str(tmp_path / f"{name}.csv"))
        assert (answer.code, said in answer.err) == (2, True)


def test_a_row_with_more_cells_than_the_header_is_refused_alone(desk: Desk) -> None:
    (desk.folder / "rows.csv").write_text("model,gpu_type,gpus,notes\nllama-3-8b,H100,8,a, VP=4\nllama-3-8b,H100,8,a\n")
    answer = desk.here("plan", "simulate", "--rows", "rows.csv")
    first, second = csv.DictReader(io.StringIO(answer.out))
    assert first["error"] == "5 cells, where the header has 4"
    assert first["pred_step_time_s"] == ""
    assert float(second["pred_step_time_s"]) > 0
