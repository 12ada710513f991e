"""Sees the processes of a synchronous job through: all ranks together, attempt by attempt, until the last one is gone.

    attempt:  fresh port and epoch ─► workers ─► all end 0 ─────────────────► 0
                                        │ all end 0 or 75 (state committed) ─► 75
                                        │ one ends 2 (user error) ──────────► 2, never restarted
                                        │ one ends 76 (do not repeat this) ─► 76, never restarted
                                        └ one crashes ─► end the others, name the culprit, next attempt

A restart always takes the whole group: peers of a dead rank cannot go on, as gloo closes their connections for good.
SIGTERM and SIGINT go to the workers once; what has not ended after the grace period is killed, and a second SIGINT kills
at once. A peer of a dead rank that does not end on SIGTERM, as it hangs, leaves its stacks in its log. Does not watch for
hangs beyond what a collective's timeout reports. Imports no torch.
"""

from __future__ import annotations

import json
import math
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from unisono.errors import LaunchError, Problem
from unisono.launch.exit_report import FATAL, REQUEUE, USER_ERROR, Attempt, exit_explanation
from unisono.launch.options import LaunchOptions
from unisono.launch.workers import WorkerProcess, unwritable
from unisono.observe.sanitize import printable
from unisono.storage.files import write_atomically

_POLL_S = 0.05
# a failing rank ends its peers' collectives; this long they get to say so themselves, and then to end on SIGTERM
_SETTLE_S = 0.5
_FAILED_GRACE_S = 5.0
# one that does not end is aborted first: Python's fault handler then writes where each thread stands into the rank's log
_DUMP_S = 1.0
# the same crash this often in a row is not bad luck
SAME_CRASH_LIMIT = 3


# starts all ranks of attempt ``epoch``; ``restarted`` after the first
Start = Callable[[int, bool], Sequence[WorkerProcess]]


def supervise(start: Start, options: LaunchOptions, *, run_dir: Path, record: Mapping[str, Any]) -> int:
    """Starts attempts until one decides, and returns the exit code of the whole: 0, 1, 2, 75 (requeue) or 76 (do not repeat).

    ``run_dir/launch.json`` holds ``record`` and how each attempt ended. Call it on the main thread.

    Raises LaunchError when nothing can be started: unwritable folder, unknown command.
    """
    logs = run_dir / "logs"
    first = begin_record(run_dir, record)
    history: list[Attempt] = []
    with StopSignals() as signals:
        while True:
            epoch = first + len(history)
            write_record(run_dir, record, epoch, history)
            workers = start(epoch, bool(history))
            attempt = _see_through(workers, epoch, logs, options, signals)
            history.append(attempt)
            write_record(run_dir, record, epoch, history)
            code = _verdict(history, options)
            if code is not None:
                return code
            if signals.received:
                print_message(f"{signals.received[0].name}: not starting again")
                return 1
            print_message(
                f"restarting all ranks as attempt {epoch + 1} (restart {len(history)} of {options.max_restarts})"
            )


def make_folders(run_dir: Path) -> None:
    """The run's folder and its logs. Raises LaunchError where they cannot be."""
    try:
        (run_dir / "logs").mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(unwritable(run_dir, error)) from error


def begin_record(run_dir: Path, record: Mapping[str, Any]) -> int:
    """Makes the run's folder and its record; returns the number of the next attempt."""
    make_folders(run_dir)
    try:
        first = _next_attempt(run_dir)
        write_record(run_dir, record, first, [])
    except OSError as error:
        raise LaunchError(unwritable(run_dir, error)) from error
    return first


def _verdict(history: Sequence[Attempt], options: LaunchOptions) -> int | None:
    """The exit code of the launch, or None for another attempt; says on stderr what the user must know."""
    attempt = history[-1]
    codes = set(attempt.codes.values())
    if codes <= {0, REQUEUE}:
        return REQUEUE if REQUEUE in codes else 0
    if attempt.stopped_by is not None:
        print_message(f"stopped by {attempt.stopped_by}, and not every rank said that its state is committed")
        print_message(exit_explanation(attempt))
        return 1
    if attempt.codes.get(0) == USER_ERROR:
        # rank 0 writes to this terminal: it has said what is wrong
        return USER_ERROR
    print_message(exit_explanation(attempt))
    if USER_ERROR in codes:
        return USER_ERROR
    if FATAL in codes:
        print_message("a rank says that this would fail again the same way; not restarted")
        return FATAL
    repeats = same_crashes(history)
    if repeats >= SAME_CRASH_LIMIT:
        print_message(repeated(attempt, repeats))
        return 1
    if len(history) > options.max_restarts:
        print_message(f"no restart left of {options.max_restarts} (launch.max_restarts); the newest checkpoint is kept")
        return 1
    return None


