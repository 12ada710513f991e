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


def test_files_of_different_encodings(desk: Desk) -> None:
    (desk.folder / "a.csv").write_bytes(b"x\n1\n")
    (desk.folder / "b.csv").write_bytes(b"\xef\xbb\xbfx\n2\n3\n")
    done = desk.here("data", "columns", "a.csv", "b.csv")
    assert done.code == 1, done.err
    assert done.out.splitlines()[:2] == [
        "3 rows in 2 files, of which 1 differ in their schemas",
        "     b.csv: encoding: text, UTF-8 with mark, in most files text, UTF-8",
    ]
    unified = desk.here("data", "columns", "a.csv", "b.csv", "--unify", "--out", "out")
    assert unified.code == 0, unified.err
    assert "     b.csv: 2 to text, UTF-8" in unified.out.splitlines()
    assert (desk.folder / "out" / "data" / "b.csv").read_bytes() == b"x\n2\n3\n"


def test_a_file_with_semicolons(desk: Desk) -> None:
    (desk.folder / "a.csv").write_text("x;y\n1;2\n3;4\n")
    for command in (("columns", "a.csv"), ("dedup", "a.csv", "--exact", "--out", "out")):
        done = desk.here("data", *command)
        assert done.code == 2
        assert "a header line with the one name 'x;y'" in done.err
        assert "where it has ';'" in done.err


def test_a_column_that_is_named_twice_is_judged_once(desk: Desk) -> None:
    write(desk, "a.jsonl", spike=True)
    once = desk.here("data", "columns", "a.jsonl", "--column", "x", "--out", "once", "--json").json
    twice = desk.here("data", "columns", "a.jsonl", "--column", "x", "--column", "x", "--out", "twice", "--json").json
    assert [column["name"] for column in twice["numeric"]] == ["x"]
    assert twice["numeric"] == once["numeric"]
    flagged = [(desk.folder / name / "flagged.jsonl").read_text() for name in ("once", "twice")]
    assert len(flagged[0].splitlines()) == 1
    assert flagged[1] == flagged[0]


def test_files_of_one_schema(desk: Desk) -> None:
    write(desk, "a.jsonl")
    done = desk.here("data", "columns", "a.jsonl", "--time", "t", "--max-gap", "20", "--json")
    assert done.code == 0, done.err
    assert done.json["differences"] == []
    assert done.json["options"]["max_gap"] == 20
    loose = desk.here("data", "columns", "a.jsonl", "--max-z", "1", "--stuck-run", "5", "--group", "t", "--json")
    assert loose.json["numeric"][0]["not_judged"] == {"fewer than 50 values": 200}


def test_options_that_would_do_nothing(desk: Desk) -> None:
    write(desk, "a.jsonl")
    refused = desk.here("data", "columns", "a.jsonl", "--max-gap", "5")
    assert refused.code == 2
    assert "--max-gap 5 without --time" in refused.err


def test_mask_and_unify(desk: Desk) -> None:
    write(desk, "a.jsonl", spike=True)
    (desk.folder / "b.csv").write_text('t,x,unit\n300,"20.5","C"\n301,21,"C"\n')
    options = ("a.jsonl", "b.csv", "--time", "t", "--mask", "all", "--unify", "--out", "out")
    done = desk.here("data", "columns", *options)
    assert done.code == 0, done.err
    assert done.out.splitlines()[-6:] == [
        "1 values masked: 1 of x",
        "one schema of 3 columns, for which cells of 2 files changed",
        "     a.jsonl, column unit: 200 added",
        "     b.csv, column x: 1 string to float",
        "     b.csv, column x: 1 int to float",
        "report: out/report.html",
    ]
    assert (desk.folder / "out/data/b.csv").read_text() == 't,x,unit\n300,20.5,"C"\n301,21.0,"C"\n'
    spike = json.loads((desk.folder / "out/data/a.jsonl").read_text().splitlines()[7])
    assert spike == {"t": 7, "x": None, "unit": None}
    assert json.loads((desk.folder / "out/masked.jsonl").read_text())["value"] == "100.5"
    again = desk.here("data", "columns", "out/data", "--json")
    assert (again.code, again.json["differences"], again.json["changes"]) == (0, [], None)


def test_rows_that_do_not_fit(desk: Desk) -> None:
    write(desk, "a.jsonl")
    (desk.folder / "b.jsonl").write_text('{"t": 1, "x": 20.5}\n{"t": "noon", "x": 20.5}\n')
    refused = desk.here("data", "columns", "a.jsonl", "b.jsonl", "--unify", "--out", "out")
    assert refused.code == 2
    assert "b.jsonl: row 1, column 't': 'noon' (str)" in refused.err
    done = desk.here("data", "columns", "a.jsonl", "b.jsonl", "--unify", "--on-error", "skip", "--out", "new")
    assert done.code == 0, done.err
    assert "     b.jsonl: 1 rows left out" in done.out.splitlines()
    none = desk.here("data", "columns", "a.jsonl", "--mask", "stuck", "--out", "none")
    assert "0 values masked" in none.out.splitlines()
    assert (desk.folder / "none/data/a.jsonl").read_bytes() == (desk.folder / "a.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("options", "given"),
    [
        (["--mask", "all"], "--mask without --out"),
        (["--unify"], "--unify without --out"),
        (["--on-error", "skip", "--out", "out"], "--on-error skip without --unify"),
    ],
)
def test_changes_that_would_go_nowhere(desk: Desk, options: list[str], given: str) -> None:
    write(desk, "a.jsonl")
    refused = desk.here("data", "columns", "a.jsonl", *options)
    assert refused.code == 2
    assert given in refused.err
    assert not (desk.folder / "out").exists()


def test_a_text_that_stands_for_no_value(desk: Desk, tmp_path: Path) -> None:
    numbers = "x\n" + "1\n2\n" * 10
    (tmp_path / "a.csv").write_text(f"{numbers}NA\n3\n")
    refused = desk.here("data", "columns", str(tmp_path / "a.csv"), "--unify", "--out", str(tmp_path / "no"))
    assert refused.code == 2
    assert "--null-text NA" in refused.err
    options = ("--unify", "--null-text", "NA", "--out", str(tmp_path / "out"))
    done = desk.here("data", "columns", str(tmp_path / "a.csv"), *options)
    assert done.code == 0, done.err
    assert "1 text to no value" in done.out
    assert (tmp_path / "out/data/a.csv").read_text() == f"{numbers}\n3\n"
