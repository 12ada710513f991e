"""Finds the missing ranks of a failed collective, which its own error does not name.

Gloo reports an address and a port, NCCL nothing. Ranks of one host look each other up in the process table: ended, stopped or
alive. Beyond that, a roll call through the store shows which rank is waiting in which collective.
"""

from __future__ import annotations

import os
import platform
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from torch.distributed import Store

# a killed process closes its sockets a moment before it leaves the process table
_SETTLE_S = 1.0
_ROLL_CALL_S = 3.0


def identity() -> dict[str, Any]:
    """Host, pid and creation time, with which another rank of this host can look this process up."""
    process = psutil.Process()
    return {"host": host_id(), "pid": process.pid, "created": process.create_time()}


def missing_ranks(peers: Sequence[Mapping[str, Any]], rank: int, *, settle: bool) -> list[str]:
    """A line such as ``rank 1 (pid 4711) has ended`` for every peer on this host that has ended or is stopped.

    ``settle`` repeats the look-up for up to one second, for a closed connection whose peer may still be dying.
    """
    deadline = time.monotonic() + (_SETTLE_S if settle else 0)
    while True:
        missing = [
            f"rank {other} (pid {peer['pid']}) {state}"
            for other, peer in enumerate(peers)
            if other != rank and peer["host"] == host_id() and (state := _state(peer))
        ]
        if missing or time.monotonic() >= deadline:
            return missing
        time.sleep(0.02)


def roll_call(store: Store, rank: int, world: int, waiting_in: str) -> list[str]:
    """A line for every rank that is not waiting in the same collective as this one; empty if that cannot be found out.

    Every rank whose collective timed out writes where it waits. The store may be served by the process that hangs, so
    it is asked from a thread that is abandoned after a few seconds.
    """
    answers: dict[int, str] = {}

    def ask() -> None:
        with suppress(RuntimeError):  # the store has ended with its host
            store.set(f"waiting/{rank}", waiting_in)
            deadline = time.monotonic() + _ROLL_CALL_S
            while time.monotonic() < deadline and len(answers) < world:
                for other in range(world):
                    if other not in answers and store.check([f"waiting/{other}"]):
                        answers[other] = store.get(f"waiting/{other}").decode()
                time.sleep(0.02)

    asker = threading.Thread(target=ask, name="unisono-roll-call", daemon=True)
    asker.start()
    asker.join(_ROLL_CALL_S + 1)
    if rank not in answers:
        return ["the store on rank 0's host does not answer"] if rank else []
    elsewhere = [f"rank {other} waits in {op}" for other, op in sorted(answers.items()) if op != waiting_in]
    absent = [f"rank {other} waits in no collective" for other in range(world) if other not in answers]
    return elsewhere + absent


def _state(peer: Mapping[str, Any]) -> str:
    try:
        process = psutil.Process(int(peer["pid"]))
        if abs(process.create_time() - float(peer["created"])) > 1:
            return "has ended"
        status = process.status()
    except psutil.Error:
        return "has ended"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "has ended"
    return "is stopped" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else ""


def host_id() -> str:
    """An id of this host and its pid namespace: containers with one host name must not look up each other's pids."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    if boot.exists() and namespace.exists():
        return f"{boot.read_text().strip()}/{os.readlink(namespace)}"
    return f"{platform.system()}/{socket.gethostname()}"
