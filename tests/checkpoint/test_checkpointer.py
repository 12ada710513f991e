from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import threading
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from states import Log, all_bits, bits, large_state, make, mixed_state, save_steps

from unisono.checkpoint import find_latest, list_checkpoints, open_checkpoint, verify
from unisono.errors import CheckpointError


def committed(root):
    return [entry.step for entry in list_checkpoints(root) if entry.state == "committed"]


def raising(point, error):
    def fault(at):
        if at == point:
            raise error

    return fault


# --- what is saved is what is loaded ---------------------------------------------------------------------------------


def test_numbers_that_are_not_finite_come_back_in_the_metadata(tmp_path: Path) -> None:
    meta = {"a": [math.nan, 1.5, {"b": -math.inf}], "float": math.inf, "c": {"float": "text"}, "d": (1, None)}
    checkpointer = make(tmp_path)
    checkpointer.save(1, {}, {}, meta)
    checkpointer.close()
    read = open_checkpoint(tmp_path / "step-00000001").meta
    assert repr(read) == repr(meta | {"d": [1, None]})
    json.loads((tmp_path / "step-00000001" / "manifest.json").read_text(), parse_constant=pytest.fail)


def test_every_dtype_and_shape_comes_back_bit_by_bit(tmp_path):
    state, own = mixed_state(1) | large_state(2, mib=2), {"rng/rank-00000/torch": torch.get_rng_state()}
    meta = {"order": {"seed": 3}, "list": [1, 2.5, None], "text": "ä"}
    checkpointer = make(tmp_path)
    expected = all_bits(state | own)
    checkpointer.save(12, state, own, meta, score=0.5)
    meta["order"]["seed"] = "changed later"
    for tensor in state.values():
        tensor.zero_()
    checkpointer.wait()
    checkpointer.close()
    snapshot = open_checkpoint(tmp_path / "step-00000012")
    assert {name: bits(snapshot.tensor(name)) for name in snapshot.names()} == expected
    assert snapshot.meta == {"order": {"seed": 3}, "list": [1, 2.5, None], "text": "ä"}
    assert (snapshot.step, snapshot.world_size, snapshot.manifest.score) == (12, 1, 0.5)
    assert verify(tmp_path / "step-00000012") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000012"]


def test_the_safetensors_package_opens_a_shard(tmp_path):
    state = mixed_state()
    save_steps(tmp_path, 5, state=state)
    loaded = load_file(tmp_path / "step-00000005" / "shard-00000-of-00001.safetensors")
    assert all_bits(loaded) == all_bits(state)


def test_the_manifest_says_versions_shapes_offsets_and_digests(tmp_path):
    save_steps(tmp_path, 5, state={"w": torch.zeros(3, 2, dtype=torch.bfloat16)})
    manifest = json.loads((tmp_path / "step-00000005" / "manifest.json").read_text())
    file = "shard-00000-of-00001.safetensors"
    assert manifest["schema"] == 1
    assert manifest["versions"]["torch"] == torch.__version__
    assert set(manifest["versions"]) == {"python", "torch", "unisono"}
    assert manifest["files"][file]["bytes"] == (tmp_path / "step-00000005" / file).stat().st_size
    assert len(manifest["files"][file]["digest"]) == 32
    assert manifest["tensors"]["w"] == {
        "shape": [3, 2],
        "dtype": "BF16",
        "pieces": [{"file": file, "key": "w", "offset": [0, 0], "shape": [3, 2]}],
    }


def test_a_save_without_tensors_is_a_checkpoint(tmp_path):
    save_steps(tmp_path, 1, state={})
    assert open_checkpoint(tmp_path / "step-00000001").names() == []
    assert verify(tmp_path / "step-00000001") == []


# --- in the background -----------------------------------------------------------------------------------------------


def test_save_returns_while_the_file_is_written_and_poll_reports_it_later(tmp_path):
    gate, log = threading.Event(), Log()
    checkpointer = make(tmp_path, emit=log, fault=lambda point: gate.wait(30) if point == "mid_shard" else None)
    assert checkpointer.save(3, mixed_state(), {}, {}) > 0
    checkpointer.poll()
    assert log.events == []
    assert committed(tmp_path) == []
    gate.set()
    while not log.events:
        checkpointer.poll()
    (kind, fields), *others = log.events
    assert (kind, others) == ("checkpoint_saved", [])
    assert fields["step"] == 3
    assert fields["path"] == str(tmp_path / "step-00000003")
    assert fields["bytes"] == (tmp_path / "step-00000003" / "shard-00000-of-00001.safetensors").stat().st_size
    assert fields["stall_s"] > 0
    assert fields["save_s"] > 0
    assert checkpointer.committed_step == 3
    checkpointer.poll()
    checkpointer.close()
    checkpointer.close()
    assert log.kinds == ["checkpoint_saved"]


