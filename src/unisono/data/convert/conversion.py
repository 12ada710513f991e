"""Convert rows from one file format to another, chosen by suffix. Nothing is dropped or cast.

``unisono.data.convert.formats`` describes the formats.
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
    """Write all rows of ``source`` to ``target``, completely or not at all; returns the number of rows.

    One file of a set stands for the set. ``columns``: only these fields. ``base64``: fields of bytes, which CSV holds as
    base64. ``arrays``: features of TFRecord that are arrays even with one value. Images of MNIST and CIFAR become PNG in .rec
    (after MXNet's image header with the labels) and .mindrecord, and uint8 arrays elsewhere. Raises DataError for an unknown
    suffix, a target that exists, a damaged source, and a row that the target's format cannot hold.
    """
    if target.exists() and not overwrite:
        raise unwritable_error(
            f"{target}, which exists", "a file is written once, under a new name", "another name, or --overwrite"
        )
    from_csv, to_csv = (format_of(path) == ".csv" for path in (source, target))
    table = open_table(source, columns=columns, base64=base64 if from_csv or not to_csv else (), arrays=arrays)
    return write_table(target, table, base64=base64 if to_csv else ())
