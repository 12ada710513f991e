"""Processes that start in milliseconds: children of one process that has imported torch already.

    with Nursery() as nursery:
        child = nursery.start("faults_worker:main", {"units": 3}, log=path)

A child is a real process to be killed, stopped and looked at; it runs ``function(facts)`` and exits with its answer. With
``namespace`` it lives in that network namespace. All are killed with the nursery, or when the tests die.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from unittest import mock

_CLONE_NEWNET = 0x40000000
_WARM = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "unisono.kvstore.backends.server_client",
    "unisono.kvstore.server.__main__",
)
_MOST_BYTES = 1 << 20
FIRST_FD = 10


class Child:
    """One of them. It has the methods of ``subprocess.Popen`` that tests use."""

    def __init__(self, pid: int, nursery: Nursery) -> None:
        self.pid = pid
        self._nursery = nursery
        self._fd = os.pidfd_open(pid)

    def send_signal(self, number: signal.Signals) -> None:
        """To this very process, or to nobody."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, number)

    def kill(self) -> None:
        """Works on a stopped one too."""
        self.send_signal(signal.SIGKILL)

    def ended(self, timeout_s: float = 0.0) -> bool:
        """Whether it is gone, at the latest after ``timeout_s``."""
        return bool(select.select([self._fd], [], [], timeout_s)[0])

    def wait(self, timeout_s: float = 30.0) -> None:
        """Until it is gone."""
        assert self.ended(timeout_s), f"process {self.pid} still runs after {timeout_s} s"

    def exit_code(self, timeout_s: float = 30.0) -> int:
        """As ``subprocess`` has it, once the process is gone: minus the signal that ended it."""
        self.wait(timeout_s)
        return self._nursery.exit_code(self.pid)


class Nursery:
    """Starts the process that the others are born of."""

    def __init__(self) -> None:
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environ = {name: value for name, value in os.environ.items() if not name.startswith("UNISONO_")}
        environ |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # numpy starts as many when it is imported
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), str(os.getpid())],
            env=environ,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._end.settimeout(170)  # of which the first answer takes most: it comes when all is imported

    def start(
        self,
        function: str,
        facts: Any = None,
        *,
        log: Path,
        environ: Mapping[str, str] | None = None,
        fds: Sequence[int] = (),
        namespace: str = "",
    ) -> Child:
        """``function`` is ``module:name``; ``fds`` are there from number ``FIRST_FD`` on; what is printed goes to ``log``."""
        order = {
            "function": function,
            "facts": facts,
            "log": str(log),
            "environ": dict(environ or {}),
            "namespace": namespace,
        }
        socket.send_fds(self._end, [json.dumps(order).encode()], list(fds))
        return Child(int(self._end.recv(32)), self)

    def exit_code(self, pid: int) -> int:
        """Of a child that is gone."""
        self._end.send(json.dumps({"gone": pid}).encode())
        return int(self._end.recv(32))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the nursery, which kills its children."""
        self._end.close()
        self._process.wait(30)


def _die_with(parent: int) -> None:
    """A killed parent leaves no child behind, not even one that is blocked in C."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def _nurse(end: socket.socket) -> None:
    _warm()
    names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    assert len(names) == 1, f"threads that a child would not have: {names}"
    # what is here by now is no garbage, and children look at it no more
    gc.collect()
    gc.freeze()
    me = os.getpid()
    alive: set[int] = set()
    codes: dict[int, int] = {}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    while True:
        message, fds, _, _ = socket.recv_fds(end, _MOST_BYTES, 16)
        if not message:
            break
        order = json.loads(message)
        if "gone" in order:
            code = codes.pop(order["gone"], None)
            if code is None:
                code = os.waitstatus_to_exitcode(os.waitpid(order["gone"], 0)[1])
                alive.remove(order["gone"])
            end.send(str(code).encode())
            continue
        pid = os.fork()
        if pid == 0:
            end.close()
            _die_with(me)
            _live(order, fds)
        alive.add(pid)
        for fd in fds:
            os.close(fd)
        end.send(str(pid).encode())
        for pid in list(alive):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                alive.remove(pid)
                codes[pid] = os.waitstatus_to_exitcode(status)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _named(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _warm() -> None:
    """Imports what most children import; some of it torch imports only when an optimizer first makes a step. Starts no
    threads, which a child would not have."""
    for name in _WARM:
        importlib.import_module(name)
    import torch
    from parameter_servers import recipe

    import unisono
    from unisono.kvstore.server.chunk_optimizer import ChunkOptimizer

    _ = unisono.Trainer
    value = torch.nn.Parameter(torch.zeros(1))
    ChunkOptimizer(recipe({"a": value}), "a", value).step(torch.zeros(1), 1.0, None)
    value.grad = torch.zeros(1)
    # Adam asks whether an accelerator is recording a graph, which would start its driver: that has threads, and fails in a child
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        mock.patch.object(torch.accelerator, "current_accelerator", return_value=None),
    ):
        torch.optim.AdamW([value]).step()
    assert not torch.cuda.is_initialized()


def _live(order: Mapping[str, Any], fds: Sequence[int]) -> None:
    code = 1
    try:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        for place, fd in enumerate(fds):
            os.dup2(fd, FIRST_FD + place)
        os.environ.update(order["environ"])
        if order["namespace"]:
            with open(f"/run/netns/{order['namespace']}") as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
        function = _named(order["function"])
        code = function(order["facts"]) if order["facts"] is not None else function()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


if __name__ == "__main__":
    _die_with(int(sys.argv[2]))
    _nurse(socket.socket(fileno=int(sys.argv[1])))
