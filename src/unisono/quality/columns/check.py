"""Columns of tables before a run: schemas that differ between files, and numbers that are out of line.

Both are reported, and changed in a copy of the tables if that is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from unisono.data.cleaning_record import cleaning_facts
from unisono.errors import ConfigError, DataError, nearest_name
from unisono.quality.columns.changes import ColumnChanges, write_changes
from unisono.quality.columns.exact_quantiles import CHUNK
from unisono.quality.columns.numeric_columns import REASONS, NumericColumn, json_number, judge_column
from unisono.quality.columns.page import write_columns_page
from unisono.quality.columns.sampling_times import TIME_REASONS, SamplingTimes, judge_times, stamps_column
from unisono.quality.columns.scan import FileFacts, ScannedArrays, mapped, scan_files
from unisono.quality.columns.schema import Difference, SchemaColumn, differences_of, schema_of
from unisono.quality.columns.series import Column, Groups, groups_of, new_array
from unisono.quality.columns.targets import targets_of
from unisono.quality.documents import Documents
from unisono.quality.input_files import list_files
from unisono.quality.job_folder import open_job
from unisono.quality.kept_rows import require_writable
from unisono.quality.progress import SILENT, Progress
from unisono.quality.refused import refused
from unisono.sanitize import quoted
from unisono.storage.directory import make_folder
from unisono.storage.files import new_file, opener
from unisono.storage.json_lines import json_line

FLAGGED_FILE: Final = "flagged.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnOptions:
    """What is judged, and from where on a value is flagged.

    Attributes:
        columns: Numeric columns that are judged; all if none is named.
        time: Column of stamps; None to judge none.
        group: Column whose values name a series each, as a sensor; None if all rows are one series.
        max_z: Largest robust z-score of a value that is no outlier.
        stuck_run: Fewest equal values in a row that are flagged as stuck.
        max_gap: Longest interval between stamps that is no gap, in median intervals.
        mask: Reasons, of ``REASONS``, for which a value is replaced by none in a copy of the tables.
        unify: Whether all files get one schema in a copy of the tables.
        skips_unfit: Whether a row with a value that cannot be cast to the schema without loss is left out, or is an error.
        null_texts: Texts that stand for no value in columns of other types, such as ``NA`` among numbers; they are none in a copy
            with one schema.
    """

    columns: tuple[str, ...] = ()
    time: str | None = None
    group: str | None = None
    max_z: float = 6.0
    stuck_run: int = 30
    max_gap: float = 3.0
    mask: tuple[str, ...] = ()
    unify: bool = False
    skips_unfit: bool = False
    null_texts: tuple[str, ...] = ()

    @property
    def changes(self) -> bool:
        """Whether a copy of the tables is written."""
        return bool(self.mask) or self.unify


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnsResult:
    """What the columns are, and what is out of line in them.

    Attributes:
        rows: Rows of each file, by its name.
        columns: The schema of the data set.
        differences: Where files differ from it.
        numeric: The numeric columns.
        times: The stamps; None without a column of them.
        options: What was judged.
        changes: What is another in the copy of the tables; None without one.
    """

    rows: dict[str, int]
    columns: tuple[SchemaColumn, ...]
    differences: tuple[Difference, ...]
    numeric: tuple[NumericColumn, ...]
    times: SamplingTimes | None
    options: ColumnOptions
    changes: ColumnChanges | None = None


def check_columns(
    paths: Sequence[Path],
    *,
    out: Path | None = None,
    options: ColumnOptions | None = None,
    progress: Progress = SILENT,
) -> ColumnsResult:
    """Compare the schemas of tables, and judge their numeric columns over all files.

    Each file is read once, in bounded memory, and again for a copy with changes; its numbers are kept on disk meanwhile, 16 bytes
    each.

    Args:
        paths: Tables, images, each a table of one row with the column ``image``, or folders of these; they are one data set.
        out: A new folder for ``report.html``, ``report.json`` and ``flagged.jsonl``, which has every flagged value; or that of
            the same job, which was killed and goes on, or is done already. None: nothing is written. A copy with changes is in
            its ``data``, with ``masked.jsonl``, which has each masked value as it was, and ``dropped.jsonl``.
        options: What is judged and changed.
        progress: Receives the stages.

    Raises:
        ConfigError: The folder belongs to something else, or another process works in it; or there is none for a copy.
        DataError: A file is no table or is damaged, has changed meanwhile, or no file has a column that is named. For a copy: a
            value cannot be cast to the schema without loss, or a format cannot hold what becomes of a row.
        ExtraError: A package that reads a format is not installed.
    """
    options = options or ColumnOptions()
    options = replace(options, columns=tuple(dict.fromkeys(options.columns)))  # each is judged once
    if options.changes and out is None:
        raise ConfigError(
            given="masked values or one schema, without a folder",
            rule="the inputs stay as they are, and a copy is written",
            consequence="nothing was read",
            nearest="--out FOLDER",
        )
    files, files_of_path = list_files(paths)
    documents = Documents(files=files, files_of_path=files_of_path)
    if options.changes:
        _require_tables(documents)
        require_writable(documents, nearest="")
    settings = {name: value for name, value in asdict(options).items() if name != "skips_unfit"}
    identity = {"columns": settings, "documents": documents.identity()}
    with ExitStack() as stack:
        folder = out or Path(stack.enter_context(TemporaryDirectory())) / "columns"
        job = stack.enter_context(open_job(folder, identity, paths, skips_unreadable=options.skips_unfit))
        if job.is_done:
            return job.result(ColumnsResult)
        facts = scan_files(
            documents,
            job.sketches,
            time=options.time,
            group=options.group,
            null_texts=options.null_texts,
            compares_encodings=not options.changes,
            progress=progress,
        )
        with new_file(job.new / FLAGGED_FILE) as flagged:
            numeric, times, masked = _judge(documents, facts, job.sketches, options, flagged, progress)
        schema, names = schema_of(facts), [file.name for file in documents.files]
        changes = None
        if options.changes:
            targets = targets_of(facts, schema, options.null_texts) if options.unify else {}
            changes = write_changes(
                documents,
                facts,
                job.new,
                masked=masked,
                targets=targets,
                skips=options.skips_unfit,
                progress=progress,
            )
        result = ColumnsResult(
            rows={name: found.rows for name, found in zip(names, facts, strict=True)},
            columns=tuple(schema),
            differences=tuple(differences_of(names, facts, schema)),
            numeric=tuple(numeric),
            times=times,
            options=options,
            changes=changes,
        )
        if out is not None:
            progress.begin("reporting", 1, "pages")
            write_columns_page(job.new / "report.html", out.name, result)
            progress.advance(1)
            documents.require_unchanged()
            job.finish({**asdict(result), "inputs": cleaning_facts(paths)})
    return result


def _require_tables(documents: Documents) -> None:
    """Raise DataError if a file is not a table: images have no values to change."""
    if whole := next((file for file in documents.files if file.corpus_entry is not None), None):
        raise refused(
            f"masked values or one schema for {whole.path}, a file that is no table",
            "values of tables are masked and cast",
            "without --mask and --unify; the report names the images of another mode",
        )


def _judge(
    documents: Documents,
    facts: Sequence[FileFacts],
    folder: Path,
    options: ColumnOptions,
    flagged: IO[bytes],
    progress: Progress,
) -> tuple[list[NumericColumn], SamplingTimes | None, dict[str, NDArray[np.int64]]]:
    """Judge the numbers that the scan has left in ``folder``; write each flagged value as a line of ``flagged``.

    Returns:
        The columns, the stamps, and by column the rows among all rows whose value is masked, in order.
    """
    groups = groups_of(facts, options.group)
    num_rows = int(groups.begins[-1])
    scratch = folder / "scratch"
    make_folder(scratch)
    numeric: list[NumericColumn] = []
    masked: dict[str, NDArray[np.int64]] = {}
    bits = sum(1 << REASONS.index(reason) for reason in options.mask)
    names, arrays = _judged_names(facts, options), ScannedArrays(folder, facts)
    progress.begin("judging", len(names) + (options.time is not None), "columns")
    for name in names:
        column = Column(arrays, [_numbers_file(found, name) for found in facts], groups)
        flags = new_array(scratch / "flags", num_rows, np.uint8)
        judged = judge_column(
            name,
            column,
            flags,
            scratch,
            groups=groups.names,
            max_z=options.max_z,
            stuck_run=options.stuck_run,
        )
        numeric.append(replace(judged, places=_placed(judged.places, documents, groups)))
        for row, reasons in _flagged_rows(flags, REASONS):
            value = json_number(column.value(row))
            flagged.write(
                json_line({**_place(documents, groups, row), "column": name, "reasons": reasons, "value": value})
            )
        if bits and judged.outliers + judged.non_finite + judged.stuck_values:
            masked[name] = _rows_with(flags, bits, scratch / f"masked-{len(masked)}")
        progress.advance(1)
    if options.time is None:
        return numeric, None, masked
    stamps = stamps_column(arrays, [file.name for file in documents.files], facts, groups, options.time)
    flags = new_array(scratch / "flags", num_rows, np.uint8)
    unit = "s" if any(found.time_unit_s for found in facts) else ""
    times = judge_times(options.time, stamps, flags, scratch, groups=groups.names, max_gap=options.max_gap, unit=unit)
    for row, reasons in _flagged_rows(flags, TIME_REASONS):
        flagged.write(json_line({**_place(documents, groups, row), "column": options.time, "reasons": reasons}))
    progress.advance(1)
    return numeric, replace(times, places=_placed(times.places, documents, groups)), masked


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


def _rows_with(flags: NDArray[np.uint8], bits: int, path: Path) -> NDArray[np.int64]:
    """The rows that have one of some flags, int64, in a new file that is mapped into memory."""
    with open(path, "wb", opener=opener) as file:
        for begin in range(0, len(flags), CHUNK):
            file.write((begin + np.flatnonzero(flags[begin : begin + CHUNK] & bits)).astype(np.int64).tobytes())
    return mapped(path, np.int64)
