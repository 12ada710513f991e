"""Folds of the training data by class and by group: each sample is in one, and they are the same each time."""

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
from unisono.tasks.held_out import group_folds, held_out_ids, stratified_folds
from unisono.tasks.options import TaskOptions

KEYS = st.lists(st.integers(0, 12), min_size=2, max_size=200)


@given(KEYS, st.integers(2, 12))
def test_each_fold_has_every_class_in_its_proportion(values: list[int], num_folds: int) -> None:
    keys = np.array(values, np.uint64)
    folds = stratified_folds(keys, num_folds)
    for chosen in (keys >= 0, *(keys == key for key in set(values))):
        counts = np.bincount(folds[chosen], minlength=num_folds)
        assert len(counts) == num_folds
        assert counts.max() - counts.min() <= 1
    assert np.array_equal(folds, stratified_folds(keys, num_folds))


@given(KEYS, st.integers(2, 12))
def test_a_group_is_in_one_fold(values: list[int], num_folds: int) -> None:
    keys = np.array(values, np.uint64)
    folds = group_folds(keys, num_folds)
    assert all(len(set(folds[keys == key].tolist())) == 1 for key in set(values))
    counts = np.bincount(folds, minlength=num_folds)
    assert len(counts) == num_folds
    assert counts.max() - counts.min() <= max(Counter(values).values())
    assert np.array_equal(folds, group_folds(keys, num_folds))


def test_samples_of_a_class_are_drawn_at_random() -> None:
    keys = np.repeat(np.arange(2, dtype=np.uint64), 500)
    folds = stratified_folds(keys, 5)
    firsts = [int((folds[:250] == fold).sum()) for fold in range(5)]
    assert len(set(firsts)) > 1
    assert all(30 <= count <= 70 for count in firsts)  # a hundred of the class in all


def table(tmp_path: Path, name: str = "table.csv") -> str:
    """90 rows: one in nine is of the class "rare", and three in a row are of one user."""
    path = tmp_path / name
    rows = [f"{number},{'rare' if number % 9 == 0 else 'often'},user{number // 3}" for number in range(90)]
    path.write_text("\n".join(["a,label,user", *rows]) + "\n")
    return str(path)


def folds_of(tmp_path: Path, eval_split: str, num_folds: int) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    found = []
    for fold in range(num_folds):
        data = DataOptions(
            train=table(tmp_path),
            eval_frac=1 / num_folds,
            eval_fold=fold,
            eval_split=eval_split,
            cache_dir=str(tmp_path / "cache"),
        )
        found.append(held_out_ids(data, resolve_task(TaskOptions(kind="table", target="label"), data), 90))
    return found


def test_folds_of_a_table(tmp_path: Path) -> None:
    for eval_split in ("stratified", "group:user"):
        folds = folds_of(tmp_path, eval_split, 5)
        assert np.array_equal(np.sort(np.concatenate(folds)), np.arange(90))
        assert [len(fold) for fold in folds] == [18] * 5
        if eval_split == "stratified":
            assert [int((fold % 9 == 0).sum()) for fold in folds] == [2] * 5
        else:
            users = [set((fold // 3).tolist()) for fold in folds]
            assert sum(map(len, users)) == len(set.union(*users)) == 30


def test_more_folds_than_groups(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"fold 2 of 20 by data\.eval_split=group:label: 0 of 90 samples"):
        folds_of(tmp_path, "group:label", 20)
    with pytest.raises(DataError, match="without the column 'patient'"):
        folds_of(tmp_path, "group:patient", 2)


@pytest.mark.parametrize("eval_split", ["group:", "class", "stratified "])
def test_splits_that_are_none(eval_split: str) -> None:
    problems = [name for name, _ in DataOptions(train="x", eval_split=eval_split).problems()]
    assert problems == ["eval_split"]
