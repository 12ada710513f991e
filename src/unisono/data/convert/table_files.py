"""Read, write and convert tables of rows; ``file_kind`` determines the format of a file that is read, its name that of a new one.

    .rec               read, write   one bytes field is the payload, numbers and arrays are side columns, an int ``key`` the key
    .mindrecord        read, write   numbers (int32, int64, float32, float64), strings, bytes, arrays
    .jsonl             read, write   anything; bytes as {"base64": "…"}, arrays as lists
    .parquet           read, write   anything; needs pyarrow
    .tar               read, write   webdataset's samples; .tar.gz only read
    .csv               read, write   ints, floats, strings; bytes as base64 in the given columns
    .tfrecord(s)       read          features of tf.Example, else raw records
    …-idx3-ubyte(.gz)  read          MNIST's images and the labels beside them
    .bin               read          CIFAR-10 and CIFAR-100, binary version

A row of MNIST or CIFAR has its ``image`` as a uint8 array. It becomes PNG in .mindrecord and in .rec, there after MXNet's image
header with the labels, as in im2rec. Formats import their packages on first use.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

from unisono.data.cleaning_record import write_cleaning_file
from unisono.data.convert.file_kind import SHARD_NAME, TOKENS, file_kind, kind_of_name
from unisono.data.convert.formats.jsonl import read_objects
from unisono.data.convert.formats.table import (
    OtherFields,
    Row,
    Table,
    select_columns,
    unreadable_error,
    unwritable_error,
)
from unisono.data.kept_rows import kept_of_table, read_kept_rows
from unisono.data.result_files import require_whole_results
from unisono.storage.limits import MAX_TABLE_SHARDS

_WRITTEN: Final = {
    ".rec": "recordio",
    ".mindrecord": "mindrecord",
    ".jsonl": "jsonl",
    ".parquet": "parquet",
    ".tar": "tar",
    ".csv": "csv",
}
_READ: Final = _WRITTEN | {
    ".tar.gz": "tar",
    ".tfrecord": "tfrecord",
    ".tfrecords": "tfrecord",
    "idx": "idx",
    ".bin": "cifar",
}
_READS_COLUMNS: Final = ("parquet", "jsonl")
_CIFAR10: Final = re.compile(r"data_batch_[1-5]\.bin")


def read_formats() -> tuple[str, ...]:
    """The suffixes that ``open_table`` reads, with the dot; ``idx`` stands for MNIST's names, which have none."""
    return tuple(_READ)


def open_table(
    path: Path,
    *,
    columns: Sequence[str] | None = None,
    base64: Collection[str] = (),
    arrays: Collection[str] = (),
    others: OtherFields | None = None,
) -> Table:
    """Open a file, or all files of the set ``name-00000-of-00005…`` that it belongs to. Rows are read lazily.

    Args:
        path: The file, of a format that ``read_formats`` names. One file of a set stands for the whole set.
        columns: Only these fields, in this order. By default all.
        base64: Columns of a CSV file that hold bytes as base64.
        arrays: Features of ``tf.Example`` that are arrays even with one value.
        others: If given, values of JSON lines and Parquet that no row can hold are left out of their rows, and it gets their
            fields while rows are read. By default they are errors.

    Raises:
        DataError: The suffix is unknown, an option has no effect on the format, a file of a set is missing, or files of
            a set have different fields; while rows are read, the file is damaged.
    """
    kind = file_kind(path) if os.path.exists(path) else kind_of_name(path)
    if kind == TOKENS:
        raise unreadable_error(
            f"{path}, a token shard", "its documents are token ids, not rows", "the text that it was packed from"
        )
    if kind not in _READ:
        raise _no_format(path, kind, _READ)
    name = _READ[kind]
    module: Any = importlib.import_module(f"unisono.data.convert.formats.{name}")
    options: dict[str, Any] = {}
    if base64:
        options["binary"] = _for_csv(path, name, base64)
    if arrays:
        if name != "tfrecord":
            raise unreadable_error(
                f"arrays {sorted(arrays)} of {path}", "only tf.Example leaves that open", "leave it out"
            )
        options["arrays"] = arrays
    if name in _READS_COLUMNS:
        options |= {"columns": columns, "others": others}
    files = files_of(path)
    table: Table = module.read(files[0], **options)
    if len(files) > 1:
        table = replace(table, rows=chain(table.rows, _others(module, files, options, table)), count=None)
    return table if columns is None else select_columns(table, columns)


def open_file(path: Path, kind: str, columns: Sequence[str] | None = None, others: OtherFields | None = None) -> Table:
    """Open one file of a table format, not the set that it belongs to.

    Args:
        path: The file.
        kind: Its format, as ``file_kind`` names it.
        columns: Only these fields. By default all.
        others: As of ``open_table``.
    """
    module: Any = importlib.import_module(f"unisono.data.convert.formats.{_READ[kind]}")
    table: Table = module.read(path, columns, others) if _READ[kind] in _READS_COLUMNS else module.read(path)
    return table if columns is None else select_columns(table, columns)


