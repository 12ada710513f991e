"""Documents of files, which are texts or images: rows of tables with a column of them, and files that are one each."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from unisono.data.convert.formats.jsonl import object_of_line
from unisono.data.convert.formats.table import describe_value, not_utf8_error, open_source
from unisono.data.convert.table_files import Row, open_file
from unisono.data.image.decoding import image_format
from unisono.data.tokens.corpus import Corpus, SourceFile, UndecodableError, read_text
from unisono.errors import DataError
from unisono.quality.file_meter import UNMETERED, FileMeter
from unisono.quality.image_records import PAYLOAD, RECORDS, image_of_record
from unisono.quality.input_files import PARQUET, InputFile, is_image_name, list_files
from unisono.quality.json_rows import NoValue, json_rows
from unisono.quality.parquet_rows import example_row, parquet_rows
from unisono.quality.progress import Advance, ignore
from unisono.quality.refused import refused
from unisono.quality.row_keys import Key, image_class, row_keys
from unisono.sanitize import listed, quoted
from unisono.storage.limits import MAX_RECORD_BYTES
from unisono.tasks.sources import TARGETS

Content = Literal["text", "images"]
TEXT_COLUMN: Final = "text"  # column of the documents where no other is named
NAME_COLUMN: Final = "--column NAME"  # what an error says where it is not clear
_KEY: Final = "__key__"  # the name of a sample of webdataset
_SHOWN_VALUES: Final = 64  # of an array
_LOG: Final = logging.getLogger("unisono")


@dataclass(frozen=True, slots=True)
class Document:
    """A document with its place.

    Attributes:
        file: Number of its file.
        row: Number of its row in it, from 0.
        content: An encoded image, or text in UTF-8, in which lone surrogates may stand; empty if it has none.
        fault: Why it has none; empty if it has.
    """

    file: int
    row: int
    content: bytes
    fault: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """The documents of files, in order: a document's number is its place among them all.

    Attributes:
        files: Their files.
        files_of_path: Number of files of each path that was given, in order.
        content: What they are.
        column: Field of the documents in tables; None to find it.
        skips_unreadable: Whether a document that cannot be read is one with a fault, or an error.
        excluded_column: A document of a table is its row without this field, as JSON. None: it is the text in ``column``.
    """

    files: tuple[InputFile, ...]
    files_of_path: tuple[int, ...]
    content: Content = "text"
    column: str | None = None
    skips_unreadable: bool = False
    excluded_column: str | None = None

    @property
    def total_bytes(self) -> int:
        """Size of all files."""
        return sum(file.size for file in self.files)

    def read(self, advance: Advance) -> Iterator[Document]:
        """The documents; ``advance`` receives the bytes that are read, ``total_bytes`` in all.

        Raises:
            DataError: A file is damaged, or a row has no text or image.
        """
        for number, file in enumerate(self.files):
            meter = FileMeter(file.size, advance)
            for row, found in enumerate(self._contents(file, meter)):
                if file.corpus_entry is not None:
                    meter.end()
                if isinstance(found, str):
                    yield Document(number, row, found.encode("utf-8", "surrogatepass"))
                elif isinstance(found, bytes):
                    yield Document(number, row, found)
                elif self.skips_unreadable:
                    yield Document(number, row, b"", _fault(found))
                else:
                    raise _with_way_out(found)
            meter.end()

    def _contents(self, file: InputFile, meter: FileMeter = UNMETERED) -> Iterator[str | bytes | DataError]:
        if self.excluded_column is not None:
            field = self.excluded_column
            return (row if isinstance(row, DataError) else _row_as_json(row, field) for row in _rows(file, None, meter))
        return _texts(file, self.column, meter) if self.content == "text" else _images(file, self.column, meter)

    def keys(
        self, field: str, key: Key, faults: dict[int, str], advance: Advance = ignore
    ) -> Iterator[Hashable | None]:
        """The key of the value that each document has in a field of the tables; None of one without, if such are skipped.

        A file that is one document has the field ``targets``: its folder within the one that was given, and the name of that one
        for files that lie in it directly. Image records have ``targets``, the name or number of their class.

        Args:
            field: The field.
            key: Of a value, such as the name of its class.
            faults: Gets why a document has no value, by its number.
            advance: Receives the bytes that are read, ``total_bytes`` in all.

        Raises:
            DataError: A file has no such field. Or, unless such are skipped, a row has none, or an absent value (null, empty or
                NaN), or one that has no key.
        """
        found_keys = (found for file in self.files for found in _keys(file, field, key, FileMeter(file.size, advance)))
        for document, found in enumerate(found_keys):
            error = found.error if isinstance(found, NoValue) else found
            if not isinstance(error, DataError):
                yield error
            elif self.skips_unreadable:
                faults[document] = _fault(error)
                yield None
            else:
                raise _with_way_out(error)

    def contents(self, places: Collection[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], str | bytes]]:
        """The texts or images at some places, (number of the file, row), one by one; each file is read as far as needed."""
        wanted: dict[int, set[int]] = {}
        for file, row in places:
            wanted.setdefault(file, set()).add(row)
        for file, rows in wanted.items():
            for row, found in enumerate(islice(self._contents(self.files[file]), max(rows) + 1)):
                if row in rows and not isinstance(found, DataError):
                    yield (file, row), found

    def require_unchanged(self) -> None:
        """Raise DataError if a file has changed since it was listed."""
        for file in self.files:
            try:
                status = file.path.stat()
                is_same = (status.st_size, status.st_mtime_ns) == (file.size, file.mtime_ns)
            except OSError:
                is_same = False
            if not is_same:
                raise refused(
                    f"{file.path}, which has changed meanwhile",
                    "a data set stays as it is while it is read",
                    "the same command again, with another folder for the results",
                )

    def place_text(self, file: int, row: int) -> str:
        """Where a document is, in words."""
        return self.files[file].name + (f", row {row}" if self.files[file].corpus_entry is None else "")

    def identity(self) -> list[Any]:
        """Fingerprint of the inputs, stored in ``job.json`` so that a changed input is detected."""
        files = [(file.name, file.size, file.mtime_ns) for file in self.files]
        return [self.content, self.column, self.files_of_path, files]


def require_text(documents: Documents) -> None:
    """Raise DataError for images."""
    if documents.content != "text":
        raise refused(f"images, the first in {documents.files[0].path}", "this is for texts", "tables or files of text")


def find_documents(paths: Sequence[Path], *, column: str | None = None, skips_unreadable: bool = False) -> Documents:
    """List the files of documents, and find out whether they are texts or images.

    Args:
        paths: As of ``list_files``.
        column: Field of the tables that holds the text or image. By default ``text``, else the only field that is a
            string, or that is bytes; of images the only one of bytes. The first line of a JSONL file tells it for all.
        skips_unreadable: Whether documents that cannot be read are left for the caller to drop; otherwise they are
            errors when they are read.

    Raises:
        DataError: A path is not there, a folder has no files, or not all are texts or all images.
    """
    files, files_of_path = list_files(paths)
    return Documents(
        files=files,
        files_of_path=files_of_path,
        content=_content(files, column),
        column=column,
        skips_unreadable=skips_unreadable,
    )


def _content(files: Sequence[InputFile], column: str | None) -> Content:
    """Whether the documents are texts or images. Raises DataError for both."""
    content_of: dict[Content, InputFile] = {}
    for file in files:
        if (content := _content_of_file(file, column)) is not None:
            content_of.setdefault(content, file)
    if len(content_of) > 1:
        raise refused(
            f"texts and images: {' and '.join(str(file.path) for file in content_of.values())}",
            "one data set is made of texts or of images",
            "each by itself",
        )
    found: list[Content] = [*content_of, "text"]
    return found[0]


def _content_of_file(file: InputFile, column: str | None) -> Content | None:
    """None of a table without rows, or whose first row cannot be read (reading it then says so), or without a value."""
    if file.corpus_entry is not None:
        return "images" if is_image_name(file.path) else "text"
    try:
        row = first_row(file)
    except DataError:
        return "text" if isinstance(_first_object(file).get(column or TEXT_COLUMN), str) else None
    value = None if row is None else row.get(column or image_column(row) or TEXT_COLUMN)
    if row is None or (file.kind == PARQUET and value in (None, b"")):
        return None
    is_image = isinstance(value, bytes) and image_format(_image_in(value, file)) is not None
    return "images" if is_image else "text"


def _first_object(file: InputFile) -> dict[str, Any]:
    """The first line of JSONL, whose fields may hold what no row can; empty if it is no object, or of another file."""
    if file.kind != ".jsonl":
        return {}
    with open_source(file.path) as source:
        try:
            return object_of_line(source.readline(MAX_RECORD_BYTES + 1), file.path, 1, 0)
        except DataError:
            return {}


def _image_in(value: bytes, file: InputFile) -> bytes:
    """The encoded image that a value of a table is; of an image record without its header."""
    return (image_of_record(value) or value) if file.kind == RECORDS else value


def first_row(file: InputFile) -> Row | None:
    """The first row of a table, or one that stands for it; None without rows. Raises DataError."""
    if file.kind == PARQUET:
        return example_row(file.path)
    return next(iter(open_file(file.path, file.kind).rows), None)


def has_image_records(file: InputFile) -> bool:
    """Whether the first record of a file is an image behind the header of image records."""
    if file.kind != RECORDS:
        return False
    row = next(iter(open_file(file.path, file.kind).rows), None)
    return row is not None and image_of_record(row[PAYLOAD]) is not None


def _texts(file: InputFile, column: str | None, meter: FileMeter) -> Iterator[str | DataError]:
    """The text of each document of a file, or why it has none. Raises DataError where the file is damaged from there on."""
    if file.corpus_entry is not None:
        yield _file_text(file, *file.corpus_entry)
        return
    if file.kind in (".jsonl", PARQUET):
        column = column or text_field(file)
    for number, row in enumerate(_rows(file, column, meter)):
        yield row if isinstance(row, DataError) else _row_text(row, column or text_column(row, file), file, number)


def _rows(file: InputFile, field: str | None, meter: FileMeter) -> Iterator[Row | DataError]:
    """The rows of a table. Only a field that is named is read, where the format allows: others may hold what no row can."""
    if file.kind == PARQUET:
        yield from parquet_rows(file.path, None if field is None else [field], meter)
        return
    if file.kind != ".jsonl" or field is None:
        yield from meter.rows(open_file(file.path, file.kind, None if field is None else [field]))
        return
    for row in json_rows(file.path, field, meter):
        yield row.error if isinstance(row, NoValue) else row


def _file_text(file: InputFile, corpus: Corpus, entry: SourceFile) -> str | DataError:
    raw = b""
    try:
        if isinstance(found := _file_content(file, corpus, entry), DataError):
            return found
        raw = found
        return read_text(raw, python_source=file.path.suffix == ".py")
    except (OSError, UndecodableError) as error:
        return not_utf8_error(file.path, "", 0, raw) or refused(
            f"{file.path}: {error}", "a text file is UTF-8 and does not change while it is read", "repair or remove it"
        )


def _file_content(file: InputFile, corpus: Corpus, entry: SourceFile) -> bytes | DataError:
    """The bytes of a file that is one document, which is read into memory, so it has the limit of a row. Raises OSError."""
    with corpus.open(entry) as opened:
        raw = opened.read(MAX_RECORD_BYTES + 1)
    if len(raw) <= MAX_RECORD_BYTES:
        return raw
    return refused(
        f"{file.path}, of more than {MAX_RECORD_BYTES:,} bytes",
        f"a document has at most {MAX_RECORD_BYTES:,} bytes, as it is read into memory",
        "smaller files, or a table with a row for each part",
    )


def _images(file: InputFile, column: str | None, meter: FileMeter) -> Iterator[bytes | DataError]:
    """The image of each document of a file, encoded, or why it has none."""
    if file.corpus_entry is not None:
        corpus, entry = file.corpus_entry
        try:
            yield _file_content(file, corpus, entry)
        except OSError as error:
            yield refused(f"{file.path}: {error}", "a file stays as it is meanwhile", "repair or remove it")
        return
    if file.kind == PARQUET:
        column = column or image_column(example_row(file.path)) or "image"
    for number, row in enumerate(_rows(file, column, meter)):
        if isinstance(row, DataError):
            yield row
            continue
        name = column or image_column(row) or "image"
        value: Any = row.get(name)
        if isinstance(value, bytes):
            yield _image_in(value, file)
        else:
            yield _no_value(file, number, name, row, "a document is an encoded image")


def _keys(file: InputFile, field: str, key: Key, meter: FileMeter) -> Iterator[Hashable | NoValue | DataError]:
    """The key of each document of a file, or why it has none."""
    if file.corpus_entry is not None:
        if field != TARGETS:
            raise refused(
                f"field {quoted(field)} of {file.path}, a file that is one document",
                "rows of tables have fields; of a file alone the only field is its folder, its class",
                f"{quoted(TARGETS)}, or a table",
            )
        meter.end()
        yield key(image_class(file.path, file.corpus_entry[1].path))
        return
    yield from row_keys(file.path, file.kind, field, key, meter)


def image_column(row: Row) -> str | None:
    """The field of the image where none is named: the only one of bytes; None if it is not clear."""
    fields = [name for name, value in row.items() if isinstance(value, bytes)]
    return fields[0] if len(fields) == 1 and not isinstance(row.get(TEXT_COLUMN), str) else None


def _row_as_json(row: Row, without: str) -> str:
    """The values of a row in the order of the fields' names; of bytes and of large arrays, which cannot be read, the digest."""
    values = {name: _short(value) for name, value in row.items() if name not in (without, _KEY)}
    return json.dumps(values, sort_keys=True, ensure_ascii=False, default=_as_json)


