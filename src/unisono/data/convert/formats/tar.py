"""``.tar``, ``.tar.gz``: webdataset's samples. Adjacent members ``a/0001.cls`` and ``a/0001.png`` are a row with the key
``a/0001`` and the fields ``cls`` and ``png``; the key ends at the first dot of the file name.

    .cls   int      .txt, .json  str (UTF-8)      .npy  array, or a float or int without dims      else bytes

These are the types of webdataset's decoder. After another extension they only give the type: ``0001.label.cls`` is the int
``label``, and likewise ``.bin`` for bytes. Headers: POSIX.1-2001 (ustar, pax) and GNU's long names. Members are never unpacked
to disk; links, devices and paths outside the archive are refused nevertheless.
"""

from __future__ import annotations

import io
import math
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from unisono.data.convert.formats.byte_source import ByteSource
from unisono.data.convert.formats.table import (
    Row,
    Table,
    damaged_error,
    describe_value,
    unreadable_error,
    unwritable_error,
)
from unisono.sanitize import quoted
from unisono.storage.files import new_file
from unisono.storage.limits import MAX_RECORD_BYTES, MAX_TAR_NAME_BYTES, MAX_TAR_SAMPLE_BYTES

KEY: Final = "__key__"
_BLOCK: Final = 512
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)")
_PAX: Final = re.compile(rb"(\d{1,10}) ([^=]+)=")
_USED: Final = ("path", "size")
_NPY: Final = re.compile(
    rb"\{'descr': '(\|[biu]1|[<>][iuf][248])', 'fortran_order': (True|False), "
    rb"'shape': \(((?:[0-9]{1,19}(?:, [0-9]{1,19}){0,63},?)?)\), \} *\n"
)
_TYPES: Final = {int: "cls", str: "txt", float: "npy", bytes: "bin"}
_READ_AS: Final[dict[str, type]] = {"cls": int, "txt": str, "json": str, "npy": float, "bin": bytes}


def read(path: Path) -> Table:
    """The samples as rows of ``__key__`` and their fields, in the order of the members."""
    return Table(rows=_rows(path))


def _rows(path: Path) -> Iterator[Row]:
    row: dict[str, Any] = {}
    size = 0
    for name, offset, content in _members(path):
        folder, slash, last = name.rpartition("/")
        stem, dot, extension = last.partition(".")
        if not (stem and dot and extension):
            raise damaged_error(path, offset, f"member {quoted(name, 255)} has no name and extension around a dot")
        key = folder + slash + stem
        if row and row[KEY] != key:
            yield row
            row, size = {}, 0
        row = row or {KEY: key}
        size += len(content)
        field = _field_of(extension)
        if field in row:
            raise damaged_error(path, offset, f"sample {quoted(key, 255)} has field {quoted(field, 255)} twice")
        if size > MAX_TAR_SAMPLE_BYTES:
            raise damaged_error(path, offset, f"sample {quoted(key, 255)} has more than {MAX_TAR_SAMPLE_BYTES:,} bytes")
        try:
            row[field] = _decode(extension, content)
        except ValueError as error:
            raise damaged_error(path, offset, f"member {quoted(name, 255)}: {error}") from error
    if row:
        yield row


