"""Columns of a task: finds out which columns are inputs and target, their classes, means and standard deviations.

``resolve_task`` reads the training data once for what a model must know before it is built. Its result stands in the run's
configuration, so that evaluation and export need no training data.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, replace

import xxhash

from unisono.data.dataset import Batch
from unisono.data.options import DataOptions
from unisono.errors import ConfigError, DataError
from unisono.storage.files import write_atomically
from unisono.tasks.options import LANGUAGE_MODELS, TaskOptions, updated_task
from unisono.tasks.sources import (
    INPUT_NAMES,
    TARGETS,
    addresses,
    cache_folder,
    class_names_of,
    first_of,
    first_sample,
    open_group,
    read_column,
    train_groups,
)
from unisono.tasks.targets import check_columns, is_text, scan_classes, scan_numbers, scan_targets

_TARGET_NAMES = (TARGETS, "target", "label", "labels", "tags", "ner_tags")
# changes with what a scan finds, so that results of other versions are not taken
_SCAN_VERSION = 2


def resolve_task(task: TaskOptions, data: DataOptions) -> TaskOptions:
    """``task`` with the columns, classes and statistics that it leaves open, of the training data.

    Reads the columns that it needs whole. The result is kept in the cache folder, for other starts with the same data and task.
    Raises DataError if the data do not fit the task.
    """
    if task.kind in LANGUAGE_MODELS:
        return task
    known = [open_group(group, None, data, task).fingerprint for group in train_groups(data)]
    digest = xxhash.xxh3_128_hexdigest(repr((_SCAN_VERSION, known, asdict(task))).encode())
    path = cache_folder(data) / f"columns-{digest}.json"
    with suppress(OSError, ValueError, TypeError):  # damaged or not there: read again
        return updated_task(task, json.loads(path.read_bytes()))
    resolved = _scan_columns(task, data)
    with suppress(OSError):  # a folder that cannot be written costs only the next start's time
        path.parent.mkdir(parents=True, exist_ok=True)
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
    several = task.kind == "sequence_labelling"
    if task.has_classes and not task.classes:
        sources = [open_group(group, None, data, task) for group in train_groups(data)]
        # in the order of the first source; others may have more
        named = tuple(dict.fromkeys(name for source in sources for name in class_names_of(source, target)))
        task = replace(task, classes=named or scan_classes(read_column(data, target, task), several=several))
    if task.has_numbers and task.target_mean is None:
        mean, std, count = scan_targets(read_column(data, target, task))
        if not count:
            raise _no_numbers(target)
        task = replace(task, target_mean=mean, target_std=std)
    return _resolve_columns(task, data, first) if task.kind == "table" else task


def _resolve_columns(task: TaskOptions, data: DataOptions, first: Batch) -> TaskOptions:
    """The columns of a table that are categories, and the statistics of the others."""
    categories = task.categories
    stray = [name for name in categories if name not in task.inputs]
    if stray:
        raise ConfigError(
            given=f"task.categories with {stray[0]!r}",
            rule=f"they are some of the inputs {', '.join(task.inputs)}",
            consequence="the column would not be read",
            nearest="name it in task.inputs too, or leave it out",
        )
    rest = [name for name in task.inputs if name not in categories]
    if not categories:
        categories = tuple(name for name in rest if any(is_text(value) for value in read_column(data, name, task)))
        rest = [name for name in rest if name not in categories]
    task = replace(task, categories=categories)
    if task.input_mean:
        if len(task.input_mean) != len(rest):
            raise ConfigError(
                given=f"task.input_mean of {len(task.input_mean)} values for {len(rest)} columns of numbers",
                rule=f"each of {', '.join(rest)} has a mean and a standard deviation",
                consequence="the numbers cannot be standardised",
                nearest="leave task.input_mean and task.input_std out: they are computed",
            )
        return task
    found = [scan_numbers(read_column(data, name, task)) for name in rest]
    return replace(task, input_mean=tuple(mean for mean, _, _ in found), input_std=tuple(std for _, std, _ in found))


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
