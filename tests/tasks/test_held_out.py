"""Parts of the training data by class and by group: each sample is in one, and they are the same each time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.options import DataOptions
from unisono.errors import DataError
from unisono.tasks.columns import resolve_task
from unisono.tasks.held_out import held_out_ids, parts_by_class, parts_by_group
from unisono.tasks.options import TaskOptions

KEYS = st.lists(st.integers(0, 12), min_size=2, max_size=200)


@given(KEYS, st.integers(2, 12))
def test_each_part_has_every_class_in_its_proportion(values: list[int], num_parts: int) -> None:
    keys = np.array(values, np.uint64)
    parts = parts_by_class(keys, num_parts)
    for chosen in (keys >= 0, *(keys == key for key in set(values))):
        counts = np.bincount(parts[chosen], minlength=num_parts)
        assert len(counts) == num_parts
        assert counts.max() - counts.min() <= 1
    assert np.array_equal(parts, parts_by_class(keys, num_parts))


@given(KEYS, st.integers(2, 12))
def test_a_group_is_in_one_part(values: list[int], num_parts: int) -> None:
    keys = np.array(values, np.uint64)
    parts = parts_by_group(keys, num_parts)
    assert all(len(set(parts[keys == key].tolist())) == 1 for key in set(values))
    counts = np.bincount(parts, minlength=num_parts)
    assert len(counts) == num_parts
    assert counts.max() - counts.min() <= max(Counter(values).values())
    assert np.array_equal(parts, parts_by_group(keys, num_parts))


def test_samples_of_a_class_are_drawn_at_random() -> None:
    keys = np.repeat(np.arange(2, dtype=np.uint64), 500)
    parts = parts_by_class(keys, 5)
    firsts = [int((parts[:250] == part).sum()) for part in range(5)]
    assert len(set(firsts)) > 1
    assert all(30 <= count <= 70 for count in firsts)  # a hundred of the class in all


def table(tmp_path: Path, name: str = "table.csv") -> str:
    """90 rows: one in nine is of the class "rare", and three in a row are of one user."""
    path = tmp_path / name
    rows = [f"{number},{'rare' if number % 9 == 0 else 'often'},user{number // 3}" for number in range(90)]
    path.write_text("\n".join(["a,label,user", *rows]) + "\n")
    return str(path)


def parts_of(tmp_path: Path, eval_parts: str, num_parts: int) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    found = []
    for fold in range(num_parts):
        data = DataOptions(
            train=table(tmp_path),
            eval_frac=1 / num_parts,
            eval_fold=fold,
            eval_parts=eval_parts,
            cache_dir=str(tmp_path / "cache"),
        )
        found.append(held_out_ids(data, resolve_task(TaskOptions(kind="table", target="label"), data), 90))
    return found


def test_parts_of_a_table(tmp_path: Path) -> None:
    for eval_parts in ("stratified", "group:user"):
        parts = parts_of(tmp_path, eval_parts, 5)
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(90))
        assert [len(part) for part in parts] == [18] * 5
        if eval_parts == "stratified":
            assert [int((part % 9 == 0).sum()) for part in parts] == [2] * 5
        else:
            users = [set((part // 3).tolist()) for part in parts]
            assert sum(map(len, users)) == len(set.union(*users)) == 30


def test_more_parts_than_groups(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"part 2 of 20 by data\.eval_parts=group:label: 0 of 90 samples"):
        parts_of(tmp_path, "group:label", 20)
    with pytest.raises(DataError, match="without the column 'patient'"):
        parts_of(tmp_path, "group:patient", 2)


@pytest.mark.parametrize("eval_parts", ["group:", "class", "stratified "])
def test_parts_that_are_none(eval_parts: str) -> None:
    problems = [name for name, _ in DataOptions(train="x", eval_parts=eval_parts).problems()]
    assert problems == ["eval_parts"]
