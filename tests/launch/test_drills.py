"""Ranks of a real group die and hang in the middle of collectives; the next attempt must come up, every time."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from launching import PRELUDE, run
from procs import marked, wait_until

# ``plan`` says what happens in which attempt: {epoch: (rank, signal)}; the others finish
DRILL = """
import threading
import torch
from unisono.dist import join_world
plan = {plan}
world = join_world(job, device_type="cpu", timeout_s=3)
rank, number = plan.get(world.job.restart_count, (None, 0))
if rank == job.rank:
    # all_reduce is what every rank does nearly all the time, so that is where the signal hits
    threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
tensor = torch.ones(500_000)
for step in range(10**9 if rank is not None else 3):
    world.all_reduce(tensor)
    tensor /= job.world_size
assert tensor.eq(1).all()
seen("done", f"{{job.source}} {{job.shared_store}} {{world.job.restart_count}}")
world.close()
"""


@pytest.mark.full
def test_killed_and_stopped_ranks_are_replaced_by_the_next_attempt(tmp_path: Path) -> None:
    # a worker, then the rank that hosts the store, then a hang that only a timeout ends
    script = DRILL.format(plan="{0: (1, signal.SIGKILL), 1: (0, signal.SIGKILL), 2: (1, signal.SIGSTOP)}")
    code, said, launched = run(script, tmp_path)
    assert code == 0, said
    attempts = launched.record()["attempts"]
    assert [attempt["root_rank"] for attempt in attempts] == [1, 0, 0, None]
    # the stopped rank is killed by the launcher, so the rank that failed first is its peer, which says who it was
    assert attempts[2]["exit_codes"] == [1, -9]
    assert "is stopped" in said
    assert "attempt 2: A hang, caused by rank 1 (pid " in said
    assert [(launched.run_dir / f"done.{rank}.3").read_text() for rank in (0, 1)] == ["unisono False 3"] * 2


@pytest.mark.full
def test_five_of_five_restarts_come_up(tmp_path: Path) -> None:
    script = DRILL.format(plan="{epoch: (epoch % 3, signal.SIGKILL) for epoch in range(5)}")
    code, said, launched = run(script, tmp_path, num_processes=3, max_restarts=5)
    assert code == 0, said
    assert [attempt["root_rank"] for attempt in launched.record()["attempts"]] == [0, 1, 2, 0, 1, None]


def torchrun(plan: str, folder: Path, restarts: int) -> list[str]:
    """What the ranks of the last attempt left, after torchrun has restarted them ``restarts`` times."""
    (folder / "logs").mkdir()
    worker = folder / "worker.py"
    worker.write_text(PRELUDE + DRILL.format(plan=plan))
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, f"--max-restarts={restarts}", "--monitor-interval=0.1", str(worker)],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "MARK": mark, "UNISONO_LOGS": str(folder / "logs")},
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    wait_until(lambda: not marked(mark), "torchrun's workers are gone")
    return [(folder / f"done.{rank}.{restarts}").read_text() for rank in (0, 1)]


@pytest.mark.full
def test_torchrun_restarts_although_its_store_keeps_the_keys_of_the_dead(tmp_path: Path) -> None:
    plan = "{epoch: (epoch % 2, signal.SIGKILL) for epoch in range(5)}"
    assert torchrun(plan, tmp_path, 5) == ["torchrun True 5"] * 2
