from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.checkpoint.shard_assignment import assign_shards, lay_out_shard

SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)
TABLES = st.dictionaries(st.text(min_size=1, max_size=4), st.tuples(SHAPES, st.sampled_from([1, 2, 4, 8])), max_size=30)


@settings(max_examples=300, deadline=None)
@given(table=TABLES, world=st.integers(1, 9))
def test_every_row_of_every_tensor_goes_to_exactly_one_rank(table, world):
    parts = assign_shards(table, world)
    assert len(parts) == world
    seen = {name: [] for name in table}
    for name, assigned in (item for rank in parts for item in rank.items()):
        seen[name].append((assigned.start, assigned.stop))
    for name, (shape, _) in table.items():
        rows = shape[0] if shape else 1
        ends = sorted(seen[name])
        assert ends, name
        assert ends[0][0] == 0
        assert ends[-1][1] == rows
        assert all(before[1] == after[0] for before, after in pairwise(ends))


@settings(max_examples=100, deadline=None)
@given(table=TABLES, world=st.integers(1, 9), seed=st.randoms())
def test_the_deal_depends_on_the_table_alone_and_not_on_its_order(table, world, seed):
    items = list(table.items())
    seed.shuffle(items)
    assert assign_shards(table, world) == assign_shards(dict(items), world)


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4000), min_size=1, max_size=20),
    world=st.integers(1, 8),
)
def test_shards_are_even_to_within_a_row_and_an_uncut_tensor(sizes, world):
    # rows of 4 KiB: tensors from 4 KiB to 16 MiB
    table = {f"t{index}": ((rows, 1024), 4) for index, rows in enumerate(sizes)}
    total = 4096 * sum(sizes)
    loads = [sum(4096 * len(assigned) for assigned in rank.values()) for rank in assign_shards(table, world)]
    assert sum(loads) == total
    # each end of a rank's part moves by at most half an uncut tensor or half a row
    assert all(abs(load - total / world) <= 2**20 + 4096 for load in loads)
    assert sum(len(rank) for rank in assign_shards(table, world)) <= len(table) + world - 1


def test_wide_elements_come_first_so_that_every_tensor_lies_aligned():
    table = {"a": ((3,), 1), "b": ((3,), 8), "c": ((3,), 4), "d": ((3,), 2)}
    assert list(assign_shards(table, 1)[0]) == ["b", "c", "d", "a"]


def test_small_tensors_are_never_cut_and_large_ones_are():
    table = {"small": ((1000, 100), 4), "large": ((1000, 1000), 4)}
    parts = [[(name, rows.start, rows.stop) for name, rows in rank.items()] for rank in assign_shards(table, 2)]
    assert parts == [[("large", 0, 550)], [("large", 550, 1000), ("small", 0, 1000)]]


def test_a_tensor_that_is_one_huge_row_stays_whole():
    parts = assign_shards({"row": ((1, 10**9), 4)}, 3)
    assert sorted(len(rank) for rank in parts) == [0, 0, 1]


def test_the_shards_of_all_ranks_describe_every_tensor_once():
    shared = {"big": ((600, 1024), torch.float32), "scalar": ((), torch.int64), "empty": ((0, 4), torch.bool)}
    own = [{f"rng/{rank}": ((5,), torch.uint8)} for rank in range(3)]
    shards = [lay_out_shard(shared, own[rank], {}, rank=rank, world_size=3) for rank in range(3)]
    found = [(piece.name, piece.offset, piece.extent, piece.key) for shard in shards for piece in shard.pieces]
    assert found == [
        ("scalar", (), (), "scalar"),
        ("big", (0, 0), (200, 1024), "big[0:200]"),
        ("rng/0", (0,), (5,), "rng/0"),
        ("big", (200, 0), (200, 1024), "big[200:400]"),
        ("rng/1", (0,), (5,), "rng/1"),
        ("big", (400, 0), (200, 1024), "big[400:600]"),
        ("empty", (0, 0), (0, 4), "empty"),
        ("rng/2", (0,), (5,), "rng/2"),
    ]
    for shard in shards:
        assert shard.pieces[0].begin == len(shard.header)
        assert all(before.end == after.begin for before, after in pairwise(shard.pieces))
        assert all(piece.begin % piece.dtype.itemsize == 0 for piece in shard.pieces)
        assert shard.size == shard.pieces[-1].end
        assert shard.total_bytes == 600 * 1024 * 4 + 8 + 3 * 5
        assert shard.fingerprint == shards[0].fingerprint
    assert [piece.index for piece in shards[1].pieces] == [(slice(200, 400),), ()]
    other = lay_out_shard(shared | {"scalar": ((), torch.int32)}, {}, {}, rank=0, world_size=3)
    assert other.fingerprint != shards[0].fingerprint
