"""Rows from one file format to another, chosen by suffix. Nothing is dropped or cast: what a format cannot hold is an error.

The formats, and what each holds, are in ``unisono.data.convert.formats``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from unisono.data.convert.formats import open_table, write_table
from unisono.data.convert.formats.detection import format_of
from unisono.data.convert.formats.table import unwritable_error


def convert(
    source: Path,
    target: Path,
    *,
    overwrite: bool = False,
    columns: Sequence[str] | None = None,
    base64: Collection[str] = (),
    arrays: Collection[str] = (),
) -> int:
    """Write all rows of ``source`` to ``target``, which is there whole or not at all; returns how many.

    A ``source`` that is one file of a set stands for the set. ``columns``: only these fields. ``base64``: fields that are
    bytes, as base64 in CSV, source or target. ``arrays``: features of TFRecord that are arrays even with one value. Pictures
    of MNIST and CIFAR become PNG in .rec (behind MXNet's image header, which has the labels) and in .mindrecord, and stay
    arrays of uint8 elsewhere. Raises DataError for a suffix that is no format here, a target that exists, a damaged source,
    and a row that the target's format cannot hold.
    """
    if target.exists() and not overwrite:
        raise unwritable_error(
            f"{target}, which exists", "a file is written once, under a new name", "another name, or --overwrite"
        )
    from_csv, to_csv = (format_of(path) == ".csv" for path in (source, target))
    table = open_table(source, columns=columns, base64=base64 if from_csv or not to_csv else (), arrays=arrays)
    return write_table(target, table, base64=base64 if to_csv else ())
