"""Rows go through any chain of formats that hold them and come back as they were: values, types, order."""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from unisono.data.convert import Table, open_table, write_table
from unisono.data.convert.formats.table import Row
from unisono.data.convert.table_files import convert
from unisono.data.recordio import RecordWriter
from unisono.errors import DataError

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBERS = {"int": INT64, "flt": st.floats()}
ARRAYS = {
    f"arr_{dtype}": hnp.arrays(np.dtype(dtype), st.tuples(st.integers(1, 3), st.just(2)))
    for dtype in ("int32", "float32", "int64", "float64")
}
EVERY_ARRAY = ARRAYS | {
    f"more_{dtype}": hnp.arrays(np.dtype(dtype), st.tuples(st.integers(0, 3), st.just(2), st.just(3)))
    for dtype in ("bool", "int8", "uint8", "uint16", "float16", "uint64")
}
FIELDS: dict[str, dict[str, Any]] = {
    ".rec": NUMBERS
    | {"data": st.binary(max_size=9), "key": st.integers(0, 1 << 62)}
    | {f"list_{d}": hnp.arrays(np.dtype(d), st.integers(0, 3)) for d in ("uint8", "uint16", "int64", "float32")},
    ".mindrecord": {"int": INT64, "flt": st.floats(allow_nan=False, allow_infinity=False)}
    | {"txt": TEXT.filter(lambda text: "\0" not in text), "blob": st.binary(min_size=1, max_size=9)}
    | ARRAYS,
    ".jsonl": {"int": st.integers(), "flt": st.floats(allow_nan=False, allow_infinity=False), "txt": TEXT}
    | {"bool": st.booleans(), "blob": st.binary(max_size=9)}
    | {
        "ints": hnp.arrays(np.int64, st.tuples(st.integers(1, 3), st.just(2))),
        "flts": hnp.arrays(np.float64, 3, elements=st.floats(allow_nan=False, allow_infinity=False)),
        "bools": hnp.arrays(np.bool_, (2, 2)),
        "words": st.lists(TEXT, min_size=1, max_size=3),
    },
    ".parquet": NUMBERS
    | {"txt": TEXT, "bool": st.booleans(), "blob": st.binary(max_size=9)}
    | {"words": st.lists(TEXT, min_size=1, max_size=3)}
    | EVERY_ARRAY,
    ".tar": NUMBERS
    | {"txt": TEXT, "a.json": TEXT, "bin": st.binary(), "blob": st.binary(), "x.y": st.binary()}
    # a name that looks like a type, for another type
    | {"npy": st.integers(), "cls": TEXT, "f.txt": st.binary()}
    | EVERY_ARRAY,
    ".csv": NUMBERS | {"txt": TEXT, 'odd, "name"': TEXT},
}


def same(one: Any, two: Any) -> bool:
    """Equal to the bit, of the same type."""
    if isinstance(one, np.ndarray):
        return isinstance(two, np.ndarray) and (one.dtype, one.shape, one.tobytes()) == (
            two.dtype,
            two.shape,
            two.tobytes(),
        )
    if isinstance(one, float):
        return type(two) is float and (struct.pack("d", one) == struct.pack("d", two) or (one != one and two != two))
    return type(one) is type(two) and one == two


def check(rows: list[dict[str, Any]], found: list[Row]) -> None:
    assert len(found) == len(rows)
    for row, other in zip(rows, found, strict=True):
        other = {name: value for name, value in other.items() if name != "__key__"}
        assert row.keys() == other.keys()
        for name in row:
            assert same(row[name], other[name]), name


