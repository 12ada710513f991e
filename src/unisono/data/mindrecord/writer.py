"""Write MindRecord files that MindSpore reads, completely or not at all."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from unisono.data.mindrecord.encryption import open_bytes
from unisono.data.mindrecord.header import (
    BLOB,
    LENGTH,
    LENGTH_BYTES,
    RAW,
    VERSION,
    FieldEntry,
    GroupEntry,
    IndexEntry,
    MindRecordHeader,
    PageEntry,
    SchemaEntry,
    read_header,
    read_row_groups,
)
from unisono.data.mindrecord.index import index_path, scan_rows, write_index
from unisono.data.mindrecord.row_encoder import Kind, RowEncoder
from unisono.errors import DataError, Problem
from unisono.storage.files import FILE_MODE, sync_folder
from unisono.storage.limits import MAX_MINDRECORD_HEADER_BYTES, MAX_RECORD_BYTES

_MIN_HEADER_BYTES: Final = 16 << 10
_MIN_PAGE_BYTES: Final = 32 << 10
_MAX_SHARDS: Final = 1000
_FORBIDDEN: Final = re.compile(r"""[\\/:*?"<>|`&';]|^ | $""")  # in a file name, by MindSpore's reader
_CHUNK_BYTES: Final = 1 << 20  # of a page, buffered before they are written
_MOST: Final = (1 << 31) - 1


class MindRecordWriter:
    """Writes a set of MindRecord files and their indexes; leaving the ``with`` block normally puts them in place.

    Row i is row i // ``shards`` of file i mod ``shards``, so the same rows give the same files. Files are written under
    temporary names and synced; indexes are renamed last. After an exception the previous files remain; an interruption
    of the renames leaves the complete new files, some of them under temporary names.

    Args:
        path: The file, to whose name several ``shards`` append a number.
        schema: The type of each field, or a mapping of type and shape as in MindSpore's ``add_schema``.
        shards: Number of files, at most 1000.
        page_bytes: Bytes for the scalars, or the blobs, of a row, and the size of a page.
        header_bytes: Bytes reserved in each file for the header with its list of pages.
        index_fields: Fields of the index. By default all scalar fields.
        overwrite: Whether to replace existing files.

    Raises:
        DataError: A file exists, or a size or name is out of range; in ``write``, before anything is written, MindSpore
            could not read a value back equal.
    """

    def __init__(
        self,
        path: Path | str,
        schema: Mapping[str, Kind],
        *,
        shards: int = 1,
        page_bytes: int = 32 << 20,
        header_bytes: int = 16 << 20,
        index_fields: Sequence[str] | None = None,
        overwrite: bool = False,
    ) -> None:
        path = Path(path)
        problems = [*_problems(path.name, shards, page_bytes, header_bytes)]
        if problems:
            raise DataError(*problems)
        digits = len(str(shards - 1))
        self.paths = [path.with_name(f"{path.name}{n:0{digits}}") for n in range(shards)] if shards > 1 else [path]
        existing = [file for name in self.paths for file in (name, index_path(name)) if os.path.exists(file)]
        if existing and not overwrite:
            raise DataError(
                given=f"{existing[0]}, which exists",
                rule="files are written once, under a new name",
                consequence="it was left as it is",
                nearest="another name, or overwrite=True to replace the existing file",
            )
        self._encoder = RowEncoder(schema, index_fields)
        self._page_bytes = page_bytes
        head = _empty_header(self._encoder, self.paths, header_bytes, page_bytes)
        size = LENGTH_BYTES + len(msgspec.json.encode(head))
        if size + 2 * _page_entry_bytes(page_bytes) > header_bytes:
            raise DataError(_header_full(f"a header of {size} bytes before any page", header_bytes))
        mark = f"tmp-{os.getpid()}-{secrets.token_hex(4)}"
        self._shards: list[_ShardWriter] = []
        self._placing = False
        try:
            for number, shard_path in enumerate(self.paths):
                temporary = shard_path.with_name(f"{shard_path.name}.{mark}")
                self._shards.append(
                    _ShardWriter(shard_path, temporary, msgspec.structs.replace(head, shard_id=number), size)
                )
        except BaseException:
            self._discard()
            raise
        self._rows, self._done = 0, False

    def __enter__(self) -> MindRecordWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            self._discard()

    def __len__(self) -> int:
        return self._rows

    def write(self, row: Mapping[str, Any]) -> int:
        """Append a row and return its number. Raises DataError where it cannot be written; rows before it are kept."""
        if self._done:
            raise ValueError("this writer has put its files in place, or thrown them away")
        number = self._rows
        raw, blob = self._encoder.encode(row, number)
        for part, kind in ((raw, "scalars"), (blob, "blobs")):
            if len(part) + LENGTH_BYTES > self._page_bytes:
                raise DataError(
                    given=f"row {number}: {kind} of {len(part)} bytes",
                    rule=f"the scalars, or the blobs, of a row are in one page: of {self._page_bytes} bytes, 8 for the length",
                    consequence="the row was not written; the rows before it are kept",
                    nearest=f"page_bytes={-(-(len(part) + LENGTH_BYTES) // 4) * 4} or more, up to {MAX_RECORD_BYTES}",
                )
        self._shards[number % len(self._shards)].append(raw, blob, number)
        self._rows += 1
        return number

    def _commit(self) -> None:
        for shard in self._shards:
            shard.finish()
        self._placing = True
        # Every reader notices an index without its file, or a file without its index, but not an index of another file. So old
        # indexes are removed first and new ones renamed last, and a set is never partly old and partly new.
        for path in self.paths:
            index_path(path).unlink(missing_ok=True)
        if len(self.paths) > 1:
            for path in self.paths:
                path.unlink(missing_ok=True)
        folder = self.paths[0].parent
        sync_folder(folder)
        for shard in self._shards:
            shard.temporary.replace(shard.path)
        sync_folder(folder)
        for shard in self._shards:
            index_path(shard.temporary).replace(index_path(shard.path))
        sync_folder(folder)

    def _discard(self) -> None:
        self._done = True
        for shard in self._shards:
            shard.close()
            if not self._placing:  # while renaming, they may be the only copies
                shard.temporary.unlink(missing_ok=True)
                index_path(shard.temporary).unlink(missing_ok=True)


