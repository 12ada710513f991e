"""Duplicates are dropped: files of every format, kills, any number of processes, and inputs that are refused."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import planted
import pytest
from procs import wait_until

from unisono.data.convert.table_files import Table, open_table, write_table
from unisono.data.loading import subprocess_map
from unisono.errors import ConfigError, DataError, ExtraError
from unisono.quality.clean import CleanResult, clean
from unisono.quality.duplicates import sketch_folder, sketches
from unisono.quality.options import CleanRecipe, DuplicateOptions, only_dedup

pytest.importorskip("rensa")

RNG = np.random.default_rng(7)
(BASE,) = planted.documents(1, RNG)
TEXTS = [BASE, "something else altogether", BASE, planted.edited(BASE, 1, RNG), "the end of the file"]
KEPT = [0, 1, 4]


def dedup(paths: list[Path], out: Path, options: DuplicateOptions | None = None, **settings: Any) -> CleanResult:
    return clean(paths, out, only_dedup(options or DuplicateOptions()), **settings)


def exact(result: CleanResult) -> int:
    return result.dropped.get("dedup.exact", 0)


def near(result: CleanResult) -> int:
    return result.dropped.get("dedup.near", 0)


def tree(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def rows(texts: list[str]) -> list[dict[str, Any]]:
    return [{"text": text, "label": number} for number, text in enumerate(texts)]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet", ".mindrecord"])
def test_kept_rows_are_written_in_the_format_of_their_file(tmp_path: Path, suffix: str) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    source = tmp_path / f"texts{suffix}"
    write_table(source, Table(rows=rows(TEXTS)))
    before = source.read_bytes()
    result = dedup([source], tmp_path / "out")
    assert (result.documents, result.kept, exact(result), near(result), result.num_capped) == (5, 3, 1, 1, 0)
    assert [dict(row) for row in open_table(tmp_path / "out" / "data" / source.name).rows] == [
        row for number, row in enumerate(rows(TEXTS)) if number in KEPT
    ]
    assert np.load(tmp_path / "out" / "kept" / f"{source.name}.npy").tolist() == KEPT
    dropped = [json.loads(line) for line in (tmp_path / "out" / "dropped.jsonl").read_text().splitlines()]
    place = {"file": source.name, "row": 0}
    assert [(line["row"], line["duplicate_of"], line["reason"]) for line in dropped] == [
        (2, place, "dedup.exact"),
        (3, place, "dedup.near"),
    ]
    assert dropped[1]["similarity"] == pytest.approx(planted.jaccard(TEXTS[0], TEXTS[3]), abs=1e-4)
    assert source.read_bytes() == before
    assert sorted(os.listdir(tmp_path / "out")) == sorted(
        [".lock", "data", "data_sizes.json", "dropped.jsonl", "job.json", "kept", "report.html", "report.json"]
    )


def test_records_are_texts(tmp_path: Path) -> None:
    source = tmp_path / "texts.rec"
    table = [{"data": text.encode(), "label": float(number)} for number, text in enumerate(TEXTS)]
    write_table(source, Table(rows=table))
    dedup([source], tmp_path / "out")
    kept = [dict(row) for row in open_table(tmp_path / "out" / "data" / "texts.rec").rows]
    assert kept == [table[number] for number in KEPT]


def test_lines_of_jsonl_are_copied_byte_for_byte(tmp_path: Path) -> None:
    """Other fields may be of any kind."""
    lines = [
        b'{"text": "one two", "meta": {"url": null, "n": [1, "a"]}}\n',
        '{ "meta":null,  "text":"\u00fcber \\u00fcber" }\n'.encode(),
        b'{"text": "one two", "meta": 1.50}\n',
        b'{"text": "last line without an end"}',
    ]
    source = tmp_path / "texts.jsonl"
    source.write_bytes(b"".join(lines))
    dedup([source], tmp_path / "out")
    assert (tmp_path / "out" / "data" / "texts.jsonl").read_bytes() == lines[0] + lines[1] + lines[3]


def test_a_folder_of_text(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    for number, text in enumerate(TEXTS):
        (folder / ("sub" if number % 2 else "") / f"{number}.txt").write_text(text)
    result = dedup([folder], tmp_path / "out")
    assert result.kept == 3
    assert sorted(tree(tmp_path / "out" / "data")) == ["0.txt", "4.txt", "sub/1.txt"]


def test_several_files_are_one_data_set(tmp_path: Path) -> None:
    for name, text in (("a", TEXTS[:2]), ("b", TEXTS[2:])):
        (tmp_path / name).mkdir()
        write_table(tmp_path / name / "part.jsonl", Table(rows=rows(text)))
    result = dedup([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert result.kept == 3
    assert np.load(tmp_path / "out" / "kept" / "b" / "part.jsonl.npy").tolist() == [2]
    assert sorted(tree(tmp_path / "out" / "data")) == ["a/part.jsonl", "b/part.jsonl"]


def test_only_the_index(tmp_path: Path) -> None:
    source = tmp_path / "texts.jsonl"
    write_table(source, Table(rows=rows(TEXTS)))
    dedup([source], tmp_path / "out", index_only=True)
    assert not (tmp_path / "out" / "data").exists()
    assert np.load(tmp_path / "out" / "kept" / "texts.jsonl.npy").tolist() == KEPT


def test_only_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which needs no package."""
    monkeypatch.setitem(sys.modules, "rensa", None)
    source = tmp_path / "texts.jsonl"
    write_table(source, Table(rows=rows(TEXTS)))
    result = dedup([source], tmp_path / "out", options=DuplicateOptions(near=0))
    assert (result.kept, exact(result), near(result), result.sketch) == (4, 1, 0, "")
    with pytest.raises(ExtraError, match=r"pip install 'unisono\[quality\]'"):
        dedup([source], tmp_path / "other")
    assert not (tmp_path / "other").exists()


