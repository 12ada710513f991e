"""Quotes of benchmarks: what is quoted is named, what is not looked for is counted, and no place in a document hides a quote."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import planted
import pytest

from unisono.data.convert.table_files import Table, write_table
from unisono.errors import ConfigError, DataError
from unisono.quality.clean import CleanResult, clean
from unisono.quality.duplicates import shingles
from unisono.quality.options import (
    CleanRecipe,
    DecontaminateOptions,
    DuplicateOptions,
    FilterOptions,
    MaskOptions,
    NormalizeOptions,
)

WORDS = 13  # in a row, by default


def recipe(*against: Path, **settings: Any) -> CleanRecipe:
    """Only the step against benchmarks, and those that ``settings`` turn on."""
    options = {name: settings.pop(name) for name in ("ngram", "columns") if name in settings}
    return replace(
        CleanRecipe(
            normalize=NormalizeOptions(enabled=False),
            filter=FilterOptions(enabled=False),
            decontaminate=DecontaminateOptions(against=tuple(map(str, against)), **options),
            dedup=DuplicateOptions(enabled=False),
        ),
        **settings,
    )


def table(path: Path, *rows: dict[str, Any] | str) -> Path:
    write_table(path, Table(rows=[{"text": row} if isinstance(row, str) else row for row in rows]))
    return path


def dropped(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "dropped.jsonl").read_text().splitlines()]


def texts(count: int, seed: int = 0) -> list[str]:
    return planted.documents(count, np.random.default_rng(seed), words=(40, 60))


def test_a_dropped_quote_names_its_benchmark_and_the_words(tmp_path: Path) -> None:
    first, second, third, *others = texts(6)
    benchmarks = [table(tmp_path / "a.jsonl", "too short", first), table(tmp_path / "b.jsonl", second, third)]
    quote = " ".join(third.split()[20 : 20 + WORDS])
    documents = [f"{others[0]} {quote.upper()}! {others[1]}", others[2], f"{others[1]} {first}"]
    source = table(tmp_path / "data.jsonl", *documents)
    for workers in (0, 2):
        clean([source], tmp_path / str(workers), recipe(*benchmarks), workers=workers)
        whole = {"quote_of": {"file": "a.jsonl", "row": 1}, "ngram": " ".join(first.split()[:WORDS])}
        assert dropped(tmp_path / str(workers)) == [
            {
                **{"file": "data.jsonl", "row": 0, "reason": "decontaminate"},
                **{"quote_of": {"file": "b.jsonl", "row": 1}, "ngram": quote},
            },
            {"file": "data.jsonl", "row": 2, "reason": "decontaminate", **whole},
        ]


def test_the_words_of_a_quote_hold_no_personal_data(tmp_path: Path) -> None:
    item = "write to me@example.org " + texts(1)[0]
    benchmark, source = table(tmp_path / "b.jsonl", item), table(tmp_path / "a.jsonl", f"so {item}")
    clean([source], tmp_path / "out", recipe(benchmark, mask=MaskOptions(kinds=("email",))))
    (record,) = dropped(tmp_path / "out")
    assert record["ngram"].split()[:4] == ["write", "to", "email", item.split()[3]]
    assert "example" not in (tmp_path / "out" / "dropped.jsonl").read_text()


def test_items_that_are_too_short_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    long, *others = texts(3)
    twelve = " ".join(long.split()[: WORDS - 1])
    paths = [table(tmp_path / "a.jsonl", twelve, long, "how many?"), table(tmp_path / "b.jsonl", long)]
    (tmp_path / "c.txt").write_text("")
    source = table(tmp_path / "data.jsonl", f"{twelve} and {twelve}", *others)
    with caplog.at_level(logging.WARNING):
        result = clean([source], tmp_path / "out", recipe(*paths, tmp_path / "c.txt"))
    assert (result.benchmark_items, result.unchecked_items) == (5, {"a.jsonl": 2, "c.txt": 1})
    assert result.dropped == {}
    assert "3 of 5 items have fewer than 13 words" in caplog.text
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["unchecked_items"] == result.unchecked_items
    assert "3 of 5 items of the benchmarks have fewer than 13 words" in (tmp_path / "out" / "report.html").read_text()
    table(paths[0], twelve, long)  # the n-grams are the same, the report is not
    with pytest.raises(ConfigError, match="results of other inputs or settings"):
        clean([source], tmp_path / "out", recipe(*paths, tmp_path / "c.txt"))
    shorter = clean([source], tmp_path / "shorter", recipe(*paths, ngram=12))
    assert (shorter.unchecked_items, shorter.dropped) == ({}, {"decontaminate": 1})


def by_columns(tmp_path: Path, *names: str) -> CleanResult:
    out = tmp_path / ("-".join(names) or "none")
    return clean([tmp_path / "data.jsonl"], out, recipe(tmp_path / "b.jsonl", tmp_path / "note.txt", columns=names))


def test_each_column_of_a_benchmark_is_an_item(tmp_path: Path) -> None:
    question, answer, note, *others = texts(5)
    table(tmp_path / "b.jsonl", {"question": question, "answer": answer, "id": 7}, {"question": "a b", "answer": "c"})
    (tmp_path / "note.txt").write_text(note)
    across = " ".join([*question.split()[-8:], *answer.split()[:8]])
    table(tmp_path / "data.jsonl", f"x {question}", f"y {answer}", across, *others, f"z {note}")
    both = by_columns(tmp_path, "question", "answer")
    assert (both.benchmark_items, both.unchecked_items) == (5, {"b.jsonl": 2})  # the whole file is one item, once
    assert [(each["row"], each["quote_of"]) for each in dropped(tmp_path / "question-answer")] == [
        (0, {"file": "b.jsonl", "row": 0, "column": "question"}),
        (1, {"file": "b.jsonl", "row": 0, "column": "answer"}),
        (5, {"file": "note.txt", "row": 0}),
    ]
    assert by_columns(tmp_path, "answer").dropped == {"decontaminate": 2}
    with pytest.raises(DataError, match="answers"):
        by_columns(tmp_path, "answers")


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "columns", "given"),
    [
        ("b.jsonl", '{"text": "a"}\n', ("answers",), "has no column 'answers'"),
        (
            "b.csv",
            "text\na\n",
            ("answers",),
            "a benchmark of decontaminate.against: the source has no column 'answers'",
        ),
        ("b.jsonl", '{"text": "a"}\n{"text": null}\n', (), "b.jsonl: line 2 .*null"),
        ("b.csv", "text,n\na,1\nb,2\n", ("n",), "row 0, field 'n'"),
        ("b.csv", "question,answer\na,b\n", (), "whose fields are 'question', 'answer'"),
    ],
)
def test_errors_of_benchmarks_name_the_setting_that_helps(
    tmp_path: Path, name: str, content: str, columns: tuple[str, ...], given: str, skips: bool
) -> None:
    """``--on-error skip`` leaves out documents, and no items of a benchmark; ``--column`` is that of the documents, too."""
    (tmp_path / name).write_text(content)
    source = table(tmp_path / "data.jsonl", *texts(2))
    with pytest.raises(DataError, match=given) as raised:
        clean([source], tmp_path / "out", recipe(tmp_path / name, columns=columns), skips_unreadable=skips)
    assert "try:  decontaminate.columns with the fields of text" in str(raised.value)
    assert "--on-error" not in str(raised.value)
    assert "--column " not in str(raised.value)


def test_an_error_of_a_benchmark_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"a\xe9")
    with pytest.raises(DataError, match=r"a benchmark of decontaminate\.against: .*b\.txt") as raised:
        clean([table(tmp_path / "data.jsonl", *texts(2))], tmp_path / "out", recipe(tmp_path / "b.txt"))
    assert "try:  the benchmark without that file" in str(raised.value)


@pytest.mark.parametrize("shift", range(0, 230, 9))
def test_a_quote_across_two_blocks_is_found(tmp_path: Path, shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a document begin every 200 bytes or so; the quote of 13 words has some 60."""
    monkeypatch.setattr(shingles, "_BLOCK_BYTES", 200)
    item, around = texts(2, seed=3)
    quote = " ".join(item.split()[5 : 5 + WORDS])
    document = f"{'x' * 30} {around} {around}"[: 100 + shift] + f" {quote} {around} {around}"
    source, benchmark = table(tmp_path / "a.jsonl", document), table(tmp_path / "b.jsonl", item)
    assert clean([source], tmp_path / "out", recipe(benchmark), workers=0).dropped == {"decontaminate": 1}
    assert dropped(tmp_path / "out")[0]["ngram"] == quote
