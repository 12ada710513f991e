"""Processes that start in milliseconds: children of one process that has imported torch already.

    with Nursery() as nursery:
        child = nursery.start("faults_worker:main", {"units": 3}, log=path)

A child is a real process to be killed, stopped and looked at; it runs ``function(facts)`` and exits with its answer. With
``namespace`` it lives in that network namespace. All are killed with the nursery, or when the tests die.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

_CLONE_NEWNET = 0x40000000
_WARM = ("torch", "unisono.kvstore.backends.server_client", "unisono.kvstore.server.__main__", "torch.optim")
_MOST_BYTES = 1 << 20
FIRST_FD = 10


class Child:
    """One of them. It has the methods of ``subprocess.Popen`` that tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
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


class Nursery:
    """Starts the process that the others are born of."""

    def __init__(self) -> None:
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environ = {name: value for name, value in os.environ.items() if not name.startswith("UNISONO_")}
        environ |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())], env=environ, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        self._end.settimeout(60)

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
        return Child(int(self._end.recv(32)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.close()
        self._process.wait(30)


def _nurse(end: socket.socket) -> None:
    for name in _WARM:
        importlib.import_module(name)
    _step()
    children: list[int] = []
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    while True:
        order, fds, _, _ = socket.recv_fds(end, _MOST_BYTES, 16)
        if not order:
            break
        pid = os.fork()
        if pid == 0:
            end.close()
            _live(json.loads(order), fds)
        children.append(pid)
        for fd in fds:
            os.close(fd)
        end.send(str(pid).encode())
        children = [each for each in children if os.waitpid(each, os.WNOHANG) == (0, 0)]
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _step() -> None:
    """What torch imports only when an optimizer first makes a step takes seconds."""
    import torch
    from parameter_servers import recipe

    from unisono.kvstore.server.chunk_optimizer import ChunkOptimizer

    value = torch.nn.Parameter(torch.zeros(1))
    ChunkOptimizer(recipe({"a": value}), "a", value).step(torch.zeros(1), 1.0, None)


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
        module, _, name = order["function"].partition(":")
        function = getattr(importlib.import_module(module), name)
        code = function(order["facts"]) if order["facts"] is not None else function()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


if __name__ == "__main__":
    _nurse(socket.socket(fileno=int(sys.argv[1])))
