"""The field of the text in tables of several sets, which one option names for all."""

from __future__ import annotations

from unisono.errors import DataError
from unisono.quality.documents import Documents, first_row, text_column
from unisono.quality.input_files import InputFile
from unisono.quality.refused import refused
from unisono.sanitize import listed, quoted


def require_shared_column(documents: Documents) -> None:
    """Raise DataError if the first row of a table lacks the field of the text, and say what makes the sets comparable.

    Nothing is checked of images, or where rows without the field are skipped.
    """
    if documents.content != "text" or documents.skips_unreadable:
        return
    fields = {file: found for file in documents.files if (found := _strings_of(file)) is not None}
    shared = set[str].intersection(*map(set, fields.values())) if fields else set[str]()
    for file, strings in fields.items():
        if _has_column(file, documents.column):
            continue
        alone = f"a table of that field alone: unisono data convert {file.path} NEW --column {(strings or ['NAME'])[0]}"
        raise refused(
            f"{file.path}, in which {quoted(documents.column or 'text')} is no field, but {listed(map(quoted, strings))}",
            "the text is one field in all sets (--column), else of each table 'text' or its only string",
            f"--column {sorted(shared)[0]}" if shared else alone,
        )


def _strings_of(file: InputFile) -> list[str] | None:
    """The fields of strings in the first row of a table; None of a file that has none, or cannot be read."""
    try:
        row = None if file.corpus_entry is not None else first_row(file)
    except DataError:  # reading it says why
        return None
    return None if row is None else [name for name, value in row.items() if isinstance(value, str)]


def _has_column(file: InputFile, column: str | None) -> bool:
    row = first_row(file) or {}
    if column is not None:
        return column in row
    try:
        text_column(row, file)
    except DataError:
        return False
    return True
