"""Assigns ranks and servers to hosts, in the order of the hosts file.

Pure functions, so ``--dry-run`` shows the same layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unisono.dist import JobSpec
from unisono.dist.jobspec import LOOPBACK, Role
from unisono.errors import LaunchError, Problem
from unisono.launch.hostfile import Host
from unisono.launch.membership import Membership
from unisono.launch.options import MAX_PROCESSES, LaunchOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSlot:
    """One process: a worker of rank ``index``, or server number ``index``, on ``hosts[host]``."""

    role: Role
    index: int
    host: int
    local_rank: int = 0
    local_world: int = 1

    @property
    def name(self) -> str:
        """``rank 3`` or ``server 0``, for messages."""
        return f"rank {self.index}" if self.role == "worker" else f"server {self.index}"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobLayout:
    """A requested job: its commands, hosts and process slots.

    A job with servers is asynchronous: each process is restarted alone. Without servers all ranks restart together.

    Attributes:
        command: Command of every worker.
        server_command: Command of every parameter server.
        hosts: Hosts of the job, in the order of the hosts file.
        slots: Process slots: workers in rank order, then servers; see ``assign_processes``.
        run_id: Name of the run, equal on all its processes.
        options: Threads, restarts, time-outs and TLS.
        environ: Variables that are set for every process.
        interface: Network interface of every host; None chooses one.
        port: Port where ranks meet; 0 takes any free port.
        elastic: Workers may leave without ending the job, and others may join it, while it has one.
        joins: The running job that these workers join; None starts a job.
        snapshots: Folder, on each server's host, for the state a restarted server resumes from; None writes none.
    """

    command: tuple[str, ...]
    server_command: tuple[str, ...]
    hosts: tuple[Host, ...]
    slots: tuple[ProcessSlot, ...]
    run_id: str
    options: LaunchOptions
    environ: Mapping[str, str]
    interface: str | None = None
    port: int = 0
    snapshots: str | None = None
    elastic: bool = False
    joins: Membership | None = None

    @property
    def workers(self) -> list[ProcessSlot]:
        """The worker slots, in rank order."""
        return [slot for slot in self.slots if slot.role == "worker"]

    @property
    def servers(self) -> list[ProcessSlot]:
        """The server slots, by index."""
        return [slot for slot in self.slots if slot.role == "server"]

    @property
    def plain(self) -> bool:
        """Whether all ranks are on this host and there are no servers, here or of a job to join: no agent is needed."""
        return self.joins is None and not self.servers and all(self.hosts[slot.host].here for slot in self.slots)

    @property
    def on_one_host(self) -> bool:
        """Whether all processes share one host, so traffic stays on the loopback interface."""
        return len({slot.host for slot in self.slots}) == 1

    def rendezvous_host(self, slot: ProcessSlot) -> str:
        """The name under which other processes reach the host of ``slot``."""
        return LOOPBACK if self.on_one_host else self.hosts[slot.host].name

    def argv(self, slot: ProcessSlot) -> list[str]:
        """The command of the process in ``slot``."""
        return list(self.command if slot.role == "worker" else self.server_command)

    def variables(self, slot: ProcessSlot) -> dict[str, str]:
        """Environment variables of the process in ``slot``, apart from those of its JobSpec."""
        snapshots = {"UNISONO_SNAPSHOTS": self.snapshots} if slot.role == "server" and self.snapshots else {}
        tls = {"UNISONO_TLS": self.options.tls} if self.options.tls else {}
        drain = {"UNISONO_DRAIN": "1"} if slot.role == "server" and self.elastic else {}
        secret = {"UNISONO_SECRET_FILE": self.joins.secret_file} if self.joins is not None else {}
        return {**snapshots, **drain, **self.environ, **tls, **secret}

    def job_spec(self, slot: ProcessSlot, *, restart_count: int, master: str, servers: Sequence[str]) -> JobSpec:
        """The JobSpec of the process in ``slot``; ``master`` and ``servers`` are ``host:port``."""
        host, _, port = master.rpartition(":")
        return JobSpec(
            run_id=self.run_id,
            restart_count=restart_count,
            rank=slot.index if slot.role == "worker" else 0,
            local_rank=slot.local_rank,
            world_size=len(self.workers) if self.joins is None else self.joins.world_size,
            local_world=slot.local_world,
            master_addr=host,
            master_port=int(port),
            source="unisono",
            role=slot.role,
            servers=len(servers),
            server_addresses=tuple(servers),
            server_index=slot.index if slot.role == "server" else None,
        )


def assign_processes(hosts: Sequence[Host], processes: int | None, servers: int) -> tuple[ProcessSlot, ...]:
    """Assign workers and servers to ``hosts``.

    Workers fill the slots of hosts in order; ``processes`` None means one worker per slot. The ``servers`` (a number) go
    round-robin over the hosts with role=server, or else those with workers. Raises LaunchError if there are fewer slots
    than ``processes``, or hosts with role=server and no servers.
    """
    _refuse_too_many(hosts, servers)
    for_workers = [number for number, host in enumerate(hosts) if host.role == "worker"]
    capacity = sum(hosts[number].slots for number in for_workers)
    count = processes or capacity
    if count > capacity:
        raise LaunchError(
            given=f"--processes {count} on {len(for_workers)} hosts with {capacity} slots in all",
            rule="each worker has a slot of its own",
            consequence="nothing was started",
            nearest=f"--processes {capacity}, or more slots in the hosts file",
        )
    slots: list[ProcessSlot] = []
    for number in for_workers:
        local_world = min(hosts[number].slots, count - len(slots))
        slots += [
            ProcessSlot(role="worker", index=len(slots) + local, host=number, local_rank=local, local_world=local_world)
            for local in range(local_world)
        ]
    for_servers = [number for number, host in enumerate(hosts) if host.role == "server"]
    if for_servers and not servers:
        raise LaunchError(
            given=f"hosts with role=server ({', '.join(hosts[number].name for number in for_servers)}) and no --servers",
            rule="--servers gives the number of servers",
            consequence="those hosts would do nothing, so nothing was started",
            nearest=f"--servers {len(for_servers)}",
        )
    homes = for_servers or sorted({slot.host for slot in slots})
    server_slots = [ProcessSlot(role="server", index=index, host=homes[index % len(homes)]) for index in range(servers)]
    return (*slots, *server_slots)


def _refuse_too_many(hosts: Sequence[Host], servers: int) -> None:
    counts = {f"{host.slots} processes on {host.name}": host.slots for host in hosts} | {f"{servers} servers": servers}
    problems = [
        Problem(
            given=given,
            rule=f"a host has at most {MAX_PROCESSES} processes of a job, and a job as many servers",
            consequence="nothing was started",
            nearest="one process for each accelerator or core",
        )
        for given, count in counts.items()
        if count > MAX_PROCESSES
    ]
    if problems:
        raise LaunchError(*problems)
