"""Files of training data in formats that unisono only reads: tar as webdataset, TFRecord, Arrow folders."""

from __future__ import annotations

import io
import json
import struct
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from unisono.data.convert.formats.crc32c import crc32c, masked_crc32c


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    """An archive of these files."""
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def write_arrow_folder(folder: Path, table: Any, features: dict[str, object]) -> Path:
    """The layout of ``datasets.Dataset.save_to_disk``."""
    import pyarrow as pa

    folder.mkdir(parents=True)
    name = "data-00000-of-00001.arrow"
    with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}], "_indices_files": None}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    return folder


def write_tfrecord(path: Path, rows: Iterable[Mapping[str, int | str]]) -> Path:
    """Each row as a ``tf.Example``, whose features are an int or a text."""
    with path.open("wb") as file:
        for row in rows:
            record = _field(1, b"".join(_field(1, _feature(name, value)) for name, value in row.items()))
            head = struct.pack("<Q", len(record))
            file.write(head + _checksum(head) + record + _checksum(record))
    return path


def _feature(name: str, value: int | str) -> bytes:
    values = _field(1, value.encode()) if isinstance(value, str) else b"\x08" + _varint(value)
    return _field(1, name.encode()) + _field(2, _field(1 if isinstance(value, str) else 3, values))


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _checksum(content: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(crc32c(content)))