def corpus(tmp_path: Path, count: int = 600) -> Path:
    rng = np.random.default_rng(8)
    texts = planted.documents(count, rng)
    texts += [planted.edited(text, 1, rng) for text in texts[:100]] + texts[100:200]
    source = tmp_path / "corpus.jsonl"
    write_table(source, Table(rows=[{"text": text} for text in texts]))
    return source


def test_any_number_of_processes_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketch_folder, "CHUNK_DOCUMENTS", 50)
    source = corpus(tmp_path)
    results = [dedup([source], tmp_path / str(workers) / "out", workers=workers) for workers in (0, 1, 3)]
    assert results[0] == results[1] == results[2]
    assert near(results[0]) > 90
    assert tree(tmp_path / "0") == tree(tmp_path / "1") == tree(tmp_path / "3")


@pytest.mark.parametrize(("documents", "most"), [(8, 1), (100, 2)])
def test_there_are_no_more_processes_than_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documents: int, most: int
) -> None:
    started: list[subprocess_map.Subprocess] = []

    class Counted(subprocess_map.Subprocess):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            started.append(self)

    monkeypatch.setattr(subprocess_map, "Subprocess", Counted)
    monkeypatch.setattr(sketch_folder, "CHUNK_DOCUMENTS", 50)
    source = tmp_path / "corpus.jsonl"
    write_table(source, Table(rows=rows([f"document {number}" for number in range(documents)])))
    result = dedup([source], tmp_path / "out", DuplicateOptions(near=0.0), workers=6)
    assert result.kept == documents
    assert 1 <= len(started) <= most


def test_a_job_goes_on_behind_its_whole_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketch_folder, "CHUNK_DOCUMENTS", 50)
    source = corpus(tmp_path)
    dedup([source], tmp_path / "whole" / "out", workers=0)
    sketched: list[int] = []
    real = sketch_folder.make_chunk

    def count(texts: list[bytes], recipe: CleanRecipe, benchmark_hashes: Any) -> bytes:
        if len(sketched) == 6 and not (tmp_path / "failed").exists():
            (tmp_path / "failed").touch()
            raise KeyboardInterrupt
        sketched.append(len(texts))
        return real(texts, recipe, benchmark_hashes)

    monkeypatch.setattr(sketch_folder, "make_chunk", count)
    with pytest.raises(KeyboardInterrupt):
        dedup([source], tmp_path / "out" / "out", workers=0)
    folder = tmp_path / "out" / "out" / "work" / "sketches"
    with (folder / "chunks.jsonl").open("ab") as journal:  # a line that was not written whole
        journal.write(b'{"documents": 50, "dig')
    damaged = sketch_folder.chunk_path(folder, 4)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    dedup([source], tmp_path / "out" / "out", workers=0)
    assert sum(sketched) == 6 * 50 + 800 - 4 * 50
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    done = dedup([source], tmp_path / "out" / "out", workers=0)
    assert done.kept == 600
    assert sum(sketched) == 6 * 50 + 800 - 4 * 50


