"""Read and write tables of rows; a file's name determines its format.

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
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

from unisono.data.convert.formats.detection import files_of, format_of, is_shard
from unisono.data.convert.formats.table import Row as Row
from unisono.data.convert.formats.table import Table as Table
from unisono.data.convert.formats.table import select_columns, unreadable_error, unwritable_error

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


def read_formats() -> tuple[str, ...]:
    """The suffixes that ``open_table`` reads; ``idx`` stands for MNIST's names."""
    return tuple(_READ)


def open_table(
    path: Path,
    *,
    columns: Sequence[str] | None = None,
    base64: Collection[str] = (),
    arrays: Collection[str] = (),
) -> Table:
    """Open a file, or all files of the set ``name-00000-of-00005…`` that it belongs to. Rows are read lazily.

    ``columns``: only these fields, in this order. ``base64``: columns of a CSV file that are bytes. ``arrays``: features of
    ``tf.Example`` that are arrays even with one value. Raises DataError for an unknown suffix, an option without effect on the
    format, a missing file of a set or files with different fields, and for damage while rows are read.
    """
    suffix = format_of(path)
    if suffix not in _READ:
        raise _no_format(path, suffix, _READ)
    name = _READ[suffix]
    module: Any = importlib.import_module(f"{__name__}.{name}")
    options: dict[str, Any] = {}
    if base64:
        options["binary"] = _for_csv(path, name, base64)
    if arrays:
        if name != "tfrecord":
            raise unreadable_error(
                f"arrays {sorted(arrays)} of {path}", "only tf.Example leaves that open", "leave it out"
            )
        options["arrays"] = arrays
    if columns is not None and name == "parquet":
        options["columns"] = columns
    files = files_of(path)
    table: Table = module.read(files[0], **options)
    if len(files) > 1:
        table = replace(table, rows=chain(table.rows, _others(module, files, options, table)))
    return table if columns is None else select_columns(table, columns)


def write_table(path: Path, table: Table, *, base64: Collection[str] = ()) -> int:
    """Write all rows to ``path``, completely or not at all, replacing an existing file; returns the number of rows.

    ``base64``: fields of bytes that a CSV file holds as base64. Raises DataError for a suffix that cannot be written and,
    naming row and field, for values that the format cannot hold.
    """
    suffix = format_of(path)
    if suffix not in _WRITTEN:
        raise _no_format(path, suffix, _WRITTEN)
    if is_shard(path) or (suffix == ".mindrecord" and path.suffix != suffix):
        raise unwritable_error(
            f"{path}, a name of one of several files", "rows are written to one file", "a name without a number"
        )
    name = _WRITTEN[suffix]
    module: Any = importlib.import_module(f"{__name__}.{name}")
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
    known = ", ".join(formats)
    verb = "read" if formats is _READ else "written"
    return unwritable_error(
        f"{path}, whose suffix is {suffix!r}", f"the suffix names the format, {verb} are {known}", f"one of {known}"
    )
