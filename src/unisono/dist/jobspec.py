"""``JobSpec``: the place of this process in its job, read from the environment. No torch.

There are two kinds of sources. A *launcher* started exactly this process and numbers it: our own (``UNISONO_*``),
torchrun (``RANK``, ``WORLD_SIZE`` …) and MXNet's tracker (``DMLC_*``). An *allocation* describes the tasks in which a
launcher may run: SLURM and Open MPI. The launcher's numbers win; the allocation's are used only without a launcher.
Two launchers must agree on rank and world size. A launcher inside an allocation of N tasks must give a world size
that is a multiple of N: ``srun -N2 --ntasks-per-node=1 torchrun …`` is fine; a forgotten ``WORLD_SIZE=1`` in a task
of four is not, because four runs would write into one folder. Contradictions and incomplete groups of variables are
errors.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from unisono.errors import LaunchError, Problem

Source = Literal["single", "unisono", "torchrun", "slurm", "openmpi", "dmlc"]
Role = Literal["worker", "server", "scheduler"]

ROLES: tuple[Role, ...] = ("worker", "server", "scheduler")
LOOPBACK = "127.0.0.1"

# our variable -> field of JobSpec; all of them are always set
_ALWAYS = {
    "UNISONO_RUN_ID": "run_id",
    "UNISONO_RESTART_COUNT": "restart_count",
    "UNISONO_RANK": "rank",
    "UNISONO_LOCAL_RANK": "local_rank",
    "UNISONO_WORLD": "world_size",
    "UNISONO_LOCAL_WORLD": "local_world",
    "UNISONO_MASTER_ADDR": "master_addr",
    "UNISONO_MASTER_PORT": "master_port",
}
_SOMETIMES = {"UNISONO_ROLE", "UNISONO_LISTEN_FD", "UNISONO_SERVERS", "UNISONO_SERVER_ADDRESSES", "UNISONO_SERVER"}
OWN_VARIABLES = frozenset({*_ALWAYS, *_SOMETIMES})
# torch's env:// variable -> field
TORCH_VARIABLES = {
    "RANK": "rank",
    "LOCAL_RANK": "local_rank",
    "WORLD_SIZE": "world_size",
    "LOCAL_WORLD_SIZE": "local_world",
    "MASTER_ADDR": "master_addr",
    "MASTER_PORT": "master_port",
}

_NOT_STARTED = "this process does not know its place in the job and was not started"

# srun numbers its steps from 0; batch and interactive shells have no step id or one from here on, and count as one process
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """The place of one process in its job.

    - ``run_id``: the name of the run, equal on all its processes.
    - ``restart_count``: the attempt, from 0. It is part of every key in the store, so a restarted group reads no old keys.
    - ``rank``, ``world_size``: among the workers. A worker that joins servers later has a rank >= ``world_size``.
    - ``local_rank``, ``local_world``: among the workers of this host.
    - ``master_addr``, ``master_port``: where rank 0 serves the store; port 0 if the workers do not meet.
    - ``source``: the launcher or allocation these numbers come from.
    - ``listen_fd``: a listening socket inherited from the launcher (rank 0 and servers), so the port is never free.
    - ``shared_store``: a store already listens at the master address: MXNet's scheduler serves the job's there; torchrun's own
      only says at which other port rank 0 serves.
    - ``role``: worker or server; scheduler is DMLC's process that keeps the store (``dist.dmlc``).
    - ``servers``: the number of parameter servers. ``server_addresses``: their ``host:port`` by index; empty if unknown.
    - ``server_index``: the index of this server; None for other roles or if its launcher numbers no servers.
    - ``interface``: the network interface that the launcher set for this process.
    """

    run_id: str = "single"
    restart_count: int = 0
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world: int = 1
    master_addr: str = LOOPBACK
    master_port: int = 0
    source: Source = "single"
    listen_fd: int | None = None
    shared_store: bool = False
    role: Role = "worker"
    servers: int = 0
    server_addresses: tuple[str, ...] = ()
    server_index: int | None = None
    interface: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether all ranks share this host, so traffic stays on the loopback interface."""
        return self.local_world == self.world_size

    def environ(self) -> dict[str, str]:
        """The variables our launcher sets for this process; for a worker also torch's ``env://`` names."""
        own = {"UNISONO_ROLE": str(self.role)} | self._values(_ALWAYS)
        if self.listen_fd is not None:
            own["UNISONO_LISTEN_FD"] = str(self.listen_fd)
        if self.servers:
            own["UNISONO_SERVERS"] = str(self.servers)
            own["UNISONO_SERVER_ADDRESSES"] = ",".join(self.server_addresses)
        if self.server_index is not None:
            own["UNISONO_SERVER"] = str(self.server_index)
        # torch knows no rank beyond its world, which a worker that has joined servers has
        has_torch_rank = self.role == "worker" and self.rank < self.world_size
        return own | self._values(TORCH_VARIABLES) if has_torch_rank else own

    def _values(self, fields: Mapping[str, str]) -> dict[str, str]:
        return {variable: str(getattr(self, field)) for variable, field in fields.items()}


