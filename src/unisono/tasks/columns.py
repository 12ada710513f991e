"""Columns of a task: finds out which columns are inputs and target, their classes, means and standard deviations.

``resolve_task`` reads the training data once for what a model must know before it is built. Its result stands in the run's
configuration, so that evaluation and export need no training data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

import xxhash

from unisono.data.options import DataOptions
from unisono.errors import ConfigError, DataError
from unisono.storage.files import write_atomically
from unisono.storage.ownership import make_own_folder, read_own_json
from unisono.tasks.options import LANGUAGE_MODELS, TaskOptions, updated_task
from unisono.tasks.sources import (
    INPUT_NAMES,
    TARGETS,
    Row,
    addresses,
    cache_folder,
    class_names_of,
    first_of,
    first_sample,
    open_group,
    read_columns,
    train_groups,
)
from unisono.tasks.targets import (
    MAX_NUMBER,
    Moments,
    check_columns,
    class_names,
    infinite_error,
    is_absent,
    is_text,
    number,
    numbers,
    scan_classes,
    scan_targets,
    text_of,
)

_TARGET_NAMES = (TARGETS, "target", "label", "labels", "tags", "ner_tags", "cls")
# changes with what a scan finds, so that results of other versions are not taken
_SCAN_VERSION = 3
# a column with a smaller share of texts is of numbers, some of them wrong
_MAX_WRONG = 0.05


def resolve_task(task: TaskOptions, data: DataOptions) -> TaskOptions:
    """``task`` with the columns, classes and statistics that it leaves open, of the training data.

    Reads the columns that it needs whole. The result is kept in the cache folder, for other starts with the same data and task.
    Raises DataError if the data do not fit the task.
    """
    if task.kind in LANGUAGE_MODELS:
        return task
    sources = [open_group(group, None, data, task, data.train_kept_rows) for group in train_groups(data)]
    known = [
        (source.fingerprint, getattr(source, "classes", ()), getattr(source, "class_column", "")) for source in sources
    ]
    digest = xxhash.xxh3_128_hexdigest(repr((_SCAN_VERSION, known, asdict(task))).encode())
    path = cache_folder(data) / f"columns-{digest}.json"
    with suppress(OSError):
        make_own_folder(path.parent, option="data.cache_dir")
    with suppress(OSError, ValueError, TypeError):  # damaged or not there: read again
        return updated_task(task, read_own_json(path))
    resolved = _scan_columns(task, data)
    with suppress(OSError):  # a folder that cannot be written costs only the next start's time
        write_atomically(path, json.dumps(asdict(resolved)).encode())
    return resolved


def _scan_columns(task: TaskOptions, data: DataOptions) -> TaskOptions:
    first = first_sample(data, task)
    target = task.target or first_of(_TARGET_NAMES, first, "task.target")
    if task.kind == "table":
        inputs = task.inputs or tuple(name for name in first if name != target)
    else:
        inputs = task.inputs or (first_of(INPUT_NAMES[task.kind], first, "task.inputs"),)
    check_columns(first, [*inputs, target], f"training data {' '.join(addresses(data.train))}")
    task = replace(task, target=target, inputs=inputs)
    if task.has_classes and not task.classes:
        sources = [open_group(group, None, data, task, data.train_kept_rows) for group in train_groups(data)]
        # in the order of the first source; others may have more
        named = tuple(dict.fromkeys(name for source in sources for name in class_names_of(source, target)))
        several = task.kind == "sequence_labelling"
        task = replace(task, classes=named or scan_classes(_targets(task, data), several=several))
    if task.has_numbers and task.target_mean is None:
        mean, std, count = scan_targets(_targets(task, data))
        if not count:
            raise _no_numbers(target)
        task = replace(task, target_mean=mean, target_std=std)
    return _resolve_columns(task, data) if task.kind == "table" else task


def _targets(task: TaskOptions, data: DataOptions) -> Iterator[Any]:
    """The targets of all training samples. Raises DataError, with the row, for an unusable one, and for absent ones."""
    several = task.kind == "sequence_labelling"
    count, absent, first = 0, 0, ""
    for row in read_columns(data, (task.target,), task):
        value, count = row.values[task.target], count + 1
        if is_absent(value, several=several):
            absent, first = absent + 1, first or row.location
            continue
        with _located(task.target, row):
            if task.has_classes:
                class_names(value, several=several)
            elif abs(numbers(value)).max() > MAX_NUMBER:
                raise infinite_error(f"the target {value}")
        yield value
    if absent:
        raise DataError(
            given=f"{absent} of {count} training samples without a target in the column {task.target!r}: first {first}",
            rule="every training sample has a target" + (", a sequence one for each word" if several else ""),
            consequence="they cannot be learned from",
            nearest="add the targets, or remove these samples",
        )


@contextmanager
def _located(column: str, row: Row) -> Generator[None]:
    """Errors of a value name its column and row."""
    try:
        yield
    except DataError as error:
        where = f"column {column!r}, {row.location}"
        raise DataError(*(replace(problem, given=f"{where}: {problem.given}") for problem in error.problems)) from error


def _resolve_columns(task: TaskOptions, data: DataOptions) -> TaskOptions:
    """The columns of a table that are categories, and the statistics of the others."""
    stray = [name for name in task.categories if name not in task.inputs]
    if stray:
        raise ConfigError(
            given=f"task.categories with {stray[0]!r}",
            rule=f"they are some of the inputs {', '.join(task.inputs)}",
            consequence="the column would not be read",
            nearest="name it in task.inputs too, or leave it out",
        )
    columns = {name: _InputColumn() for name in number_columns(task)}
    if columns and not (task.categories and task.input_mean):
        for row in read_columns(data, tuple(columns), task):
            for name, column in columns.items():
                with _located(name, row):
                    column.add(row.values[name], row)
    if not task.categories:
        found = tuple(name for name, column in columns.items() if column.texts > _MAX_WRONG * column.count)
        task = replace(task, categories=found)
    columns = {name: column for name, column in columns.items() if name not in task.categories}
    for name, column in columns.items():
        if column.first_text is not None:
            raise _text_among_numbers(name, column, task.categories)
        if column.first_infinite is not None:
            x, row = column.first_infinite
            raise infinite_error(f"column {name!r}, {row.location}: the number {x}")
    if task.input_mean:
        if len(task.input_mean) != len(columns):
            raise ConfigError(
                given=f"task.input_mean of {len(task.input_mean)} values for {len(columns)} columns of numbers",
                rule=f"each of {', '.join(columns)} has a mean and a standard deviation",
                consequence="the numbers cannot be standardised",
                nearest="leave task.input_mean and task.input_std out: they are computed",
            )
        return task
    found = [column.moments.result() for column in columns.values()]
    return replace(task, input_mean=tuple(mean for mean, _, _ in found), input_std=tuple(std for _, std, _ in found))


class _InputColumn:
    """What a pass over a column of a table finds."""

    def __init__(self) -> None:
        self.count = self.texts = 0  # values that are not absent, and those of them that are text
        self.first_text: tuple[str, Row] | None = None
        self.first_infinite: tuple[float, Row] | None = None
        self.moments = Moments()

    def add(self, value: Any, row: Row) -> None:
        if is_text(value):
            self.count, self.texts = self.count + 1, self.texts + 1
            self.first_text = self.first_text or (text_of(value), row)
            return
        x = number(value)
        if abs(x) > MAX_NUMBER:
            self.first_infinite = self.first_infinite or (x, row)
            return
        self.count += not math.isnan(x)
        self.moments.add(x)


def _text_among_numbers(name: str, column: _InputColumn, categories: tuple[str, ...]) -> DataError:
    assert column.first_text is not None
    text, row = column.first_text
    return DataError(
        given=f"the column {name!r} with text in {column.texts} of {column.count} values: {text!r}, {row.location}",
        rule=f"a column of text in up to {100 * _MAX_WRONG:g} % of its values is of numbers",
        consequence="these samples have no such number",
        nearest="correct the values, or leave them empty: that counts as the mean; categories are named by "
        f"task.categories={json.dumps([*categories, name])}",
    )


def number_columns(task: TaskOptions) -> tuple[str, ...]:
    """The input columns of a resolved table task that are numbers."""
    return tuple(name for name in task.inputs if name not in task.categories)


def _no_numbers(column: str) -> DataError:
    return DataError(
        given=f"the column {column!r} without a finite number",
        rule="task.predicts number takes numbers",
        consequence="there is nothing to learn",
        nearest="task.target=COLUMN of numbers, or task.predicts=class",
    )
