"""Supervises a synchronous job: starts all ranks together, attempt by attempt, until one attempt decides the exit code.

    attempt:  fresh port ───────────► workers ─► all end 0 ─────────────────► 0
                                        │ all end 0 or 75 (state committed) ─► 75
                                        │ one ends 2 (user error) ──────────► 2, never restarted
                                        │ one ends 76 (do not repeat this) ─► 76, never restarted
                                        └ one crashes ─► end the others, name the culprit, next attempt, unless it
                                                         would crash in the same way again ─► 1

A restart always restarts all ranks: peers of a dead rank cannot continue, because gloo closes their connections for
good. SIGTERM and SIGINT are passed to the workers once; workers still running after the grace period are killed, and
a second SIGINT kills at once. A peer of a dead rank that hangs and ignores SIGTERM is aborted, which writes its
stacks to its log. Hangs are detected only by the time-out of a collective. No torch.
"""

from __future__ import annotations

import json
import math
import re
import signal
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from unisono.dist.early_signals import note_listener
from unisono.errors import LaunchError
from unisono.exit_codes import FATAL, REQUEUE, USER_ERROR
from unisono.launch.exit_report import Attempt, exit_explanation
from unisono.launch.missing_report import write_missing_report
from unisono.launch.options import LaunchOptions
from unisono.launch.restart_rules import reason_not_to_restart, reason_to_restart
from unisono.launch.workers import WorkerProcess, unwritable
from unisono.sanitize import printable, redact, redact_text
from unisono.storage.directory import make_folder
from unisono.storage.files import PRIVATE_MODE, os_reason, write_atomically
from unisono.storage.folder_lock import FolderLock
from unisono.storage.ownership import read_own_json
from unisono.storage.run_folder import LOGS_FOLDER

_POLL_S = 0.05
# a failing rank ends its peers' collectives: time for peers to report that themselves, then time to end on SIGTERM
_SETTLE_S = 2.0
_FAILED_GRACE_S = 5.0
# time between SIGABRT and SIGKILL, for Python's fault handler to write the stacks of all threads to the rank's log
_DUMP_S = 1.0
# what a record or the name of a log says beyond this is no number of ours
_MAX_ATTEMPT = 1 << 30


# (attempt number, whether it is a restart) -> all ranks, started
Start = Callable[[int, bool], Sequence[WorkerProcess]]


def supervise(start: Start, options: LaunchOptions, *, run_dir: Path, record: Mapping[str, Any]) -> int:
    """Run attempts until one decides; returns 0, 1, 2, 75 (requeue) or 76 (do not repeat).

    ``run_dir/launch.json`` holds ``record`` and how each attempt ended. Call it on the main thread.

    Raises LaunchError if nothing can be started: unwritable folder, unknown command. The caller holds ``job_folder``.
    """
    logs = run_dir / LOGS_FOLDER
    history: list[Attempt] = []
    recorder = Recorder(run_dir)
    with StopSignals() as signals:
        first = first_attempt(run_dir, record)
        while True:
            number = first + len(history)
            recorder.write(record, number, history)
            workers = start(number, bool(history))
            begun = Attempt.begin(number, workers, logs, restarted=bool(history))
            attempt = _wait_for_all(workers, begun, options, signals)
            history.append(attempt)
            recorder.write(record, number, history)
            code, why = _verdict(history, options)
            if code is None and signals.received:
                code, why = 1, f"{signals.received[0].name} arrived"
                print_message(f"{signals.received[0].name}: not starting again")
            attempt.decide(restart=code is None, why=why)
            recorder.write(record, number, history)
            if code is not None:
                complete_report(run_dir, code, signals)
                return code
            print_message(
                f"restarting all ranks as attempt {number + 1} (restart {len(history)} of {options.max_restarts})"
            )


@contextmanager
def job_folder(run_dir: Path) -> Generator[None]:
    """Create the run's folder and its logs folder; inside, no other launch uses it.

    Raises:
        LaunchError: The folder cannot be written.
        ConfigError: Another launch uses it.
    """
    try:
        make_folder(run_dir / LOGS_FOLDER, may_be_link=False)
        lock = FolderLock(
            run_dir / "launch.lock",
            work="is running a job",
            nearest="wait until it has ended, or another folder",
            heartbeat=False,  # workers are forked from a process without threads; the run has a heartbeat of its own
        )
    except OSError as error:
        raise LaunchError(unwritable(run_dir, error)) from error
    with closing(lock):
        yield


