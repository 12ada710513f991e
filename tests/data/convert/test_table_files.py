"""Rows survive any way through the formats, and what a format cannot hold is an error that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unisono.data.convert.table_files import convert
from unisono.data.mindrecord import MindRecordFile, MindRecordWriter
from unisono.data.recordio import RecordFile, RecordWriter
from unisono.errors import DataError

PAYLOADS = [b"\0\xff" * number + b"x" for number in range(9)]


@pytest.fixture
def rec(tmp_path: Path) -> Path:
    with RecordWriter(tmp_path / "a.rec") as writer:
        for number, payload in enumerate(PAYLOADS):
            writer.write(payload, key=3 * number, side={"label": number % 4, "score": number / 8})
    return tmp_path / "a.rec"


@pytest.mark.parametrize("way", [[".mindrecord"], [".jsonl"], [".mindrecord", ".jsonl"], [".jsonl", ".mindrecord"]])
def test_recordio_comes_back_with_keys_and_columns(rec: Path, tmp_path: Path, way: list[str]) -> None:
    at = rec
    for number, suffix in enumerate(way):
        assert convert(at, tmp_path / f"{number}{suffix}") == len(PAYLOADS)
        at = tmp_path / f"{number}{suffix}"
    assert convert(at, tmp_path / "back.rec") == len(PAYLOADS)
    assert (tmp_path / "back.rec").read_bytes() == rec.read_bytes()
    assert (tmp_path / "back.idx").read_bytes() == rec.with_suffix(".idx").read_bytes()
    back = RecordFile(tmp_path / "back.rec")
    assert back.side["label"].tolist() == [number % 4 for number in range(9)]
    assert back.side["score"].tolist() == [number / 8 for number in range(9)]


def test_mindrecord_keeps_types_through_json(tmp_path: Path) -> None:
    schema = {"i": "int64", "f": "float64", "s": "string", "a": {"type": "int64", "shape": [-1]}, "b": "bytes"}
    rows = [{"i": n, "f": n / 3, "s": f"ü{n}", "a": np.arange(n + 1), "b": bytes([n])} for n in range(5)]
    with MindRecordWriter(tmp_path / "a.mindrecord", schema) as writer:
        for row in rows:
            writer.write(row)
    assert convert(tmp_path / "a.mindrecord", tmp_path / "b.jsonl") == 5
    assert convert(tmp_path / "b.jsonl", tmp_path / "c.mindrecord") == 5
    for one, two in zip(MindRecordFile(tmp_path / "c.mindrecord"), rows, strict=True):
        assert one.keys() == two.keys()
        assert one["a"].tolist() == two["a"].tolist()
        assert {name: one[name] for name in "ifsb"} == {name: two[name] for name in "ifsb"}


@pytest.mark.parametrize(
    ("rows", "given"),
    [
        ([{"text": "only"}], "row 0 with text (str) as a RecordIO record"),
        ([{"a": b"1", "b": b"2"}], "row 0 with a (bytes), b (bytes) as a RecordIO record"),
        ([{"label": 3}], "row 0 with no bytes as a RecordIO record"),
        ([{"data": b"1", "key": 0.5}], "row 0 with key 0.5"),
    ],
)
def test_rows_that_are_no_records(tmp_path: Path, rows: list[dict[str, Any]], given: str) -> None:
    schema = {
        name: {"str": "string", "bytes": "bytes", "int": "int64", "float": "float64"}[type(v).__name__]
        for name, v in rows[0].items()
    }
    with MindRecordWriter(tmp_path / "a.mindrecord", schema) as writer:
        for row in rows:
            writer.write(row)
    with pytest.raises(DataError) as caught:
        convert(tmp_path / "a.mindrecord", tmp_path / "b.rec")
    assert str(caught.value).startswith(given)
    assert not (tmp_path / "b.rec").exists()


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("[1]", "it is no object"),
        ('{"a": null}', "null is no number, string, list or bytes"),
        ('{"a": [true, 1]}', "a list inside a row is of strings, or of numbers: "),
        ('{"a": [9007199254740993, 0.5]}', "a list inside a row is of strings, or of numbers: "),
        ('{"a": [9223372036854775808]}', "a list inside a row is of strings, or of numbers: "),
        ('{"a": 1, "a": 2}', "it has a name twice"),
        ('{"a": {"b": 1}}', 'field \'a\': an object other than {"base64": "…"}'),
        ('{"a": {"base64": "?"}}', "base64: "),
        ('{"a": ["x", 1]}', "a list inside a row is of strings, or of numbers: "),
        ('{"a": ["x", null]}', "a list inside a row is of strings, or of numbers: "),
        ('{"a": ' + "[" * 900 + "]" * 900 + "}", "more than 100 lists inside each other"),
        ('{"a": [["x"]]}', "a list inside a row is of strings, or of numbers: "),
        ('{"a"', "Expecting ':' delimiter"),
    ],
)
def test_lines_that_are_no_rows_are_named(tmp_path: Path, line: str, what: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n' + line + "\n")
    with pytest.raises(DataError) as caught:
        convert(tmp_path / "a.jsonl", tmp_path / "b.mindrecord")
    assert str(caught.value).startswith(f"{tmp_path}/a.jsonl: line 2 at offset 9: ")
    assert what in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl"]


def test_lines_of_json_keep_values_that_no_row_holds(tmp_path: Path) -> None:
    rows = ['{"text": "é", "meta": {"a": [1, 2.5, null]}, "n": null}', '{"text": "b", "meta": 18446744073709551616}']
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    assert convert(tmp_path / "a.jsonl", tmp_path / "b.jsonl") == 2
    assert (tmp_path / "b.jsonl").read_text() == "".join(row + "\n" for row in rows)
    convert(tmp_path / "a.jsonl", tmp_path / "c.jsonl", columns=["meta"])
    assert (tmp_path / "c.jsonl").read_text().splitlines()[0] == '{"meta": {"a": [1, 2.5, null]}}'
    with pytest.raises(DataError, match="has no column 'n'"):
        convert(tmp_path / "a.jsonl", tmp_path / "d.jsonl", columns=["n"])
    with pytest.raises(DataError) as caught:
        convert(tmp_path / "a.jsonl", tmp_path / "b.mindrecord")
    assert str(caught.value) == (
        f'{tmp_path}/a.jsonl: line 1 at offset 0: field \'meta\': an object other than {{"base64": "…"}}\n'
        "  rule: a line is one JSON object; values are numbers, strings, lists of numbers or of strings, and bytes as "
        '{"base64": …}\n'
        "  so:   nothing from there on was read\n"
        "  try:  its members as fields of their own; or a table without the field: unisono data convert "
        f"{tmp_path}/a.jsonl NEW --column text --column n"
    )


def test_a_field_that_is_asked_for_is_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "meta": {"a": 1}}\n')
    with pytest.raises(DataError) as caught:
        convert(tmp_path / "a.jsonl", tmp_path / "b.mindrecord", columns=["text", "meta"])
    assert caught.value.problems[0].nearest == "its members as fields of their own"


def test_numbers_json_does_not_have(tmp_path: Path) -> None:
    with MindRecordWriter(tmp_path / "a.mindrecord", {"f": "float64", "n": "int64"}, index_fields=["n"]) as writer:
        writer.write({"f": float("inf"), "n": 1})
    with pytest.raises(DataError, match="row 0: Out of range float values are not JSON compliant"):
        convert(tmp_path / "a.mindrecord", tmp_path / "b.jsonl")
    assert not (tmp_path / "b.jsonl").exists()


def test_suffixes_and_existing_targets(rec: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        convert(rec, tmp_path / "a.tfrecord")
    assert str(caught.value) == (
        f"{tmp_path}/a.tfrecord, whose suffix is '.tfrecord'\n"
        "  rule: the suffix names the format, written are .rec, .mindrecord, .jsonl, .parquet, .tar, .csv\n"
        "  so:   nothing was written\n"
        "  try:  one of .rec, .mindrecord, .jsonl, .parquet, .tar, .csv"
    )
    (tmp_path / "b.jsonl").write_text("mine")
    with pytest.raises(DataError, match="which exists"):
        convert(rec, tmp_path / "b.jsonl")
    with pytest.raises(DataError, match="whose folder does not exist"):
        convert(rec, tmp_path / "nowhere" / "b.jsonl")
    assert (tmp_path / "b.jsonl").read_text() == "mine"
    assert convert(rec, tmp_path / "b.jsonl", overwrite=True) == 9
    assert json.loads((tmp_path / "b.jsonl").read_text().splitlines()[2])["label"] == 2


def test_an_empty_source(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(DataError, match="a source without rows"):
        convert(tmp_path / "a.jsonl", tmp_path / "b.mindrecord")
    assert convert(tmp_path / "a.jsonl", tmp_path / "b.rec") == 0
    assert list(RecordFile(tmp_path / "b.rec")) == []
