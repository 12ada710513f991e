"""Supervises an asynchronous job: each worker and server is restarted alone.

Workers of ``dist_async`` are in no process group, and servers know their clients by lease and sequence number. A
process that dies is therefore restarted alone, with a restart count one higher; the count fences off requests of its
predecessor that are still under way. The job ends when its workers have ended; then the servers are stopped.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from unisono.dist import Failure
from unisono.exit_codes import FATAL, REQUEUE, USER_ERROR
from unisono.launch.exit_report import Attempt, exit_explanation
from unisono.launch.options import LaunchOptions
from unisono.launch.process_layout import ProcessSlot
from unisono.launch.restart_rules import is_fault_of_one_host, reason_not_to_restart, reason_to_restart
from unisono.launch.supervise import (
    Recorder,
    StopSignals,
    complete_report,
    first_attempt,
    print_message,
)
from unisono.launch.workers import WorkerProcess
from unisono.storage.run_folder import LOGS_FOLDER

_POLL_S = 0.05

# (slot, attempt number, whether it is a restart) -> its process, started
StartOne = Callable[[ProcessSlot, int, bool], WorkerProcess]


@dataclass(slots=True)
class _SlotState:
    """A slot, its running process (None once it has ended for good, with ``code``), and all its attempts."""

    slot: ProcessSlot
    process: WorkerProcess | None
    attempts: list[Attempt]
    code: int | None = None

    @property
    def is_running_worker(self) -> bool:
        return self.process is not None and self.slot.role == "worker"


def supervise_elastic(
    start: StartOne,
    slots: Sequence[ProcessSlot],
    options: LaunchOptions,
    *,
    run_dir: Path,
    record: Mapping[str, Any],
    elastic: bool = False,
) -> int:
    """Start all slots, servers first, and restart each alone; returns 0, 1, 2, 75 (requeue) or 76 (do not repeat).

    ``options.max_restarts`` counts for each slot. If ``elastic``, a worker without a restart left has left the job, which
    goes on while it has workers, and whose servers wait for those that others have joined to it. Call it on the main
    thread, inside ``job_folder``. Raises LaunchError if a process cannot be started.
    """
    logs = run_dir / LOGS_FOLDER
    states: list[_SlotState] = []
    shown: list[Failure] = []
    verdict: int | None = None
    recorder = Recorder(run_dir)
    with StopSignals() as signals:
        first = first_attempt(run_dir, record)
        stop = _WorkerStop(options.grace_s)
        try:
            for slot in sorted(slots, key=lambda slot: slot.role != "server"):
                process = start(slot, first, False)
                states.append(_SlotState(slot, process, [Attempt.begin(first, [process], logs)]))
            while any(state.is_running_worker for state in states):
                for state in states:
                    if state.process is None or (code := state.process.code()) is None:
                        continue
                    what_now = _record_end(state, code, options, shown, stopped=stop.cause is not None)
                    last = state.attempts[-1].number
                    recorder.write({**record, "ended": _ended_record(states)}, last, [])
                    if what_now == "restart":
                        print_message(
                            f"restarting {state.slot.name} alone (restart {len(state.attempts)} of {options.max_restarts})"
                        )
                        state.process = start(state.slot, last + 1, True)
                        state.attempts.append(Attempt.begin(last + 1, [state.process], logs))
                    elif what_now == "no restart left" and elastic and state.slot.role == "worker":
                        going_on = sum(other.is_running_worker for other in states)
                        print_message(f"{state.slot.name} has left; {going_on} workers of this launch go on")
                    elif code not in (0, REQUEUE) and verdict is None:
                        # this slot is given up: the other workers are asked to save and end
                        verdict = code if code in (USER_ERROR, FATAL) else 1
                workers = [state.process for state in states if state.process and state.slot.role == "worker"]
                stop.poll(workers, signals, given_up=verdict is not None)
                time.sleep(_POLL_S)
            codes = {state.code for state in states if state.slot.role == "worker"}
            if verdict is None and not codes & {0, REQUEUE}:
                verdict = 1  # every worker has left, none at its end
            wait_s = math.inf if elastic and verdict is None else options.grace_s
            _stop_servers([state.process for state in states if state.process], signals, options.grace_s, wait_s)
        finally:
            for state in states:
                if state.process is not None:
                    state.process.kill_group()
        code = verdict if verdict is not None else REQUEUE if REQUEUE in codes else 0
        complete_report(run_dir, code, signals)
        return code


def _record_end(
    state: _SlotState, code: int, options: LaunchOptions, shown: list[Failure], *, stopped: bool
) -> Literal["restart", "ended", "no restart left"]:
    """Record that the process of a slot has ended; returns what follows. Prints the reason to stderr, with the
    traceback of an error that is not among ``shown``, where it adds it."""
    process, attempt = state.process, state.attempts[-1]
    assert process is not None
    process.kill_group()
    attempt.codes[process.rank] = code
    if state.slot.role == "worker":
        attempt.read_failures()
    state.process, state.code = None, code
    if code in (0, REQUEUE):
        return "ended"
    attempt.decide(restart=False, why="its exit code says so" if code in (USER_ERROR, FATAL) else "the job ends")
    # every rank has printed a user error in full above; one line says which rank it was
    explanation = exit_explanation(attempt, shown)
    failure = attempt.root_failure()
    is_anothers = failure is not None and any(f.same_error(failure) and f.rank != failure.rank for f in shown)
    if failure is not None:
        shown.append(failure)
    print_message(explanation.partition("\n")[0] if code == USER_ERROR else explanation)
    if stopped or code in (USER_ERROR, FATAL):
        return "ended"
    problem = reason_not_to_restart(state.attempts)
    if problem is not None:
        attempt.decide(restart=False, why=f"{problem.given}: {problem.rule}")
        if not is_anothers:
            print_message(str(problem))
        return "ended" if failure is not None and not is_fault_of_one_host(attempt) else "no restart left"
    if len(state.attempts) > options.max_restarts:
        print_message(f"no restart of {state.slot.name} left of {options.max_restarts} (launch.max_restarts)")
        attempt.decide(restart=False, why=f"no restart left of {options.max_restarts} (launch.max_restarts)")
        return "no restart left"
    attempt.decide(restart=True, why=reason_to_restart(attempt))
    return "restart"


@dataclass(slots=True)
class _WorkerStop:
    """Asks workers to end, once, and kills those still running after ``grace_s`` seconds."""

    grace_s: float
    cause: str | None = None
    kill_at_s: float = 0.0

    def poll(self, workers: Sequence[WorkerProcess], signals: StopSignals, *, given_up: bool) -> None:
        if self.cause is None and (signals.received or given_up):
            self.cause = signals.received[0].name if signals.received else "a process that is given up"
            self.kill_at_s = time.monotonic() + self.grace_s
            if workers:
                print_message(f"{self.cause}: asking {len(workers)} workers to save and end within {self.grace_s:g} s")
            for worker in workers:
                worker.end_by(signals.to_workers())
        if self.cause is not None and (signals.interrupted_twice or time.monotonic() >= self.kill_at_s):
            for worker in workers:
                worker.kill_group()


def _stop_servers(servers: Sequence[WorkerProcess], signals: StopSignals, grace_s: float, wait_s: float) -> None:
    """Ask servers to write their last snapshot and end, and wait up to ``wait_s`` seconds, or ``grace_s`` from a stop signal
    on. The caller kills the rest."""
    deadline = time.monotonic() + (grace_s if signals.received else wait_s)
    for server in servers:
        server.end_by(signal.SIGTERM)
    while any(server.code() is None for server in servers) and time.monotonic() < deadline:
        if signals.interrupted_twice:
            return
        if signals.received:
            deadline = min(deadline, time.monotonic() + grace_s)
        time.sleep(_POLL_S)


def _ended_record(states: Sequence[_SlotState]) -> list[dict[str, Any]]:
    return [
        {"process": state.slot.name, **attempt.record()}
        for state in states
        for attempt in state.attempts
        if attempt.codes
    ]
