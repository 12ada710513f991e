"""Runs in a checkout's own interpreter: forks processes that have imported torch already, which saves seconds of CPU each.

Reads one JSON object a line on standard input and answers on standard output:

    {"id", "module", "argv", "environ", "cwd", "log", "fds"}  ->  {"id", "pid"}, and later {"id", "code"}
    {"kill": pid}                                             ->  kills that process group

A child is what ``python -m module argv`` would be. Its output goes to the files ``log`` + ``.out`` and ``.err``.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import signal
import sys
from typing import Any


def preload() -> None:
    """Import what every run needs, with one optimizer step: that makes torch import its compiler."""
    import torch

    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.0).step()
    import unisono

    for name in getattr(unisono, "__all__", ()):  # names are resolved lazily
        getattr(unisono, name, None)


def become(order: dict[str, Any]) -> None:
    """Turn this forked child into ``python -m module argv``; ends with that program's SystemExit."""
    os.setpgid(0, 0)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environ"])
    for number, suffix in ((1, ".out"), (2, ".err")):
        fd = os.open(order["log"] + suffix, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(fd, number)
        os.close(fd)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.argv = [order["module"], *order["argv"]]
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
    raise SystemExit(0)


def answer(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    preload()
    answer({"ready": True})
    numbers: dict[int, int] = {}
    pending = b""
    reading = True
    while reading or numbers:
        if reading and select.select([0], [], [], 0.02)[0]:
            data = os.read(0, 1 << 16)
            reading = bool(data)
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                if "kill" in order:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(order["kill"], signal.SIGKILL)
                    continue
                pid = os.fork()
                if pid == 0:
                    become(order)
                numbers[pid] = order["id"]
                answer({"id": order["id"], "pid": pid})
        if not reading:  # whoever asked is gone
            for pid in numbers:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        while numbers:
            pid, status = os.waitpid(-1, 0 if not reading else os.WNOHANG)
            if pid == 0:
                break
            if pid in numbers:
                answer({"id": numbers.pop(pid), "code": os.waitstatus_to_exitcode(status)})


if __name__ == "__main__":
    main()
