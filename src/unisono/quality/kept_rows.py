"""Write the kept documents of a data set, each file in its own format, and the row indices of its kept rows."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import compress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unisono.data.convert.table_files import Row, open_file, write_table
from unisono.data.kept_rows import KEPT_FOLDER, KeptFile, write_kept_files
from unisono.data.per_file_arrays import stamp_of, write_array
from unisono.data.result_files import DATA_FOLDER
from unisono.data.tokens.corpus import UndecodableError, encode_source
from unisono.errors import DataError
from unisono.quality.documents import Documents, has_image_records, text_column, text_field
from unisono.quality.image_records import copy_class_names, record_class_names, with_class
from unisono.quality.input_files import PARQUET, WHOLE_FILE, InputFile
from unisono.quality.json_members import json_members, with_values
from unisono.quality.labels.values import label_like
from unisono.quality.parquet_rows import write_kept_parquet
from unisono.quality.progress import Advance, ignore
from unisono.quality.refused import refused
from unisono.storage.directory import make_folder
from unisono.storage.files import copy_file, new_file, open_regular
from unisono.storage.json_lines import as_json
from unisono.tasks.sources import TARGETS

_WRITABLE: Final = (".rec", ".mindrecord", ".jsonl", ".parquet", ".tar", ".csv", WHOLE_FILE)
_COPIED: Final = (
    ".parquet",
    ".tar",
    ".csv",
)  # which have all their rows in one file; the lines of JSONL stay in any case
_INDEX_ONLY: Final = "--index-only writes their row indices; "


def write_kept(
    documents: Documents,
    folder: Path,
    is_kept: NDArray[np.bool_],
    counts: NDArray[np.int64],
    changed: Iterable[tuple[int, bytes]] = (),
    *,
    label: str | None = None,
    new_names: Mapping[int, str] = MappingProxyType({}),
    index_only: bool,
    advance: Advance = ignore,
) -> int:
    """Write ``data/NAME`` with the kept rows of each file, and ``kept/NAME.npy`` with their row indices (see ``data.kept_rows``).

    Where a document has not changed, lines of JSONL and files of text or images are copied byte for byte, and rows of Parquet
    stay as pyarrow has them; rows of other formats are read and written. A file of Parquet, CSV or tar of which all documents are
    kept as they are is copied. ``data`` leaves out a file without kept rows. The names
    of the classes of image records go with them.

    Args:
        documents: The data set.
        folder: A folder.
        is_kept: Of each document, bool [documents].
        counts: Documents of each file, int64 [files].
        changed: Number and new text in UTF-8 of documents whose text is another, in order; or their new label.
        label: The field whose values ``changed`` has, as text, each of which becomes a value of the type of the one before.
            None: it has texts.
        new_names: Names in ``data`` of files that have another one there than in the inputs, by the number of the file.
        index_only: Whether to write only the row indices.
        advance: Receives the kept documents that are written.

    Returns:
        The number of kept documents that are changed.

    Raises:
        DataError: A file cannot be read or written in its format, or a label is none of the type of those of its file.
    """
    new_texts = _NewTexts(changed, advance)
    for number, (file, end, count) in enumerate(zip(documents.files, np.cumsum(counts), counts, strict=True)):
        kept = is_kept[end - count : end]
        write_array(_place(folder / KEPT_FOLDER / f"{file.name}.npy"), np.flatnonzero(kept).astype(np.int64))
        texts = new_texts.of_file(int(end - count), kept)
        if kept.any() and not index_only:
            target = _place(folder / DATA_FOLDER / new_names.get(number, file.name))
            if file.kind in _COPIED and kept.all() and not new_texts.has_any(int(end - count), int(end)):
                copy_file(file.path, target)
            else:
                _write_file(file, target, kept, texts, documents.column, label)
        for _ in texts:  # which no file has read
            pass
    write_kept_files(folder, list(_kept_files(documents, is_kept, counts)))
    return new_texts.count


def _kept_files(documents: Documents, is_kept: NDArray[np.bool_], counts: NDArray[np.int64]) -> Iterator[KeptFile]:
    for file, end, count in zip(documents.files, np.cumsum(counts), counts, strict=True):
        kept = int(is_kept[end - count : end].sum())
        yield KeptFile(name=file.name, stamp=stamp_of(file.size, file.mtime_ns), rows=int(count), kept=kept)


class _NewTexts:
    """New texts or labels, which are read once and in order, file by file."""

    def __init__(self, changed: Iterable[tuple[int, bytes]], advance: Advance) -> None:
        self._rest = iter(changed)
        self._advance = advance
        self._next = next(self._rest, None)
        self.count = 0

    def has_any(self, begin: int, end: int) -> bool:
        """Whether some of the documents from ``begin`` up to ``end``, all of which are kept, have changed."""
        while self._next is not None and self._next[0] < begin:
            self._next = next(self._rest, None)
        return self._next is not None and self._next[0] < end

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
            self._advance(1)


def require_writable(documents: Documents, nearest: str = _INDEX_ONLY) -> None:
    """Raise DataError if a file is of a format that cannot be written; ``nearest`` says what can be done without that."""
    for file in documents.files:
        if file.kind not in _WRITABLE:
            raise DataError(
                given=f"{file.path}, whose format {file.kind} is only read",
                rule="rows are written in the format of their file",
                consequence="nothing was written",
                nearest=f"{nearest}unisono data convert makes another format of the file",
            )


def _place(path: Path) -> Path:
    make_folder(path.parent)
    return path


def _write_file(
    file: InputFile,
    target: Path,
    kept: NDArray[np.bool_],
    texts: Iterator[bytes | None],
    column: str | None,
    label: str | None,
) -> None:
    """Write the kept rows of a file.

    Args:
        file: The file.
        target: The new file.
        kept: Of each row.
        texts: The new texts, or labels, of the kept rows that have changed, and None of all others.
        column: Field of the text; None to find it.
        label: Field of the labels, if these change.
    """
    if file.kind in (".jsonl", WHOLE_FILE):
        with open_regular(file.path) as source, new_file(target) as copy:
            if file.kind == WHOLE_FILE:
                text = next(texts)
                copy.write(source.read() if text is None else _file_content(file, text))
                return
            name = column or text_field(file)
            for (row, line), text in zip(compress(enumerate(source), kept), texts, strict=True):
                copy.write(line if text is None else _with_text(file, row, line, name, label, text))
        return
    if file.kind == PARQUET:
        name = label or column or text_field(file)
        change = partial(_changed_value, is_label=label is not None)
        write_kept_parquet(file.path, target, kept, texts, name, change)
        return
    table = open_file(file.path, file.kind)
    rows = zip(compress(table.rows, kept), texts, strict=True)
    is_records = has_image_records(file)
    if is_records and label == TARGETS:
        names = record_class_names(file.path)
        new_rows = (row if text is None else with_class(row, names, text.decode()) for row, text in rows)
    else:
        new_rows = (row if text is None else _row_with_text(row, file, column, label, text) for row, text in rows)
    write_table(target, replace(table, rows=new_rows), is_shard=True)
    if is_records:
        copy_class_names(file.path, target)


def _file_content(file: InputFile, text: bytes) -> bytes:
    """A file with another text: in UTF-8, or of Python source in the encoding that it declares. Raises DataError."""
    if file.path.suffix != ".py":
        return text
    try:
        return encode_source(text.decode("utf-8", "surrogatepass"))
    except UndecodableError as error:
        raise refused(
            f"{file.path}, whose new text cannot be written in the encoding that it declares: {error}",
            "Python source is in the encoding that it declares (PEP 263)",
            "the file in UTF-8, without that declaration, or without the step that changes its text so",
        ) from error


def _with_text(file: InputFile, row: int, line: bytes, column: str, label: str | None, text: bytes) -> bytes:
    """The line with another text, or another label. All its other bytes stay, but for a mark before them. Raises DataError.

    Args:
        file: The file.
        row: Number of the row.
        line: The line, which has been read before.
        column: Field of the text.
        label: Field of the labels, if these change.
        text: The new text, or the new label.
    """
    old = line.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogatepass")
    new = text.decode("utf-8", "surrogatepass")
    try:
        members, end = json_members(old)
        name = label or column
        value = new if label is None else label_like(new, members[name].value)
        changed = with_values(old, {name: members[name]}, end, {name: as_json(value).decode()})
    except (ValueError, LookupError) as error:
        raise refused(
            f"{file.path}, row {row}, which has changed meanwhile",
            "a data set stays as it is while it is read",
            "the same command again, with another folder for the results",
        ) from error
    return changed.encode("utf-8", "surrogatepass")


def _row_with_text(row: Row, file: InputFile, column: str | None, label: str | None, text: bytes) -> Row:
    name = label or column or text_column(row, file)
    return {**row, name: _changed_value(row[name], text, is_label=label is not None)}


def _changed_value(value: Any, text: bytes, *, is_label: bool) -> Any:
    """The text, or the label of that name, in the place of a value: of its type."""
    new = text.decode("utf-8", "surrogatepass")
    if is_label:
        return label_like(new, value)
    return text if isinstance(value, bytes) else new