def test_a_killed_command_goes_on(tmp_path: Path) -> None:
    source = corpus(tmp_path, 9_000)
    command = [sys.executable, "-m", "unisono", "data", "dedup", str(source), "--workers", "2", "--json", "--out"]
    subprocess.run([*command, str(tmp_path / "whole" / "out")], check=True, capture_output=True)
    killed = subprocess.Popen([*command, str(tmp_path / "killed" / "out")], stdout=subprocess.DEVNULL)
    journal = tmp_path / "killed" / "out" / "work" / "sketches" / "chunks.jsonl"
    wait_until(lambda: killed.poll() is not None or (journal.exists() and journal.stat().st_size > 0), "a chunk")
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    subprocess.run([*command, str(tmp_path / "killed" / "out")], check=True, capture_output=True)
    assert tree(tmp_path / "killed") == tree(tmp_path / "whole")


def test_other_settings_do_not_go_on(tmp_path: Path) -> None:
    source = tmp_path / "texts.jsonl"
    write_table(source, Table(rows=rows(TEXTS)))
    dedup([source], tmp_path / "out")
    before = tree(tmp_path / "out")
    for options in (DuplicateOptions(near=0.7), DuplicateOptions(seed=1)):
        with pytest.raises(ConfigError, match="results of other inputs or settings"):
            dedup([source], tmp_path / "out", options=options)
    source.write_text(source.read_text() + '{"text": "one more"}\n')
    with pytest.raises(ConfigError, match="results of other inputs or settings"):
        dedup([source], tmp_path / "out")
    assert tree(tmp_path / "out") == before


def test_sketches_of_another_version_do_not_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "texts.jsonl"
    write_table(source, Table(rows=rows(TEXTS)))
    assert dedup([source], tmp_path / "out").sketch.startswith("rensa 0.")
    monkeypatch.setattr(sketches, "version", lambda name: "9.0")
    with pytest.raises(ConfigError, match="results of other inputs or settings"):
        dedup([source], tmp_path / "out")


def test_folders_that_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    write_table(folder / "texts.jsonl", Table(rows=rows(TEXTS)))
    with pytest.raises(ConfigError, match="do not contain each other"):
        dedup([folder], folder / "out")
    with pytest.raises(ConfigError, match="do not contain each other"):
        dedup([folder], tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine").write_text("keep")
    with pytest.raises(ConfigError, match="holds other files"):
        dedup([folder], other)
    with pytest.raises(ConfigError, match="is no folder"):
        dedup([folder], other / "mine")
    with pytest.raises(ConfigError, match=rf"^--out {tmp_path}, which overlaps the input {folder}\n"):
        dedup([folder], tmp_path)
    (other / "link").symlink_to("nothing")
    with pytest.raises(ConfigError, match="which is a link to no folder"):
        dedup([folder], other / "link")
    (other / "loop").symlink_to("loop")
    for name in ("mine/x", "k" * 300, "loop/x"):
        with pytest.raises(ConfigError, match=r"which cannot be written: (.*\n)*  try:  another folder \(--out\)"):
            dedup([folder], other / name)
    assert sorted(os.listdir(other)) == ["link", "loop", "mine"]
    assert sorted(os.listdir(tmp_path)) == ["other", "texts"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": 5}\n', "row 0, field 'text': 5 \\(int\\)"),
        (b'{"text": "a"}\n{"body": "b"}\n', "has no column 'text'"),
        (b'{"text": "a"}\nno json\n', "line 2 at offset 14"),
        (b'{"text": "\xff"}\n', "line 1 at offset 0"),
    ],
)
def test_rows_without_text(tmp_path: Path, content: bytes, message: str) -> None:
    source = tmp_path / "texts.jsonl"
    source.write_bytes(content)
    with pytest.raises(DataError, match=message):
        dedup([source], tmp_path / "out")


