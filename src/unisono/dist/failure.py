"""The failure record of a rank: a file that the launcher reads after the process has ended.

With the step, the exception and the traceback, the launcher can name the rank that failed first and can recognise a
crash that repeats at one step. No torch.
"""

from __future__ import annotations

import json
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from unisono.dist.jobspec import JobSpec
from unisono.storage.files import write_atomically


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """How a rank failed.

    ``epoch`` is the attempt. ``step`` is None before the first step. ``at_monotonic_s`` orders one host's failures.
    """

    rank: int
    epoch: int
    step: int | None
    type: str
    message: str
    traceback: str
    at_monotonic_s: float

    def same_as(self, other: Failure) -> bool:
        """Whether both have the same step, exception type and message."""
        return (self.step, self.type, self.message) == (other.step, other.type, other.message)


def record_failure(folder: Path, job: JobSpec, error: BaseException, *, step: int | None) -> Path:
    """Write ``failure-rank-N.json`` into ``folder`` atomically; returns its path."""
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
    write_atomically(path, json.dumps(asdict(failure), indent=1).encode() + b"\n")
    return path


def read_failure(folder: Path, rank: int, epoch: int) -> Failure | None:
    """The failure of ``rank`` in attempt ``epoch``; None if there is no readable record."""
    try:
        failure = Failure(**json.loads((folder / f"failure-rank-{rank}.json").read_text()))
    except (OSError, ValueError, TypeError):
        # a rank that was killed leaves no record, or half of one; its exit code remains
        return None
    return failure if failure.epoch == epoch else None