def _short(value: Any) -> Any:
    """A long list of numbers as an array; any other value itself."""
    if not isinstance(value, list) or len(values := cast("list[Any]", value)) <= _SHOWN_VALUES:
        return value
    try:
        array = np.asarray(values)
    except ValueError:  # of lists of different lengths
        return values
    return array if array.dtype.kind in "biuf" else values


def _as_json(value: Any) -> Any:
    if isinstance(value, bytes):
        content, kind = value, "bytes"
    elif isinstance(value, np.ndarray | np.generic):
        array: NDArray[Any] = np.asarray(value)
        if array.size <= _SHOWN_VALUES:
            return array.tolist()
        content, kind = np.ascontiguousarray(array).tobytes(), f"{array.dtype}{list(array.shape)}"
    else:  # such as a time or a decimal number
        return str(value)
    return f"{kind} of {len(content):,} bytes, BLAKE2b {hashlib.blake2b(content, digest_size=16).hexdigest()}"


def text_field(file: InputFile) -> str:
    """The field of the text where none is named: of Parquet by its columns, of other tables by the first row.

    It is ``text`` without rows, and if the first line of JSONL does not tell it.

    Raises:
        DataError: It is not clear, or the file is damaged.
    """
    try:
        row = first_row(file)
    except DataError:
        if file.kind != ".jsonl":
            raise
        row = _first_object(file) or None  # a damaged line is named where it is read
    return TEXT_COLUMN if row is None else text_column(row, file)


