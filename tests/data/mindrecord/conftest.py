"""MindSpore's files, unpacked, and small files of our own."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unisono.data.mindrecord import MindRecordFile, MindRecordWriter

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with MindSpore's files; not to be written to."""
    folder = tmp_path_factory.mktemp("mindspore")
    for packed in FIXTURES.glob("*.gz"):
        (folder / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
    return folder


def _told(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.name, "shape": list(value.shape), "data": _told(value.tobytes())}
    if isinstance(value, bytes):
        return value.hex() if len(value) <= 64 else f"sha256:{len(value)}:{hashlib.sha256(value).hexdigest()}"
    if isinstance(value, str):
        return {"text": value if len(value) <= 64 else _told(value.encode())}
    return {"float": value.hex()} if isinstance(value, float) else value


@pytest.fixture(scope="session")
def told() -> Callable[[Any], Any]:
    """Rows as ``expected.json`` has them (tests/peers/make_mindrecord_fixtures.py)."""
    return lambda rows: [{name: _told(value) for name, value in row.items()} for row in rows]


@pytest.fixture(scope="session")
def write() -> Callable[..., MindRecordFile]:
    """write(path, schema, rows, **options): files with the smallest header and pages, opened."""

    def make(
        path: Path, schema: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], **options: Any
    ) -> MindRecordFile:
        with MindRecordWriter(path, schema, **{"page_bytes": 32 << 10, "header_bytes": 16 << 10, **options}) as writer:
            for row in rows:
                writer.write(row)
        return MindRecordFile(writer.paths[0])

    return make


@pytest.fixture(scope="session")
def same() -> Callable[[Any, Any], bool]:
    """Whether two rows, or lists of rows, are equal in every value, type and bit."""
    return lambda one, two: _same(one, two)


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(two) and all(map(_same, one, two))
    return one.keys() == two.keys() and all(
        type(one[name]) is type(two[name]) and _told(one[name]) == _told(two[name]) for name in one
    )
