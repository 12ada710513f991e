"""kill -9 at every point of a save, in real processes: what is committed before counts, what was begun does not."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
from procs import wait_until
from states import all_bits, bits, large_state, lone, make, save_steps

from unisono.checkpoint import find_latest, list_checkpoints, open_checkpoint, verify
from unisono.dist import join_world
from unisono.errors import CommError

POINTS = ("before_shard", "mid_shard", "before_manifest", "before_rename", "before_commit", "after_commit")
GOOD, NEXT = 10, 20


def save_and_die(world, root, victim, point):
    """Commits GOOD, then dies (rank ``victim``) at ``point`` of NEXT; the others go on until they notice."""
    deadly = False

    def fault(at):
        if deadly and at == point and world.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpointer = make(root, world=world, fault=fault)
    for step in (GOOD, NEXT):
        deadly = step == NEXT
        checkpointer.save(step, large_state(step, mib=9), {}, {"step": step})
        checkpointer.wait()
    checkpointer.close()


def drill(job, folder, cases):
    """Each case in a child of this warm process, which has torch loaded but no thread yet; returns exit codes."""
    statuses = []
    for number, (victim, point) in enumerate(cases):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                fd = os.dup(job.listen_fd) if job.listen_fd is not None else None
                world = join_world(replace(job, restart_count=number, listen_fd=fd), device_type="cpu", timeout_s=20)
                save_and_die(world, folder / f"{victim}-{point}", victim, point)
                code = 0
            except CommError:
                code = 3
            finally:
                os._exit(code)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        # all ranks use the same port for every case: nobody goes on while a child of the last one may still listen
        (folder / f"done-{number}-{job.rank}").touch()
        everyone = [folder / f"done-{number}-{rank}" for rank in range(job.world_size)]
        wait_until(
            lambda files=everyone: all(file.exists() for file in files), f"all ranks are done with case {number}"
        )
    return statuses


def check(root, point):
    """The newest good one is found whole, and the next attempt saves the lost step over what was left behind."""
    step = NEXT if point == "after_commit" else GOOD
    found = find_latest(root, lone())
    assert found == root / f"step-{step:08d}"
    snapshot = open_checkpoint(found)
    assert {name: bits(snapshot.tensor(name)) for name in snapshot.names()} == all_bits(large_state(step, mib=9))
    assert [entry.step for entry in list_checkpoints(root) if entry.state == "committed"][-1] == step
    if step == GOOD:
        save_steps(root, NEXT, state=large_state(NEXT, mib=9))
    assert sorted(path.name for path in root.iterdir()) == [f"step-{GOOD:08d}", f"step-{NEXT:08d}"]
    assert verify(root / f"step-{NEXT:08d}") == []


def test_one_process(tmp_path, pool):
    cases = [(0, point) for point in POINTS]
    (statuses,) = pool.run(drill, tmp_path, cases, ranks=1, joined=False)
    assert statuses == [-signal.SIGKILL] * len(cases)
    for victim, point in cases:
        check(tmp_path / f"{victim}-{point}", point)


def test_two_processes(tmp_path, pool):
    cases = [(0, point) for point in POINTS] + [(1, "before_shard"), (1, "mid_shard")]
    statuses = pool.run(drill, tmp_path, cases, ranks=2, joined=False)
    for (victim, point), *codes in zip(cases, *statuses, strict=True):
        assert codes[victim] == -signal.SIGKILL
        # the survivor's save failed, it was told, and close returned; after the commit it may not even notice
        assert codes[1 - victim] == 0, (victim, point)
        check(tmp_path / f"{victim}-{point}", point)


@pytest.mark.full
@pytest.mark.parametrize("number", range(12))
def test_killed_from_outside_at_any_moment(tmp_path, pool, number):
    """No named point: the process dies somewhere between the first and the third of many saves."""
    (found,) = pool.run(kill_somewhere, tmp_path, 0.02 + 0.013 * number, ranks=1, joined=False)
    assert found == -signal.SIGKILL
    latest = find_latest(tmp_path, lone())
    entries = [entry for entry in list_checkpoints(tmp_path) if entry.state == "committed"]
    assert all(verify(entry.path) == [] for entry in entries)
    if latest is not None:
        snapshot = open_checkpoint(latest)
        assert {name: bits(snapshot.tensor(name)) for name in snapshot.names()} == all_bits(large_state(snapshot.step))


def kill_somewhere(job, root, delay_s):
    import time

    child = os.fork()
    if child == 0:
        checkpointer = make(root)
        for step in range(1, 1000):
            checkpointer.save(step, large_state(step), {}, {})
        os._exit(0)
    while not root.is_dir() or not any(root.iterdir()):
        time.sleep(0.001)
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
