"""``check_columns``: planted differences, outliers, stuck values and gaps are found, and nothing else."""

from __future__ import annotations

import base64
import codecs
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from unisono.data.convert.table_files import Table, write_table
from unisono.errors import DataError
from unisono.quality.columns.check import ColumnOptions, ColumnsResult, check_columns
from unisono.quality.columns.exact_quantiles import CHUNK, order_statistics, quantiles
from unisono.quality.columns.numeric_columns import SHOWN_GROUPS
from unisono.quality.columns.scan import MAX_GROUPS, require_few_groups


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def csv(path: Path, **columns: Any) -> Path:
    rows = zip(*columns.values(), strict=True)
    path.write_text("\n".join([",".join(columns), *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def kinds(result: ColumnsResult) -> list[tuple[str, str, str, str, str]]:
    return [(each.file, each.column, each.kind, each.given, each.expected) for each in result.differences]


def test_types_of_columns(tmp_path: Path) -> None:
    picture = {"base64": base64.b64encode(b"\x00\x01").decode()}
    rows = [
        {"b": True, "i": 1, "f": 1.5, "s": "a", "y": picture, "l": [1], "o": {"x": 1}, "n": None, "m": 1},
        {"b": False, "i": 10**400, "f": 2, "s": "7", "y": picture, "l": ["a"], "o": {}, "m": "one"},
    ]
    result = check_columns([jsonl(tmp_path / "a.jsonl", rows)])
    assert {column.name: column.type for column in result.columns} == {
        "b": "bool",
        "i": "int",
        "f": "float",
        "s": "string",
        "y": "bytes",
        "l": "list",
        "o": "object",
        "n": "null",
        "m": "mixed: int, string",
    }
    assert {column.name: column.missing for column in result.columns}["n"] == 2
    assert kinds(result) == [("a.jsonl", "m", "mixed", "1 int, 1 string; first int: 1 (int)", "")]
    assert result.differences[0].row == 0
    assert {column.name for column in result.numeric} == {"i", "f", "m"}
    assert result.numeric[0].quantiles["1"] == np.finfo(np.float64).max


def test_a_file_without_the_images_of_the_others(tmp_path: Path) -> None:
    """Rows of one file are images by their only bytes, those of the other are texts: both are tables."""
    buffer = BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    picture = {"base64": base64.b64encode(buffer.getvalue()).decode()}
    files = [jsonl(tmp_path / f"{number}.jsonl", [{"id": number, "image": picture}]) for number in range(2)]
    files.append(jsonl(tmp_path / "2.jsonl", [{"id": 2, "note": "none"}]))
    assert {(each.file, each.column, each.kind) for each in check_columns(files).differences} == {
        ("2.jsonl", "image", "missing"),
        ("2.jsonl", "note", "extra"),
    }


def test_files_that_differ(tmp_path: Path) -> None:
    usual = [jsonl(tmp_path / f"{number}.jsonl", [{"id": number, "x": 1.5, "y": True}]) for number in range(3)]
    odd = jsonl(tmp_path / "odd.jsonl", [{"id": "3", "x": 2.5, "z": 1}])
    empty = jsonl(tmp_path / "empty.jsonl", [])
    nulls = jsonl(tmp_path / "nulls.jsonl", [{"id": None, "x": None, "y": None}])
    result = check_columns([*usual, odd, empty, nulls])
    assert kinds(result) == [
        ("odd.jsonl", "id", "type", "string", "int"),
        ("odd.jsonl", "y", "missing", "no such column", "bool"),
        ("odd.jsonl", "z", "extra", "int", ""),
    ]
    assert result.rows["empty.jsonl"] == 0


def test_of_two_files_the_first_decides(tmp_path: Path) -> None:
    first, second = jsonl(tmp_path / "a.jsonl", [{"x": 1}]), jsonl(tmp_path / "b.jsonl", [{"x": True, "y": 1}])
    assert kinds(check_columns([first, second])) == [
        ("b.jsonl", "x", "type", "bool", "int"),
        ("b.jsonl", "y", "extra", "int", ""),
    ]


def test_types_of_csv_are_those_of_its_texts(tmp_path: Path) -> None:
    codes = ["A1", "007", "42", "43"]
    path = csv(tmp_path / "a.csv", i=[1, 2, "", 4], f=[1, 2.5, "nan", "-0"], code=codes, q=['"1"', '"2"', '"3"', '"4"'])
    result = check_columns([path])
    columns = {column.name: column for column in result.columns}
    assert {name: column.type for name, column in columns.items()} == {
        "i": "int",
        "f": "float",
        "code": "string",
        "q": "string",
    }
    assert columns["i"].missing == 1
    assert [name for name, column in columns.items() if column.is_numeric_text] == ["q"]
    assert [(column.name, column.non_finite) for column in result.numeric] == [("i", 0), ("f", 1)]
    assert result.differences == ()


def test_a_text_among_numbers_of_csv(tmp_path: Path) -> None:
    (difference,) = check_columns([csv(tmp_path / "a.csv", x=[*range(20), "ERR"])]).differences
    assert (difference.kind, difference.row, difference.count) == ("mixed", 20, 1)
    assert difference.given == "20 int, 1 string; first string: 'ERR' (str)"


@pytest.mark.parametrize("content", [b"a,b\n", b"a,b\n1,2\n"])
def test_small_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    result = check_columns([tmp_path / "a.csv"])
    assert result.differences == ()
    assert [(column.numbers, column.outliers, column.not_judged) for column in result.numeric] == (
        [(1, 0, {"fewer than 50 values": 1})] * 2 if content.endswith(b"2\n") else []
    )


def test_modes_of_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")

    def encoded(mode: str, name: str) -> dict[str, str]:
        image.new(mode, (4, 4)).save(tmp_path / "image", format=name)
        return {"base64": base64.b64encode((tmp_path / "image").read_bytes()).decode()}

    rgb, text = encoded("RGB", "JPEG"), {"base64": base64.b64encode("Grüße".encode("latin-1")).decode()}
    first = jsonl(tmp_path / "a.jsonl", [{"image": rgb}] * 5 + [{"image": encoded("RGB", "PNG")}])
    second = jsonl(tmp_path / "b.jsonl", [{"image": rgb}, {"image": encoded("L", "JPEG")}, {"image": text}])
    result = check_columns([first, second])
    assert result.columns[0].contents == {"JPEG RGB": 6, "PNG RGB": 1, "JPEG L": 1, "text, not UTF-8": 1}
    assert [(each.file, each.kind, each.given, each.row) for each in result.differences] == [
        ("b.jsonl", "image", "JPEG L", 1),
        ("b.jsonl", "image", "text, not UTF-8", 2),
    ]


def test_encodings_of_files(tmp_path: Path) -> None:
    marked = csv(tmp_path / "marked.csv", x=[1], s=["Größe"])
    marked.write_bytes(codecs.BOM_UTF8 + marked.read_bytes())
    files = [csv(tmp_path / "a.csv", x=[1], s=["Größe"]), marked, csv(tmp_path / "b.csv", x=[2], s=["a"])]
    (tmp_path / "empty.jsonl").write_bytes(b"")
    result = check_columns([*files, tmp_path / "empty.jsonl"])
    assert kinds(result) == [("marked.csv", "", "encoding", "text, UTF-8 with mark", "text, UTF-8")]
    assert (result.differences[0].count, result.differences[0].row) == (1, None)
    assert check_columns([marked]).differences == ()


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_file_in_another_encoding_differs_and_the_others_are_compared(
    tmp_path: Path, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    texts = {".csv": "a,t,s\n1,\u00e9,{}\n", ".jsonl": '{{"a": 1, "t": "\u00e9", "s": {}}}\n'}
    encodings = {"a": "utf-8", "b": "latin-1", "c": "utf-8", "d": "utf-16"}
    for number, (name, encoding) in enumerate(encodings.items()):
        (tmp_path / f"{name}{suffix}").write_bytes(texts[suffix].format(number).encode(encoding))
    result = check_columns([tmp_path], options=ColumnOptions(time="s", group="t"))
    assert kinds(result) == [
        (f"b{suffix}", "", "encoding", "text, not UTF-8", "text, UTF-8"),
        (f"d{suffix}", "", "encoding", "text, UTF-16", "text, UTF-8"),
    ]
    assert list(result.rows.values()) == [1, 0, 1, 0]
    assert f"b{suffix}" in caplog.text
    assert "iconv -f WINDOWS-1252 -t UTF-8" in caplog.text
    for name in ("a", "c"):
        (tmp_path / f"{name}{suffix}").unlink()
    with pytest.raises(DataError, match="is not UTF-8"):  # nothing is left to compare
        check_columns([tmp_path])


def test_encodings_of_texts_in_bytes(tmp_path: Path) -> None:
    values = ["a", "Größe", "ß"]
    rows = [{"t": {"base64": base64.b64encode(value.encode()).decode()}} for value in values]
    odd = ["Größe".encode("utf-8-sig"), "Größe".encode("utf-16"), "Größe".encode("latin-1"), b"\x00\x01", b"", b"ok"]
    others = [{"t": {"base64": base64.b64encode(value).decode()}} for value in odd]
    result = check_columns([jsonl(tmp_path / "a.jsonl", rows * 3), jsonl(tmp_path / "b.jsonl", others)])
    expected = "text, UTF-8"
    assert kinds(result) == [
        ("b.jsonl", "t", "encoding", "text, UTF-8 with mark", expected),
        ("b.jsonl", "t", "encoding", "text, UTF-16", expected),
        ("b.jsonl", "t", "encoding", "text, not UTF-8", expected),
        ("b.jsonl", "t", "encoding", "binary", expected),
    ]
    assert [each.row for each in result.differences] == [0, 1, 2, 3]
    blobs = [{"t": {"base64": base64.b64encode(bytes([0, number])).decode()}} for number in range(4)]
    assert check_columns([jsonl(tmp_path / "c.jsonl", [*blobs, *rows])]).differences == ()


def test_parquet_with_nulls_and_widths(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name, kind in (("a", "int64"), ("b", "int32")):
        table = pa.table(
            {"x": pa.array([1, None, 3], kind), "o": [{"k": 1}] * 3, "s": pa.array(["a", "b", "a"]).dictionary_encode()}
        )
        pq.write_table(table, tmp_path / f"{name}.parquet")
    result = check_columns([tmp_path / "a.parquet", tmp_path / "b.parquet"])
    assert [(column.name, column.type, column.missing) for column in result.columns] == [
        ("x", "int", 2),
        ("o", "object", 0),
        ("s", "string", 0),
    ]
    assert kinds(result) == [("b.parquet", "x", "type", "int32", "int64")]
    assert result.numeric[0].median == 2.0


def test_planted_values_are_found_and_nothing_else(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(20, 1, 20_000)
    clean = check_columns([csv(tmp_path / "clean.csv", x=values.tolist())]).numeric[0]
    assert (clean.outliers, clean.non_finite, clean.stuck_runs) == (0, 0, 0)
    assert clean.median == np.median(values)
    assert clean.mad == pytest.approx(np.median(abs(values - np.median(values))))
    values[[5, 12_000]] = 60, -40
    values[300:340] = values[300]
    texts = [*map(str, values.tolist())]
    texts[700], texts[19_999] = "nan", "-inf"
    paths = [csv(tmp_path / "a.csv", x=texts[:8000]), csv(tmp_path / "b.csv", x=texts[8000:])]
    result = check_columns(paths, out=tmp_path / "out")
    found = [(each["file"], each["row"], each["reason"], each["value"]) for each in result.numeric[0].places]
    assert found == [
        ("a.csv", 5, "outlier", 60.0),
        ("b.csv", 4000, "outlier", -40.0),
        ("a.csv", 700, "non-finite", "nan"),
        ("b.csv", 11_999, "non-finite", "-inf"),
        ("a.csv", 300, "stuck", values[300]),
    ]
    flagged = [json.loads(line) for line in (tmp_path / "out" / "flagged.jsonl").read_text().splitlines()]
    assert len(flagged) == 4 + 40
    assert flagged[0] == {"file": "a.csv", "row": 5, "column": "x", "reasons": ["outlier"], "value": 60.0}
    assert "Numeric columns" in (tmp_path / "out" / "report.html").read_text()
    assert check_columns(paths, out=tmp_path / "out") == result


def test_equal_values_are_not_judged(tmp_path: Path) -> None:
    many = np.random.default_rng(4).permutation([0] * 600 + list(range(1, 401))).tolist()
    same = csv(tmp_path / "a.csv", same=[7] * 1000, rare=[1] * 10 + [0] * 990, many=many)
    columns = {column.name: column for column in check_columns([same]).numeric}
    assert all(column.outliers == column.stuck_runs == 0 for column in columns.values())
    assert columns["same"].not_judged == columns["rare"].not_judged == {"half of the values or more are equal": 1}
    assert columns["same"].not_varying == 1
    assert columns["many"].scales == {"IQR": 1}


def test_each_group_is_a_series(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    sensor = np.tile(["cold", "hot"], 1000)
    values = np.where(sensor == "hot", 30, 20) + rng.normal(0, 1, 2000)
    values[10] = 30  # usual for the other sensor
    values[601:681:2] = values[601]  # stuck, though the other sensor goes on between
    stamps = np.repeat(np.arange(1000.0), 2)
    stamps[1001::2] += 50
    path = csv(tmp_path / "a.csv", t=stamps.tolist(), sensor=sensor.tolist(), x=values.tolist())
    together = check_columns([path]).numeric
    assert [(column.name, column.outliers, column.stuck_runs) for column in together] == [("t", 0, 0), ("x", 0, 0)]
    result = check_columns([path], options=ColumnOptions(time="t", group="sensor"))
    (column,) = result.numeric
    assert [(each["row"], each["reason"], each["group"]) for each in column.places] == [
        (10, "outlier", "cold"),
        (601, "stuck", "hot"),
    ]
    assert column.stuck_values == 40
    assert result.times is not None
    assert result.times.interval == 1.0
    assert [(each["row"], each["reason"], each["interval"], each["group"]) for each in result.times.places] == [
        (1001, "gap", 51.0, "hot")
    ]


@pytest.mark.parametrize("form", ["number", "text"])
def test_stamps(tmp_path: Path, form: str) -> None:
    seconds = np.arange(100)
    seconds[50:] += 10
    seconds[70] = seconds[69]
    seconds[80] = 0
    base = 1_700_000_000_000_000_000  # float64 cannot tell its neighbours apart
    if form == "number":
        stamps: list[Any] = [base + int(each) for each in seconds]
    else:
        stamps = [f"{np.datetime64('2024-01-01T00:00:00') + int(each)}Z" for each in seconds]
    rows = [{"t": stamp, "x": 1} for stamp in stamps]
    paths = [jsonl(tmp_path / "a.jsonl", rows[:60]), jsonl(tmp_path / "b.jsonl", [*rows[60:], {"t": None, "x": 1}])]
    times = check_columns(paths, options=ColumnOptions(time="t")).times
    assert times is not None
    assert (times.unit, times.interval, times.missing) == ("" if form == "number" else "s", 1.0, 1)
    assert [(each["file"], each["row"], each["reason"]) for each in times.places] == [
        ("a.jsonl", 50, "gap"),
        ("b.jsonl", 21, "gap"),
        ("b.jsonl", 20, "back"),
        ("b.jsonl", 10, "repeated"),
    ]


def test_what_is_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"t": "yesterday", "x": 1, "g": True}])
    with pytest.raises(DataError, match=r"row 0, column 't': 'yesterday'"):
        check_columns([path], options=ColumnOptions(time="t"))
    for stamp in (-1e308, 10**400):
        steps = jsonl(tmp_path / "steps.jsonl", [{"t": 1e300}, {"t": stamp}])
        with pytest.raises(DataError, match=r"row 1, column 't': .*\n.*a number from -1e\+300 to 1e\+300"):
            check_columns([steps], options=ColumnOptions(time="t"))
    with pytest.raises(DataError, match=r"row 0, column 'g': True"):
        check_columns([path], options=ColumnOptions(group="g"))
    with pytest.raises(DataError, match="column 'y', in which no file has a number"):
        check_columns([path], options=ColumnOptions(columns=("y",)))
    with pytest.raises(DataError, match="column 'y', which no file has"):
        check_columns([path], options=ColumnOptions(group="y"))
    other = jsonl(tmp_path / "b.jsonl", [{"t": "2024-01-01"}])
    with pytest.raises(DataError, match=r"numbers in a\.jsonl and dates as text in b\.jsonl"):
        check_columns([jsonl(path, [{"t": 1}]), other], options=ColumnOptions(time="t"))
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(DataError, match="a file that is no table"):
        check_columns([tmp_path / "text.txt"])
    with pytest.raises(DataError, match="more than 100,000 values"):
        require_few_groups(MAX_GROUPS + 1, "g")


def test_a_killed_job_reads_no_finished_file_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono.quality.columns import scan

    paths = [jsonl(tmp_path / f"{number}.jsonl", [{"x": number}]) for number in range(2)]
    read: list[str] = []
    original = scan.read_cells

    def counted(path: Path, kind: str, wanted: Any) -> Any:
        read.append(path.name)
        if read == ["0.jsonl", "1.jsonl"]:
            raise KeyboardInterrupt
        return original(path, kind, wanted)

    monkeypatch.setattr(scan, "read_cells", counted)
    with pytest.raises(KeyboardInterrupt):
        check_columns(paths, out=tmp_path / "out")
    assert check_columns(paths, out=tmp_path / "out").rows == {"0.jsonl": 1, "1.jsonl": 1}
    assert read == ["0.jsonl", "1.jsonl", "1.jsonl"]


def test_many_columns_need_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, original = list[object](), open

    def counting(file: Any, *arguments: Any, **options: Any) -> Any:
        opened.append(file)
        return original(file, *arguments, **options)

    monkeypatch.setattr("builtins.open", counting)
    path = csv(tmp_path / "a.csv", **{f"c{number}": [number] for number in range(5000)})
    result = check_columns([path], out=tmp_path / "out")
    assert [column.median for column in result.numeric] == list(range(5000))
    assert len(opened) < 100


def test_a_large_file_has_a_file_for_each_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    rows = 40_000  # three batches
    columns = {"t": np.arange(rows), "group": rng.integers(0, 3, rows), "x": rng.normal(size=rows)}
    columns["x"][[7, 20_000, 39_999]] = 99
    path = csv(tmp_path / "a.csv", **columns)
    options = ColumnOptions(time="t", group="group")
    together = check_columns([path], options=options)
    assert together.numeric[0].outliers == 3
    monkeypatch.setattr("unisono.quality.columns.scan._BUFFER_BYTES", 100_000)
    assert check_columns([path], options=options) == together


def test_order_statistics_are_exact() -> None:
    rng = np.random.default_rng(2)
    values = np.concatenate((rng.normal(size=1000), rng.integers(-3, 3, 1000), [1e308, -1e308, 0.0, -0.0, 5e-324]))
    ranks = [0, 1, 500, 1002, 1999, len(values) - 1]
    found = order_statistics(lambda: np.array_split(values, 7), ranks)
    assert found == np.sort(values)[ranks].tolist()
    assert quantiles(values, (0.1, 0.5)) == pytest.approx(np.quantile(values, (0.1, 0.5)).tolist())


@pytest.mark.full
def test_quantiles_of_more_than_is_sorted_at_once() -> None:
    values = np.random.default_rng(3).lognormal(size=CHUNK + 12_345)
    assert quantiles(values, (0.01, 0.5, 0.99)) == pytest.approx(
        np.quantile(values, (0.01, 0.5, 0.99)).tolist(), rel=1e-15
    )


@pytest.mark.full
def test_a_million_identical_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x,y\n" + "7,0.5\n" * 1_100_000)
    for column in check_columns([path]).numeric:
        assert (column.numbers, column.mad, column.outliers, column.stuck_runs) == (1_100_000, 0.0, 0, 0)
        assert column.not_judged == {"half of the values or more are equal": 1}


def test_the_page_counts_groups_that_are_not_listed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [
        {"sensor": f"s{sensor}", "t": stamp + 50 * (stamp > 30), "x": 1e9 if stamp == 7 else float(rng.normal())}
        for sensor in range(SHOWN_GROUPS + 3)
        for stamp in range(60)
    ]
    write_table(tmp_path / "a.jsonl", Table(rows=rows))
    options = ColumnOptions(time="t", group="sensor")
    result = check_columns([tmp_path / "a.jsonl"], out=tmp_path / "out", options=options)
    assert result.times is not None
    assert (result.numeric[0].groups_left_out, result.times.groups_left_out) == (3, 3)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Groups with flagged values" in page
    assert "Groups with gaps or stamps out of order" in page
    assert page.count(">3 more rows are left out.<") == 2


def test_a_csv_file_without_a_header_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").touch()
    with pytest.raises(DataError, match="empty file, without header line"):
        check_columns([tmp_path / "a.csv"])
    (tmp_path / "a.csv").write_text("x,y\n")
    assert [column.name for column in check_columns([tmp_path / "a.csv"]).columns] == ["x", "y"]


def test_images_of_another_mode_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    for number, mode in enumerate(("RGB", "RGB", "L", "RGB", "RGBA")):
        Image.new(mode, (40, 30)).save(tmp_path / "photos" / "cat" / f"{number}.png")
    result = check_columns([tmp_path / "photos"], out=tmp_path / "out")
    assert kinds(result) == [
        ("cat/2.png", "image", "image", "PNG L", "images of mode RGB"),
        ("cat/4.png", "image", "image", "PNG RGBA", "images of mode RGB"),
    ]
    (column,) = result.columns
    assert (sum(result.rows.values()), column.contents) == (5, {"PNG RGB": 3, "PNG L": 1, "PNG RGBA": 1})
    assert "PNG RGB 3" in (tmp_path / "out" / "report.html").read_text()
    with pytest.raises(DataError, match="tables, or images alone"):
        check_columns([tmp_path / "photos", jsonl(tmp_path / "a.jsonl", [{"x": 1}])])
    with pytest.raises(DataError, match="masked values or one schema for "):
        check_columns([tmp_path / "photos"], out=tmp_path / "other", options=ColumnOptions(unify=True))
