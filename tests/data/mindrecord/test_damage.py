"""Damage is read as it was written or refused: cut at every byte, every field of the header changed, bytes mutated."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.mindrecord import MindRecordFile
from unisono.data.mindrecord.header import FieldType
from unisono.data.mindrecord.row_values import blob_reader, pack_integers, unpack_integers
from unisono.errors import DataError

Write = Callable[..., MindRecordFile]
Same = Callable[[Any, Any], bool]
HEADER, PAGE = 16 << 10, 32 << 10
ROWS: list[dict[str, Any]] = [
    {"array": np.arange(n + 1, dtype=np.int32) * 1000, "blob": bytes([n] * n), "label": n, "text": "t" * (n % 5)}
    for n in range(12)
]
SCHEMA = {"array": {"type": "int32", "shape": [-1]}, "blob": "bytes", "label": "int64", "text": "string"}


@pytest.fixture
def path(tmp_path: Path, write: Write) -> Path:
    write(tmp_path / "a", SCHEMA, ROWS)
    return tmp_path / "a"


def test_cut_at_every_byte_of_the_end(path: Path) -> None:
    whole = path.read_bytes()
    index = path.with_name("a.db").read_bytes()
    for indexed in (True, False):
        for size in range(len(whole) - 200, len(whole)):
            path.write_bytes(whole[:size])
            with pytest.raises(
                DataError, match=f"at offset {size}: the file ends {len(whole) - size} bytes before page 1"
            ):
                MindRecordFile(path)
        path.with_name("a.db").unlink()
        if indexed:
            path.with_name("a.db").write_bytes(index)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100, 500, HEADER - 1, HEADER, HEADER + 1, HEADER + PAGE])
def test_cut_further_in(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match="at offset"):
        MindRecordFile(path)


def test_an_index_cut_at_every_byte_of_the_end_is_refused_or_whole(path: Path, same: Same) -> None:
    index = path.with_name("a.db")
    whole = index.read_bytes()
    for size in [*range(len(whole) - 200, len(whole)), *range(0, len(whole) - 200, 509)]:
        index.write_bytes(whole[:size])
        read_right_or_refused(path, same)


def read_right_or_refused(path: Path, same: Same) -> bool:
    try:
        assert same(list(MindRecordFile(path)), ROWS)
    except DataError:
        return False
    return True


NUMBERS = [
    -1,
    0,
    1,
    2,
    7,
    8,
    31,
    4096,
    PAGE - 1,
    PAGE + 1,
    2**31,
    2**40,
    2**62,
    2**64,
    10**30,
    1.5,
    None,
    "1",
    [],
    True,
]


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where in the header something stands."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, each in inside for place in places(each, (*at, key)))]


def test_every_field_of_the_header_changed(path: Path, same: Same) -> None:
    """Other rows never come out: the same ones do where the field says nothing about them, else an error."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    head = json.loads(content[8 : 8 + length])
    harmless = set()
    for place in places(head)[1:]:
        for value in [*NUMBERS, "RAW_DATA", "BLOB_DATA", "int32", "bytes", {}, "missing"]:
            changed = json.loads(json.dumps(head))
            inner = changed
            for key in place[:-1]:
                inner = inner[key]
            if value == "missing":
                del inner[place[-1]]
            else:
                inner[place[-1]] = value
            if changed == head and str(changed) == str(head):
                continue
            text = json.dumps(changed).encode()
            path.write_bytes((len(text).to_bytes(8, "little") + text).ljust(HEADER, b"\0") + content[HEADER:])
            if outcome(path, same, place):
                harmless.add(".".join(str(key) for key in place if isinstance(key, str)))
    assert harmless <= {
        "statistics",
        "index_fields",
        "index_fields.index_field",
        "index_fields.schema_id",
        "schema.desc",
        "page.shard_id",
        "page.page_type_id",
        "page.start_row_id",
        "page.end_row_id",
        "page.row_group_ids",
        "shard_id",
        "shard_addresses",
        "schema.schema.label.type",
        "schema.schema.array.type",
    }


def outcome(path: Path, same: Same, place: tuple[Any, ...]) -> bool:
    """Whether the file is read; what is read must be right, but for a field whose type the header itself changed."""
    try:
        rows = list(MindRecordFile(path))
    except DataError:
        return False
    if "schema" in place:
        return True
    assert same(rows, ROWS), place
    return True


def test_mutated_bytes_are_read_as_far_as_lengths_agree(path: Path) -> None:
    """Payloads have no checksum; what comes out has the types of the schema, or is refused, in bounded memory."""
    rng = np.random.default_rng(0)
    whole, index = path.read_bytes(), path.with_name("a.db").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    hot = [*range(8 + length), *range(HEADER, HEADER + 400), *range(HEADER + PAGE, len(whole))]
    read = refused = named = 0
    tracemalloc.start()
    for number in range(400):
        content = bytearray(whole)
        for _ in range(int(rng.integers(1, 4))):
            content[hot[int(rng.integers(len(hot)))]] = int(
                rng.choice([0, 1, 0x7F, 0x80, 0xFF, int(rng.integers(256))])
            )
        path.write_bytes(content)
        if number % 2:
            path.with_name("a.db").unlink(missing_ok=True)
        else:
            path.with_name("a.db").write_bytes(index)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        try:
            for row in MindRecordFile(path):
                read += 1
                assert [type(value) for value in row.values()] == [np.ndarray, bytes, int, str]
        except DataError as error:
            refused += 1
            named += str(path) in str(error)
        assert tracemalloc.get_traced_memory()[1] - before < 4 * len(whole)
    tracemalloc.stop()
    assert read > 100
    assert named == refused > 100


