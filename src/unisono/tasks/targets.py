"""Targets of samples: classes become numbers, numbers are standardised. Both by what the training data show."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unisono.data.dataset import Batch
from unisono.errors import DataError

# a word without a label of its own; as in torch's cross-entropy it does not count
IGNORED: Final = -100
MAX_CLASSES: Final = 100_000
MAX_NUMBER: Final = float(np.finfo(np.float32).max)
# of what ``number`` says where the value is a target
TARGET: Final = {"where": "as the target", "nearest": "correct the value, or task.predicts=class"}


@dataclass(frozen=True, kw_only=True)
class ClassNumbers:
    """Replaces ``targets``, a name or a number of a class, by the number of the class, int64.

    An integer is a name where names are integers too: the label 1 is the class "1", whatever its place. Where no name is an
    integer, and with ``numbered``, an integer is the number of a class.

    Attributes:
        names: Names of the classes in the order of their numbers.
        several: Whether ``targets`` are the classes of several words: text with a name a line, or integers.
        numbered: Whether ``targets`` are numbers of classes already.

    Raises:
        DataError: A target is none of the classes.
    """

    names: tuple[str, ...]
    several: bool = False
    numbered: bool = False

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    @cached_property
    def has_integers(self) -> bool:
        """Whether some names are integers."""
        return any(name.isascii() and name.removeprefix("-").isdigit() for name in self.names)

    def __call__(self, sample: Batch) -> Batch:
        value = sample["targets"]
        names = class_names(value, several=self.several)
        numbers = np.array([self._number(name) for name in names], np.int64)
        return {**sample, "targets": numbers if self.several else numbers[0]}

    def _number(self, name: str | int) -> int:
        if isinstance(name, int) and name == IGNORED and self.several:
            return name
        if isinstance(name, int) and (self.numbered or not self.has_integers):
            if 0 <= name < len(self.names):
                return name
        elif (number := self._numbers.get(str(name))) is not None:
            return number
        raise DataError(
            given=f"the target {name!r}",
            rule=f"the classes are the {len(self.names)} of task.classes: {first_names(self.names)}",
            consequence="the sample has no class",
            nearest="correct the sample, or list all classes in task.classes",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Renumber:
    """Replaces ``targets``, one or several numbers of classes of a source, by those that ``numbers`` has for them.

    A number that is no class of the source becomes -1, which ``ClassNumbers`` refuses; IGNORED stays.
    """

    numbers: tuple[int, ...]

    def __call__(self, sample: Batch) -> Batch:
        targets = np.asarray(sample["targets"], np.int64)
        is_class = (targets >= 0) & (targets < len(self.numbers))
        numbers = np.asarray(self.numbers)[np.where(is_class, targets, 0)]
        return {**sample, "targets": np.where(is_class, numbers, np.where(targets == IGNORED, IGNORED, -1))}


@dataclass(frozen=True, kw_only=True, slots=True)
class StandardNumber:
    """Replaces ``targets``, a number or an array of as many as ``mean`` has, by (number - mean) / std, float32 [] or [numbers].

    Raises DataError for what is no finite number, and for another count of them.
    """

    mean: float | tuple[float, ...]
    std: float | tuple[float, ...]

    def __call__(self, sample: Batch) -> Batch:
        if isinstance(self.mean, tuple):
            values = numbers(sample["targets"])
            if values.size != len(self.mean):
                raise _another_count(values.size, len(self.mean))
        else:
            values = np.array([number(sample["targets"], **TARGET)])
        if not np.isfinite(values).all():
            raise DataError(
                given=f"the target {', '.join(map(str, values.tolist()))}",
                rule="task.predicts number takes finite numbers",
                consequence="the sample has no target",
                nearest="correct or remove the sample, or task.predicts=class",
            )
        standard = ((values - self.mean) / self.std).astype(np.float32)
        return {**sample, "targets": standard if isinstance(self.mean, tuple) else standard[0]}


def class_names(value: Any, *, several: bool) -> list[str | int]:
    """The classes that a target holds: text, or integers. One, or with ``several`` one for each word."""
    array: NDArray[Any] = np.asarray(value)
    if array.dtype.kind in "US":
        names: list[Any] = [str(name) for name in array.reshape(-1).tolist()]
    elif array.dtype == np.uint8 and array.ndim == 1:  # text, as the sources give it
        text = array.tobytes().decode("utf-8", errors="replace")
        names = split_words(text) if several else [text]
    elif array.dtype.kind in "iub" or (array.dtype.kind == "f" and _are_integers(array)):
        names = [int(number) for number in array.reshape(-1).tolist()]
    else:
        names = []
    if len(names) == 1 or (several and names):
        return names
    raise DataError(
        given=f"a target {array.dtype}{list(array.shape)}" + (f" with {array.reshape(-1)[0]}" if array.size else ""),
        rule="a class is one text or one integer" + (", or several for the words of a sample" if several else ""),
        consequence="the sample has no class",
        nearest="task.target=COLUMN of the classes, or task.predicts=number",
    )


def _are_integers(array: NDArray[Any]) -> bool:
    """Whether no number has a fraction; infinity, which is its own floor, is no integer."""
    return bool((np.isfinite(array) & (array == np.floor(array))).all())


def is_absent(value: Any, *, several: bool = False) -> bool:
    """Whether a target is empty text or NaN, or with ``several`` any of the words has none."""
    if is_string(value):
        text = text_of(value)
        return not text.strip() or (several and any(not label.strip() for label in split_words(text)))
    array: NDArray[Any] = np.asarray(value)
    return array.size == 0 or (array.dtype.kind == "f" and bool(np.isnan(array).any()))


def scan_classes(values: Iterable[Any], *, several: bool) -> tuple[str, ...]:
    """Names of all classes in ``values``: texts sorted, or the integers from 0 to the largest. Raises DataError for a mixture."""
    texts: set[str] = set()
    largest = -1
    for value in values:
        for name in class_names(value, several=several):
            if isinstance(name, str):
                texts.add(name)
            elif name != IGNORED:
                if not 0 <= name < MAX_CLASSES:
                    raise _no_classes(f"a class number of {name}", "class numbers begin at 0 and have no large gaps")
                largest = max(largest, name)
        if len(texts) > MAX_CLASSES:
            raise _no_classes(f"more than {MAX_CLASSES} different targets", "a class has several samples")
    if texts and largest >= 0:
        raise _no_classes(
            f"targets such as {min(texts)!r} and targets such as {largest}", "all targets are texts, or all numbers"
        )
    names = tuple(sorted(texts)) if texts else tuple(map(str, range(largest + 1)))
    if len(names) < 2:
        raise _no_classes(
            f"training data with {len(names)} classes", "a model learns to tell at least two classes apart"
        )
    return names


class Moments:
    """Mean, standard deviation and count of the finite ones of numbers that are added one by one (Welford 1962)."""

    def __init__(self) -> None:
        self._count, self._mean, self._squares = 0, 0.0, 0.0

    def add(self, x: float) -> None:
        if math.isfinite(x):
            self._count += 1
            delta = x - self._mean
            self._mean += delta / self._count
            self._squares += delta * (x - self._mean)

    def result(self) -> tuple[float, float, int]:
        """Mean, standard deviation, which is 1 for equal numbers, and count."""
        std = math.sqrt(self._squares / self._count) if self._count else 0.0
        return self._mean, std or 1.0, self._count


def scan_targets(values: Iterable[Any]) -> tuple[float | tuple[float, ...], float | tuple[float, ...], int]:
    """Mean, standard deviation and count of the finite targets; of arrays of several numbers a mean and a deviation for each.

    Raises DataError for arrays of different lengths.
    """
    values = iter(values)
    first = next(values, None)
    if first is None or (size := numbers(first).size) == 1:
        moments = Moments()
        for value in chain([] if first is None else [first], values):
            moments.add(number(value, **TARGET))
        return moments.result()
    rows = (numbers(value) for value in chain([first], values))
    count, mean, squares = 0, np.zeros(size), np.zeros(size)
    for row in rows:
        if row.size != size:
            raise _another_count(row.size, size)
        if not np.isfinite(row).all():
            continue
        count += 1
        delta = row - mean
        mean += delta / count
        squares += delta * (row - mean)
    std = np.sqrt(squares / max(1, count))
    return tuple(mean.tolist()), tuple(np.where(std > 0, std, 1.0).tolist()), count


def _another_count(found: int, expected: int) -> DataError:
    return DataError(
        given=f"a target of {found} numbers, where others have {expected}",
        rule="all samples have as many numbers to predict",
        consequence="the model has no output for some of them",
        nearest="correct or remove the sample",
    )


def numbers(value: Any) -> NDArray[np.float64]:
    """The numbers that a target holds, in one dim: an array of them, or ``number`` of anything else."""
    array: NDArray[Any] = np.asarray(value)
    if array.ndim == 1 and array.size > 1 and array.dtype.kind in "if" and array.dtype != np.uint8:
        return array.astype(np.float64)
    return np.array([number(value, **TARGET)])


def number(
    value: Any,
    where: str = "in a column of numbers",
    nearest: str = "correct the value, or name the column in task.categories",
) -> float:
    """The number that a value of a column holds; NaN for empty text.

    Raises DataError for other text, with the words ``where`` it is and ``nearest``.
    """
    array: NDArray[Any] = np.asarray(value)
    if is_string(array):
        text = text_of(array).strip()
        try:
            return _parsed(text)
        except ValueError:
            raise DataError(
                given=f"the text {text!r} {where}",
                rule="every value of the column is a number or empty",
                consequence="the sample has no such number",
                nearest=nearest,
            ) from None
    if array.size != 1 or array.dtype.kind not in "iufb":
        raise DataError(
            given=f"a value {array.dtype}{list(array.shape)} {where}",
            rule="a column of numbers has one number a sample",
            consequence="the sample has no such number",
            nearest="task.inputs with the columns of single numbers",
        )
    return float(array.reshape(-1)[0])


def infinite_error(given: str) -> DataError:
    """The error for a number of a column that float32 cannot hold."""
    return DataError(
        given=given,
        rule=f"numbers are absent, or finite and up to {MAX_NUMBER:.4g}",
        consequence="losses would be infinite",
        nearest="correct the value, or leave it empty",
    )


def is_string(value: Any) -> bool:
    """Whether a value of a column is a string; sources give strings as uint8 [bytes]."""
    array: NDArray[Any] = np.asarray(value)
    return (array.dtype == np.uint8 and array.ndim == 1) or array.dtype.kind in "US"


def is_text(value: Any) -> bool:
    """Whether a value of a column is text that is no number."""
    if not is_string(value):
        return False
    try:
        _parsed(text_of(value).strip())
    except ValueError:
        return True
    return False


def _parsed(text: str) -> float:
    if "_" in text:  # Python's float reads 1_000
        raise ValueError(text)
    return float(text) if text else math.nan


def text_of(value: Any) -> str:
    """A value of a column as text; sources give text as uint8 [bytes].

    A column of integers has floats in a file where one is absent: 10.0 is "10", and NaN is empty, as an absent text.
    """
    array: NDArray[Any] = np.asarray(value)
    if array.dtype == np.uint8 and array.ndim == 1:
        return array.tobytes().decode("utf-8", errors="replace")
    if array.dtype.kind == "f" and array.size == 1:
        x = float(array.reshape(-1)[0])
        if math.isnan(x):
            return ""
        if x.is_integer():
            return str(int(x))
    return str(array.reshape(-1)[0]) if array.size == 1 else str(array.tolist())


def split_words(text: str) -> list[str]:
    """The words of a text: one a line, as sources give a list of strings, or separated by spaces; line ends at the end go."""
    text = text.rstrip("\r\n")
    return text.split("\n") if "\n" in text else text.split()


def first_names(names: Iterable[str], limit: int = 6) -> str:
    """The first names, and how many more there are."""
    listed = list(names)
    return ", ".join(listed[:limit]) + (f" and {len(listed) - limit} more" if len(listed) > limit else "")


def check_columns(sample: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    """Raise DataError if a sample lacks one of the columns ``names``."""
    absent = [name for name in names if name not in sample]
    if absent:
        raise DataError(
            given=f"{where} without the column {absent[0]!r}",
            rule=f"its columns are {', '.join(map(str, sample))}",
            consequence="nothing can be learned without it",
            nearest="task.inputs and task.target with names of these columns",
        )


def _no_classes(given: str, rule: str) -> DataError:
    return DataError(
        given=given,
        rule=rule,
        consequence="the classes of the model are not known",
        nearest="task.target=COLUMN of the classes, task.classes with their names, or task.predicts=number",
    )