def test_without_asynchronous_save_returns_when_it_is_committed(tmp_path):
    log = Log()
    checkpointer = make(tmp_path, emit=log, asynchronous=False)
    checkpointer.save(3, large_state(mib=1), {}, {})
    assert committed(tmp_path) == [3]
    assert log.kinds == ["checkpoint_saved"]
    checkpointer.close()


def test_a_second_save_waits_for_the_first(tmp_path):
    log, running, most = Log(), [], []

    def fault(point):
        if point == "before_shard":
            running.append(1)
        if point == "after_commit":
            most.append(len(running))
            running.pop()

    checkpointer = make(tmp_path, emit=log, fault=fault)
    for step in (1, 2, 3, 4):
        checkpointer.save(step, large_state(step, mib=6), {}, {})
        assert [fields["step"] for _, fields in log.events] == list(range(1, step))
    checkpointer.close()
    assert committed(tmp_path) == [2, 3, 4]
    assert most == [1, 1, 1, 1]


def test_the_background_thread_gives_way_and_a_waiting_one_takes_over(tmp_path):
    """The main thread finishes, at its own priority, what the background thread began at a low one."""
    seen, waiting = [], threading.Event()

    def fault(point):
        seen.append(
            (point, threading.current_thread() is main, os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        )
        if point == "before_shard":
            waiting.wait(30)

    main = threading.current_thread()
    normal = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    checkpointer = make(tmp_path, fault=fault)
    checkpointer.save(1, large_state(), {}, {})
    while not seen:
        pass
    threading.Timer(0.2, waiting.set).start()  # by then wait() has asked for the work
    checkpointer.close()
    assert seen[0] == ("before_shard", False, 19)
    assert seen[-1] == ("after_commit", True, normal)
    assert verify(tmp_path / "step-00000001") == []


# --- failures --------------------------------------------------------------------------------------------------------


POINTS = ("before_shard", "mid_shard", "before_manifest", "before_rename", "before_commit")


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "Input/output error")]
)
def test_an_error_anywhere_is_an_event_and_leaves_the_earlier_checkpoint(tmp_path, point, error):
    save_steps(tmp_path, 1)
    log = Log()
    checkpointer = make(tmp_path, emit=log, fault=raising(point, error))
    checkpointer.save(2, large_state(mib=5), {}, {})
    checkpointer.wait()
    checkpointer.close()
    ((kind, fields),) = log.events
    assert kind == "checkpoint_failed"
    assert (fields["step"], fields["failures"], fields["max_failures"]) == (2, 1, 3)
    assert fields["error"] == (
        f"saving step 2 to {tmp_path}: {errno.errorcode[error.errno]}, {error.strerror}\n"
        "  rule: a checkpoint counts only when every rank has written all of it\n"
        "  so:   nothing was committed; earlier checkpoints are untouched\n"
        "  try:  free space or repair the storage; the next save tries again"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001"]
    assert verify(tmp_path / "step-00000001") == []
    save_steps(tmp_path, 2)
    assert committed(tmp_path) == [1, 2]


def test_after_max_failures_in_a_row_poll_raises(tmp_path):
    log, broken = Log(), [True, True, False, True, True, True]

    def fault(point):
        if point == "mid_shard" and broken.pop(0):
            raise OSError(errno.EIO, "Input/output error")

    checkpointer = make(tmp_path, emit=log, fault=fault, max_failures=3)
    for step in (1, 2, 3, 4, 5):
        checkpointer.save(step, mixed_state(), {}, {})
        checkpointer.wait()
    checkpointer.save(6, mixed_state(), {}, {})
    checkpointer._running._future.result()
    with pytest.raises(CheckpointError) as caught:
        checkpointer.poll()
    assert str(caught.value).startswith(
        "2 problems\n1. 3 checkpoints in a row could not be written\n"
        "  rule: checkpoint.max_failures = 3\n"
        "  so:   the run stops; its newest checkpoint is step 3\n"
        "  try:  repair the cause of the last failure, then start the run again\n"
        f"2. saving step 6 to {tmp_path}: EIO, Input/output error\n"
    )
    assert [fields.get("failures") for _, fields in log.events] == [1, 2, None, 1, 2, 3]
    with pytest.raises(CheckpointError, match="3 checkpoints in a row"):
        checkpointer.save(7, {}, {}, {})
    checkpointer.close()
    assert committed(tmp_path) == [3]


def test_too_little_space_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    real = os.statvfs(tmp_path)
    log = Log()
    checkpointer = make(tmp_path, emit=log)
    nearly = 1.1 * sum(tensor.nbytes for tensor in large_state().values()) // real.f_frsize

    class Small:
        f_bavail, f_frsize, f_blocks = int(nearly), real.f_frsize, real.f_blocks

    monkeypatch.setattr(os, "statvfs", lambda path: Small)
    checkpointer.save(4, large_state(), {}, {})
    checkpointer.close()
    assert log.kinds == ["checkpoint_failed"]
    assert log.events[0][1]["error"] == (
        f"{tmp_path} has 13.2 MiB free, a checkpoint of step 4 takes 12 MiB\n"
        "  rule: 1.2 times its size is free before a checkpoint is begun\n"
        "  so:   step 4 was not saved; earlier checkpoints are untouched\n"
        "  try:  free 1.2 MiB there, or keep fewer with checkpoint.keep_last"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 24 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=24m,mode=700", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("DISK-FULL NOT TESTED: there is no mount command here")
    if mounted.returncode:
        pytest.skip(f"DISK-FULL NOT TESTED: a small tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_up_while_writing_costs_that_save_only(small_disk):
    root, log, ballast, filled = small_disk / "checkpoints", Log(), small_disk / "ballast", []

    def fault(point):
        if point == "mid_shard" and not filled:
            space = os.statvfs(small_disk)
            filled.append(ballast.write_bytes(bytes(space.f_bavail * space.f_frsize)))

    save_steps(root, 1, state=large_state(1, mib=4))
    checkpointer = make(root, emit=log, fault=fault)
    expected = bits(large_state(1, mib=4)["model/big"])
    checkpointer.save(2, large_state(2, mib=8), {}, {})
    checkpointer.wait()
    assert log.kinds == ["checkpoint_failed"]
    assert "ENOSPC, No space left on device" in log.events[0][1]["error"]
    assert sorted(path.name for path in root.iterdir()) == ["step-00000001"]
    assert bits(open_checkpoint(root / "step-00000001").tensor("model/big")) == expected
    ballast.unlink()
    checkpointer.save(3, large_state(3, mib=8), {}, {})
    checkpointer.wait()
    checkpointer.save(4, large_state(4, mib=11), {}, {})  # 12 MiB are free
    checkpointer.close()
    assert log.kinds == ["checkpoint_failed", "checkpoint_saved", "checkpoint_failed"]
    assert "1.2 times its size is free before a checkpoint is begun" in log.events[2][1]["error"]
    assert committed(root) == [1, 3]


def test_a_file_size_limit_is_a_failed_save(tmp_path):
    import resource

    log, limits = Log(), resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpointer = make(tmp_path, emit=log)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        checkpointer.save(1, large_state(), {}, {})
        checkpointer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "EFBIG, File too large" in log.events[0][1]["error"]
    assert list(tmp_path.iterdir()) == []


# --- names and retention ---------------------------------------------------------------------------------------------


def test_retention_keeps_the_last_the_periodic_and_the_best(tmp_path):
    log = Log()
    checkpointer = make(tmp_path, emit=log, keep_last=2, keep_every_steps=100, keep_best=1)
    scores = {10: 3.0, 20: 0.5, 30: 2.0, 100: 2.5, 110: 2.6, 120: 2.7, 1000: None, 1010: float("nan")}
    for step, score in scores.items():
        checkpointer.save(step, {"w": torch.full((3,), float(step))}, {}, {}, score=score)
    checkpointer.close()
    assert committed(tmp_path) == [20, 100, 1000, 1010]
    assert "checkpoint_failed" not in log.kinds
    # a new attempt knows the scores of the old one
    again = make(tmp_path, attempt=2, keep_last=1, keep_best=1)
    again.save(1020, {}, {}, {}, score=0.4)
    again.close()
    assert committed(tmp_path) == [1020]


def test_pruning_step_10_keeps_step_100(tmp_path):
    save_steps(tmp_path, 10, 100, keep_last=1, keep_best=0)
    assert committed(tmp_path) == [100]


def test_a_checkpoint_is_only_pruned_after_a_newer_one_is_committed(tmp_path):
    save_steps(tmp_path, 1)
    there = []

    def fault(point):
        there.append((point, committed(tmp_path)))

    checkpointer = make(tmp_path, fault=fault, keep_last=1)
    checkpointer.save(2, mixed_state(), {}, {})
    checkpointer.close()
    assert there == [*((point, [1]) for point in POINTS), ("after_commit", [1, 2])]
    assert committed(tmp_path) == [2]


def test_a_step_stays_committed_if_the_older_ones_could_not_be_deleted(tmp_path, monkeypatch):
    def fails(*_):
        raise MemoryError

    log = Log()
    checkpointer = make(tmp_path, emit=log, keep_last=1)
    monkeypatch.setattr("unisono.checkpoint.writer.expired_checkpoints", fails)
    checkpointer.save(2, mixed_state(), {}, {})
    checkpointer.wait_committed(2, resumed_step=None)
    checkpointer.close()
    assert (committed(tmp_path), log.kinds) == ([2], ["checkpoint_saved"])
    assert log.events[0][1]["retention_problem"] == "out of memory"


def test_reading_a_checkpoint_takes_memory_for_what_its_manifest_holds(tmp_path):
    save_steps(tmp_path, 1)
    open_checkpoint(tmp_path / "step-00000001")  # the decoder is made once
    tracemalloc.start()
    try:
        open_checkpoint(tmp_path / "step-00000001")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_the_error_of_a_last_step_that_is_not_committed_says_why(tmp_path):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    checkpointer = make(tmp_path, fault=raising("mid_shard", full))
    checkpointer.save(3, mixed_state(), {}, {})
    with pytest.raises(CheckpointError) as caught:
        checkpointer.wait_committed(3, resumed_step=2)
    checkpointer.close()
    last, cause = caught.value.problems
    assert "the checkpoint of the last step, 3, could not be written" in last.given
    assert "No space left on device" in cause.given


def test_a_committed_step_is_never_overwritten(tmp_path):
    save_steps(tmp_path, 5)
    before = (tmp_path / "step-00000005" / "manifest.json").read_bytes()
    log = Log()
    checkpointer = make(tmp_path, emit=log, attempt=2)
    checkpointer.save(5, mixed_state(99), {}, {})
    checkpointer.close()
    assert log.events[0][1]["error"] == (
        f"{tmp_path}/step-00000005 exists already\n"
        "  rule: a committed checkpoint is never overwritten\n"
        "  so:   step 5 was not saved again\n"
        "  try:  resume from the newest checkpoint, move the later ones away first, or use another run.dir"
    )
    assert (tmp_path / "step-00000005" / "manifest.json").read_bytes() == before


def test_a_link_in_the_place_of_a_step_is_not_followed(tmp_path):
    (tmp_path / "outside").mkdir()
    root = tmp_path / "checkpoints"
    root.mkdir()
    (root / "step-00000005").symlink_to(tmp_path / "outside", target_is_directory=True)
    log = Log()
    checkpointer = make(root, emit=log)
    checkpointer.save(5, mixed_state(), {}, {})
    checkpointer.close()
    assert log.kinds == ["checkpoint_failed"]
    assert list((tmp_path / "outside").iterdir()) == []
    assert (root / "step-00000005").is_symlink()


def test_where_renaming_is_not_atomic_the_commit_mark_alone_decides(tmp_path):
    """Half of a directory under its final name: what a crash leaves where a rename is a copy."""
    save_steps(tmp_path, 5, 10)
    whole = tmp_path / "step-00000010"
    half = tmp_path / "step-00000015"
    half.mkdir()
    (half / "shard-00000-of-00001.safetensors").write_bytes(
        (whole / "shard-00000-of-00001.safetensors").read_bytes()[:99]
    )
    (half / "manifest.json").write_bytes((whole / "manifest.json").read_bytes())
    from states import lone

    assert find_latest(tmp_path, lone()) == whole
    save_steps(tmp_path, 15)
    assert verify(half) == []
    (tmp_path / "step-00000016").mkdir()
    save_steps(tmp_path, 20)
    assert not (tmp_path / "step-00000016").exists()


# --- what can never be saved -----------------------------------------------------------------------------------------


def test_input_that_can_never_be_saved_is_refused_at_once_with_all_problems(tmp_path):
    checkpointer = make(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        checkpointer.save(
            1,
            {
                "a": torch.zeros(2),
                "q": torch.zeros(2, dtype=torch.complex128),
                "__metadata__": torch.zeros(1),
                "s": torch.eye(3).to_sparse(),
            },
            {"a": torch.zeros(2)},
            {},
        )
    text = str(caught.value)
    assert text.startswith("4 problems\n1. tensor 'a' is passed twice\n")
    for given in (
        "tensor 'q' is torch.complex128, torch.strided",
        "tensor '__metadata__' is torch.float32, torch.strided",
        "tensor 's' is torch.float32, torch.sparse_coo",
    ):
        assert given in text
    with pytest.raises(CheckpointError, match="meta is no JSON: Object of type PosixPath"):
        checkpointer.save(1, {}, {}, {"path": Path("x")})
    checkpointer.close()
    assert list(tmp_path.iterdir()) == []
