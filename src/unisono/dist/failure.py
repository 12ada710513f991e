"""The failure record of a rank: a file that the launcher reads after the process has ended.

With the step, the exception and the traceback, the launcher can name the rank that failed first and can recognise a
crash that repeats at one step. No torch.
"""

from __future__ import annotations

import errno
import json
import re
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from unisono.dist.jobspec import JobSpec
from unisono.dist.rank_dump import has_collectives, write_dump
from unisono.errors import CorruptionError, UnisonoError
from unisono.sanitize import redact_text
from unisono.storage.directory import make_folder
from unisono.storage.files import NO_ROOM, PRIVATE_MODE, write_atomically
from unisono.storage.ownership import read_own_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The failure of one rank.

    Attributes:
        rank: The rank that failed.
        restart_count: Restarts of the job before this failure.
        step: Steps made before it failed; None if training had not begun.
        type: Name of the exception's class.
        message: Text of the exception.
        traceback: The formatted traceback, with those of its causes.
        at_monotonic_s: Time of the failure in seconds (``time.monotonic``), which orders the failures of one host.
        script_s: Seconds from the script's start to a failure outside a trainer, whose progress is unknown; else None.
        checkpoint: Name of the run's newest committed checkpoint; empty without one.
        cause: What kind of error it is (``error_cause``); empty in records of earlier releases.
        absent: Ranks that a collective's error says have ended, are stopped, or wait in no collective.
        blamed: Ranks that the error says it comes from, where they are not this one alone.
        memory: Of a rank that ran out of memory, what it measured then, in bytes (``train.failure_memory``).
    """

    rank: int
    restart_count: int
    step: int | None
    type: str
    message: str
    traceback: str
    at_monotonic_s: float
    script_s: float | None = None
    checkpoint: str = ""
    cause: str = ""
    absent: tuple[int, ...] = ()
    blamed: tuple[int, ...] = ()
    memory: Mapping[str, int] = field(default_factory=dict[str, int])

    def to_json(self) -> dict[str, Any]:
        """The record as it is stored and sent."""
        # restart_count is stored under its name of the first release
        return {"epoch" if name == "restart_count" else name: value for name, value in asdict(self).items()}

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Failure:
        """The inverse of ``to_json``. Raises TypeError or ValueError for anything else."""
        fields = {"restart_count" if name == "epoch" else name: value for name, value in dict(record).items()}
        failure = msgspec.convert(fields, Failure)
        counts = (failure.rank, failure.restart_count, failure.step or 0, *failure.absent, *failure.blamed)
        if not all(0 <= count < 1 << 60 for count in (*counts, *failure.memory.values())):
            raise ValueError("a rank, a step or a size that no job has")
        return failure

    def same_as(self, other: Failure) -> bool:
        """Whether both have the same step, exception type and message."""
        return self.step == other.step and self.same_error(other)

    def same_error(self, other: Failure) -> bool:
        """Whether both have the same exception type and message."""
        return (self.type, self.message) == (other.type, other.message)

    @property
    def where(self) -> str:
        """When it failed, in words."""
        if self.script_s is not None:
            return f"{self.script_s:.1f} s after the script began"
        return "before the first step" if self.step is None else f"in step {self.step}"

    @property
    def may_pass(self) -> bool:
        """Whether a restart may help without a change: the network, a peer, the disk or a bit failed, not the program."""
        return self.type in _PASSING


# "record": the launcher shows the traceback of a recorded failure, so the process does not print it
TRACEBACKS = "UNISONO_TRACEBACKS"

# by class name, which is what a record holds; a missing file or permission is not among them
_PASSING = frozenset(
    {
        *("CommError", "CorruptionError", "OSError", "TimeoutError", "InterruptedError", "BlockingIOError"),
        *("ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "ConnectionAbortedError"),
        *("BrokenPipeError", "EOFError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistError"),
    }
)


# by class name, along the whole chain of causes
_CAUSES = {
    "MemoryError": "out_of_memory",
    "OutOfMemoryError": "out_of_memory",
    "NumericsError": "numerics",
    "CorruptionError": "corruption",
    "CommError": "communication",
    **dict.fromkeys(("DistBackendError", "DistNetworkError", "DistStoreError", "DistError"), "communication"),
    **dict.fromkeys(("ConfigError", "PlanError", "ExtraError", "LaunchError"), "configuration"),
    "DataError": "bad_data",
    "CheckpointError": "checkpoint",
}
# the user's code was wrong, whoever called it: an error of a sample that is read has this one as its cause
_BUGS = (NameError, ImportError, AttributeError, NotImplementedError, SyntaxError)
_MEMORY_TEXTS = ("can't allocate memory", "not enough memory", "out of memory", "Cannot allocate memory")
_DISK_TEXTS = ("No space left on device", "Disk quota exceeded", "ENOSPC", "EDQUOT")
_TRANSPORTS = ("gloo/", "NCCL", "ProcessGroup")


def error_cause(error: BaseException) -> str:
    """The kind of an error, from it and its causes: ``out_of_memory``, ``disk_full``, ``communication``, ``configuration``,
    ``bad_data``, ``checkpoint``, ``numerics``, ``corruption``, ``io`` or, for any other, ``program``."""
    chain: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and len(chain) < 20:
        chain.append(each)
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    for each in chain:
        text = str(each)
        if isinstance(each, OSError) and each.errno in NO_ROOM:
            return "disk_full"
        if isinstance(each, OSError) and each.errno == errno.ENOMEM:
            return "out_of_memory"
        if isinstance(each, OSError | RuntimeError | UnisonoError) and any(words in text for words in _DISK_TEXTS):
            return "disk_full"
        if isinstance(each, RuntimeError) and any(words in text for words in _MEMORY_TEXTS):
            return "out_of_memory"
    names = [kind.__name__ for kind in type(error).__mro__]
    cause = next((_CAUSES[name] for name in names if name in _CAUSES), "")
    if cause == "bad_data" and any(isinstance(each, _BUGS) for each in chain[1:]):
        return "program"
    if not cause and any(isinstance(each, MemoryError) for each in chain):
        return "out_of_memory"
    if not cause and isinstance(error, RuntimeError) and any(words in str(error) for words in _TRANSPORTS):
        return "communication"
    return cause or ("io" if isinstance(error, OSError) else "program")


def user_traceback(error: BaseException) -> str:
    """The formatted traceback of ``error`` without the frames up to our command line, which say nothing to a user.

    An error that the command line raised itself keeps all its frames.
    """
    shown = frame = error.__traceback__
    while frame is not None:
        module = str(frame.tb_frame.f_globals.get("__name__"))
        if module.startswith("unisono.cli.") and frame.tb_next is not None:
            shown = frame.tb_next
        elif module.startswith("unisono.cli."):
            shown = error.__traceback__
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, shown))


def record_failure(
    folder: Path,
    job: JobSpec,
    error: BaseException,
    *,
    step: int | None,
    script_s: float | None = None,
    checkpoint: str = "",
    memory: Mapping[str, int] | None = None,
) -> Path:
    """Write the failure of this rank as ``failure-rank-N.json``, atomically, without secrets, and its dump if it has peers.

    Args:
        folder: Folder of the record; created for its owner only if it is missing.
        job: The process's place in the job, with rank and restart count.
        error: The exception that ended the rank.
        step: Steps made before it was raised; None if training had not begun.
        script_s: Seconds since the script began, if nothing is known of its steps.
        checkpoint: Name of the run's newest committed checkpoint; empty without one.
        memory: What the rank measured when it ran out of memory, in bytes.

    Returns:
        The path of the record.
    """
    failure = Failure(
        rank=job.rank,
        restart_count=job.restart_count,
        step=step,
        type=type(error).__name__,
        message=redact_text(str(error)),
        traceback=redact_text(user_traceback(error)),
        at_monotonic_s=time.monotonic(),
        script_s=script_s,
        checkpoint=checkpoint,
        cause=(cause := error_cause(error)),
        absent=absent_ranks(str(error)) if cause == "communication" else (),
        blamed=error.ranks if isinstance(error, CorruptionError) else (),
        memory=memory or {},
    )
    make_folder(folder)
    path = folder / f"failure-rank-{job.rank}.json"
    write_atomically(path, json.dumps(failure.to_json(), indent=1).encode() + b"\n", mode=PRIVATE_MODE)
    if has_collectives():
        in_collective = failure.cause == "communication"
        write_dump(folder, job, type(error).__name__, step=step, error=error, in_collective=in_collective)
    return path


def absent_ranks(text: str) -> tuple[int, ...]:
    """The ranks that the text of a collective's error names as absent, as ``roll_call`` words it."""
    return tuple(sorted({int(number) for number in _ABSENT.findall(text)}))


_ABSENT = re.compile(r"rank ([0-9]{1,6}) (?:\(pid [0-9]+\) )?(?:has ended|is stopped|waits in no collective)")


def read_failure(folder: Path, rank: int, restart_count: int) -> Failure | None:
    """The failure of ``rank`` after ``restart_count`` restarts; None if there is no readable record."""
    try:
        failure = Failure.from_json(read_own_json(folder / f"failure-rank-{rank}.json"))
    except (OSError, ValueError, TypeError):
        # a rank that was killed leaves no record, or half of one; its exit code remains
        return None
    return failure if failure.restart_count == restart_count else None
