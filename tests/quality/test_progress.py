"""Stages of data jobs: in order, never back, and to their ends; a job that goes on counts what it finds done."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import planted
import pytest
from pictures import write_photographs

from unisono.data.convert.table_files import Table, write_table
from unisono.quality.balance import balance
from unisono.quality.clean import clean
from unisono.quality.columns import changes as column_changes
from unisono.quality.columns.check import ColumnOptions, check_columns
from unisono.quality.duplicates import sketch_folder
from unisono.quality.file_meter import UNMETERED, FileMeter
from unisono.quality.labels.label_errors import find_label_errors
from unisono.quality.labels.relabel import relabel
from unisono.quality.leak import find_leaks
from unisono.quality.options import (
    CleanRecipe,
    DecontaminateOptions,
    DuplicateOptions,
    FilterOptions,
    only_dedup,
)
from unisono.quality.split import split

pytest.importorskip("rensa")

RECIPE = CleanRecipe(filter=FilterOptions(min_mean_word_chars=0))


@dataclass
class ToldStage:
    name: str
    total: int
    unit: str
    told: list[int] = field(default_factory=list)  # how much was done, as it was told


class Told:
    """What a job has told."""

    def __init__(self) -> None:
        self.stages: list[ToldStage] = []

    def begin(self, stage: str, total: int, unit: str, *, done: int = 0) -> None:
        self.stages.append(ToldStage(stage, total, unit, [done]))

    def advance(self, count: int) -> None:
        assert count >= 0
        told = self.stages[-1].told
        told.append(told[-1] + count)

    def names(self) -> list[str]:
        for stage in self.stages:
            assert stage.told[-1] == stage.total, stage.name
        return [stage.name for stage in self.stages]

    def of(self, name: str) -> ToldStage:
        (found,) = [stage for stage in self.stages if stage.name == name]
        return found


def rows(count: int = 120) -> list[dict[str, Any]]:
    """Documents with classes, of which every tenth has a near copy."""
    rng = np.random.default_rng(3)
    texts = planted.documents(count, rng)
    texts += [planted.edited(text, 1, rng) for text in texts[::10]]
    return [{"text": text, "label": "ab"[number % 2], "n": number} for number, text in enumerate(texts)]


def table(path: Path, count: int = 120) -> Path:
    write_table(path, Table(rows=rows(count)))
    return path


@pytest.mark.parametrize(
    ("suffix", "workers"), [(".jsonl", 0), (".jsonl", 2), (".csv", 0), (".parquet", 0), (".mindrecord", 0), (".tar", 0)]
)
def test_stages_of_a_table(tmp_path: Path, suffix: str, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    monkeypatch.setattr(sketch_folder, "CHUNK_DOCUMENTS", 40)
    source, told = table(tmp_path / f"all{suffix}"), Told()
    result = clean([source], tmp_path / "out", RECIPE, workers=workers, progress=told)
    assert result.dropped["dedup.near"] == 12
    assert told.names() == ["reading", "grouping", "comparing", "writing", "reporting"]
    reading = told.of("reading")
    assert (reading.total, reading.unit) == (source.stat().st_size, "bytes")
    if suffix != ".tar":  # whose headers are larger than such rows
        assert sum(reading.total // 8 < done < reading.total * 0.95 for done in reading.told) == 3  # of four chunks
    assert told.of("writing").total == result.kept
    assert told.of("comparing").total >= 24


def test_bytes_of_lines_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketch_folder, "CHUNK_DOCUMENTS", 33)
    source, told = table(tmp_path / "all.jsonl"), Told()
    clean([source], tmp_path / "out", RECIPE, workers=0, progress=told)
    ends = np.cumsum([len(line) for line in source.read_bytes().splitlines(keepends=True)]).tolist()
    assert told.of("reading").told == [0, ends[32], ends[65], ends[98], ends[131], ends[131]]


def test_files_of_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketch_folder, "CHUNK_DOCUMENTS", 3)
    folder, told = tmp_path / "texts", Told()
    folder.mkdir()
    for number, row in enumerate(rows(6)):
        (folder / f"{number}.txt").write_text(row["text"])
    sizes = [path.stat().st_size for path in sorted(folder.iterdir())]
    clean([folder], tmp_path / "out", only_dedup(DuplicateOptions(near=0.0)), progress=told)
    assert told.names() == ["reading", "writing", "reporting"]
    assert told.of("reading").told[:3] == [0, sum(sizes[:3]), sum(sizes[:6])]
    assert told.of("writing").told == [*range(8)]


def test_a_job_that_goes_on_counts_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketch_folder, "CHUNK_DOCUMENTS", 20)
    source = table(tmp_path / "all.jsonl")
    made: list[int] = []
    real = sketch_folder.make_chunk

    def interrupted(texts: list[bytes], recipe: CleanRecipe, benchmark_hashes: Any) -> bytes:
        if len(made) == 4:
            raise KeyboardInterrupt
        made.append(len(texts))
        return real(texts, recipe, benchmark_hashes)

    first = Told()
    with monkeypatch.context() as patch:
        patch.setattr(sketch_folder, "make_chunk", interrupted)
        with pytest.raises(KeyboardInterrupt):
            clean([source], tmp_path / "out", RECIPE, workers=0, progress=first)
    again = Told()
    clean([source], tmp_path / "out", RECIPE, workers=0, progress=again)
    assert again.names()[0] == "reading"
    assert again.of("reading").told[0] == first.of("reading").told[-1] > 0
    assert len(again.of("reading").told) == 1 + 3 + 1  # of seven chunks four were there
    whole = Told()
    clean([source], tmp_path / "whole", RECIPE, workers=0, progress=whole)
    assert whole.of("reading").told == [*first.of("reading").told, *again.of("reading").told[1:]]


def test_stages_of_a_job_that_is_done(tmp_path: Path) -> None:
    source, told = table(tmp_path / "all.jsonl", 20), Told()
    first = clean([source], tmp_path / "out", RECIPE)
    assert clean([source], tmp_path / "out", RECIPE, progress=told) == first
    assert told.stages == []


def test_stages_with_a_benchmark(tmp_path: Path) -> None:
    benchmark = table(tmp_path / "benchmark.jsonl", 5)
    recipe = CleanRecipe(
        filter=FilterOptions(enabled=False),
        decontaminate=DecontaminateOptions(against=(str(benchmark),)),
        dedup=DuplicateOptions(enabled=False),
    )
    told = Told()
    clean([table(tmp_path / "all.jsonl", 20)], tmp_path / "out", recipe, progress=told)
    assert told.names() == ["reading benchmarks", "reading", "writing", "reporting"]
    assert told.of("reading benchmarks").total == benchmark.stat().st_size


def test_bytes_of_a_benchmark_with_two_columns(tmp_path: Path) -> None:
    benchmark = table(tmp_path / "benchmark.jsonl", 5)
    recipe = CleanRecipe(
        filter=FilterOptions(enabled=False),
        decontaminate=DecontaminateOptions(against=(str(benchmark),), columns=("text", "label")),
        dedup=DuplicateOptions(enabled=False),
    )
    told = Told()
    clean([table(tmp_path / "all.jsonl", 20)], tmp_path / "out", recipe, progress=told)
    assert told.names()[0] == "reading benchmarks"
    assert told.of("reading benchmarks").total == 2 * benchmark.stat().st_size


@pytest.mark.parametrize("bad", ["no JSON", '{"text": "without a label"}'])
def test_stages_with_a_document_that_is_left_out(tmp_path: Path, bad: str) -> None:
    source, told = tmp_path / "all.jsonl", Told()
    source.write_text("".join(json.dumps(row) + "\n" for row in rows(20)) + bad + "\n")
    parts = {"train": Fraction(3, 4), "test": Fraction(1, 4)}
    split([source], tmp_path / "parts", parts, class_field="label", skips_unreadable=True, progress=told)
    assert told.names() == ["reading", "reading classes", "grouping", "comparing", "writing", "reporting"]
    assert told.of("writing").total == 22


def test_stages_of_images(tmp_path: Path) -> None:
    write_photographs(tmp_path / "images", range(5))
    told = Told()
    clean([tmp_path / "images"], tmp_path / "out", progress=told)
    assert told.names() == ["reading", "comparing", "writing", "reporting"]
    assert (told.of("comparing").total, told.of("comparing").unit) == (10, "pairs")


def test_stages_of_leak_and_split(tmp_path: Path) -> None:
    train, test = table(tmp_path / "train.jsonl"), table(tmp_path / "test.jsonl", 20)
    told = Told()
    find_leaks(train, [test], progress=told)
    assert told.names() == ["reading", "grouping", "comparing"]
    told = Told()
    find_leaks(train, [test], out=tmp_path / "leaks", progress=told)
    assert told.names() == ["reading", "grouping", "comparing", "writing", "reporting"]
    told = Told()
    parts = {"train": Fraction(3, 4), "test": Fraction(1, 4)}
    split([train], tmp_path / "parts", parts, class_field="label", group_field="n", progress=told)
    assert told.names() == [
        "reading",
        "reading groups",
        "reading classes",
        "grouping",
        "comparing",
        "writing",
        "reporting",
    ]
    assert (told.of("writing").total, told.of("writing").unit) == (132, "documents")


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".mindrecord", ".parquet"])
def test_stages_of_labels(tmp_path: Path, suffix: str) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    source, told = table(tmp_path / f"all{suffix}", 40), Told()
    find_label_errors([source], tmp_path / "labels", "label", progress=told)
    assert told.names() == ["reading", "reading labels", "grouping", "comparing", "reporting"]
    page = (tmp_path / "labels/report.html").read_text()
    about = page.partition('id="marked-data">')[2].partition("</script>")[0]
    (tmp_path / "marks.json").write_text(json.dumps({**json.loads(about)["about"], "marks": []}))
    told = Told()
    relabel([source], tmp_path / "relabelled", tmp_path / "marks.json", progress=told)
    assert told.names() == ["reading", "reading labels", "writing", "reporting"]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_stages_of_columns(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    tables = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for path in tables:
        write_table(
            path, Table(rows=[{"x": 1.0 + number % 7 if number else 1e9, "t": number} for number in range(200)])
        )
    options = ColumnOptions(time="t", mask=("outlier",), unify=True)
    told = Told()
    with monkeypatch.context() as patch:
        patch.setattr(column_changes, "new_file", interrupt)
        with pytest.raises(KeyboardInterrupt):
            check_columns(tables, out=tmp_path / "out", options=options, progress=told)
    again = Told()
    result = check_columns(tables, out=tmp_path / "out", options=options, progress=again)
    assert result.changes is not None
    assert sum(result.changes.masked.values()) == 2
    size = sum(path.stat().st_size for path in tables)
    assert (told.of("reading").told[0], told.of("reading").told[-1]) == (0, size)
    assert again.names() == ["reading", "judging", "writing", "reporting"]
    assert again.of("reading").told == [size]  # it has read all files
    assert again.of("judging").told == [0, 1, 2]
    assert again.of("writing").told == [0, 200, 400]


def interrupt(*_: object) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_stages_of_balance(tmp_path: Path, suffix: str) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    source, told = table(tmp_path / f"all{suffix}", 20), Told()
    balance([source], tmp_path / "out", field="label", progress=told)
    assert told.names() == ["reading", "reporting"]
    assert (told.of("reading").total, told.of("reading").unit) == (source.stat().st_size, "bytes")
    assert len(told.of("reading").told) >= 20


def test_bytes_of_a_file_add_up() -> None:
    told: list[int] = []
    meter = FileMeter(100, told.append)
    assert list(meter.shares("abc", 3)) == ["a", "b", "c"]
    assert told == [33, 33, 34]
    meter.end()
    assert told == [33, 33, 34]
    told.clear()
    meter = FileMeter(100, told.append)
    assert len(list(meter.rows(Table(rows=[{"a": "x" * 40}] * 5)))) == 5  # more than the file has
    assert told == [40, 40, 20]
    assert len(list(UNMETERED.rows(Table(rows=[{"a": "x"}] * 5, count=5)))) == 5