def first_attempt(run_dir: Path, record: Mapping[str, Any]) -> int:
    """Begin ``run_dir/launch.json``; returns the number of this launch's first attempt. Raises LaunchError."""
    try:
        first = _next_attempt(run_dir)
        write_record(run_dir, record, first, [])
    except OSError as error:
        raise LaunchError(unwritable(run_dir, error)) from error
    return first


def _verdict(history: Sequence[Attempt], options: LaunchOptions) -> tuple[int | None, str]:
    """The exit code of the launch, or None for another attempt, and why; prints the reason to stderr."""
    attempt = history[-1]
    codes = set(attempt.codes.values())
    if codes <= {0, REQUEUE}:
        return (REQUEUE, "the state is saved") if REQUEUE in codes else (0, "finished")
    if attempt.stopped_by is not None:
        print_message(f"stopped by {attempt.stopped_by}, and not every rank said that its state is committed")
        print_message(exit_explanation(attempt))
        return 1, f"stopped by {attempt.stopped_by}"
    user_error = "a user error, which a restart would repeat"
    if attempt.codes.get(0) == USER_ERROR:
        # rank 0 writes to this terminal, so its message is there already
        return USER_ERROR, user_error
    earlier = [failure for past in history[:-1] if (failure := past.root_failure()) is not None]
    print_message(exit_explanation(attempt, earlier))
    if USER_ERROR in codes:
        return USER_ERROR, user_error
    if FATAL in codes:
        why = "a rank says that this would fail again the same way"
        print_message(f"{why}; not restarted")
        return FATAL, why
    problem = reason_not_to_restart(history)
    if problem is not None:
        print_message(str(problem))
        return 1, f"{problem.given}: {problem.rule}"
    if len(history) > options.max_restarts:
        why = f"no restart left of {options.max_restarts} (launch.max_restarts)"
        print_message(f"{why}; the newest checkpoint is kept")
        return 1, why
    return None, reason_to_restart(attempt)


# --- one attempt ---------------------------------------------------------------------------------------------------


def _wait_for_all(
    workers: Sequence[WorkerProcess], attempt: Attempt, options: LaunchOptions, signals: StopSignals
) -> Attempt:
    """Wait until every worker and its process group has ended, by itself or killed; fills in ``attempt`` and returns it."""
    deadlines = _Deadlines()
    try:
        while len(attempt.codes) < len(workers):
            for worker in workers:
                code = worker.code()
                if code is not None and worker.rank not in attempt.codes:
                    attempt.codes[worker.rank] = code
            running = [worker for worker in workers if worker.rank not in attempt.codes]
            if running:
                _end_when_due(running, attempt, deadlines, options, signals)
                time.sleep(_POLL_S)
    finally:
        # also after an exception: workers never outlive their launcher
        for worker in workers:
            worker.kill_group()
    attempt.read_failures()
    return attempt


@dataclass(slots=True)
class _Deadlines:
    """Monotonic times at which the workers still running get SIGTERM, SIGABRT and SIGKILL; None while nothing is due."""

    terminate_at_s: float | None = None
    abort_at_s: float | None = None
    kill_at_s: float | None = None