def text_column(row: Row, file: InputFile) -> str:
    """The field of the text where none is named. Raises DataError if it is not clear."""
    if TEXT_COLUMN in row:
        return TEXT_COLUMN
    for kind in (str, bytes):
        fields = [name for name, value in row.items() if isinstance(value, kind)]
        if len(fields) == 1:
            return fields[0]
    raise refused(
        f"{file.path}, whose fields are {listed(map(quoted, row))}",
        "a table has one text column: 'text', or its only string column",
        NAME_COLUMN,
    )


def _row_text(row: Row, name: str, file: InputFile, number: int) -> str | DataError:
    value: Any = row.get(name)
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            return _no_value(file, number, name, row, f"it is UTF-8, and byte {error.start} is not")
    return _no_value(file, number, name, row, "a document is text in UTF-8")


def _no_value(file: InputFile, number: int, name: str, row: Row, rule: str) -> DataError:
    why = describe_value(row[name]) if name in row else "it is missing"
    return refused(
        f"{file.path}: row {number}, field {quoted(name)}: {why}",
        rule,
        "another --column, or the table without that row",
    )


def _with_way_out(error: DataError) -> DataError:
    """The error of a document that can be left out."""
    problems = (
        replace(problem, nearest=f"{problem.nearest}; --on-error skip leaves such documents out")
        for problem in error.problems
    )
    return DataError(*problems)


def _fault(error: DataError) -> str:
    return "; ".join(problem.given for problem in error.problems)