def write_table(path: Path, table: Table, *, base64: Collection[str] = (), is_shard: bool = False) -> int:
    """Write all rows to a file, completely or not at all, replacing an existing file.

    Args:
        path: The file; its suffix names the format: .rec, .mindrecord, .jsonl, .parquet, .tar or .csv.
        table: The rows; they are read once.
        base64: Fields of bytes that a CSV file holds as base64.
        is_shard: Whether the file may have the name of one of a set, ``name-00000-of-00005…``.

    Returns:
        The number of rows.

    Raises:
        DataError: The suffix cannot be written, or the format cannot hold a value; the error names row and field.
    """
    suffix = kind_of_name(path)
    if suffix not in _WRITTEN:
        raise _no_format(path, suffix, _WRITTEN)
    if (SHARD_NAME.fullmatch(path.name) and not is_shard) or (
        suffix == ".mindrecord" and path.suffix.lower() != suffix
    ):
        raise unwritable_error(
            f"{path}, a name of one of several files", "rows are written to one file", "a name without a number"
        )
    name = _WRITTEN[suffix]
    module: Any = importlib.import_module(f"unisono.data.convert.formats.{name}")
    options: dict[str, Any] = {"binary": _for_csv(path, name, base64)} if base64 else {}
    return module.write(path, table, **options)


def _others(module: Any, files: list[Path], options: dict[str, Any], first: Table) -> Iterator[Row]:
    for file in files[1:]:
        table: Table = module.read(file, **options)
        # an empty file may not know its schema, but has no rows that could differ
        if None not in (table.schema, first.schema) and table.schema != first.schema:
            raise unreadable_error(
                f"{file}, whose fields are not those of {files[0]}",
                "the files of a set have the same fields of the same types",
                "each by itself, under a name without a number",
            )
        yield from table.rows


def _for_csv(path: Path, name: str, fields: Collection[str]) -> Collection[str]:
    if name != "csv":
        raise unreadable_error(f"base64 for {sorted(fields)} in {path}", "only CSV has bytes as base64", "leave it out")
    return fields


def _no_format(path: Path, suffix: str, formats: dict[str, str]) -> Exception:
    suffixes = ", ".join(formats)
    verb, refuse = ("read", unreadable_error) if formats is _READ else ("written", unwritable_error)
    return refuse(
        f"{path}, whose suffix is {suffix!r}",
        f"the suffix names the format, {verb} are {suffixes}",
        f"one of {suffixes}",
    )


def convert(
    source: Path,
    target: Path,
    *,
    overwrite: bool = False,
    columns: Sequence[str] | None = None,
    base64: Collection[str] = (),
    arrays: Collection[str] = (),
    kept_rows: Path | None = None,
) -> int:
    """Write all rows of one table file to another, completely or not at all; the suffixes name the formats.

    Images of MNIST and CIFAR become PNG in .rec (after MXNet's image header with the labels) and .mindrecord, and uint8
    arrays elsewhere.

    Args:
        source: The file to read; one file of a set stands for the whole set.
        target: The file to write: .rec, .mindrecord, .jsonl, .parquet, .tar or .csv.
        overwrite: Whether to replace an existing ``target``.
        columns: Only these fields, in this order. By default all.
        base64: Fields of bytes that the CSV file, as source or target, holds as base64.
        arrays: Features of TFRecord's ``tf.Example`` that are arrays even with one value.
        kept_rows: Folder of kept rows: only these of the source are written. By default all.

    Returns:
        The number of rows.

    Raises:
        DataError: A suffix is unknown, ``target`` exists, the source is damaged, the target's format cannot hold a row, or
            ``kept_rows`` are those of other files; or the source is of results that were cut.
    """
    if os.path.exists(target) and not overwrite:
        raise unwritable_error(
            f"{target}, which exists", "a file is written once, under a new name", "another name, or --overwrite"
        )
    if not os.path.isdir(target.parent):
        raise unwritable_error(
            f"{target}, whose folder does not exist",
            "a file is written into a folder that is there",
            f"mkdir -p {target.parent}",
        )
    from_csv, to_csv = (kind_of_name(path) == ".csv" for path in (source, target))
    table = open_table(source, columns=columns, base64=base64 if from_csv or not to_csv else (), arrays=arrays)
    if (
        kind_of_name(target) == ".jsonl" and os.path.exists(source) and file_kind(source) == ".jsonl"
    ):  # any value of JSON
        table = replace(table, rows=chain.from_iterable(read_objects(file, columns) for file in files_of(source)))
    if kept_rows is not None:
        table = replace(table, rows=kept_of_table(read_kept_rows(kept_rows), files_of(source), table.rows))
    require_whole_results([source])
    count = write_table(target, table, base64=base64 if to_csv else ())
    write_cleaning_file(target, [source] if kept_rows is None else [source, kept_rows])
    return count


def files_of(path: Path) -> list[Path]:
    """The files of the set that ``path`` belongs to, in order; else ``path`` itself. Raises DataError if one is missing.

    Sets are ``name-00000-of-00005…``, counted from 0, and CIFAR-10's five ``data_batch_N.bin``. MindRecord handles its own sets.
    """
    match = SHARD_NAME.fullmatch(path.name)
    if match is not None:
        stem, number, total, rest = match.groups()
        if not 0 <= int(number) < int(total) <= MAX_TABLE_SHARDS:
            raise unreadable_error(
                f"{path}",
                f"shards are counted from 0, up to {MAX_TABLE_SHARDS:,} of them",
                "another name for a single file",
            )
        files = [path.with_name(f"{stem}-{shard:0{len(number)}}-of-{total}{rest}") for shard in range(int(total))]
    elif _CIFAR10.fullmatch(path.name):
        files = [path.with_name(f"data_batch_{batch}.bin") for batch in range(1, 6)]
    else:
        return [path]
    missing = [file for file in files if not os.path.exists(file)]
    if missing:
        raise unreadable_error(
            f"{path}, one of {len(files)} files, of which {len(missing)} are missing: first {missing[0].name}",
            "naming one file of a set takes all of it, in order",
            "the missing files, or a copy of this one under a name without a number",
        )
    return files
