"""``unisono ARGUMENTS`` in processes that are killed at a chosen moment, that have no room, or no right to write.

    with Killer() as killer:
        whole = killer.run(folder, ["data", "dedup", "a.jsonl", "--out", "out"], watched="jaccard")
        killer.run(folder, [...], at_call=whole.watched[0])      # SIGKILL at this call of a function
        killer.run(folder, [...], at_change=3)                   # SIGKILL before the fourth change of a file in OUT

Each is a process of its own, forked from one that has imported the commands, so it begins in milliseconds. It kills itself: the
moment is the same each time, whatever the machine is busy with.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

_IMPORTED = (
    *("unisono.cli.main", "unisono.cli.data", "unisono.cli.data_quality", "unisono.cli.data_columns"),
    *("unisono.cli.data_balance", "unisono.quality.balance"),
    *("unisono.cli.data_labels", "unisono.quality.clean", "unisono.quality.leak", "unisono.quality.split"),
    *("unisono.quality.labels.label_errors", "unisono.quality.labels.relabel", "unisono.quality.columns.check"),
    *("unisono.data.convert.formats.jsonl", "unisono.data.convert.formats.csv", "safetensors.numpy"),
    *("unisono.data.convert.formats.recordio", "unisono.data.image", "PIL.Image", "rensa", "jinja2"),
)
_CAPABILITIES_VERSION = 0x20080522
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
# audit events that change files, with the places of their paths and of the descriptor that a path may be relative to
_CHANGES = {
    "open": ((0,), None),
    "os.mkdir": ((0,), 2),
    "os.rename": ((0, 1), 2),
    "os.remove": ((0,), 1),
    "os.rmdir": ((0,), 1),
    "os.truncate": ((0,), None),
}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended; what it did is known only of one that was not killed.

    Attributes:
        code: Exit code; minus the signal that ended it.
        out: What it printed.
        err: The same on standard error.
        calls: Number of calls of functions.
        watched: Numbers of the calls of the function that was watched, from 1.
        changes: Changes of files in OUT, in order: what, and the path.
    """

    code: int
    out: str
    err: str
    calls: int = 0
    watched: Sequence[int] = ()
    changes: Sequence[str] = ()


class Killer:
    """The process that commands are forked from."""

    def __enter__(self) -> Self:
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ
        )
        return self

    def run(self, folder: Path, arguments: Sequence[str], **order: Any) -> Ended:
        """The command in ``folder``, which has OUT in ``out``.

        Args:
            folder: Its working folder.
            arguments: Of ``unisono``.
            order: ``watched``: name of a function; ``at_call``, ``at_change``: when it is killed; ``max_file_bytes``: of files
                that it writes; ``without_rights``: whether permissions count for root, too.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = json.dumps({"folder": str(folder), "arguments": list(arguments), **order})
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
        return Ended(**json.loads(self._process.stdout.readline()))

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        assert self._process.returncode == 0


def _serve() -> None:
    for name in _IMPORTED:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1  # a forked process has no other threads
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)


def _run(order: dict[str, Any]) -> dict[str, Any]:
    pipes = [os.pipe() for _ in range(3)]
    pid = os.fork()
    if pid == 0:
        _live(order, [write for _, write in pipes])
    for _, write in pipes:
        os.close(write)
    out, err, facts = _read_all([read for read, _ in pipes])
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {"code": code, "out": out.decode(), "err": err.decode(), **json.loads(facts or b"{}")}


def _read_all(fds: Sequence[int]) -> list[bytes]:
    found, left = {fd: b"" for fd in fds}, set(fds)
    while left:
        for fd in select.select(list(left), [], [])[0]:
            part = os.read(fd, 1 << 16)
            found[fd] += part
            if not part:
                left.remove(fd)
                os.close(fd)
    return list(found.values())


def _live(order: dict[str, Any], fds: Sequence[int]) -> NoReturn:
    code: Any = 1
    try:
        for fd, place in zip(fds, (1, 2), strict=False):
            os.dup2(fd, place)
        os.chdir(order["folder"])
        sys.argv = ["unisono", *order["arguments"]]
        if order.get("without_rights"):
            _drop_rights()
        if (limit := order.get("max_file_bytes")) is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        moments = _Moments(order)
        try:
            moments.run()
        except SystemExit as end:
            code = end.code
        os.write(fds[2], json.dumps(moments.facts()).encode())
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code or 0)


def _drop_rights() -> None:
    """Permissions of files count for root, too."""
    if sys.platform == "linux":
        header, none = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)()
        if ctypes.CDLL(None, use_errno=True).capset(header, none):
            raise OSError(ctypes.get_errno(), "capset")


class _Moments:
    """Counts what the command does, and kills it at the moment that is asked for."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._watched, self._at_call, self._at_change = map(order.get, ("watched", "at_call", "at_change"))
        self._out = os.path.abspath("out")
        self._calls = 0
        self._of_watched: list[int] = []
        self._changes: list[str] = []

    def run(self) -> None:
        from unisono.cli.main import entry

        sys.addaudithook(self._on_event)
        sys.setprofile(self._on_call)
        try:
            entry()
        finally:
            sys.setprofile(None)

    def facts(self) -> dict[str, Any]:
        return {"calls": self._calls, "watched": self._of_watched, "changes": self._changes}

    def _on_call(self, frame: Any, event: str, _: object) -> None:
        if event in ("call", "c_call"):
            self._calls += 1
            if event == "call" and frame.f_code.co_name == self._watched:
                self._of_watched.append(self._calls)
            if self._calls == self._at_call:
                os.kill(os.getpid(), signal.SIGKILL)

    def _on_event(self, event: str, given: tuple[Any, ...]) -> None:
        if event not in _CHANGES or (event == "open" and not (isinstance(given[2], int) and given[2] & _WRITES)):
            return
        places, of_fd = _CHANGES[event]
        # the paths of a tree that is removed are relative to a folder of it
        is_relative = of_fd is not None and given[of_fd] != -1
        paths = [os.fsdecode(given[place]) for place in places if isinstance(given[place], str | bytes | os.PathLike)]
        if is_relative or any(os.path.abspath(path).startswith(f"{self._out}{os.sep}") for path in paths):
            if len(self._changes) == self._at_change:
                os.kill(os.getpid(), signal.SIGKILL)
            self._changes.append(" ".join([event, *paths]))


if __name__ == "__main__":
    _serve()
