"""Deliberate death at a named point, for drills: ``UNISONO_FAULT="backward@7:1"`` kills rank 1 in step 7's backward.

The specification is ``point[@step][:rank]``, several separated by commas; without a step the first pass counts, without
a rank every rank dies. Death is SIGKILL: nothing is flushed, no handler runs, as when a machine loses power. Only the
first attempt of a launch is hit, else a restarted run would die at the same step for ever: our launcher drops the
variable on restart, and under torchrun the restart count is looked at. Costs one dictionary look-up when unset.
"""

from __future__ import annotations

import os
import re
import signal

from unisono.errors import LaunchError

VARIABLE = "UNISONO_FAULT"


def fault_point(name: str, step: int | None = None) -> None:
    """Kills this process with SIGKILL if ``UNISONO_FAULT`` names this point (and step, and rank), else does nothing.

    A fault with a step never fires at a point that knows none. Raises LaunchError for a malformed specification.
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
                    nearest=f"{VARIABLE}=backward@7:1, or unset it"
            )
        point, step, rank = match.groups()
        faults.append((point, None if step is None else int(step), None if rank is None else int(rank)))
    return faults
