"""The header: what goes in comes out, and nothing else gets past."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import CommError
from unisono.kvstore.wire.frame import CODECS, DTYPES, HEADER_BYTES, Frame, Limits, Op, pack, payload_views, unpack

U8, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (8, 32, 64))


@given(
    st.builds(
        Frame,
        op=st.sampled_from(list(Op)),
        codec=st.integers(0, CODECS - 1),
        dtype=st.integers(0, len(DTYPES) - 1),
        flags=U8,
        entries=st.integers(0, 8192),
        server_restart_count=U32,
        job=U64,
        worker=U32,
        worker_restart_count=U32,
        seq=U64,
        clock=U64,
        ticket=U32,
    ),
    st.lists(st.binary(max_size=50), max_size=3),
)
def test_a_header_comes_back_as_it_was(frame: Frame, parts: list[bytes]) -> None:
    header = pack(frame, [memoryview(part) for part in parts])
    announced = unpack(header, Limits())
    assert len(header) == HEADER_BYTES
    assert announced.frame == frame
    assert announced.nbytes == sum(map(len, parts))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda head: head.__setitem__(slice(0, 4), b"HTTP"), "a frame whose magic is 0x50545448"),
        (lambda head: head.__setitem__(4, 9), "a frame whose version is 9"),
        (lambda head: head.__setitem__(5, 99), "a frame whose op is 99"),
        (lambda head: head.__setitem__(6, 32), "a frame whose codec is 32"),
        (lambda head: head.__setitem__(7, 14), "a frame whose dtype is 14"),
        (lambda head: head.__setitem__(slice(10, 12), b"\xff\xff"), "a frame whose entries is 65535"),
        (
            lambda head: head.__setitem__(slice(48, 52), b"\xff\xff\xff\xff"),
            "a frame whose payload is 4294967295 bytes",
        ),
    ],
)
def test_a_field_out_of_bounds_is_named(damage: Callable[[bytearray], Any], said: str) -> None:
    head = bytearray(pack(Frame(Op.PUSH), []))
    damage(head)
    with pytest.raises(CommError) as caught:
        unpack(head, Limits())
    assert caught.value.problems[0].given == said
    assert "not taken" in caught.value.problems[0].consequence


def test_mutated_headers_are_read_within_the_limits_or_refused() -> None:
    _mutate(20_000)


@pytest.mark.full
def test_a_hundred_thousand_mutated_headers() -> None:
    _mutate(100_000)


def _mutate(count: int) -> None:
    draw = random.Random(7)
    limits = Limits(max_payload_bytes=1 << 20, max_entries=16)
    good = pack(Frame(Op.PUSH, entries=2, server_restart_count=3, job=5, worker=1, seq=9), [memoryview(b"x" * 100)])
    taken = 0
    for _ in range(count):
        head = bytearray(good)
        for _ in range(draw.choice((1, 1, 2, 8, 64))):
            head[draw.randrange(HEADER_BYTES)] = draw.randrange(256)
        try:
            announced = unpack(head, limits)
        except CommError:
            continue
        taken += 1
        assert announced.nbytes <= limits.max_payload_bytes
        assert announced.frame.entries <= limits.max_entries
    # fields such as seq have no bounds of their own: the digest, seeded with the header, is what guards those
    assert 0 < taken < count


def test_the_digest_guards_the_header_too() -> None:
    header = bytearray(pack(Frame(Op.PUSH, seq=1), [memoryview(b"abc")]))
    seeds = {unpack(header, Limits()).seed}
    for byte in (8, 12, 16, 24, 28, 32, 40, 52):  # flags, epoch, job, worker, incarnation, seq, clock, ticket
        changed = bytearray(header)
        changed[byte] ^= 1
        seeds.add(unpack(changed, Limits()).seed)
    assert len(seeds) == 9


def test_a_payload_is_seen_as_flat_bytes_without_a_copy() -> None:
    import numpy as np

    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    parts = payload_views(Frame(Op.PUSH, payload=[memoryview(b"head"), memoryview(values), memoryview(b"")]))
    assert [part.nbytes for part in parts] == [4, 24]
    values[0, 0] = 7
    assert np.frombuffer(parts[1], np.float32)[0] == 7
