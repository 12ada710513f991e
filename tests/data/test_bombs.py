"""Small files that ask for much: each is refused with an error that names the limit, or read, in bounded memory and time.

The limits are in ``unisono.storage.limits``. Files are read in a child process that cannot allocate more than 512 MiB.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzz import field, record
from source_files import write_arrow_folder
from states import save_steps
from untrusted import Confined, Outcome

from unisono.checkpoint.manifest import encode_commit_marker
from unisono.data.convert import Table, open_table, write_table
from unisono.data.mindrecord import MindRecordFile, MindRecordWriter
from unisono.data.sidecar import PayloadInfo, open_sidecar, write_sidecar
from unisono.errors import DataError
from unisono.storage.limits import LimitError

MIB = 1 << 20
ARROW = "data-00000-of-00001.arrow"
DEEP = b"[" * 200_000


@pytest.fixture(scope="module")
def child() -> Iterator[Confined]:
    with Confined(time_s=60) as confined:
        yield confined


def refused(outcome: Outcome, path: Path, what: str, grown_mib: float = 60) -> None:
    assert not outcome.bad, outcome.bad
    ((given, *parts),) = outcome.problems
    assert given.startswith(str(path)) or path.name in given
    assert re.search(what, given), given
    assert all(parts)
    assert outcome.grown_mib < grown_mib


# Parquet


def parquet(path: Path, values: Any, **options: Any) -> int:
    pq.write_table(pa.table({"a": values}), path, compression="zstd", **options)
    return path.stat().st_size


def repeated(texts: list[str], count: int) -> Any:
    """The texts ``count`` times, without the memory for it."""
    return pa.DictionaryArray.from_arrays(np.tile(np.arange(len(texts), dtype=np.int32), count), texts)


def test_a_long_text_many_times(tmp_path: Path, child: Confined) -> None:
    """One text of 4 MiB in a dictionary, 512 times: pyarrow would decode 256 of them, 1 GiB, at once."""
    path = tmp_path / "a.parquet"
    assert parquet(path, repeated(["x" * (4 * MIB)], 512), store_schema=False) < 1000
    outcome = child.read("table", path)
    refused(
        outcome,
        path,
        r"it expands to more than 27\d,\d{3},\d{3} bytes, the limit for a file of \d+ bytes",
        grown_mib=200,
    )


def test_texts_that_fit_are_read_whatever_their_page_holds(tmp_path: Path, child: Confined) -> None:
    path = tmp_path / "a.parquet"
    assert parquet(path, repeated(["x" * (2 * MIB), "y"], 70), store_schema=False) < 1000
    outcome = child.read("table", path)
    assert outcome.rows is not None, outcome
    assert (len(outcome.rows), len(set(outcome.rows))) == (140, 2)
    assert outcome.grown_mib < 250


@pytest.mark.full
def test_a_wide_list(tmp_path: Path, child: Confined) -> None:
    path = tmp_path / "a.parquet"
    values = pa.ListArray.from_arrays([0, 70_000_000], np.zeros(70_000_000, np.int8))
    assert parquet(path, values) < 1000
    what = (
        "its lists may have 280,000,000 bytes in one row, where a row group has at most 268,435,456, or 200 times the"
    )
    refused(child.read("table", path), path, what)


def test_a_wide_list_of_texts(tmp_path: Path, child: Confined) -> None:
    path = tmp_path / "a.parquet"
    values = pa.ListArray.from_arrays([0, 600], repeated(["x" * MIB], 600))
    assert parquet(path, values, store_schema=False) < 1000
    refused(child.read("table", path), path, "its lists may have 629,14[0-9,]+ bytes in one row")


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_a_page_that_expands(tmp_path: Path, child: Confined, version: str) -> None:
    path = tmp_path / "a.parquet"
    values = pa.array([bytes(100 * MIB)])
    assert parquet(path, values, use_dictionary=False, data_page_version=version) < 10_000
    refused(child.read("table", path), path, "a page of [0-9,]+ bytes says it has 104,85[0-9,]+ uncompressed")


@pytest.mark.full
def test_a_page_of_prefixes(tmp_path: Path, child: Confined) -> None:
    """DELTA_BYTE_ARRAY: each value repeats the one before it."""
    path = tmp_path / "a.parquet"
    text = "".join(map(chr, np.random.default_rng(0).integers(33, 126, MIB)))
    values = pa.array([text + str(n) for n in range(300)])
    assert parquet(path, values, use_dictionary=False, column_encoding={"a": "DELTA_BYTE_ARRAY"}) < 2 * MIB
    outcome = child.read("table", path)
    assert outcome.rows is not None, outcome
    assert len(set(outcome.rows)) == 300
    assert outcome.grown_mib < 250


def test_more_rows_than_the_file_can_have(tmp_path: Path, child: Confined) -> None:
    path = tmp_path / "a.parquet"
    rows = 20_000_000
    size = parquet(path, pa.nulls(rows, pa.int8()), row_group_size=rows, max_rows_per_page=rows)
    assert size < 1000
    what = f"its footer says {rows:,} rows, where a file of {size:,} bytes has at most {(1 << 20) + 1000 * size:,}"
    refused(child.read("table", path), path, what)


def test_groups_inside_each_other(tmp_path: Path, child: Confined) -> None:
    kind = pa.int8()
    for _ in range(120):
        kind = pa.struct([("a", kind)])
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": pa.array([None], kind)}), path)
    refused(child.read("table", path), path, "its schema has 1 children, or more than 100 groups inside each other")


def test_real_tables_are_far_from_the_limits(tmp_path: Path) -> None:
    """Masks of ones, empty lists, categories and a long text among short ones, at a ratio of several thousand."""
    rows = 20_000
    columns = {
        "ids": pa.array([np.arange(64) + n for n in range(rows)]),
        "mask": pa.array([np.ones(64, np.int64)] * rows),
        "kind": pa.array(["a" * 30, "b", "c" * 1000, "d"] * (rows // 4)),
        "text": pa.array([f"{n}" * 5 for n in range(rows)]),
        "none": pa.array([[]] * rows, pa.list_(pa.int64())),
        "zero": pa.array(np.zeros(rows)),
    }
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns), path)
    read = list(open_table(path).rows)
    assert len(read) == rows
    assert [row["kind"][:1] for row in read[:5]] == ["a", "b", "c", "d", "a"]
    assert sum(int(row["mask"].sum()) for row in read) == 64 * rows


# TFRecord


def varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def long_field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + varint(len(content)) + content


def example(feature: bytes) -> bytes:
    return record(long_field(1, long_field(1, field(1, b"a") + long_field(2, feature))))


@pytest.mark.parametrize(
    ("feature", "values"),
    [
        (long_field(3, long_field(1, b"\1" * (10 * MIB))), np.ones(10 * MIB, np.int64)),
        (long_field(3, b"\x08\1" * (5 * MIB)), np.ones(5 * MIB, np.int64)),
        (long_field(3, b"\x08\xac\x02" * MIB), np.full(MIB, 300, np.int64)),
        (long_field(2, b"\x0d\0\0\x80\x3f" * (2 * MIB)), np.ones(2 * MIB, np.float32)),
    ],
    ids=["packed", "single", "single of two bytes", "floats"],
)
def test_ten_megabytes_of_numbers_are_read(feature: bytes, values: Any, tmp_path: Path, child: Confined) -> None:
    path = tmp_path / "a.tfrecord"
    path.write_bytes(example(feature))
    outcome = child.read("table", path)
    assert outcome.rows is not None, outcome
    assert (
        outcome.grown_mib < 250
    )  # the numbers themselves are 80 MiB, and are there twice: as the first row and as a row
    (row,) = open_table(path).rows
    np.testing.assert_array_equal(row["a"], values, strict=True)


@pytest.mark.parametrize(
    ("feature", "what"),
    [
        (long_field(3, long_field(1, b"\1" * (33 * MIB))), "34,603,008 integers, where 33,554,432 are the most"),
        (long_field(3, b"\x0a\0" * MIB), "65,537 parts of a list of ints, where 65,536 are the most"),
        (long_field(1, b"\x0a\2ab" * MIB), "65,537 values of a list of bytes, where 65,536 are the most"),
    ],
    ids=["integers", "parts", "texts"],
)
def test_lists_of_an_example(feature: bytes, what: str, tmp_path: Path, child: Confined) -> None:
    path = tmp_path / "a.tfrecord"
    path.write_bytes(example(feature))
    refused(child.read("table", path), path, f"record 0 at offset 0: {what}", grown_mib=200)


# JSON and text


@pytest.mark.parametrize(
    ("kind", "name", "content"),
    [
        ("table", "a.jsonl", b'{"a":' + DEEP + b"\n"),
        ("strategy", "plan.json", b'{"mesh":' + DEEP),
        ("header", "a.safetensors", struct.pack("<Q", 200_005) + b'{"a":' + DEEP + bytes(9)),
        ("mindrecord", "a.mindrecord", struct.pack("<Q", 200_005) + b'{"a":' + DEEP + bytes(9)),
    ],
)
def test_lists_inside_each_other(kind: str, name: str, content: bytes, tmp_path: Path, child: Confined) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    refused(child.read(kind, path), path, "JSON with more than 100 lists and objects inside each other")


def test_a_deep_or_endless_event_is_a_damaged_line(tmp_path: Path, child: Confined) -> None:
    path = tmp_path / "rank00000.jsonl"
    good = b'{"kind": "step", "step": 1, "attempt": 1}\n'
    path.write_bytes(good + b'{"kind": ' + DEEP + b"\n" + good)
    assert len(child.read("events", path).rows or ()) == 2
    path.write_bytes(good + b'{"kind": "' + b"a" * (40 * MIB) + b'"}\n' + good)
    outcome = child.read("events", path)
    assert len(outcome.rows or ()) == 2
    assert outcome.grown_mib < 80


def test_a_deep_header_of_a_sidecar(tmp_path: Path, child: Confined) -> None:
    import xxhash

    text = b'{"kind":' + DEEP
    fixed = struct.pack("<8sIIQ", b"unisidx\n", 1, len(text), 40 + len(text))
    path = tmp_path / "a.uidx"
    path.write_bytes(fixed + xxhash.xxh3_128(fixed + text).digest() + text)
    path.with_name("a.rec").write_bytes(b"")
    refused(child.read("recordio", path.with_name("a.rec")), path, "JSON with more than 100 lists and objects")


@pytest.mark.parametrize("key", ["meta", "versions", "tensors"])
def test_a_deep_manifest(key: str, tmp_path: Path, child: Confined) -> None:
    save_steps(tmp_path, 3)
    path = tmp_path / "step-00000003"
    whole, name = (path / "manifest.json").read_bytes(), key.encode()
    text = re.sub(rb'"%s": \{' % name, b'"%s": {"deep": %s,' % (name, DEEP), whole)
    (path / "manifest.json").write_bytes(text)
    (path / "COMMIT").write_bytes(encode_commit_marker(text, 3))
    refused(
        child.read("checkpoint", path),
        path,
        "manifest.json: JSON with more than 100 lists and objects inside each other",
        120,
    )


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b'{"a":[' + b"[]," * (5 * MIB) + b"[]]}\n", "JSON of more than 4,194,304 lists and objects"),
        (b'{"a":[' + b"1," * (17 * MIB) + b"1]}\n", "JSON of more than 16,777,216 values"),
        (b'{"a":' + b"9" * 100_000 + b"}\n", "a number of more than 4,300 digits cannot be read"),
    ],
)
def test_wide_lines(content: bytes, what: str, tmp_path: Path, child: Confined) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    refused(child.read("table", path), path, f"line 1 at offset 0: {what}", grown_mib=120)


@pytest.mark.parametrize("options", [{}, {"columns": ["1"]}])
def test_json_of_many_fields(tmp_path: Path, options: dict[str, Any]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({str(number): number for number in range(1 << 16)}) + "\n")
    assert next(iter(open_table(path, **options).rows))["1"] == 1
    path.write_text(json.dumps({str(number): number for number in range((1 << 16) + 1)}) + "\n")
    with pytest.raises(DataError, match="line 1 at offset 0: 65,537 fields, where 65,536 are the most"):
        list(open_table(path, **options).rows)


def test_csv_of_many_fields_and_of_many_lines_in_quotes(tmp_path: Path, child: Confined) -> None:
    path = tmp_path / "a.csv"
    for line in (b"," * (4 * MIB) + b"\n", b'"a"' + b"," * (4 * MIB) + b"\n"):
        path.write_bytes(line)
        refused(child.read("table", path), path, "line 1: more than 65,536 fields")
    path.write_bytes(b'a\n"' + b"bc\n" * MIB + b'"\n')
    outcome = child.read("table", path)
    assert len(outcome.rows or ()) == 1
    assert outcome.grown_mib < 40


# products of dims, and shapes that no memory has


def header_of(tmp_path: Path, shape: str, dtype: str = "U8", end: int = 0) -> Path:
    text = f'{{"a":{{"dtype":"{dtype}","data_offsets":[0,{end}],"shape":[{shape}]}}}}'.encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    return path


@pytest.mark.parametrize(
    ("shape", "what"),
    [
        (",".join(["9" * 400] * 20_000 + ["0"]), "a shape of 20,001 dims, where 64 are the most"),
        ("9" * 4000, "whose size is no int64"),
        (f"0,{2**62},{2**62}", "whose size is no int64"),
        (f"{2**45}", "entry 'a' has 0 bytes, its shape needs 35184372088832"),
    ],
)
def test_shapes_of_a_shard(shape: str, what: str, tmp_path: Path, child: Confined) -> None:
    path = header_of(tmp_path, shape)
    outcome = child.read("header", path)
    refused(outcome, path, what)
    assert outcome.seconds < 10


@pytest.mark.parametrize(
    ("shape", "what"),
    [
        ([2**45], r"tensor 'w': its 140,737,488,355,328 bytes are more than the \d+ of all files"),
        ([1] * 20_000, "tensor 'w': a shape of 20,000 dims, where 64 are the most"),
        ([0, 2**62, 2**62], "whose size is no int64"),
    ],
)
def test_shapes_of_a_manifest(shape: list[int], what: str, tmp_path: Path, child: Confined) -> None:
    import torch

    save_steps(tmp_path, 3, state={"w": torch.ones(2, 3)})
    path = tmp_path / "step-00000003"
    facts = json.loads((path / "manifest.json").read_bytes())
    facts["tensors"]["w"]["shape"] = shape
    facts["tensors"]["w"]["pieces"][0] |= {"shape": shape, "offset": [0] * len(shape)}
    text = json.dumps(facts).encode()
    (path / "manifest.json").write_bytes(text)
    (path / "COMMIT").write_bytes(encode_commit_marker(text, 3))
    refused(child.read("checkpoint", path), path, what)


def test_shapes_of_a_mindrecord_field(tmp_path: Path, child: Confined) -> None:
    path = tmp_path / "a"
    with MindRecordWriter(
        path, {"x": {"type": "int32", "shape": [2]}}, page_bytes=32 << 10, header_bytes=16 << 10
    ) as writer:
        writer.write({"x": np.zeros(2, np.int32)})
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    for shape, what in (([2**62, 2**62], "no int64"), ([1] * 5000, "a shape of 5,000 dims, where 64 are the most")):
        head = json.loads(data[8 : 8 + length])
        head["schema"][0]["schema"]["x"]["shape"] = shape
        text = json.dumps(head).encode()
        path.write_bytes((struct.pack("<Q", len(text)) + text).ljust(16 << 10, b"\0") + data[16 << 10 :])
        refused(child.read("mindrecord", path), path, f"the header has .*{what}")


# sidecars


def test_a_sidecar_of_three_thousand_columns(tmp_path: Path) -> None:
    import resource

    columns = {f"c{n}": np.arange(n % 4, dtype=np.int64) + n for n in range(3000)}
    payload = PayloadInfo(bytes=0, dtype="|u1", xxh3_128="")
    path = tmp_path / "a.idx"
    write_sidecar(path, kind="test", payload=payload, columns=columns, facts={})
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        sidecar = open_sidecar(path, kind="test")
        assert len(Path("/proc/self/maps").read_text().split(str(path))) == 2  # mapped once
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert all(np.array_equal(sidecar.columns[name], column) for name, column in columns.items())


# MindRecord's SQLite index

COLUMNS = (
    "ROW_ID, ROW_GROUP_ID, PAGE_ID_RAW, PAGE_OFFSET_RAW, PAGE_OFFSET_RAW_END, PAGE_ID_BLOB, PAGE_OFFSET_BLOB, "
    "PAGE_OFFSET_BLOB_END"
)
MOVED = "ALTER TABLE INDEXES RENAME TO T"


@pytest.fixture
def indexed(tmp_path: Path) -> Callable[..., Path]:
    def make(*statements: str, rows: int = 3000, text: str = "t") -> Path:
        path = tmp_path / "a"
        with MindRecordWriter(
            path, {"label": "int64", "text": "string"}, page_bytes=256 << 10, index_fields=["text"]
        ) as writer:
            for n in range(rows):
                writer.write({"label": n, "text": text})
        with closing(sqlite3.connect(tmp_path / "a.db", isolation_level=None)) as index:
            for statement in statements:
                index.execute(statement)
        return path

    return make


@pytest.mark.parametrize(
    ("statements", "what"),
    [
        (
            [
                MOVED,
                f"CREATE TABLE INDEXES({COLUMNS} AS (zeroblob(1000000)))",
                f"INSERT INTO INDEXES SELECT {COLUMNS.rpartition(',')[0]} FROM T",
            ],
            "table INDEXES has the column 'PAGE_OFFSET_BLOB_END', which is computed, not stored",
        ),
        (
            ["ALTER TABLE SHARD_NAME ADD COLUMN x AS (zeroblob(1000000)) VIRTUAL"],
            "table SHARD_NAME has the column 'x', which is computed, not stored",
        ),
        (
            [MOVED, "CREATE VIEW INDEXES AS SELECT * FROM T"],
            "it has the view 'INDEXES', and an index has plain tables only",
        ),
        (["CREATE VIEW V AS SELECT 1"], "it has the view 'V'"),
        (["CREATE TRIGGER R AFTER INSERT ON INDEXES BEGIN SELECT 1; END"], "it has the trigger 'R'"),
        (["CREATE VIRTUAL TABLE F USING fts5(a)"], "it has the table 'F', and an index has plain tables only"),
        (
            [
                MOVED,
                f"CREATE TABLE INDEXES({COLUMNS})",
                "INSERT INTO INDEXES SELECT ROW_ID, 0, 0, 0, 0, 0, zeroblob(100000), 1 FROM T",
            ],
            "it has a location that is no integer",
        ),
        ([f"ALTER TABLE SHARD_NAME ADD COLUMN x DEFAULT '{'x' * (2 * MIB)}'"], "string or blob too big"),
    ],
)
def test_an_index_that_computes(
    statements: list[str], what: str, indexed: Callable[..., Path], child: Confined
) -> None:
    path = indexed(*statements)
    outcome = child.read("mindrecord", path)
    refused(outcome, path, what)
    assert outcome.seconds < 10


def test_steps_of_an_index_are_counted(indexed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono.data.mindrecord import index

    path = indexed(text="t" * 20_000, rows=20)
    assert len(MindRecordFile(path)) == 20  # long texts beside the locations are no matter
    monkeypatch.setattr(index, "SMALL_FILE_SQL_STEPS", 0)
    monkeypatch.setattr(index, "MAX_SQL_STEPS_PER_ROW", 1)
    monkeypatch.setattr(index, "_STEPS", 50)
    with pytest.raises(DataError, match="interrupted"):
        MindRecordFile(path)


def test_limits_of_structs_in_parquet_metadata_name_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono.data.convert.formats import thrift

    for deep in (b"\x1c" * 20, b"\xc9" + b"\x19" * 5_000):  # structs, and lists
        with pytest.raises(LimitError, match="a value 17 levels deep, where 16 are the most"):
            thrift.ThriftReader(deep).struct({})
    monkeypatch.setattr(thrift, "MAX_JSON_LISTS", 3)
    with pytest.raises(LimitError, match="more than 3 structs"):
        thrift.ThriftReader(b"\x1c\0" * 3 + b"\0").struct({})


def test_limits_leave_room_for_real_files(tmp_path: Path) -> None:
    """A picture of 224 x 224 x 3 as lists of lists: 50,000 of them in a line."""
    picture = np.arange(224 * 224 * 3).reshape(224, 224, 3)
    write_table(tmp_path / "a.jsonl", Table(rows=[{"picture": picture}] * 3))
    for row in open_table(tmp_path / "a.jsonl").rows:
        np.testing.assert_array_equal(row["picture"], picture, strict=True)


# Arrow, of which save_to_disk writes neither


def arrow(folder: Path, column: Any, **options: Any) -> Path:
    write_arrow_folder(folder / "d", pa.table({"a": [1]}), {})
    table = pa.table({"a": column})
    how = pa.ipc.IpcWriteOptions(**options)
    with (
        pa.OSFile(str(folder / "d" / ARROW), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema, options=how) as stream,
    ):
        stream.write_table(table)
    return folder / "d"


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_arrow_data_that_expand(tmp_path: Path, child: Confined, codec: str) -> None:
    folder = arrow(tmp_path, pa.array([b"\0" * 100 * MIB]), compression=codec)
    assert (folder / ARROW).stat().st_size < MIB
    refused(child.read("arrow", folder), folder / ARROW, "its data are compressed")


def test_arrow_values_without_bytes(tmp_path: Path, child: Confined) -> None:
    wide = pa.FixedSizeListArray.from_arrays(pa.nulls(200 * MIB), 100 * MIB)
    for column in (wide, pa.nulls(200 * MIB)):
        folder = arrow(tmp_path, column)
        refused(child.read("arrow", folder), folder / ARROW, "more than .* values in .* bytes")
        (folder / ARROW).unlink()
        (folder / "state.json").unlink()
        (folder / "dataset_info.json").unlink()
        folder.rmdir()


@pytest.mark.parametrize("kind", ["dictionary", "run ends", "views"])
def test_arrow_values_that_share_bytes(tmp_path: Path, child: Confined, kind: str) -> None:
    large = "x" * MIB
    column: Any = {
        "dictionary": lambda: repeated([large], 1000),
        "run ends": lambda: pa.RunEndEncodedArray.from_arrays([1000], [large]),
        "views": lambda: pa.ListViewArray.from_arrays([0] * 1000, [1] * 1000, pa.array([large])),
    }[kind]()
    folder = arrow(tmp_path, column)
    refused(child.read("arrow", folder), folder / ARROW, "a column of type|a message of type dictionary")


@pytest.mark.parametrize(
    "state",
    [
        '{"_data_files": 1}',
        '{"_data_files": [{"filename": null}]}',
        "[]",
        '{"_data_files": [{"filename": "a\\u0000b"}]}',
    ],
)
def test_arrow_folders_of_another_shape(tmp_path: Path, child: Confined, state: str) -> None:
    folder = arrow(tmp_path, [1])
    (folder / "state.json").write_text(state)
    refused(child.read("arrow", folder), folder, r"state\.json|without a.x00b")


# configurations


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[" + "a." * 400_000 + "a]", "a key of more than 100 parts"),
        ("x = {" + "a . " * 200_000 + "a = 1}", "a key of more than 100 parts"),
        ('"a\\"".' * 100_000 + "a = 1", "a key of more than 100 parts"),
        ("".join(f"k{number} = 1\n" for number in range(90_000)), "more than 4,096 keys"),
        ("#" * (MIB + 1), "more than 1,048,576 bytes"),
        ("a = 1 # " + '\\"' * 400_000 + "\nb", "b"),
        ("a = [" + ',"' * 400_000 + "\nb", "b|a = "),
        ("a = [" + ",'" * 400_000 + "\nb", "b|a = "),
        ("x = " + "[" * 100_000, "nested hundreds deep"),
    ],
)
def test_configurations(tmp_path: Path, child: Confined, text: str, what: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    refused(child.read("toml", tmp_path / "config.toml"), tmp_path / "config.toml", what)


@pytest.mark.parametrize("name", ["base.toml", "base.py"])
@pytest.mark.parametrize("target", ["a pipe", "/dev/zero"])
def test_a_base_without_end(tmp_path: Path, child: Confined, name: str, target: str) -> None:
    os.mkfifo(tmp_path / name) if target == "a pipe" else (tmp_path / name).symlink_to(target)
    (tmp_path / "c.toml").write_text(f"base = '{name}'\n")
    refused(child.read("toml", tmp_path / "c.toml"), tmp_path / "c.toml", "not a regular file")


def test_a_chain_of_bases(tmp_path: Path, child: Confined) -> None:
    for number in range(2000):
        (tmp_path / f"{number}.toml").write_text(f"base = '{number + 1}.toml'\n")
    refused(child.read("toml", tmp_path / "0.toml"), tmp_path / "29.toml", "would be file 31 of this configuration")


def test_what_looks_like_a_long_key_and_is_none(tmp_path: Path, child: Confined) -> None:
    numbers = " ".join(f"{number}." for number in range(300))
    (tmp_path / "config.toml").write_text(f'# {numbers}\n[run]\ndir = "{"a." * 500}"\n')
    assert child.read("toml", tmp_path / "config.toml").rows


def test_names_of_fields_are_no_types(tmp_path: Path, child: Confined) -> None:
    folder = arrow(tmp_path, [{"review": "good", "page_views": [1, 2]}, {"review": "union", "page_views": []}])
    assert len(child.read("arrow", folder).rows or ()) == 2 + 2
