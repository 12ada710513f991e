"""Parquet as pyarrow writes it: columns of every type stay as they are, and documents are read from their column alone."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from label_marks import mark, save_marks
from pictures import jpeg, photograph

from unisono.data.convert.formats.table import Table
from unisono.data.convert.table_files import open_table, write_table
from unisono.errors import DataError
from unisono.quality.clean import clean
from unisono.quality.columns.check import ColumnOptions, check_columns
from unisono.quality.labels.label_errors import find_label_errors
from unisono.quality.labels.relabel import relabel
from unisono.quality.leak import find_leaks
from unisono.quality.options import CleanRecipe, DuplicateOptions, FilterOptions, MaskOptions, only_dedup
from unisono.quality.split import split

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

EXACT = DuplicateOptions(near=0.0)
MASK = CleanRecipe(
    filter=FilterOptions(enabled=False), mask=MaskOptions(kinds=("email",)), dedup=DuplicateOptions(near=0.0)
)
START = datetime(2026, 3, 29, 1, 59, tzinfo=UTC)


def every_type(texts: list[str | None], text_type: Any = None) -> Any:
    """A table of texts with a column of each type that Parquet has, some of which may not be null."""
    rows = range(len(texts))

    def column(values: list[Any], kind: Any) -> Any:
        """Every fifth value is null."""
        return pa.array([None if row % 5 == 4 else value for row, value in zip(rows, values, strict=True)], kind)

    spans = [[{"begin": row, "end": None}] * (row % 3) for row in rows]
    arrays: dict[str, Any] = {
        "id": pa.array(rows, pa.int64()),
        "text": pa.array(texts, text_type or pa.string()),
        "label": column([("red", "green")[row % 2] for row in rows], pa.dictionary(pa.int32(), pa.string())),
        "meta": column([{"url": f"/{row}", "score": row / 7, "by": {"name": None}} for row in rows], None),
        "spans": column(spans, pa.list_(pa.struct([("begin", pa.int32()), ("end", pa.int32())]))),
        "at": column([START + timedelta(minutes=row) for row in rows], pa.timestamp("us", tz="Europe/Berlin")),
        "nanoseconds": column([1_700_000_000_123_456_789 + row for row in rows], pa.timestamp("ns")),
        "price": column([Decimal(row).scaleb(-2) for row in rows], pa.decimal128(20, 4)),
        "raw": column([bytes([row % 256]) for row in rows], pa.binary()),
        "fixed": column([row.to_bytes(4, "big") for row in rows], pa.binary(4)),
        "nothing": pa.nulls(len(texts)),
        "day": column([date(2026, 1, 1) + timedelta(days=row) for row in rows], pa.date32()),
        "hour": column([time(row % 24) for row in rows], pa.time64("us")),
        "took": column([timedelta(seconds=row) for row in rows], pa.duration("ms")),
        "counts": column([[("a", row), ("b", None)] for row in rows], pa.map_(pa.string(), pa.int32())),
        "vector": column([[row, row + 0.5, -1] for row in rows], pa.list_(pa.float32(), 3)),
        "ragged": column([[[row] * (row % 3), [None]] for row in rows], pa.list_(pa.list_(pa.int16()))),
        "words": column([["ü", f"{row}"] for row in rows], pa.large_list(pa.large_string())),
        "small": column([row % 100 for row in rows], pa.int8()),
        "flag": column([row % 2 == 0 for row in rows], pa.bool_()),
        "half": column([np.float16(row) for row in rows], pa.float16()),
    }
    fields = [
        pa.field(name, array.type, nullable=name != "id", metadata={"unit": "EUR"} if name == "price" else None)
        for name, array in arrays.items()
    ]
    schema = pa.schema(fields, metadata={"origin": "a test", "huggingface": "{}"})
    return pa.Table.from_arrays([*arrays.values()], schema=schema)


def assert_same(found: Any, expected: Any) -> None:
    """That two tables have one schema, nullability and metadata too, and the same cells."""
    assert found.schema.equals(expected.schema, check_metadata=True), f"{found.schema}\n\n{expected.schema}"
    for name in expected.schema.names:
        columns = [table.column(name) for table in (found, expected)]
        if pa.types.is_dictionary(columns[0].type):
            columns = [column.cast(column.type.value_type) for column in columns]
        assert columns[0].equals(columns[1]), name


def rows_of(table: Any, rows: Any) -> Any:
    """Some rows of a table, of any types."""
    return pa.concat_tables([table.slice(row, 1) for row in rows])


def read_parts(out: Path, name: str) -> Any:
    return pa.concat_tables([pq.read_table(path) for path in sorted(out.glob(f"*/data/{name}"))])


def texts_with_copies(count: int) -> list[str | None]:
    """Every third text is a copy of the first."""
    return ["the first text" if row % 3 == 0 else f"text of row {row}" for row in range(count)]


@pytest.mark.parametrize("text_type", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_kept_rows_are_equal_cell_by_cell(tmp_path: Path, text_type: Any) -> None:
    source = tmp_path / "a.parquet"
    pq.write_table(every_type(texts_with_copies(900), text_type), source, row_group_size=270, compression="zstd")
    table = pq.read_table(source)
    result = clean([source], tmp_path / "out", only_dedup(EXACT))
    assert (result.documents, result.kept, result.changed) == (900, 601, 0)
    kept = np.load(tmp_path / "out" / "kept" / "a.parquet.npy").tolist()
    assert kept == [row for row in range(900) if row % 3 or not row]
    assert_same(pq.read_table(tmp_path / "out" / "data" / "a.parquet"), rows_of(table, kept))


@pytest.mark.parametrize(
    "text_type",
    [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.large_binary()],
    ids=str,
)
def test_a_changed_text_changes_no_other_cell(tmp_path: Path, text_type: Any) -> None:
    texts: list[str | None] = [
        f"write to  me{row}@example.org \r\nnow" if row % 7 == 0 else f"row {row}" for row in range(600)
    ]
    source = tmp_path / "a.parquet"
    pq.write_table(every_type(texts, text_type), source, row_group_size=250)
    table = pq.read_table(source)
    result = clean([source], tmp_path / "out", MASK, column="text")
    assert (result.kept, result.changed) == (515, 1)  # the masked texts are the same
    kept = [row for row in range(600) if row % 7 or not row]
    found = pq.read_table(tmp_path / "out" / "data" / "a.parquet")
    values = found.column("text").to_pylist()
    changed = "write to  <EMAIL>\nnow"
    assert values[0] == (changed.encode() if text_type == pa.large_binary() else changed)
    expected = rows_of(table, kept)
    assert values[1:] == expected.column("text").to_pylist()[1:]
    assert_same(found.drop_columns("text"), expected.drop_columns("text"))
    assert found.schema.equals(table.schema, check_metadata=True)


def test_a_text_that_may_not_be_null(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("text", pa.string(), nullable=False), pa.field("n", pa.int8(), nullable=False)])
    pq.write_table(pa.Table.from_pydict({"text": ["a@example.org ", "b"], "n": [1, 2]}, schema), tmp_path / "a.parquet")
    clean([tmp_path / "a.parquet"], tmp_path / "out", MASK)
    found = pq.read_table(tmp_path / "out" / "data" / "a.parquet")
    assert found.schema.equals(schema)
    assert found.to_pylist() == [{"text": "<EMAIL>", "n": 1}, {"text": "b", "n": 2}]


def test_row_groups_are_bounded(tmp_path: Path) -> None:
    texts = [f"text {row}" for row in range(20_000)] + ["text 0"]  # a copy, so that the file is written anew
    pq.write_table(pa.table({"text": texts, "raw": [b"x" * 4000] * 20_001}), tmp_path / "a.parquet")
    clean([tmp_path / "a.parquet"], tmp_path / "out", only_dedup(EXACT))
    metadata = pq.read_metadata(tmp_path / "out" / "data" / "a.parquet")
    assert metadata.num_rows == 20_000
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    assert max(group.num_rows for group in groups) <= 4096 + 256


def test_texts_without_value(tmp_path: Path) -> None:
    """The type tells the column of the text, not the first row, which has none."""
    texts = [None, "one", "two", None, "one"]
    table = every_type(texts).select(["id", "text", "meta", "at"])
    table = table.rename_columns(["id", "body", "meta", "at"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet: row 0, field 'body': None \(NoneType\)"):
        clean([tmp_path / "a.parquet"], tmp_path / "failed", only_dedup(EXACT))
    result = clean([tmp_path / "a.parquet"], tmp_path / "out", only_dedup(EXACT), skips_unreadable=True)
    assert (result.kept, result.dropped) == (2, {"unreadable": 2, "dedup.exact": 1})
    assert_same(pq.read_table(tmp_path / "out" / "data" / "a.parquet"), rows_of(table, [1, 2]))


def test_only_the_column_of_the_text_is_read(tmp_path: Path) -> None:
    source = tmp_path / "a.parquet"
    noise = np.random.default_rng(0).bytes(5000)
    pq.write_table(
        pa.table({"text": ["one", "two", "one"], "raw": [noise] * 3}),
        source,
        write_page_checksum=True,
        use_dictionary=False,
        compression="none",
    )
    content = bytearray(source.read_bytes())
    content[content.find(noise) + 100] ^= 1
    source.write_bytes(content)
    assert clean([source], tmp_path / "index", only_dedup(EXACT), column="text", index_only=True).kept == 2
    with pytest.raises(DataError, match="CRC checksum verification failed"):
        clean([source], tmp_path / "out", only_dedup(EXACT), column="text")


@pytest.mark.parametrize("first", [None, b""])
def test_images_among_columns_of_any_type(tmp_path: Path, first: bytes | None) -> None:
    images = [first, *(jpeg(photograph(seed)) for seed in (1, 2, 1))]
    table = pa.table({"image": images, "boxes": [[{"x": row}] for row in range(4)], "width": pa.nulls(4, pa.int32())})
    pq.write_table(table, tmp_path / "a.parquet")
    table = pq.read_table(tmp_path / "a.parquet")
    result = clean([tmp_path / "a.parquet"], tmp_path / "out", skips_unreadable=True)
    assert (result.kept, result.dropped) == (2, {"unreadable": 1, "dedup.exact": 1})
    assert_same(pq.read_table(tmp_path / "out" / "data" / "a.parquet"), rows_of(table, [1, 2]))


@pytest.mark.parametrize(
    ("labels", "kind", "to"),
    [
        (["red", "green"], pa.dictionary(pa.int32(), pa.string()), "red"),
        ([1, 2], pa.int8(), "1"),
        ([True, False], pa.bool_(), "1"),
        ([1.0, 2.0], pa.float32(), "1"),
    ],
    ids=["dictionary", "int8", "bool", "float32"],
)
def test_relabel_changes_the_label_alone(tmp_path: Path, labels: list[Any], kind: Any, to: str) -> None:
    source = tmp_path / "a.parquet"
    table = every_type(["same text", "same text", "another", "the last"])
    column = table.schema.get_field_index("label")
    values = pa.array([labels[0], labels[1], labels[0], labels[1]], kind)
    pq.write_table(table.set_column(column, pa.field("label", kind), values), source, row_group_size=3)
    table = pq.read_table(source)
    result = find_label_errors([source], tmp_path / "found", "label", options=EXACT)
    assert (result.conflicts, len(result.labels)) == (1, 2)
    before = max(result.labels, key=lambda name: name != to)
    marks = save_marks(
        tmp_path / "marks.json",
        tmp_path / "found",
        mark("a.parquet", 1, before, "change", to=to),
        mark("a.parquet", 2, to, "drop"),
    )
    assert relabel([source], tmp_path / "new", marks).changed == 1
    found = pq.read_table(tmp_path / "new" / "data" / "a.parquet")
    assert found.column("label").to_pylist() == [labels[0], labels[0], labels[1]]
    expected = rows_of(table, [0, 1, 3])
    assert found.schema.equals(expected.schema, check_metadata=True)
    assert_same(found.drop_columns("label"), expected.drop_columns("label"))


def test_a_label_that_the_column_cannot_hold(tmp_path: Path) -> None:
    for name, label, kind in (("a", 1, pa.int8()), ("b", 300, pa.int16())):
        pq.write_table(pa.table({"text": ["same"], "label": pa.array([label], kind)}), tmp_path / f"{name}.parquet")
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    find_label_errors(paths, tmp_path / "found", "label", options=EXACT)
    marks = save_marks(tmp_path / "marks.json", tmp_path / "found", mark("a.parquet", 0, 1, "change", to="300"))
    with pytest.raises(DataError, match="a column keeps its type, here int8"):
        relabel(paths, tmp_path / "new", marks)
    assert not (tmp_path / "new" / "data").exists()


def test_leaks_and_parts_of_such_files(tmp_path: Path) -> None:
    texts: list[str | None] = [f"text {row // 2}" for row in range(40)]
    table = every_type(texts)
    pq.write_table(table, tmp_path / "a.parquet")
    pq.write_table(table.slice(0, 4), tmp_path / "b.parquet")
    assert len(find_leaks(tmp_path / "a.parquet", [tmp_path / "b.parquet"], options=EXACT).pairs) == 4
    halves = {"x": Fraction(1, 2), "y": Fraction(1, 2)}
    result = split([tmp_path / "a.parquet"], tmp_path / "parts", halves, group_field="text", options=EXACT)
    assert (result.clusters, [part.documents for part in result.parts]) == (20, [20, 20])
    found = read_parts(tmp_path / "parts", "a.parquet")
    assert_same(found.sort_by("id"), pq.read_table(tmp_path / "a.parquet"))
    with pytest.raises(DataError, match="a group is a string or a number"):
        split([tmp_path / "a.parquet"], tmp_path / "no", halves, group_field="meta", options=EXACT)


def test_rows_of_every_type_are_compared_whole(tmp_path: Path) -> None:
    """Also by a time in nanoseconds, and by what lies deep inside."""
    table = every_type(["same"] * 2).set_column(0, "id", pa.array([0, 0]))
    same = pa.concat_tables([table.slice(0, 1)] * 3)
    position = same.schema.get_field_index("nanoseconds")
    other = same.set_column(
        position, "nanoseconds", pa.array([1_700_000_000_123_456_789] * 2 + [1], pa.timestamp("ns"))
    )
    other = other.set_column(2, "label", pa.array(["red", "green", "green"]))
    long = pa.array([[float(number) for number in range(200)]] * 3)
    pq.write_table(other.append_column("long", long), tmp_path / "a.parquet")
    find_label_errors([tmp_path / "a.parquet"], tmp_path / "out", "label", options=EXACT, whole_rows=True)
    (conflict,) = map(json.loads, (tmp_path / "out" / "conflicts.jsonl").read_text().splitlines())
    assert [document["row"] for document in conflict["documents"]] == [0, 1]
    assert "float64[200] of 1,600 bytes" in (tmp_path / "out" / "report.html").read_text()


def test_a_file_without_rows(tmp_path: Path) -> None:
    """pyarrow writes a row group without pages, or none at all."""
    table = every_type(["one", "two"])
    pq.write_table(table.slice(0, 0), tmp_path / "a.parquet")
    pq.ParquetWriter(tmp_path / "b.parquet", table.schema).close()
    with pq.ParquetWriter(tmp_path / "c.parquet", table.schema) as writer:
        for part in (table.slice(0, 0), table, table.slice(0, 0), table.slice(1)):
            writer.write_table(part)
    assert [pq.read_metadata(tmp_path / f"{name}.parquet").num_row_groups for name in "abc"] == [1, 0, 4]
    for name in "ab":
        assert list(open_table(tmp_path / f"{name}.parquet", columns=["text", "small"]).rows) == []
        result = clean([tmp_path / f"{name}.parquet"], tmp_path / f"out-{name}", only_dedup(EXACT))
        assert (result.documents, result.kept) == (0, 0)
        assert np.load(tmp_path / f"out-{name}" / "kept" / f"{name}.parquet.npy").tolist() == []
    result = clean([tmp_path / f"{name}.parquet" for name in "abc"], tmp_path / "out", only_dedup(EXACT))
    assert (result.documents, result.kept) == (3, 2)
    assert_same(
        pq.read_table(tmp_path / "out" / "data" / "c.parquet"), pq.read_table(tmp_path / "c.parquet").slice(0, 2)
    )


@pytest.mark.parametrize("codec", ["zstd", "gzip", "none"])
def test_the_compression_stays(tmp_path: Path, codec: str) -> None:
    table = pa.table(
        {"text": ["a b c", "mail me@example.org", "a b c"], "list": [[1], [2, 3], []], "x": [1.0, 2.0, None]}
    )
    pq.write_table(table, tmp_path / "a.parquet", compression=codec)
    clean([tmp_path / "a.parquet"], tmp_path / "clean", recipe=MASK)
    (tmp_path / "b.jsonl").write_text('{"y": 1}\n')
    options = ColumnOptions(unify=True)
    check_columns([tmp_path / "a.parquet", tmp_path / "b.jsonl"], out=tmp_path / "columns", options=options)
    expected = {"none": "UNCOMPRESSED"}.get(codec, codec.upper())
    for folder, rows in (("clean", 2), ("columns", 3)):
        metadata = pq.ParquetFile(tmp_path / folder / "data/a.parquet").metadata
        group = metadata.row_group(0)
        assert metadata.num_rows == rows
        assert {group.column(number).compression for number in range(group.num_columns)} == {expected}


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".tar"])
def test_a_file_without_changes_is_copied(tmp_path: Path, suffix: str) -> None:
    """Byte for byte, beside a file in which a row changes, and with rows that are dropped in another."""
    paths = [tmp_path / f"{name}{suffix}" for name in "abcd"]
    rows = [
        [{"text": "a b c", "x": 1}, {"text": "d e f", "x": 2}],
        [{"text": "mail me@example.org", "x": 3}],
        [{"text": "g h i", "x": 4}],
        [{"text": "j k l", "x": 5}, {"text": "d e f", "x": 6}],
    ]
    for path, of_file in zip(paths, rows, strict=True):
        write_table(path, Table(rows=of_file))
    if suffix == ".csv":
        paths[0].write_bytes(b"text,x\r\na b c,1\r\nd e f,2\r\n")
    clean(paths, tmp_path / "out", recipe=MASK)
    new = [tmp_path / "out/data" / path.name for path in paths]
    assert [new[n].read_bytes() == paths[n].read_bytes() for n in range(4)] == [True, False, True, False]
    assert [[row["text"] for row in open_table(path).rows] for path in new] == [
        ["a b c", "d e f"],
        ["mail <EMAIL>"],
        ["g h i"],
        ["j k l"],
    ]
