"""The sources of a task's data: opens the addresses of a configuration, with the classes that they name by the task's numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.data.combined import concatenated, mapped
from unisono.data.dataset import Batch, Dataset, location_of, read_samples
from unisono.data.kept_rows import kept_samples, read_kept_rows
from unisono.data.options import DataOptions, default_cache_dir
from unisono.data.sources import open_source, source_files, source_groups, source_paths
from unisono.data.tokens.shards import TokenSet, open_tokens
from unisono.errors import ConfigError, DataError
from unisono.tasks.options import TaskOptions
from unisono.tasks.targets import ClassNumbers, Renumber, StandardNumber, first_names, is_string, text_of

TARGETS = "targets"
INPUT_NAMES = {
    "image": ("image", "img", "jpg", "png"),
    "text": ("text", "sentence", "txt"),
    "sequence_labelling": ("words", "tokens", "text"),
    "language_model": ("text", "content", "txt"),
    "masked_language_model": ("text", "content", "txt"),
}
_CHUNK = 256


def addresses(given: str | tuple[str, ...]) -> list[str]:
    """The addresses of a setting that is one or several."""
    return [given] if isinstance(given, str) and given else list(given)


def token_shards(given: str | tuple[str, ...], data: DataOptions) -> TokenSet | None:
    """The token shards at the addresses: ``.bin`` files, globs, or folders of them; None if they are something else."""
    paths: list[Path] = []
    for address in addresses(given):
        for path in map(Path, source_paths(address, cache_folder(data))):
            found = sorted(path.glob("*.bin")) if path.is_dir() else [path]
            if not found or any(file.suffix != ".bin" for file in found):
                return None
            paths += found
    return open_tokens(paths) if paths else None


def groups_of(given: str | tuple[str, ...], data: DataOptions) -> list[tuple[str, ...]]:
    """The addresses as sources: files of one format together, those of a folder of tables too, and each folder of images."""
    parts = addresses(given)
    if not parts or (len(parts) == 1 and not any(sign in parts[0] for sign in "*?[") and not os.path.isdir(parts[0])):
        return [tuple(parts)] if parts else []
    groups = source_groups(parts, cache_folder(data) / "sources")
    return [tuple(parts)] if len(groups) == 1 else [tuple(map(str, group)) for group in groups]


def train_groups(data: DataOptions) -> list[tuple[str, ...]]:
    """The sources of the training data; in a mixture those of each address."""
    if not data.weights:
        return groups_of(data.train, data)
    return [group for address in addresses(data.train) for group in groups_of(address, data)]


def open_addresses(
    given: str | tuple[str, ...], columns: dict[str, str], data: DataOptions, task: TaskOptions, rows: str | None
) -> Dataset:
    """All samples at the addresses, or those in ``rows``; ``targets`` are numbers of the task's classes, or standardised."""
    parts = [_with_targets(open_group(group, columns, data, task, rows), task) for group in groups_of(given, data)]
    return parts[0] if len(parts) == 1 else concatenated(parts)


def sample_files(given: str | tuple[str, ...], data: DataOptions) -> list[str | Path]:
    """The files at the addresses, in the order in which ``open_addresses`` numbers their samples."""
    files: list[str | Path] = []
    for group in groups_of(given, data):
        files += source_files(group[0] if len(group) == 1 else group, cache_folder(data))
    return files


def sample_rows(
    given: str | tuple[str, ...], data: DataOptions, rows: str | None, size: int
) -> tuple[NDArray[np.int64], int]:
    """The numbers of the samples of ``open_addresses`` among all rows of the addresses, and the number of all.

    Args:
        given: The addresses.
        data: Where prepared data are kept.
        rows: Folder of kept rows; None if all rows are samples.
        size: Number of samples.
    """
    if rows is None:
        return np.arange(size), size
    return kept_samples(read_kept_rows(rows), sample_files(given, data))


def class_names_of(source: Dataset, target: str) -> tuple[str, ...]:
    """Names of the classes in the column ``target``, which holds their numbers; empty if the source has none."""
    return getattr(source, "class_names", {}).get(target, ())


