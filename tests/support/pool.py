"""Warm worker processes for tests that need several ranks: torch is imported once per test session, not once per test.

Use it through the fixture ``pool`` (``tests/conftest.py`` has ``from pool import pool``):

    def grad_norms(world, steps, scale=1.0):          # a module-level function of the test module
        ...                                           # runs on every rank, with a fresh World
        return [0.5, 0.25]                            # anything multiprocessing can send

    def test_norms(pool):
        first, second = pool.run(grad_norms, 3, scale=2.0, ranks=2)      # results in rank order

Each call gets new process groups, the environment and working directory the worker started with, one torch thread,
seed 0, and warnings as errors. A rank that raises, dies or hangs makes ``run`` raise ``WorkersFailed``, whose
``outcomes`` says what happened on each rank ("ok", a traceback, "exit code -9", "no answer"); all workers of that call
are replaced. ``joined=False`` hands the function its JobSpec in place of a World. ``timeout_s`` bounds the call from
outside, ``comm_timeout_s`` each collective inside.

A worker imports the test module by its path: keep top-level work there cheap, and send plain data or tensors only. Workers are
children of two nurseries in turn, so that ranks 0 and 1 hash strings differently, as processes of a real job do.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib.util
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from nursery import FIRST_FD, Child, Nursery


class WorkersFailed(AssertionError):
    """At least one rank of a call did not return. ``outcomes``: one text per rank."""

    def __init__(self, name: str, outcomes: list[str], logs: list[str]) -> None:
        lines = [f"{name} failed"]
        for rank, (outcome, log) in enumerate(zip(outcomes, logs, strict=True)):
            lines += [f"--- rank {rank}: {outcome}", *([f"    output: {log[-2000:]}"] if log.strip() else [])]
        super().__init__("\n".join(lines))
        self.outcomes = outcomes


@dataclass
class _Worker:
    process: Child
    pipe: Connection
    log: Path

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.pipe.close()


class Pool:
    """Workers start when first needed and stay until ``close``."""

    def __init__(self) -> None:
        self._idle: list[_Worker] = []
        self._nurseries: list[Nursery] = []
        self._folder = tempfile.TemporaryDirectory(prefix="unisono-pool-")
        self._started = 0

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: int = 2,
        timeout_s: float = 60.0,
        comm_timeout_s: float = 20.0,
        joined: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """``function(world, *args, **kwargs)`` on ``ranks`` processes at once; their results in rank order."""
        assert "." not in function.__qualname__, f"{function.__qualname__} must be a module-level function"
        where = (function.__code__.co_filename, function.__qualname__)
        workers = self._take(ranks)
        settings = {"ranks": ranks, "comm_timeout_s": comm_timeout_s, "joined": joined}
        outcomes: list[str] = ["no answer"] * ranks
        results: list[Any] = [None] * ranks
        deadline = time.monotonic() + timeout_s
        marks = [worker.log.stat().st_size for worker in workers]
        try:
            workers[0].pipe.send((where, args, kwargs, settings | {"rank": 0, "port": 0}))
            # rank 0 chooses a port by binding it; the others are told
            if workers[0].pipe.poll(max(0.0, deadline - time.monotonic())):
                port = workers[0].pipe.recv()
                for rank, worker in enumerate(workers[1:], 1):
                    worker.pipe.send((where, args, kwargs, settings | {"rank": rank, "port": port}))
                self._collect(workers, outcomes, results, deadline)
        except (EOFError, OSError):
            pass
        finally:
            if all(outcome == "ok" for outcome in outcomes):
                self._idle += workers
            else:
                for rank, worker in enumerate(workers):
                    if outcomes[rank] == "no answer" and worker.process.ended():
                        outcomes[rank] = f"exit code {worker.process.exit_code()}"
                    worker.kill()
        if any(outcome != "ok" for outcome in outcomes):
            logs = [
                worker.log.read_bytes()[mark:].decode(errors="replace")
                for worker, mark in zip(workers, marks, strict=True)
            ]
            raise WorkersFailed(function.__qualname__, outcomes, logs)
        return results

    def _collect(self, workers: list[_Worker], outcomes: list[str], results: list[Any], deadline: float) -> None:
        waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), timeout=left):
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                try:
                    outcomes[rank], results[rank] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    outcomes[rank] = f"exit code {workers[rank].process.exit_code()}"
                if outcomes[rank] != "ok":
                    # the peers notice by themselves; what takes longer than this is a hang, and its rank says so
                    deadline = min(deadline, time.monotonic() + 15)

    def _take(self, count: int) -> list[_Worker]:
        alive = [worker for worker in self._idle if not worker.process.ended()]
        for worker in self._idle:
            if worker not in alive:
                worker.kill()
        fresh = [self._start() for _ in range(count - len(alive))]
        workers, self._idle = (alive + fresh)[:count], alive[count:]
        return workers

    def _start(self) -> _Worker:
        self._started += 1
        log = Path(self._folder.name) / f"worker-{self._started}.log"
        log.touch()
        nursery = self.nurseries[self._started % 2]
        ours, theirs = socket.socketpair()
        process = nursery.start("pool:serve", log=log, fds=[theirs.fileno()])
        theirs.close()
        return _Worker(process, Connection(ours.detach()), log)

    @property
    def nurseries(self) -> list[Nursery]:
        """Started when first needed."""
        if not self._nurseries:
            self._nurseries = [Nursery(), Nursery()]
        return self._nurseries

    def close(self) -> None:
        """Ends all workers."""
        for worker in self._idle:
            worker.kill()
        self._idle = []
        for nursery in self._nurseries:
            nursery.close()
        self._nurseries = []
        self._folder.cleanup()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Warm worker processes, shared by the whole test session."""
    made = Pool()
    yield made
    made.close()


