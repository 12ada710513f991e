"""Every element lies on one server, loads differ by one chunk at most, and nothing but the table decides."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import ConfigError
from unisono.kvstore.server.placement import BLOCK_ELEMENTS, place_chunks

SMALL = 8 * BLOCK_ELEMENTS  # bytes: 2048 float32

shapes = st.lists(st.integers(0, 90), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
tables = st.dictionaries(st.text("abc.", min_size=1, max_size=4), st.tuples(shapes, dtypes), max_size=6)


@given(tables, st.integers(1, 5), st.randoms())
def test_covers_and_balances(table, servers, random) -> None:
    placed = place_chunks(table, servers, SMALL)
    for key, (shape, dtype) in table.items():
        chunks = placed.chunks_of(key)
        ends = [0, *(chunk.start + chunk.num_elements for chunk in chunks)]
        assert ends[:-1] == [chunk.start for chunk in chunks]
        assert ends[-1] == math.prod(shape)
        assert all(c.nbytes <= SMALL and c.dtype == dtype and c.start % BLOCK_ELEMENTS == 0 for c in chunks)
        assert all(c.start % c.row_elements == c.num_elements % c.row_elements == 0 for c in chunks if c.row_elements)
    assert [chunk.number for chunk in placed.chunks] == list(range(len(placed.chunks)))
    assert sorted(c.number for s in range(servers) for c in placed.chunks_on(s)) == list(range(len(placed.chunks)))
    loads = [sum(chunk.nbytes for chunk in placed.chunks_on(server)) for server in range(servers)]
    assert max(loads) - min(loads) <= max((chunk.nbytes for chunk in placed.chunks), default=0)
    order = list(table)
    random.shuffle(order)
    assert place_chunks({key: table[key] for key in order}, servers, SMALL) == placed


@given(tables, st.integers(1, 3))
def test_groups_fit_a_frame(table, servers) -> None:
    placed = place_chunks(table, servers, SMALL)
    for server in range(servers):
        groups = placed.groups(table, server)
        assert [chunk for group in groups for chunk in group] == placed.chunks_on(server)
        assert all(len({chunk.dtype for chunk in group}) == 1 for group in groups)
        assert all(len(group) == 1 or sum(c.nbytes for c in group) <= SMALL for group in groups)


def test_small_keys_travel_together_and_only_those_asked_for() -> None:
    table = {f"k{n}": ((10,), torch.float32) for n in range(9)}
    placed = place_chunks(table, 1)
    assert len(placed.groups(table, 0)) == 1
    assert [[c.key for c in group] for group in placed.groups(["k3", "k1"], 0)] == [["k1", "k3"]]


def test_whole_keys_stay_whole() -> None:
    table = {"w": ((100, 100), torch.float32)}
    assert len(place_chunks(table, 2, SMALL).chunks_of("w")) == 5
    (chunk,) = place_chunks(table, 2, SMALL, whole={"w"}).chunks_of("w")
    assert (chunk.num_elements, chunk.row_elements) == (10000, 100)


def test_hash_tells_placements_apart() -> None:
    table = {"w": ((100, 100), torch.float32)}
    other = {"w": ((100, 100), torch.bfloat16)}
    turned = {"w": ((10, 1000), torch.float32)}
    hashes = {
        place_chunks(table, 2).hash,
        place_chunks(table, 3).hash,
        place_chunks(other, 2).hash,
        place_chunks(turned, 2).hash,
    }
    assert len(hashes) == 4


def test_refusals_say_what_would_work() -> None:
    with pytest.raises(ConfigError, match="0 servers, chunks of 4194304 bytes"):
        place_chunks({}, 0)
    with pytest.raises(ConfigError, match="did you mean 'layer'"):
        place_chunks({"layer": ((2,), torch.float32)}, 1).chunks_of("layers")
    with pytest.raises(ConfigError, match="key 'big' has 4294967296 bytes and stays whole"):
        place_chunks({"big": ((1 << 30,), torch.float32)}, 1, whole={"big"})
