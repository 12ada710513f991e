"""Write the kept documents of a data set, each file in its own format, and the numbers of its kept rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from unisono.data.convert.table_files import Row, open_file, write_table
from unisono.errors import DataError
from unisono.quality.documents import TEXT, Documents, InputFile, text_column
from unisono.storage.directory import make_folder
from unisono.storage.files import new_file, open_regular

DATA_FOLDER: Final = "data"
WRITABLE: Final = (".rec", ".mindrecord", ".jsonl", ".parquet", ".tar", ".csv", TEXT)


def write_kept(
    documents: Documents,
    folder: Path,
    is_kept: NDArray[np.bool_],
    counts: NDArray[np.int64],
    changed: Iterable[tuple[int, bytes]] = (),
    *,
    index_only: bool,
) -> int:
    """Write ``data/NAME`` with the kept rows of each file, and ``kept/NAME.npy`` with their numbers, int64.

    Where a text has not changed, lines of JSONL and files of text are copied byte for byte; rows of other formats are read and
    written. ``data`` leaves out a file without kept rows.

    Args:
        documents: The data set.
        folder: A folder.
        is_kept: Of each document, bool [documents].
        counts: Documents of each file, int64 [files].
        changed: Number and new text in UTF-8 of documents whose text is another, in order.
        index_only: Whether to write only the numbers.

    Returns:
        The number of kept documents whose text is another.

    Raises:
        DataError: A file cannot be read or written in its format.
    """
    new_texts = _NewTexts(changed)
    for file, end, count in zip(documents.files, np.cumsum(counts), counts, strict=True):
        kept = is_kept[end - count : end]
        with new_file(_place(folder / "kept" / f"{file.name}.npy")) as index:
            np.save(index, np.flatnonzero(kept).astype(np.int64))
        texts = new_texts.of_file(int(end - count), kept)
        if kept.any() and not index_only:
            _write_file(file, _place(folder / DATA_FOLDER / file.name), kept, texts, documents.column)
        for _ in texts:  # which no file has read
            pass
    return new_texts.count


class _NewTexts:
    """New texts, which are read once and in order, file by file."""

    def __init__(self, changed: Iterable[tuple[int, bytes]]) -> None:
        self._rest = iter(changed)
        self._next = next(self._rest, None)
        self.count = 0

    def of_file(self, begin: int, kept: NDArray[np.bool_]) -> Iterator[bytes | None]:
        """The new text of each kept document of a file, whose documents begin at ``begin``; None where it has not changed."""
        for document in (begin + np.flatnonzero(kept)).tolist():
            while self._next is not None and self._next[0] < document:  # one that was dropped afterwards
                self._next = next(self._rest, None)
            if self._next is not None and self._next[0] == document:
                text = self._next[1]
                self.count += 1
                yield text
            else:
                yield None


def require_writable(documents: Documents) -> None:
    """Raise DataError if a file is of a format that cannot be written."""
    for file in documents.files:
        if file.kind not in WRITABLE:
            raise DataError(
                given=f"{file.path}, whose format {file.kind} is only read",
                rule="kept rows are written in the format of their file",
                consequence="nothing was written",
                nearest="--index-only writes their numbers; unisono data convert makes another format of the file",
            )


def _place(path: Path) -> Path:
    make_folder(path.parent)
    return path


def _write_file(
    file: InputFile, target: Path, kept: NDArray[np.bool_], texts: Iterator[bytes | None], column: str | None
) -> None:
    """Write the kept rows; ``texts`` are those of the kept rows that have changed, and None of all others."""
    if file.kind in (".jsonl", TEXT):
        with open_regular(file.path) as source, new_file(target) as copy:
            if file.kind == TEXT:
                text = next(texts)
                copy.write(source.read() if text is None else text)
                return
            for line, text in zip(compress(source, kept), texts, strict=True):
                copy.write(line if text is None else _with_text(line, column or TEXT, text))
        return
    table = open_file(file.path, file.kind)
    rows = zip(compress(table.rows, kept), texts, strict=True)
    new_rows = (_row_with_text(row, file, column, text) for row, text in rows)
    write_table(target, replace(table, rows=new_rows), is_shard=True)


def _with_text(line: bytes, field: str, text: bytes) -> bytes:
    """The line with another text in a field. All other values stay as they are written."""
    row = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    row[field] = msgspec.Raw(_json_string(text.decode("utf-8", "surrogatepass")))
    return msgspec.json.encode(row) + (b"\n" if line.endswith(b"\n") else b"")


def _json_string(text: str) -> bytes:
    try:
        return json.dumps(text, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # lone surrogates, which only escapes can write
        return json.dumps(text).encode()


def _row_with_text(row: Row, file: InputFile, column: str | None, text: bytes | None) -> Row:
    if text is None:
        return row
    name = column or text_column(row, file)
    return {**row, name: text if isinstance(row[name], bytes) else text.decode("utf-8", "surrogatepass")}
