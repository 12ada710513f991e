"""Deliberate death happens exactly where it was asked for."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from unisono.dist import fault_point
from unisono.errors import LaunchError

LOOP = """
from unisono.dist import fault_point
for step in range(4):
    print(step, flush=True)
    fault_point("forward", step)
    fault_point("mid_shard")
"""


def run(fault: str | None, **environ: str) -> tuple[int, list[str]]:
    variables = environ if fault is None else environ | {"UNISONO_FAULT": fault}
    done = subprocess.run(
        [sys.executable, "-c", LOOP],
        env={"PYTHONPATH": ":".join(sys.path), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.split()


def test_kills_at_the_step_and_rank_named() -> None:
    assert run("forward@2") == (-signal.SIGKILL, ["0", "1", "2"])
    assert run("backward@1,forward@1:3", UNISONO_RANK="3") == (-signal.SIGKILL, ["0", "1"])
    assert run("mid_shard") == (-signal.SIGKILL, ["0"])


@pytest.mark.parametrize(
    ("fault", "environ"),
    [
        (None, {}),
        ("forward@9", {}),
        ("forward@1:3", {"RANK": "2"}),
        ("mid_shard@1", {}),
        ("forward@1", {"TORCHELASTIC_RESTART_COUNT": "1"}),
    ],
)
def test_otherwise_nothing_happens(fault: str | None, environ: dict[str, str]) -> None:
    assert run(fault, **environ) == (0, ["0", "1", "2", "3"])


def test_a_malformed_fault_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_FAULT", "forward at 3")
    with pytest.raises(LaunchError, match=r"UNISONO_FAULT='forward at 3'\n  rule: a fault is point\[@step\]\[:rank\]"):
        fault_point("forward", 3)
