"""What gloo's threads still hold when the last collective is over.

A thread of gloo says that a collective is done before it lets go of its tensors. If it is kept waiting for a core in between and
gets on when the interpreter is being torn down, it needs what is no longer there and aborts the process: "terminate called
without an active exception", after everything went well (torch's pull request 179291). So whoever closes a World waits for them.
"""

from __future__ import annotations

import time
from pathlib import Path

_NAME = "pt_gloo_runloop"
_LONGEST_S = 5.0
_LOOK_EVERY_S = 0.001
_LOOKS = 2  # in a row: a thread may be between two states


def wait_for_gloo_threads(longest_s: float = _LONGEST_S) -> None:
    """Return when no thread of gloo has anything to do, or after ``longest_s``. At once where there is no /proc."""
    until = time.monotonic() + longest_s
    idle = 0
    while idle < _LOOKS and time.monotonic() < until:
        idle = 0 if _at_work() else idle + 1
        time.sleep(_LOOK_EVERY_S)  # gives away the interpreter, which such a thread may be waiting for


def _at_work() -> bool:
    for task in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = task.read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended meanwhile
            continue
        if name.startswith(_NAME) and rest.split()[0] == "R":
            return True
    return False
