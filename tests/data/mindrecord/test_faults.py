"""Thirteen ways in which MindSpore 2.10 loses or changes data, or fails late: each is refused in time, or read right.

The first (rows dealt to shards by chance) and the fifth (floats that FileReader changes) are in ``test_files.py``.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections import deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unisono.data.mindrecord import MindRecordFile, MindRecordWriter
from unisono.errors import DataError

Write = Callable[..., MindRecordFile]
Same = Callable[[Any, Any], bool]
SMALL = {"page_bytes": 32 << 10, "header_bytes": 16 << 10}
KEPT = "the row was not written; the rows before it are kept"

VECTOR = {"type": "int32", "shape": [2, -1]}
# (fault, schema, a good row, changes to it, given, rule, nearest)
REFUSED: list[tuple[int, Any, Any, Any, str, str, str]] = [
    (
        2,
        {"a": "int32"},
        {"a": 1},
        {"a": "1"},
        "'1', a str",
        "field type int32 takes integers",
        "int(…), if that is the intended value",
    ),
    (
        2,
        {"a": "int32"},
        {"a": 1},
        {"a": True},
        "True, a bool",
        "field type int32 takes integers",
        "int(…), if that is the intended value",
    ),
    (
        2,
        {"a": "int64"},
        {"a": 1},
        {"a": 1.0},
        "1.0, a float",
        "field type int64 takes integers",
        "int(…), if that is the intended value",
    ),
    (
        2,
        {"a": "float32"},
        {"a": 1.5},
        {"a": 2},
        "2, a int",
        "field type float32 takes floats, and drops rows with others",
        "float(…)",
    ),
    (
        2,
        {"a": "string"},
        {"a": "x"},
        {"a": b"x"},
        "b'x', a bytes",
        "field type string takes str",
        "str(…), if that is the intended value",
    ),
    (
        2,
        {"a": "string"},
        {"a": "x"},
        {"a": "\ud800"},
        "'\\ud800'",
        "strings are UTF-8, and surrogates not allowed",
        "bytes in a field of type bytes",
    ),
    (
        2,
        {"a": "string"},
        {"a": "x"},
        {"a": "x\0y"},
        "'x\\x00y'",
        "MindSpore cuts an indexed string at its first NUL",
        "index_fields without this field",
    ),
    (
        2,
        {"a": "bytes"},
        {"a": b"x"},
        {"a": "x"},
        "a str",
        "field type bytes takes bytes",
        "bytes, or a field with a shape for an array",
    ),
    (
        2,
        {"a": VECTOR},
        {"a": np.ones((2, 3), np.int32)},
        {"a": [[1], [2]]},
        "a list",
        "a field with a shape takes NumPy arrays of int32",
        "numpy.asarray(…)",
    ),
    (
        2,
        {"a": VECTOR},
        {"a": np.ones((2, 3), np.int32)},
        {"a": np.ones((2, 3))},
        "an array of float64",
        "the field has arrays of int32",
        "array.astype('int32')",
    ),
    (
        2,
        {"a": VECTOR},
        {"a": np.ones((2, 3), np.int32)},
        {"a": np.ones((3, 2), np.int32)},
        "an array of shape [3, 2]",
        "the field has the shape [2, -1]",
        "array.reshape(…)",
    ),
    (
        2,
        {"a": VECTOR},
        {"a": np.ones((2, 3), np.int32)},
        {"a": np.ones(6, np.int32)},
        "an array of shape [6]",
        "the field has the shape [2, -1]",
        "array.reshape(…)",
    ),
    (
        3,
        {"a": "float64"},
        {"a": 1.5},
        {"a": float("nan")},
        "nan",
        "an indexed float is finite: building MindSpore's index with any other ends the process",
        "a finite number, or index_fields without this field",
    ),
    (
        4,
        {"a": "int32"},
        {"a": 2**31 - 1},
        {"a": 2**31},
        "2147483648",
        "int32 holds -2147483648 to 2147483647",
        "a number in that range or field type int64",
    ),
    (
        4,
        {"a": "int64"},
        {"a": -(2**63)},
        {"a": 2**63},
        "9223372036854775808",
        "int64 holds -9223372036854775808 to 9223372036854775807",
        "a number in that range, or a field of type string",
    ),
    (
        5,
        {"a": "float32"},
        {"a": 3.4e38},
        {"a": 1e39},
        "1e+39",
        "float32 holds up to 3.4028235e+38",
        "a smaller number, or field type float64",
    ),
    (
        6,
        {"a": VECTOR},
        {"a": np.ones((2, 1), np.int32)},
        {"a": np.ones((2, 0), np.int32)},
        "an array of shape [2, 0]",
        "MindSpore drops rows with an empty array",
        "at least one value",
    ),
    (
        7,
        {"a": "bytes"},
        {"a": b"x"},
        {"a": b""},
        "no bytes",
        "where it is the only blob, MindSpore reads back four zero bytes for none",
        "another blob field, or a byte that means no bytes",
    ),
]


@pytest.mark.parametrize(("fault", "schema", "good", "change", "given", "rule", "nearest"), REFUSED)
def test_a_row_that_mindspore_would_lose_is_refused(
    fault: int, schema: Any, good: Any, change: Any, given: str, rule: str, nearest: str, tmp_path: Path, same: Same
) -> None:
    with MindRecordWriter(tmp_path / "a", schema, **SMALL) as writer:
        writer.write(good)
        with pytest.raises(DataError) as caught:
            writer.write({**good, **change})
        writer.write(good)
    expected = f"row 1, field 'a': {given}\n  rule: {rule}\n  so:   {KEPT}\n  try:  {nearest}"
    assert str(caught.value) == expected, f"fault {fault}"
    assert same(list(MindRecordFile(tmp_path / "a")), [good, good])


def test_fault_2_all_that_is_wrong_with_a_row_is_said_at_once(tmp_path: Path) -> None:
    with MindRecordWriter(tmp_path / "a", {"a": "int32", "b": "string", "c": "bytes"}, **SMALL) as writer:
        with pytest.raises(DataError) as caught:
            writer.write({"a": 1.5, "c": b"", "d": 1})
        assert len(writer) == 0
    assert [problem.given for problem in caught.value.problems] == [
        "row 0, field 'a': 1.5, a float",
        "row 0, field 'b': there is none",
        "row 0, field 'c': no bytes",
        "row 0, field 'd': the schema has no such field",
    ]


def test_faults_3_and_7_do_not_go_further_than_they_must(tmp_path: Path, write: Write, same: Same) -> None:
    """A float that is not indexed may be NaN; bytes may be empty beside another blob."""
    rows = [{"a": b"", "b": b"", "x": float("nan"), "y": 1}]
    schema = {"a": "bytes", "b": "bytes", "x": "float64", "y": "int32"}
    assert same(list(write(tmp_path / "a", schema, rows, index_fields=["y"])), rows)


def test_fault_4_a_value_outside_its_type_is_an_error_or_read_as_it_is_stored(tmp_path: Path, write: Write) -> None:
    """MindSpore's writer takes 2^31 for an int32, FileReader returns it, MindDataset fails."""
    records = write(tmp_path / "a", {"a": "int64", "b": "bytes"}, [{"a": 2**31, "b": b"x"}])
    with_head(tmp_path / "a", lambda head: head["schema"][0]["schema"]["a"].update(type="int32"))
    records = MindRecordFile(tmp_path / "a")
    with pytest.raises(DataError) as caught:
        records.read(0)
    assert str(caught.value) == (
        f"{tmp_path}/a: row 0 at offset {(16 << 10) + (32 << 10)}: field 'a' has 2147483648, which is no int32\n"
        "  rule: in a MindRecord file lengths agree with header, index and size, and values with their fields\n"
        "  so:   the row is not used\n"
        "  try:  check=False reads it as it is stored"
    )
    assert MindRecordFile(tmp_path / "a", check=False).read(0) == {"a": 2**31, "b": b"x"}


