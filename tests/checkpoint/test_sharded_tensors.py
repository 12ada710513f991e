"""Tensors in blocks of several ranks: saved by ranks that are threads, read back in any other blocks."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from states import DTYPES, Log, bits, make, random_bits, save_steps

from unisono.checkpoint import open_checkpoint, reader, verify
from unisono.checkpoint.shard_assignment import lay_out_shard
from unisono.errors import CheckpointError
from unisono.parallel.sharding import TensorShard


class ThreadRank:
    """What a Checkpointer asks of its World, among threads of this process."""

    def __init__(self, rank, slots, barrier):
        self.rank, self.world_size, self._slots, self._barrier = rank, len(slots), slots, barrier

    def with_own_group(self, name):
        return self

    def all_gather_json(self, value):
        self._slots[self.rank] = json.dumps(value)
        self._barrier.wait(20)
        values = [json.loads(slot) for slot in self._slots]
        self._barrier.wait(20)
        return values

    def close(self):
        pass


def local(tensor, **where):
    """A rank's part of a global tensor, and where it lies."""
    return tensor, TensorShard(**where)


def save_parts(root, *saves, own=None, replicated=None):
    """Steps 1, 2, ... by the same ranks at once, each a list of every rank's parts; returns every rank's events."""
    slots, barrier = [""] * len(saves[0]), threading.Barrier(len(saves[0]))

    def one(rank):
        log = Log()
        world = ThreadRank(rank, slots, barrier)
        checkpointer = make(root, world=world, emit=log, asynchronous=False, keep_last=100, max_failures=9)
        for step, ranks in enumerate(saves, 1):
            checkpointer.save(step, replicated or {}, own[rank] if own else {}, {}, sharded=ranks[rank])
        checkpointer.close()
        return log.events

    with ThreadPoolExecutor(len(slots)) as threads:
        return list(threads.map(one, range(len(slots))))


def rows(tensor, start, stop, **more):
    """The part that holds rows [start, stop)."""
    return local(
        tensor[start:stop], global_shape=tuple(tensor.shape), offset=(start, *[0] * (tensor.dim() - 1)), **more
    )


def box(tensor, offset, shape):
    return tensor[tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))]


def shards(root, step=1):
    return sorted((root / f"step-{step:08d}").glob("*.safetensors"))


# --- any blocks in, any boxes out ------------------------------------------------------------------------------------


