"""Waits for Gloo's threads before the interpreter shuts down.

A Gloo thread reports a collective as done before it releases its tensors. If it is preempted in between and continues
while the interpreter shuts down, the process aborts ("terminate called without an active exception"; torch pull
request 179291). ``World.close`` therefore waits until the threads are idle.
"""

from __future__ import annotations

import time
from pathlib import Path

_NAME = "pt_gloo_runloop"
_LONGEST_S = 5.0
_LOOK_EVERY_S = 0.001
_LOOKS = 2  # in a row, because a thread may be between two states


def wait_for_gloo_threads(longest_s: float = _LONGEST_S) -> None:
    """Return when no Gloo thread is running, or after ``longest_s`` seconds. Returns immediately without /proc."""
    until = time.monotonic() + longest_s
    idle = 0
    while idle < _LOOKS and time.monotonic() < until:
        idle = 0 if _any_running() else idle + 1
        time.sleep(_LOOK_EVERY_S)  # releases the GIL, which such a thread may be waiting for


def _any_running() -> bool:
    for task in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = task.read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended meanwhile
            continue
        if name.startswith(_NAME) and rest.split()[0] == "R":
            return True
    return False
