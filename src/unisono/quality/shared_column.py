"""The field of the text in tables of several sets, which one option names for all."""

from __future__ import annotations

from unisono.data.convert.formats.table import OtherFields, Row
from unisono.data.convert.table_files import open_file
from unisono.errors import DataError
from unisono.quality.documents import Documents, first_row, text_column
from unisono.quality.input_files import PARQUET, InputFile
from unisono.quality.refused import refused
from unisono.sanitize import listed, quoted


def require_shared_column(documents: Documents) -> None:
    """Raise DataError if the first row of a table lacks the field of the text, and say what makes the sets comparable.

    Nothing is checked of images, or where rows without the field are skipped.
    """
    if documents.content != "text" or documents.skips_unreadable:
        return
    rows = {file: row for file in documents.files if (row := _row_of(file)) is not None}
    fields = {file: [name for name, value in row.items() if isinstance(value, str)] for file, row in rows.items()}
    for file, strings in fields.items():
        if _has_column(rows[file], file, documents.column):
            continue
        shared = [name for name in strings if all(name in others for others in fields.values())]
        alone = (
            f"a table of that field alone: unisono data convert {file.path} NEW --column {(strings or ['NAME'])[0]}; "
            "or, if it is a benchmark, unisono data clean with [decontaminate], which has columns of its own"
        )
        raise refused(
            f"{file.path}, in which {quoted(documents.column or 'text')} is no field, but {listed(map(quoted, strings))}",
            "the text is one field in all sets (--column), else of each table 'text' or its only string",
            f"--column {shared[0]}" if shared else alone,
        )


def _row_of(file: InputFile) -> Row | None:
    """The first row of a table, with None for each value that no row holds; None of a file that has none, or cannot be read."""
    others: OtherFields = {}
    try:
        if file.corpus_entry is not None:
            return None
        if file.kind == PARQUET:
            return first_row(file)
        row = next(iter(open_file(file.path, file.kind, others=others).rows), None)
    except DataError:  # reading it says why
        return None
    return None if row is None else {**row, **dict.fromkeys(others)}


def _has_column(row: Row, file: InputFile, column: str | None) -> bool:
    if column is not None:
        return column in row
    try:
        text_column(row, file)
    except DataError:
        return False
    return True