@st.composite
def cut(draw, shape, most):
    """A grid of at most ``most`` blocks over ``shape``, uneven, some perhaps empty: (offset, shape) each."""
    edges, count = [], 1
    for extent in shape:
        number = draw(st.integers(1, max(1, most // count)))
        count *= number
        inner = sorted(draw(st.lists(st.integers(0, extent), min_size=number - 1, max_size=number - 1)))
        edges.append(list(zip([0, *inner], [*inner, extent], strict=True)))
    return [(tuple(b for b, _ in cell), tuple(e - b for b, e in cell)) for cell in product(*edges)]


@st.composite
def layouts(draw):
    """A tensor, the number of ranks, and the block of each; ranks without one have an empty tensor or a replica."""
    shape = draw(st.lists(st.integers(0, 7), max_size=4).map(tuple))
    world = draw(st.integers(1, 4))
    tensor = random_bits(shape, draw(st.sampled_from(DTYPES)), torch.Generator().manual_seed(draw(st.integers(0, 99))))
    blocks = draw(cut(shape, world))
    holders = draw(st.permutations(range(world)))
    empty = local(tensor.new_empty(0), global_shape=shape, offset=tuple(extent + 3 for extent in shape))
    parts = [empty] * world
    for number, rank in enumerate(holders):
        offset, extents = blocks[number % len(blocks)]
        replica = number // len(blocks)
        if replica and draw(st.booleans()):
            continue
        block = box(tensor, offset, extents)
        if draw(st.booleans()) and block.dim() > 1:
            block = block.transpose(0, -1).contiguous().transpose(0, -1)
        parts[rank] = local(block, global_shape=shape, offset=offset, replica_id=replica)
    return tensor, parts


@settings(max_examples=60, deadline=None)
@given(layout=layouts(), data=st.data())
def test_any_grid_of_blocks_is_read_back_whole_and_in_any_box(layout, data):
    tensor, parts = layout
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        events = save_parts(root, [{"t": part} for part in parts])
        assert [[kind for kind, _ in each] for each in events] == [["checkpoint_saved"]] * len(parts), events
        snapshot = open_checkpoint(root / "step-00000001")
        assert verify(root / "step-00000001") == []
        assert bits(snapshot.tensor("t")) == bits(tensor)
        # nothing is written twice
        written = sum(
            len(shard.read_bytes()) - 8 - int.from_bytes(shard.read_bytes()[:8], "little") for shard in shards(root)
        )
        assert written == tensor.nbytes
        for _ in range(4):
            offset = tuple(data.draw(st.integers(0, extent)) for extent in tensor.shape)
            shape = tuple(
                data.draw(st.integers(0, extent - begin)) for begin, extent in zip(offset, tensor.shape, strict=True)
            )
            out = torch.empty(shape, dtype=tensor.dtype)
            if data.draw(st.booleans()) and len(shape) > 1:
                out = torch.empty(shape[::-1], dtype=tensor.dtype).permute(*range(len(shape))[::-1])
            snapshot.read_part("t", out, offset)
            assert bits(out) == bits(box(tensor, offset, shape))


def test_blocks_askew_of_each_other_are_read_by_rows_columns_and_whole(tmp_path):
    """A pinwheel: five blocks that no straight cut parts."""
    whole = torch.arange(81.0).reshape(9, 9)
    places = [((0, 0), (3, 6)), ((0, 6), (6, 3)), ((6, 3), (3, 6)), ((3, 0), (6, 3)), ((3, 3), (3, 3))]
    parts = [local(box(whole, *place), global_shape=(9, 9), offset=place[0]) for place in places]
    save_parts(tmp_path, [{"w": part} for part in parts])
    snapshot = open_checkpoint(tmp_path / "step-00000001")
    assert torch.equal(snapshot.tensor("w"), whole)
    for offset, shape in [((2, 0), (5, 9)), ((0, 4), (9, 2)), ((4, 4), (1, 1)), ((8, 0), (1, 9))]:
        out = torch.full(shape, -1.0)
        snapshot.read_part("w", out, offset)
        assert torch.equal(out, box(whole, offset, shape))


def test_wholes_and_parts_lie_in_one_checkpoint_beside_each_other(tmp_path):
    big = torch.randn(600, 1024)
    spread = torch.randn(5, 4)
    events = save_parts(
        tmp_path,
        [{"p": rows(spread, 0, 3)}, {"p": rows(spread, 3, 5)}],
        replicated={"big": big},
        own=[{"rng/0": torch.arange(3)}, {"rng/1": torch.arange(4)}],
    )
    assert [kind for each in events for kind, _ in each] == ["checkpoint_saved"] * 2
    snapshot = open_checkpoint(tmp_path / "step-00000001")
    assert snapshot.names() == ["big", "p", "rng/0", "rng/1"]
    for name, tensor in {"big": big, "p": spread, "rng/1": torch.arange(4)}.items():
        assert torch.equal(snapshot.tensor(name), tensor)
    out = torch.empty(7, 5)
    snapshot.read_part("big", out, (298, 1000))  # over the cut between the two ranks' rows
    assert torch.equal(out, big[298:305, 1000:1005])


def test_of_replicas_only_number_0_is_written(tmp_path):
    whole = torch.randn(40, 8)
    halves = [rows(whole, 0, 20), rows(whole, 20, 40)]
    copies = [
        local(half[0].clone(), global_shape=half[1].global_shape, offset=half[1].offset, replica_id=1)
        for half in halves
    ]
    save_parts(tmp_path, [{"w": part} for part in (*halves, *copies)])
    headers = [int.from_bytes(shard.read_bytes()[:8], "little") for shard in shards(tmp_path)]
    payload = [shard.stat().st_size - 8 - header for shard, header in zip(shards(tmp_path), headers, strict=True)]
    assert payload == [640, 640, 0, 0]
    manifest = open_checkpoint(tmp_path / "step-00000001").manifest
    assert [(piece.file[:11], piece.key, piece.offset) for piece in manifest.tensors["w"].pieces] == [
        ("shard-00000", "w[0:20]", (0, 0)),
        ("shard-00001", "w[20:40]", (20, 0)),
    ]


def test_tensors_without_dims_or_elements_have_one_owner(tmp_path):
    scalar, none = torch.tensor(2.5), torch.empty(3, 0, dtype=torch.int8)
    nothing = torch.empty(0)
    ranks = [
        {
            "scalar": local(scalar if rank == 1 else nothing, global_shape=(), offset=()),
            "none": local(none[rank : rank + 1], global_shape=(3, 0), offset=(rank, 0), replica_id=rank),
        }
        for rank in range(3)
    ]
    events = save_parts(tmp_path, ranks)
    assert [kind for each in events for kind, _ in each] == ["checkpoint_saved"] * 3
    snapshot = open_checkpoint(tmp_path / "step-00000001")
    assert {
        name: [(piece.file[:11], piece.shape) for piece in entry.pieces]
        for name, entry in snapshot.manifest.tensors.items()
    } == {"scalar": [("shard-00001", ())], "none": [("shard-00000", (3, 0))]}
    assert bits(snapshot.tensor("scalar")) == bits(scalar)
    assert bits(snapshot.tensor("none")) == bits(none)
    out = torch.zeros(())
    snapshot.read_part("scalar", out, ())
    assert out == 2.5
    assert verify(tmp_path / "step-00000001") == []


# --- blocks that do not fit ------------------------------------------------------------------------------------------


WHOLE = torch.arange(12.0).reshape(4, 3)
MISFITS = {
    "gap": (
        [rows(WHOLE, 0, 2), rows(WHOLE, 3, 4)],
        "its 2 pieces do not make up [4, 3]: element [2, 0] is in none of them",
    ),
    "overlap": (
        [rows(WHOLE, 0, 3), rows(WHOLE, 2, 4)],
        "its 2 pieces do not make up [4, 3]: element [2, 0] is in 2 of them",
    ),
    "as many elements, half of them twice": (
        [rows(WHOLE, 0, 2), local(WHOLE[1:3], global_shape=(4, 3), offset=(1, 0))],
        "its 2 pieces do not make up [4, 3]: element [1, 0] is in 2 of them",
    ),
    "a replica not numbered": (
        [rows(WHOLE, 0, 4), rows(WHOLE, 0, 4)],
        "its 2 pieces do not make up [4, 3]: element [0, 0] is in 2 of them",
    ),
    "outside": (
        [rows(WHOLE, 0, 2), local(WHOLE[:2], global_shape=(4, 3), offset=(3, 0))],
        "piece 'w[3:5]' of shard-00001-of-00002.safetensors, from [3, 0] on, lies outside of [4, 3]",
    ),
    "a whole in another place": (
        [local(WHOLE, global_shape=(4, 3), offset=(0, 1)), local(WHOLE[:0], global_shape=(4, 3), offset=(4, 0))],
        "piece 'w' of shard-00000-of-00002.safetensors, from [0, 1] on, lies outside of [4, 3]",
    ),
    "dims": (
        [rows(WHOLE, 0, 2), local(WHOLE[2:].flatten(), global_shape=(4, 3), offset=(2, 0))],
        "piece 'w[2:8]' of shard-00001-of-00002.safetensors has another number of dims than [4, 3]",
    ),
    "of nobody": (
        [rows(WHOLE, 0, 4, replica_id=1), rows(WHOLE, 0, 4, replica_id=1)],
        "its 0 pieces do not make up [4, 3]",
    ),
    "elements of a tensor that has none": (
        [local(WHOLE[:0], global_shape=(0, 3), offset=(0, 0)), local(WHOLE[:1], global_shape=(0, 3), offset=(0, 0))],
        "piece 'w[0:1]' of shard-00001-of-00002.safetensors, from [0, 0] on, lies outside of [0, 3]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISFITS)
def test_blocks_that_do_not_tile_the_whole_fail_the_save_on_all_ranks(tmp_path, kind):
    parts, fault = MISFITS[kind]
    good = torch.ones(2)
    events = save_parts(tmp_path, [{"good": rows(good, rank, rank + 1), "w": part} for rank, part in enumerate(parts)])
    for ((event, fields),) in events:
        assert event == "checkpoint_failed"
        assert fields["error"] == (
            f"tensor 'w': {fault}\n"
            "  rule: the blocks with replica_id 0 on all ranks hold each element of a tensor once, and no others\n"
            "  so:   the checkpoint was not written\n"
            "  try:  compare shape, offset and replica_id of this part on all ranks"
        )
    assert list(tmp_path.iterdir()) == []


OTHERS = {
    "name": {"v": rows(WHOLE, 2, 4)},
    "a name more": {"w": rows(WHOLE, 2, 4), "v": rows(WHOLE, 0, 0)},
    "whole shape": {"w": local(WHOLE[2:], global_shape=(4, 4), offset=(2, 0))},
    "dtype": {"w": local(WHOLE[2:].double(), global_shape=(4, 3), offset=(2, 0))},
    "dtype of an empty block": {"w": local(torch.empty(0, dtype=torch.int8), global_shape=(4, 3), offset=(4, 0))},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_ranks_that_disagree_about_a_part_are_told_so(tmp_path, kind):
    events = save_parts(tmp_path, [{"w": rows(WHOLE, 0, 2)}, OTHERS[kind]])
    for ((event, fields),) in events:
        assert event == "checkpoint_failed"
        assert fields["error"] == (
            "rank 1 saves other tensors or another step than rank 0\n"
            "  rule: replicated tensors, and those in parts, have the same names, whole shapes and dtypes on all ranks\n"
            "  so:   step 1 was not saved; earlier checkpoints are untouched\n"
            "  try:  pass what only one rank has as its own tensors"
        )
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_replicated_here_and_a_part_there_is_a_disagreement(tmp_path):
    shared = {"w": ((4, 3), torch.float32)}
    one, other = (
        lay_out_shard({}, {}, {"w": rows(WHOLE, 0, 4)}, rank=0, world_size=2),
        lay_out_shard(shared, {}, {}, rank=1, world_size=2),
    )
    assert one.fingerprint != other.fingerprint
    # while ranks that hold other blocks of the same agree
    assert one.fingerprint == lay_out_shard({}, {}, {"w": rows(WHOLE, 4, 4)}, rank=1, world_size=2).fingerprint


def test_a_name_in_two_of_the_three_maps_and_what_no_file_holds_are_refused_at_once(tmp_path):
    checkpointer = make(tmp_path)
    part = rows(torch.zeros(2), 0, 2)
    with pytest.raises(CheckpointError) as caught:
        checkpointer.save(
            1,
            {"a": torch.zeros(2), "c": torch.zeros(2)},
            {"b": torch.zeros(2), "c": torch.zeros(2)},
            {},
            sharded={"a": part, "b": part, "c": part, "d": rows(torch.zeros(2, dtype=torch.complex128), 0, 2)},
        )
    checkpointer.close()
    text = str(caught.value)
    assert text.startswith("4 problems\n1. tensor 'a' is passed twice\n  rule: a name is either replicated,")
    for wrong in ("'c' is passed 3 times", "'b' is passed twice", "tensor 'd' is torch.complex128, torch.strided"):
        assert wrong in text
    assert list(tmp_path.iterdir()) == []


# --- sizes, names, the layout that is kept ---------------------------------------------------------------------------


def test_each_whole_counts_once_for_the_space_that_is_needed():
    parts = {"w": rows(torch.zeros(10, 3), 0, 2), "none": rows(torch.zeros(0, 3), 0, 0)}
    sizes = [
        lay_out_shard(
            {"s": ((5,), torch.int8)}, {f"own/{rank}": ((7,), torch.int16)}, parts, rank=rank, world_size=4
        ).total_bytes
        for rank in range(4)
    ]
    assert sizes == [10 * 3 * 4 + 5 + 4 * 7 * 2] * 4


def test_keys_in_a_shard_never_collide(tmp_path):
    """Tensors that are called what a block of another would be called."""
    whole = torch.arange(8.0).reshape(4, 2)
    names = ["w", "w[0:2]", "w[0:2]'", "w[0:2,0:1]"]
    parts = [
        {
            "w": rows(whole, 2 * rank, 2 * rank + 2),
            "w[0:2]": rows(whole + 10, 4 * rank, 4),
            "w[0:2]'": rows(whole + 20, 4 * rank, 4),
            "w[0:2,0:1]": local(whole[:, rank : rank + 1] + 30, global_shape=(4, 2), offset=(0, rank)),
        }
        for rank in range(2)
    ]
    save_parts(tmp_path, parts)
    snapshot = open_checkpoint(tmp_path / "step-00000001")
    assert verify(snapshot.path) == []
    for number, name in enumerate(names):
        assert torch.equal(snapshot.tensor(name), whole + 10 * number)
    assert snapshot.manifest.tensors["w"].pieces[0].key == "w[0:2]''"


def test_a_part_in_another_place_or_of_another_whole_is_noticed_by_the_next_save(tmp_path):
    """Blocks of one shape throughout: first the offset changes, then the whole's shape, then who has the replica."""
    one, two = torch.arange(6.0).reshape(2, 3), torch.arange(6.0, 12.0).reshape(2, 3)
    saves = [
        ([((4, 3), (0, 0), 0), ((4, 3), (2, 0), 0)], torch.cat([one, two])),
        ([((4, 3), (2, 0), 0), ((4, 3), (0, 0), 0)], torch.cat([two, one])),
        ([((2, 6), (0, 0), 0), ((2, 6), (0, 3), 0)], torch.cat([one, two], dim=1)),
        ([((2, 3), (0, 0), 0), ((2, 3), (0, 0), 1)], one),
        ([((2, 3), (0, 0), 1), ((2, 3), (0, 0), 0)], two),
    ]
    steps = [
        [
            {"w": local(tensor, global_shape=shape, offset=offset, replica_id=replica)}
            for tensor, (shape, offset, replica) in zip((one, two), places, strict=True)
        ]
        for places, _ in saves
    ]
    for events in save_parts(tmp_path, *steps):
        assert [kind for kind, _ in events] == ["checkpoint_saved"] * 5
    for step, (_, whole) in enumerate(saves, 1):
        assert torch.equal(open_checkpoint(tmp_path / f"step-{step:08d}").tensor("w"), whole)


# --- reading a part --------------------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch):
    """(file, position, bytes, address) of every read of tensor bytes."""
    seen, real = [], os.preadv

    def preadv(fd, buffers, position):
        (buffer,) = buffers
        file = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        seen.append((file[:11], position, len(buffer), np.frombuffer(buffer, dtype=np.uint8).ctypes.data))
        return real(fd, buffers, position)

    monkeypatch.setattr(os, "preadv", preadv)
    return seen


def test_only_the_rows_that_are_needed_are_read_and_in_place_where_they_lie_as_in_the_file(tmp_path, reads):
    whole = torch.arange(100 * 8.0).reshape(100, 8)
    save_parts(tmp_path, [{"w": rows(whole, 0, 40)}, {"w": rows(whole, 40, 80)}, {"w": rows(whole, 80, 100)}])
    snapshot = open_checkpoint(tmp_path / "step-00000001")
    begin = {piece.file: snapshot._begin(piece, torch.float32) for piece in snapshot.manifest.tensors["w"].pieces}
    first, second, _ = begin.values()
    out = torch.empty(15, 8)
    snapshot.read_part("w", out, (30, 0))
    assert torch.equal(out, whole[30:45])
    # 10 rows of the first rank's block and 5 of the second's, straight to where they belong; none of the third's
    assert reads == [
        ("shard-00000", first + 30 * 32, 10 * 32, out.data_ptr()),
        ("shard-00001", second, 5 * 32, out.data_ptr() + 10 * 32),
    ]
    reads.clear()
    columns = torch.empty(5, 2)
    snapshot.read_part("w", columns, (20, 3))
    assert torch.equal(columns, whole[20:25, 3:5])
    assert [each[:3] for each in reads] == [("shard-00000", first + 20 * 32, 5 * 32)]
    reads.clear()
    snapshot.read_part("w", torch.empty(0, 8), (100, 0))
    snapshot.read_part("w", torch.empty(0, 8), (120, 0))
    snapshot.read_part("w", torch.empty(0), ())
    assert reads == []


def test_what_is_not_read_in_place_goes_through_a_buffer_of_few_rows(tmp_path, reads, monkeypatch):
    monkeypatch.setattr(reader, "BLOCK_BYTES", 100)
    whole = torch.randn(50, 8)
    save_steps(tmp_path, 1, state={"w": whole, "wide": whole.reshape(2, 200)})
    snapshot = open_checkpoint(tmp_path / "step-00000001")
    out = torch.empty(8, 23).t()
    buffers, real = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **more: buffers.append(size) or real(*size, **more))
    snapshot.read_part("w", out, (7, 0))
    assert buffers == [((3, 8),)]
    assert torch.equal(out, whole[7:30])
    assert [count for _, _, count, _ in reads] == [96] * 7 + [64]
    assert len({address for *_, address in reads}) == 1
    reads.clear()
    column = torch.empty(2, 1)
    snapshot.read_part("wide", column, (0, 150))
    assert torch.equal(column, whole.reshape(2, 200)[:, 150:151])
    assert [count for _, _, count, _ in reads] == [800, 800]


def test_a_parameter_and_a_conjugate_are_overwritten_as_they_are(tmp_path):
    numbers = torch.randn(6, dtype=torch.complex64)
    save_steps(tmp_path, 1, state={"w": torch.arange(6.0), "c": numbers})
    snapshot = open_checkpoint(tmp_path / "step-00000001")
    parameter = torch.nn.Parameter(torch.zeros(2))
    snapshot.read_part("w", parameter, (3,))
    assert parameter.tolist() == [3.0, 4.0]
    conjugate = torch.zeros(2, dtype=torch.complex64).conj()
    snapshot.read_part("c", conjugate, (1,))
    assert torch.equal(conjugate, numbers[1:3])


def test_an_unknown_name_another_dtype_and_a_box_outside_are_errors(tmp_path):
    save_steps(tmp_path, 1, state={"model/weight": torch.ones(4, 3)})
    snapshot, path = open_checkpoint(tmp_path / "step-00000001"), tmp_path / "step-00000001"
    out = torch.zeros(2, 3)
    with pytest.raises(CheckpointError) as caught:
        snapshot.read_part("model/weights", out, (0, 0))
    assert str(caught.value) == (
        f"the checkpoint {path} has no tensor 'model/weights'\n"
        "  rule: only what was saved can be loaded\n"
        "  so:   it was not loaded\n"
        "  try:  did you mean 'model/weight'?"
    )
    with pytest.raises(CheckpointError) as caught:
        snapshot.read_part("model/weight", out.double(), (0, 0))
    assert str(caught.value) == (
        f"'model/weight' is torch.float32 in {path}, and torch.float64 here\n"
        "  rule: a part is loaded into a tensor of the same dtype\n"
        "  so:   it was not loaded\n"
        "  try:  use the configuration the checkpoint was saved with"
    )
    for wrong, offset in [(out, (3, 0)), (out, (0, 1)), (out, (-1, 0)), (out, (0,)), (out[0], (0, 0)), (out[0, 0], ())]:
        with pytest.raises(CheckpointError) as caught:
            snapshot.read_part("model/weight", wrong, offset)
        assert str(caught.value) == (
            f"'model/weight' is [4, 3] in {path}, and {list(wrong.shape)} from {list(offset)} on were asked for\n"
            "  rule: a part lies inside of the saved tensor and has as many dims\n"
            "  so:   it was not loaded\n"
            "  try:  use the configuration the checkpoint was saved with, or other offsets"
        )
    assert out.sum() == 0


def test_a_part_of_a_file_that_is_gone_or_cut_is_an_error_and_the_others_still_load(tmp_path):
    whole = torch.randn(6, 4)
    save_parts(tmp_path, [{"w": rows(whole, 0, 3)}, {"w": rows(whole, 3, 6)}])
    snapshot = open_checkpoint(tmp_path / "step-00000001")
    shards(tmp_path)[1].unlink()
    out = torch.empty(3, 4)
    snapshot.read_part("w", out, (0, 0))
    assert torch.equal(out, whole[:3])
    with pytest.raises(CheckpointError, match=r"shard-00001-of-00002\.safetensors is missing"):
        snapshot.read_part("w", out, (1, 0))


@pytest.mark.gpu
def test_parts_are_saved_from_an_accelerator_and_read_into_it(tmp_path):
    device = torch.accelerator.current_accelerator()
    whole = torch.randn(300, 70)
    there = whole.to(device)
    parts = [
        {"w": local(there[:, :33], global_shape=(300, 70), offset=(0, 0))},
        {"w": local(there[:, 33:], global_shape=(300, 70), offset=(0, 33))},
    ]
    save_parts(tmp_path, parts)
    snapshot = open_checkpoint(tmp_path / "step-00000001")
    assert torch.equal(snapshot.tensor("w"), whole)
    for out in (torch.empty(120, 50, device=device), torch.empty(50, 120, device=device).t()):
        snapshot.read_part("w", out, (100, 5))
        assert torch.equal(out.cpu(), whole[100:220, 5:55])
