"""Which rank is missing? The answer a collective's own error does not give.

Gloo names an address and a port, NCCL nothing. Ranks of one host can look each other up in the process table: gone,
stopped, or alive. For the rest a roll-call through the store shows who is waiting in which collective, and who in none.
"""

from __future__ import annotations

import os
import platform
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import Store

# a killed process closes its sockets a moment before the process table says so
_SETTLE_S = 1.0
_ROLL_CALL_S = 3.0


def identity() -> dict[str, Any]:
    """Enough for another rank to find this process again, if it runs on the same host and process table."""
    process = psutil.Process()
    return {"host": _host(), "pid": process.pid, "created": process.create_time()}


def missing_ranks(peers: Sequence[Mapping[str, Any]], rank: int, *, settle: bool) -> list[str]:
    """``rank 1 (pid 4711) has ended`` for every peer on this host that ended or is stopped.

    With ``settle`` it asks again for up to a second: for a connection that was closed, where the peer may be dying.
    """
    deadline = time.monotonic() + (_SETTLE_S if settle else 0)
    while True:
        found = [
            f"rank {other} (pid {peer['pid']}) {state}"
            for other, peer in enumerate(peers)
            if other != rank and peer["host"] == _host() and (state := _state(peer))
        ]
        if found or time.monotonic() >= deadline:
            return found
        time.sleep(0.02)


def roll_call(store: Store, rank: int, world: int, waiting_in: str) -> list[str]:
    """Who is not waiting in the same collective as this rank; empty where nobody can tell. Who is cut off from the store says that.

    Every rank whose collective timed out says where it waits. The store's host may be the very process that hangs, so
    the questions are asked from a thread that is given up after a few seconds.
    """
    answers: dict[int, str] = {}

    def ask() -> None:
        store.set(f"waiting/{rank}", waiting_in)
        deadline = time.monotonic() + _ROLL_CALL_S
        while time.monotonic() < deadline and len(answers) < world:
            for other in range(world):
                if other not in answers and store.check([f"waiting/{other}"]):
                    answers[other] = store.get(f"waiting/{other}").decode()
            time.sleep(0.02)

    asker = threading.Thread(target=_quietly, args=(ask,), name="unisono-roll-call", daemon=True)
    asker.start()
    asker.join(_ROLL_CALL_S + 1)
    if rank not in answers:
        return ["the store on rank 0's host does not answer"] if rank else []
    elsewhere = [f"rank {other} waits in {op}" for other, op in sorted(answers.items()) if op != waiting_in]
    absent = [f"rank {other} waits in no collective" for other in range(world) if other not in answers]
    return elsewhere + absent


def _quietly(action: Any) -> None:
    try:
        action()
    except RuntimeError:
        # the store is gone with its host: then there is nothing to learn from it
        return


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


def _host() -> str:
    """This host and its process table: containers that share a host name must not look up each other's pids."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    if boot.exists() and namespace.exists():
        return f"{boot.read_text().strip()}/{os.readlink(namespace)}"
    return f"{platform.system()}/{socket.gethostname()}"
