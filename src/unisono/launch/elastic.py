"""Sees the processes of an asynchronous job through, each by itself.

Workers of ``dist_async`` are in no process group, and servers know their clients by lease and sequence number. So a process
that dies is started again alone, with an epoch one higher, which fences off what its predecessor may still have under way. The
job ends when its workers have ended; then the servers are asked to.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.launch.exit_report import FATAL, REQUEUE, USER_ERROR, Attempt, exit_explanation
from unisono.launch.options import LaunchOptions
from unisono.launch.process_layout import ProcessSlot
from unisono.launch.supervise import (
    SAME_CRASH_LIMIT,
    StopSignals,
    begin_record,
    print_message,
    repeated,
    same_crashes,
    write_record,
)
from unisono.launch.workers import WorkerProcess

_POLL_S = 0.05

# starts the process of a seat: (seat, epoch, restarted)
StartOne = Callable[[ProcessSlot, int, bool], WorkerProcess]


@dataclass(slots=True)
class _Held:
    """A seat, who sits there now (None: it has ended for good, with ``code``), and how those before ended."""

    seat: ProcessSlot
    member: WorkerProcess | None
    history: list[Attempt] = field(default_factory=list[Attempt])
    code: int | None = None


def supervise_elastic(
    start: StartOne, seats: Sequence[ProcessSlot], options: LaunchOptions, *, run_dir: Path, record: Mapping[str, Any]
) -> int:
    """Starts all seats, servers first, and returns the exit code of the whole: 0, 1, 2, 75 (requeue) or 76 (do not repeat).

    ``launch.options.max_restarts`` counts for each seat. Call it on the main thread. Raises LaunchError when a process cannot be
    started at all.
    """
    first = begin_record(run_dir, record)
    table: list[_Held] = []
    verdict: int | None = None
    with StopSignals() as signals:
        stopping = _Stopping(options.grace_s)
        try:
            for seat in sorted(seats, key=lambda seat: seat.role != "server"):
                member = start(seat, first, False)
                table.append(_Held(seat, member, [Attempt.begin(first, [member], run_dir / "logs")]))
            while any(held.member and held.seat.role == "worker" for held in table):
                for held in table:
                    if held.member is None or (code := held.member.code()) is None:
                        continue
                    restart = _ended(held, code, options, stopped=stopping.by is not None)
                    write_record(run_dir, {**record, "ended": _ended_record(table)}, held.history[-1].epoch, [])
                    if not restart and code not in (0, REQUEUE) and verdict is None:
                        # one is given up: the others are asked to save and end
                        verdict = code if code in (USER_ERROR, FATAL) else 1
                    elif restart:
                        epoch = held.history[-1].epoch + 1
                        print_message(
                            f"restarting {held.seat.name} alone (restart {len(held.history)} of {options.max_restarts})"
                        )
                        held.member = start(held.seat, epoch, True)
                        held.history.append(Attempt.begin(epoch, [held.member], run_dir / "logs"))
                workers = [held.member for held in table if held.member and held.seat.role == "worker"]
                stopping.look(workers, signals, given_up=verdict is not None)
                time.sleep(_POLL_S)
            _end_servers([held.member for held in table if held.member], signals, options.grace_s)
        finally:
            for held in table:
                if held.member is not None:
                    held.member.kill_group()
    if verdict is not None:
        return verdict
    codes = {held.code for held in table if held.seat.role == "worker"}
    return REQUEUE if REQUEUE in codes else 0


def _ended(held: _Held, code: int, options: LaunchOptions, *, stopped: bool) -> bool:
    """Whether the seat is filled again; says on stderr what the user must know."""
    member, attempt = held.member, held.history[-1]
    assert member is not None
    member.kill_group()
    attempt.codes[member.rank] = code
    attempt.killed_by_us = {member.rank} if member.killed_by_us else set()
    if held.seat.role == "worker":
        attempt.read_failures()
    held.member, held.code = None, code
    if code in (0, REQUEUE):
        return False
    # of a mistake of the user's each rank has said all, above; a line tells who ended
    said = exit_explanation(attempt)
    print_message(said.partition("\n")[0] if code == USER_ERROR else said)
    if stopped or code in (USER_ERROR, FATAL):
        return False
    repeats = same_crashes(held.history)
    if repeats >= SAME_CRASH_LIMIT:
        print_message(repeated(attempt, repeats))
        return False
    if len(held.history) > options.max_restarts:
        print_message(f"no restart of {held.seat.name} left of {options.max_restarts} (launch.max_restarts)")
        return False
    return True


@dataclass(slots=True)
class _Stopping:
    """Asks workers to end, once, and kills those that have not in time."""

    grace_s: float
    by: str | None = None
    kill_at_s: float = 0.0

    def look(self, workers: Sequence[WorkerProcess], signals: StopSignals, *, given_up: bool) -> None:
        if self.by is None and (signals.received or given_up):
            received = signals.received[0] if signals.received else signal.SIGTERM
            self.by = received.name if signals.received else "a process that is given up"
            self.kill_at_s = time.monotonic() + self.grace_s
            if workers:
                print_message(f"{self.by}: asking {len(workers)} workers to save and end within {self.grace_s:g} s")
            for worker in workers:
                worker.end_by(signal.SIGINT if received is signal.SIGINT else signal.SIGTERM)
        interrupted_twice = signals.received.count(signal.SIGINT) > 1
        if self.by is not None and (interrupted_twice or time.monotonic() >= self.kill_at_s):
            for worker in workers:
                worker.kill_group()


def _end_servers(servers: Sequence[WorkerProcess], signals: StopSignals, grace_s: float) -> None:
    """They write their last snapshot; what has not ended in time is killed by the caller."""
    deadline = time.monotonic() + grace_s
    for server in servers:
        server.end_by(signal.SIGTERM)
    while any(server.code() is None for server in servers) and time.monotonic() < deadline:
        if signals.received.count(signal.SIGINT) > 1:
            return
        time.sleep(_POLL_S)


def _ended_record(table: Sequence[_Held]) -> list[dict[str, Any]]:
    return [
        {"process": held.seat.name, **attempt.record()} for held in table for attempt in held.history if attempt.codes
    ]
