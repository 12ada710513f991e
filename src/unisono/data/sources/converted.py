"""Random access to rows of any table format: they are copied once, as samples, into a RecordIO file of the cache folder.

CSV, JSON lines, Parquet, webdataset's tar, TFRecord and Hugging Face's Arrow folders are read from front to back. The copy has
about the size of the data. Later openings, also by other processes, find it by the names, sizes and times of change of the files;
its fingerprint is of its content, so that a copy of the data elsewhere is the same data.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import xxhash

from unisono.data.convert.formats.table import OtherFields, Row, describe_value
from unisono.data.dataset import Batch, check_sample
from unisono.data.packed_sample import pack_sample, unpack_sample
from unisono.data.recordio import RecordDataset, RecordFile, RecordWriter
from unisono.errors import DataError
from unisono.sanitize import quoted
from unisono.storage.files import file_lock, os_reason, write_atomically
from unisono.storage.ownership import make_own_folder, read_own_json, untrusted_reason

_LOG: Final = logging.getLogger("unisono.data")
_VERSION: Final = 3  # of what becomes of a row; 1: floats were float32, 2: lists of strings with line ends


def converted(
    paths: Sequence[Path], rows: Callable[[OtherFields], Iterator[Row]], cache: Path
) -> tuple[RecordDataset, dict[str, DataError]]:
    """The rows of ``paths`` as a data set with random access, and the columns that it cannot hold.

    Args:
        paths: The files that the rows are of.
        rows: Reads all rows, in order; called only if there is no copy. What it is called with gets the fields with values that
            it has left out of their rows.
        cache: Folder of the copies.

    Returns:
        The samples, and the error of each field with such values.

    Raises:
        DataError: The cache folder cannot be written, there is no row, or ``rows`` raises it.
    """
    stamps = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    name = f"rows-{xxhash.xxh3_128_hexdigest(repr((_VERSION, stamps)).encode())}"
    data, others = cache / f"{name}.rec", cache / f"{name}.others.json"
    try:
        make_own_folder(cache, option="data.cache_dir")
        with file_lock(cache / f"{name}.lock"):
            is_trusted = data.exists() and not untrusted_reason(data)
            if not is_trusted or (
                others.exists() and untrusted_reason(others)
            ):  # such as of an earlier version, under umask 002
                _LOG.info("%s is copied to %s for random access", paths[0], data)
                _write(data, others, rows, given=str(paths[0]))
        faults = read_own_json(others) if others.exists() else {}
    except OSError as error:
        raise DataError(
            given=f"the cache folder {cache}: {os_reason(error)}",
            rule="rows that have no random access are copied into a folder this user can write, with room for them",
            consequence="the data cannot be read in the order of training",
            nearest=f"data.cache_dir with another folder, or room there ({shutil.disk_usage(cache.anchor).free >> 20} MiB free)",
        ) from error
    return RecordDataset([RecordFile(data)], unpack_sample), {
        name: DataError(**parts) for name, parts in faults.items()
    }


def sample_of_row(row: Row, number: int) -> Batch:
    """A row as a sample: strings and bytes are uint8 [bytes], and a list of strings is one string with a line for each.

    Raises:
        DataError: A string of a list has a line end; the error names it and the row's ``number``.
    """
    return check_sample({str(name): _value(value, str(name), number) for name, value in row.items()})


def _write(path: Path, others: Path, rows: Callable[[OtherFields], Iterator[Row]], *, given: str) -> None:
    """Write the samples to ``path``, and before it is there the errors of other fields, if there are any, to ``others``."""
    fields: OtherFields = {}
    with RecordWriter(path, overwrite=True) as writer:
        for number, row in enumerate(rows(fields)):
            sample = sample_of_row(row, number)
            writer.write(pack_sample({name: np.asarray(value) for name, value in sample.items()}))
        if not len(writer):
            raise DataError(
                given=f"{given}, which has no rows",
                rule="training data has at least one row",
                consequence="nothing was opened",
                nearest="a source with rows",
            )
        if fields:
            faults = {name: asdict(field.error.problems[0]) for name, field in fields.items()}
            write_atomically(others, json.dumps(faults).encode())


def _value(value: Any, name: str, number: int) -> Any:
    if isinstance(value, list | tuple):
        parts = cast("list[Any]", value)
        if parts and all(isinstance(part, str) for part in parts):
            if lines := [part for part in parts if "\n" in part]:
                raise DataError(
                    given=f"row {number}, column {quoted(name)}: the string {describe_value(lines[0])} of a list",
                    rule="a list of strings is read as one text with a line for each, so that none has a line end",
                    consequence="the list would have more parts than were written",
                    nearest="the same strings without line ends, or a column that is one text",
                )
            value = "\n".join(parts)
        else:
            return np.asarray(parts)
    if isinstance(value, str | bytes):
        return np.frombuffer(_in_utf8(value, name, number) if isinstance(value, str) else value, np.uint8)
    if value is None:
        return np.zeros(0, np.uint8)  # as an empty text: an absent value
    if isinstance(value, float):
        return np.float64(value)  # as it is in the file; ``check_sample`` would make it float32
    return value


def _in_utf8(text: str, name: str, number: int) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            given=f"row {number}, column {quoted(name)}: {describe_value(text)}, a lone surrogate at {error.start}",
            rule="text is Unicode, which UTF-8 can hold; a lone surrogate is half of a character",
            consequence="the text cannot be read for training",
            nearest="that row without it; of a text that documents are, unisono data clean removes it",
        ) from error