def _end_when_due(
    running: Sequence[WorkerProcess],
    attempt: Attempt,
    deadlines: _Deadlines,
    options: LaunchOptions,
    signals: StopSignals,
) -> None:
    """Set deadlines after a stop signal or a failed rank, and signal the running workers whose deadline has passed."""
    now = time.monotonic()
    if signals.received and attempt.stopped_by is None:
        attempt.stopped_by = signals.received[0].name
        print_message(f"{attempt.stopped_by}: asking {len(running)} ranks to save and end within {options.grace_s:g} s")
        for worker in running:
            worker.end_by(signals.to_workers())
        deadlines.kill_at_s = min(deadlines.kill_at_s or math.inf, now + options.grace_s)
    if signals.interrupted_twice:
        deadlines.kill_at_s = now
    if attempt.stopped_by is None and deadlines.kill_at_s is None and attempt.codes:
        codes = set(attempt.codes.values())
        if codes - {0, REQUEUE}:
            # a user error is found by all ranks: rank 0 gets time to print it on the terminal and to end by itself
            settle_s = _FAILED_GRACE_S if USER_ERROR in codes else _SETTLE_S
            deadlines.terminate_at_s = now + settle_s
            deadlines.abort_at_s = deadlines.terminate_at_s + _FAILED_GRACE_S
            deadlines.kill_at_s = deadlines.abort_at_s + _DUMP_S
        elif REQUEUE in codes:
            # one rank has saved and left: the others have the same notice and the same last step
            deadlines.kill_at_s = now + options.grace_s
    if deadlines.terminate_at_s is not None and now >= deadlines.terminate_at_s:
        deadlines.terminate_at_s = None
        for worker in running:
            worker.end_by(signal.SIGTERM)
    if deadlines.abort_at_s is not None and now >= deadlines.abort_at_s:
        deadlines.abort_at_s = None
        for worker in running:
            worker.end_by(signal.SIGABRT)
    if deadlines.kill_at_s is not None and now >= deadlines.kill_at_s:
        for worker in running:
            worker.kill_group()


@dataclass(slots=True)
class StopSignals:
    """Collects stop signals sent to the launcher while it is entered; restores the handlers at the end."""

    received: list[signal.Signals] = field(default_factory=list[signal.Signals])
    _before: dict[signal.Signals, Any] = field(default_factory=dict[signal.Signals, Any])

    @property
    def interrupted_twice(self) -> bool:
        return self.received.count(signal.SIGINT) > 1

    def to_workers(self) -> signal.Signals:
        """The signal to pass on: SIGINT as it is; any other stop signal (closed terminal, batch system) as SIGTERM."""
        return signal.SIGINT if self.received[:1] == [signal.SIGINT] else signal.SIGTERM

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                # nohup: the run outlives its terminal
                continue
            self._before[number] = signal.signal(number, self._note)
        note_listener()
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def complete_report(run_dir: Path, code: int, signals: StopSignals) -> None:
    """After a job that failed with ``code``, write its report if rank 0 was killed before it could; prints what went wrong."""
    if code in (0, REQUEUE) or signals.interrupted_twice:
        return
    if problem := write_missing_report(run_dir, signals.received):
        print_message(problem)


# --- record and messages ---------------------------------------------------------------------------------------------


def _next_attempt(run_dir: Path) -> int:
    """One more than the highest attempt number in this folder, so that a later launch never reuses a number."""
    names = [path.name for path in (run_dir / LOGS_FOLDER).iterdir()]
    used = [int(match.group(1)) for name in names if (match := re.search(r"\.attempt-([0-9]+)\.", name))]
    # without an earlier launch, and with a record of something else or of another user, the logs alone decide
    with suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
        used.append(int(read_own_json(run_dir / "launch.json")["attempt"]))
    return max((number for number in used if number < _MAX_ATTEMPT), default=-1) + 1


def write_record(run_dir: Path, record: Mapping[str, Any], number: int, history: Sequence[Attempt]) -> None:
    """Replace ``launch.json`` atomically; ``number`` is the current attempt. Its owner alone reads it; it has no secrets."""
    is_over = bool(history) and history[-1].number == number
    content = {
        **record,
        "attempt": number,
        "began_at_s": history[-1].began_at_s if is_over else time.time(),
        "attempts": [attempt.record() for attempt in history],
    }
    write_atomically(run_dir / "launch.json", json.dumps(redact(content), indent=1).encode() + b"\n", mode=PRIVATE_MODE)


class Recorder:
    """Keeps ``launch.json`` of a job under way, which goes on where it cannot be written: the first failure is a warning."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._has_warned = False

    def write(self, record: Mapping[str, Any], number: int, history: Sequence[Attempt]) -> None:
        try:
            write_record(self._run_dir, record, number, history)
        except OSError as error:
            if not self._has_warned:
                print_message(f"warning: {self._run_dir / 'launch.json'} was not written: {os_reason(error)}")
            self._has_warned = True


def print_message(text: str) -> None:
    """Print to standard error, without secrets. ``text`` may come from another host: control characters are shown as text."""
    lines = printable(redact_text(text), newlines=True).splitlines()
    with suppress(OSError):  # such as a full disk behind it: the job goes on
        print("\n".join(f"launch: {line}" for line in lines), file=sys.stderr, flush=True)
