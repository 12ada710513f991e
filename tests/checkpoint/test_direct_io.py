from __future__ import annotations

import errno
import fcntl
import os

import numpy as np
import pytest
import xxhash
from modes import FILE, left, mode_of

from unisono.checkpoint import direct_io
from unisono.checkpoint.host_snapshot import BLOCK_BYTES, PAGE_BYTES
from unisono.storage.files import file_digest


def aligned(size):
    raw = np.random.default_rng(size).integers(0, 256, size + PAGE_BYTES, dtype=np.uint8)
    skip = -raw.ctypes.data % PAGE_BYTES
    return raw[skip : skip + size].data


def blocks(content, step=BLOCK_BYTES):
    return (content[at : at + step] for at in range(0, len(content), step))


def write(path, content, halfway=lambda: None):
    assert all(step is None for step in direct_io.write_blocks(path, blocks(content), len(content), halfway=halfway))


SIZES = [
    1,
    100,
    PAGE_BYTES,
    PAGE_BYTES + 1,
    BLOCK_BYTES - 1,
    BLOCK_BYTES,
    BLOCK_BYTES + PAGE_BYTES,
    2 * BLOCK_BYTES + 777,
]


@pytest.mark.parametrize("size", SIZES)
def test_every_size_arrives_and_halfway_is_about_half(tmp_path, size):
    content, path, seen = aligned(size), tmp_path / "file", []
    write(path, content, lambda: seen.append(path.stat().st_size))
    assert path.read_bytes() == bytes(content)
    assert mode_of(path) == left(FILE)
    assert len(seen) == 1
    assert size / 2 - PAGE_BYTES <= seen[0] <= size / 2
    assert file_digest(path) == xxhash.xxh3_128_hexdigest(content)


def test_a_file_system_that_refuses_direct_writes_gets_ordinary_ones(tmp_path, monkeypatch):
    direct, calls = os.O_DIRECT, []
    real = os.pwrite

    def picky(fd, data, position):
        is_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & direct)
        calls.append(is_direct)
        if is_direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, data, position)

    monkeypatch.setattr(os, "pwrite", picky)
    content = aligned(BLOCK_BYTES + 5)
    write(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes() == bytes(content)
    assert calls.count(True) <= 1


def test_writes_cut_short_are_completed(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, position: real(fd, data[: min(len(data), 70_001)], position))
    content = aligned(600_000)
    write(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes() == bytes(content)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_other_errors_reach_the_caller(tmp_path, monkeypatch, code):
    def broken(fd, data, position):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(OSError, match=os.strerror(code)):
        write(tmp_path / "file", aligned(9))


def test_an_existing_file_or_a_link_is_never_written(tmp_path):
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / "link").symlink_to(target)
    for path in (target, tmp_path / "link"):
        with pytest.raises(FileExistsError):
            write(path, aligned(9))
    assert target.read_text() == "precious"
    with pytest.raises(OSError, match="symbolic links"):
        file_digest(tmp_path / "link")
