"""Names and values out of a file are quoted with a limit: no file makes an error text as long as itself."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz import field, record

from unisono.data.convert import Table, convert, open_table, write_table
from unisono.data.mindrecord import MindRecordWriter
from unisono.data.recordio import RecordWriter
from unisono.data.sources import open_source
from unisono.errors import DataError

LONG = "n" * 100_000
MOST = 4_000  # characters of an error with all its parts


def table(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def jsonl(folder: Path, *rows: dict[str, Any]) -> Path:
    return table(folder / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def example(*features: tuple[str, bytes]) -> bytes:
    entries = [
        varint_field(1, varint_field(1, name.encode()) + varint_field(2, field(1, field(1, value))))
        for name, value in features
    ]
    return record(varint_field(1, b"".join(entries)))


def varint_field(number: int, content: bytes) -> bytes:
    size, length = len(content), b""
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


def parquet(folder: Path, columns: dict[str, Any]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), folder / "a.parquet")
    return folder / "a.parquet"


def tfrecord(folder: Path, content: bytes) -> Path:
    (folder / "a.tfrecord").write_bytes(content)
    return folder / "a.tfrecord"


def recordio(folder: Path) -> Path:
    with RecordWriter(folder / "a.rec") as writer:
        writer.write(b"x", side={"data": 1, LONG: 2})
    return folder / "a.rec"


def mindrecord(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    path = folder / "a.mindrecord"
    with MindRecordWriter(path, {"x": {"type": "int32", "shape": [2]}}, page_bytes=32 << 10) as writer:
        writer.write({"x": np.zeros(2, np.int32)})
    data = path.read_bytes()
    length, size = int.from_bytes(data[:8], "little"), len(data)
    head = json.loads(data[8 : 8 + length])
    change(head)
    text = json.dumps(head).encode()
    path.write_bytes((struct.pack("<Q", len(text)) + text + data[8 + len(text) :]).ljust(size, b"\0"))
    return path


def arrow(folder: Path, state: Any) -> Path:
    (folder / "d").mkdir()
    table(folder / "d" / "state.json", json.dumps(state))
    return folder / "d"


READ: dict[str, Callable[[Path], Path]] = {
    "csv, a name twice": lambda folder: table(folder / "a.csv", f"{LONG},{LONG}\n1,2\n"),
    "csv, 60,000 names twice": lambda folder: table(folder / "a.csv", "name," * 60_000 + "name\n"),
    "csv, another separator": lambda folder: table(folder / "a.csv", f"a;{LONG}\n1,2\n"),
    "tfrecord, a feature twice": lambda folder: tfrecord(
        folder, example(("a", b"1")) + example((LONG, b"1"), (LONG, b"2"))
    ),
    "parquet, a type": lambda folder: parquet(folder, {LONG: [{LONG: 1}]}),
    "parquet, a null": lambda folder: parquet(folder, {LONG: [1, None]}),
    "recordio, side columns": recordio,
    "mindrecord, a version": lambda folder: mindrecord(folder, lambda head: head.update(version=LONG)),
    "mindrecord, blob fields": lambda folder: mindrecord(
        folder, lambda head: head["schema"][0].update(blob_fields=[LONG])
    ),
    "mindrecord, a type": lambda folder: mindrecord(
        folder, lambda head: head["schema"][0]["schema"].update({LONG: {"type": LONG}})
    ),
}


@pytest.mark.parametrize("name", READ)
def test_names_in_errors_of_readers(tmp_path: Path, name: str) -> None:
    path = READ[name](tmp_path)
    with pytest.raises(DataError) as caught:
        list(open_table(path).rows)
    assert len(str(caught.value)) < MOST
    assert str(caught.value).startswith(str(path))


CONVERTED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "other fields": ([{LONG: 1}, {LONG * 2: 1}], "a.csv"),
    "thousands of other fields": ([{f"name {n}": n for n in range(20_000)}, {"a": 1}], "a.csv"),
    "another type": ([{LONG: 1}, {LONG: "a"}], "a.parquet"),
    "an array in csv": ([{LONG: [1, 2]}], "a.csv"),
    "an int beyond int64": ([{LONG: 1 << 70}], "a.csv"),
    "a field of tar": ([{LONG: True}], "a.tar"),
    "no payload": ([{LONG: "text", LONG * 2: "text"}], "a.rec"),
    "an int beyond int64 in recordio": ([{"x": {"base64": "YQ=="}, LONG: 1 << 70}], "a.rec"),
    "a name of mindrecord": ([{f"{LONG}.": 1}], "a.mindrecord"),
    "a value of mindrecord": ([{"a": 1}, {"a": LONG}], "a.mindrecord"),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_names_in_errors_of_writers(tmp_path: Path, name: str) -> None:
    rows, target = CONVERTED[name]
    with pytest.raises(DataError) as caught:
        convert(jsonl(tmp_path, *rows), tmp_path / target)
    assert len(str(caught.value)) < MOST


def test_columns_to_choose_from(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {f"{n}{LONG[:1000]}": n for n in range(1000)})
    with pytest.raises(DataError, match=r"one of: 0n.*… and \d+ more") as caught:
        list(open_table(path, columns=["x"]).rows)
    assert len(str(caught.value)) < MOST
    path = table(tmp_path / "a.csv", ",".join(f"name {n}" for n in range(10_000)) + "\n")
    with pytest.raises(DataError, match=r"columns are name 0, name 1, .* and [\d,]+ more") as caught:
        open_table(path, base64=["x"])
    assert len(str(caught.value)) < MOST
    path = tfrecord(tmp_path, example(*((f"name {n}", b"1") for n in range(10_000))))
    with pytest.raises(DataError, match=r"features are name 0, name 1, .* and [\d,]+ more") as caught:
        open_table(path, arrays=["x"])
    assert len(str(caught.value)) < MOST


@pytest.mark.parametrize("state", [{"_data_files": [{"filename": LONG}]}, {"_data_files": [{"filename": "a" * 250}]}])
def test_files_of_an_arrow_folder(tmp_path: Path, state: Any) -> None:
    with pytest.raises(DataError) as caught:
        open_source(arrow(tmp_path, state), cache_dir=tmp_path / "cache")
    assert len(str(caught.value)) < MOST


def test_splits_of_an_arrow_folder(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    table(tmp_path / "d" / "dataset_dict.json", json.dumps({"splits": [LONG] * 100}))
    with pytest.raises(DataError) as caught:
        open_source(tmp_path / "d", cache_dir=tmp_path / "cache")
    assert len(str(caught.value)) < MOST


def test_lists_of_images(tmp_path: Path) -> None:
    from unisono.data.convert.pack.image_listing import list_images

    path = table(tmp_path / "a.lst", f"{LONG}\t1\ta.png\n0\t{LONG}\ta.png\n1\t1\t{LONG}\n")
    listing = list_images(path)
    assert [len(bad.reason) < 500 and len(bad.path) < 5000 for bad in listing.bad] == [True] * 3
    with pytest.raises(DataError) as caught:
        list_images(table(tmp_path / "a.csv", f"{LONG},label\n"))
    assert len(str(caught.value)) < MOST


def test_a_table_is_written_with_names_of_any_length(tmp_path: Path) -> None:
    write_table(tmp_path / "a.csv", Table(rows=[{LONG: 1}]))
    assert list(open_table(tmp_path / "a.csv").rows) == [{LONG: 1}]
