"""``unisono data pack`` and ``convert`` of a folder of results: its data are read, as by the other commands on data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Desk, problem

ROWS = [{"text": "the same words"}, {"text": "the same words"}, {"text": "other words"}]
ONE_TABLE = "one table, or one set name-00000-of-00005, is read at a time"


def results(desk: Desk, tmp_path: Path, names: tuple[str, ...]) -> Path:
    """A folder of results of tables of ``names``."""
    source, out = tmp_path / "source", tmp_path / "results"
    source.mkdir()
    for number, name in enumerate(names):
        lines = [json.dumps({"text": f"{row['text']} {number}"}) for row in ROWS]
        (source / name).write_text("\n".join(lines) + "\n")
    done = desk.here("data", "dedup", str(source), "--exact", f"--out={out}", "--workers=0")
    assert done.code == 0, done.err
    return out


def test_the_table_of_results_is_converted_and_packed(desk: Desk, tmp_path: Path) -> None:
    out, target = results(desk, tmp_path, ("a.jsonl",)), tmp_path / "new.jsonl"
    done = desk.here("data", "convert", str(out), str(target), "--json")
    assert done.code == 0, done.err
    assert target.read_bytes() == (out / "data/a.jsonl").read_bytes()
    assert done.json["rows"] == 2
    for name, options in (("new.bin", ["--text-column=text"]), ("rows.parquet", [])):
        packed = desk.here("data", "pack", str(out), str(tmp_path / name), *options, "--json")
        assert packed.code == 0, packed.out
        assert packed.json["records"] == 2


def test_a_set_of_files_is_one_table(desk: Desk, tmp_path: Path) -> None:
    out = results(desk, tmp_path, ("a-00000-of-00002.jsonl", "a-00001-of-00002.jsonl"))
    done = desk.here("data", "convert", str(out), str(tmp_path / "new.jsonl"), "--json")
    assert done.code == 0, done.err
    assert done.json["rows"] == 4


def test_several_tables_are_named_with_the_command(desk: Desk, tmp_path: Path) -> None:
    out = results(desk, tmp_path, ("a.jsonl", "b.jsonl"))
    first = out / "data/a.jsonl"
    given = f"{out}, a folder of 2 tables: 'data/a.jsonl', 'data/b.jsonl'"
    each = "each by itself, to a target of its own: unisono data"
    done = desk.here("data", "convert", str(out), "new.jsonl")
    assert done.err == problem(given, ONE_TABLE, "nothing was written", f"{each} convert {first} new.jsonl")
    assert done.code == 2
    packed = desk.here("data", "pack", str(out), "new.bin", "--text-column=text")
    nearest = f"{each} pack {first} new.bin --text-column text"
    assert packed.err == problem(given, ONE_TABLE, "nothing was written", nearest)


@pytest.mark.parametrize("name", ["new.bin", "new.rec"])
def test_results_are_no_files_of_text(desk: Desk, tmp_path: Path, name: str) -> None:
    """Without ``--text-column`` their report and their rows would be packed as documents."""
    out = results(desk, tmp_path, ("a.jsonl",))
    done = desk.here("data", "pack", str(out), str(tmp_path / name), "--kind=text")
    assert done.code == 2
    assert not list(tmp_path.glob("new*"))


def test_a_folder_of_text_is_no_table(desk: Desk, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("words")
    done = desk.here("data", "convert", str(folder), "new.jsonl")
    assert (done.code, done.err.splitlines()[0]) == (2, f"unisono: {folder}: Is a directory")
    packed = desk.here("data", "pack", str(folder), str(tmp_path / "new.bin"), "--json")
    assert packed.json["records"] == 1
