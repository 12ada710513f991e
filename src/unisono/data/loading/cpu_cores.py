"""How many processors there are to work with."""

from __future__ import annotations

import os
from collections.abc import Mapping


def allowed_cores() -> int:
    """Those this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores(environ: Mapping[str, str]) -> int:
    """Those of this process beside others of its run: its launcher's share if it has one, else all it may run on."""
    told = environ.get("OMP_NUM_THREADS", "")
    return int(told) if told.isdecimal() and int(told) > 0 else allowed_cores()
