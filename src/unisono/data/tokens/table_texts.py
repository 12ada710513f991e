"""Texts of a column of table files (.jsonl, .csv, .parquet …), for a corpus whose documents are rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from unisono.data.convert.file_kind import KINDS, kind_of_name
from unisono.data.convert.formats.table import describe_value
from unisono.data.convert.table_files import open_file, read_formats
from unisono.data.tokens.corpus import Corpus
from unisono.errors import DataError
from unisono.sanitize import listed
from unisono.storage.files import open_regular
from unisono.storage.limits import MAX_TEXT_BYTES, decode_json

_SHOWN = 5


def check_text_column(corpus: Corpus, column: str) -> None:
    """Check that ``column`` is given for files of tables, and only for them.

    Raises:
        DataError: All files are of a table or record format and there is no column: a model would learn their syntax. Or a
            column is given and files are not tables.
    """
    kinds = {file.path: kind_of_name(Path(file.path)) for file in corpus.files}
    tables = read_formats()
    if column and (others := [path for path, kind in kinds.items() if kind not in tables]):
        raise DataError(
            given=f"data.text_column {column!r} with {_some(others)} of corpus {corpus.name}",
            rule=f"a column is read from the rows of {', '.join(tables)}",
            consequence="these files have no columns, so nothing was prepared",
            nearest="leave data.text_column out, or move them to another folder",
        )
    if not column and set(kinds.values()) <= set(KINDS):
        first = min(kinds)
        found = _columns(corpus.root / first, kinds[first]) if kinds[first] in tables else []
        raise DataError(
            given=f"corpus {corpus.name}: {', '.join(sorted(set(kinds.values())))} files without data.text_column",
            rule="the corpus is plain text, each file of it a document, or a column of tables, each row of it a document",
            consequence="the model would learn the syntax of the format, so nothing was prepared",
            nearest=f"data.text_column, one of: {listed(found)}"
            if found
            else "a text file, or a folder with a text file for each document, written from the field that holds the text",
        )


def row_texts(path: Path, column: str, kept: NDArray[np.int64] | None = None) -> Iterator[str]:
    """The texts of a table's column, row by row; empty ones too.

    Args:
        path: The table.
        column: The column.
        kept: Numbers of the rows that are read, in order; all others are as empty texts. None: all are read.

    Raises:
        DataError: The file is damaged or has fewer rows than ``kept`` names, a row lacks the column, or its value is null or no
            text. The error names the column's first rows of this kind and is raised after the last row.
    """
    bad: list[str] = []
    count = rows = 0
    wanted = iter([] if kept is None else kept)
    following = next(wanted, None)
    for number, row in enumerate(open_file(path, kind_of_name(path), [column]).rows):
        rows += 1
        if kept is not None:
            if number != following:
                yield ""
                continue
            following = next(wanted, None)
        value = row[column]
        if isinstance(value, str):
            yield value
            continue
        count += 1
        if count <= _SHOWN:
            bad.append(f"row {number}: {'null' if value is None else describe_value(value)}")
    if following is not None:
        raise DataError(
            given=f"row {following:,} of {path}, which has {rows:,} rows",
            rule="kept rows are rows of the file; they are counted from 0",
            consequence="the corpus was not prepared",
            nearest="data.kept_rows with a folder that was made of this file",
        )
    if count:
        more = f"; and {count - len(bad)} more" if count > len(bad) else ""
        raise DataError(
            given=f"{count} row(s) of {path} have no text in column {column!r}: {'; '.join(bad)}{more}",
            rule="data.text_column is a text in every row; rows are counted from 0",
            consequence="the corpus was not prepared; no row is left out silently",
            nearest="another column, or a file without these rows (an empty text is left out)",
        )


def _columns(path: Path, kind: str) -> list[str]:
    """The columns of a table; of one without a schema, those of its first row."""
    if kind == ".jsonl":  # values of any kind
        with open_regular(path) as file, suppress(ValueError):
            row = decode_json(file.readline(MAX_TEXT_BYTES))
            return list(cast("dict[str, Any]", row)) if isinstance(row, dict) else []
        return []
    table = open_file(path, kind)
    return list(next(iter(table.rows), table.schema or {}))


def _some(paths: list[str]) -> str:
    return ", ".join(paths[:_SHOWN]) + (f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else "")
