"""The launcher's connection to the agent of one host: over ssh, or to a process of this host.

ssh gets a fixed argument vector: the host's name after ``--``, and a shell that reads its script from standard input.
So neither variables nor the job's secret show in ``ps`` or can be taken for an option. Host keys are checked as the
user's ssh is configured; a password prompt is an error (BatchMode). If the connection ends, the host counts as lost,
with all its processes.

Output of a host is shown here as plain text, its control characters as ``\\x1b``; its log keeps every byte.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, TextIO

from unisono.dist import Failure
from unisono.dist.interpreter import module_command
from unisono.errors import LaunchError, Problem
from unisono.launch.forwarded_env import require_names
from unisono.launch.hostfile import Host
from unisono.launch.workers import WorkerProcess, open_log
from unisono.sanitize import printable
from unisono.storage.files import PRIVATE_MODE, write_atomically
from unisono.storage.limits import decode_json

# the longest wait for an answer; starting Python on the host takes seconds
_ANSWER_S = 60.0
_END_S = 10.0
_READ_BYTES = 2**20
# the longest message of an agent, which forwards output in parts of 64 KiB; the traceback of a failure is in one message
_LINE_BYTES = 2**24
_HELLO = b'{"event": "hello"}'
LOST = 255
_AGENT = "unisono.launch.host_agent"


def agent_command(host: Host) -> list[str]:
    """The command, run here, that starts an agent on ``host``."""
    if host.here:
        return module_command(_AGENT)
    settings = ("BatchMode=yes", "ConnectTimeout=20", "ServerAliveInterval=5", "ServerAliveCountMax=3")
    flags = [part for setting in settings for part in ("-o", setting)]
    port = [] if host.port is None else ["-p", str(host.port)]
    return ["ssh", "-T", *flags, *port, "--", host.name, shlex.join(["exec", "/bin/sh", "-s"])]


def agent_script(environ: Mapping[str, str]) -> str:
    """The script for the remote shell: change to the launcher's folder, set variables, become the agent. Raises LaunchError."""
    exports = [f"export {name}={shlex.quote(environ[name])}" for name in require_names(environ)]
    command = shlex.join(module_command(_AGENT))
    return "\n".join([f"cd {shlex.quote(os.getcwd())} || exit", *exports, f"exec {command}", ""])


@dataclass(kw_only=True, slots=True)
class RemoteWorker(WorkerProcess):
    """Process ``number`` of an agent. Its output goes to ``log`` and, prefixed with its name, to this terminal."""

    agent: HostAgentClient
    number: int
    ended: int | None = None

    def code(self) -> int | None:
        self.agent.pump()
        if self.ended is None and self.agent.lost:
            self.ended = LOST
        return self.ended

    def end_by(self, number: signal.Signals) -> None:
        if self.code() is None:
            self.killed_by_us = True
            self.agent.send(do="signal", id=self.number, number=int(number))

    def kill_group(self) -> None:
        if self.code() is None:
            self.killed_by_us = True
            self.agent.send(do="kill", id=self.number)
            self.agent.pump_until(lambda: self.code() is not None, _END_S)
            if self.ended is None:
                # the agent does not answer; cutting the connection makes it kill the process
                self.agent.cut()
                self.ended = LOST


