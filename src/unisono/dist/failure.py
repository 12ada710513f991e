"""Last words of a rank: what it failed with, in a file the launcher reads after the process is gone.

An exit status is one number. With the step, the exception and the traceback the launcher can name the rank that failed
first, and can tell a crash that repeats at one step from bad luck. Imports no torch.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from unisono.dist.jobspec import JobSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """``step`` is None when no step had begun; ``at_monotonic_s`` orders the failures of one host."""

    rank: int
    epoch: int
    step: int | None
    type: str
    message: str
    traceback: str
    at_monotonic_s: float

    def same_as(self, other: Failure) -> bool:
        """The same crash again: step, exception type and message."""
        return (self.step, self.type, self.message) == (other.step, other.type, other.message)


def record_failure(folder: Path, job: JobSpec, error: BaseException, *, step: int | None) -> Path:
    """Writes ``failure-rank-N.json`` into ``folder`` in one piece and returns its path."""
    failure = Failure(
        rank=job.rank,
        epoch=job.restart_count,
        step=step,
        type=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        at_monotonic_s=time.monotonic(),
    )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"failure-rank-{job.rank}.json"
    partial = folder / f".failure-rank-{job.rank}.{os.getpid()}"
    partial.write_text(json.dumps(asdict(failure), indent=1) + "\n")
    partial.replace(path)
    return path


def read_failure(folder: Path, rank: int, epoch: int) -> Failure | None:
    """What ``rank`` recorded in attempt ``epoch``; None if it recorded nothing, or nothing readable."""
    try:
        failure = Failure(**json.loads((folder / f"failure-rank-{rank}.json").read_text()))
    except (OSError, ValueError, TypeError):
        # a rank that was killed left no words, or half of them: the exit status still tells
        return None
    return failure if failure.epoch == epoch else None
