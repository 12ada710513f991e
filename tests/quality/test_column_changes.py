"""Copies of tables with masked values and one schema: nothing else changes, and each masked value can be put back."""

from __future__ import annotations

import base64
import codecs
import io
import json
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unisono.data.convert.formats.table import Table
from unisono.data.convert.table_files import open_file, write_table
from unisono.data.image.decoding import decode, probe
from unisono.data.recordio import ImageHeader, pack_header, unpack_header
from unisono.errors import ConfigError, DataError
from unisono.quality.columns import changes as column_changes
from unisono.quality.columns import scan as column_scan
from unisono.quality.columns.check import ColumnOptions, ColumnsResult, check_columns
from unisono.quality.columns.numeric_columns import REASONS
from unisono.quality.columns.schema import schema_of
from unisono.quality.columns.targets import targets_of
from unisono.quality.documents import find_documents

MASK = ColumnOptions(columns=("x",), mask=REASONS)
UNIFY = ColumnOptions(unify=True)
SKIP = ColumnOptions(unify=True, skips_unfit=True)
ROWS = 300
PLANTED = {7: "-4e9", 100: "NaN", 299: "Infinity", **dict.fromkeys(range(150, 185), "20.50")}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def values() -> list[str]:
    """Readings as text, with two digits behind the point, and the planted ones."""
    usual = [f"{value:.2f}" for value in np.random.default_rng(0).normal(20, 1, ROWS)]
    return [PLANTED.get(row, value) for row, value in enumerate(usual)]


def copied(out: Path, paths: list[Path]) -> ColumnsResult:
    """The report of the copies."""
    return check_columns([out / "data" / path.name for path in paths])


def refusal(paths: list[Path], out: Path, options: ColumnOptions) -> str:
    with pytest.raises(DataError) as caught:
        check_columns(paths, out=out, options=options)
    assert not (out / "data").exists()
    return caught.value.problems[0].given


# --- masked values -----------------------------------------------------------------------------------------------------


