"""The sidecar says what it was written to say, or that it is damaged."""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash

from unisono.data.sidecar import (
    MAGIC,
    ColumnInfo,
    PayloadInfo,
    SidecarHeader,
    digest_of,
    open_sidecar,
    verify_sidecar,
    write_sidecar,
)
from unisono.errors import DataError
from unisono.storage.files import write_atomically

PAYLOAD = np.arange(10, dtype="<u2")
COLUMNS = {"starts": np.array([0, 3, 7], np.uint64), "flags": np.array([1, 2, 3], np.uint8)}


@pytest.fixture
def sidecar(tmp_path: Path) -> Path:
    path = tmp_path / "a.idx"
    payload = PayloadInfo(bytes=20, dtype="<u2", xxh3_128=digest_of(PAYLOAD))
    write_sidecar(path, kind="tokens", payload=payload, columns=COLUMNS, facts={"vocab_size": 99, "who": "me"})
    return path


def craft(path: Path, head: bytes, *, total: int | None = None, version: int = 1) -> Path:
    """A sidecar with a correct digest over whatever the head says."""
    size = 40 + len(head)
    fixed = struct.pack("<8sIIQ", MAGIC, version, len(head), size if total is None else total)
    path.write_bytes(fixed + xxhash.xxh3_128(fixed + head).digest() + head)
    return path


def test_round_trip(sidecar: Path) -> None:
    opened = open_sidecar(sidecar, kind="tokens")
    assert opened.head.facts == {"vocab_size": 99, "who": "me"}
    assert opened.head.payload.bytes == 20
    assert opened.columns["starts"].tolist() == [0, 3, 7]
    assert opened.columns["flags"].tolist() == [1, 2, 3]
    assert not opened.columns["starts"].flags.writeable
    assert verify_sidecar(opened, PAYLOAD) == []
    assert [p.name for p in sidecar.parent.iterdir()] == ["a.idx"]


def test_columns_are_aligned_and_an_empty_one_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "b.idx"
    columns = {"empty": np.empty(0, np.uint32), "one": np.array([5], np.uint32)}
    payload = PayloadInfo(bytes=2, dtype="<u2", xxh3_128=digest_of(PAYLOAD[:1]))
    write_sidecar(path, kind="tokens", payload=payload, columns=columns, facts={})
    opened = open_sidecar(path, kind="tokens")
    assert opened.columns["empty"].size == 0
    assert opened.columns["one"].tolist() == [5]
    assert all(column.offset % 64 == 0 for column in opened.head.columns.values())
    assert verify_sidecar(opened, PAYLOAD[:1]) == []


def test_any_flipped_byte_that_means_something_is_noticed(sidecar: Path) -> None:
    good = sidecar.read_bytes()
    opened = open_sidecar(sidecar, kind="tokens")
    meant = set(range(40 + struct.unpack_from("<I", good, 12)[0]))
    for column in opened.head.columns.values():
        meant |= set(range(column.offset, column.offset + column.count * np.dtype(column.dtype).itemsize))
    assert len(meant) > 300
    for place in sorted(meant):
        damaged = bytearray(good)
        damaged[place] ^= 0x10
        sidecar.write_bytes(damaged)
        try:
            problems = verify_sidecar(open_sidecar(sidecar, kind="tokens"), PAYLOAD)
        except DataError as error:
            problems = list(error.problems)
        assert problems, place
        assert str(sidecar) in problems[0].given


def test_any_other_length_is_noticed_on_opening(sidecar: Path) -> None:
    good = sidecar.read_bytes()
    for content in (*(good[:cut] for cut in range(0, len(good), 7)), good + b"\0"):
        sidecar.write_bytes(content)
        with pytest.raises(DataError):
            open_sidecar(sidecar, kind="tokens")


def test_a_flipped_payload_byte_is_found_by_verify(sidecar: Path) -> None:
    damaged = PAYLOAD.copy()
    damaged[4] ^= 1
    (problem,) = verify_sidecar(open_sidecar(sidecar, kind="tokens"), damaged)
    assert str(problem) == (
        f"{sidecar}: the payload beside it does not match its digest\n"
        "  rule: a shard and its sidecar are read as they were written, every byte\n"
        "  so:   nothing of this shard is used\n"
        "  try:  write the shard again; prepared corpora are rebuilt when their folder is deleted"
    )


def head(**changes: object) -> bytes:
    fields = {
        "kind": "tokens",
        "payload": PayloadInfo(bytes=20, dtype="<u2", xxh3_128=""),
        "columns": {},
        "facts": {},
        **changes,
    }
    return msgspec.json.encode(SidecarHeader(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (head(), {"version": 2}, "it has version 2, this unisono reads version 1"),
        (head(), {"total": 1 << 40}, "where its head says 1099511627776"),
        (b"{}", {}, "its head is not understood: Object missing required field `kind`"),
        (b"not json", {}, "its head is not understood"),
        (head(kind="recordio"), {}, "it describes 'recordio', not 'tokens'"),
        (
            head(columns={"c": ColumnInfo(dtype="<u8", count=1 << 40, offset=64, xxh3_128="")}),
            {},
            "column 'c' lies outside the file or has an unknown dtype",
        ),
        (head(columns={"c": ColumnInfo(dtype="|O", count=1, offset=0, xxh3_128="")}), {}, "column 'c' lies outside"),
        (head(columns={"c": ColumnInfo(dtype="<u8", count=-1, offset=0, xxh3_128="")}), {}, "column 'c' lies outside"),
        (head(columns={"c": ColumnInfo(dtype="|u1", count=1, offset=8, xxh3_128="")}), {}, "column 'c' lies outside"),
        (
            head(payload=PayloadInfo(bytes=21, dtype="<u2", xxh3_128="")),
            {},
            "payload dtype '<u2' does not fit 21 bytes",
        ),
        (head(payload=PayloadInfo(bytes=8, dtype="|O", xxh3_128="")), {}, "payload dtype '|O' does not fit 8 bytes"),
    ],
)
def test_a_crafted_head_is_refused(tmp_path: Path, content: bytes, options: dict[str, int], message: str) -> None:
    path = craft(tmp_path / "c.idx", content, **options)
    with pytest.raises(DataError) as caught:
        open_sidecar(path, kind="tokens")
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_huge_head_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "d.idx"
    size = 3 << 20
    fixed = struct.pack("<8sIIQ", MAGIC, 1, 2 << 20, size)
    path.write_bytes(fixed + bytes(size - len(fixed)))
    with pytest.raises(DataError, match="where its head says"):
        open_sidecar(path, kind="tokens")


def test_something_else_or_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.idx").write_bytes(b"MMIDIDX\0" + bytes(100))
    with pytest.raises(DataError, match=r"x\.idx: it does not begin like a sidecar"):
        open_sidecar(tmp_path / "x.idx", kind="tokens")
    with pytest.raises(DataError, match=r"y\.idx: it cannot be read: No such file or directory"):
        open_sidecar(tmp_path / "y.idx", kind="tokens")


def test_an_interrupted_write_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_atomically(path, b"old")
    with pytest.raises(TypeError):
        write_atomically(path, b"new", 3)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