def job_from_environ(environ: Mapping[str, str]) -> JobSpec:
    """The JobSpec that ``environ`` describes; world size 1 and source ``single`` if no source numbers this process.

    Raises LaunchError if sources contradict each other, or if variables of a source are missing or malformed.
    """
    launchers = [_checked(job) for read in (_own, _torchrun, _dmlc) if (job := read(environ)) is not None]
    allocations = [_checked(job) for read in (_slurm, _openmpi) if (job := read(environ)) is not None]
    if not launchers:
        # mpirun starts its daemons as a SLURM step: of the two, Open MPI numbers the processes
        return allocations[-1] if allocations else JobSpec()
    job = launchers[0]
    for other in launchers[1:]:
        if other.role != job.role:
            raise _contradiction(job, other, "both say what this process is for")
        if (other.rank, other.world_size) != (job.rank, job.world_size):
            raise _contradiction(job, other, "both number this process")
    for outer in allocations:
        if job.world_size % outer.world_size:
            raise _contradiction(job, outer, "a world must be a multiple of the tasks it is started in")
    return job


def idle_role(job: JobSpec, kind: str) -> str | None:
    """The reason, in one line, why a server has nothing to do under synchronisation ``kind``; None for others.

    MXNet's scripts start servers for every kind. Without a secret or certificates those of dist_async are no use either.
    """
    if job.role != "server":
        return None
    if kind == "dist_async":
        return "dist_async: the workers start servers on their own hosts; this server exits"
    return f"{kind} needs no servers: gradients are all-reduced among the workers; this process exits"


# --- the sources ---------------------------------------------------------------------------------------------------


def _own(environ: Mapping[str, str]) -> JobSpec | None:
    if not _all_or_none(environ, "unisono", list(_ALWAYS), marker="UNISONO_RANK"):
        return None
    place: dict[str, Any] = {
        field: environ[variable] if field in ("run_id", "master_addr") else _whole(environ, variable)
        for variable, field in _ALWAYS.items()
    }
    return JobSpec(
        **place,
        source="unisono",
        role=_role(environ, "UNISONO_ROLE", "worker"),
        servers=_whole(environ, "UNISONO_SERVERS", 0),
        server_addresses=tuple(filter(None, environ.get("UNISONO_SERVER_ADDRESSES", "").split(","))),
        server_index=_maybe(environ, "UNISONO_SERVER"),
        listen_fd=_maybe(environ, "UNISONO_LISTEN_FD"),
    )


