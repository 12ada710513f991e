"""A cable is pulled in the middle of a synchronous run over two hosts: both end and name the other, and a new attempt finishes.

The hosts are network namespaces, each with a process table of its own: so the ranks cannot look each other up, share no memory,
and all that they exchange passes the cable.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Desk
from netns import Cable, cable
from procs import wait_until

from unisono.checkpoint import open_checkpoint
from unisono.observe.events import events_path, read_events

STEPS, EVERY, TIMEOUT_S = 80, 20, 12.0
SETTINGS = {
    "plan.sync": "dist_sync",
    "train.steps": STEPS,
    "train.eval_every_steps": 0,
    "checkpoint.every_steps": EVERY,
}
APART = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


@contextlib.contextmanager
def ranks(
    desk: Desk, line: Cable, run_dir: Path, epoch: int, timeout_s: float = 60.0
) -> Iterator[list[subprocess.Popen[str]]]:
    """The two of one attempt, as a launcher over hosts starts them."""
    own = {"run.dir": run_dir, "launch.timeout_s": timeout_s}
    settings = [*desk.settings, *(f"--set={key}={value}" for key, value in {**SETTINGS, **own}.items())]
    started = []
    with contextlib.ExitStack() as stack:
        for rank, namespace in enumerate((line.here, line.there)):
            place = {
                "UNISONO_RUN_ID": "partition",
                "UNISONO_RESTART_COUNT": str(epoch),
                "UNISONO_RANK": str(rank),
                "UNISONO_LOCAL_RANK": "0",
                "UNISONO_WORLD": "2",
                "UNISONO_LOCAL_WORLD": "1",
                "UNISONO_MASTER_ADDR": line.here_address,
                "UNISONO_MASTER_PORT": str(5621 + epoch),
                "GLOO_SOCKET_IFNAME": "end",
            }
            path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            command = ["nsenter", f"--net=/run/netns/{namespace}", *APART, sys.executable, "-m", "unisono", "train"]
            process = subprocess.Popen(
                [*command, *settings],
                env=os.environ | desk.environ | path | place,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            started.append(process)
        yield started


def events(run_dir: Path) -> list[dict[str, Any]]:
    path = events_path(run_dir, 0)
    return read_events(path).events if path.exists() else []


def kinds(run_dir: Path) -> set[str]:
    return {event["kind"] for event in events(run_dir)}


def steps(run_dir: Path) -> list[int]:
    return [event["step"] for event in events(run_dir) if event["kind"] == "step"]


def bits(run_dir: Path) -> dict[str, bytes]:
    """Of parameters, buffers and optimizer state at the end, and of what the run has counted."""
    last = open_checkpoint(run_dir / "checkpoints" / f"step-{STEPS:08d}")
    names = [name for name in last.names() if not name.startswith("rng/")]
    return {name: last.tensor(name).contiguous().view(-1).numpy().tobytes() for name in names}


@pytest.mark.full
def test_a_partition_ends_both_and_the_next_attempt_has_the_same_bits(desk: Desk, tmp_path: Path) -> None:
    if not shutil.which("nsenter") or subprocess.run([*APART, "true"], check=False, capture_output=True).returncode:
        pytest.skip("process tables of their own are not permitted here")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with cable(100) as line:
        with ranks(desk, line, whole, 7) as both:
            for process in both:
                _, said = process.communicate(timeout=120)
                assert process.returncode == 0, said
        with ranks(desk, line, cut, 0, TIMEOUT_S) as both:
            wait_until(
                lambda: "checkpoint_saved" in kinds(cut) or any(process.poll() is not None for process in both),
                "a checkpoint is there",
                60,
            )
            assert [process.poll() for process in both] == [None, None]
            line.pull()
            pulled_s = time.monotonic()
            for process, other in zip(both, ("rank 1 waits in no", "the store on rank 0's host does not"), strict=True):
                _, said = process.communicate(timeout=40)
                assert process.returncode == 1, said
                assert other in said
            # the time-out, a roll call of three seconds, and a busy machine; not a second time-out
            assert TIMEOUT_S < time.monotonic() - pulled_s < 2 * TIMEOUT_S
        line.plug()
        before = steps(cut)
        assert len(before) < STEPS
        with ranks(desk, line, cut, 1) as both:
            for process in both:
                _, said = process.communicate(timeout=120)
                assert process.returncode == 0, said
        again = steps(cut)[len(before) :]
        assert again[0] > EVERY  # it goes on, and does not begin again
        assert again[0] % EVERY == 1
        assert bits(cut) == bits(whole)
