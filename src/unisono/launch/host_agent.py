"""The launcher's agent on one host, ``python -m unisono.launch.host_agent``: starts processes and reports their
output and end.

It reads JSON lines from standard input and writes JSON lines to standard output:

                                                                               {"event": "hello"}, first
    {"do": "job", "options": …, "secret": hex or null}                         {"event": "ready", "share": …}
    {"do": "listen", "key", "host", "interface", "port"}                       {"event": "listening", "address", "why"}
    {"do": "start", "id", "command", "place", "listen", "towards", …}          {"event": "started", "id", "pid"}
    {"do": "signal", "id", "number"}, {"do": "kill", "id"}                     {"event": "line", "id", "text"}
                                                                               {"event": "ended", "id", "code", "failure"}

and {"event": "refused", "problem": …} for a request that cannot be met. When standard input closes, because the
launcher or its connection died, every process started here gets SIGKILL. The agent holds a listening socket from its
``listen`` on, so a restarted server gets the same port and no other process can take it.
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
from unisono.dist.address import refuse_every_interface
from unisono.dist.failure import TRACEBACKS
from unisono.errors import ConfigError, LaunchError
from unisono.launch.network_interface import choose_interface, interface_by_name
from unisono.launch.options import options_of_message
from unisono.launch.resources import ResourceShare, divide_host
from unisono.launch.workers import Reaper, Worker, WorkerSpec, start_worker

_POLL_S = 0.05
_READ_BYTES = 65536
# a longer line is forwarded in parts
_LINE_BYTES = 65536


@dataclass(slots=True)
class _RunningProcess:
    """A process of this agent; ``output`` is the read end of its output pipe, ``partial`` an unfinished line."""

    id: int
    worker: Worker
    job: JobSpec
    output: int
    partial: bytes = b""


@dataclass(slots=True)
class HostAgent:
    """The state of the agent. ``replies`` is the file descriptor that leads to the launcher."""

    reaper: Reaper
    logs: Path
    replies: int
    share: ResourceShare | None = None
    secret: bytes | None = None
    listeners: dict[str, socket.socket] = field(default_factory=dict[str, socket.socket])
    running: dict[int, _RunningProcess] = field(default_factory=dict[int, _RunningProcess])

    def handle(self, message: dict[str, Any]) -> None:
        """Carry out one request of the launcher."""
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
                    if message["id"] in self.running:
                        self.running[message["id"]].worker.end_by(signal.Signals(message["number"]))
                case "kill":
                    if message["id"] in self.running:
                        self.running[message["id"]].worker.kill_group()
                case other:
                    raise ValueError(f"the launcher asks this agent to {other!r}, which it does not know")
        except (ConfigError, LaunchError) as error:
            self.send(event="refused", problem=asdict(error.problems[0]))

    def _listen(self, key: str, host: str, interface: str | None, port: int) -> None:
        chosen = interface_by_name(interface) if interface else None
        address = chosen.address if chosen else host
        if key in self.listeners:
            self.listeners.pop(key).close()
        self.listeners[key] = listener = _listener(address, port)
        bound_host = str(listener.getsockname()[0])
        self.send(
            event="listening",
            # on this host the name may resolve to a loopback address, which other hosts would take for their own
            loopback=bound_host.startswith("127.") or bound_host == "::1",
            address=f"{address}:{listener.getsockname()[1]}",
            why=chosen.why if chosen else "the name in the hosts file",
        )

    def _start(self, message: dict[str, Any]) -> None:
        assert self.share is not None
        key: str | None = message["listen"]
        place: dict[str, Any] = message["place"]
        place["server_addresses"] = tuple(place["server_addresses"])
        if key is not None:
            place["listen_fd"] = self.listeners[key].fileno()
        interface = choose_interface(message["interface"], message["towards"])
        spec = WorkerSpec(
            command=message["command"],
            job=JobSpec(**place),
            share=self.share,
            logs=self.logs,
            # every rank's output reaches one terminal, where the launcher shows one traceback
            environ={**interface.environ(), **message["environ"], TRACEBACKS: "record"},
            restarted=message["restarted"],
            secret=self.secret,
        )
        reader, writer = os.pipe()
        try:
            worker = start_worker(spec, self.reaper, output=writer)
        except LaunchError:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        os.set_blocking(reader, False)
        self.running[message["id"]] = _RunningProcess(message["id"], worker, spec.job, reader)
        self.send(event="started", id=message["id"], pid=worker.pid, interface=interface.name, why=interface.why)
        if key is not None and not message["keep"]:
            # rank 0 has it; when it ends, the port is free
            self.listeners.pop(key).close()

    def poll(self) -> None:
        """Pass on the output of all processes, and report those that have ended."""
        for process in list(self.running.values()):
            ended = process.worker.code() is not None
            if ended:
                # its children would hold its output open
                process.worker.kill_group()
            while self._read(process):
                pass
            if ended:
                self._report_end(process)

    def _read(self, process: _RunningProcess) -> bool:
        """Read once and pass on the lines; returns whether there may be more."""
        try:
            data = os.read(process.output, _READ_BYTES)
        except BlockingIOError:
            return False
        *lines, process.partial = (process.partial + data).split(b"\n")
        if len(process.partial) > _LINE_BYTES:
            lines, process.partial = [*lines, process.partial], b""
        for line in lines:
            self.send(event="line", id=process.id, text=line.decode(errors="replace"))
        return bool(data)

    def _report_end(self, process: _RunningProcess) -> None:
        if process.partial:
            self.send(event="line", id=process.id, text=process.partial.decode(errors="replace"))
        os.close(process.output)
        del self.running[process.id]
        job = process.job
        failure = read_failure(self.logs, job.rank, job.restart_count) if job.role == "worker" else None
        # monotonic clocks of two hosts are unrelated, so the age is sent
        age_s = 0.0 if failure is None else time.monotonic() - failure.at_monotonic_s
        record = None if failure is None else failure.to_json()
        self.send(event="ended", id=process.id, code=process.worker.code(), failure=record, age_s=age_s)

    def send(self, **message: Any) -> None:
        """Send one line to the launcher. If it is gone, standard input has closed too, which ends this process."""
        data = memoryview(json.dumps(message).encode() + b"\n")
        with contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(self.replies, data) :]

    def close(self) -> None:
        """Kill all processes of this agent and close its sockets."""
        for process in self.running.values():
            process.worker.kill_group()
            os.close(process.output)
        for listener in self.listeners.values():
            listener.close()


def _listener(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        refuse_every_interface(str(address[0]), f"the host {host!r}")
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
    """Handle requests from standard input until it closes."""
    # output that a library prints must not mix with the replies
    replies = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    logs = Path(tempfile.mkdtemp(prefix="unisono-agent-"))
    with Reaper() as reaper, selectors.DefaultSelector() as selector:
        agent = HostAgent(reaper, logs, replies)
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
                        agent.handle(json.loads(line))
                agent.poll()
        finally:
            agent.close()
            shutil.rmtree(logs)


if __name__ == "__main__":
    serve()