class HostAgentClient:
    """One agent. ``failures`` is the folder for failure records of its ranks; ``say`` prints a message to people."""

    def __init__(self, host: Host, failures: Path, terminal: TextIO, say: Callable[[str], None]) -> None:
        self.host = host
        self.lost: str | None = None
        self._failures = failures
        self._terminal = terminal
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._selector = selectors.DefaultSelector()
        self._pending = b""
        self._complaint = b""
        self._answers: list[dict[str, Any]] = []
        self._workers: dict[int, RemoteWorker] = {}
        self._logs: dict[int, IO[bytes]] = {}
        self._greeted = False

    def open(self, environ: Mapping[str, str], options: Mapping[str, Any], secret: bytes | None) -> dict[str, Any]:
        """Start the agent and send it the job; returns the host's ResourceShare. Raises LaunchError if it does not answer."""
        command = agent_command(self.host)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # errors of ssh and the remote shell are another host's text too
                stderr=None if self.host.here else subprocess.PIPE,
                env={**os.environ, **environ} if self.host.here else None,
                # a Ctrl-C in the terminal reaches the launcher alone
                start_new_session=True,
            )
        except OSError as error:
            raise self._unreachable(f"{command[0]} cannot be started: {error.strerror}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        if self._process.stderr is not None:
            os.set_blocking(self._process.stderr.fileno(), False)
            self._selector.register(self._process.stderr, selectors.EVENT_READ)
        if not self.host.here:
            self._write(agent_script(environ).encode())
        # some shells read ahead: nothing follows the script before the agent itself has spoken
        self._answer("hello")
        self.send(do="job", options=dict(options), secret=None if secret is None else secret.hex())
        return self._answer("ready")["share"]

    def listen(self, key: str, host: str, interface: str | None, port: int) -> dict[str, Any]:
        """Open a listening socket on the host, kept under ``key``; returns the agent's answer. Raises LaunchError."""
        self.send(do="listen", key=key, host=host, interface=interface, port=port)
        return self._answer("listening")

    def start(self, worker: dict[str, Any], *, name: str, log: Path) -> tuple[RemoteWorker, dict[str, Any]]:
        """Start one process; ``worker`` has the fields of the agent's ``start`` request. Raises LaunchError."""
        number = len(self._logs)
        self._logs[number] = open_log(log)
        place = worker["place"]
        rank = place["rank"] if place["role"] == "worker" else place["server_index"]
        here = self.host.here
        full = name if here else f"{name} {self.host.name}"
        # its first output may arrive together with the answer, which brings the pid
        started = RemoteWorker(rank=rank, name=full, pid=0, log=log, here=here, agent=self, number=number)
        self._workers[number] = started
        self.send(do="start", id=number, **worker)
        try:
            answer = self._answer("started")
        except LaunchError:
            del self._workers[number]
            raise
        started.pid = answer["pid"]
        return started, answer

    def send(self, **message: Any) -> None:
        """Send one request; ignored if the agent is lost, which its workers then report."""
        self._write(json.dumps(message).encode() + b"\n")

    def pump(self, wait_s: float = 0.0) -> None:
        """Handle output and messages that have arrived, waiting up to ``wait_s`` seconds for the first."""
        if self.lost is not None:
            return
        ready = {key.fileobj for key, _ in self._selector.select(wait_s)}
        assert self._process is not None
        if self._process.stderr in ready:
            self._read_stderr()
        if self._process.stdout not in ready:
            return
        data = os.read(self._process.stdout.fileno(), _READ_BYTES)
        if not data:
            self._mark_lost()
            return
        *lines, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > _LINE_BYTES:
            self._pending = b""
            self._process.kill()
            self._mark_lost(f"it sent a line of more than {_LINE_BYTES >> 20} MiB")
            return
        for line in lines:
            if not self._greeted and line != _HELLO:
                # output of the remote login shell comes before the agent's first line
                self._say(f"{self.host.name}: {_terminal_text(line.decode(errors='replace'))}")
                continue
            self._greeted = True
            try:
                message = decode_json(line)
            except ValueError as error:
                self._process.kill()
                self._mark_lost(f"it sent a line that is no JSON ({error})")
                return
            self._dispatch(message)

    def pump_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Pump until ``condition`` holds; whether it held within ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            self.pump(0.05)
        return True

    def cut(self) -> None:
        """Close the connection, which ends the agent and all its processes."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._read_stderr()
        self.lost = self.lost or "the launcher has cut the line"
        self._selector.close()
        self._process.stdout.close()
        if self._process.stderr is not None:
            self._process.stderr.close()
        for log in self._logs.values():
            log.close()
        self._process = None

    def _write(self, data: bytes) -> None:
        if self.lost is not None or self._process is None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def _mark_lost(self, reason: str = "") -> None:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._read_stderr()
        command: str = self._process.args[0]  # pyright: ignore
        self.lost = reason or f"{command} ended with exit code {self._process.returncode}"
        if self._workers and any(worker.ended is None for worker in self._workers.values()):
            self._say(f"host {self.host.name} is lost, with all that ran there: {self.lost}")

    def _read_stderr(self) -> None:
        """Show the lines that have arrived on standard error. Its end is ignored; that of standard output counts."""
        assert self._process is not None
        if self._process.stderr is None or self._process.stderr.fileno() not in self._selector.get_map():
            return
        with contextlib.suppress(BlockingIOError):
            ended = False
            while not ended:
                data = os.read(self._process.stderr.fileno(), _READ_BYTES)
                ended = not data
                *lines, self._complaint = (self._complaint + (data or b"\n")).split(b"\n")
                if len(self._complaint) > _READ_BYTES:  # shown in parts
                    lines, self._complaint = [*lines, self._complaint], b""
                for line in filter(None, lines):
                    self._say(f"{self.host.name}: {_terminal_text(line.decode(errors='replace'))}")
            self._selector.unregister(self._process.stderr)

    def _answer(self, event: str) -> dict[str, Any]:
        if not self.pump_until(lambda: bool(self._answers) or self.lost is not None, _ANSWER_S):
            raise self._unreachable(f"no answer within {_ANSWER_S:g} s")
        if not self._answers:
            raise self._unreachable(str(self.lost))
        answer = self._answers.pop(0)
        if answer["event"] == "refused":
            problem = {name: printable(text) for name, text in answer["problem"].items()}
            raise LaunchError(Problem(**problem | {"given": f"{self.host.name}: {problem['given']}"}))
        assert answer["event"] == event, f"{answer['event']} in place of {event}"
        return answer

    def _dispatch(self, message: dict[str, Any]) -> None:
        match message["event"]:
            case "line":
                self._print(message["id"], message["text"])
            case "ended":
                worker = self._workers[message["id"]]
                if message["failure"] is not None:
                    # the rank becomes part of a file name, so it is this side's own number
                    record: dict[str, Any] = {**message["failure"], "rank": worker.rank}
                    failure = Failure.from_json(record)
                    self._save_failure(failure, message["age_s"])
                    self._logs[message["id"]].write(failure.traceback.encode())
                    self._logs[message["id"]].flush()
                worker.ended = message["code"]
            case _:
                self._answers.append(message)

    def _print(self, number: int, text: str) -> None:
        self._logs[number].write(f"{text}\n".encode())
        self._logs[number].flush()
        print(f"[{self._workers[number].name}] {_terminal_text(text)}", file=self._terminal, flush=True)

    def _save_failure(self, failure: Failure, age_s: float) -> None:
        record = replace(failure, at_monotonic_s=time.monotonic() - age_s).to_json()
        write_atomically(
            self._failures / f"failure-rank-{failure.rank}.json", json.dumps(record).encode(), mode=PRIVATE_MODE
        )

    def _unreachable(self, reason: str) -> LaunchError:
        self.cut()
        over = "" if self.host.here else " over ssh"
        version = shlex.join(module_command("unisono", "--version"))
        by_hand = module_command(_AGENT) if self.host.here else [*agent_command(self.host)[:-1], version]
        return LaunchError(
            given=f"{self.host.name} has no agent of this launch{over}: {reason}",
            rule="every host lets this user log in without a prompt, and has this folder, Python and unisono at the same paths",
            consequence="nothing is running",
            nearest=f"try by hand: {shlex.join(by_hand)}",
        )


def _terminal_text(line: str) -> str:
    """The final text of ``line`` on a terminal: the part after the last carriage return, control characters as text."""
    return printable(line.rstrip("\r").rpartition("\r")[2])