def _with_targets(source: Dataset, task: TaskOptions) -> Dataset:
    """``source`` with its targets as the model learns them; unchanged for tasks without a target column."""
    if task.has_numbers:
        assert task.target_mean is not None  # resolve_task
        assert task.target_std is not None
        return mapped(source, StandardNumber(mean=task.target_mean, std=task.target_std))
    if not task.has_classes:
        return source
    names = class_names_of(source, task.target)
    several = task.kind == "sequence_labelling"
    stray = [name for name in names if name not in task.classes]
    if stray and task.classes == tuple(map(str, range(len(task.classes)))):
        # classes without names of their own: those of the source stand for their numbers
        stray, names = [], task.classes
    if stray:
        raise DataError(
            given=f"data with the class {stray[0]!r}",
            rule=f"the classes are the {len(task.classes)} of task.classes: {first_names(task.classes)}",
            consequence="the number of the class is not known",
            nearest="list all classes in task.classes, or rename the folder or class",
        )
    if names and names != task.classes:
        source = mapped(source, Renumber(numbers=tuple(map(task.classes.index, names))))
    return mapped(source, ClassNumbers(names=task.classes, several=several, numbered=bool(names)))


def open_group(
    given: str | tuple[str, ...],
    columns: dict[str, str] | None,
    data: DataOptions,
    task: TaskOptions,
    rows: str | None,
) -> Dataset:
    """The samples of files of one format, or of one folder.

    Args:
        given: The files or the folder.
        columns: The column of each entry of a sample; None: all columns under their own names.
        data: Where prepared data are kept.
        task: What the targets are.
        rows: Folder of kept rows; None: all rows are samples.
    """
    parts = addresses(given)
    if not parts:
        raise ConfigError(
            given="a task without data.train",
            rule="the data of a task are at data.train: files, folders or addresses",
            consequence="there is nothing to train on",
            nearest="data.train=ADDRESS",
        )
    return open_source(
        parts[0] if len(parts) == 1 else parts,
        columns=columns,
        classes=not task.has_numbers,
        cache_dir=cache_folder(data),
        kept_rows=rows,
    )


def cache_folder(data: DataOptions) -> Path:
    """Where prepared data is kept."""
    return Path(data.cache_dir).expanduser() if data.cache_dir else default_cache_dir(os.environ)


def first_sample(data: DataOptions, task: TaskOptions) -> Batch:
    """The first training sample, with all columns; those that no sample can hold have an absent value, and cannot be read."""
    source = open_group(train_groups(data)[0] if data.train else "", None, data, task, data.train_kept_rows)
    absent = {name: np.zeros(0, np.uint8) for name in getattr(source, "column_faults", {})}
    return {**read_samples(source, np.zeros(1, np.int64))[0], **absent}


@dataclass(frozen=True, slots=True)
class Row:
    """Columns of one sample of the training data."""

    values: Batch
    source: Dataset
    index: int

    @property
    def location(self) -> str:
        """The file and row."""
        return location_of(self.source, self.index) or f"sample {self.index}"


def read_columns(data: DataOptions, names: Sequence[str], task: TaskOptions) -> Iterator[Row]:
    """The columns ``names`` of all training samples, in one pass."""
    for group in train_groups(data):
        source = open_group(group, {name: name for name in names}, data, task, data.train_kept_rows)
        for index, values in enumerate(scan(source)):
            yield Row(values, source, index)


def scan(dataset: Dataset) -> Iterator[Batch]:
    for begin in range(0, len(dataset), _CHUNK):
        yield from read_samples(dataset, np.arange(begin, min(begin + _CHUNK, len(dataset))))


def check_same_targets(data: DataOptions, task: TaskOptions) -> None:
    """Raise DataError if training data have names of classes, and held-out data numbers that are none of the names."""
    if not task.has_classes or (names := ClassNumbers(names=task.classes)).has_integers:
        return

    def first(group: tuple[str, ...], rows: str | None) -> Any:
        source = open_group(group, {TARGETS: task.target}, data, task, rows)
        return read_samples(source, np.zeros(1, np.int64))[0][TARGETS]

    if any(is_string(first(group, data.train_kept_rows)) for group in train_groups(data)):
        for group in groups_of(data.eval, data):
            if not is_string(value := first(group, data.eval_kept_rows)):
                raise DataError(
                    given=f"{' '.join(group)}, whose first target is the number {text_of(value)}, where training data have names",
                    rule=f"data.train and data.eval have the same targets: the classes are {first_names(names.names)}",
                    consequence="the numbers could be those of other classes",
                    nearest="the names as targets in data.eval too",
                )


def first_of(names: Sequence[str], sample: Batch, option: str, nearest: str = "") -> str:
    """The first of ``names`` that a sample has. Raises DataError if it has none, where ``option`` names the column."""
    found = next((name for name in names if name in sample), None)
    if found is None:
        raise DataError(
            given=f"training data with the columns {', '.join(map(str, sample))}",
            rule=f"without {option} the column is one of {', '.join(names)}",
            consequence="it is unknown which column is meant",
            nearest=f"{option}=NAME{nearest}",
        )
    return found
