"""Write a copy of tables in which flagged values are masked, and all files have one schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from unisono.data.result_files import DATA_FOLDER
from unisono.quality.columns.changed_parquet import Types, arrow_types, write_parquet
from unisono.quality.columns.changed_rows import require_columns, write_rows
from unisono.quality.columns.changed_text import write_csv, write_jsonl
from unisono.quality.columns.file_change import ChangeLog, FileChange
from unisono.quality.columns.scan import UTF8_BOM, FileFacts
from unisono.quality.columns.schema import usual_encoding
from unisono.quality.columns.targets import Target, deviates
from unisono.quality.documents import Documents
from unisono.quality.job_folder import DROPPED_FILE
from unisono.quality.progress import SILENT, Progress
from unisono.storage.directory import make_folder
from unisono.storage.files import copy_file, new_file

MASKED_FILE: Final = "masked.jsonl"
_WITH_NULLS: Final = (".jsonl", ".csv", ".parquet")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cast:
    """Cells of a file that became others to fit the schema.

    Attributes:
        file: Its name.
        column: The column; empty if it is the encoding of the whole file.
        change: What was done: ``added``, or from what to what, such as ``int to float``.
        count: Cells.
    """

    file: str
    column: str
    change: str
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnChanges:
    """What was changed in the copy.

    Attributes:
        masked: Masked values by column.
        types: Type of each column in all files; empty if files were not brought into one schema.
        casts: Cells that became others.
        dropped: Rows left out, by file.
    """

    masked: dict[str, int]
    types: dict[str, str]
    casts: tuple[Cast, ...]
    dropped: dict[str, int]


def write_changes(
    documents: Documents,
    facts: Sequence[FileFacts],
    folder: Path,
    *,
    masked: Mapping[str, NDArray[np.int64]],
    targets: Mapping[str, Target],
    skips: bool,
    progress: Progress = SILENT,
) -> ColumnChanges:
    """Write ``data/NAME`` of each file, ``masked.jsonl``, which has each masked value as it was, and ``dropped.jsonl``.

    Files are read and written row by row, or batch by batch. A file without changes is copied.

    Args:
        documents: The tables.
        facts: Of each file.
        folder: A folder.
        masked: Rows among all rows whose value is masked, by column, in order.
        targets: The schema of all files; empty if nothing is cast.
        skips: Whether a row with a value that cannot be cast is left out, or is an error.
        progress: Receives the rows that are written.

    Raises:
        DataError: A value cannot be cast without loss, or a format cannot hold a row.
    """
    types: Types = {}
    if targets and any(file.kind == ".parquet" for file in documents.files):
        types = arrow_types(documents.files, targets)
    encoding = usual_encoding([found for found in facts if found.columns])
    begin = 0
    progress.begin("writing", sum(found.rows for found in facts), "rows")
    with new_file(folder / MASKED_FILE) as masked_file, new_file(folder / DROPPED_FILE) as dropped_file:
        log = ChangeLog(masked_file=masked_file, dropped_file=dropped_file, skips=skips)
        for file, found in zip(documents.files, facts, strict=True):
            change = FileChange(
                file=file,
                begin=begin,
                rows=found.rows,
                columns=(*targets,) if targets else (*found.columns,),
                masked=_of_file(masked, begin, found.rows),
                targets=targets,
                has_bom=(encoding if targets and found.columns else found.encoding) == UTF8_BOM,
                deviating=_deviating(found, targets),
                log=log,
                advance=progress.advance,
            )
            target = folder / DATA_FOLDER / file.name
            make_folder(target.parent)
            if _boms_differ(change, found):
                change.count("", f"to {encoding}", found.rows)
            _write_file(change, found, target, types)
            begin += found.rows
    return ColumnChanges(
        masked=dict(log.masked),
        types={name: target.stored if target.kind == "other" else target.kind for name, target in targets.items()},
        casts=tuple(Cast(file=file, column=name, change=what, count=n) for (file, name, what), n in log.casts.items()),
        dropped=dict(log.dropped),
    )


def _of_file(masked: Mapping[str, NDArray[np.int64]], begin: int, count: int) -> dict[str, NDArray[np.int64]]:
    """The rows of a file that are masked, among all rows; only columns that have some."""
    bounds = {name: np.searchsorted(rows, (begin, begin + count)).tolist() for name, rows in masked.items()}
    return {name: masked[name][low:high] for name, (low, high) in bounds.items() if low < high}


def _deviating(facts: FileFacts, targets: Mapping[str, Target]) -> tuple[str, ...]:
    """Columns of the schema that the file lacks, or in which it may have cells that do not fit."""
    return tuple(
        name
        for name, target in targets.items()
        if name not in facts.columns or deviates(facts.columns[name], target, facts.rows)
    )


def _write_file(change: FileChange, facts: FileFacts, target: Path, types: Types) -> None:
    kind = change.file.kind
    if kind not in _WITH_NULLS:
        require_columns(change, set(facts.columns))
        write_rows(change, target)
    elif not facts.columns or not (change.masked or change.deviating or _is_rearranged(change, facts, types)):
        copy_file(change.file.path, target)
        change.advance(change.rows)
    elif kind == ".jsonl":
        write_jsonl(change, target)
    elif kind == ".csv":
        write_csv(change, target)
    else:
        write_parquet(change, target, types)


def _is_rearranged(change: FileChange, facts: FileFacts, types: Types) -> bool:
    """Whether columns have to be put in another order, those of Parquet in other types, or a mark before the file or away."""
    if _boms_differ(change, facts):
        return True
    if change.file.kind == ".jsonl" or not change.targets:
        return False
    is_parquet = change.file.kind == ".parquet"
    return [*facts.columns] != [*change.columns] or (
        is_parquet and any(str(types[name]) != column.stored for name, column in facts.columns.items())
    )


def _boms_differ(change: FileChange, facts: FileFacts) -> bool:
    """Whether only one of the file and its copy begins with a byte-order mark."""
    return bool(facts.encoding) and change.has_bom != (facts.encoding == UTF8_BOM)