@pytest.fixture(scope="session")
def nursery(pool: Pool) -> Nursery:
    """Starts other processes than the pool's workers in milliseconds."""
    return pool.nurseries[0]


# --- inside a worker -------------------------------------------------------------------------------------------------


def serve() -> None:
    """A worker, until the pool closes its end of the pipe."""
    import torch

    os.setsid()
    pipe = Connection(FIRST_FD)
    environ, folder = dict(os.environ), Path.cwd()
    while True:
        try:
            (path, name), args, kwargs, settings = pipe.recv()
        except EOFError:
            return
        os.environ.clear()
        os.environ.update(environ)
        os.chdir(folder)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                answer = ("ok", _call(pipe, path, name, args, kwargs, settings))
            except BaseException:
                answer = (traceback.format_exc(), None)
        pipe.send(answer)
        gc.collect()


def _call(pipe: Connection, path: str, name: str, args: Any, kwargs: Any, settings: dict[str, Any]) -> Any:
    from unisono.dist import JobSpec, join_world

    rank, ranks, port = settings["rank"], settings["ranks"], settings["port"]
    listener = None
    if rank == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        pipe.send(port)
    job = JobSpec(
        run_id="pool",
        rank=rank,
        local_rank=rank,
        world_size=ranks,
        local_world=ranks,
        master_port=port,
        source="unisono",
        listen_fd=listener.detach() if listener is not None and ranks > 1 else None,
    )
    if listener is not None:
        listener.close()
    function = getattr(_module(path), name)
    if not settings["joined"]:
        return function(job, *args, **kwargs)
    world = join_world(job, device_type="cpu", timeout_s=settings["comm_timeout_s"])
    try:
        return function(world, *args, **kwargs)
    finally:
        world.close()


def _module(path: str) -> ModuleType:
    name = "pool_" + hashlib.sha256(path.encode()).hexdigest()[:16]
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        gc.freeze()  # what was imported stays: collections after each call need not look at it
    return sys.modules[name]