@pytest.mark.parametrize("suffix", FIELDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_a_format_holds_comes_back(suffix: str, data: st.DataObject) -> None:
    fields = FIELDS[suffix]
    names = data.draw(st.lists(st.sampled_from(sorted(fields)), min_size=1, unique=True))
    if suffix == ".rec":
        names = [*{*names, "data"}]
    if suffix == ".mindrecord":
        names = sorted({*names, "int", "blob"})  # sorted as it stores them
    if suffix == ".csv":
        names = [*{*names, "txt"}]  # a float column of only whole numbers reads as float by its text, with any other
    rows = data.draw(st.lists(st.fixed_dictionaries({name: fields[name] for name in names}), min_size=1, max_size=5))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a{suffix}"
        assert write_table(path, Table(rows=rows)) == len(rows)
        found = list(open_table(path).rows)
        if suffix == ".rec":  # keys that are only the numbers of the records are none
            found = [{"key": n} | row if "key" in names else row for n, row in enumerate(found)]
        check(rows, found)
        assert not list(Path(folder).glob("*tmp*"))


COMMON = [
    {
        "blob": bytes([n]) * (n + 1),
        "flt": n / 3,
        "ids": np.arange(2 * n + 2).reshape(-1, 2) - n,
        "int": n - 2,
        "txt": f"ü {n}",
    }
    for n in range(7)
]


@pytest.mark.parametrize("first", [".mindrecord", ".jsonl", ".parquet", ".tar"])
@pytest.mark.parametrize("second", [".mindrecord", ".jsonl", ".parquet", ".tar"])
def test_any_way_through_the_formats_that_hold_arrays(tmp_path: Path, first: str, second: str) -> None:
    write_table(tmp_path / f"a{first}", Table(rows=COMMON))
    assert convert(tmp_path / f"a{first}", tmp_path / f"b{second}") == 7
    assert convert(tmp_path / f"b{second}", tmp_path / "c.parquet") == 7
    check(COMMON, list(open_table(tmp_path / "c.parquet").rows))


def test_lists_of_strings_are_kept_or_refused(tmp_path: Path) -> None:
    rows = [{"blob": b"1", "tags": np.array([1, 2]), "words": ["New York", "a\nb"]}] * 2
    write_table(tmp_path / "a.jsonl", Table(rows=[{**row, "words": [*row["words"], "é"]} for row in rows]))
    assert json.loads((tmp_path / "a.jsonl").read_text().splitlines()[0])["words"] == ["New York", "a\nb", "é"]
    convert(tmp_path / "a.jsonl", tmp_path / "b.parquet")
    convert(tmp_path / "b.parquet", tmp_path / "c.jsonl")
    check(list(open_table(tmp_path / "a.jsonl").rows), list(open_table(tmp_path / "c.jsonl").rows))
    columns: dict[str, Any] = {"columns": ["words", "blob"]}
    for suffix, what in (
        (".mindrecord", "field 'words' of type string with shape [-1]"),
        (".rec", "row 0 with blob (bytes), words (list) as a RecordIO record"),
        (".tar", "row 0, field 'words': ['New York', 'a\\nb', 'é'] (list)"),
        (".csv", "field 'words', a list of strings, as CSV"),
    ):
        with pytest.raises(DataError) as caught:
            convert(tmp_path / "b.parquet", tmp_path / f"d{suffix}", **columns, base64=["blob"] * (suffix == ".csv"))
        assert str(caught.value).startswith(what), suffix
        assert "\n  so:   nothing was written\n" in str(caught.value)
        assert not list(tmp_path.glob("d.*"))


def test_through_csv_with_its_bytes_said(tmp_path: Path) -> None:
    rows = [{name: row[name] for name in ("blob", "flt", "int", "txt")} for row in COMMON]
    write_table(tmp_path / "a.parquet", Table(rows=rows))
    convert(tmp_path / "a.parquet", tmp_path / "b.csv", base64=["blob"])
    assert (tmp_path / "b.csv").read_text().startswith('blob,flt,int,txt\nAA==,0.0,-2,"ü 0"\n')
    convert(tmp_path / "b.csv", tmp_path / "c.jsonl", base64=["blob"])
    check(rows, list(open_table(tmp_path / "c.jsonl").rows))


@pytest.mark.parametrize("name", ["a;b", "a\tb", "a|b", "a,b"])
def test_through_csv_with_one_name_that_looks_like_several(tmp_path: Path, name: str) -> None:
    write_table(tmp_path / "a.csv", Table(rows=[{name: 1}]))
    check([{name: 1}], list(open_table(tmp_path / "a.csv").rows))


def test_columns_in_their_order(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", Table(rows=COMMON))
    write_table(tmp_path / "a.tar", Table(rows=COMMON))
    for name in ("a.parquet", "a.tar"):
        convert(tmp_path / name, tmp_path / "b.rec", columns=["int", "blob"], overwrite=True)
        assert [row["int"] for row in open_table(tmp_path / "b.rec").rows] == [row["int"] for row in COMMON]
        with pytest.raises(DataError, match=r"has no column 'ind'\n.*\n.*\n  try:  did you mean 'int'\?"):
            list(open_table(tmp_path / name, columns=["ind"]).rows)


@pytest.mark.parametrize(
    ("suffix", "row", "given"),
    [
        (".mindrecord", {"a": True}, "field 'a' of type 'bool'"),
        (".rec", {"a": b"1", "b": True}, "row 0 with a (bytes), b (bool) as a RecordIO record"),
        (".rec", {"a": b"1", "b": 1 << 63}, "row 0, field 'b': 9223372036854775808 (int)"),
        (".rec", {"a": b"1", "b": np.zeros((2, 2))}, "row 0 with a (bytes), b (ndarray) as a RecordIO record"),
        (".rec", {"a": b"1", "b": np.zeros(2, np.int32)}, "row 0 with a (bytes), b (ndarray) as a RecordIO record"),
        (".rec", {"a": b"1", "data": 3}, "row 0, field 'data': 3 (int)"),
        (".csv", {"a": b"1"}, "field 'a', which is bytes, as CSV"),
        (".csv", {"a": np.arange(3)}, "field 'a', an array, as CSV"),
        (".csv", {"a": 1 << 63}, "row 0, field 'a': 9223372036854775808 (int)"),
        (".csv", {"a": "\ud800"}, "row 0: surrogates not allowed"),
        (".csv", {"a\ud800": 1}, "field 'a\\ud800', a lone surrogate at 1 of its name"),
        (".parquet", {"a\ud800": 1}, "field 'a\\ud800', a lone surrogate at 1 of its name"),
        (".jsonl", {"a": "\ud800"}, "row 0: surrogates not allowed"),
        (".jsonl", {"a": np.array([np.nan])}, "row 0: Out of range float values are not JSON compliant"),
        (".parquet", {"a": 1 << 63}, "row 0, field 'a': 9223372036854775808 (int)"),
        (".parquet", {"a": "\ud800"}, "rows 0 to 0: "),
        (".parquet", {"a": None}, "field 'a', a NoneType"),
        (".parquet", {"a": []}, "field 'a', a list"),
        (".parquet", {"a": ["x", 1]}, "field 'a', a list"),
        (".parquet", {"a": ["\ud800"]}, "rows 0 to 0: "),
        (".parquet", {"a": np.array(["x"])}, "field 'a', a ndarray"),
        (".tar", {"a": True}, "row 0, field 'a': True (bool)"),
        (".tar", {"a/b": 1}, "row 0, field 'a/b': 1 (int)"),
        (".tar", {"__key__": "a.b", "a": 1}, "row 0 with the key 'a.b' (str) and 1 fields besides"),
        (".tar", {"__key__": "../b", "a": 1}, "row 0 with the key '../b' (str) and 1 fields besides"),
        (".tar", {"__key__": "b"}, "row 0 with the key 'b' (str) and 0 fields besides"),
    ],
)
def test_what_a_format_does_not_hold_is_named(tmp_path: Path, suffix: str, row: Row, given: str) -> None:
    with pytest.raises(DataError) as caught:
        write_table(tmp_path / f"a{suffix}", Table(rows=[row]))
    assert str(caught.value).startswith(given)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("second", "given"),
    [
        ({"a": 1.0, "b": np.zeros((1, 2))}, "row 1, field 'a': 1.0 (float)"),
        ({"a": True, "b": np.zeros((1, 2))}, "row 1, field 'a': True (bool)"),
        ({"a": 1}, "row 1, which has no 'b'"),
        ({"a": ["x"], "b": np.zeros((1, 2))}, "row 1, field 'a': ['x'] (list)"),
        ({"a": 1, "b": np.zeros((1, 2)), "c": 1}, "row 1, which has 'c'"),
        ({"a": 1, "b": np.zeros((1, 3))}, "row 1, field 'b': an array of float64 and shape [1, 3]"),
        ({"a": 1, "b": np.zeros((1, 2), "f4")}, "row 1, field 'b': an array of float32 and shape [1, 2]"),
    ],
)
def test_parquet_has_one_type_a_column(tmp_path: Path, second: Row, given: str) -> None:
    with pytest.raises(DataError) as caught:
        write_table(tmp_path / "a.parquet", Table(rows=[{"a": 1, "b": np.zeros((1, 2))}, second]))
    assert str(caught.value).startswith(given)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("one", "two"), [(1, 0.5), (np.arange(2), 3), (np.arange(2), np.arange(2.0))])