@pytest.mark.parametrize(
    ("schema", "givens", "rules"),
    [
        ({}, ["a schema of 0 fields"], ["a row has 1 to 65535 fields"]),
        (
            {"a": {"type": "int32", "shape": []}},
            ["field 'a' of type int32 with shape []"],
            ["a shape has one dim at least: MindSpore loses the values of a scalar shape"],
        ),
        (
            {"Label": "int32", "label": "int32"},
            ["fields 'Label' and 'label'"],
            ["names differ by more than case: they are columns of an SQL table, and MindSpore fails at the very end"],
        ),
        (
            {
                "a-b": "int8",
                "c": {"shape": [1]},
                "d": {"type": "bytes", "shape": [1]},
                "e": {"type": "int32", "shape": [-1, -1, 0]},
            },
            [
                "field 'a-b'",
                "field 'a-b' of type 'int8'",
                "field 'c': {'shape': [1]}",
                "field 'd' of type bytes with shape [1]",
                "field 'e' of type int32 with shape [-1, -1, 0]",
            ],
            [
                "names have letters of a to z, digits and _ only",
                "types are int32, int64, float32, float64, string and bytes",
                "a field is its type, or a mapping of type and shape",
                "arrays are of int32, int64, float32, float64",
                "dims are 1 or more, and at most one is -1, found from the data",
            ],
        ),
    ],
)
def test_faults_8_and_9_a_schema_is_refused_before_anything_is_written(
    schema: Any, givens: list[str], rules: list[str], tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        MindRecordWriter(tmp_path / "a", schema)
    assert [problem.given for problem in caught.value.problems] == givens
    assert [problem.rule for problem in caught.value.problems] == rules
    assert {problem.consequence for problem in caught.value.problems} == {"nothing was written"}
    assert list(tmp_path.iterdir()) == []


def test_fault_8_a_scalar_shape_is_an_error_when_it_is_read(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "a", {"a": "bytes", "b": "int32"}, [{"a": b"1234", "b": 5}])
    with_head(tmp_path / "a", lambda head: head["schema"][0]["schema"].update(a={"type": "int32", "shape": []}))
    with pytest.raises(DataError) as caught:
        MindRecordFile(tmp_path / "a")
    assert str(caught.value) == (
        f"{tmp_path}/a: field 'a' has the shape []\n"
        "  rule: MindSpore does not store the numbers of such a field\n"
        "  so:   its values are lost, and nothing of the file is used\n"
        "  try:  check=False reads what bytes there are, and all other fields as they are"
    )
    assert MindRecordFile(tmp_path / "a", check=False).read(0) == {"a": b"1234", "b": 5}


@pytest.mark.parametrize(
    ("index_fields", "given"),
    [
        (["b"], "index field 'b'"),
        (["c"], "index field 'c'"),
        (["INC"], "index field 'INC'"),
        (["7"], "index field '7'"),
        (["a", "a"], "index fields ['a', 'a']"),
    ],
)
def test_an_index_that_mindspore_could_not_have_is_refused(index_fields: list[str], given: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        MindRecordWriter(
            tmp_path / "a", {"a": "int32", "b": "bytes", "INC": "int32", "7": "int32"}, index_fields=index_fields
        )
    assert caught.value.problems[0].given == given
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "options", "given"),
    [
        ("a:b", {}, "the file name 'a:b'"),
        ("a ", {}, "the file name 'a '"),
        ("a", {"shards": 0}, "shards=0"),
        ("a", {"shards": 1001}, "shards=1001"),
        ("a", {"page_bytes": (32 << 10) + 2}, "page_bytes=32770"),
        ("a", {"page_bytes": (256 << 20) + 4}, "page_bytes=268435460"),
        ("a", {"header_bytes": 16000}, "header_bytes=16000"),
    ],
)
def test_a_layout_that_mindspore_could_not_read_is_refused(
    name: str, options: dict[str, int], given: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        MindRecordWriter(tmp_path / name, {"a": "int32"}, **options)
    assert caught.value.problems[0].given == given
    assert list(tmp_path.iterdir()) == []


def test_fault_10_a_full_header_is_found_at_the_row_and_nothing_is_lost(tmp_path: Path, same: Same) -> None:
    rows = [{"image": bytes([n]) * 20_000, "label": n} for n in range(256)]
    with MindRecordWriter(tmp_path / "a", {"image": "bytes", "label": "int32"}, **SMALL) as writer:
        with pytest.raises(DataError) as caught:
            deque(map(writer.write, rows))
        count = len(writer)
    assert 50 < count < 120
    assert str(caught.value) == (
        f"row {count}, which begins page {count + 1}\n"
        "  rule: the header lists the fields and all pages in its 16384 bytes\n"
        "  so:   it was not written; what was written before is kept\n"
        "  try:  a larger header_bytes, up to 134217728, larger page_bytes, or more shards"
    )
    records = MindRecordFile(tmp_path / "a")
    assert same(list(records), rows[:count])
    fields = {f"f{number:0>64}": "int32" for number in range(300)}
    with pytest.raises(DataError, match="bytes before any page"):
        MindRecordWriter(tmp_path / "b", fields, **SMALL)


def test_fault_11_each_length_in_a_page_is_compared_with_the_index(tmp_path: Path, write: Write) -> None:
    """MindSpore takes the index's word for it. Without checksums a flipped bit inside a payload cannot be seen."""
    rows = [{"image": bytes([n]) * 10, "label": n} for n in range(4)]
    write(tmp_path / "a", {"image": "bytes", "label": "int32"}, rows)
    offset = (16 << 10) + 2 * 18
    content = bytearray((tmp_path / "a").read_bytes())
    content[offset] ^= 1
    (tmp_path / "a").write_bytes(content)
    records = MindRecordFile(tmp_path / "a")
    assert records.read(1) == rows[1]
    with pytest.raises(DataError) as caught:
        records.read(2)
    assert str(caught.value) == (
        f"{tmp_path}/a: row 2 at offset {offset}: it says 11 bytes, and the index 10\n"
        "  rule: in a MindRecord file lengths agree with header, index and size, and values with their fields\n"
        "  so:   the row is not used\n"
        "  try:  a whole copy of the file: MindRecord has no checksums from which it could be mended"
    )
    assert records.read(3) == rows[3]


@pytest.mark.parametrize("column", ["ROW_ID", "PAGE_ID_RAW", "PAGE_OFFSET_RAW", "PAGE_OFFSET_RAW_END", "ROW_GROUP_ID",
                                    "PAGE_ID_BLOB", "PAGE_OFFSET_BLOB", "PAGE_OFFSET_BLOB_END"])  # fmt: skip
@pytest.mark.parametrize("row", [0, 2, 3])
def test_fault_11_an_index_that_lies_is_seen_when_it_is_opened(
    column: str, row: int, tmp_path: Path, write: Write
) -> None:
    write(tmp_path / "a", {"image": "bytes", "label": "int32"}, [{"image": b"12345678", "label": n} for n in range(4)])
    with closing(sqlite3.connect(tmp_path / "a.db", isolation_level=None)) as index:
        index.execute(f"UPDATE INDEXES SET {column} = {column} + 16 WHERE ROW_ID = {row}")
    with pytest.raises(DataError, match=f"{tmp_path}/a: row [0-3] at offset 16384: a.db contradicts the header"):
        MindRecordFile(tmp_path / "a")


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("DELETE FROM INDEXES WHERE ROW_ID = 1", "it has 3 rows where the data file has 4"),
        ("UPDATE INDEXES SET ROW_ID = 'many' WHERE ROW_ID = 1", "it has a location that is no integer"),
        ("DROP TABLE INDEXES", "it has no tables INDEXES and SHARD_NAME"),
        ("ALTER TABLE INDEXES DROP COLUMN PAGE_ID_RAW", "no such column: PAGE_ID_RAW"),
        (
            "DROP TABLE SHARD_NAME; CREATE VIEW SHARD_NAME AS "
            "WITH RECURSIVE n(NAME) AS (SELECT 1 UNION ALL SELECT NAME + 1 FROM n) SELECT NAME FROM n WHERE NAME < 0",
            "it has the view 'SHARD_NAME', and an index has plain tables only",
        ),
    ],
)
def test_a_damaged_index_is_named(statement: str, what: str, tmp_path: Path, write: Write) -> None:
    write(tmp_path / "a", {"image": "bytes", "label": "int32"}, [{"image": b"12345678", "label": n} for n in range(4)])
    with closing(sqlite3.connect(tmp_path / "a.db", isolation_level=None)) as index:
        index.executescript(statement)
    with pytest.raises(DataError) as caught:
        MindRecordFile(tmp_path / "a")
    problem = caught.value.problems[0]
    assert problem.given.startswith(f"{tmp_path}/a.db: {what}")
    assert problem.nearest == "remove the index: the rows are then found by reading the pages of the data file"
    (tmp_path / "a.db").unlink()
    assert len(MindRecordFile(tmp_path / "a")) == 4


