"""Files behind a URL: only what is needed is fetched, once, and what is fetched is checked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from unisono.data.recordio import RecordFile, RecordWriter
from unisono.data.recordio.framing import MAGIC_BYTES
from unisono.data.recordio.remote_file import BLOCK_BYTES
from unisono.errors import DataError

COUNT, SIZE = 120, 100_000  # 12 blocks


class Store(MemoryFileSystem):
    """fsspec's own store in memory, which counts what is asked of it."""

    protocol = "counted"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    requests: ClassVar[list[tuple[int, int]]] = []
    calls: ClassVar[list[int]] = []

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("counted://", "memory://", 1))

    def cat_ranges(self, paths, starts, ends, *arguments, **options):
        self.calls.append(len(paths))
        self.requests.extend(zip(starts, ends, strict=True))
        return super().cat_ranges(paths, starts, ends, *arguments, **options)


@pytest.fixture(autouse=True)
def counted_store(monkeypatch: pytest.MonkeyPatch) -> type[Store]:
    fsspec.register_implementation("counted", Store, clobber=True)
    monkeypatch.setattr(Store, "store", {})
    monkeypatch.setattr(Store, "requests", [])
    monkeypatch.setattr(Store, "calls", [])
    return Store


def payload(number: int) -> bytes:
    body = np.random.default_rng(number).bytes(SIZE)
    return MAGIC_BYTES + body[4:] if number % 10 == 0 else body


@pytest.fixture
def url(tmp_path: Path) -> str:
    with RecordWriter(tmp_path / "a.rec") as writer:
        for number in range(COUNT):
            writer.write(payload(number), key=2 * number)
    upload(tmp_path)
    return "counted://bucket/a.rec"


def upload(folder: Path) -> None:
    for path in folder.glob("a.*"):
        Store(skip_instance_cache=True).pipe_file(f"/bucket/{path.name}", path.read_bytes())


def test_only_the_blocks_of_a_record_are_fetched_and_only_once(url: str, tmp_path: Path) -> None:
    records = RecordFile(url, cache_dir=tmp_path / "cache")
    assert len(records) == COUNT
    ends = len(Store.requests)
    assert ends <= 2  # the file's two ends
    assert records.read(57) == payload(57)
    assert records.read(57) == payload(57)
    assert records.read_key(114) == payload(57)
    assert 1 <= len(Store.requests) - ends <= 2
    assert all(stop - start <= BLOCK_BYTES for start, stop in Store.requests)


def test_many_records_are_one_request(url: str, tmp_path: Path) -> None:
    records = RecordFile(url, cache_dir=tmp_path / "cache")
    before = len(Store.calls)
    numbers = [3, 55, 101, 27]
    assert [bytes(view) for view in records.views(numbers)] == [payload(number) for number in numbers]
    assert len(Store.calls) == before + 1
    assert list(records) == [payload(number) for number in range(COUNT)]


def test_the_copy_serves_the_next_process_without_the_store(url: str, tmp_path: Path) -> None:
    assert list(RecordFile(url, cache_dir=tmp_path / "cache")) == [payload(number) for number in range(COUNT)]
    before = len(Store.requests)
    again = RecordFile(url, cache_dir=tmp_path / "cache")
    assert list(again) == [payload(number) for number in range(COUNT)]
    assert len(Store.requests) == before


def test_a_copy_that_was_damaged_is_fetched_again(url: str, tmp_path: Path) -> None:
    assert RecordFile(url, cache_dir=tmp_path / "cache").read(60) == payload(60)
    (copy,) = (tmp_path / "cache").rglob("data.rec")
    with copy.open("r+b") as file:
        file.seek(60 * SIZE + 50_000)
        file.write(b"damage")
    assert RecordFile(url, cache_dir=tmp_path / "cache").read(60) == payload(60)


def test_damage_in_the_store_is_an_error(url: str, tmp_path: Path) -> None:
    content = bytearray((tmp_path / "a.rec").read_bytes())
    content[60 * SIZE + 50_000] ^= 1
    Store(skip_instance_cache=True).pipe_file("/bucket/a.rec", bytes(content))
    records = RecordFile(url, cache_dir=tmp_path / "cache")
    with pytest.raises(
        DataError, match=r"counted://bucket/a.rec: record \d+ at offset \d+: its 100000 bytes do not have"
    ):
        records.read_many(range(55, 65))


def test_without_a_sidecar_the_file_is_read_once(url: str, tmp_path: Path) -> None:
    Store(skip_instance_cache=True).rm("/bucket/a.uidx")
    records = RecordFile(url, cache_dir=tmp_path / "cache")
    assert records.keys.tolist() == [2 * number for number in range(COUNT)]
    assert records.checksums == "computed later"
    assert records.read(7) == payload(7)
    assert sum(stop - start for start, stop in Store.requests) == (tmp_path / "a.rec").stat().st_size


def test_a_file_that_changed_gets_a_new_copy(url: str, tmp_path: Path) -> None:
    assert RecordFile(url, cache_dir=tmp_path / "cache").read(1) == payload(1)
    with RecordWriter(tmp_path / "a.rec", overwrite=True) as writer:
        writer.write(b"new")
    upload(tmp_path)
    assert list(RecordFile(url, cache_dir=tmp_path / "cache")) == [b"new"]


def test_a_forked_process_fetches_too(url: str, tmp_path: Path) -> None:
    records = RecordFile(url, cache_dir=tmp_path / "cache")
    assert records.read(0) == payload(0)
    child = os.fork()
    if child == 0:  # no exception may leave the child: it is a copy of the test process
        os._exit(0 if records.read(100) == payload(100) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert records.read(100) == payload(100)


@pytest.mark.parametrize("address", ["counted://bucket/none.rec", "nowhere://bucket/a.rec"])
def test_what_cannot_be_reached_says_so(address: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        RecordFile(address, cache_dir=tmp_path / "cache")
    assert str(caught.value).startswith(f"{address}: ")
    assert "check address, access rights and network" in str(caught.value)
