"""Folds of the data that are held out in turn, and what is said of a metric over them."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.options import DataOptions
from unisono.errors import DataError
from unisono.tasks.held_out import random_fold
from unisono.tune.folds import cross_validation, fold_settings, folds_space, write_folds_page
from unisono.tune.space import grid
from unisono.tune.study import TrialRecord


@given(st.integers(2, 500), st.integers(2, 20))
def test_each_sample_is_held_out_once(size: int, num_folds: int) -> None:
    frac = float(fold_settings(num_folds, whole=True)[0].partition("=")[2])
    if size * frac < 1 - 1e-9:
        with pytest.raises(DataError):
            random_fold(size, frac, 1)
        return
    folds = [random_fold(size, frac, fold) for fold in range(num_folds)]
    assert np.array_equal(np.sort(np.concatenate(folds)), np.arange(size))
    assert max(map(len, folds)) - min(map(len, folds)) <= 1


def test_the_first_fold_is_what_was_held_out_before() -> None:
    assert len(random_fold(100, 0.05, 0)) == 5
    assert len(random_fold(3, 0.01, 0)) == 1
    assert len(random_fold(2, 0.5, 0)) == 1


@pytest.mark.parametrize(
    ("frac", "fold", "is_wrong"), [(0.2, 4, False), (0.2, 5, True), (0.3, 2, False), (0.3, 3, True)]
)
def test_a_fold_that_is_none(frac: float, fold: int, is_wrong: bool) -> None:
    problems = [name for name, _ in DataOptions(train="x", eval_frac=frac, eval_fold=fold).problems()]
    assert ("eval_fold" in problems) == is_wrong


def test_every_fold_is_trained_once() -> None:
    assert [each["data.eval_fold"] for each in grid(folds_space(4))] == ["0", "1", "2", "3"]


def record(fold: int, value: float | None) -> TrialRecord:
    outcome = "failed" if value is None else "done"
    settings = {"data.eval_fold": str(fold)}
    fields = {"took_s": 1.0, "device_s": 1.0, "reason": "", "run_dir": Path("x")}
    return TrialRecord(number=fold, settings=settings, outcome=outcome, value=value, **fields)  # type: ignore[arg-type]


def test_mean_and_spread(tmp_path: Path) -> None:
    values = [0.5, 0.7, 0.9, 0.7]
    records = [record(fold, value) for fold, value in enumerate(values)]
    found = cross_validation("eval/accuracy", 5, [*records, record(4, None)])
    assert found.mean == pytest.approx(statistics.fmean(values))
    assert found.spread == pytest.approx(statistics.stdev(values))
    assert found.to_json()["standard_error"] == pytest.approx(statistics.stdev(values) / 2)
    assert found.verdict() == (
        "eval/accuracy 0.7 ± 0.16 (mean and standard deviation of 4 folds; 1 of 5 folds failed)."
    )
    assert found.to_json()["failed"] == [4]
    assert cross_validation("eval/accuracy", 5, records).verdict() == (
        "eval/accuracy 0.7 ± 0.16 (mean and standard deviation of 4 folds; 1 of 5 folds have not ended)."
    )
    write_folds_page(tmp_path / "report.html", found, [*records, record(4, None)])
    assert "0.7 ± 0.16" in (tmp_path / "report.html").read_text()
    assert cross_validation("eval/loss", 5, []).verdict() == "No fold has a value of eval/loss."