def write(path: Path, table: Table) -> int:
    """Write the rows as samples with the key ``__key__``, or the row's number in nine digits; returns their number."""
    count, before = 0, None
    with new_file(path) as file, tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for row in table.rows:
            key = row.get(KEY, f"{count:09d}")
            if not isinstance(key, str) or not _is_key(key) or key == before or len(row.keys() - {KEY}) == 0:
                raise unwritable_error(
                    f"row {count} with the key {describe_value(key)} and {len(row.keys() - {KEY})} fields besides",
                    "a sample has fields, and a key that is a path without dots in its last part, unlike the key before it",
                    f"another {KEY}, or none: then rows are numbered",
                )
            for name, value in row.items():
                if name != KEY:
                    extension, content = _encode(count, name, value)
                    member = tarfile.TarInfo(f"{key}.{extension}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
            before, count = key, count + 1
    return count


def _members(path: Path) -> Iterator[tuple[str, int, bytes]]:
    """Name, offset and content of each file in the archive."""
    with ByteSource(path) as source:
        extra: dict[str, str] = {}
        extra_bytes = 0
        while True:
            offset = source.offset
            header = source.read(_BLOCK, "a header")
            if not any(header):
                if extra_bytes:
                    raise damaged_error(path, offset, "an extra header, and no member that it is for")
                if any(source.read(_BLOCK, "the two empty blocks that end an archive")):
                    raise damaged_error(path, offset, "one empty block, where two end an archive")
                while rest := source.read_up_to(1 << 16):
                    if any(rest):
                        raise damaged_error(path, offset, "there are bytes after the end of the archive")
                return
            kind, name, size = _header(path, offset, header)
            if kind in "xL":
                extra_bytes += size
                if extra_bytes > MAX_TAR_NAME_BYTES:
                    damage = f"{extra_bytes:,} bytes of extra headers for one member, where {MAX_TAR_NAME_BYTES:,} are the most"
                    raise damaged_error(path, offset, damage)
                extra |= _long_name(path, offset, kind, _content(source, size))
                continue
            name, size = extra.get("path", name), _size_of(path, offset, extra, size)
            extra, extra_bytes = {}, 0
            if kind not in "05" or (kind == "5" and size) or not _is_path(name):
                member_type = (
                    f"a folder of {size} bytes" if kind == "5" else "a file" if kind == "0" else f"of type {kind!r}"
                )
                raise unreadable_error(
                    f"{path}: offset {offset}: member {quoted(name, 255)}, {member_type}",
                    "members are plain files below the archive: no links, devices or sparse files, "
                    "no names that begin with / or hold ..",
                    "an archive of plain files under relative names",
                )
            if size > MAX_RECORD_BYTES:
                damage = f"member {quoted(name, 255)} of {size:,} bytes, where {MAX_RECORD_BYTES:,} are the most"
                raise damaged_error(path, offset, damage)
            content = _content(source, size)
            if kind == "0":
                yield name, offset, content


def _content(source: ByteSource, size: int) -> bytes:
    content = source.read(size, "a member")
    if any(source.read(-size % _BLOCK, "a member's last block")):
        raise damaged_error(source.path, source.offset, "non-zero padding in a member's last block")
    return content


def _header(path: Path, offset: int, header: bytes) -> tuple[str, str, int]:
    """Type, name and size of a member. Raises DataError for a wrong checksum."""
    try:
        stored = _octal(header[148:156])
        if stored != sum(header[:148]) + sum(header[156:]) + 8 * ord(" "):
            raise ValueError("its checksum is wrong")
        name = header[:100].split(b"\0")[0].decode()
        if header[257:263] == b"ustar\0" and header[345]:
            name = header[345:500].split(b"\0")[0].decode() + "/" + name
        kind = chr(header[156])
        size = _octal(header[124:136])
    except ValueError as error:
        raise damaged_error(path, offset, f"no header of a tar archive: {error}") from error
    # before POSIX, a zero byte was a file
    return ("0" if kind in "\0" else kind), name, size


def _octal(digits: bytes) -> int:
    text = digits.rstrip(b" \0").lstrip(b" ")
    if not re.fullmatch(rb"[0-7]*", text):
        raise ValueError(f"{digits!r} is no octal number")
    return int(text or b"0", 8)


def _long_name(path: Path, offset: int, kind: str, content: bytes) -> dict[str, str]:
    """The fields of ``_USED`` in an extra header for the next member: pax records, or GNU's long name."""
    try:
        if kind == "L":
            return {"path": content.rstrip(b"\0").decode()}
        fields: dict[str, str] = {}
        at = 0
        while at < len(content):
            match = _PAX.match(content, at)
            end = at + int(match[1]) if match else 0
            if not match or not match.end() < end <= len(content) or content[end - 1 : end] != b"\n":
                raise ValueError("a malformed pax record")
            name = match[2].decode()
            if name.startswith("GNU.sparse"):
                raise ValueError("a sparse file")
            value = content[match.end() : end - 1].decode()
            if name in _USED:
                fields[name] = value
            at = end
        return fields
    except ValueError as error:
        raise damaged_error(path, offset, f"no extra header of a tar archive: {error}") from error


def _size_of(path: Path, offset: int, extra: dict[str, str], size: int) -> int:
    digits_text = extra.get("size", str(size))
    if not re.fullmatch(r"\d{1,20}", digits_text):
        raise damaged_error(path, offset, f"a size of {digits_text[:40]!r}")
    return int(digits_text)


def _is_path(name: str) -> bool:
    return bool(name) and not name.startswith("/") and "\0" not in name and ".." not in name.split("/")


def _is_key(key: str) -> bool:
    folder, slash, last = key.rpartition("/")
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return _is_path(key) and bool(last) and "." not in last and not (slash and not folder)


def _field_of(extension: str) -> str:
    name, _, last = extension.rpartition(".")
    return name if name and last in _READ_AS else extension


def _decode(extension: str, content: bytes) -> Any:
    kind = _READ_AS.get(extension.rpartition(".")[2], bytes)
    if kind is int:
        text = content.decode("ascii").strip()
        if len(text) > 100 or not _NUMBER.fullmatch(text):
            raise ValueError(f"{text[:40]!r} is no integer")
        return int(text)
    if kind is str:
        return content.decode()
    return _from_npy(content) if kind is float else content


def _encode(number: int, name: str, value: Any) -> tuple[str, bytes]:
    """Extension and content of a field; the extension is the field's name if that is read back as the value's type."""
    is_array = isinstance(value, np.ndarray) and cast("NDArray[Any]", value).dtype.kind in "biuf"
    kind = float if is_array and value.ndim else type(value)
    if kind not in _TYPES or not re.fullmatch(r"[^/\0]*[^./\0]", name) or name.startswith("."):
        raise unwritable_error(
            f"row {number}, field {quoted(name)}: {describe_value(value)}",
            "a member is an int, a float, a string, bytes or an array of numbers, under a name without / and outer dots",
            "a .jsonl file holds such rows",
        )
    typed = name.rpartition(".")[2] in _READ_AS
    same = "." not in name and typed and _READ_AS[name] is kind
    extension = name if same or (kind is bytes and not typed) else f"{name}.{_TYPES[kind]}"
    try:
        name.encode()
        if kind is float:
            return extension, _to_npy(np.asarray(value))
        return extension, value if isinstance(value, bytes) else str(value).encode()
    except UnicodeEncodeError as error:
        raise unwritable_error(
            f"row {number}, field {quoted(name)}: {error.reason}", "text is UTF-8", "bytes"
        ) from error


def _to_npy(array: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(array) if array.ndim else array, allow_pickle=False)
    return file.getvalue()


def _from_npy(content: bytes) -> Any:
    # not with NumPy's reader, which evaluates the header as Python and raises arbitrary errors
    wide = content[6:7] == b"\x02"
    begin = 12 if wide else 10
    begin += int.from_bytes(content[8:begin], "little")
    match = _NPY.fullmatch(content[12 if wide else 10 : begin])
    if content[:8] not in (b"\x93NUMPY\x01\x00", b"\x93NUMPY\x02\x00") or match is None:
        raise ValueError("no .npy of numbers in version 1.0 or 2.0")
    dtype, shape = np.dtype(match[1].decode()), tuple(int(dim) for dim in re.findall(rb"[0-9]+", match[3]))
    if math.prod(shape) * dtype.itemsize != len(content) - begin:
        raise ValueError(f"{dtype} values of shape {list(shape)} in {len(content) - begin} bytes")
    flat = np.frombuffer(content, dtype, offset=begin).astype(dtype.newbyteorder("="))
    array = flat.reshape(shape, order="F" if match[2] == b"True" else "C")
    return array if array.ndim else array.item()
