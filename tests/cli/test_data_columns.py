"""``unisono data columns`` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from commands import Desk, make_desk


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """A folder of its own."""
    return make_desk(tmp_path / "desk", tmp_path / "cache")


def write(desk: Desk, name: str, *, spike: bool = False) -> None:
    values = np.random.default_rng(0).normal(20, 1, 200).tolist()
    if spike:
        values[7] = 100.5
    rows = [{"t": number + 10 * (spike and number > 50), "x": value} for number, value in enumerate(values)]
    (desk.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_columns(desk: Desk) -> None:
    write(desk, "a.jsonl", spike=True)
    (desk.folder / "b.jsonl").write_text('{"t": 300, "x": "warm", "y": 1}\n')
    done = desk.here("data", "columns", "a.jsonl", "b.jsonl", "--time", "t", "--column", "x", "--out", "out")
    assert done.code == 1, done.err
    assert done.out.splitlines() == [
        "201 rows in 2 files, of which 1 differ in their schemas",
        "     b.jsonl, column x: type: string, in most files float, first row 0",
        "     b.jsonl, column y: extra: int",
        "x: 1 outliers, 0 not finite, 0 stuck in 0 runs",
        "     a.jsonl row 7: outlier, 100.5",
        "t: median interval 1, 2 gaps, 0 steps back, 0 repeated",
        "report: out/report.html",
    ]
    page = (desk.folder / "out" / "report.html").read_text()
    assert "1 of 2 files differ from the schema of the data set." in page
    report = json.loads((desk.folder / "out" / "report.json").read_text())
    assert report["numeric"][0]["places"][0]["value"] == 100.5


def test_files_of_one_schema(desk: Desk) -> None:
    write(desk, "a.jsonl")
    done = desk.here("data", "columns", "a.jsonl", "--time", "t", "--max-gap", "20", "--json")
    assert done.code == 0, done.err
    assert done.json["differences"] == []
    assert done.json["options"]["max_gap"] == 20
    loose = desk.here("data", "columns", "a.jsonl", "--max-z", "1", "--max-stuck", "5", "--group", "t", "--json")
    assert loose.json["numeric"][0]["not_judged"] == {"fewer than 50 values": 200}


def test_options_that_would_do_nothing(desk: Desk) -> None:
    write(desk, "a.jsonl")
    refused = desk.here("data", "columns", "a.jsonl", "--max-gap", "5")
    assert refused.code == 2
    assert "--max-gap 5 without --time" in refused.err
