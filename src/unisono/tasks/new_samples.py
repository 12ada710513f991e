"""New samples without targets, read once from front to back: what a trained model predicts from.

    a folder of images, an image      a sample for each image, in the order of their paths; folders need not be classes
    .rec, .mindrecord                 a sample for each record, counted from 0
    tables, Arrow folders             a sample for each row, counted from 1
    token shards                      a sample for each window of ``data.seq_len`` tokens, counted from 0 (language models)
    any other file, for tasks of text a sample for each line, counted from 1; of a language model one for the file

Rows and records are neither copied nor kept: memory is bounded by one of them, or one file of text, and the names of images.
A sample is read when it is asked for, so that a rank reads its own ones alone, and one that cannot be read is an error of that
sample. A table that is damaged as a whole, such as a CSV file with a line too short, cannot be read on from there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from unisono.data.convert.file_kind import TOKENS, file_kind
from unisono.data.convert.formats.jsonl import lines_of, object_of_line, row_of_line
from unisono.data.convert.formats.table import OtherFields, Row, open_source, unreadable_error
from unisono.data.convert.pack.image_listing import IMAGE_SUFFIXES, image_files
from unisono.data.convert.table_files import files_of, open_file
from unisono.data.dataset import Batch, Dataset, read_samples
from unisono.data.mindrecord import MindRecordFile
from unisono.data.options import DataOptions
from unisono.data.recordio.remote_file import is_url
from unisono.data.sources import open_source as open_data
from unisono.data.sources import source_paths
from unisono.data.sources.arrow_folder import arrow_files, arrow_rows, is_arrow_folder
from unisono.data.sources.converted import sample_of_row
from unisono.data.tokens.corpus import Corpus, SourceFile, UndecodableError, corpus_at, read_text, unreadable_file_error
from unisono.data.tokens.tokenizer import Tokenizer
from unisono.errors import DataError
from unisono.sanitize import listed, quoted
from unisono.storage.limits import MAX_RECORD_BYTES
from unisono.tasks.data import check_same_vocabulary, held_out_windows
from unisono.tasks.encoders import input_columns
from unisono.tasks.options import LANGUAGE_MODELS, TaskOptions
from unisono.tasks.sources import INPUT_NAMES, cache_folder, token_shards

_TEXTS: Final = (*LANGUAGE_MODELS, "text", "sequence_labelling")


@dataclass(frozen=True, kw_only=True, slots=True)
class NewSample:
    """A sample that has not been read yet.

    Attributes:
        file: Where it is from.
        row: Its number there, as the module says; None of a whole file.
        read: Reads it. Raises DataError or OSError.
    """

    file: str
    row: int | None
    read: Callable[[], Batch]

    @property
    def place(self) -> str:
        """Where it is, for an error."""
        return self.file if self.row is None else f"{self.file}:{self.row}"


def new_samples(given: str, task: TaskOptions, data: DataOptions, tokenizer: Tokenizer | None) -> Iterator[NewSample]:
    """The samples of files or folders, in order.

    Args:
        given: A file, a folder, a glob or an address.
        task: The resolved task of the run.
        data: Of the run: lengths, the column of texts, and where copies of remote files are kept.
        tokenizer: Of the run; None for images and tables.

    Raises:
        DataError: Nothing is there, or a file is of no kind that the task reads; while iterating, a table is damaged.
    """
    if task.kind == "language_model" and (shards := token_shards(given, data)) is not None:
        if tokenizer is not None and shards.vocab_size > tokenizer.vocab_size:
            check_same_vocabulary(shards, tokenizer)
        windows = held_out_windows(data, shards, masked=False)
        return _numbered(given, windows, partial(_sample_at, windows))
    seen: set[Path] = set()
    paths = source_paths(given, cache_folder(data))
    return (sample for path in paths for sample in _samples_of(path, task, data, seen))


def line_samples(lines: Iterable[bytes], file: str, task: TaskOptions) -> Iterator[NewSample]:
    """A sample for each line: a text, an image's path, or, where a sample has several columns, a JSON object of them."""
    columns = input_columns(task)
    reads_objects = task.kind == "table" or len(columns) > 1
    offset = 0
    for number, line in enumerate(lines, 1):
        if reads_objects:
            read = partial(_of_object, line, Path(file), number, offset, partial(_columns, task, "", {}))
        elif task.kind == "image":
            read = partial(_of_path_line, line)
        else:
            read = partial(_of_text_line, line, f"{file}: line {number}", *columns or ("text",))
        yield NewSample(file=file, row=number, read=read)
        offset += len(line)


