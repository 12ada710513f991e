from __future__ import annotations

import os
import pickle  # noqa: TID251 - the attack under test
import shutil
import zipfile

import pytest
import torch
from states import Log, large_state, lone, mixed_state, save_steps

from unisono.checkpoint import find_latest, list_checkpoints, open_checkpoint, verify
from unisono.checkpoint.manifest import encode_commit_marker
from unisono.errors import CheckpointError

SHARD = "shard-00000-of-00001.safetensors"


@pytest.fixture
def root(tmp_path):
    """Checkpoints of steps 10 and 20; the tests damage the second."""
    save_steps(tmp_path / "checkpoints", 10, 20)
    return tmp_path / "checkpoints"


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def flip_in(name, position):
    return lambda last: flip(last / name, position)


def flip_recorded_digest(last):
    flip(last / "manifest.json", (last / "manifest.json").read_bytes().index(b'"digest":"') + 10)


def truncate(last):
    with (last / SHARD).open("r+b") as file:
        file.truncate((last / SHARD).stat().st_size - 1)


def lengthen(last):
    with (last / SHARD).open("ab") as file:
        file.write(b"\0")


def mix(last):
    # as long as before, whole, but of another step
    shutil.copy(last.parent / "step-00000010" / SHARD, last / SHARD)


def link_out(last):
    outside = last.parent.parent / "outside"
    shutil.move(last / SHARD, outside)
    (last / SHARD).symlink_to(outside)


def fifo(last):
    (last / "manifest.json").unlink()
    os.mkfifo(last / "manifest.json")


def folder(last):
    (last / "manifest.json").unlink()
    (last / "manifest.json").mkdir()


def rename_step(last):
    shutil.copytree(last.parent / "step-00000010", last, dirs_exist_ok=True)


