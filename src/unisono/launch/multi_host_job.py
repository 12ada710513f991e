"""The running processes of a job on one or many hosts: an agent on each host, the rendezvous port, the servers' ports."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from unisono.dist.jobspec import LOOPBACK
from unisono.dist.secret import new_secret
from unisono.errors import CommError, LaunchError
from unisono.launch.host_agent_client import HostAgentClient, RemoteWorker
from unisono.launch.options import options_message
from unisono.launch.process_layout import JobLayout, ProcessSlot

_STORE = "store"


class MultiHostJob:
    """A context manager that holds an agent on every host with a process slot, and ends them on exit.

    ``facts`` collects what each agent reports about its host, for the record. ``addresses`` are those of the servers, ``secret``
    is the job's (None for workers that join one, who read its file). ``say`` prints a message to people.
    """

    def __init__(self, job: JobLayout, logs: Path, say: Callable[[str], None]) -> None:
        self.job = job
        self.facts: dict[str, Any] = {}
        self._logs = logs
        self._say = say
        self._agents: dict[int, HostAgentClient] = {}
        # all processes of the job authenticate each other with it
        self.secret = new_secret() if job.joins is None else None
        self.addresses = [] if job.joins is None else list(job.joins.server_addresses)
        self._opened = False

    def __enter__(self) -> MultiHostJob:
        try:
            for number in sorted({slot.host for slot in self.job.slots}):
                self._open(number)
            if self.job.servers:
                self.addresses = [self._listen(slot, f"server-{slot.index}", 0) for slot in self.job.servers]
        except BaseException:
            self._close()
            raise
        self._opened = True
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    def start_all(self, attempt: int, restarted: bool) -> list[RemoteWorker]:
        """Start all workers; they meet at a port that rank 0's host already holds.

        Raises LaunchError if one cannot be started, CommError if a lost host does not come back; then none is running.
        """
        for number, agent in list(self._agents.items()):
            if agent.lost is not None:
                self._open(number)
        slots = self.job.workers
        master = self._listen(slots[0], _STORE, self.job.port) if len(slots) > 1 else f"{LOOPBACK}:0"
        workers: list[RemoteWorker] = []
        try:
            for slot in slots:
                workers.append(self._start(slot, attempt, restarted, master))
        except LaunchError:
            for worker in workers:
                worker.kill_group()
            raise
        return workers

    def start_one(self, slot: ProcessSlot, attempt: int, restarted: bool) -> RemoteWorker:
        """Start one process of an asynchronous job; a restarted server gets the port it had. Raises as ``start_all``."""
        if self._agents[slot.host].lost is not None:
            self._open(slot.host)
            for server in self.job.servers:
                if server.host == slot.host:
                    port = int(self.addresses[server.index].rpartition(":")[2])
                    self._listen(server, f"server-{server.index}", port)
        return self._start(slot, attempt, restarted, f"{LOOPBACK}:0")

    def _start(self, slot: ProcessSlot, attempt: int, restarted: bool, master: str) -> RemoteWorker:
        spec = self.job.job_spec(slot, restart_count=attempt, master=master, servers=self.addresses)
        is_server = slot.role == "server"
        hosts_store = slot.role == "worker" and slot.index == 0 and spec.master_port != 0
        kind = "server" if is_server else "rank"
        worker, answer = self._agents[slot.host].start(
            {
                "command": self.job.argv(slot),
                "place": asdict(spec),
                "listen": f"server-{slot.index}" if is_server else _STORE if hosts_store else None,
                "keep": is_server,
                "interface": self.job.interface,
                "towards": self.job.rendezvous_host(self.job.slots[0]),
                "restarted": restarted,
                "environ": self.job.variables(slot),
            },
            name=slot.name,
            log=self._logs / f"{kind}-{slot.index}.attempt-{attempt}.log",
        )
        self.facts[self.job.hosts[slot.host].name] |= {
            "interface": answer["interface"],
            "interface_why": answer["why"],
        }
        return worker

    def _open(self, number: int) -> None:
        """Start the agent of a host, after closing the one it had."""
        host = self.job.hosts[number]
        if number in self._agents:
            self._agents[number].cut()
        agent = self._agents[number] = HostAgentClient(host, self._logs, sys.stdout, self._say)
        processes = sum(slot.host == number and slot.role == "worker" for slot in self.job.slots)
        options = options_message(replace(self.job.options, num_processes=max(1, processes)))
        try:
            share = agent.open(self.job.environ, options, self.secret)
        except LaunchError as error:
            if not self._opened:
                raise
            # the host was reachable before: not a mistake in the user's command
            raise CommError(*error.problems) from error
        self.facts[host.name] = {"share": share}

    def _listen(self, slot: ProcessSlot, key: str, port: int) -> str:
        """Open a listening socket on the host of ``slot``, under ``key``; returns its ``host:port``."""
        answer = self._agents[slot.host].listen(key, self.job.rendezvous_host(slot), self.job.interface, port)
        names = [self.job.hosts[other.host].name for other in self.job.slots]
        if answer["loopback"] and not self.job.on_one_host and not all(map(_is_loopback, names)):
            raise LaunchError(
                given=f"on host {self.job.hosts[slot.host].name} its own name means {answer['address']}, a loopback address",
                rule="the other hosts of a job reach it under that name",
                consequence="they would look for it on themselves, so nothing was started",
                nearest="--interface, or the address of that host in the hosts file",
            )
        return answer["address"]

    def _close(self) -> None:
        for agent in self._agents.values():
            agent.cut()


def _is_loopback(name: str) -> bool:
    return name == "localhost" or name.startswith("127.")