def _samples_of(path: str | Path, task: TaskOptions, data: DataOptions, seen: set[Path]) -> Iterator[NewSample]:
    """The samples of one file or folder; ``seen`` are the files of sets that were read already."""
    kind = _kind(path, task)
    others: OtherFields = {}
    columns_of = partial(_columns, task, data.text_column, others)
    if kind == "image":
        yield NewSample(file=str(path), row=None, read=partial(_image_at, Path(path)))
    elif kind == "images":
        for name in image_files(Path(path)):
            yield NewSample(file=str(name), row=None, read=partial(_image_at, name))
    elif kind == "text":
        yield from _texts(Path(path), task)
    elif kind == "arrow":
        yield from _rows(str(path), arrow_rows(arrow_files(Path(path))), columns_of)
    elif kind in (".rec", ".mindrecord"):
        if kind == ".mindrecord" and path in seen:
            return  # the first file of a set has opened all of it
        seen.update(MindRecordFile(path).paths if kind == ".mindrecord" else [])
        records = open_data(path, classes=False, cache_dir=cache_folder(data))
        yield from _numbered(str(path), records, partial(_of_record, records, str(path), columns_of))
    else:
        for file in files_of(Path(path)):
            if file in seen:
                continue
            seen.add(file)
            if kind == ".jsonl":  # a line that is no object is an error of that line alone
                for line, number, offset in lines_of(file):
                    read = partial(_of_object, line, file, number, offset, columns_of)
                    yield NewSample(file=str(file), row=number, read=read)
            else:
                yield from _rows(str(file), open_file(file, kind, others=others).rows, columns_of)


def _kind(path: str | Path, task: TaskOptions) -> str:
    """A kind of ``file_kind``, or image, images, text or arrow. Raises DataError for what the task does not read."""
    if is_url(path):
        return ".rec"
    path = Path(path)
    if path.is_dir():
        if is_arrow_folder(path):
            return "arrow"
        found = "images" if task.kind == "image" else "text" if task.kind in _TEXTS else ""
    elif task.kind == "image" and path.suffix.lower() in IMAGE_SUFFIXES:
        return "image"
    else:
        try:
            found = file_kind(path)
        except DataError:
            if task.kind not in _TEXTS:
                raise
            return "text"
    if found in ("", TOKENS):
        raise unreadable_error(
            f"{path}, {'token shards' if found else 'a folder without tables'}, for task.kind {task.kind!r}",
            "a model predicts from data of the kinds that it learns from",
            "a table or a file of records" if task.kind not in _TEXTS else "a table, or a file of text",
        )
    return found


# The columns of the entries of a sample, by the columns that are there, and where
_ColumnsOf = Callable[[Collection[str], str], dict[str, str]]


def _columns(
    task: TaskOptions, text_column: str, others: OtherFields, fields: Collection[str], where: str
) -> dict[str, str]:
    """The column of each entry that the task reads.

    Args:
        task: The task.
        text_column: Column of texts of a language model; empty if that is not said.
        others: Fields with values that no row can hold, which are left out of their rows.
        fields: The columns that are there.
        where: The sample, for an error.

    Raises:
        DataError: The sample lacks a column.
    """
    columns = input_columns(task)
    if task.kind in LANGUAGE_MODELS and not columns:
        names = (text_column,) if text_column else INPUT_NAMES[task.kind]
        columns = {"text": next((name for name in names if name in fields), names[0])}
    if task.kind == "image" and columns["image"] not in fields and "image" in fields:
        columns = {"image": "image"}  # as files of records call it
    for name in columns.values():
        if name in others and name not in fields:
            problem = others[name].error.problems[0]
            raise unreadable_error(
                f"column {quoted(name)} of {where}: {others[name].type}", problem.rule, problem.nearest
            )
    missing = next((name for name in columns.values() if name not in fields), None)
    if missing is not None:
        raise unreadable_error(
            f"{where} has no column {quoted(missing)}",
            f"a row has each column that the model reads: {listed(dict.fromkeys(columns.values()), 300)}",
            f"add the field {quoted(missing)} to the row, which has {listed(sorted(fields), 300) or 'none'}",
        )
    return columns


