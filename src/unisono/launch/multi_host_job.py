"""A job on one or many hosts: an agent on each, the meeting point, the servers' ports, and processes in their places."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from unisono.dist.jobspec import LOOPBACK
from unisono.errors import CommError, LaunchError
from unisono.launch.host_agent_client import HostAgentClient, RemoteWorker
from unisono.launch.options import options_message
from unisono.launch.process_layout import JobLayout, ProcessSlot
from unisono.launch.secret import new_secret

_STORE = "store"


class MultiHostJob:
    """A context manager: while it is entered there is an agent on every host that has a seat, and at the end none.

    ``facts`` says what was found out about each host, for the record.
    """

    def __init__(self, job: JobLayout, logs: Path, say: Callable[[str], None]) -> None:
        self.job = job
        self.facts: dict[str, Any] = {}
        self._logs = logs
        self._say = say
        self._links: dict[int, HostAgentClient] = {}
        # servers prove to workers who they are, and workers to servers
        self._secret = new_secret() if job.servers else None
        self._addresses: list[str] = []
        self._opened = False

    def __enter__(self) -> MultiHostJob:
        try:
            for number in sorted({seat.host for seat in self.job.seats}):
                self._open(number)
            self._addresses = [self._listen(seat, f"server-{seat.index}", 0) for seat in self.job.servers]
        except BaseException:
            self._close()
            raise
        self._opened = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def start_all(self, epoch: int, restarted: bool) -> list[RemoteWorker]:
        """All workers, told to meet at a port that rank 0's host already holds.

        Raises LaunchError when one cannot be started, CommError when a host that was lost does not come back; then none runs.
        """
        for number, link in list(self._links.items()):
            if link.lost is not None:
                self._open(number)
        seats = self.job.workers
        master = self._listen(seats[0], _STORE, self.job.port) if len(seats) > 1 else f"{LOOPBACK}:0"
        started: list[RemoteWorker] = []
        try:
            for seat in seats:
                started.append(self._start(seat, epoch, restarted, master))
        except LaunchError:
            for worker in started:
                worker.kill_group()
            raise
        return started

    def start_one(self, seat: ProcessSlot, epoch: int, restarted: bool) -> RemoteWorker:
        """One process of an asynchronous job. A server finds the port it had; workers meet nobody but servers.

        Raises as ``start_all``.
        """
        if self._links[seat.host].lost is not None:
            self._open(seat.host)
            for server in self.job.servers:
                if server.host == seat.host:
                    port = int(self._addresses[server.index].rpartition(":")[2])
                    self._listen(server, f"server-{server.index}", port)
        return self._start(seat, epoch, restarted, f"{LOOPBACK}:0")

    def _start(self, seat: ProcessSlot, epoch: int, restarted: bool, master: str) -> RemoteWorker:
        place = self.job.place(seat, epoch=epoch, master=master, servers=self._addresses)
        serves = seat.role == "server"
        hosts_store = seat.role == "worker" and seat.index == 0 and place.master_port != 0
        kind = "server" if serves else "rank"
        worker, answer = self._links[seat.host].start(
            {
                "command": self.job.argv(seat),
                "place": asdict(place),
                "listen": f"server-{seat.index}" if serves else _STORE if hosts_store else None,
                "keep": serves,
                "interface": self.job.interface,
                "towards": self.job.meeting_host(self.job.seats[0]),
                "restarted": restarted,
                "environ": self.job.variables(seat),
            },
            name=seat.name,
            log=self._logs / f"{kind}-{seat.index}.attempt-{epoch}.log",
        )
        self.facts[self.job.hosts[seat.host].name] |= {
            "interface": answer["interface"],
            "interface_why": answer["why"],
        }
        return worker

    def _open(self, number: int) -> None:
        host = self.job.hosts[number]
        if number in self._links:
            self._links[number].cut()
        link = self._links[number] = HostAgentClient(host, self._logs, sys.stdout, self._say)
        processes = sum(seat.host == number and seat.role == "worker" for seat in self.job.seats)
        options = options_message(replace(self.job.options, num_processes=max(1, processes)))
        try:
            share = link.open(self.job.environ, options, self._secret)
        except LaunchError as error:
            if not self._opened:
                raise
            # it was there before: nothing a user must change in this command
            raise CommError(*error.problems) from error
        self.facts[host.name] = {"share": share}

    def _listen(self, seat: ProcessSlot, key: str, port: int) -> str:
        answer = self._links[seat.host].listen(key, self.job.meeting_host(seat), self.job.interface, port)
        names = [self.job.hosts[each.host].name for each in self.job.seats]
        if answer["loopback"] and not self.job.on_one_host and not all(map(_is_loopback, names)):
            raise LaunchError(
                given=f"on host {self.job.hosts[seat.host].name} its own name means {answer['address']}, a loopback address",
                rule="the other hosts of a job reach it under that name",
                consequence="they would look for it on themselves, so nothing was started",
                nearest="--interface, or the address of that host in the hosts file",
            )
        return answer["address"]

    def _close(self) -> None:
        for link in self._links.values():
            link.cut()


def _is_loopback(name: str) -> bool:
    return name == "localhost" or name.startswith("127.")
