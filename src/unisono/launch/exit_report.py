"""Describes how an attempt ended, and why: exit codes, failures that ranks recorded, and which rank failed first.

When one rank dies, its peers fail a moment later with a CommError. The cause is the rank that died of something else. Where
all failed in collectives, ``exit_cause`` tells from their dumps whom the others waited for: one paragraph, without tracebacks.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.dist import Failure, read_failure
from unisono.exit_codes import REQUEUE, USER_ERROR
from unisono.launch.exit_cause import Cause, find_cause
from unisono.launch.resources import oom_kills
from unisono.launch.workers import WorkerProcess
from unisono.storage.run_folder import CHECKPOINTS_FOLDER

_TAIL_LINES = 20
# causes of which the traceback of a rank that waited says nothing
_OF_SEVERAL_RANKS = ("hang", "collective_mismatch", "peer_left")
# causes that the error or the signal does not say in plain words
_NAMED = ("out_of_memory", "disk_full", "crash")


@dataclass(kw_only=True, slots=True)
class Attempt:
    """One attempt to run a job, or one process of an asynchronous job: its processes and how they ended.

    All mappings are by rank. ``codes`` are exit codes, negative for a signal as in subprocess. ``folder`` is where ranks
    record failures. Of a ``restarted`` one no rank shows a traceback itself. ``began_at_s`` and ``ended_at_s`` are seconds
    since 1970. ``decision`` says whether the job is started again, and why.
    """

    number: int
    workers: dict[int, WorkerProcess]
    folder: Path
    oom_kills_before: int | None
    codes: dict[int, int] = field(default_factory=dict[int, int])
    failures: dict[int, Failure] = field(default_factory=dict[int, Failure])
    stopped_by: str | None = None
    began_s: float = field(default_factory=time.monotonic)
    took_s: float = 0.0
    began_at_s: float = field(default_factory=time.time)
    ended_at_s: float | None = None
    checkpoints: frozenset[str] = frozenset()
    restarted: bool = False
    decision: dict[str, Any] | None = None
    _cause: Cause | None = None

    @staticmethod
    def begin(number: int, workers: Sequence[WorkerProcess], folder: Path, *, restarted: bool = False) -> Attempt:
        """The attempt of workers that have just started."""
        return Attempt(
            number=number,
            workers={worker.rank: worker for worker in workers},
            folder=folder,
            restarted=restarted,
            # the kernel counters of other hosts are unknown
            oom_kills_before=oom_kills() if all(worker.here for worker in workers) else None,
        )

    def read_failures(self) -> None:
        """Read the failures that ranks recorded before they ended, and note the time and the run's checkpoints."""
        self.took_s, self.ended_at_s = time.monotonic() - self.began_s, time.time()
        checkpoints = self.folder.parent / CHECKPOINTS_FOLDER
        self.checkpoints = (
            frozenset(path.name for path in checkpoints.iterdir()) if checkpoints.is_dir() else frozenset()
        )
        for rank in self.workers:
            failure = read_failure(self.folder, rank, self.number)
            if failure is not None:
                self.failures[rank] = failure

    def root(self) -> int | None:
        """The rank whose failure explains the others; None if none failed."""
        bad = [rank for rank, code in self.codes.items() if code not in (0, REQUEUE)]
        own_failures = [rank for rank in bad if not self.workers[rank].killed_by_us or rank in self.failures]
        return min(own_failures or bad, key=self._rank_order, default=None)

    def _rank_order(self, rank: int) -> tuple[int, float]:
        failure = self.failures.get(rank)
        if failure is None:
            # an external signal leaves no record and is a cause; an exit code without a record may be a consequence
            return (0 if self.codes[rank] < 0 else 2), 0.0
        return (3 if failure.type == "CommError" else 1), failure.at_monotonic_s

    def root_failure(self) -> Failure | None:
        """The failure the root rank recorded, or None."""
        rank = self.root()
        return None if rank is None else self.failures.get(rank)

    def cause(self) -> Cause | None:
        """Why it ended; None if no rank failed. The first call looks, when all ranks have ended."""
        if self._cause is None:
            self._cause = find_cause(
                self.workers,
                self.codes,
                self.failures,
                root=self.root(),
                folder=self.folder,
                attempt=self.number,
                oom_kills_before=self.oom_kills_before,
            )
        return self._cause

    def decide(self, *, restart: bool, why: str) -> None:
        """Note whether the job is started again, and why."""
        self.decision = {"restart": restart, "why": why}

    def record(self) -> dict[str, Any]:
        """The attempt's entry in ``launch.json``."""
        failure, cause = self.root_failure(), self.cause()
        return {
            "attempt": self.number,
            "began_at_s": self.began_at_s,
            "ended_at_s": self.ended_at_s,
            "exit_codes": [self.codes[rank] for rank in sorted(self.codes)],
            "stopped_by": self.stopped_by,
            "root_rank": self.root(),
            "failure": None if failure is None else f"{failure.type}: {failure.message}",
            "cause": None if cause is None else cause.record(),
            "decision": self.decision,
        }


