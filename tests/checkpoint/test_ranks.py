"""Several real processes: who writes what, agreement about failures, resharding, the training's collectives meanwhile."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from states import Log, all_bits, bits, large_state, make, mixed_state

from unisono.checkpoint import find_latest, list_checkpoints, open_checkpoint, verify
from unisono.errors import CheckpointError


def committed(root):
    return [entry.step for entry in list_checkpoints(root) if entry.state == "committed"]


def full_state(seed=0):
    return mixed_state(seed) | large_state(seed)


def save_all(world, root, steps, seed):
    """A state of all ranks and a tensor of each rank's own, overwritten as soon as they are saved; returns the events."""
    log = Log()
    checkpointer = make(root, world=world, emit=log, keep_last=100)
    for step in steps:
        state = full_state(seed + step)
        own = {f"rng/rank-{world.rank:05d}/torch": torch.full((5,), world.rank, dtype=torch.uint8)}
        checkpointer.save(step, state, own, {"seed": seed})
        for tensor in state.values():
            tensor.zero_()
        checkpointer.wait()
    checkpointer.close()
    return log.events


def load_all(world, root):
    found = find_latest(root, world)
    snapshot = open_checkpoint(found)
    return snapshot.step, {name: bits(snapshot.tensor(name)) for name in snapshot.names()}


def test_world_2_to_1_to_3_has_the_same_bits_and_even_shards(tmp_path, pool):
    for number, ranks in enumerate((2, 1, 3), 1):
        step = 10 * number
        results = pool.run(save_all, tmp_path, [step], 0, ranks=ranks)
        assert [[kind for kind, _ in events] for events in results] == [["checkpoint_saved"]] * ranks
        path = tmp_path / f"step-000000{step}"
        shards = sorted(path.glob("*.safetensors"))
        assert [shard.name for shard in shards] == [
            f"shard-{rank:05d}-of-{ranks:05d}.safetensors" for rank in range(ranks)
        ]
        sizes = [shard.stat().st_size for shard in shards]
        assert max(sizes) - min(sizes) < 2**20 + 2**16
        assert results[0][0][1]["bytes"] == sum(sizes)
        expected = all_bits(full_state(step)) | {
            f"rng/rank-{rank:05d}/torch": bits(torch.full((5,), rank, dtype=torch.uint8)) for rank in range(ranks)
        }
        for readers in (1, 2):
            for found in pool.run(load_all, tmp_path, ranks=readers):
                assert found == (step, expected)
        assert verify(path) == []
        if ranks == 2:
            manifest = open_checkpoint(path).manifest
            pieces = manifest.tensors["model/big"].pieces
            assert [(piece.file[:11], piece.offset) for piece in pieces] == [
                ("shard-00000", (0, 0)),
                ("shard-00001", (pieces[0].shape[0], 0)),
            ]
            # each shard is a file the safetensors package reads, with its own piece of the tensor
            halves = [load_file(shard)[piece.key] for shard, piece in zip(shards, pieces, strict=True)]
            assert torch.equal(torch.cat(halves), full_state(step)["model/big"])


def train_and_save(world, root):
    """Steps with all-reduces on the training group while saves are under way on their own."""
    torch.manual_seed(1)
    weights, log = {"w": torch.randn(1 << 20), "v": torch.randn(300, 7)}, Log()
    checkpointer = make(root, world=world, emit=log, keep_last=100)
    expected = {}
    for step in range(1, 61):
        for tensor in weights.values():
            gradient = torch.full_like(tensor, float(world.rank + step))
            world.all_reduce(gradient)
            tensor.add_(gradient, alpha=0.001)
        checkpointer.poll()
        if step % 10 == 0:
            checkpointer.save(step, weights, {f"own/{world.rank}": torch.tensor(step)}, {})
            expected[step] = all_bits(weights)
    checkpointer.close()
    return log.kinds, expected


def test_saving_while_the_training_group_reduces_neither_hangs_nor_tears(tmp_path, pool):
    (kinds, expected), (others, _) = pool.run(train_and_save, tmp_path)
    assert kinds == others == ["checkpoint_saved"] * 6
    for step, wanted in expected.items():
        snapshot = open_checkpoint(tmp_path / f"step-{step:08d}")
        assert {name: bits(snapshot.tensor(name)) for name in wanted} == wanted
        assert snapshot.tensor("own/1") == step
        assert verify(snapshot.path) == []


