"""Who sits where: the ranks and servers of a job, dealt to hosts in the order of the hosts file. A pure function, so that
``--dry-run`` shows what a launch would do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unisono.dist import JobSpec
from unisono.dist.jobspec import LOOPBACK, Role
from unisono.errors import LaunchError
from unisono.launch.hostfile import Host
from unisono.launch.options import LaunchOptions


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
        """As people call it."""
        return f"rank {self.index}" if self.role == "worker" else f"server {self.index}"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobLayout:
    """A job as it was asked for. ``port`` 0 is any free one; ``environ`` is set for every process. ``snapshots`` is where servers
    keep their state for when they are restarted, on their own hosts; None keeps none.

    With servers the job is asynchronous: each process lives and is restarted alone. Without, all ranks restart together.
    """

    command: tuple[str, ...]
    server_command: tuple[str, ...]
    hosts: tuple[Host, ...]
    seats: tuple[ProcessSlot, ...]
    run_id: str
    options: LaunchOptions
    environ: Mapping[str, str]
    interface: str | None = None
    port: int = 0
    snapshots: str | None = None

    @property
    def workers(self) -> list[ProcessSlot]:
        """By rank."""
        return [seat for seat in self.seats if seat.role == "worker"]

    @property
    def servers(self) -> list[ProcessSlot]:
        """By index."""
        return [seat for seat in self.seats if seat.role == "server"]

    @property
    def plain(self) -> bool:
        """All ranks are on this host and there are no servers: no agent is needed."""
        return not self.servers and all(self.hosts[seat.host].here for seat in self.seats)

    @property
    def on_one_host(self) -> bool:
        """Nothing of the job needs to leave the loopback interface."""
        return len({seat.host for seat in self.seats}) == 1

    def meeting_host(self, seat: ProcessSlot) -> str:
        """The name under which others reach the host of ``seat``."""
        return LOOPBACK if self.on_one_host else self.hosts[seat.host].name

    def argv(self, seat: ProcessSlot) -> list[str]:
        """What is run there."""
        return list(self.command if seat.role == "worker" else self.server_command)

    def variables(self, seat: ProcessSlot) -> dict[str, str]:
        """What is set there beside its place."""
        kept = {"UNISONO_SNAPSHOTS": self.snapshots} if seat.role == "server" and self.snapshots else {}
        tls = {"UNISONO_TLS": self.options.tls} if self.options.tls else {}
        return {**kept, **self.environ, **tls}

    def place(self, seat: ProcessSlot, *, epoch: int, master: str, servers: Sequence[str]) -> JobSpec:
        """The place of ``seat`` in attempt ``epoch``; ``master`` and ``servers`` are ``host:port``."""
        host, _, port = master.rpartition(":")
        return JobSpec(
            run_id=self.run_id,
            restart_count=epoch,
            rank=seat.index if seat.role == "worker" else 0,
            local_rank=seat.local_rank,
            world_size=len(self.workers),
            local_world=seat.local_world,
            master_addr=host,
            master_port=int(port),
            source="unisono",
            role=seat.role,
            servers=len(servers),
            server_addresses=tuple(servers),
            server_index=seat.index if seat.role == "server" else None,
        )


def assign_processes(hosts: Sequence[Host], processes: int | None, servers: int) -> tuple[ProcessSlot, ...]:
    """Workers fill the slots of hosts in order; servers go round the hosts with role=server, or else those with workers.

    Raises LaunchError when there are fewer slots than ``processes`` (None: as many as slots).
    """
    for_workers = [number for number, host in enumerate(hosts) if host.role == "worker"]
    slots = sum(hosts[number].slots for number in for_workers)
    count = processes or slots
    if count > slots:
        raise LaunchError(
            given=f"--processes {count} on {len(for_workers)} hosts with {slots} slots in all",
            rule="each worker has a slot of its own",
            consequence="nothing was started",
            nearest=f"--processes {slots}, or more slots in the hosts file",
        )
    seats: list[ProcessSlot] = []
    for number in for_workers:
        local_world = min(hosts[number].slots, count - len(seats))
        seats += [
            ProcessSlot(role="worker", index=len(seats) + local, host=number, local_rank=local, local_world=local_world)
            for local in range(local_world)
        ]
    for_servers = [number for number, host in enumerate(hosts) if host.role == "server"]
    if for_servers and not servers:
        raise LaunchError(
            given=f"hosts with role=server ({', '.join(hosts[number].name for number in for_servers)}) and no --servers",
            rule="the number of servers is said with --servers",
            consequence="those hosts would do nothing, so nothing was started",
            nearest=f"--servers {len(for_servers)}",
        )
    homes = for_servers or sorted({seat.host for seat in seats})
    dealt = [ProcessSlot(role="server", index=index, host=homes[index % len(homes)]) for index in range(servers)]
    return (*seats, *dealt)