def test_masked_values_of_jsonl_can_be_put_back(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [
        f'{{ "n" : {number},"s":"Gr\\u00fc\\u00dfe ü", "x" :{value} , "y": 1e2}}'
        for number, value in enumerate(values())
    ]
    path.write_text("\n".join(rows))  # the last line has no end
    result = check_columns([path], out=tmp_path / "out", options=MASK)
    before, after = path.read_bytes().splitlines(True), (tmp_path / "out/data/a.jsonl").read_bytes().splitlines(True)
    changed = [row for row, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    assert changed == sorted(PLANTED)
    assert all(json.loads(after[row]) == {**json.loads(before[row]), "x": None} for row in changed)
    for record in lines(tmp_path / "out/masked.jsonl"):
        assert (record["file"], record["new_row"], record["column"]) == ("a.jsonl", record["row"], "x")
        row = record["new_row"]
        after[row] = after[row].replace(b'"x" :null', f'"x" :{record["value"]}'.encode())
    assert b"".join(after) == path.read_bytes()
    assert result.changes is not None
    assert result.changes.masked == {"x": 38}
    assert "38" in (tmp_path / "out/report.html").read_text()
    assert check_columns([path], out=tmp_path / "out", options=MASK) == result
    assert "dropped" in json.loads((tmp_path / "out/report.json").read_text())["changes"]


def test_a_column_and_a_group_with_lone_surrogates(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"\\ud800":{value},"\\udfff":"\\ud800"}}\n' for value in values()))
    result = check_columns([path], out=tmp_path / "out", options=ColumnOptions(group="\udfff", mask=REASONS))
    assert {line["column"] for line in lines(tmp_path / "out" / "flagged.jsonl")} == {"\ud800"}
    masked = {line["row"]: line["value"] for line in lines(tmp_path / "out" / "masked.jsonl")}
    assert masked == PLANTED
    assert check_columns([path], out=tmp_path / "out", options=ColumnOptions(group="\udfff", mask=REASONS)) == result


def test_masked_values_of_csv_can_be_put_back(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    texts = [{"NaN": "nan", "Infinity": "inf"}.get(value, value) for value in values()]
    rows = [f'{number},{value},"a ""b"", c",007' for number, value in enumerate(texts)]
    path.write_bytes(b"\xef\xbb\xbf" + "".join(f"{row}\r\n" for row in ["n,x,s,code", *rows]).encode())
    check_columns([path], out=tmp_path / "out", options=MASK)
    before, after = path.read_bytes().split(b"\n"), (tmp_path / "out/data/a.csv").read_bytes().split(b"\n")
    assert [row - 1 for row, old in enumerate(before) if old != after[row]] == sorted(PLANTED)
    for record in lines(tmp_path / "out/masked.jsonl"):
        cells = after[1 + record["new_row"]].split(b",")
        assert cells[1] == b""
        cells[1] = record["value"].encode()
        after[1 + record["new_row"]] = b",".join(cells)
    assert after == before


def test_masked_values_of_parquet_can_be_put_back(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    numbers = [None if row == 50 else float(value) for row, value in enumerate(values())]
    schema = pa.schema(
        [pa.field("x", "float", nullable=True), pa.field("n", "int16", nullable=False)], {"made": "here"}
    )
    table = pa.table([pa.array(numbers, "float"), pa.array(range(ROWS), "int16")], schema=schema)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    check_columns([tmp_path / "a.parquet"], out=tmp_path / "out", options=MASK)
    new = pq.read_table(tmp_path / "out/data/a.parquet")
    assert (new.schema, new.schema.metadata) == (table.schema, table.schema.metadata)
    column = new["x"].to_pylist()
    assert [row for row in range(ROWS) if column[row] is None] == sorted({50, *PLANTED})
    for record in lines(tmp_path / "out/masked.jsonl"):
        column[record["new_row"]] = float(record["value"])
    assert repr(column) == repr(table["x"].to_pylist())
    assert new["n"] == table["n"]


def test_only_the_reasons_and_columns_that_are_named_are_masked(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"x": {value}, "y": {value}}}\n' for value in values()))
    options = ColumnOptions(columns=("y",), mask=("non-finite",))
    check_columns([path], out=tmp_path / "out", options=options)
    assert [(each["row"], each["column"], each["value"]) for each in lines(tmp_path / "out/masked.jsonl")] == [
        (100, "y", "NaN"),
        (299, "y", "Infinity"),
    ]
    flagged = Counter(tuple(each["reasons"]) for each in lines(tmp_path / "out/flagged.jsonl"))
    assert flagged == {("outlier",): 1, ("non-finite",): 2, ("stuck",): 35}


def test_files_are_masked_each_in_its_own_rows(tmp_path: Path) -> None:
    texts = values()
    paths = [tmp_path / f"{name}.csv" for name in "abc"]
    for path, part in zip(paths, (texts[:5], texts[5:160], texts[160:]), strict=True):
        path.write_text(
            "\n".join(["x", *(text.replace("NaN", "nan").replace("Infinity", "inf") for text in part)]) + "\n"
        )
    check_columns(paths, out=tmp_path / "out", options=MASK)
    assert (tmp_path / "out/data/a.csv").read_bytes() == paths[0].read_bytes()
    places = Counter(each["file"] for each in lines(tmp_path / "out/masked.jsonl"))
    assert places == {"b.csv": 12, "c.csv": 26}
    masked = [row for row, line in enumerate((tmp_path / "out/data/b.csv").read_text().splitlines()[1:]) if not line]
    assert masked == [2, 95, *range(145, 155)]


@pytest.mark.parametrize("suffix", [".rec", ".tar"])
def test_formats_without_null_have_nan_in_its_place(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    rows = [{"data": b"payload", "x": float(value), "n": number} for number, value in enumerate(values())]
    write_table(path, Table(rows=rows))
    check_columns([path], out=tmp_path / "out", options=MASK)
    new = [*open_file(tmp_path / "out/data" / path.name, suffix).rows]
    assert [row for row in range(ROWS) if np.isnan(new[row]["x"])] == sorted(PLANTED)
    for record in lines(tmp_path / "out/masked.jsonl"):
        new[record["new_row"]]["x"] = float(record["value"])
    names = ("data", "x", "n")
    assert [[repr(row[name]) for name in names] for row in new] == [[repr(row[name]) for name in names] for row in rows]


def test_an_int_cannot_be_masked_in_a_format_without_null(tmp_path: Path) -> None:
    ints = [int(float(value)) if np.isfinite(float(value)) else 20 for value in values()]
    write_table(tmp_path / "a.rec", Table(rows=[{"data": b"", "x": value} for value in ints]))
    options = ColumnOptions(columns=("x",), mask=("outlier",))
    given = refusal([tmp_path / "a.rec"], tmp_path / "out", options)
    assert given == f"{tmp_path / 'a.rec'}: row 7, column 'x': -4000000000 (int)"


def test_mindrecord_has_no_masked_values(tmp_path: Path) -> None:
    numbers = [20.0 + number % 7 for number in range(ROWS)]
    write_table(tmp_path / "a.mindrecord", Table(rows=[{"x": number} for number in [*numbers, -4e9]]))
    assert refusal([tmp_path / "a.mindrecord"], tmp_path / "out", MASK).endswith(
        "row 300, column 'x': -4000000000.0 (float)"
    )
    result = check_columns([tmp_path / "a.mindrecord"], out=tmp_path / "none", options=ColumnOptions(mask=("stuck",)))
    assert [*open_file(tmp_path / "none/data/a.mindrecord", ".mindrecord").rows][300] == {"x": -4e9}
    assert result.changes is not None
    assert result.changes.masked == {}


def test_a_copy_needs_a_folder_and_a_format_that_is_written(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"x": 1}])
    with pytest.raises(ConfigError, match="without a folder"):
        check_columns([path], options=MASK)
    (tmp_path / "a.tfrecord").write_bytes(b"")
    with pytest.raises(DataError, match=r"whose format \.tfrecord is only read"):
        check_columns([tmp_path / "a.tfrecord"], out=tmp_path / "out", options=UNIFY)


# --- one schema --------------------------------------------------------------------------------------------------------


def test_files_of_three_formats_become_one_schema(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    paths = [tmp_path / name for name in ("a.jsonl", "b.csv", "c.parquet", "d.jsonl", "e.csv", "empty.jsonl")]
    paths[0].write_text('{"id": 1, "x": 1.50, "s": "a"}\n{"x":2,"id":2,"s":"b"}\n')
    paths[1].write_text('extra,id,x,s\n"7","3",4,"c"\n,"4",,"d, e"\n')
    pq.write_table(pa.table({"id": pa.array([5, None], "int32"), "x": pa.array([5, 6], "int64")}), paths[2])
    jsonl(paths[3], [{"id": True, "x": "7.25", "s": 12.5}, {}])
    paths[4].write_text("id,s,x\n8,9,10\n")
    paths[5].write_text("")
    assert {each.kind for each in check_columns(paths).differences} == {"missing", "extra", "type"}
    result = check_columns(paths, out=tmp_path / "out", options=UNIFY)
    data = tmp_path / "out/data"
    after = copied(tmp_path / "out", paths)
    assert after.differences == ()
    assert {column.name: column.type for column in after.columns} == {
        "id": "int",
        "x": "float",
        "s": "string",
        "extra": "string",
    }
    assert (data / "a.jsonl").read_text() == (
        '{"id": 1, "x": 1.50, "s": "a", "extra": null}\n{"x":2.0,"id":2,"s":"b", "extra": null}\n'
    )
    assert (data / "b.csv").read_text() == 'id,x,s,extra\n3,4.0,"c","7"\n4,,"d, e",\n'
    parquet = pq.read_table(data / "c.parquet")
    assert parquet.to_pydict() == {"id": [5, None], "x": [5.0, 6.0], "s": [None] * 2, "extra": [None] * 2}
    assert list(map(str, parquet.schema.types)) == ["int32", "double", "string", "string"]
    assert (data / "d.jsonl").read_text() == (
        '{"id": 1, "x": 7.25, "s": "12.5", "extra": null}\n{"id": null, "x": null, "s": null, "extra": null}\n'
    )
    assert (data / "e.csv").read_text() == 'id,x,s,extra\n8,10.0,"9",\n'
    assert (data / "empty.jsonl").read_bytes() == b""
    assert result.changes is not None
    assert result.changes.types == {"id": "int", "x": "float", "s": "string", "extra": "string"}
    casts = {(each.file, each.column, each.change): each.count for each in result.changes.casts}
    assert casts["d.jsonl", "id", "bool to int"] == 1
    assert casts["c.parquet", "x", "int64 to double"] == 2
    assert casts["b.csv", "id", "string to int"] == 2
    assert casts["c.parquet", "s", "added"] == 2
    assert "Changed to fit the schema" in (tmp_path / "out/report.html").read_text()


def test_a_file_that_fits_is_copied(tmp_path: Path) -> None:
    paths = [jsonl(tmp_path / f"{number}.jsonl", [{"id": number, "s": "ü"}]) for number in range(2)]
    jsonl(tmp_path / "odd.jsonl", [{"id": "7", "s": "a"}])
    check_columns([*paths, tmp_path / "odd.jsonl"], out=tmp_path / "out", options=UNIFY)
    for path in paths:
        assert (tmp_path / "out/data" / path.name).read_bytes() == path.read_bytes()
    assert lines(tmp_path / "out/data/odd.jsonl") == [{"id": 7, "s": "a"}]


def test_types_of_parquet_become_the_widest(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    when = [1_700_000_000_000, None]
    usual = {
        "n": pa.array([1, 2], "int32"),
        "f": pa.array([0.1, float("nan")], "float"),
        "t": pa.array(when, pa.timestamp("ms")),
        "s": pa.array(["a", None]),
        "list": pa.array([[1, 2], []], pa.list_(pa.int64())),
        "b": pa.array([b"\x00", None], "binary"),
        "empty": pa.array([1, 2], "int64"),
    }
    odd = {
        "empty": pa.nulls(2),
        "b": pa.array([None, b"\x01"], "large_binary"),
        "list": pa.array([[3], None], pa.list_(pa.int32())),
        "s": pa.array(["a", "b"]).dictionary_encode(),
        "t": pa.array([None, 1_700_000_000_000_000], pa.timestamp("us")),
        "f": pa.array([0.1, float("inf")], "double"),
        "n": pa.array([2**40, -1], "int64"),
    }
    paths = [tmp_path / f"{name}.parquet" for name in "abc"]
    for path, columns in zip(paths, (usual, usual, odd), strict=True):
        pq.write_table(pa.table(columns), path)
    assert len(check_columns(paths).differences) == 6
    check_columns(paths, out=tmp_path / "out", options=UNIFY)
    assert copied(tmp_path / "out", paths).differences == ()
    tables = [pq.read_table(tmp_path / "out/data" / path.name) for path in paths]
    assert tables[0].schema == tables[1].schema == tables[2].schema
    assert [str(tables[0].schema.field(name).type) for name in ("n", "f", "t", "s")] == [
        "int64",
        "double",
        "timestamp[ms]",
        "string",
    ]
    assert repr(tables[0]["f"].to_pylist()) == repr(usual["f"].to_pylist())
    for name, column in odd.items():
        assert tables[2][name].to_pylist() == column.to_pylist(), name


def test_numbers_among_texts_of_csv_become_texts(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"code": "A1"}])
    (tmp_path / "b.csv").write_text("code\n42\nA1\n007\n1.50\n\n")
    check_columns([path, tmp_path / "b.csv"], out=tmp_path / "out", options=UNIFY)
    assert (tmp_path / "out/data/b.csv").read_text() == 'code\n"42"\nA1\n007\n"1.50"\n\n'


def test_coded_strings_of_parquet_stay_coded(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    coded = pa.array(["a", "b"]).dictionary_encode()
    paths = [tmp_path / f"{name}.parquet" for name in "abc"]
    for path, column in zip(paths, (coded, coded, pa.array([1, None])), strict=True):
        pq.write_table(pa.table({"s": column}), path)
    check_columns(paths, out=tmp_path / "out", options=UNIFY)
    tables = [pq.read_table(tmp_path / "out/data" / path.name) for path in paths]
    assert [table.schema.field("s").type for table in tables] == [coded.type] * 3
    assert tables[2]["s"].to_pylist() == ["1", None]


@pytest.mark.parametrize(
    ("usual", "odd", "reason"),
    [
        ("1", '"007"', "'007' (str): it is no text of an int"),
        ("1", '"1.0"', "'1.0' (str): it is no text of an int"),
        ("1.5", "9007199254740993", "9007199254740993 (int): float64 has no such number"),
        ("1.5", '"0.12345678901234567890"', "float64 does not keep all its digits"),
        ("1.5", '"nan"', "it is no text of a finite number"),
        ("1.5", "[1]", "[1] (list): there is no cast without loss"),
        ("true", "1", "1 (int): there is no cast without loss"),
        ('"a"', "false", "False (bool): there is no cast without loss"),
        ('{"k": 1}', "1", "1 (int): there is no cast without loss"),
    ],
)
def test_a_value_that_would_lose_is_named(tmp_path: Path, usual: str, odd: str, reason: str) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(f'{{"v": {usual}}}\n' * 3)
    (tmp_path / "c.jsonl").write_text(f'{{"v": null}}\n{{"v": {odd}}}\n')
    paths = [tmp_path / f"{name}.jsonl" for name in "abc"]
    given = refusal(paths, tmp_path / "out", UNIFY)
    assert given.startswith(f"{paths[2]}: row 1, column 'v': ")
    assert given.endswith(reason)
    result = check_columns(paths, out=tmp_path / "skipped", options=SKIP)
    assert (tmp_path / "skipped/data/c.jsonl").read_text() == '{"v": null}\n'
    assert copied(tmp_path / "skipped", paths).differences == ()
    (dropped,) = lines(tmp_path / "skipped/dropped.jsonl")
    assert (dropped["file"], dropped["row"], dropped["column"]) == ("c.jsonl", 1, "v")
    assert result.changes is not None
    assert result.changes.dropped == {"c.jsonl": 1}


def test_values_of_parquet_that_would_lose_are_named(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    usual = {
        "f": pa.array([0.5], "double"),
        "n": pa.array([1], "int64"),
        "list": pa.array([[0.5]], pa.list_(pa.float32())),
        "t": pa.array([1], pa.timestamp("ms")),
    }
    odd = {
        "f": pa.array([1, 2**53 + 1, 3, 4, 5], "int64"),
        "n": pa.array(["1", "2", "x", "4", "5"]),
        "list": pa.array([[0.5], None, [0.5], [0.1], [float("nan")]], pa.list_(pa.float64())),
        "t": pa.array([1000, 1000, 1000, 1000, 1001], pa.timestamp("us")),
    }
    paths = [tmp_path / f"{name}.parquet" for name in "abc"]
    for path, columns in zip(paths, (usual, usual, odd), strict=True):
        pq.write_table(pa.table(columns), path)
    assert "row 1, column 'f': 9007199254740993 (int)" in refusal(paths, tmp_path / "out", UNIFY)
    result = check_columns(paths, out=tmp_path / "skipped", options=SKIP)
    assert pq.read_table(tmp_path / "skipped/data/c.parquet").to_pydict() == {
        "f": [1.0],
        "n": [1],
        "list": [[0.5]],
        "t": pa.array([1], pa.timestamp("ms")).to_pylist(),
    }
    dropped = [(each["row"], each["column"]) for each in lines(tmp_path / "skipped/dropped.jsonl")]
    assert dropped == [(1, "f"), (2, "n"), (3, "list"), (4, "t")]
    assert result.changes is not None
    assert {(each.change, each.count) for each in result.changes.casts} == {
        ("int64 to double", 1),
        ("string to int", 1),
        ("list<element: double> to list<element: float>", 1),
        ("timestamp[us] to timestamp[ms]", 1),
    }


def test_times_keep_their_zones(tmp_path: Path) -> None:
    """A time without a zone is no instant: it becomes none, and an instant keeps a zone."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    stamp = 1_700_000_000_000_000
    types = {zone: pa.timestamp("us", zone) for zone in (None, "-05:00", "UTC")}

    def files(folder: Path, usual: str | None, odd: str | None, *, nested: bool) -> list[Path]:
        folder.mkdir()
        paths = [folder / f"{name}.parquet" for name in "abc"]
        for path, zone in zip(paths, (usual, usual, odd), strict=True):
            kind = pa.list_(types[zone]) if nested else types[zone]
            pq.write_table(pa.table({"t": pa.array([None, [stamp] if nested else stamp], kind), "n": [1, 2]}), path)
        return paths

    for number, (usual, odd, nested) in enumerate(
        [(None, "-05:00", False), ("-05:00", None, False), (None, "UTC", True), ("UTC", None, True)]
    ):
        paths = files(tmp_path / f"{number}", usual, odd, nested=nested)
        told = refusal(paths, tmp_path / f"out{number}", UNIFY)
        assert "row 1, column 't'" in told
        assert "with a zone and without" in told
        check_columns(paths, out=tmp_path / f"skipped{number}", options=SKIP)
        assert pq.read_table(tmp_path / f"skipped{number}/data/c.parquet").to_pydict() == {"t": [None], "n": [1]}
    paths = files(tmp_path / "zones", "UTC", "-05:00", nested=False)
    check_columns(paths, out=tmp_path / "utc", options=UNIFY)
    new = pq.read_table(tmp_path / "utc/data/c.parquet")["t"]
    assert new.type == types["UTC"]
    assert new.cast("int64").to_pylist() == [None, stamp]


def test_a_text_among_numbers_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["x", *map(str, range(20)), "ERR"]) + "\n")
    assert "row 20, column 'x': 'ERR' (str)" in refusal([path], tmp_path / "out", UNIFY)
    check_columns([path], out=tmp_path / "skipped", options=SKIP)
    assert (tmp_path / "skipped/data/a.csv").read_text() == "\n".join(["x", *map(str, range(20))]) + "\n"


def test_texts_that_stand_for_no_value(tmp_path: Path) -> None:
    """Among numbers they become no value, more of them than a tenth too; in a column of texts they stay."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    csv = tmp_path / "a.csv"
    csv.write_text('x,s\n1,a\n"NA",NA\nn/a,b\n4,n/a\n')
    rows = jsonl(tmp_path / "b.jsonl", [{"x": 1, "s": "NA"}, {"x": "NA", "s": "b"}, {"x": 3, "s": "c"}])
    pq.write_table(pa.table({"x": ["5", "n/a"], "s": ["NA", "d"]}), tmp_path / "c.parquet")
    paths = [csv, rows, tmp_path / "c.parquet"]
    assert "mixed" in str(check_columns(paths[1:2]).columns)
    options = ColumnOptions(unify=True, null_texts=("NA", "n/a"))
    result = check_columns(paths, out=tmp_path / "out", options=options)
    assert result.changes is not None
    assert result.changes.types == {"x": "int", "s": "string"}
    assert {(cast.file, cast.change, cast.count) for cast in result.changes.casts if "no value" in cast.change} >= {
        ("a.csv", "text to no value", 2),
        ("b.jsonl", "text to no value", 1),
    }
    new = tmp_path / "out/data"
    assert (new / "a.csv").read_text() == "x,s\n1,a\n,NA\n,b\n4,n/a\n"
    assert [(row["x"], row["s"]) for row in lines(new / "b.jsonl")] == [(1, "NA"), (None, "b"), (3, "c")]
    assert pq.read_table(new / "c.parquet").to_pydict() == {"x": [5, None], "s": ["NA", "d"]}
    tar = tmp_path / "d.tar"
    write_table(tar, Table(rows=[{"x": n} for n in (1, "NA", 3)]))
    with pytest.raises(DataError, match="row 1, column 'x': 'NA'"):
        check_columns([tar], out=tmp_path / "tar", options=options)


def test_a_format_without_null_gets_no_column(tmp_path: Path) -> None:
    write_table(tmp_path / "a.rec", Table(rows=[{"data": b"a", "x": 1}]))
    write_table(tmp_path / "b.rec", Table(rows=[{"data": b"b"}]))
    paths = [tmp_path / "a.rec", tmp_path / "b.rec"]
    assert refusal(paths, tmp_path / "out", UNIFY) == f"{paths[1]}, which has no column 'x'"


# --- modes of images ---------------------------------------------------------------------------------------------------


def encoded(mode: str, name: str = "PNG", *, alpha: int = 255) -> bytes:
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (8, 10, 3), np.uint8)
    picture = image.fromarray(pixels)
    picture.putalpha(alpha)
    file = io.BytesIO()
    picture.convert(mode).save(file, format=name)
    return file.getvalue()


def test_images_become_those_of_most(tmp_path: Path) -> None:
    pictures = [encoded("RGB", "JPEG")] * 5 + [
        encoded("L"),
        encoded("RGBA"),
        encoded("L", "JPEG"),
        encoded("CMYK", "JPEG"),
    ]
    path = jsonl(tmp_path / "a.jsonl", [{"i": {"base64": base64.b64encode(each).decode()}} for each in pictures])
    write_table(
        tmp_path / "b.rec", Table(rows=[{"i": pack_header(ImageHeader(label=3.0, id=1), each)} for each in pictures])
    )
    for source, column in ((path, "i"), (tmp_path / "b.rec", "data")):
        out = tmp_path / f"out{source.suffix}"
        result = check_columns([source], out=out, options=UNIFY)
        new = [*open_file(out / "data" / source.name, source.suffix).rows]
        headers = [unpack_header(row[column]) for row in new] if source.suffix == ".rec" else []
        images = [bytes(view) for _, view in headers] if headers else [row[column] for row in new]
        assert all(header.label == 3.0 for header, _ in headers)
        assert images[:5] == pictures[:5]
        assert {probe(each).mode for each in images} == {"RGB"}
        for before, after in zip(pictures, images, strict=True):
            assert np.array_equal(decode(before), decode(after))
        assert copied(out, [source]).differences == ()
        assert result.changes is not None
        assert Counter({each.change: each.count for each in result.changes.casts}) == {
            "image L to RGB": 2,
            "image RGBA to RGB": 1,
            "image CMYK to RGB": 1,
        }


@pytest.mark.parametrize(
    ("usual", "odd", "reason"),
    [
        ("RGB", encoded("RGBA", alpha=100), "transparency would be lost"),
        ("RGB", b"text", "it is no image"),
        ("L", encoded("RGB"), "its colours would be lost"),
        ("RGBA", encoded("RGB"), "images are converted to RGB and L, and most are of mode RGBA"),
    ],
)
def test_an_image_that_would_lose_is_named(tmp_path: Path, usual: str, odd: bytes, reason: str) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"i": [encoded(usual)] * 3 + [odd, None]}), path)
    assert refusal([path], tmp_path / "out", UNIFY).endswith(f"(bytes): {reason}")
    check_columns([path], out=tmp_path / "skipped", options=SKIP)
    assert pq.read_table(tmp_path / "skipped/data/a.parquet")["i"].to_pylist() == [encoded(usual)] * 3 + [None]


