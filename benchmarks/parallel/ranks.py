"""Two ranks of a job on this host as plain processes: nothing of a launcher is in their times. Standard library only."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

RANKS = 2


def run_ranks(
    command: Sequence[str], *, python: str = sys.executable, timeout_s: float = 600.0
) -> list[tuple[float, list[str]]]:
    """Run ``python command`` as every rank, of one thread each, as torchrun would number them.

    Of each the seconds from the start of the first to the last line it wrote to its standard output, and its lines. Raises
    RuntimeError with the end of what a rank wrote to its standard error, where it failed or ``timeout_s`` was over.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(RANKS)]
        begin_s = time.perf_counter()
        processes = [
            subprocess.Popen(
                [python, *command], env=_environ(rank, port), stdout=subprocess.PIPE, stderr=logs[rank], text=True
            )
            for rank in range(RANKS)
        ]
        found: dict[Any, tuple[float, list[str]]] = {process.stdout: (0.0, []) for process in processes}
        try:
            _listen(found, begin_s, timeout_s)
        finally:
            for process in processes:
                if process.poll() is None and not _ended(process):
                    process.kill()
                process.wait()
        for process, log in zip(processes, logs, strict=True):
            if process.returncode:
                log.seek(0)
                raise RuntimeError(log.read()[-2000:])
        return list(found.values())


def _listen(found: dict[Any, tuple[float, list[str]]], begin_s: float, timeout_s: float) -> None:
    """Read lines as they come, until all ranks have closed their ends, one of them early, or time is up."""
    open_ends = set(found)
    while open_ends:
        left_s = begin_s + timeout_s - time.perf_counter()
        ready = select.select(list(open_ends), [], [], max(0.0, left_s))[0]
        if not ready:
            return
        for end in ready:
            line = end.readline()
            if line:
                found[end] = (time.perf_counter() - begin_s, [*found[end][1], line])
            else:
                open_ends.discard(end)


def _ended(process: subprocess.Popen[str]) -> bool:
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        return False
    return True


def _environ(rank: int, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_PORT": port}
    given = {name: str(number) for name, number in numbers.items()}
    return os.environ | given | {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
