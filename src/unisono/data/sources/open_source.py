"""Open token shards, RecordIO image records, MindRecord, JSONL or a folder of images as a data set, by address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from glob import glob
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, Protocol, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from unisono.data.convert.file_kind import kind_of_name
from unisono.data.convert.formats.jsonl import row_of_line
from unisono.data.convert.formats.table import Row, check_columns
from unisono.data.convert.formats.table import open_source as open_file
from unisono.data.convert.pack.image_listing import ImageListing, list_images
from unisono.data.dataset import Batch, Dataset, Ids, PerSampleDataset, check_sample
from unisono.data.image.records import image_records
from unisono.data.mindrecord import MindRecordFile
from unisono.data.recordio import RecordDataset
from unisono.data.recordio.remote_file import is_url
from unisono.data.tokens.shards import open_tokens
from unisono.data.tokens.windows import TokenWindows
from unisono.errors import DataError

_KNOWN: Final = ".bin token shards, .rec image records, .mindrecord, .jsonl and a folder of images"


def open_source(
    address: str | Path | Sequence[str | Path],
    *,
    columns: Mapping[str, str] | None = None,
    seq_len: int | None = None,
    key: str | None = None,
) -> Dataset:
    """Open training data as a random-access data set; suffix or folder determine the format.

    Strings and bytes become uint8 [bytes], as ``TextTransform`` and ``ImageTransform`` take them, and a list of strings one
    string with a line for each. Where the format names classes, the data set has them as ``classes``, and their column as
    ``class_column``.

    Args:
        address: A file, a glob, a folder of images with a folder per class, or a list of files of one format. ``.rec``
            files may be behind a URL (``s3://``, any fsspec filesystem).
        columns: The name of each entry of a sample, and the column it comes from:
            ``{"inputs": "image", "targets": "label"}``. By default all columns under their own names.
        seq_len: Tokens of one sample; for token shards, and only there.
        key: The key of encrypted MindRecord files, and only there.

    Raises:
        DataError: Nothing is there, the format is unknown or cannot be read behind a URL, a column is unknown, or an
            option has no effect on the format; while reading, a record is damaged.
    """
    paths = _paths(address)
    kinds = {_kind(path) for path in paths}
    if len(kinds) != 1:
        raise _unfit(f"files of {len(kinds)} formats: {', '.join(sorted(kinds))}", "files of one format, or a mixture")
    (kind,) = kinds
    for option, value, of in (("seq_len", seq_len, ".bin"), ("key", key, ".mindrecord")):
        if value is not None and kind != of:
            raise _unfit(f"{option} for {paths[0]}", f"leave {option} out: it is for {of}")
    if kind == ".bin":
        if seq_len is None or columns is not None:
            raise _unfit(
                f"token shards {paths[0]} with seq_len={seq_len}, columns={columns}", "seq_len=256, no columns"
            )
        return TokenWindows(open_tokens([Path(path) for path in paths]), seq_len=seq_len)
    if kind == ".rec":
        records = image_records(paths)
        return records if columns is None else _Selected(records, columns)
    if kind == ".mindrecord":
        local = [Path(path) for path in paths]
        # One name opens its whole set.
        return _Rows(_MindRecordRows(MindRecordFile(local[0] if len(local) == 1 else local, key=key)), columns)
    if kind == ".jsonl":
        return _Rows(_JsonLines([Path(path) for path in paths]), columns)
    if len(paths) != 1:
        raise _unfit(f"{len(paths)} folders of images", "one folder, or a mixture of sources")
    return _Rows(_ImageFolder(list_images(Path(paths[0]))), columns)


class _RowReader(Protocol):
    """Rows by number. ``fingerprint`` changes with the files' names, sizes or times of change.

    ``classes`` are the names of the classes of the column ``class_column``, if the format has them.
    """

    fingerprint: str
    classes: tuple[str, ...]
    class_column: str

    def __len__(self) -> int: ...
    def rows(self, numbers: list[int]) -> list[Row]: ...


class _Rows(PerSampleDataset):
    """The samples of rows."""

    def __init__(self, reader: _RowReader, columns: Mapping[str, str] | None) -> None:
        self._reader, self._columns = reader, None if columns is None else dict(columns)
        if not len(reader):
            raise _unfit("a source without rows", "a source with at least one row")
        self.classes, self.class_column = reader.classes, reader.class_column
        self.fingerprint = f"{reader.fingerprint}:{self._columns}"
        self.samples(np.zeros(1, np.int64))  # an unknown column is an error here

    def __len__(self) -> int:
        return len(self._reader)

    def samples(self, indices: Ids) -> list[Batch]:
        numbers: list[int] = indices.tolist()
        if numbers and not 0 <= min(numbers) <= max(numbers) < len(self):
            raise IndexError(f"rows are numbered 0..{len(self) - 1}, asked for {min(numbers)}..{max(numbers)}")
        rows = self._reader.rows(numbers)
        return [_sample(row, self._columns, f"row {at}") for at, row in zip(numbers, rows, strict=True)]


class _Selected(PerSampleDataset):
    """The samples of image records with entries chosen and renamed."""

    def __init__(self, base: RecordDataset, columns: Mapping[str, str]) -> None:
        self._base, self._columns = base, dict(columns)
        self.fingerprint = f"{base.fingerprint}:{self._columns}"
        if len(self):
            self.samples(np.zeros(1, np.int64))

    def __len__(self) -> int:
        return len(self._base)

    def samples(self, indices: Ids) -> list[Batch]:
        found = zip(indices.tolist(), self._base.samples(indices), strict=True)
        return [_sample(sample, self._columns, f"record {at}") for at, sample in found]


class _MindRecordRows:
    classes, class_column = (), ""

    def __init__(self, file: MindRecordFile) -> None:
        self._file = file
        self.fingerprint = _stamp("mindrecord", file.paths)

    def __len__(self) -> int:
        return len(self._file)

    def rows(self, numbers: list[int]) -> list[Row]:
        return [self._file.read(number) for number in numbers]


class _JsonLines:
    """Lines by number, from their offsets, found in one pass over the files: 8 bytes of memory per line."""

    classes, class_column = (), ""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self._offsets = [_line_offsets(path) for path in paths]
        self._starts = np.array([0, *accumulate(len(offsets) - 1 for offsets in self._offsets)])
        self.fingerprint = _stamp("jsonl", paths)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def rows(self, numbers: list[int]) -> list[Row]:
        rows: dict[int, Row] = {}
        places = np.searchsorted(self._starts, numbers, side="right") - 1
        for place in np.unique(places).tolist():
            with open_file(self._paths[place]) as file:
                for number in sorted({n for n, p in zip(numbers, places.tolist(), strict=True) if p == place}):
                    line = number - int(self._starts[place])
                    begin, end = self._offsets[place][line : line + 2].tolist()
                    file.seek(begin)
                    rows[number] = row_of_line(file.read(end - begin), self._paths[place], line + 1, begin)
        return [rows[number] for number in numbers]


class _ImageFolder:
    """Encoded images and the numbers of their classes, which are sorted by name."""

    class_column = "targets"

    def __init__(self, listing: ImageListing) -> None:
        if listing.bad:
            raise _unfit(f"{listing.root}: {listing.bad[0].path}: {listing.bad[0].reason}", "remove or repair it")
        self._listing = listing
        self.classes = tuple(listing.classes)
        self.fingerprint = _stamp("images", [listing.root / image.name for image in listing.samples])

    def __len__(self) -> int:
        return len(self._listing.samples)

    def rows(self, numbers: list[int]) -> list[Row]:
        images = [self._listing.samples[number] for number in numbers]
        return [{"image": self._content(image.name), "targets": int(image.labels[0])} for image in images]

    def _content(self, name: str) -> bytes:
        with open_file(self._listing.root / name) as file:
            return file.read()


def _paths(address: str | Path | Sequence[str | Path]) -> list[str | Path]:
    given = [address] if isinstance(address, str | Path) else list(address)
    paths: list[str | Path] = []
    for part in given:
        matches = [part] if is_url(part) or Path(part).exists() else sorted(glob(str(part)))
        if not matches:
            raise _unfit(f"{part}, which does not exist", "the path of a file or folder that exists")
        paths += matches
    if not paths:
        raise _unfit("a list of no files", "at least one file")
    return paths


def _kind(path: str | Path) -> str:
    if is_url(path):
        if not str(path).endswith(".rec"):
            raise _unfit(f"{path}", "a .rec file, or a local copy: only .rec is read behind a URL")
        return ".rec"
    kind = "folder" if Path(path).is_dir() else kind_of_name(Path(path))
    if kind not in (".bin", ".rec", ".mindrecord", ".jsonl", "folder"):
        raise _unfit(f"{path}, whose suffix is {kind!r}", _KNOWN)
    return kind


def _sample(row: Row, columns: Mapping[str, str] | None, where: str) -> Batch:
    if columns is not None:
        check_columns(list(columns.values()), row, where)
        row = {name: row[column] for name, column in columns.items()}
    return check_sample({name: _value(value) for name, value in row.items()})


def _value(value: Any) -> Any:
    if isinstance(value, list) and value and all(isinstance(part, str) for part in cast("list[Any]", value)):
        value = "\n".join(cast("list[str]", value))
    if isinstance(value, str | bytes):
        return np.frombuffer(value.encode() if isinstance(value, str) else value, np.uint8)
    return value


def _line_offsets(path: Path) -> NDArray[np.int64]:
    with open_file(path) as file:
        return np.fromiter(accumulate(map(len, file), initial=0), np.int64)


def _stamp(kind: str, paths: Sequence[Path]) -> str:
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return f"{kind}:{xxhash.xxh3_128_hexdigest(repr(stats).encode())}"


def _unfit(given: str, nearest: str) -> DataError:
    return DataError(
        given=given,
        rule=f"training data are {_KNOWN}",
        consequence="nothing was opened",
        nearest=nearest,
    )