def test_fault_12_renamed_files_are_read_where_nothing_is_in_doubt(
    tmp_path: Path, write: Write, same: Same, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"label": n} for n in range(6)]
    write(tmp_path / "a", {"label": "int32"}, rows)
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "a.db").rename(tmp_path / "b.db")
    assert same(list(MindRecordFile(tmp_path / "b")), rows)
    assert f"{tmp_path}/b was written as a" in caplog.text
    assert f"{tmp_path}/b.db is the index of ['a']: the rows of b are found by reading its pages" in caplog.text
    # an index of another file is never believed
    write(tmp_path / "c", {"label": "int32"}, [{"label": 100 * n} for n in range(6)])
    shutil.copy(tmp_path / "b.db", tmp_path / "c.db")
    assert [row["label"] for row in MindRecordFile(tmp_path / "c")] == [0, 100, 200, 300, 400, 500]


def test_fault_12_a_renamed_file_of_a_set_is_read_from_a_list(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "a", {"label": "int32"}, [{"label": n} for n in range(6)], shards=2)
    (tmp_path / "a1").rename(tmp_path / "b")
    with pytest.raises(DataError) as caught:
        MindRecordFile(tmp_path / "b")
    assert str(caught.value) == (
        f"{tmp_path}/b, which is one of the 2 files a0 to a1 under another name\n"
        "  rule: files are read together when they were written together, or are listed and have the same fields\n"
        "  so:   nothing was read\n"
        "  try:  give the files as a list, or the names that they were written with"
    )
    assert [row["label"] for row in MindRecordFile([tmp_path / "b"])] == [1, 3, 5]
    shutil.copy(tmp_path / "a0", tmp_path / "a1")
    with pytest.raises(DataError, match="a1, which says it is file 0 of its set, as file 1"):
        MindRecordFile(tmp_path / "a0")


