"""``.mindrecord``: int32, int64, float32, float64, string, bytes and arrays of these numbers; an image as PNG."""

from __future__ import annotations

from pathlib import Path

from unisono.data.convert.formats.table import Table, encode_image_column, infer_schema
from unisono.data.mindrecord import MindRecordFile, MindRecordWriter


def read(path: Path) -> Table:
    """The rows of all files of the file's set."""
    file = MindRecordFile(path)
    return Table(rows=file, schema=file.schema, count=len(file))


def write(path: Path, table: Table) -> int:
    """Write the rows to one file and its index; returns their number."""
    schema, rows = infer_schema(encode_image_column(table))
    with MindRecordWriter(path, schema, overwrite=True) as writer:
        for row in rows:
            writer.write(row)
    return len(writer)