def test_a_side_column_has_one_type(tmp_path: Path, one: Any, two: Any) -> None:
    with pytest.raises(
        DataError, match=r"row 1, field 'b': .*\n  rule: a side column is of ints, of floats, or of arrays"
    ):
        write_table(tmp_path / "a.rec", Table(rows=[{"a": b"1", "b": one}, {"a": b"2", "b": two}]))
    assert list(tmp_path.iterdir()) == []


def test_side_columns_under_the_names_of_payload_and_key(tmp_path: Path) -> None:
    for name in ("data", "key"):
        with RecordWriter(tmp_path / f"{name}.rec") as writer:
            writer.write(b"payload", key=7, side={name: 1})
        with pytest.raises(DataError, match=rf"{name}\.rec with side columns \['{name}'\]"):
            open_table(tmp_path / f"{name}.rec")


def test_tar_keys_may_not_repeat_next_to_each_other(tmp_path: Path) -> None:
    rows = [{"__key__": key, "a": 1} for key in ("x", "y", "x", "x")]
    with pytest.raises(DataError, match=r"row 3 with the key 'x'"):
        write_table(tmp_path / "a.tar", Table(rows=rows))
    assert write_table(tmp_path / "a.tar", Table(rows=rows[:3])) == 3
    assert [row["__key__"] for row in open_table(tmp_path / "a.tar").rows] == ["x", "y", "x"]


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    def rows() -> Any:
        yield {"a": 1}
        raise RuntimeError("the source broke")

    for suffix in FIELDS.keys() - {".rec"}:
        (tmp_path / f"a{suffix}").write_text("mine")
        with pytest.raises(RuntimeError, match="the source broke"):
            write_table(tmp_path / f"a{suffix}", Table(rows=rows()))
        assert (tmp_path / f"a{suffix}").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == len(FIELDS) - 1