def _torchrun(environ: Mapping[str, str]) -> JobSpec | None:
    # MASTER_ADDR and MASTER_PORT alone are what people export for srun and mpirun, so they do not announce torchrun
    identity = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in environ]
    if not identity:
        return None
    _all_or_none(environ, "torchrun", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"], identity[0])
    world = _whole(environ, "WORLD_SIZE")
    return JobSpec(
        run_id=environ.get("TORCHELASTIC_RUN_ID", "torchrun"),
        restart_count=_whole(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        rank=_whole(environ, "RANK"),
        local_rank=_whole(environ, "LOCAL_RANK"),
        world_size=world,
        local_world=_whole(environ, "LOCAL_WORLD_SIZE", world if _is_loopback(environ["MASTER_ADDR"]) else 1),
        master_addr=environ["MASTER_ADDR"],
        master_port=_whole(environ, "MASTER_PORT"),
        source="torchrun",
        shared_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _dmlc(environ: Mapping[str, str]) -> JobSpec | None:
    if "DMLC_ROLE" not in environ:
        return None
    role = _role(environ, "DMLC_ROLE")
    _all_or_none(
        environ, "dmlc", ["DMLC_ROLE", "DMLC_NUM_WORKER", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"], "DMLC_ROLE"
    )
    number = next((name for name in ("DMLC_RANK", "DMLC_WORKER_ID", "DMLC_TASK_ID") if name in environ), None)
    world = _whole(environ, "DMLC_NUM_WORKER")
    if role == "worker" and number is None:
        raise LaunchError(
            given="DMLC_ROLE='worker' and none of DMLC_RANK, DMLC_WORKER_ID, DMLC_TASK_ID",
            rule="a worker has its number before it starts; MXNet numbers workers as they arrive, in another order "
            "each time",
            consequence="this process does not know which share of the data is its own and was not started",
            nearest=f"DMLC_WORKER_ID=0 … {max(world - 1, 0)}, one for each worker, or `unisono launch`, which numbers them",
        )
    rank = _whole(environ, number) if role == "worker" and number else 0
    on_one_host = _is_loopback(environ["DMLC_PS_ROOT_URI"])
    return JobSpec(
        run_id="dmlc",
        role=role,
        servers=_whole(environ, "DMLC_NUM_SERVER", 0),
        server_index=_dmlc_server(environ, world) if role == "server" else None,
        interface=environ.get("DMLC_INTERFACE"),
        rank=rank,
        local_rank=rank if on_one_host else 0,
        world_size=world,
        local_world=world if on_one_host else 1,
        master_addr=environ["DMLC_PS_ROOT_URI"],
        master_port=_whole(environ, "DMLC_PS_ROOT_PORT"),
        source="dmlc",
        # where a tracker starts servers it starts a scheduler too, which keeps the store
        shared_store=_whole(environ, "DMLC_NUM_SERVER", 0) > 0,
    )


def _dmlc_server(environ: Mapping[str, str], workers: int) -> int | None:
    """The server's index: trackers number workers and servers in one sequence, workers first."""
    task = _maybe(environ, "DMLC_TASK_ID")
    return None if task is None or task < workers else task - workers


def _slurm(environ: Mapping[str, str]) -> JobSpec | None:
    procid, step = environ.get("SLURM_PROCID"), environ.get("SLURM_STEP_ID")
    if procid is None or (step is None and procid == "0"):
        return None
    names = ["SLURM_PROCID", "SLURM_STEP_ID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID"]
    _all_or_none(environ, "slurm", names, "SLURM_PROCID")
    if _whole(environ, "SLURM_STEP_ID") >= _FIRST_SPECIAL_STEP:
        return None
    world = _whole(environ, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or str(world)
    per_node = list(_slurm_counts(counts))
    node = _whole(environ, "SLURM_NODEID", 0)
    local_world = per_node[node] if node < len(per_node) else world
    job_id = environ["SLURM_JOB_ID"]
    return JobSpec(
        run_id=f"slurm-{job_id}.{step}",
        restart_count=_whole(environ, "SLURM_RESTART_COUNT", 0),
        rank=_whole(environ, "SLURM_PROCID"),
        local_rank=_whole(environ, "SLURM_LOCALID"),
        world_size=world,
        local_world=local_world,
        master_addr=_master_addr(environ, "slurm", LOOPBACK if local_world == world else first_slurm_host(nodes)),
        master_port=_master_port(environ, f"slurm-{job_id}"),
        source="slurm",
    )


def _openmpi(environ: Mapping[str, str]) -> JobSpec | None:
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    if not _all_or_none(environ, "openmpi", names, "OMPI_COMM_WORLD_RANK"):
        return None
    rank, world, local_rank, local_world = (_whole(environ, name) for name in names)
    # one name per mpirun, the same on all its ranks: Open MPI 5 (PMIx), then Open MPI 4
    run_id = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or "openmpi"
    return JobSpec(
        run_id=run_id,
        rank=rank,
        local_rank=local_rank,
        world_size=world,
        local_world=local_world,
        master_addr=_master_addr(environ, "openmpi", LOOPBACK if local_world == world else None),
        master_port=_master_port(environ, run_id),
        source="openmpi",
    )


# --- reading and checking ------------------------------------------------------------------------------------------


def _whole(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"[0-9]{1,18}", text.strip()):
        raise _invalid(name, text, "it is a whole number, 0 or more")
    return int(text)


def _maybe(environ: Mapping[str, str], name: str) -> int | None:
    return _whole(environ, name) if name in environ else None


def _role(environ: Mapping[str, str], name: str, default: str | None = None) -> Role:
    value = environ.get(name, default)
    for role in ROLES:
        if role == value:
            return role
    raise _invalid(name, value, f"a process is one of {', '.join(ROLES)}")


def _invalid(name: str, value: str | None, rule: str) -> LaunchError:
    nearest = f"unset {name}, or let the launcher set it"
    return LaunchError(given=f"{name}={value!r}", rule=rule, consequence=_NOT_STARTED, nearest=nearest)


def _all_or_none(environ: Mapping[str, str], source: str, names: list[str], marker: str) -> bool:
    """Whether the ``marker`` of this source is set. Raises LaunchError if only some of ``names`` are set."""
    if marker not in environ:
        return False
    missing = [name for name in names if name not in environ]
    if missing:
        present = ", ".join(f"{name}={environ[name]}" for name in names if name in environ)
        raise LaunchError(
            given=f"{source} set {present} but not {', '.join(missing)}",
            rule=f"{source} sets all of {', '.join(names)}, or none",
            consequence=_NOT_STARTED,
            nearest=f"set {', '.join(missing)}, or unset {marker} to run as one process",
        )
    return True


def _is_host_name(text: str) -> bool:
    """Whether a resolver takes ``text``: labels of at most 63 bytes (RFC 1035), or another script (RFC 3490)."""
    if text.isascii():  # the common case, without the tables of all scripts
        return len(text) <= 253 and all(0 < len(label) <= 63 for label in text.removesuffix(".").split("."))
    try:
        return len(text.encode("idna")) <= 253
    except UnicodeError:
        return False


def _checked(job: JobSpec) -> JobSpec:
    def violations() -> Iterator[tuple[str, str]]:
        joins = bool(job.server_addresses) and job.role == "worker"  # a worker may join servers at any time
        if job.world_size < 1 or not (0 <= job.rank < job.world_size or joins):
            yield f"rank {job.rank} of world {job.world_size}", "0 <= rank < world"
        if not (1 <= job.local_world <= max(job.world_size, 1) or joins) or not 0 <= job.local_rank < max(
            job.local_world, 1
        ):
            yield f"local rank {job.local_rank} of {job.local_world} on this host", "0 <= local rank < local world"
        if len(job.server_addresses) not in (0, job.servers):
            yield (
                f"{len(job.server_addresses)} server addresses for {job.servers} servers",
                "each server has one address",
            )
        if job.server_index is not None and not 0 <= job.server_index < job.servers:
            yield f"server {job.server_index} of {job.servers}", "0 <= server index < servers"
        if not job.master_addr.strip() or not _is_host_name(job.master_addr):
            yield f"the address {job.master_addr[:300]!r}", "processes meet at the name or IP address of a host"
        if not 0 <= job.master_port < 2**16:
            yield f"port {job.master_port}", "a port is at most 65535"

    problems = [
        Problem(
            given=f"{job.source} gives {given}",
            rule=rule,
            consequence=_NOT_STARTED,
            nearest="let the launcher set these variables, and export none of them by hand",
        )
        for given, rule in violations()
    ]
    if problems:
        raise LaunchError(*problems)
    return job


def _contradiction(a: JobSpec, b: JobSpec, rule: str) -> LaunchError:
    return LaunchError(
        given=f"{a.source} says {_place(a)}, {b.source} says {_place(b)}",
        rule=rule,
        consequence="guessing would start several runs in one folder, so nothing was started",
        nearest=f"unset the variables of {a.source} or of {b.source}, whichever is a leftover",
    )


def _place(job: JobSpec) -> str:
    return f"rank {job.rank} of {job.world_size}" if job.role == "worker" else f"a {job.role}"


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or host.startswith("127.")


def _master_addr(environ: Mapping[str, str], source: str, default: str | None) -> str:
    address = environ.get("MASTER_ADDR") or default
    if address is None:
        raise LaunchError(
            given=f"{source} started ranks on several hosts and does not say where rank 0 is",
            rule="all ranks meet at MASTER_ADDR",
            consequence="the ranks cannot find each other, so nothing was started",
            nearest="mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 …",
        )
    return address


def _master_port(environ: Mapping[str, str], run_id: str) -> int:
    """MASTER_PORT, or a port that every rank derives from ``run_id``; two jobs on one host rarely share it."""
    return _whole(environ, "MASTER_PORT", 20000 + zlib.crc32(run_id.encode()) % 12000)


def _slurm_counts(text: str) -> Iterator[int]:
    """``"2(x3),1"`` -> 2, 2, 2, 1 (SLURM_TASKS_PER_NODE)."""
    for count, times in re.findall(r"([0-9]+)(?:\(x([0-9]+)\))?", text):
        yield from [int(count)] * int(times or 1)


def first_slurm_host(nodelist: str | None) -> str | None:
    """``"gpu[07-09,12],big1"`` -> ``"gpu07"``; None for an empty list."""
    match = re.match(r"([^\[,]+)(?:\[([0-9]+)[^\]]*\]([^,]*))?", nodelist or "")
    return None if match is None else "".join(part or "" for part in match.groups())