@pytest.mark.parametrize("name", ["", "..", "../a", "/etc/passwd", "a"])
def test_a_header_names_files_beside_it_only(name: str, tmp_path: Path, write: Write) -> None:
    write(tmp_path / "a", {"label": "int32"}, [{"label": 1}])
    with_head(tmp_path / "a", lambda head: head.update(shard_addresses=["a", name]))
    with pytest.raises(DataError, match=r"at offset 8: the header names the files .* which are no names beside it"):
        MindRecordFile(tmp_path / "a")
    with_head(tmp_path / "a", lambda head: head.update(shard_addresses=["a", "\0"]))
    with pytest.raises(DataError, match="null"):
        MindRecordFile(tmp_path / "a")


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "a", {"label": "int32"}, [{"label": 1}])
    write(tmp_path / "b", {"label": "int64"}, [{"label": 1}])
    with pytest.raises(DataError, match=f"{tmp_path}/b, whose version, sizes or fields are not those of {tmp_path}/a"):
        MindRecordFile([tmp_path / "a", tmp_path / "b"])


def test_fault_13_a_cut_file_says_where_it_ends(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "a", {"image": "bytes", "label": "int32"}, [{"image": b"12345678", "label": n} for n in range(4)])
    whole = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(whole[:-5])
    with pytest.raises(DataError) as caught:
        MindRecordFile(tmp_path / "a")
    assert str(caught.value) == (
        f"{tmp_path}/a: at offset {len(whole) - 5}: the file ends 5 bytes before page 1 does, which began at {48 << 10}\n"
        "  rule: in a MindRecord file lengths agree with header, index and size, and values with their fields\n"
        "  so:   nothing of the file is used\n"
        "  try:  a whole copy of the file: MindRecord has no checksums from which it could be mended"
    )


def with_head(path: Path, change: Callable[[Any], Any]) -> None:
    """Rewrite the header of a file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    head = json.loads(content[8 : 8 + length])
    room = head["header_size"]
    change(head)
    text = json.dumps(head).encode()
    path.write_bytes((len(text).to_bytes(8, "little") + text).ljust(room, b"\0") + content[room:])