def test_grey_images_in_colour_become_grey(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    grey, coloured = encoded("L"), io.BytesIO()
    image.open(io.BytesIO(grey)).convert("RGB").save(coloured, format="PNG")
    pictures = [grey, grey, coloured.getvalue()]
    path = jsonl(tmp_path / "a.jsonl", [{"i": {"base64": base64.b64encode(each).decode()}} for each in pictures])
    check_columns([path], out=tmp_path / "out", options=UNIFY)
    new = [row["i"] for row in open_file(tmp_path / "out/data/a.jsonl", ".jsonl").rows]
    assert probe(new[2]).mode == "L"
    assert np.array_equal(decode(new[2]), decode(grey))


# --- both, kills and memory --------------------------------------------------------------------------------------------


def test_masked_values_are_not_cast(tmp_path: Path) -> None:
    texts = values()
    rows = [json.loads(f'{{"x": {text}, "y": 1}}') for text in texts]
    rows[3]["y"] = "odd"
    rows[7]["x"] = 2**53 + 1  # an outlier, which float64 has not
    paths = [jsonl(tmp_path / "a.jsonl", rows), jsonl(tmp_path / "b.jsonl", [{"x": 20.5, "y": 2}])]
    options = ColumnOptions(columns=("x",), mask=REASONS, unify=True, skips_unfit=True)
    result = check_columns(paths, out=tmp_path / "out", options=options)
    new = lines(tmp_path / "out/data/a.jsonl")
    assert len(new) == ROWS - 1
    assert copied(tmp_path / "out", paths).differences == ()
    masked = lines(tmp_path / "out/masked.jsonl")
    assert masked[0] == {"file": "a.jsonl", "row": 7, "new_row": 6, "column": "x", "value": str(2**53 + 1)}
    for record in masked:
        assert new[record["new_row"]]["x"] is None
        new[record["new_row"]]["x"] = json.loads(record["value"])
    assert repr(new) == repr([row for number, row in enumerate(rows) if number != 3])
    assert result.changes is not None
    assert result.changes.dropped == {"a.jsonl": 1}


def test_a_killed_job_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = values()
    paths = [tmp_path / f"{name}.jsonl" for name in "ab"]
    for path, part in zip(paths, (texts[:200], texts[200:]), strict=True):
        path.write_text("".join(f'{{"x": {text}}}\n' for text in part))
    whole = check_columns(paths, out=tmp_path / "whole", options=MASK)
    original, reads = column_changes.write_jsonl, list[str]()
    read_cells = column_scan.read_cells

    def killed(change: Any, path: Path) -> None:
        original(change, path)
        raise KeyboardInterrupt

    def counted(path: Path, *others: Any) -> Any:
        reads.append(path.name)
        return read_cells(path, *others)

    monkeypatch.setattr(column_scan, "read_cells", counted)
    monkeypatch.setattr(column_changes, "write_jsonl", killed)
    with pytest.raises(KeyboardInterrupt):
        check_columns(paths, out=tmp_path / "out", options=MASK)
    assert not (tmp_path / "out/data").exists()
    monkeypatch.setattr(column_changes, "write_jsonl", original)
    assert check_columns(paths, out=tmp_path / "out", options=MASK) == whole
    assert reads == ["a.jsonl", "b.jsonl"]
    for name in ("data/a.jsonl", "data/b.jsonl", "masked.jsonl"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    with pytest.raises(ConfigError, match="other inputs or settings"):
        check_columns(paths, out=tmp_path / "out", options=UNIFY)


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    padding, rows = "p" * 1000, 6_000
    if kind == "jsonl":
        path.write_text("".join(f'{{"x": {row}, "s": "{padding}"}}\n' for row in range(rows)))
    else:
        path.write_text("x,s\n" + "".join(f"{row},{padding}\n" for row in range(rows)))
    documents = find_documents([path, jsonl(tmp_path / "b.jsonl", [{"x": 0.5, "s": ""}])])
    facts = column_scan.scan_files(documents, tmp_path / "scan", time=None, group=None)
    targets = targets_of(facts, schema_of(facts))
    tracemalloc.start()
    try:
        changes = column_changes.write_changes(
            documents,
            facts,
            tmp_path,
            masked={"x": np.arange(0, rows, 2)},
            targets=targets,
            skips=False,
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert changes.masked == {"x": rows // 2}
    assert [(each.change, each.count) for each in changes.casts] == [("int to float", rows // 2)]
    assert peak < path.stat().st_size // 2


def test_parquet_is_written_in_row_groups(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name, kind in (("a", "int32"), ("b", "int64")):
        pq.write_table(pa.table({"x": pa.array(np.arange(20_000), kind)}), tmp_path / f"{name}.parquet")
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    check_columns(paths, out=tmp_path / "out", options=UNIFY)
    new = pq.ParquetFile(tmp_path / "out/data/a.parquet")
    assert new.read()["x"].to_pylist() == [*range(20_000)]
    assert [new.metadata.row_group(group).num_rows for group in range(5)] == [4096] * 4 + [20_000 - 4 * 4096]


# --- encodings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_marks_become_those_of_most(tmp_path: Path, suffix: str) -> None:
    content = {".csv": "x,s\n1,Größe\n2,b\n", ".jsonl": '{"x": 1, "s": "Größe"}\n{"x": 2, "s": "b"}\n'}[suffix].encode()
    paths = [tmp_path / f"{name}{suffix}" for name in "abc"]
    for marked in (1, 2):
        for number, path in enumerate(paths):
            path.write_bytes((codecs.BOM_UTF8 if number < marked else b"") + content)
        out = tmp_path / f"out{marked}"
        result = check_columns(paths, out=out, options=UNIFY)
        assert [difference.kind for difference in result.differences] == ["encoding"]
        expected = content if marked == 1 else codecs.BOM_UTF8 + content
        assert [(out / "data" / path.name).read_bytes() for path in paths] == [expected] * 3
        assert result.changes is not None
        assert [(cast.column, cast.count) for cast in result.changes.casts] == [("", 2)]
        assert copied(out, paths).differences == ()
        masked = check_columns(paths, out=tmp_path / f"masked{marked}", options=ColumnOptions(mask=REASONS))
        assert masked.changes is not None
        assert (tmp_path / f"masked{marked}" / "data" / paths[0].name).read_bytes() == paths[0].read_bytes()


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_texts_in_bytes_become_those_of_most(tmp_path: Path, suffix: str) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    texts = ["Größe".encode()] * 4 + ["Größe".encode("utf-8-sig"), "Größe".encode("utf-16")]
    path = tmp_path / f"a{suffix}"
    write_table(path, Table(rows=[{"t": text} for text in texts]))
    result = check_columns([path], out=tmp_path / "out", options=UNIFY)
    assert [row["t"] for row in open_file(tmp_path / "out/data" / path.name, suffix).rows] == ["Größe".encode()] * 6
    assert result.changes is not None
    assert [(cast.change, cast.count) for cast in result.changes.casts] == [("to text, UTF-8", 2)]
    write_table(path, Table(rows=[{"t": text} for text in [*texts, "Größe".encode("latin-1")]]))
    assert refusal([path], tmp_path / "refused", UNIFY).endswith(
        ": it is text, not UTF-8, and only UTF-8 and UTF-16 with a mark are known"
    )