class _PageWriter:
    """A page being written; ``first_row`` and the row groups are for the header."""

    def __init__(self, file: int, offset: int, number: int, type_id: int) -> None:
        self.number, self.type_id = number, type_id
        self.used = 0
        self.first_row = self.end_row = 0
        self.groups: list[GroupEntry] = []
        self._file, self._at = file, offset
        self._waiting = bytearray()

    def append(self, payload: bytes) -> None:
        """Append a length and a payload."""
        self._waiting += LENGTH.pack(len(payload))
        self._waiting += payload
        self.used += LENGTH_BYTES + len(payload)
        if len(self._waiting) >= _CHUNK_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the buffered bytes to the file."""
        with memoryview(self._waiting) as rest:
            done = 0
            while done < len(rest):
                done += os.pwrite(self._file, rest[done:], self._at + done)
        self._at += len(self._waiting)
        self._waiting.clear()


class _ShardWriter:
    """One file of the set under its temporary name. One page of each kind is open; a blob page is a row group."""

    def __init__(self, path: Path, temporary: Path, head: MindRecordHeader, head_bytes: int) -> None:
        self.path, self.temporary = path, temporary
        self._head, self._head_bytes = head, head_bytes
        self._page_entry_bytes = _page_entry_bytes(head.page_size)
        self._handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        self._pages: list[PageEntry] = []
        self._raw: _PageWriter | None = None
        self._blob: _PageWriter | None = None
        self._count = self._rows = self._groups = 0

    def append(self, raw: bytes, blob: bytes, number: int) -> None:
        """Append the two parts of row ``number`` of the set. Raises DataError if the header has no space for another page."""
        page_size = self._head.page_size
        new_raw = self._raw is None or self._raw.used + LENGTH_BYTES + len(raw) > page_size
        # a row group is in one raw page, so a new raw page also starts a new group
        new_blob = new_raw or self._blob is None or self._blob.used + LENGTH_BYTES + len(blob) > page_size
        grown = self._head_bytes + (new_raw + new_blob) * self._page_entry_bytes
        if grown > self._head.header_size:
            raise DataError(_header_full(f"row {number}, which begins page {self._count}", self._head.header_size))
        self._head_bytes = grown
        if new_blob:
            self._close(self._blob)
            self._blob = self._open(self._groups)
            self._blob.first_row = self._rows
        if new_raw:
            type_id = 0 if self._raw is None else self._raw.number + 1
            self._close(self._raw)
            self._raw = self._open(type_id)
        assert self._raw is not None
        assert self._blob is not None
        if new_blob:
            self._raw.groups.append(GroupEntry(id=self._groups, offset=self._raw.used))
            self._groups += 1
        self._raw.append(raw)
        self._blob.append(blob)
        self._rows += 1
        self._blob.end_row = self._rows

    def finish(self) -> None:
        """Write the remaining pages and the header, sync, and write the index from the file."""
        self._close(self._blob)
        self._close(self._raw)
        pages = sorted(self._pages, key=lambda page: page.page_id)
        head = msgspec.structs.replace(self._head, page=pages or None)
        content = msgspec.json.encode(head)
        os.pwrite(self._handle, LENGTH.pack(len(content)) + content, 0)
        # the file ends with its last row, not with its last page, so that any truncation is detected
        ends = [head.header_size + page.page_id * head.page_size + page.page_size for page in pages]
        os.ftruncate(self._handle, max(ends, default=head.header_size))
        os.fsync(self._handle)
        self.close()
        data = open_bytes(self.temporary, None)
        head = read_header(self.temporary, data)
        groups = read_row_groups(self.temporary, head, len(data))
        places = scan_rows(self.temporary, head, groups, data)
        write_index(index_path(self.temporary), self.path.name, head, groups, places, data)

    def close(self) -> None:
        """Close the file, once."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _open(self, type_id: int) -> _PageWriter:
        number = self._count
        self._count += 1
        return _PageWriter(self._handle, self._head.header_size + number * self._head.page_size, number, type_id)

    def _close(self, page: _PageWriter | None) -> None:
        if page is None:
            return
        page.flush()
        self._pages.append(
            PageEntry(
                page_id=page.number,
                shard_id=self._head.shard_id,
                page_type=RAW if page is self._raw else BLOB,
                page_type_id=page.type_id,
                start_row_id=page.first_row,
                end_row_id=page.end_row,
                row_group_ids=page.groups,
                page_size=page.used,
            )
        )