def same_crashes(history: Sequence[Attempt]) -> int:
    """How many attempts up to the last ended in the crash of the last one; 0 if that left no words."""
    last = history[-1].root_failure()
    count = 0
    for attempt in reversed(history):
        failure = attempt.root_failure()
        if last is None or failure is None or not failure.same_as(last):
            break
        count += 1
    return count


def repeated(attempt: Attempt, times: int) -> str:
    """What to say of a crash that was the same each time."""
    failure = attempt.root_failure()
    assert failure is not None
    return str(
        Problem(
            given=f"{failure.type} in step {failure.step} on rank {failure.rank}, {times} times in a row",
            rule=f"a crash that repeats {SAME_CRASH_LIMIT} times is not bad luck",
            consequence="the run ends here; the newest checkpoint is kept",
            nearest="mend the cause shown above, then type the same command again",
        )
    )


# --- one attempt ---------------------------------------------------------------------------------------------------


def _see_through(
    workers: Sequence[WorkerProcess], epoch: int, logs: Path, options: LaunchOptions, signals: StopSignals
) -> Attempt:
    """Waits until every worker has ended, by itself or by us, and nothing of its group is left."""
    attempt = Attempt.begin(epoch, workers, logs)
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
        # also after an exception: whatever happens to the launcher, its workers end with it
        for worker in workers:
            worker.kill_group()
    attempt.killed_by_us = {worker.rank for worker in workers if worker.killed_by_us}
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
    now = time.monotonic()
    if signals.received and attempt.stopped_by is None:
        attempt.stopped_by = signals.received[0].name
        # what else asks for a stop (a closed terminal, a batch system's warning) means SIGTERM to the workers
        number = signal.SIGINT if signals.received[0] is signal.SIGINT else signal.SIGTERM
        print_message(f"{attempt.stopped_by}: asking {len(running)} ranks to save and end within {options.grace_s:g} s")
        for worker in running:
            worker.end_by(number)
        deadlines.kill_at_s = min(deadlines.kill_at_s or math.inf, now + options.grace_s)
    if signals.received.count(signal.SIGINT) > 1:
        deadlines.kill_at_s = now
    if attempt.stopped_by is None and deadlines.kill_at_s is None and attempt.codes:
        codes = set(attempt.codes.values())
        if codes - {0, REQUEUE}:
            # what a user must change, the other ranks find too: rank 0 gets to say it on the terminal and to end by itself
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
    """Collects stop signals sent to the launcher while it is entered; handlers are put back at the end."""

    received: list[signal.Signals] = field(default_factory=list[signal.Signals])
    _before: dict[signal.Signals, Any] = field(default_factory=dict[signal.Signals, Any])

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                # nohup: the run is meant to outlive its terminal
                continue
            self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


# --- small things --------------------------------------------------------------------------------------------------


def _next_attempt(run_dir: Path) -> int:
    """One more than any attempt that has left a trace here, so that a later launch never mixes with an earlier one."""
    names = [path.name for path in (run_dir / "logs").iterdir()]
    used = [int(found.group(1)) for name in names if (found := re.search(r"\.attempt-([0-9]+)\.", name))]
    try:
        used.append(int(json.loads((run_dir / "launch.json").read_text())["attempt"]))
    except (OSError, ValueError, KeyError, TypeError):
        # no earlier launch, or a record that is not ours: the logs alone tell
        return max(used, default=-1) + 1
    return max(used) + 1


def write_record(run_dir: Path, record: Mapping[str, Any], epoch: int, history: Sequence[Attempt]) -> None:
    """``launch.json``, replaced in one piece."""
    whole = {**record, "attempt": epoch, "attempts": [attempt.record() for attempt in history]}
    write_atomically(run_dir / "launch.json", json.dumps(whole, indent=1).encode() + b"\n")


def print_message(text: str) -> None:
    """To people, on standard error. Nothing in ``text``, which may be another host's, drives the terminal."""
    lines = printable(text, newlines=True).splitlines()
    print("\n".join(f"launch: {line}" for line in lines), file=sys.stderr, flush=True)