def _rows(file: str, rows: Iterable[Row], columns_of: _ColumnsOf) -> Iterator[NewSample]:
    for number, row in enumerate(rows, 1):
        yield NewSample(file=file, row=number, read=partial(_of_row, row, number, file, columns_of))


def _of_row(row: Row, number: int, file: str, columns_of: _ColumnsOf) -> Batch:
    columns = columns_of(row, f"row {number} of {file}")
    return sample_of_row({entry: row[column] for entry, column in columns.items()}, number)


def _of_object(line: bytes, file: Path, number: int, offset: int, columns_of: _ColumnsOf) -> Batch:
    fields = object_of_line(line, file, number, offset)
    columns = columns_of(fields, f"line {number} of {file}")
    # values of other columns may be of any kind
    row = row_of_line(line, file, number, offset, list(dict.fromkeys(columns.values())))
    return sample_of_row({entry: row[column] for entry, column in columns.items()}, number)


def _of_record(records: Dataset, file: str, columns_of: _ColumnsOf, at: int) -> Batch:
    sample = _sample_at(records, at)
    return {entry: sample[column] for entry, column in columns_of(sample, f"record {at} of {file}").items()}


def _sample_at(samples: Dataset, at: int) -> Batch:
    return read_samples(samples, np.array([at]))[0]


def _numbered(file: str, samples: Dataset, read: Callable[[int], Batch]) -> Iterator[NewSample]:
    return (NewSample(file=file, row=at, read=partial(read, at)) for at in range(len(samples)))


def _texts(path: Path, task: TaskOptions) -> Iterator[NewSample]:
    """The texts of a file or folder: for a language model each file, for other tasks each line of each file."""
    corpus = corpus_at(path)
    for file in corpus.files:
        name = str(corpus.root / file.path)
        if task.kind == "language_model":
            yield NewSample(file=name, row=None, read=partial(_whole_text, corpus, file, name))
            continue
        with _opened(corpus, file, name) as opened:
            yield from line_samples(iter(partial(opened.readline, MAX_RECORD_BYTES), b""), name, task)


def _opened(corpus: Corpus, file: SourceFile, name: str) -> BinaryIO:
    try:
        return corpus.open(file)
    except OSError as error:
        raise unreadable_file_error(Path(name), error.strerror) from error


def _whole_text(corpus: Corpus, file: SourceFile, name: str) -> Batch:
    with _opened(corpus, file, name) as opened:
        return _of_text(opened.read(), name, "text", is_python=name.endswith(".py"))


def _of_path_line(line: bytes) -> Batch:
    path = os.fsdecode(line.rstrip(b"\r\n"))
    if not path.strip():
        raise unreadable_error("an empty line", "each line is the path of an image", "a path in this line")
    return _image_at(Path(path))


def _of_text_line(line: bytes, place: str, entry: str) -> Batch:
    return _of_text(line.rstrip(b"\r\n"), place, entry, is_python=False)


def _of_text(raw: bytes, place: str, entry: str, *, is_python: bool) -> Batch:
    try:
        text = read_text(raw, python_source=is_python)
    except UndecodableError as error:
        raise unreadable_error(
            f"{place}: {error}", "text is UTF-8 (Python source: the encoding it declares)", "the text in UTF-8"
        ) from error
    return {entry: np.frombuffer(text.encode(), np.uint8)}


def _image_at(path: Path) -> Batch:
    with open_source(path) as file:
        return {"image": np.frombuffer(file.read(MAX_RECORD_BYTES), np.uint8)}