def _empty_header(encoder: RowEncoder, paths: Sequence[Path], header_bytes: int, page_bytes: int) -> MindRecordHeader:
    """The header of the last file of a set, without pages."""
    fields = {name: FieldEntry(type=field.type, shape=field.shape) for name, field in encoder.fields.items()}
    return MindRecordHeader(
        header_size=header_bytes,
        index_fields=[IndexEntry(schema_id=0, index_field=name) for name in encoder.indexed] or None,
        page=None,
        page_size=page_bytes,
        schema=[SchemaEntry(desc="", blob_fields=encoder.blobs, schema=fields)],
        shard_addresses=[path.name for path in paths],
        shard_id=len(paths) - 1,
        version=VERSION,
    )


def _page_entry_bytes(page_bytes: int) -> int:
    """Maximum header bytes of a page and its row group."""
    group = GroupEntry(id=_MOST, offset=page_bytes)
    page = PageEntry(
        page_id=_MOST,
        shard_id=_MAX_SHARDS,
        page_type=BLOB,
        page_type_id=_MOST,
        start_row_id=1 << 40,
        end_row_id=1 << 40,
        row_group_ids=[group],
        page_size=page_bytes,
    )
    return len(msgspec.json.encode(page)) + 1


def _header_full(given: str, header_bytes: int) -> Problem:
    return Problem(
        given=given,
        rule=f"the header lists the fields and all pages in its {header_bytes} bytes",
        consequence="it was not written; what was written before is kept",
        nearest=f"a larger header_bytes, up to {MAX_MINDRECORD_HEADER_BYTES}, larger page_bytes, or more shards",
    )


def _problems(name: str, shards: int, page_bytes: int, header_bytes: int) -> Iterator[Problem]:
    if not name or _FORBIDDEN.search(name):
        yield _bad(f"the file name {name!r}", "a name has none of \\ / : * ? \" < > | ` & ' ; and no space at its ends")
    if not 1 <= shards <= _MAX_SHARDS:
        yield _bad(f"shards={shards}", f"a set has 1 to {_MAX_SHARDS} files")
    for option, value, least, most in (
        ("page_bytes", page_bytes, _MIN_PAGE_BYTES, MAX_RECORD_BYTES),
        ("header_bytes", header_bytes, _MIN_HEADER_BYTES, MAX_MINDRECORD_HEADER_BYTES),
    ):
        if not least <= value <= most or value % 4:
            yield _bad(f"{option}={value}", f"it is a multiple of 4 from {least} to {most}")


def _bad(given: str, rule: str) -> Problem:
    return Problem(given=given, rule=rule, consequence="nothing was written", nearest="a value that MindSpore can read")