def test_a_mutated_index_leads_nowhere_else(path: Path, same: Same) -> None:
    rng = np.random.default_rng(0)
    index = path.with_name("a.db")
    whole = index.read_bytes()
    outcomes = set()
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(int(rng.integers(1, 6))):
            content[int(rng.integers(len(whole)))] = int(rng.integers(256))
        index.write_bytes(content)
        outcomes.add(read_right_or_refused(path, same))
    assert outcomes == {True, False}


@settings(max_examples=60, deadline=None)
@given(content=st.binary(max_size=120))
def test_any_bytes_are_no_file(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "a"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"at offset [08]"):
        MindRecordFile(path)


@pytest.mark.parametrize(
    ("part", "content", "what"),
    [
        (
            "blob",
            struct.pack(">Q", 2**63),
            "field 'array' says 9223372036854775808 bytes, and 49 of its blobs are left",
        ),
        ("blob", struct.pack(">QI", 4, 2**32 - 1), "field 'array' says 4294967295 packed integers, in 4 bytes"),
        ("raw", b"\x81\xa5label\xdb\xff\xff\xff\xff", "its scalars are not understood"),
        ("raw", b"\xdf\xff\xff\xff\xff", "its scalars are not understood"),
        ("raw", b"\x81\xa5label\xdd\xff\xff\xff\xff", "its scalars are not understood"),
        ("raw", msgspec.msgpack.encode({"label": 1}), "it has no field 'text'"),
        ("raw", msgspec.msgpack.encode({"label": "1", "text": ""}), "field 'label' has '1', which is no int64"),
    ],
)
def test_a_length_beyond_its_row_allocates_nothing(part: str, content: bytes, what: str, path: Path) -> None:
    whole = bytearray(path.read_bytes())
    records = MindRecordFile(path)
    data, begin = getattr(records._shards[0], part)(11)
    del records
    put = (content + bytes(len(data)))[: len(data)] if part == "blob" else content
    assert len(put) <= len(data) or part == "raw"
    at = begin + 8
    whole[at : at + len(put)] = put
    del data
    tracemalloc.start()
    if part == "raw":  # the last row: it may end with the file
        whole[begin:at] = struct.pack("<Q", len(put))
        del whole[at + len(put) :]
        path.with_name("a.db").unlink()
        text = int.from_bytes(whole[:8], "little")
        head = json.loads(whole[8 : 8 + text])
        head["page"][1]["page_size"] = len(whole) - HEADER - PAGE
        changed = json.dumps(head).encode()
        whole[:HEADER] = (len(changed).to_bytes(8, "little") + changed).ljust(HEADER, b"\0")
    path.write_bytes(whole)
    with pytest.raises(DataError, match=f"{path}: row 11 at offset {begin}: {what}"):
        MindRecordFile(path).read(11)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-300, 300)), max_size=40),
    cut=st.integers(0, 400),
)
def test_packed_integers_come_back_and_a_cut_is_seen(values: list[int], cut: int) -> None:
    packed = pack_integers(np.array(values, np.int64))
    assert unpack_integers("a", memoryview(packed), np.dtype("<i8")).tolist() == values
    if cut < len(packed):
        with pytest.raises(ValueError, match="field 'a'"):
            unpack_integers("a", memoryview(packed[:cut]), np.dtype("<i8"))


def test_known_packed_vectors() -> None:
    values = np.array([1, -129, 40_000, 2**40, -1], np.int64)
    # widths 1, 2, 4, 8 | 1: codes 00 01 10 11, 00 …
    expected = "000000051b00017fff409c00000000000000010000ff"
    assert pack_integers(values).hex() == expected
    with pytest.raises(ValueError, match="field 'a' has integers of 8 bytes among its int32 values"):
        unpack_integers("a", memoryview(bytes.fromhex(expected)), np.dtype("<i4"))


@pytest.mark.parametrize(
    ("fields", "blob", "what"),
    [
        ({}, b"\0\0\0\1", "it has 4 bytes of blobs, where rows without blobs have four zero bytes"),
        ({"a": FieldType(type="float32", shape=(-1,))}, bytes(7), "field 'a' has 7 bytes, which are no float32 values"),
        ({"a": FieldType(type="float32", shape=(2, -1))}, bytes(12), r"field 'a' has 3 values, which are no \[2, -1\]"),
        ({"a": FieldType(type="float64", shape=(2,))}, bytes(8), r"field 'a' has 1 values, which are no \[2\]"),
        (
            {"a": FieldType(type="bytes"), "b": FieldType(type="bytes")},
            bytes(17),
            "its blobs have 1 bytes behind the last field",
        ),
    ],
)
def test_blobs_that_do_not_fit_their_fields(fields: dict[str, FieldType], blob: bytes, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        blob_reader(fields, packed=True)(memoryview(blob))
