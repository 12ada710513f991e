"""``split``: no document of one part is near one of another, and parts and classes have their shares."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import planted
import pytest

from unisono.data.convert.table_files import Table, open_table, write_table
from unisono.errors import DataError
from unisono.quality.leak import find_leaks
from unisono.quality.options import DuplicateOptions
from unisono.quality.split import SplitResult, assign_parts, split

pytest.importorskip("rensa")

PARTS = {"train": Fraction(8, 10), "valid": Fraction(1, 10), "test": Fraction(1, 10)}


def data_set(path: Path, count: int = 800) -> list[dict[str, Any]]:
    """Documents of three classes and of users, of which every fourth has one or several near copies."""
    rng = np.random.default_rng(1)
    rows: list[dict[str, Any]] = []
    for number, text in enumerate(planted.documents(count, rng)):
        label = ("common", "common", "common", "rare", "other")[number % 5]
        texts = (
            [text, *(planted.edited(text, 1, rng) for _ in range(int(rng.integers(1, 4))))]
            if number % 4 == 0
            else [text]
        )
        rows += [{"text": each, "label": label, "user": f"user{number // 3}"} for each in texts]
    rows = [rows[number] for number in rng.permutation(len(rows))]
    write_table(path, Table(rows=rows))
    return rows


def parts_of(out: Path, result: SplitResult) -> dict[str, list[dict[str, Any]]]:
    return {
        part.name: [dict(row) for row in open_table(out / part.name / "data" / "all.jsonl").rows]
        for part in result.parts
    }


def test_no_part_leaks_into_another(tmp_path: Path) -> None:
    rows = data_set(tmp_path / "all.jsonl")
    result = split([tmp_path / "all.jsonl"], tmp_path / "out", PARTS)
    parts = parts_of(tmp_path / "out", result)
    assert sorted(row["text"] for part in parts.values() for row in part) == sorted(row["text"] for row in rows)
    assert result.clusters == 800
    for part in result.parts:
        assert part.documents == len(parts[part.name]) == pytest.approx(part.share * len(rows), abs=1)
    train, *others = (tmp_path / "out" / name / "data" for name in PARTS)
    assert find_leaks(train, others).pairs == ()
    part_of = {row["text"]: name for name, rows_of_part in parts.items() for row in rows_of_part}
    texts = list(part_of)
    near = planted.pairs_above(texts, 0.8)  # by comparing them all
    assert len(near) > 200
    assert all(part_of[texts[first]] == part_of[texts[second]] for first, second in near)
    assert "Near-duplicates that were found are in one part." in (tmp_path / "out" / "report.html").read_text()
    exact = split([tmp_path / "all.jsonl"], tmp_path / "exact", PARTS, options=DuplicateOptions(near=0))
    assert exact.clusters > result.clusters
    assert "Near-duplicates were not looked for." in (tmp_path / "exact" / "report.html").read_text()


def test_groups_are_in_one_part_each(tmp_path: Path) -> None:
    data_set(tmp_path / "all.jsonl")
    result = split([tmp_path / "all.jsonl"], tmp_path / "out", PARTS, group_field="user")
    parts = parts_of(tmp_path / "out", result)
    users = [{row["user"] for row in part} for part in parts.values()]
    assert sum(map(len, users)) == len(set.union(*users)) == 267
    train, *others = (tmp_path / "out" / name / "data" for name in PARTS)
    assert find_leaks(train, others).pairs == ()


def test_classes_have_the_same_shares(tmp_path: Path) -> None:
    rows = data_set(tmp_path / "all.jsonl")
    result = split([tmp_path / "all.jsonl"], tmp_path / "out", PARTS, class_field="label")
    total = Counter(row["label"] for row in rows)
    for part in result.parts:
        assert set(part.classes) == set(total)
        for label, count in part.classes.items():
            assert count == pytest.approx(part.share * total[label], abs=1)
    assert "train" in (tmp_path / "out" / "report.html").read_text()


def test_a_chain_is_one_cluster(tmp_path: Path) -> None:
    words = [f"word{number}" for number in range(260)]
    texts = [" ".join(words[number * 8 : number * 8 + 120]) for number in range(16)]
    rest = planted.documents(16, np.random.default_rng(2))
    write_table(tmp_path / "all.jsonl", Table(rows=[{"text": text} for text in texts + rest]))
    result = split([tmp_path / "all.jsonl"], tmp_path / "out", {"a": Fraction(1, 2), "b": Fraction(1, 2)})
    assert (result.clusters, result.largest) == (17, 16)
    parts = parts_of(tmp_path / "out", result)
    assert sorted(len(part) for part in parts.values()) == [16, 16]


def test_another_seed_draws_others(tmp_path: Path) -> None:
    clusters, classes = np.arange(100), np.zeros(100, np.int64)
    first, same, other = (assign_parts(clusters, classes, [0.5, 0.5], seed) for seed in (0, 0, 1))
    assert first.tolist() == same.tolist() != other.tolist()
    assert first.sum() == other.sum() == 50


def test_nothing_to_split(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert len(assign_parts(np.zeros(0, np.int64), np.zeros(0, np.int64), [0.5, 0.5], 0)) == 0
    (tmp_path / "all.jsonl").touch()
    split([tmp_path / "all.jsonl"], tmp_path / "out", {"a": Fraction(1)})
    assert "the part 'a' has no documents: the data set has none" in caplog.text


@pytest.mark.parametrize(
    "rows_of_class",
    [[4] * 300, [3] * 400, [1] * 1200, [100] * 10 + [4] * 300, [7, 1, 1, 2, 50]],
    ids=["fours", "threes", "ones", "long tail", "few"],
)
@pytest.mark.parametrize("shares", [[0.8, 0.1, 0.1], [0.5, 0.5], [0.7, 0.2, 0.05, 0.05]])
def test_small_classes_have_their_shares_and_so_have_all(rows_of_class: list[int], shares: list[float]) -> None:
    classes = np.repeat(np.arange(len(rows_of_class)), rows_of_class)
    part_of = assign_parts(np.arange(len(classes)), classes, shares, 0)
    counts = np.zeros((len(shares), len(rows_of_class)))
    np.add.at(counts, (part_of, classes), 1)
    assert np.abs(counts - np.outer(shares, rows_of_class)).max() < 1
    assert np.abs(counts.sum(axis=1) - np.array(shares) * len(classes)).max() < 1


def test_groups_in_small_classes_have_the_shares_of_all() -> None:
    shares = np.array([0.8, 0.1, 0.1])
    pairs, fours, tens = np.arange(1200) // 2 * 2, np.arange(1200) // 4, np.arange(1200) // 10
    for clusters, classes in ((pairs, fours), (tens * 10, tens)):
        part_of = assign_parts(clusters, classes, shares.tolist(), 0)
        assert np.array_equal(part_of, part_of[clusters])
        assert np.bincount(part_of, minlength=3).tolist() == [960, 120, 120]


def test_why_a_part_is_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data_set(tmp_path / "all.jsonl", 3)
    split([tmp_path / "all.jsonl"], tmp_path / "few", {"a": Fraction(95, 100), "b": Fraction(5, 100)})
    assert "the part 'b' has no documents: its share of 6 is 0.3" in caplog.text
    write_table(tmp_path / "same.jsonl", Table(rows=[{"text": "the same"}] * 6))
    split([tmp_path / "same.jsonl"], tmp_path / "same", {"a": Fraction(1, 2), "b": Fraction(1, 2)})
    assert "'b' has no documents: its share of 6 is 3, and the clusters are too large for it" in caplog.text


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"a": Fraction(1, 2)}, "parts a=0.5"),
        ({"a": Fraction(3, 2), "b": Fraction(-1, 2)}, "above 0 and sum up to 1"),
        ({"../a": Fraction(1)}, "a part '../a'"),
        ({"work": Fraction(1)}, "a part 'work'"),
        ({"data": Fraction(1, 2), "x": Fraction(1, 2)}, "a part 'data'"),
        ({"x": Fraction(1, 2), "kept": Fraction(1, 2)}, "a part 'kept'"),
    ],
)
def test_parts_that_are_refused(tmp_path: Path, parts: dict[str, Fraction], message: str) -> None:
    data_set(tmp_path / "all.jsonl", 4)
    with pytest.raises(DataError, match=message):
        split([tmp_path / "all.jsonl"], tmp_path / "out", parts)
    assert not (tmp_path / "out").exists()


def test_fields_that_are_refused(tmp_path: Path) -> None:
    data_set(tmp_path / "all.jsonl", 4)
    with pytest.raises(DataError, match="has no column 'class'"):
        split([tmp_path / "all.jsonl"], tmp_path / "out", PARTS, class_field="class")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    with pytest.raises(DataError, match="rows of tables have fields"):
        split([tmp_path / "texts"], tmp_path / "other", PARTS, group_field="user")


def test_too_many_classes_and_values_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_set(tmp_path / "all.jsonl", 8)
    monkeypatch.setattr("unisono.quality.labels.values.MAX_LABELS", 1)
    with pytest.raises(DataError, match="the field of a user or a source is a group"):
        split([tmp_path / "all.jsonl"], tmp_path / "out", PARTS, class_field="label")
    write_table(tmp_path / "lists.jsonl", Table(rows=[{"text": "a", "label": ["x", "y"]}]))
    with pytest.raises(DataError, match="a row has one label"):
        split([tmp_path / "lists.jsonl"], tmp_path / "other", PARTS, class_field="label")


def test_a_folder_of_hugging_face_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text('{"_data_files": []}')
    (tmp_path / "saved" / "data-00000-of-00001.arrow").write_bytes(b"\xff\xff\xff\xff")
    with pytest.raises(DataError, match=r"a folder of Hugging Face's datasets(.|\n)*to_parquet"):
        split([tmp_path / "saved"], tmp_path / "out", PARTS)
