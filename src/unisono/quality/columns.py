"""Columns of tables before a run: schemas that differ between files, and numbers that are out of line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from unisono.errors import DataError, nearest_name
from unisono.quality.column_scan import FileFacts, scan_files
from unisono.quality.columns_page import write_columns_page
from unisono.quality.documents import Documents, list_files
from unisono.quality.exact_quantiles import CHUNK
from unisono.quality.job_folder import open_job
from unisono.quality.numeric_columns import REASONS, NumericColumn, json_number, judge_column
from unisono.quality.sampling_times import TIME_REASONS, SamplingTimes, judge_times, stamps_column
from unisono.quality.schema import Difference, SchemaColumn, differences_of, schema_of
from unisono.quality.series import Column, Groups, groups_of, new_array
from unisono.sanitize import quoted
from unisono.storage.directory import make_folder
from unisono.storage.files import new_file

FLAGGED_FILE: Final = "flagged.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnOptions:
    """What is judged, and from where on a value is flagged.

    Attributes:
        columns: Numeric columns that are judged; all if none is named.
        time: Column of stamps; None to judge none.
        group: Column whose values name a series each, as a sensor; None if all rows are one series.
        max_z: Largest robust z-score of a value that is no outlier.
        max_stuck: Fewest equal values in a row that are stuck.
        max_gap: Longest interval between stamps that is no gap, in median intervals.
    """

    columns: tuple[str, ...] = ()
    time: str | None = None
    group: str | None = None
    max_z: float = 6.0
    max_stuck: int = 30
    max_gap: float = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnsResult:
    """The outcome.

    Attributes:
        rows: Rows of each file, by its name.
        columns: The schema of the data set.
        differences: Where files differ from it.
        numeric: The numeric columns.
        times: The stamps; None without a column of them.
        options: What was judged.
    """

    rows: dict[str, int]
    columns: tuple[SchemaColumn, ...]
    differences: tuple[Difference, ...]
    numeric: tuple[NumericColumn, ...]
    times: SamplingTimes | None
    options: ColumnOptions


def check_columns(
    paths: Sequence[Path], *, out: Path | None = None, options: ColumnOptions | None = None
) -> ColumnsResult:
    """Compare the schemas of tables, and judge their numeric columns over all files.

    Each file is read once, in bounded memory; its numbers are kept on disk meanwhile, 16 bytes each.

    Args:
        paths: Tables, or folders of these; they are one data set.
        out: A new folder for ``report.html``, ``report.json`` and ``flagged.jsonl``, which has every flagged value; or that of
            the same job, which was killed and goes on, or is done already. None: nothing is written.
        options: What is judged.

    Raises:
        ConfigError: The folder belongs to something else, or another process works in it.
        DataError: A file is no table or is damaged, has changed meanwhile, or no file has a column that is named.
        ExtraError: A package that reads a format is not installed.
    """
    options = options or ColumnOptions()
    files, files_of_path = list_files(paths)
    documents = Documents(files=files, files_of_path=files_of_path)
    identity = {"columns": asdict(options), "documents": documents.identity()}
    with ExitStack() as stack:
        folder = out or Path(stack.enter_context(TemporaryDirectory())) / "columns"
        job = stack.enter_context(open_job(folder, json.loads(json.dumps(identity)), paths))
        if job.is_done:
            return job.result(ColumnsResult)
        facts = scan_files(documents, job.sketches, time=options.time, group=options.group)
        with new_file(job.new / FLAGGED_FILE) as flagged:
            numeric, times = _judge(documents, facts, job.sketches, options, flagged)
        schema, names = schema_of(facts), [file.name for file in documents.files]
        result = ColumnsResult(
            rows={name: found.rows for name, found in zip(names, facts, strict=True)},
            columns=tuple(schema),
            differences=tuple(differences_of(names, facts, schema)),
            numeric=tuple(numeric),
            times=times,
            options=options,
        )
        if out is not None:
            write_columns_page(job.new / "report.html", out.name, result)
            documents.require_unchanged()
            job.finish(asdict(result))
    return result


def _judge(
    documents: Documents, facts: Sequence[FileFacts], folder: Path, options: ColumnOptions, flagged: IO[bytes]
) -> tuple[list[NumericColumn], SamplingTimes | None]:
    """Judge the numbers that the scan has left in ``folder``; write each flagged value as a line of ``flagged``."""
    groups = groups_of(facts, options.group)
    num_rows = int(groups.begins[-1])
    scratch = folder / "scratch"
    make_folder(scratch)
    numeric: list[NumericColumn] = []
    for name in _judged_names(facts, options):
        column = Column(folder, [_numbers_file(found, name) for found in facts], groups)
        flags = new_array(scratch / "flags", num_rows, np.uint8)
        judged = judge_column(
            name,
            column,
            flags,
            scratch,
            groups=groups.names,
            max_z=options.max_z,
            max_stuck=options.max_stuck,
        )
        numeric.append(replace(judged, places=_placed(judged.places, documents, groups)))
        for row, reasons in _flagged_rows(flags, REASONS):
            value = json_number(column.value(row))
            flagged.write(_line({**_place(documents, groups, row), "column": name, "reasons": reasons, "value": value}))
    if options.time is None:
        return numeric, None
    stamps = stamps_column(folder, [file.name for file in documents.files], facts, groups, options.time)
    flags = new_array(scratch / "flags", num_rows, np.uint8)
    unit = "s" if any(found.time_unit_s for found in facts) else ""
    times = judge_times(options.time, stamps, flags, scratch, groups=groups.names, max_gap=options.max_gap, unit=unit)
    for row, reasons in _flagged_rows(flags, TIME_REASONS):
        flagged.write(_line({**_place(documents, groups, row), "column": options.time, "reasons": reasons}))
    return numeric, replace(times, places=_placed(times.places, documents, groups))


def _judged_names(facts: Sequence[FileFacts], options: ColumnOptions) -> list[str]:
    """Columns with numbers, but for those of stamps and groups."""
    names = dict.fromkeys(name for found in facts for name, column in found.columns.items() if column.numbers >= 0)
    for name in options.columns:
        if name not in names:
            raise DataError(
                given=f"column {quoted(name)}, in which no file has a number",
                rule="a column that is judged has numbers",
                consequence="nothing was written",
                nearest=nearest_name(name, names),
            )
    return list(options.columns) or [name for name in names if name not in (options.time, options.group)]


def _numbers_file(facts: FileFacts, name: str) -> str | None:
    column = facts.columns.get(name)
    return None if column is None or column.numbers < 0 else f"numbers-{column.numbers}"


def _place(documents: Documents, groups: Groups, row: int) -> dict[str, Any]:
    file, at = groups.place(row)
    return {"file": documents.files[file].name, "row": at}


def _placed(places: Sequence[Mapping[str, Any]], documents: Documents, groups: Groups) -> tuple[dict[str, Any], ...]:
    """Places with file and row in it, where they have the number of the row among all."""
    return tuple(
        {**_place(documents, groups, place["at"]), **{name: fact for name, fact in place.items() if name != "at"}}
        for place in places
    )


def _flagged_rows(flags: NDArray[np.uint8], reasons: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """(row among all, reasons) of each row with a flag."""
    for begin in range(0, len(flags), CHUNK):
        part = np.array(flags[begin : begin + CHUNK])
        for at in np.flatnonzero(part).tolist():
            yield begin + at, [reason for bit, reason in enumerate(reasons) if part[at] >> bit & 1]


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"