DAMAGE = {
    "shard header length": (flip_in(SHARD, 0), "has another digest than when it was written"),
    "shard header": (flip_in(SHARD, 30), "has another digest than when it was written"),
    "shard payload": (flip_in(SHARD, -1), "has another digest than when it was written"),
    "manifest start": (flip_in("manifest.json", 0), "manifest.json: JSON is malformed"),
    "manifest digest": (flip_recorded_digest, "COMMIT does not seal this manifest.json"),
    "manifest end": (flip_in("manifest.json", -1), "manifest.json"),
    "commit start": (flip_in("COMMIT", 0), "COMMIT does not seal this manifest.json"),
    "commit digest": (flip_in("COMMIT", -5), "COMMIT does not seal this manifest.json"),
    "commit emptied": (lambda last: (last / "COMMIT").write_bytes(b""), "COMMIT does not seal this manifest.json"),
    "shard cut": (truncate, f"{SHARD} has "),
    "shard grown": (lengthen, f"{SHARD} has "),
    "shard gone": (lambda last: (last / SHARD).unlink(), f"{SHARD} is missing"),
    "manifest gone": (lambda last: (last / "manifest.json").unlink(), "manifest.json is missing"),
    "manifest cut": (lambda last: os.truncate(last / "manifest.json", 200), "manifest.json: Input data was truncated"),
    "manifest a pipe": (fifo, "manifest.json is no regular file"),
    "manifest a folder": (folder, "manifest.json is no regular file"),
    "shards of two steps": (mix, "has another digest than when it was written"),
    "another step in this place": (rename_step, "manifest.json is of step 10"),
    "shard a link out of the folder": (link_out, f"{SHARD} is no regular file"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_put_into_quarantine_and_the_one_before_is_taken(root, kind):
    damage, text = DAMAGE[kind]
    last, log = root / "step-00000020", Log()
    damage(last)
    problems = verify(last)
    assert problems
    assert text in problems[0].given
    assert verify(root / "step-00000010") == []
    assert find_latest(root, lone(), emit=log) == root / "step-00000010"
    ((event, fields),) = log.events
    assert (event, fields["step"], fields["path"]) == (
        "checkpoint_quarantined",
        20,
        str(root / "quarantine" / "step-00000020"),
    )
    assert text in fields["reason"]
    assert (root / "quarantine" / "step-00000020" / "reason.txt").read_text() == fields["reason"] + "\n"
    assert [(entry.step, entry.state) for entry in list_checkpoints(root)] == [(10, "committed"), (20, "quarantined")]
    save_steps(root, 20)
    assert find_latest(root, lone()) == last


def test_every_single_flipped_byte_is_noticed(tmp_path):
    """Every 7th byte of every file, one at a time."""
    save_steps(tmp_path, 1, state={"w": torch.randn(20), "b": torch.zeros(3, dtype=torch.int8)})
    path = tmp_path / "step-00000001"
    for file in sorted(path.iterdir()):
        original = file.read_bytes()
        for position in range(0, len(original), 7):
            flip(file, position)
            assert verify(path), f"{file.name} byte {position}"
            file.write_bytes(original)
    assert verify(path) == []


def test_without_digests_names_and_sizes_are_still_checked(root):
    flip(root / "step-00000020" / SHARD, -1)
    assert find_latest(root, lone(), digests=False) == root / "step-00000020"
    truncate(root / "step-00000020")
    assert find_latest(root, lone(), digests=False) == root / "step-00000010"


def test_none_at_all_is_no_error_and_only_damaged_ones_are(root):
    assert find_latest(root.parent / "nothing", lone()) is None
    (root / "step-00000030").mkdir()
    for step in (10, 20):
        flip(root / f"step-000000{step}" / SHARD, -1)
    log = Log()
    with pytest.raises(CheckpointError) as caught:
        find_latest(root, lone(), emit=log)
    text = f"{SHARD} has another digest than when it was written"
    assert str(caught.value) == (
        f"none of the 2 checkpoints in {root} is valid: step 20: {text}; step 10: {text}\n"
        "  rule: a run resumes from the newest checkpoint whose files are as they were written\n"
        "  so:   nothing was loaded, and no new run was begun over the old one\n"
        f'  try:  look into {root}/quarantine; to start over, choose another run.dir or resume = "never"'
    )
    assert [fields["step"] for _, fields in log.events] == [20, 10]
    with pytest.raises(CheckpointError) as again:  # a scheduler starts it once more
        find_latest(root, lone())
    assert str(again.value).startswith(
        f"none of the 2 checkpoints in {root} is valid: step 10 is in quarantine; step 20 is in quarantine\n"
    )


def test_an_explicit_path_that_is_damaged_is_an_error_and_stays_where_it_is(root):
    truncate(root / "step-00000020")
    with pytest.raises(CheckpointError, match=r"bytes instead of"):
        open_checkpoint(root / "step-00000020")
    problem = verify(root / "step-00000020")[0]
    assert problem.given.startswith(f"{root}/step-00000020: {SHARD} has ")
    assert (
        problem.rule
        == "every file of a checkpoint has the size and digest its manifest says, and COMMIT seals the manifest"
    )
    assert (root / "step-00000020").is_dir()


def test_a_checkpoint_of_a_newer_unisono_stops_the_resume_and_is_left_alone(root):
    path = root / "step-00000020"
    data = (path / "manifest.json").read_bytes().replace(b'"schema": 1', b'"schema": 9')
    (path / "manifest.json").write_bytes(data)
    (path / "COMMIT").write_bytes(encode_commit_marker(data, 20))
    with pytest.raises(CheckpointError, match="a checkpoint of schema 9"):
        find_latest(root, lone())
    assert [(entry.step, entry.state) for entry in list_checkpoints(root)] == [(10, "committed"), (20, "committed")]


def test_a_manifest_that_lies_about_the_shard_is_noticed_even_when_it_is_sealed(root):
    path = root / "step-00000020"
    data = (path / "manifest.json").read_bytes()
    for old, new in ((b'"dtype":"F32"', b'"dtype":"I32"'), (b'"key":"scalar"', b'"key":"step00"')):
        changed = data.replace(old, new)
        assert changed != data
        (path / "manifest.json").write_bytes(changed)
        (path / "COMMIT").write_bytes(encode_commit_marker(changed, 20))
        assert "as the manifest says" in verify(path)[0].given
        snapshot = open_checkpoint(path)
        with pytest.raises(CheckpointError, match=r"as manifest\.json says"):
            snapshot.tensor("scalar")


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", [SHARD, "manifest.json", "COMMIT", "extra.pt", "data.pkl", ".metadata"])
def test_a_pickle_in_any_place_is_never_executed(root, tmp_path, name):
    path, canary = root / "step-00000020", tmp_path / "canary"
    if name in ("extra.pt", "data.pkl"):
        torch.save({"x": Canary(canary)}, path / name)
        assert zipfile.is_zipfile(path / name)
    else:
        (path / name).write_bytes(pickle.dumps(Canary(canary)))
    verify(path)
    found = find_latest(root, lone())
    snapshot = open_checkpoint(found)
    for tensor in snapshot.names():
        snapshot.tensor(tensor)
    save_steps(root, 30, keep_last=1)
    assert not canary.exists()
    pickle.loads(pickle.dumps(Canary(canary)))  # noqa: S301 - the bait is real
    assert canary.exists()


def test_a_quarantine_that_cannot_be_made_is_said_and_the_one_before_is_still_taken(root):
    flip(root / "step-00000020" / SHARD, -1)
    (root / "quarantine").write_text("in the way")
    log = Log()
    assert find_latest(root, lone(), emit=log) == root / "step-00000010"
    assert log.events[0][1]["path"] == f"{root}/step-00000020 (left in place: EEXIST, File exists)"


def test_large_files_are_digested_in_parts(tmp_path):
    save_steps(tmp_path, 1, state=large_state(mib=20) | mixed_state())
    assert verify(tmp_path / "step-00000001") == []
    flip(tmp_path / "step-00000001" / SHARD, 17 * 2**20)
    assert len(verify(tmp_path / "step-00000001")) == 1


def test_a_folder_in_the_place_of_the_marker_seals_nothing(root):
    last = root / "step-00000020"
    (last / "COMMIT").unlink()
    (last / "COMMIT").mkdir()
    (problem,) = verify(last)
    assert "COMMIT is no regular file" in problem.given
    assert find_latest(root, lone()) == root / "step-00000010"
