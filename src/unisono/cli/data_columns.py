"""``unisono data columns``: schema and numeric columns of tables before a run, reported and changed in a copy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from unisono.cli.common import FiniteRange, OutPath, common_options, print_result
from unisono.cli.data_common import InputPath, with_places
from unisono.cli.job_progress import resumable
from unisono.errors import ConfigError

if TYPE_CHECKING:
    from unisono.quality.columns.changes import ColumnChanges
    from unisono.quality.columns.check import ColumnsResult

_SHOWN: Final = 20  # lines of each kind that fit on a screen
_REASONS: Final = ("outlier", "non-finite", "stuck")  # as numeric_columns.REASONS, without its imports


@click.command("columns")
@click.argument("inputs", nargs=-1, required=True, type=InputPath())
@click.option("--out", type=OutPath(path_type=Path), help="A new folder for a report and all flagged values.")
@click.option("--column", "columns", multiple=True, metavar="NAME", help="A numeric column to judge (default: all).")
@click.option("--time", metavar="NAME", help="Column of stamps: numbers, or dates as ISO 8601 writes them.")
@click.option("--group", metavar="NAME", help="Column whose values are a series each, such as a sensor.")
@click.option("--max-z", type=FiniteRange(min=1.0), default=6.0, show_default=True, help="Robust z-score of outliers.")
@click.option(
    "--stuck-run",
    type=click.IntRange(min=2),
    default=30,
    show_default=True,
    help="Flag runs of at least this many equal values.",
)
@click.option(
    "--max-gap",
    type=FiniteRange(min=1.0),
    help="Median intervals between two stamps; more are a gap (default: 3).",
)
@click.option(
    "--mask",
    "mask",
    multiple=True,
    type=click.Choice((*_REASONS, "all")),
    help="Write a copy in which such values are no value, or NaN in formats without null. May be repeated.",
)
@click.option("--unify", is_flag=True, help="Write a copy in which all files have one schema.")
@click.option(
    "--null-text",
    "null_texts",
    multiple=True,
    metavar="TEXT",
    help="A text that stands for no value among values of other types, such as NA. May be repeated.",
)
@click.option(
    "--on-error",
    type=click.Choice(("fail", "skip")),
    help="With --unify, on a value that cannot be cast without loss (default: fail).",
)
@common_options
def check_table_columns(
    inputs: tuple[Path, ...],
    out: Path | None,
    columns: tuple[str, ...],
    time: str | None,
    group: str | None,
    max_z: float,
    stuck_run: int,
    max_gap: float | None,
    mask: tuple[str, ...],
    unify: bool,
    null_texts: tuple[str, ...],
    on_error: str | None,
    as_json: bool,
) -> int:
    """Compare the schemas of the tables INPUTS and judge their numbers. Exit code 1 if files differ in their schemas.

    INPUTS are tables, or images, or folders of these, one data set; they do not change. Compared are columns, types, modes of
    images in bytes, and encodings. Of numeric columns outliers, values that are not finite and stuck values are named, of
    stamps gaps and steps back. With --unify the exit code is 0 once the copy is written. The same command goes on
    after an interruption.

    \b
    OUT/data           with --mask or --unify: the changed tables, under the inputs' names
    OUT/masked.jsonl   each masked value as it was: file, row, column
    OUT/dropped.jsonl  each row that --on-error skip left out
    OUT/flagged.jsonl  each flagged value: file, row, column, reasons
    OUT/report.html    schema, differences, histograms; OUT/report.json the same as data
    """
    from unisono.quality.columns.check import ColumnOptions, check_columns

    if max_gap is not None and time is None:
        raise ConfigError(
            given=f"--max-gap {max_gap:g} without --time",
            rule="gaps are between stamps",
            consequence="nothing was read",
            nearest="--time NAME, the column of the stamps",
        )
    if (mask or unify) and out is None:
        raise ConfigError(
            given=f"{'--mask' if mask else '--unify'} without --out",
            rule="the inputs stay as they are, and a copy is written",
            consequence="nothing was read",
            nearest="--out FOLDER",
        )
    if on_error is not None and not unify:
        raise ConfigError(
            given=f"--on-error {on_error} without --unify",
            rule="values are cast to one schema with --unify",
            consequence="nothing was read",
            nearest="--unify",
        )
    options = ColumnOptions(
        columns=columns,
        time=time,
        group=group,
        max_z=max_z,
        stuck_run=stuck_run,
        max_gap=3.0 if max_gap is None else max_gap,
        mask=tuple(reason for reason in _REASONS if reason in mask or "all" in mask),
        unify=unify,
        null_texts=null_texts,
        skips_unfit=on_error == "skip",
    )
    with resumable(out) as progress:
        result = check_columns(inputs, out=out, options=options, progress=progress)
    print_result(
        as_json, with_places(out, result), [*_lines(result), *([f"report: {out / 'report.html'}"] if out else [])]
    )
    return 1 if result.differences and not unify else 0


def _lines(result: ColumnsResult) -> list[str]:
    files = len({difference.file for difference in result.differences})
    lines = [
        f"{sum(result.rows.values()):,} rows in {len(result.rows):,} files, of which {files:,} differ in their schemas"
    ]
    for difference in result.differences[:_SHOWN]:
        expected = f", in most files {difference.expected}" if difference.expected else ""
        row = "" if difference.row is None else f", first row {difference.row}"
        what = f"{difference.kind}: {difference.given}{expected}{row}"
        column = f", column {difference.column}" if difference.column else ""
        lines.append(f"     {difference.file}{column}: {what}")
    if len(result.differences) > _SHOWN:
        lines.append(f"     and {len(result.differences) - _SHOWN:,} more")
    for column in result.numeric:
        if column.outliers or column.non_finite or column.stuck_values:
            lines.append(
                f"{column.name}: {column.outliers:,} outliers, {column.non_finite:,} not finite, {column.stuck_values:,} stuck "
                f"in {column.stuck_runs:,} runs"
            )
            lines += [
                f"     {place['file']} row {place['row']}: {place['reason']}, {place['value']}"
                for place in column.places[:3]
            ]
    if times := result.times:
        usual = "not known" if times.interval is None else f"{times.interval:.6g} {times.unit}".rstrip()
        lines.append(
            f"{times.column}: median interval {usual}, {times.gaps:,} gaps, {times.back:,} steps back, {times.repeated:,} "
            "repeated"
        )
    return (
        lines
        if result.changes is None
        else [*lines, *_change_lines(result.changes, is_masked=bool(result.options.mask))]
    )


def _change_lines(changes: ColumnChanges, *, is_masked: bool) -> list[str]:
    lines: list[str] = []
    if is_masked:
        columns = ", ".join(f"{count:,} of {name}" for name, count in changes.masked.items())
        lines.append(f"{sum(changes.masked.values()):,} values masked" + (f": {columns}" if columns else ""))
    if changes.types:
        files = len({cast.file for cast in changes.casts})
        lines.append(f"one schema of {len(changes.types):,} columns, for which cells of {files:,} files changed")
    for cast in changes.casts[:_SHOWN]:
        column = f", column {cast.column}" if cast.column else ""
        lines.append(f"     {cast.file}{column}: {cast.count:,} {cast.change}")
    if len(changes.casts) > _SHOWN:
        lines.append(f"     and {len(changes.casts) - _SHOWN:,} more")
    lines += [f"     {file}: {count:,} rows left out" for file, count in changes.dropped.items()]
    return lines
