"""Fault injection for tests: ``UNISONO_FAULT="backward@7:1"`` kills rank 1 in the backward pass of step 7.

The specification is ``point[@step][:rank]``, several separated by commas. Without a step the first pass through the
point counts; without a rank every rank dies. The signal is SIGKILL: nothing is flushed and no handler runs, as in a
power loss. Only the first attempt of a launch is killed: our launcher drops the variable on restart, and under
torchrun the restart count is checked. Unset, it costs one dictionary look-up.
"""

from __future__ import annotations

import os
import re
import signal

from unisono.errors import LaunchError

VARIABLE = "UNISONO_FAULT"


def fault_point(name: str, step: int | None = None) -> None:
    """Kill this process with SIGKILL if ``UNISONO_FAULT`` names this point, step and rank.

    A fault with a step never fires at a point without one. Raises LaunchError for a malformed specification.
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        return
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return
    rank = os.environ.get("UNISONO_RANK") or os.environ.get("RANK") or "0"
    for point, at_step, at_rank in _parsed(text):
        if point == name and at_step in (None, step) and at_rank in (None, int(rank)):
            os.kill(os.getpid(), signal.SIGKILL)


def _parsed(text: str) -> list[tuple[str, int | None, int | None]]:
    faults: list[tuple[str, int | None, int | None]] = []
    for part in text.split(","):
        match = re.fullmatch(r"([a-z0-9_]+)(?:@([0-9]+))?(?::([0-9]+))?", part.strip())
        if match is None:
            raise LaunchError(
                given=f"{VARIABLE}={text!r}",
                rule="a fault is point[@step][:rank], several separated by commas",
                consequence="a drill that hits nothing would look like a success, so nothing was started",
                nearest=f"{VARIABLE}=backward@7:1, or unset it",
            )
        point, step, rank = match.groups()
        faults.append((point, None if step is None else int(step), None if rank is None else int(rank)))
    return faults
