"""The files of a data set: given as files, folders, or both, each by the name that it has in the results."""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unisono.data.convert.file_kind import INDEX_SUFFIXES, kind_of_name, targets_of
from unisono.data.convert.pack.image_listing import IMAGE_SUFFIXES
from unisono.data.convert.table_files import files_of, read_formats
from unisono.data.result_files import data_of_results, require_whole_results
from unisono.data.sources.arrow_folder import is_arrow_folder
from unisono.data.tokens.corpus import Corpus, SourceFile, corpus_at
from unisono.quality.refused import refused
from unisono.sanitize import listed, quoted
from unisono.storage.files import MAX_SHOWN_PATH, look_up

WHOLE_FILE: Final = "file"
PARQUET: Final = ".parquet"
_OTHER_TABLES: Final = {  # which are read as text, and how their rows are read
    ".tsv": "write it as .csv, with commas between the columns",
    ".tab": "write it as .csv, with commas between the columns",
    ".json": "write it as .jsonl, with one object on each line",
    ".ndjson": "name it .jsonl",
}
_UNPACK: Final = {  # of compressed files, and the command that writes their content
    ".gz": "gunzip -k",
    ".tgz": "gunzip -k",
    ".bz2": "bunzip2 -k",
    ".xz": "unxz -k",
    ".zst": "unzstd",
    ".lz4": "lz4 -dk",
    ".zip": "unzip",
    ".7z": "7z x",
}
_BINARY: Final = frozenset(
    {
        ".arrow",
        ".avro",
        ".feather",
        ".h5",
        ".hdf5",
        ".npy",
        ".npz",
        ".orc",
        ".pdf",
        ".pkl",
        ".pt",
        ".safetensors",
        ".xls",
    }
    | {".docx", ".xlsx"}
)
_BESIDE_TABLES: Final = (*INDEX_SUFFIXES, ".lst", ".schema", ".classes.txt")  # which have no rows
_STREAM: Final = re.compile(r"/dev/(stdin|fd/\d+)|/proc/[^/]+/fd/\d+")
_LOG: Final = logging.getLogger("unisono")
_READ: Final = "a file is read as it is: a table (.jsonl, .csv, .parquet, …), an image, or plain text"
_KINDS: Final = tuple(suffix for suffix in read_formats() if suffix not in ("idx", ".bin"))


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """A file whose documents are read: a table of rows, or a text or an image that is one document.

    Attributes:
        path: The file.
        name: Its path relative to the folder that was given; of several paths, relative to the folder that all lie in.
        size: In bytes.
        mtime_ns: Time of its last change.
        corpus_entry: Of a file that is one document its folder and its entry there; None of a table.
    """

    path: Path
    name: str
    size: int
    mtime_ns: int
    corpus_entry: tuple[Corpus, SourceFile] | None = None

    @property
    def kind(self) -> str:
        """The suffix that names the format of a table, or ``file``."""
        return WHOLE_FILE if self.corpus_entry is not None else kind_of_name(self.path)


def list_files(paths: Sequence[Path]) -> tuple[tuple[InputFile, ...], tuple[int, ...]]:
    """The files of a data set, and their number for each of ``paths``.

    Args:
        paths: Tables (of which one file of a set stands for the set), text files, images, or folders. Of a folder the
            tables are taken, or the images; one without both is a folder of text files. Of one of results its ``data/`` is read.
            A compressed or binary file is an error, and left out of a folder with a warning.

    Raises:
        DataError: A path is not there, or a folder has no files, or it has results without ``data/``, or without some of the
            files that were written there.
    """
    if not paths:
        raise refused(
            "no input",
            "documents are in tables, in files of text or images, or in folders of these",
            "a file or folder",
        )
    common = os.path.commonpath([_absolute(os.path.expanduser(path)).parent for path in paths])
    files: list[InputFile] = []
    files_of_path: list[int] = []
    places: list[str] = []
    for path in paths:
        found, fault = look_up(path)
        if fault or not os.path.exists(found):
            raise refused(
                f"{quoted(str(path), MAX_SHOWN_PATH)}: {fault or 'it is not there'}",
                "documents are in tables, in files of text or images, or in folders of these",
                "its path",
            )
        if _STREAM.fullmatch(str(_absolute(found))):
            raise refused(f"{path}, a stream", "the name of a file says what it holds", "the path of the file")
        if not os.path.isfile(found) and not os.path.isdir(found):
            raise refused(
                f"{path}, which is neither a folder nor a regular file",
                "documents are in tables, in files of text or images, or in folders of these",
                "a file with its content",
            )
        found = data_of_results(found)
        within = f"{_absolute(found).relative_to(common)}/" if len(paths) > 1 else ""
        of_path = list(_in_folder(found, within) if os.path.isdir(found) else _of_file(found, common))
        files += of_path
        files_of_path.append(len(of_path))
        places += _places(found, of_path)
    counts = Counter(places)
    if twice := sorted({file.name for file, place in zip(files, places, strict=True) if counts[place] > 1}):
        raise refused(
            f"files that are given twice: {listed(map(quoted, twice))}",
            "each document is read once",
            "each path once; of a folder not also the files in it",
        )
    require_whole_results(paths)
    if other := [file for file in files if file.corpus_entry is not None and file.path.suffix.lower() in _OTHER_TABLES]:
        more = f", and {len(other) - 1:,} files like it" if len(other) > 1 else ""
        _LOG.warning(
            "%s is read as one document of text%s; tables are .jsonl, .csv, .parquet: to read its rows, %s",
            other[0].name,
            more,
            _OTHER_TABLES[other[0].path.suffix.lower()],
        )
    return tuple(files), tuple(files_of_path)


