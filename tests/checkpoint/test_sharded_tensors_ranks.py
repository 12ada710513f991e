"""Several real processes that each hold blocks: saved by three, read by others, failing together, damage."""

from __future__ import annotations

import pytest
import torch
from states import Log, bits, lone, make, random_bits

from unisono.checkpoint import find_latest, list_checkpoints, open_checkpoint, verify
from unisono.parallel.sharding import TensorShard

SHAPES = {
    "model/embed": ((103, 64), torch.float32),
    "model/norm": ((2,), torch.bfloat16),
    "optim/exp_avg/embed": ((103, 64), torch.float32),
    "conv": ((6, 5, 3, 3), torch.float16),
    "big": ((1500, 1024), torch.float32),
}


def local(tensor, **where):
    """A rank's part of a global tensor, and where it lies."""
    return tensor, TensorShard(**where)


def wholes(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: random_bits(shape, dtype, generator) for name, (shape, dtype) in SHAPES.items()}


def place(shape, dim, rank, world):
    """Offset and shape of a rank's block: chunks of dim ``dim``, as large as those of FSDP, the last ones shorter or empty."""
    chunk = -(-shape[dim] // world)
    begin, end = min(rank * chunk, shape[dim]), min((rank + 1) * chunk, shape[dim])
    offset = [0] * len(shape)
    offset[dim] = begin
    return tuple(offset), (*shape[:dim], end - begin, *shape[dim + 1 :])


def box(tensor, offset, shape):
    return tensor[tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))]


def cut_rows(tensor, rank, world):
    offset, shape = place(tensor.shape, 0, rank, world)
    return local(box(tensor, offset, shape), global_shape=tuple(tensor.shape), offset=offset)


def save_rows(world, root, steps):
    """Every tensor cut along dim 0, overwritten as soon as it is saved, beside tensors of all ranks and of each."""
    log = Log()
    checkpointer = make(root, world=world, emit=log, keep_last=100)
    for step in steps:
        tensors = wholes(step)
        parts = {name: cut_rows(tensor, world.rank, world.world_size) for name, tensor in tensors.items()}
        rng = {f"rng/rank-{world.rank:05d}/torch": torch.full((5,), world.rank, dtype=torch.uint8)}
        checkpointer.save(step, {"step": torch.tensor(step)}, rng, {}, sharded=parts)
        for tensor in tensors.values():
            tensor.zero_()
        checkpointer.wait()
    checkpointer.close()
    return log.events


def load_boxes(world, root, dim):
    """This rank's blocks of another layout, and one tensor whole."""
    snapshot = open_checkpoint(find_latest(root, world))
    found = {}
    for name in SHAPES:
        spec = snapshot.spec(name)
        offset, shape = place(spec.shape, dim % len(spec.shape), world.rank, world.world_size)
        out = torch.empty(shape, dtype=spec.dtype)
        snapshot.read_part(name, out, offset)
        found[name] = offset, bits(out)
    return found, bits(snapshot.tensor("conv")), snapshot.tensor("step").item()


def test_what_three_ranks_saved_is_read_by_two_in_columns_and_by_one_whole(tmp_path, pool):
    for events in pool.run(save_rows, tmp_path, [10], ranks=3):
        assert [kind for kind, _ in events] == ["checkpoint_saved"]
    path = tmp_path / "step-00000010"
    assert verify(path) == []
    expected = wholes(10)
    for readers, dim in ((2, 1), (2, 0), (1, 0)):
        for rank, (found, conv, step) in enumerate(pool.run(load_boxes, tmp_path, dim, ranks=readers)):
            for name, tensor in expected.items():
                offset, shape = place(tensor.shape, dim % tensor.dim(), rank, readers)
                assert found[name] == (offset, bits(box(tensor, offset, shape)))
            assert conv == bits(expected["conv"])
            assert step == 10
    manifest = open_checkpoint(path).manifest
    # the third rank lies behind the end of the norm's two elements
    assert [piece.file[:11] for piece in manifest.tensors["model/norm"].pieces] == ["shard-00000", "shard-00001"]
    assert [piece.shape for piece in manifest.tensors["model/embed"].pieces] == [(35, 64), (35, 64), (33, 64)]


@pytest.mark.parametrize("name", ["big", "model/norm"])
def test_a_flipped_byte_in_one_ranks_block_is_found_and_the_file_named(tmp_path, pool, name):
    pool.run(save_rows, tmp_path, [10, 20], ranks=3)
    snapshot = open_checkpoint(tmp_path / "step-00000020")
    piece = snapshot.manifest.tensors[name].pieces[1]
    with (snapshot.path / piece.file).open("r+b") as file:
        file.seek(snapshot._begin(piece, snapshot.spec(name).dtype) + 1)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0x10]))
    text = "shard-00001-of-00003.safetensors has another digest than when it was written"
    assert [problem.given for problem in verify(snapshot.path)] == [f"{snapshot.path}: {text}"]
    log = Log()
    assert find_latest(tmp_path, lone(), emit=log) == tmp_path / "step-00000010"
    assert [(kind, fields["reason"]) for kind, fields in log.events] == [("checkpoint_quarantined", text)]
    assert [(entry.step, entry.state) for entry in list_checkpoints(tmp_path)] == [
        (10, "committed"),
        (20, "quarantined"),
    ]


def save_what_does_not_fit(world, root):
    """A gap on one rank, then another whole shape on one, then all in order."""
    log = Log()
    whole = torch.arange(12.0).reshape(6, 2)
    checkpointer = make(root, world=world, emit=log, max_failures=9)
    gap = local(
        whole[2 * world.rank : 2 * world.rank + 2 - (world.rank == 1)],
        global_shape=(6, 2),
        offset=(2 * world.rank, 0),
    )
    checkpointer.save(1, {}, {}, {}, sharded={"model/w": gap})
    other = local(whole[:1], global_shape=(6 + world.rank // 2, 2), offset=(0, 0))
    checkpointer.save(2, {}, {}, {}, sharded={"model/w": other})
    checkpointer.save(3, {}, {}, {}, sharded={"model/w": cut_rows(whole, world.rank, world.world_size)})
    checkpointer.close()
    return [(kind, fields.get("error", "").partition("\n")[0]) for kind, fields in log.events]


def test_blocks_that_do_not_fit_fail_on_all_ranks_and_the_next_save_works(tmp_path, pool):
    for events in pool.run(save_what_does_not_fit, tmp_path, ranks=3):
        assert events == [
            (
                "checkpoint_failed",
                "tensor 'model/w': its 3 pieces do not make up [6, 2]: element [3, 0] is in none of them",
            ),
            ("checkpoint_failed", "rank 2 saves other tensors or another step than rank 0"),
            ("checkpoint_saved", ""),
        ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003"]
    assert torch.equal(open_checkpoint(tmp_path / "step-00000003").tensor("model/w"), torch.arange(12.0).reshape(6, 2))
