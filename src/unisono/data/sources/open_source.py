"""Open training data of any format as a data set, by address."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import escape, glob
from itertools import chain
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import xxhash

from unisono.data.combined import subset
from unisono.data.convert.file_kind import TOKENS, beside_target, file_kind, kind_of_name
from unisono.data.convert.formats.table import OtherFields, Row, check_columns
from unisono.data.convert.formats.table import open_source as open_file
from unisono.data.convert.pack.image_listing import IMAGE_SUFFIXES, ImageListing, list_images
from unisono.data.convert.table_files import files_of, open_table, read_formats
from unisono.data.dataset import Batch, Dataset, Ids, PerSampleDataset
from unisono.data.hidden_files import hidden_notice, is_hidden
from unisono.data.image.records import TILES, image_records
from unisono.data.kept_rows import KeptRows, kept_samples, read_kept_rows, require_rows, without_dropped
from unisono.data.mindrecord import MindRecordFile
from unisono.data.options import default_cache_dir
from unisono.data.recordio import RecordDataset, RecordFile, unpack_header
from unisono.data.recordio.remote_file import is_url
from unisono.data.result_files import data_of_results
from unisono.data.sources.arrow_folder import arrow_classes, arrow_files, arrow_rows, is_arrow_folder
from unisono.data.sources.converted import converted, sample_of_row
from unisono.data.sources.remote import local_copies, matching_urls
from unisono.data.tokens.corpus import corpus_at
from unisono.data.tokens.shards import open_tokens
from unisono.data.tokens.windows import TokenWindows
from unisono.errors import DataError
from unisono.sanitize import shorten
from unisono.storage.files import MAX_SHOWN_PATH, look_up
from unisono.storage.limits import MAX_NAMES_BYTES, read_limited

_TABLES: Final = (".csv", ".jsonl", ".parquet", ".tar", ".tar.gz", ".tfrecord", ".tfrecords", "idx")
_LOG: Final = logging.getLogger("unisono.data")
_IN_FOLDERS: Final = tuple(suffix for suffix in read_formats() if suffix not in ("idx", ".bin"))
_CIFAR: Final = ("data_batch", "test_batch")
_ARROW: Final = "arrow"
_KNOWN: Final = (
    ".bin token shards, .rec records, .mindrecord, .csv, .jsonl, .parquet, .tar (webdataset), .tfrecord, idx files of MNIST, a "
    "folder of images or of tables, and a folder of Hugging Face's save_to_disk"
)


def open_source(
    address: str | Path | Sequence[str | Path],
    *,
    columns: Mapping[str, str] | None = None,
    seq_len: int | None = None,
    key: str | None = None,
    classes: bool = True,
    cache_dir: Path | None = None,
    kept_rows: str | Path | None = None,
) -> Dataset:
    """Open training data as a random-access data set; suffix or folder determine the format.

    Strings and bytes become uint8 [bytes], as ``TextTransform`` and ``ImageTransform`` take them, and a list of strings one
    string with a line for each. Floats of tables are float64. Where the format names classes, the data set has them as
    ``class_names``, by column; ``classes`` and ``class_column`` are the first of these. Records of ``.rec`` have ``image`` and
    ``targets``; without MXNet's image header but with side columns they are rows of these columns and the payload, ``data``.
    Without ``columns``, those of JSON lines and Parquet with values that no sample can hold, such as null, are left out:
    ``column_faults`` of the data set has their errors.

    Formats without random access (tables, tar, Arrow) are copied once into the cache folder (``data.sources.converted``). So are
    files behind a URL, except ``.rec``, whose records are read as they are asked for. Errors of the loader name the file and row
    of a sample, rows counted from 1.

    Args:
        address: A file, a glob, a folder (of images, of tables of one format, or Arrow's), or a list of files of one format;
            local, or the URL of any fsspec filesystem.
        columns: The name of each entry of a sample, and the column it comes from:
            ``{"inputs": "image", "targets": "label"}``. By default all columns under their own names.
        seq_len: Tokens of one sample; for token shards, and only there.
        key: The key of encrypted MindRecord files, and only there.
        classes: True: the labels of image records are classes, int64. False: they are as stored, float32, or float32 [labels].
            Columns of other formats are as they are.
        cache_dir: Folder of copies. By default ``unisono`` in the user's cache folder.
        kept_rows: Folder of kept rows, such as ``unisono data clean --index-only`` writes: the samples are these rows alone. Not
            for token shards. By default all rows.

    Raises:
        DataError: Nothing is there, the format is unknown, a column is unknown, an option has no effect on the format, or rows
            are damaged; ``kept_rows`` are those of other files; while reading, a record is damaged.
        ExtraError: The package that reads the format or filesystem is not installed.
    """
    whole_cache = default_cache_dir(os.environ) if cache_dir is None else cache_dir
    paths = source_paths(address, whole_cache)
    if kept_rows is None:
        return _open_paths(paths, columns, seq_len, key, classes, whole_cache)
    kept, files = read_kept_rows(kept_rows), _files_in_order(paths)
    data = _open_paths(paths, columns, seq_len, key, classes, whole_cache, kept)
    samples, total = kept_samples(kept, files)
    require_rows(kept, files, total, len(data))
    return subset(data, samples)


def _open_paths(
    paths: Sequence[str | Path],
    columns: Mapping[str, str] | None,
    seq_len: int | None,
    key: str | None,
    classes: bool,
    whole_cache: Path,
    kept: KeptRows | None = None,
) -> Dataset:
    """All samples of files of one format, or of one folder; the other arguments are those of ``open_source``.

    Args:
        paths: The files, or the folder.
        columns: Entries of a sample.
        seq_len: Tokens of a sample.
        key: Of encrypted files.
        classes: Whether labels are classes.
        whole_cache: Folder of copies.
        kept: Images that it has dropped need not be readable.
    """
    cache = whole_cache / "sources"
    kinds = {_kind(path) for path in paths}
    if len(kinds) != 1:
        raise _unfit(f"files of {len(kinds)} formats: {', '.join(sorted(kinds))}", "files of one format, or a mixture")
    (kind,) = kinds
    for option, value, of in (("seq_len", seq_len, TOKENS), ("key", key, ".mindrecord")):
        if value is not None and kind != of:
            suffix = ".bin" if of == TOKENS else of
            raise _unfit(f"{option} for {paths[0]}", f"leave {option} out: it is for {suffix}")
    if kind == TOKENS and kept is not None:
        raise _unfit(f"kept rows of {paths[0]}", "leave kept_rows out: token shards have no rows")
    if kind == ".rec":
        files = [RecordFile(path, cache_dir=whole_cache) for path in paths]
        if _are_rows(files):
            return _Rows(_RecordRows(files), columns)
        names = _packed_classes(paths)
        data = image_records(files, classes=classes)
        return _Selected(data, columns, {"targets": names} if names else {}, _record_places(files))
    local = [Path(path) for path in paths]
    if kind == TOKENS:
        if seq_len is None or columns is not None:
            raise _unfit(
                f"token shards {paths[0]} with seq_len={seq_len}, columns={columns}", "seq_len=256, no columns"
            )
        return TokenWindows(open_tokens(local), seq_len=seq_len)
    if kind == ".mindrecord":
        # One name opens its whole set.
        return _Rows(_MindRecordRows(MindRecordFile(local[0] if len(local) == 1 else local, key=key)), columns)
    if kind == "folder":
        if len(local) != 1:
            raise _unfit(f"{len(local)} folders of images", "one folder, or a mixture of sources")
        listing = list_images(local[0])
        if listing.hidden:
            _LOG.warning("%s: it has %s", local[0], hidden_notice(listing.hidden))
        if kept is not None:
            left = set(without_dropped(kept, local[0], (bad.path for bad in listing.bad)))
            listing.bad = [bad for bad in listing.bad if bad.path in left]
        return _Rows(_ImageFolder(listing), columns)
    if kind == _ARROW:
        files = [file for folder in local for file in arrow_files(folder)]
        data, _ = converted(files, lambda _: arrow_rows(files), cache)
        return _Selected(data, columns, arrow_classes(local[0]), _row_places(local, len(data)))
    sets = _table_sets(local)
    files = list(chain.from_iterable(sets))

    def rows(others: OtherFields) -> Iterator[Row]:
        return chain.from_iterable(open_table(files[0], others=others).rows for files in sets)

    data, faults = converted(files, rows, cache)
    return _Selected(data, columns, {}, _row_places(files, len(data)), faults)


def source_files(address: str | Path | Sequence[str | Path], cache: Path) -> list[str | Path]:
    """The files and folders at an address, in the order in which ``open_source`` numbers their samples.

    Raises DataError and ExtraError as ``source_paths``.
    """
    return _files_in_order(source_paths(address, cache))


def _files_in_order(paths: Sequence[str | Path]) -> list[str | Path]:
    tables = [path for path in paths if _kind(path) in _TABLES]
    return list(chain.from_iterable(_table_sets(list(map(Path, paths))))) if tables else list(paths)


def _table_sets(paths: Sequence[Path]) -> list[tuple[Path, ...]]:
    """The files of each set: one file of a set stands for the whole set, which several of its files name once."""
    return list(dict.fromkeys(tuple(files_of(path)) for path in paths))


class _RowReader(Protocol):
    """Rows by number. ``fingerprint`` changes with the files' names, sizes or times of change.

    ``class_names`` are the names of the classes by column, of those for which the format has them.
    """

    fingerprint: str
    class_names: dict[str, tuple[str, ...]]

    def __len__(self) -> int: ...
    def rows(self, numbers: list[int]) -> list[Row]: ...
    def location(self, index: int) -> str: ...


class _Rows(PerSampleDataset):
    """The samples of rows."""

    def __init__(self, reader: _RowReader, columns: Mapping[str, str] | None) -> None:
        self._reader, self._columns = reader, None if columns is None else dict(columns)
        if not len(reader):
            raise _unfit("a source without rows", "a source with at least one row")
        self.class_names = reader.class_names
        self.class_column, self.classes = _first_classes(reader.class_names)
        named = f":{reader.class_names}" if reader.class_names else ""
        self.fingerprint = f"{reader.fingerprint}:{self._columns}{named}"
        self.samples(np.zeros(1, np.int64))  # an unknown column is an error here

    def __len__(self) -> int:
        return len(self._reader)

    def samples(self, indices: Ids) -> list[Batch]:
        numbers: list[int] = indices.tolist()
        if numbers and not 0 <= min(numbers) <= max(numbers) < len(self):
            raise IndexError(f"rows are numbered 0..{len(self) - 1}, asked for {min(numbers)}..{max(numbers)}")
        rows = self._reader.rows(numbers)
        found = zip(numbers, rows, strict=True)
        return [sample_of_row(_chosen(row, self._columns, f"row {at}"), at) for at, row in found]

    def location(self, index: int) -> str:
        return self._reader.location(index)


@dataclass(frozen=True, slots=True)
class _Places:
    """Files of samples, the number of samples in each, and how they are counted."""

    files: tuple[str, ...]
    sizes: tuple[int, ...]
    noun: str
    first: int

    def __call__(self, index: int) -> str:
        for file, size in zip(self.files, self.sizes, strict=True):
            if index < size:
                return f"{self.noun} {index + self.first} of {file}"
            index -= size
        raise IndexError(index)


def _row_places(paths: Sequence[Path], count: int) -> _Places:
    """Rows of tables, from 1; how many each of several files has is not known."""
    file = str(paths[0]) if len(paths) == 1 else f"the {len(paths)} files from {paths[0]} to {paths[-1]}"
    return _Places((file,), (count,), "row", 1)


def _record_places(files: Sequence[RecordFile]) -> _Places:
    """Records, from 0 as in ``unisono data cat``."""
    return _Places(tuple(str(file.path) for file in files), tuple(map(len, files)), "record", 0)


class _Selected(PerSampleDataset):
    """The samples of records with entries chosen and renamed."""

    def __init__(
        self,
        base: RecordDataset,
        columns: Mapping[str, str] | None,
        class_names: dict[str, tuple[str, ...]],
        location: _Places,
        faults: Mapping[str, DataError] | None = None,
    ) -> None:
        self.column_faults = dict(faults or {})
        for name in columns.values() if columns is not None else ():
            if name in self.column_faults:
                raise self.column_faults[name]
        self._base, self._columns, self.location = base, None if columns is None else dict(columns), location
        self.class_names = class_names
        self.class_column, self.classes = _first_classes(class_names)
        # the same rows with and without names of their classes are not the same data
        chosen = "" if columns is None else f":{self._columns}"
        named = f":{class_names}" if class_names else ""
        self.fingerprint = f"{base.fingerprint}{chosen}{named}"
        if len(self):
            self.samples(np.zeros(1, np.int64))

    def __len__(self) -> int:
        return len(self._base)

    def samples(self, indices: Ids) -> list[Batch]:
        samples = self._base.samples(indices)
        if self.column_faults and self._columns is None:
            samples = [{name: x for name, x in sample.items() if name not in self.column_faults} for sample in samples]
        found = zip(indices.tolist(), samples, strict=True)
        return [dict(_chosen(sample, self._columns, f"record {at}")) for at, sample in found]


def _first_classes(class_names: dict[str, tuple[str, ...]]) -> tuple[str, tuple[str, ...]]:
    return next(iter(class_names.items()), ("", ()))


class _MindRecordRows:
    def __init__(self, file: MindRecordFile) -> None:
        self._file, self.class_names = file, {}
        self.location = _Places((str(file.paths[0]),), (len(file),), "record", 0)
        self._floats = [n for n, field in file.schema.items() if field.type == "float32" and field.shape is None]
        self.fingerprint = f"mindrecord:{_digest([(path.name, *_stat(path)) for path in file.paths])}"

    def __len__(self) -> int:
        return len(self._file)

    def rows(self, numbers: list[int]) -> list[Row]:
        rows = [self._file.read(number) for number in numbers]
        return [row | {name: np.float32(row[name]) for name in self._floats} for row in rows]


def source_groups(address: str | Path | Sequence[str | Path], cache: Path) -> list[list[str | Path]]:
    """The files and folders at an address as what ``open_source`` opens at a time: files of one format, or one folder of images.

    Raises DataError and ExtraError as ``source_paths``.
    """
    groups: list[list[str | Path]] = []
    last = ""
    for path in source_paths(address, cache):
        kind = _kind(path)
        if kind == last != "folder":
            groups[-1].append(path)
        else:
            groups.append([path])
        last = kind
    return groups


def _packed_classes(paths: Sequence[str | Path]) -> tuple[str, ...]:
    """Names of the classes that ``unisono data pack`` wrote beside local record files; empty without, or if they differ."""
    found: set[tuple[str, ...]] = set()
    for path in map(str, paths):
        beside = beside_target(path, ".classes.txt")
        if beside is None:
            return ()
        found.add(_class_names(beside))
    return found.pop() if len(found) == 1 else ()


def _class_names(file: Path) -> tuple[str, ...]:
    try:
        return tuple(read_limited(file, MAX_NAMES_BYTES).decode().splitlines())
    except (OSError, ValueError) as error:
        raise DataError(
            given=f"{file}: {error}",
            rule="the names of the classes are a small text file beside the records",
            consequence="nothing was opened",
            nearest="the file that unisono data pack wrote, or none: classes are then numbers",
        ) from error


def _are_rows(files: Sequence[RecordFile]) -> bool:
    """Whether records have side columns and no image header, as ``data convert`` writes them."""
    if not all(file.side.keys() - {TILES} for file in files):
        return False
    try:
        unpack_header(next(file.read(0) for file in files if len(file)))
    except StopIteration:
        return False
    except DataError:
        return True
    return False


class _RecordRows:
    """Payloads as ``data``, and the side columns."""

    def __init__(self, files: Sequence[RecordFile]) -> None:
        self._files, self.class_names = files, {}
        self.location = _record_places(files)
        self._starts = np.cumsum([0, *(len(file) for file in files)])
        self.fingerprint = ":".join(["record rows", *(file.fingerprint for file in files)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def rows(self, numbers: list[int]) -> list[Row]:
        return [self._row(number) for number in numbers]

    def _row(self, number: int) -> Row:
        at = int(np.searchsorted(self._starts, number, side="right")) - 1
        file, record = self._files[at], number - int(self._starts[at])
        return {"data": file.read(record), **{name: np.asarray(column[record]) for name, column in file.side.items()}}


class _ImageFolder:
    """Encoded images and the numbers of their classes, which are sorted by name."""

    def __init__(self, listing: ImageListing) -> None:
        if listing.bad:
            raise _unfit(f"{listing.root}: {listing.bad[0].path}: {listing.bad[0].reason}", "remove or repair it")
        self._listing = listing
        self.class_names = {"targets": tuple(listing.classes)}
        # an image that moves to another folder, and a folder of another name, are other data
        images = [(image.name, image.labels, _stat(listing.root / image.name)) for image in listing.samples]
        self.fingerprint = f"images:{_digest([listing.classes, images])}"

    def __len__(self) -> int:
        return len(self._listing.samples)

    def rows(self, numbers: list[int]) -> list[Row]:
        images = [self._listing.samples[number] for number in numbers]
        return [{"image": self._content(image.name), "targets": int(image.labels[0])} for image in images]

    def location(self, index: int) -> str:
        return str(self._listing.root / self._listing.samples[index].name)

    def _content(self, name: str) -> bytes:
        with open_file(self._listing.root / name) as file:
            return file.read()


def source_paths(address: str | Path | Sequence[str | Path], cache: Path) -> list[str | Path]:
    """The files and folders at an address: a glob is expanded, a folder of tables too, and files behind a URL, except ``.rec``,
    are local copies. In place of a folder of results of a data command is its ``data/``.

    Raises:
        DataError: Nothing is there, or a folder of results has no ``data/``.
        ExtraError: The package of the filesystem is not installed.
    """
    given = [address] if isinstance(address, str | Path) else list(address)
    paths: list[str | Path] = []
    for part in given:
        fault = ""
        if is_url(part):
            url = str(part)
            matches: list[str | Path] = [
                *(matching_urls(url) if url.endswith(".rec") else local_copies(url, cache / "sources"))
            ]
        else:
            path, fault = look_up(part)
            matches = [path] if not fault and path.exists() else [] if "\0" in str(path) else [*sorted(glob(str(path)))]
        matches = [file for match in matches for file in ([match] if is_url(match) else _inputs_in(Path(match)))]
        if not matches and fault:
            raise _no_address(f"{shorten(str(part), MAX_SHOWN_PATH)}: {fault}", "an address that exists")
        if not matches:
            raise _missing(part)
        paths += matches
    if not paths:
        raise _unfit("a list of no files", "at least one file")
    return paths


def _inputs_in(path: Path) -> list[Path]:
    folder = data_of_results(path)
    return _tables_in(folder) or [folder]


def _tables_in(path: Path) -> list[Path]:
    """The tables of a folder without images and its folders, in order; none of any other path."""
    if not path.is_dir() or is_arrow_folder(path):
        return []
    has_tables = False
    for name in _visible_names(path):
        if Path(name).suffix.lower() in IMAGE_SUFFIXES:
            return []
        has_tables = has_tables or kind_of_name(Path(name)) in _IN_FOLDERS
    if not has_tables:
        return []
    return [path / file.path for file in corpus_at(path).files if kind_of_name(Path(file.path)) in _IN_FOLDERS]


def _visible_names(folder: Path) -> Iterator[str]:
    for _, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not is_hidden(name)]
        yield from (name for name in files if not is_hidden(name))


def _missing(address: str | Path) -> DataError:
    nearest = "an address that exists"
    if not is_url(address):
        path, _ = look_up(address)
        # as ``unisono data pack texts name.bin`` writes them: none of the shards has the name itself
        if glob(f"{escape(str(path.with_suffix('')))}-[0-9]*{escape(path.suffix)}"):
            nearest = f"{path.with_name(f'{path.stem}-*{path.suffix}')}, the shards of that name"
    return _no_address(f"{address}, which does not exist", nearest)


def _no_address(given: str, nearest: str) -> DataError:
    return DataError(
        given=given,
        rule="an address is that of a file or folder, or a glob that matches some",
        consequence="nothing was opened",
        nearest=nearest,
    )


def _kind(path: str | Path) -> str:
    if is_url(path):
        return ".rec"
    if Path(path).is_dir():
        return _ARROW if is_arrow_folder(Path(path)) else "folder"
    kind = kind_of_name(Path(path))
    if kind == ".bin" or kind in _TABLES:
        kind = file_kind(Path(path))
    if kind == ".bin":  # without the sidecar of token shards
        return kind if Path(path).name.startswith(_CIFAR) else TOKENS
    if kind not in (TOKENS, ".rec", ".mindrecord", *_TABLES):
        raise _unfit(f"{path}, whose suffix is {kind!r}", _KNOWN)
    return kind


def _chosen(row: Mapping[str, Any], columns: Mapping[str, str] | None, where: str) -> Mapping[str, Any]:
    if columns is None:
        return row
    check_columns(list(columns.values()), row, where)
    return {name: row[column] for name, column in columns.items()}


def _stat(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _digest(facts: Any) -> str:
    return xxhash.xxh3_128_hexdigest(repr(facts).encode())


def _unfit(given: str, nearest: str) -> DataError:
    return DataError(
        given=given,
        rule=f"training data are {_KNOWN}",
        consequence="nothing was opened",
        nearest=nearest,
    )