def _in_folder(folder: Path, within: str) -> Iterator[InputFile]:
    if is_arrow_folder(folder):
        raise refused(
            f"{folder}, a folder of Hugging Face's datasets",
            "documents are in tables, in files of text or images, or in folders of these",
            "a table of it: in Python datasets.load_from_disk(FOLDER).to_parquet('NAME.parquet'), of each split by itself",
        )
    corpus = corpus_at(folder)
    tables = [file for file in corpus.files if kind_of_name(folder / file.path) in _KINDS]
    images = [file for file in corpus.files if is_image_name(file.path)]
    if tables and images:
        raise refused(
            f"{folder}, which has {len(tables):,} tables and {len(images):,} images",
            "a folder holds tables, or images, or files of text",
            f"the tables by their paths, as {folder / tables[0].path}, or a folder that has only images",
        )
    texts = [file for file in corpus.files if not _is_no_text(file.path)]
    if not tables and not images and len(texts) < len(corpus.files):
        others = [file.path for file in corpus.files if _is_no_text(file.path)]
        notice = f"{len(others):,} compressed or binary file(s), which are left out: {listed(others, 100)}"
        if not texts:
            raise refused(f"{folder}, which has only {notice}", _READ, _in_place_of(folder / others[0]))
        _LOG.warning("%s: it has %s", folder, notice)
    chosen = tables or images or texts
    read = {file.path for file in chosen}
    stems = {stem for file in tables for stem in _stems(file.path)}
    left_out = [file.path for file in corpus.files if file.path not in read and not _is_beside(file.path, stems)]
    if left_out and chosen is not texts:
        kind = "tables" if tables else "images"
        _LOG.warning(
            "%s: %d files that are no %s are left out, such as %s", folder, len(left_out), kind, quoted(left_out[0])
        )
    for file in chosen:
        yield _input_file(folder / file.path, within + file.path, file, None if tables else corpus)


def _stems(table: str) -> set[str]:
    """What the names of files begin with that belong to a table, such as its index: its name, also without the suffix."""
    targets, kind = targets_of(table), kind_of_name(Path(table))
    return {*targets, *(name[: -len(kind)] for name in targets if name.lower().endswith(kind))}


def _is_beside(name: str, stems: set[str]) -> bool:
    return any(name.endswith(suffix) and name.removesuffix(suffix) in stems for suffix in _BESIDE_TABLES)


def _places(path: Path, files: Sequence[InputFile]) -> Iterator[str]:
    """Where the files lie that were found at ``path``, once the links of that are followed: a folder may have two names."""
    if not os.path.isdir(path):
        return (os.path.realpath(file.path) for file in files)
    folder = os.path.realpath(path)
    return (os.path.join(folder, file.path.relative_to(path)) for file in files)


def _of_file(path: Path, common: str) -> Iterator[InputFile]:
    is_table = kind_of_name(path) in _KINDS
    if not is_table and _is_no_text(path):
        kind = "compressed" if path.suffix.lower() in _UNPACK else "binary"
        raise refused(f"{path}, a {kind} file", _READ, _in_place_of(path))
    for file in files_of(path) if is_table else [path]:
        corpus = corpus_at(file)
        yield _input_file(file, str(_absolute(file).relative_to(common)), corpus.files[0], None if is_table else corpus)


def _is_no_text(path: str | Path) -> bool:
    suffix = Path(path).suffix.lower()
    return suffix in _UNPACK or suffix in _BINARY


def _in_place_of(path: Path) -> str:
    """What is read in place of a compressed or binary file."""
    command = _UNPACK.get(path.suffix.lower())
    return (
        f"{command} {shlex.quote(str(path))}"
        if command
        else "its rows as .jsonl, .csv or .parquet, or its text as .txt"
    )


def is_image_name(name: str | Path) -> bool:
    """Whether a file is an image by its suffix."""
    return Path(name).suffix.lower() in IMAGE_SUFFIXES


def _absolute(path: str | Path) -> Path:
    """Without ``..``, which would lead out of the folder of the results."""
    return Path(os.path.abspath(path))


def _input_file(path: Path, name: str, entry: SourceFile, corpus: Corpus | None) -> InputFile:
    if kind_of_name(path) == ".mindrecord" != path.suffix.lower():
        raise refused(
            f"{path}, one of a set of MindRecord files",
            "such a set is read as a whole",
            "unisono data convert, to one file",
        )
    corpus_entry = None if corpus is None else (corpus, entry)
    return InputFile(path=path, name=name, size=entry.size, mtime_ns=entry.mtime_ns, corpus_entry=corpus_entry)