def test_inputs_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="it is not there"):
        dedup([tmp_path / "none.jsonl"], tmp_path / "out")
    with (tmp_path / "two.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["title", "body"], ["a", "b"]])
    with pytest.raises(DataError, match="--column NAME"):
        dedup([tmp_path / "two.csv"], tmp_path / "first")
    assert dedup([tmp_path / "two.csv"], tmp_path / "second", column="body").kept == 1
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "two.csv").write_bytes((tmp_path / "two.csv").read_bytes())
    both = dedup([tmp_path / "two.csv", tmp_path / "sub" / "two.csv"], tmp_path / "third", column="body")
    assert (both.kept, sorted(tree(tmp_path / "third" / "data"))) == (1, ["two.csv"])
    with pytest.raises(DataError, match="files that are given twice"):
        dedup([tmp_path / "sub", tmp_path / "sub" / "two.csv"], tmp_path / "twice", column="body")
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"bad\.txt: it is UTF-16, not UTF-8"):
        dedup([tmp_path / "bad.txt"], tmp_path / "fourth")


def test_a_file_that_changes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "texts.jsonl"
    write_table(source, Table(rows=rows(TEXTS)))
    real = sketch_folder.make_chunk

    def change(texts: list[bytes], recipe: CleanRecipe, benchmark_hashes: Any) -> bytes:
        source.write_text('{"text": "new"}\n')
        return real(texts, recipe, benchmark_hashes)

    monkeypatch.setattr(sketch_folder, "make_chunk", change)
    with pytest.raises(DataError, match="has changed meanwhile"):
        dedup([source], tmp_path / "out", workers=0)
    assert not (tmp_path / "out" / "report.json").exists()


def test_an_empty_table(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").touch()
    result = dedup([tmp_path / "none.jsonl"], tmp_path / "out")
    assert (result.documents, result.kept) == (0, 0)
    assert np.load(tmp_path / "out" / "kept" / "none.jsonl.npy").tolist() == []


def test_lone_surrogates_are_text(tmp_path: Path) -> None:
    source = tmp_path / "texts.jsonl"
    source.write_text('{"text": "\\ud800 a b c"}\n{"text": "\\ud800 a b c"}\n')
    assert exact(dedup([source], tmp_path / "out")) == 1


def test_files_of_a_set_keep_their_names(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    for number in range(2):
        write_table(tmp_path / "part.parquet", Table(rows=rows(TEXTS)))
        (tmp_path / "part.parquet").rename(tmp_path / f"part-0000{number}-of-00002.parquet")
    result = dedup([tmp_path / "part-00000-of-00002.parquet"], tmp_path / "out")
    assert (result.documents, result.kept) == (10, 3)
    assert sorted(tree(tmp_path / "out" / "data")) == ["part-00000-of-00002.parquet"]


def test_one_file_of_a_set_of_mindrecord(tmp_path: Path) -> None:
    write_table(tmp_path / "a.mindrecord", Table(rows=rows(TEXTS)))
    (tmp_path / "a.mindrecord").rename(tmp_path / "a.mindrecord0")
    with pytest.raises(DataError, match="one of a set of MindRecord files"):
        dedup([tmp_path / "a.mindrecord0"], tmp_path / "out")


def test_a_damaged_report(tmp_path: Path) -> None:
    source = tmp_path / "texts.jsonl"
    write_table(source, Table(rows=rows(TEXTS)))
    dedup([source], tmp_path / "out")
    for content in (b"{", b'{"documents": "many"}', b"[]"):
        (tmp_path / "out" / "report.json").write_bytes(content)
        with pytest.raises(ConfigError, match="which is no report"):
            dedup([source], tmp_path / "out")


def test_no_inputs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no input"):
        dedup([], tmp_path / "out")


def test_a_format_that_is_only_read(tmp_path: Path) -> None:
    (tmp_path / "a.tfrecord").write_bytes(b"")
    with pytest.raises(DataError, match="--index-only writes their row indices"):
        dedup([tmp_path / "a.tfrecord"], tmp_path / "out")
    assert dedup([tmp_path / "a.tfrecord"], tmp_path / "out", index_only=True).documents == 0
