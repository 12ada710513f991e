"""Typed records come back as they were given, and nothing else is taken for one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from unisono.data.convert.pack import RecordSchema
from unisono.errors import DataError

SCHEMA = "time=float64,on=bool,count=int32,accel=float32[3],samples=int16[?,2],big=uint64,note=string,raw=bytes"
ROW = st.fixed_dictionaries(
    {
        "time": st.floats(allow_nan=False),
        "on": st.booleans(),
        "count": st.integers(-(1 << 31), (1 << 31) - 1),
        "accel": arrays.arrays(np.float32, 3, elements=st.floats(width=32, allow_nan=False)),
        "samples": st.integers(0, 5).flatmap(lambda n: arrays.arrays(np.int16, (n, 2))),
        "big": st.integers(0, (1 << 64) - 1),
        "note": st.text(),
        "raw": st.binary(),
    }
)


@given(row=ROW)
@settings(max_examples=25, deadline=None)
def test_rows_come_back(row: dict[str, Any]) -> None:
    layout = RecordSchema.parse(SCHEMA)
    back = layout.decode(layout.encode(row))
    assert list(back) == list(layout.fields)
    for name, value in row.items():
        assert np.array_equal(back[name], value), name
        assert type(back[name]) is type(value)
        if isinstance(value, np.ndarray):
            assert back[name].dtype == value.dtype


def test_a_schema_is_its_text() -> None:
    layout = RecordSchema.parse("a=float32[ ?, 3], b=string")
    assert layout.text == "a=float32[?,3],b=string"
    assert RecordSchema.parse(layout.text) == layout


def test_a_schema_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.schema").write_bytes(b"\xff")
    for name, said in (("a.schema", "codec can't decode"), ("b.schema", "No such file")):
        with pytest.raises(DataError, match=said):
            RecordSchema.load(tmp_path / name)


def test_the_bytes_are_those_described() -> None:
    layout = RecordSchema.parse("n=int16,x=float32[?],s=string")
    record = layout.encode({"n": -2, "x": [1.0], "s": "é"})
    assert record == (
        layout.mark.to_bytes(8, "little") + b"\xfe\xff" + b"\1\0\0\0\0\0\x80\x3f" + b"\2\0\0\0" + "é".encode()
    )


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("", "an empty schema"),
        ("a", "schema 'a', from character 0 on: 'a'"),
        ("a=int32 b=int32", "from character 0 on"),
        ("a=int32,a=int32", "field 'a': named twice"),
        ("a=complex64", "field 'a' of type complex64"),
        ("a=string[3]", "field 'a' of type string[3]"),
        ("a=int8[1,,2]", "field 'a' of dims [1,,2]"),
        ("a=int8[99999,99999]", "more than 268,435,456 values"),
    ],
)
def test_schemas_that_are_none(schema: str, said: str) -> None:
    with pytest.raises(DataError, match=re.escape(said)) as caught:
        RecordSchema.parse(schema)
    assert "try:  time=float64,accel=float32[3],samples=int16[?,6],note=string" in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "value", "said"),
    [
        ("a=int8", 128, "field 'a', 128 (int): outside of int8"),
        ("a=uint8", -1, "outside of uint8"),
        ("a=uint64", 1 << 64, "not uint64"),
        ("a=int8", 1.0, "not int8"),
        ("a=bool", 1, "not bool"),
        ("a=float32", 1e300, "outside of float32"),
        ("a=float32", "1", "not float32"),
        ("a=float32[3]", [1.0, 2.0], "shape [2]"),
        ("a=float32[?,2]", [[1.0], [2.0]], "shape [2, 1]"),
        ("a=int32", [1], "shape [1]"),
        ("a=string", b"x", "not str"),
        ("a=bytes", "x", "not bytes"),
    ],
)
def test_values_that_do_not_fit(schema: str, value: Any, said: str) -> None:
    with pytest.raises(DataError, match=re.escape(said)):
        RecordSchema.parse(schema).encode({"a": value})


def test_rows_of_other_fields() -> None:
    with pytest.raises(DataError) as caught:
        RecordSchema.parse("a=int8,b=int8").encode({"a": 1, "c": 1})
    assert str(caught.value) == (
        "a row with no 'b', 'c'\n"
        "  rule: each row has exactly the fields of the schema: a=int8,b=int8\n"
        "  so:   it was not written\n"
        "  try:  another type or dim (? is any size) in the schema, or rows that fit"
    )


@given(record=st.binary(max_size=40), cut=st.integers(0, 60))
@settings(max_examples=60, deadline=None)
def test_hostile_records_are_errors(record: bytes, cut: int) -> None:
    layout = RecordSchema.parse("x=float64[?,?],s=string,b=bytes")
    with pytest.raises(DataError):
        layout.decode(record)
    whole = layout.encode({"x": np.ones((2, 2)), "s": "abc", "b": b"abc"})
    with pytest.raises(DataError):
        layout.decode(whole[:cut])
    try:
        row = layout.decode(whole[:8] + record)
    except DataError:
        return
    assert layout.encode(row) == whole[:8] + record


def test_a_size_that_no_memory_has_is_not_allocated() -> None:
    layout = RecordSchema.parse("x=float64[?,?]")
    record = layout.mark.to_bytes(8, "little") + b"\xff" * 8
    with pytest.raises(DataError, match=r"an array of shape \[4294967295, 4294967295\], where 0 bytes are left"):
        layout.decode(record)
