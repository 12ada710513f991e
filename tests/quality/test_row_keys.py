"""Classes and groups of rows: ``balance``, ``labels`` and ``split`` read the same ones, and leave out the same rows."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from label_marks import mark, save_marks
from pictures import write_photographs

from unisono.data.convert.table_files import Table, open_table, write_table
from unisono.errors import DataError
from unisono.quality.balance import balance
from unisono.quality.labels.label_errors import find_label_errors
from unisono.quality.labels.relabel import relabel
from unisono.quality.options import DuplicateOptions
from unisono.quality.split import split

EXACT = DuplicateOptions(near=0.0, image_near=0.0)
HALVES = {"x": Fraction(1, 2), "y": Fraction(1, 2)}
WITHOUT = "--on-error skip leaves such documents out"


def file_of(tmp_path: Path, name: str, content: str) -> Path:
    (tmp_path / name).write_text(content)
    return tmp_path / name


def nulls(tmp_path: Path) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    labels = {"text": ["s", "s", "s", "t"], "label": pa.array([1.0, None, float("nan"), 2.0])}
    pq.write_table(pa.table(labels), tmp_path / "a.parquet")
    return tmp_path / "a.parquet"


def classes_by_balance(paths: list[Path], field: str = "targets") -> dict[str, int]:
    return {each.name: each.rows for each in balance(paths, field=field).classes}


@pytest.mark.parametrize(
    ("name", "content", "kept", "absent"),
    [
        ("a.csv", "text,label\ns,a\ns,\ns,a\nt,b\n", {"a": 2, "b": 1}, [1]),
        ("a.csv", "text,label\ns,1\ns,nan\nt,2\n", {"1": 1, "2": 1}, [1]),
        (
            "a.jsonl",
            "".join(f'{{"text": "s"{more}}}\n' for more in ("", *(f', "label": {x}' for x in ('"a"', '""', '" "')))),
            {"a": 1},
            [0, 2, 3],
        ),
        (
            "a.jsonl",
            "".join(f'{{"text": "s", "label": {value}}}\n' for value in ("NaN", "1", "null", "2", "1.0")),
            {"1": 2, "2": 1},
            [0, 2],
        ),
        ("a.parquet", "", {"1": 1, "2": 1}, [1, 2]),
    ],
)
def test_a_row_without_a_label_cannot_be_read(
    tmp_path: Path, name: str, content: str, kept: dict[str, int], absent: list[int]
) -> None:
    source = file_of(tmp_path, name, content) if content else nulls(tmp_path)
    counted = balance([source], field="label")
    assert ({each.name: each.rows for each in counted.classes}, counted.unlabelled) == (kept, len(absent))
    fields: tuple[dict[str, Any], ...] = ({"class_field": "label"}, {"group_field": "label"})
    for number, options in enumerate(fields):
        with pytest.raises(DataError, match=r"field 'label'|column 'label'|null") as raised:
            split([source], tmp_path / f"no-{number}", HALVES, options=EXACT, **options)
        assert WITHOUT in str(raised.value)
        out = tmp_path / f"parts-{number}"
        result = split([source], out, HALVES, options=EXACT, skips_unreadable=True, **options)
        assert result.unreadable == len(absent)
        assert sum(part.documents for part in result.parts) == sum(kept.values())
        dropped = [json.loads(line) for line in (out / "dropped.jsonl").read_text().splitlines()]
        assert [line["row"] for line in dropped] == absent
    if len(kept) < 2:
        return
    with pytest.raises(DataError) as raised:
        find_label_errors([source], tmp_path / "none", "label", options=EXACT)
    assert WITHOUT in str(raised.value)
    found = find_label_errors([source], tmp_path / "out", "label", options=EXACT, skips_unreadable=True)
    assert (found.labels, found.unreadable) == (kept, len(absent))


def test_infinity_is_no_class(tmp_path: Path) -> None:
    source = file_of(tmp_path, "a.jsonl", "".join(f'{{"text": "s", "label": {value}}}\n' for value in (1, "1e999", 2)))
    for command in (
        lambda: balance([source], field="label"),
        lambda: find_label_errors([source], tmp_path / "labels", "label", options=EXACT),
        lambda: split([source], tmp_path / "split", HALVES, class_field="label", options=EXACT),
    ):
        with pytest.raises(
            DataError, match=r"a\.jsonl, row 1, field 'label': inf \(float\)\n  rule: a class is one text or one"
        ):
            command()
    found = find_label_errors([source], tmp_path / "out", "label", options=EXACT, skips_unreadable=True)
    assert (found.labels, found.unreadable) == ({"1": 1, "2": 1}, 1)


def test_folders_of_images_that_are_given_one_by_one(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b")):
        write_photographs(tmp_path / "same" / name, range(10 * number, 10 * number + 2 + number))
    whole, each = [tmp_path / "same"], [tmp_path / "same" / "a", tmp_path / "same" / "b"]
    for number, paths in enumerate((whole, each)):
        assert classes_by_balance(paths) == {"b": 3, "a": 2}
        assert find_label_errors(paths, tmp_path / f"labels-{number}", options=EXACT).labels == {"b": 3, "a": 2}
        parts = split(paths, tmp_path / f"split-{number}", HALVES, class_field="targets", options=EXACT).parts
        assert {name: sum(part.classes[name] for part in parts) for name in "ab"} == {"a": 2, "b": 3}
    with pytest.raises(DataError, match=r"0010\.jpg, an image\n"):
        balance([next((tmp_path / "same" / "b").glob("0010.jpg"))])


def test_truth_values_are_classes_by_their_number(tmp_path: Path) -> None:
    source = file_of(
        tmp_path,
        "a.jsonl",
        "".join(f'{{"text": "s", "label": {value}}}\n' for value in ("true", "false", "true")),
    )
    assert classes_by_balance([source], "label") == {"1": 2, "0": 1}
    assert find_label_errors([source], tmp_path / "out", "label", options=EXACT).labels == {"1": 2, "0": 1}
    marks = save_marks(tmp_path / "marks.json", tmp_path / "out", mark("a.jsonl", 0, "1", "change", to="0"))
    relabel([source], tmp_path / "new", marks)
    written = (tmp_path / "new" / "data" / "a.jsonl").read_text()
    assert written == source.read_text().replace("true", "false", 1)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_bytes_are_classes(tmp_path: Path, name: str) -> None:
    source = tmp_path / name
    labels = (b"cat", b"dog", b"cat")
    write_table(source, Table(rows=[{"text": "s", "label": label} for label in labels]))
    assert classes_by_balance([source], "label") == {"cat": 2, "dog": 1}
    assert find_label_errors([source], tmp_path / "out", "label", options=EXACT).labels == {"cat": 2, "dog": 1}
    marks = save_marks(tmp_path / "marks.json", tmp_path / "out", mark(name, 0, "cat", "change", to="dog"))
    relabel([source], tmp_path / "new", marks)
    rows: list[Any] = [dict(row) for row in open_table(tmp_path / "new" / "data" / name).rows]
    assert [row["label"] for row in rows] == [b"dog", b"dog", b"cat"]
