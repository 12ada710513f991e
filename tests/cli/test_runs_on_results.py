"""Runs on a folder of results: its ``data/`` is read, as by the commands on data."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from commands import Desk, events_of, losses_of, make_desk
from task_data import SMALL, write_images

from unisono.data.options import DataOptions
from unisono.tasks.sources import sample_files

TEXTS = (
    "--set=task.kind=text",
    "--set=task.target=label",
    "--set=task.inputs=['text']",
    "--set=data.seq_len=16",
    *SMALL,
)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """A folder with the results of a clean over a table of 60 reviews, the last 20 of them copies."""
    desk = make_desk(tmp_path / "desk", tmp_path / "cache")
    rows = [
        {"text": f"it was {'bad' if n % 2 else 'fine'} {n}", "label": "np"[n % 2], "x": n % 10 + 10**6 * (n == 5)}
        for n in range(40)
    ]
    (desk.folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, *rows[:20]]))
    clean(desk, "a.jsonl", "clean", "--column=text")
    return desk


def clean(desk: Desk, source: str, out: str, *more: str) -> None:
    done = desk.here("data", "dedup", source, "--exact", f"--out={out}", "--workers=0", *more)
    assert done.code == 0, done.err


def train(desk: Desk, run: str, *more: str) -> Path:
    common = (
        "--set=train.steps=2",
        "--set=plan.global_batch=4",
        "--set=observe.report=false",
        "--set=plan.precision=fp32",
    )
    done = desk.here("train", "--debug", f"--set=run.dir={run}", f"--set=data.cache_dir={desk.cache}", *common, *more)
    assert done.code == 0, done.err
    return desk.folder / run


def test_tables(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    copy = train(desk, "copy", *TEXTS, "--set=data.train=clean/data/a.jsonl", "--set=data.eval=clean/data/a.jsonl")
    for name in ("clean", "cl*n"):
        run = train(desk, f"run-{len(name)}", *TEXTS, f"--set=data.train={name}", f"--set=data.eval={name}")
        assert losses_of(run) == losses_of(copy)
        (start,) = (event for event in events_of(run) if event["kind"] == "run_start")
        assert [facts["kept"] for facts in start["cleaning"].values()] == [40]
    assert "hidden" not in caplog.text


def test_masked_columns(desk: Desk) -> None:
    """The list of masked values is a table, too."""
    done = desk.here("data", "columns", "a.jsonl", "--column=x", "--mask=outlier", "--out=columns")
    assert done.code == 0, done.err
    assert (desk.folder / "columns" / "masked.jsonl").stat().st_size
    found = sample_files(str(desk.folder / "columns"), DataOptions())
    assert [Path(file).relative_to(desk.folder).as_posix() for file in found] == ["columns/data/a.jsonl"]


def test_images(desk: Desk) -> None:
    write_images(desk.folder / "images", per_class=4)
    clean(desk, "images", "ci")
    run = train(desk, "run", "--set=task.kind=image", "--set=data.train=ci", "--set=image.size=16")
    assert tomllib.loads((run / "config.toml").read_text())["task"]["classes"] == ["blue", "red"]


def test_the_corpus(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    runs = [
        train(
            desk,
            f"run{number}",
            "--set=data.text_column=text",
            f"--set=data.corpus={corpus}",
            "--set=data.seq_len=16",
            *SMALL,
        )
        for number, corpus in enumerate(("clean", "clean/data"))
    ]
    assert losses_of(runs[0]) == losses_of(runs[1])
    assert "hidden" not in caplog.text


def test_results_without_data(desk: Desk) -> None:
    done = desk.here(
        "data", "dedup", "a.jsonl", "--exact", "--column=text", "--index-only", "--out=rows", "--workers=0"
    )
    assert done.code == 0, done.err
    for setting in ("data.train", "data.corpus"):
        refused = desk.here(
            "train",
            "--debug",
            "--set=run.dir=run",
            *(TEXTS if setting == "data.train" else ()),
            f"--set={setting}=rows",
        )
        assert refused.code == 2
        assert "rows, a folder of results without data/, with row indices alone" in refused.err
        assert "data.train=SOURCE with data.kept_rows=rows" in refused.err
