"""Numbers as targets: one a sample, or several."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from unisono.errors import DataError
from unisono.tasks.targets import ClassNumbers, StandardNumber, is_text, scan_classes, scan_targets, split_words

ROWS = np.random.default_rng(0).normal((3, -2), (0.5, 4), (50, 2)).astype(np.float32)


def test_one_number_a_sample_has_one_mean() -> None:
    for values in (ROWS[:, 0], ROWS[:, :1], [str(value).encode() for value in ROWS[:, 0]]):
        read = [np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value for value in values]
        mean, std, count = scan_targets([*read, np.float32("nan")])
        assert (mean, std) == pytest.approx((ROWS[:, 0].mean(), ROWS[:, 0].std()), rel=1e-6)
        assert count == 50
    assert scan_targets([]) == (0.0, 1.0, 0)


def test_several_numbers_have_a_mean_each() -> None:
    rows = np.column_stack([ROWS, np.full(50, 7, np.float32)])
    mean, std, count = scan_targets([*rows, np.array([1, np.inf, 2], np.float32)])
    assert mean == pytest.approx((*ROWS.mean(0), 7), rel=1e-5)
    assert std == pytest.approx((*ROWS.std(0), 1), rel=1e-5)  # equal numbers are not divided by 0
    assert count == 50
    standard = StandardNumber(mean=mean, std=std)
    targets = np.stack([standard({"targets": row, "x": 1})["targets"] for row in rows])
    assert targets.dtype == np.float32
    assert targets[:, :2].mean(0) == pytest.approx((0, 0), abs=1e-6)
    assert targets[:, :2].std(0) == pytest.approx((1, 1), rel=1e-5)


def test_other_counts_are_refused() -> None:
    text = (
        "a target of 2 numbers, where others have 3\n"
        "  rule: all samples have as many numbers to predict\n"
        "  so:   the model has no output for some of them\n"
        "  try:  correct or remove the sample"
    )
    with pytest.raises(DataError) as caught:
        scan_targets([np.ones(3), np.ones(2)])
    assert str(caught.value) == text
    with pytest.raises(DataError) as caught:
        StandardNumber(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))({"targets": np.ones(2)})
    assert str(caught.value) == text
    with pytest.raises(DataError, match=r"finite numbers"):
        StandardNumber(mean=(0.0, 0.0), std=(1.0, 1.0))({"targets": np.array([1.0, np.nan])})


def test_infinity_is_no_class() -> None:
    for value in (np.float32("inf"), np.array([-np.inf])):
        with pytest.raises(DataError, match=r"a target float.*inf\n  rule: a class is one text or one integer"):
            scan_classes([np.int64(1), value], several=False)


@pytest.mark.parametrize(
    ("names", "value", "number"),
    [
        (("1", "2", "x"), 1, 0),
        (("1", "2", "x"), 2.0, 1),
        (("1", "0"), 0, 1),
        (("1", "0"), b"0", 1),
        (("0", "1"), 1, 1),
        (("-1", "1"), -1, 0),
        (("cat", "dog"), 1, 1),
        (("cat", "dog"), b"dog", 1),
    ],
)
def test_an_integer_is_the_class_of_that_name(names: tuple[str, ...], value: Any, number: int) -> None:
    given = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else np.asarray(value)
    assert ClassNumbers(names=names)({"targets": given})["targets"] == number


def test_numbers_of_words_are_classes_of_that_name() -> None:
    of = ClassNumbers(names=("1", "0"), several=True)
    assert of({"targets": np.array([0, 1, -100, 0])})["targets"].tolist() == [1, 0, -100, 1]
    with pytest.raises(DataError, match=r"the target 2"):
        of({"targets": np.array([2])})
    # of a source that numbers its classes itself
    of = ClassNumbers(names=("1", "0"), numbered=True)
    assert of({"targets": np.array(0)})["targets"] == 0


@pytest.mark.parametrize("text", ["PER O\n", "PER O", "PER\nO\n", "PER\nO", "PER O\r\n", " PER  O \n\n"])
def test_line_ends_behind_words_do_not_count(text: str) -> None:
    assert split_words(text) == ["PER", "O"]


@pytest.mark.parametrize(("text", "found"), [("1_000", True), ("1e3", False), ("", False), ("nope", True)])
def test_texts_that_are_no_numbers(text: str, found: bool) -> None:
    assert is_text(np.frombuffer(text.encode(), np.uint8)) is found