def fail_on_one_rank(world, root, culprit, point, code):
    log, broken = Log(), [True]

    def fault(at):
        if at == point and world.rank == culprit and broken:
            broken.clear()
            raise OSError(code, "the rank's own trouble")

    checkpointer = make(root, world=world, emit=log, fault=fault)
    checkpointer.save(1, large_state(), {}, {})
    checkpointer.wait()
    world.barrier()  # rank 0 cleans up, then returns from wait
    leftovers = sorted(path.name for path in Path(root).iterdir())
    world.barrier()
    checkpointer.save(2, large_state(), {}, {})
    checkpointer.close()
    return log.events, leftovers


@pytest.mark.parametrize(
    ("culprit", "point", "code"),
    [
        (1, "before_shard", errno.EIO),
        (1, "mid_shard", errno.ENOSPC),
        (0, "mid_shard", errno.EIO),
        (0, "before_commit", errno.ENOSPC),
    ],
)
def test_what_fails_on_one_rank_fails_on_all_and_the_next_save_works(tmp_path, pool, culprit, point, code):
    for events, leftovers in pool.run(fail_on_one_rank, tmp_path, culprit, point, code):
        assert [kind for kind, _ in events] == ["checkpoint_failed", "checkpoint_saved"]
        assert f"saving step 1 to {tmp_path}: {errno.errorcode[code]}, the rank's own trouble" in events[0][1]["error"]
        assert leftovers == []
    assert committed(tmp_path) == [2]
    assert verify(tmp_path / "step-00000002") == []


def fail_until_it_stops(world, root):
    log = Log()

    def fault(at):
        if at == "mid_shard" and world.rank == 1:
            raise OSError(errno.EIO, "broken")

    checkpointer = make(root, world=world, emit=log, fault=fault, max_failures=2)
    steps = []
    try:
        for step in range(1, 9):
            checkpointer.save(step, mixed_state(), {}, {})
            steps.append(step)
            while not log.events or log.events[-1][1]["step"] != step:
                checkpointer.poll()  # never raises here: the other rank may not have noticed yet
            world.all_reduce(torch.ones(1))
    except CheckpointError as error:
        return steps, log.kinds, str(error)
    finally:
        checkpointer.close()
    return "went on"


def test_all_ranks_stop_at_the_same_save_after_max_failures(tmp_path, pool):
    for steps, kinds, text in pool.run(fail_until_it_stops, tmp_path):
        assert steps == [1, 2]
        assert kinds == ["checkpoint_failed"] * 2
        assert "2 checkpoints in a row could not be written" in text


def save_what_does_not_fit_together(world, root):
    log = Log()
    checkpointer = make(root, world=world, emit=log, max_failures=9)
    other_shape = {"w": torch.zeros(3 + world.rank)}
    checkpointer.save(1, other_shape, {}, {})
    checkpointer.save(2 + world.rank, {"w": torch.zeros(3)}, {}, {})
    checkpointer.save(4, {}, {"rng": torch.zeros(3)}, {})
    checkpointer.save(5, {"w": torch.zeros(3)}, {f"rng/{world.rank}": torch.zeros(world.rank)}, {})
    checkpointer.close()
    return [(kind, fields.get("error", "").splitlines()[:1]) for kind, fields in log.events]


def test_ranks_that_save_different_things_are_told_so(tmp_path, pool):
    for events in pool.run(save_what_does_not_fit_together, tmp_path):
        assert events == [
            ("checkpoint_failed", ["rank 1 saves other tensors or another step than rank 0"]),
            ("checkpoint_failed", ["rank 1 saves other tensors or another step than rank 0"]),
            (
                "checkpoint_failed",
                ["tensor 'rng' comes from shard-00000-of-00002.safetensors and from shard-00001-of-00002.safetensors"],
            ),
            ("checkpoint_saved", []),
        ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005"]


def find_with_events(world, root):
    log = Log()
    return str(find_latest(root, world, emit=log)), log.events


def open_in_a_file(world, root):
    try:
        make(root, world=world)
    except CheckpointError as error:
        return str(error)
    return "opened"


def test_ranks_agree_about_damage_that_only_one_of_them_looked_at(tmp_path, pool):
    root = tmp_path / "checkpoints"
    pool.run(save_all, root, [10, 20], 0)
    shard = root / "step-00000020" / "shard-00001-of-00002.safetensors"
    with shard.open("r+b") as file:
        file.seek(-1000, 2)
        file.write(b"\x55\xaa")
    for path, events in pool.run(find_with_events, root):
        assert path == str(root / "step-00000010")
        ((kind, fields),) = events
        assert kind == "checkpoint_quarantined"
        assert fields["reason"] == f"{shard.name} has another digest than when it was written"
    (tmp_path / "file").write_text("in the way")
    for text in pool.run(open_in_a_file, tmp_path / "file" / "checkpoints"):
        assert "ENOTDIR, Not a directory" in text
