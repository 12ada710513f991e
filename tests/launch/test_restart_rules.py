"""Whether a job is started again follows from the cause of its failure, and is recorded with its reason."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launching import run

from unisono.dist import Failure
from unisono.launch import exit_cause
from unisono.launch.exit_cause import Cause
from unisono.launch.exit_report import Attempt
from unisono.launch.restart_rules import RULES, reason_not_to_restart, reason_to_restart


def ended(
    kind: str,
    *,
    code: int = 1,
    failure: str = "",
    step: int | None = 7,
    checkpoints: tuple[str, ...] = (),
    message: str = "m",
) -> Attempt:
    """An attempt of one rank that failed of ``kind``, with a record of an error of the type ``failure``."""
    worker: Any = SimpleNamespace(killed_by_us=False)
    attempt = Attempt(number=0, workers={0: worker}, folder=Path("logs"), oom_kills_before=None)
    attempt.codes[0], attempt.took_s, attempt.checkpoints = code, 90.0, frozenset(checkpoints)
    if failure:
        attempt.failures[0] = Failure(
            rank=0,
            restart_count=0,
            step=step,
            type=failure,
            message=message,
            traceback="",
            at_monotonic_s=1.0,
            cause=kind,
        )
    attempt._cause = Cause(kind=kind, ranks=(0,), sentence="rank 0 failed")
    return attempt


def test_each_cause_has_a_rule() -> None:
    assert set(RULES) == set(exit_cause._WORDS)
    assert {rule.restarts for rule in RULES.values()} == {"never", "always", "once", "until_repeated", "by_error"}
    assert all(rule.reason for rule in RULES.values())
    assert all(rule.cure for rule in RULES.values() if rule.restarts == "never")


def test_a_full_disk_ends_the_run() -> None:
    problem = reason_not_to_restart([ended("disk_full", failure="CheckpointError", step=40)])
    assert problem is not None
    assert problem.given == "the disk is full: rank 0 failed"
    assert problem.rule == "a restart finds the same disk"
    # OSError, which passes where it is one of the network
    assert reason_not_to_restart([ended("disk_full", failure="OSError")]) is not None
    assert reason_not_to_restart([ended("io", failure="OSError")]) is None


@pytest.mark.parametrize("kind", ["out_of_memory", "collective_mismatch"])
def test_what_may_not_pass_is_restarted_once_between_checkpoints(kind: str) -> None:
    first, again = ended(kind, code=-9), ended(kind, code=-9)
    assert reason_not_to_restart([first]) is None
    problem = reason_not_to_restart([first, again])
    assert problem is not None
    assert problem.given.endswith(", 2 times in a row and without a new checkpoint")
    assert reason_not_to_restart([first, ended(kind, code=-9, checkpoints=("step-00000009",))]) is None
    assert reason_not_to_restart([first, ended("killed", code=-9), again]) is None


@pytest.mark.parametrize("kind", ["killed", "hang", "peer_left", "communication", "corruption"])
def test_what_may_pass_uses_up_the_restarts(kind: str) -> None:
    history = [ended(kind, code=-9) for _ in range(5)]
    assert reason_not_to_restart(history) is None
    assert reason_to_restart(history[-1]).endswith(f": {RULES[kind].reason}")
    # a RuntimeError of Gloo, before the first step
    assert reason_not_to_restart([ended(kind, failure="RuntimeError", step=None)]) is None


def test_the_same_crash_twice_without_a_new_checkpoint_ends_the_run() -> None:
    crash = ended("crash", code=-11)
    assert reason_not_to_restart([crash]) is None
    assert reason_to_restart(crash) == "a crash of native code: it may pass"
    problem = reason_not_to_restart([crash, ended("crash", code=-11)])
    assert problem is not None
    assert problem.given == "rank 0 failed, 2 times in a row and without a new checkpoint"
    # also where an error was recorded before the signal came
    assert reason_not_to_restart([crash, ended("crash", code=-11, failure="RuntimeError")]) is not None
    # another signal, another rank, a new checkpoint, something else between, a server
    assert reason_not_to_restart([crash, ended("crash", code=-6)]) is None
    other_rank = ended("crash", code=-11)
    other_rank._cause = Cause(kind="crash", ranks=(1,), sentence="rank 1 failed")
    assert reason_not_to_restart([other_rank, crash]) is None
    assert reason_not_to_restart([crash, ended("crash", code=-11, checkpoints=("step-00000009",))]) is None
    assert reason_not_to_restart([crash, ended("killed", code=-9), crash]) is None
    server = ended("crash", code=-11)
    server.took_s = 0.0
    assert reason_not_to_restart([server, server]) is None


@pytest.mark.parametrize(
    ("ending", "starts"),
    [
        ("ctypes.string_at(0)", 2),
        # in a shell, whose exit code says it
        ("sys.exit(128 + signal.SIGSEGV)", 2),
        # the second crash comes after a new checkpoint, the third one does not
        (
            "(run_dir / f'checkpoints/step-{min(job.restart_count, 1)}').mkdir(parents=True, exist_ok=True); os.abort()",
            3,
        ),
        ("os.kill(os.getpid(), [signal.SIGSEGV, signal.SIGBUS][job.restart_count % 2])", 4),
        ("os.kill(os.getpid(), signal.SIGKILL)", 4),
    ],
)
def test_a_rank_that_crashes_each_time(ending: str, starts: int, tmp_path: Path) -> None:
    code, said, launched = run(f"import ctypes\n{ending}\n", tmp_path, num_processes=1, max_restarts=3)
    attempts = launched.record()["attempts"]
    assert (code, len(attempts)) == (1, starts)
    assert ("no restart left of 3" in said) is (starts == 4)
    rule = (
        "a crash by the same signal on the same rank is restarted again only if a checkpoint was committed in between"
    )
    assert (rule in said) is (starts < 4)
    assert (rule in attempts[-1]["decision"]["why"]) is (starts < 4)


@pytest.mark.parametrize("kind", ["configuration", "bad_data", "program", "checkpoint", "numerics"])
def test_an_error_before_the_first_step_ends_the_run_and_a_later_one_when_it_comes_back(kind: str) -> None:
    assert reason_not_to_restart([ended(kind, failure="DataError", step=None)]) is not None
    assert reason_not_to_restart([ended(kind, failure="DataError", step=0)]) is not None
    later = ended(kind, failure="DataError", step=7)
    assert reason_not_to_restart([later]) is None
    assert reason_not_to_restart([later, later]) is not None
    assert reason_not_to_restart([later, ended(kind, failure="DataError", step=9)]) is not None
    assert reason_not_to_restart([later, ended(kind, failure="DataError", step=9, message="another")]) is None


def test_an_out_of_memory_kill_is_restarted_once(tmp_path: Path) -> None:
    # an allocation that fails later than a script's start
    script = """
if job.rank == 1:
    error = MemoryError(f"{job.restart_count} bytes")
    record_failure(run_dir / "logs", job, error, step=20 + job.restart_count)
    sys.exit(1)
time.sleep(600)
"""
    code, said, launched = run(script, tmp_path, max_restarts=5)
    attempts = launched.record()["attempts"]
    assert (code, [attempt["decision"]["restart"] for attempt in attempts]) == (1, [True, False])
    assert attempts[0]["decision"]["why"] == f"out of memory: {RULES['out_of_memory'].reason}"
    assert "out of memory, 2 times in a row and without a new checkpoint" in said


def test_a_run_whose_disk_is_full_is_not_restarted(tmp_path: Path) -> None:
    script = """
import errno
record_failure(run_dir / "logs", job, OSError(errno.ENOSPC, "No space left on device"), step=20)
sys.exit(1)
"""
    code, said, launched = run(script, tmp_path, num_processes=1, max_restarts=5)
    (attempt,) = launched.record()["attempts"]
    assert (code, attempt["decision"]["restart"]) == (1, False)
    assert "a restart finds the same disk" in attempt["decision"]["why"]
    assert "try:  free space there, or another run.dir, then start the same command again" in said
