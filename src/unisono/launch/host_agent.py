"""The launcher's hand on one host: ``python -m unisono.launch.host_agent`` starts processes and tells how they fare.

It reads JSON lines from standard input and writes JSON lines to standard output:

                                                                               {"event": "hello"}, first of all
    {"do": "job", "options": …, "secret": hex or null}                         {"event": "ready", "share": …}
    {"do": "listen", "key", "host", "interface", "port"}                       {"event": "listening", "address", "why"}
    {"do": "start", "id", "command", "place", "listen", "towards", …}          {"event": "started", "id", "pid"}
    {"do": "signal", "id", "number"}, {"do": "kill", "id"}                     {"event": "line", "id", "text"}
                                                                               {"event": "ended", "id", "code", "failure"}

and {"event": "refused", "problem": …} where something asked for cannot be. Standard input is the lifeline: when it closes,
because the launcher died or its connection did, everything started here gets SIGKILL. A listening socket is held here from its
``listen`` on, so a server that is started again finds the same port, and nobody else can take it meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from unisono.dist import JobSpec, read_failure
from unisono.errors import LaunchError
from unisono.launch.network_interface import NetworkInterface, interface_by_name, interface_towards
from unisono.launch.options import options_of_message
from unisono.launch.resources import ResourceShare, divide_host
from unisono.launch.workers import Reaper, Worker, start_worker

_POLL_S = 0.05
_READ_BYTES = 65536
# a line without an end is passed on in pieces
_LINE_BYTES = 65536


@dataclass(slots=True)
class _Started:
    id: int
    worker: Worker
    job: JobSpec
    output: int
    partial: bytes = b""


@dataclass(slots=True)
class HostAgent:
    """What runs on this host; ``send`` is the launcher's end."""

    guard: Reaper
    logs: Path
    replies: int
    share: ResourceShare | None = None
    secret: bytes | None = None
    listeners: dict[str, socket.socket] = field(default_factory=dict[str, socket.socket])
    started: dict[int, _Started] = field(default_factory=dict[int, _Started])

    def obey(self, message: dict[str, Any]) -> None:
        """Does what one line asks for."""
        try:
            match message["do"]:
                case "job":
                    self.share = divide_host(options_of_message(message["options"]))
                    self.secret = bytes.fromhex(message["secret"]) if message["secret"] else None
                    self.send(event="ready", share=self.share.record())
                case "listen":
                    self._listen(message["key"], message["host"], message["interface"], message["port"])
                case "start":
                    self._start(message)
                case "signal":
                    if message["id"] in self.started:
                        self.started[message["id"]].worker.end_by(signal.Signals(message["number"]))
                case "kill":
                    if message["id"] in self.started:
                        self.started[message["id"]].worker.kill_group()
                case other:
                    raise ValueError(f"the launcher asks this agent to {other!r}, which it does not know")
        except LaunchError as error:
            self.send(event="refused", problem=asdict(error.problems[0]))

    def _listen(self, key: str, host: str, interface: str | None, port: int) -> None:
        found = interface_by_name(interface) if interface else None
        address = found.address if found else host
        if key in self.listeners:
            self.listeners.pop(key).close()
        self.listeners[key] = listener = _listener(address, port)
        own = str(listener.getsockname()[0])
        self.send(
            event="listening",
            # the name may mean a loopback address here that other hosts take for their own
            loopback=own.startswith("127.") or own == "::1",
            address=f"{address}:{listener.getsockname()[1]}",
            why=found.why if found else "the name in the hosts file",
        )

    def _start(self, message: dict[str, Any]) -> None:
        assert self.share is not None
        key: str | None = message["listen"]
        place: dict[str, Any] = message["place"]
        place["server_addresses"] = tuple(place["server_addresses"])
        if key is not None:
            place["listen_fd"] = self.listeners[key].fileno()
        job = JobSpec(**place)
        way: NetworkInterface = (
            interface_by_name(message["interface"]) if message["interface"] else interface_towards(message["towards"])
        )
        reader, writer = os.pipe()
        try:
            worker = start_worker(
                message["command"],
                job,
                self.share,
                guard=self.guard,
                logs=self.logs,
                log=None,
                output=writer,
                restarted=message["restarted"],
                environ={**way.environ(), **message["environ"]},
                secret=self.secret,
            )
        except LaunchError:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        os.set_blocking(reader, False)
        self.started[message["id"]] = _Started(message["id"], worker, job, reader)
        self.send(event="started", id=message["id"], pid=worker.pid, interface=way.name, why=way.why)
        if key is not None and not message["keep"]:
            # rank 0 has it; when it ends, the port is free
            self.listeners.pop(key).close()

    def look(self) -> None:
        """Passes on what was printed, and who has ended."""
        for each in list(self.started.values()):
            ended = each.worker.code() is not None
            if ended:
                # what it left running would hold its output open
                each.worker.kill_group()
            while self._read(each):
                pass
            if ended:
                self._end(each)

    def _read(self, each: _Started) -> bool:
        try:
            data = os.read(each.output, _READ_BYTES)
        except BlockingIOError:
            return False
        *lines, each.partial = (each.partial + data).split(b"\n")
        if len(each.partial) > _LINE_BYTES:
            lines, each.partial = [*lines, each.partial], b""
        for line in lines:
            self.send(event="line", id=each.id, text=line.decode(errors="replace"))
        return bool(data)

    def _end(self, each: _Started) -> None:
        if each.partial:
            self.send(event="line", id=each.id, text=each.partial.decode(errors="replace"))
        os.close(each.output)
        del self.started[each.id]
        failure = read_failure(self.logs, each.job.rank, each.job.restart_count) if each.job.role == "worker" else None
        told = None if failure is None else asdict(failure)
        # clocks of two hosts have nothing in common but their pace
        age_s = 0.0 if failure is None else time.monotonic() - failure.at_monotonic_s
        self.send(event="ended", id=each.id, code=each.worker.code(), failure=told, age_s=age_s)

    def send(self, **message: Any) -> None:
        """One line to the launcher. Without it there is nobody to tell: the lifeline ends this process."""
        data = memoryview(json.dumps(message).encode() + b"\n")
        with contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(self.replies, data) :]

    def close(self) -> None:
        """Ends everything that runs here."""
        for each in self.started.values():
            each.worker.kill_group()
            os.close(each.output)
        for listener in self.listeners.values():
            listener.close()


def _listener(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        raise LaunchError(
            given=f"host {socket.gethostname()} cannot listen at {host}:{port} ({error.strerror})",
            rule="a job listens at a free port and at an address of the host itself",
            consequence="nothing was started",
            nearest="--port with another number, or without it any free one" if taken else "--interface",
        ) from error


def serve() -> None:
    """Obeys standard input until it closes."""
    # what a library prints must not end up among the replies
    replies = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    logs = Path(tempfile.mkdtemp(prefix="unisono-agent-"))
    with Reaper() as guard, selectors.DefaultSelector() as selector:
        agent = HostAgent(guard, logs, replies)
        agent.send(event="hello")
        selector.register(0, selectors.EVENT_READ)
        pending = b""
        try:
            while True:
                if selector.select(_POLL_S):
                    data = os.read(0, _READ_BYTES)
                    if not data:
                        return
                    *lines, pending = (pending + data).split(b"\n")
                    for line in lines:
                        agent.obey(json.loads(line))
                agent.look()
        finally:
            agent.close()
            shutil.rmtree(logs)


if __name__ == "__main__":
    serve()