def exit_explanation(attempt: Attempt, shown: Sequence[Failure] = ()) -> str:
    """Explain which rank failed first and how, with its traceback (for a user error, its message) or the end of its log.

    Of an error like one of ``shown``, failures that were explained before, one line is enough.
    """
    rank = attempt.root()
    if rank is None:
        return f"attempt {attempt.number} ended with exit codes {attempt.codes}"
    worker, cause = attempt.workers[rank], attempt.cause()
    if cause is not None and cause.kind in _OF_SEVERAL_RANKS:
        return _paragraph(attempt, cause)
    lines = [f"attempt {attempt.number}: {worker.name} (pid {worker.pid}) {_ending(attempt, rank)}"]
    failure = attempt.failures.get(rank)
    if failure is not None:
        step = failure.where
        if any(failure.same_error(other) for other in shown):
            lines.append(f"it failed {step}, with the error that is shown above: {_one_line(failure)}")
        elif _is_on_terminal(attempt, failure):
            lines.append(f"it failed {step}, as rank 0 has shown above: {_one_line(failure)}")
        else:
            # a user error needs no traceback
            words = failure.message if USER_ERROR in attempt.codes.values() else failure.traceback
            lines += [f"it failed {step}:", *words.rstrip().splitlines()]
        lines += _other_failures(attempt, failure)
    elif worker.log is not None and cause is not None and cause.kind == "crash" and cause.evidence:
        lines.append(f"the stacks of its threads are in its log {worker.log}")
    elif worker.log is not None:
        tail = worker.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        lines += [f"the end of its log {worker.log}:", *tail] if tail else [f"its log {worker.log} is empty"]
    if cause is not None and cause.kind in _NAMED:
        evidence = f" ({'; '.join(cause.evidence)})" if cause.evidence else ""
        lines.append(f"cause: {cause.words}{evidence}" + (f"; try: {cause.advice}" if cause.advice else ""))
    return "\n".join(lines)


def _paragraph(attempt: Attempt, cause: Cause) -> str:
    """A failure of several ranks together: who caused it, from what it follows, where to look."""
    names = [f"{worker.name} (pid {worker.pid})" for rank in cause.ranks if (worker := attempt.workers.get(rank))]
    parts = [
        f"{cause.words}, caused by {' and '.join(names)}: {cause.sentence}",
        *cause.evidence,
        f"look at {cause.advice}",
        f"stacks and last collectives of the ranks are in {attempt.folder}/stacks-rank-*.json",
    ]
    return f"attempt {attempt.number}: " + ". ".join(part[:1].upper() + part[1:] for part in parts)


def _is_on_terminal(attempt: Attempt, failure: Failure) -> bool:
    """Whether rank 0, which writes to this terminal, ended by itself with the same error: it has shown it."""
    own = attempt.failures.get(0)
    return (
        own is not None
        and not attempt.restarted
        and own.same_error(failure)
        and attempt.codes.get(0) == 1
        and attempt.workers[0].name == "rank 0"
        and attempt.workers[0].log is None
    )


def _one_line(failure: Failure) -> str:
    return f"{failure.type}: {failure.message}".partition("\n")[0]


def _other_failures(attempt: Attempt, shown: Failure) -> list[str]:
    """One line for each error of the ranks whose traceback is not shown."""
    ranks_of: dict[str, list[str]] = {}
    for rank, failure in sorted(attempt.failures.items()):
        if rank == shown.rank:
            continue
        error = _one_line(failure)
        if failure.same_error(shown):
            error = "the same error"
        elif failure.type == "CommError":
            error = "CommError, as a rank they waited for had failed"
        ranks_of.setdefault(error, []).append(str(rank))
    return [
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}: {error} (tracebacks in {attempt.folder})"
        for error, ranks in ranks_of.items()
    ]


def _ending(attempt: Attempt, rank: int) -> str:
    code = attempt.codes[rank]
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    if attempt.workers[rank].killed_by_us:
        return f"was ended by this launcher ({name})"
    text = f"was killed by signal {-code} ({name}), which this launcher did not send"
    if -code != signal.SIGKILL:
        return text
    now = oom_kills()
    if now is None or attempt.oom_kills_before is None:
        return f"{text}; out of memory is the usual reason (see the kernel's log)"
    if now > attempt.oom_kills_before:
        return (
            f"{text}; the kernel ended {now - attempt.oom_kills_before} process(es) for lack of memory meanwhile: "
            "most likely out of memory (smaller micro_batch, recompute, or fewer processes)"
        )
    return f"{text}; the kernel counted no out-of-memory kill meanwhile, so someone sent it"
