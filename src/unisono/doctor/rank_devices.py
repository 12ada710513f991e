"""Whether each rank of a host has an accelerator of its own (DEV10), as training wants it (``parallel.device``)."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from unisono.dist import job_from_environ
from unisono.doctor.check import Check, judged
from unisono.errors import LaunchError
from unisono.launch.resources import count_accelerators

if TYPE_CHECKING:
    from unisono.dist import World

_SHOWN: Final = 4
_TITLE: Final = "a device for each rank"
_CURE: Final = (
    "as many ranks as devices (launch.num_processes, -n, --nproc-per-node, --ntasks-per-node, slots of the hosts file), more "
    "devices (CUDA_VISIBLE_DEVICES, --gpus-per-node), or plan.device=cpu"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRanks:
    """A host of a job: its name, the ranks that run on it, and the accelerators that they see."""

    host: str
    ranks: int
    devices: int


def default_ranks() -> int:
    """Ranks of an examination of this host: one for each accelerator, and two where there is none."""
    return count_accelerators() or 2


def check_own_ranks(environ: Mapping[str, str]) -> Iterator[Check]:
    """DEV10 for the ranks of the job, or tasks of the SLURM allocation, that this process is in; nothing without accelerators."""
    try:
        job = job_from_environ(environ)
    except LaunchError:
        return  # every rank says what is wrong with the variables
    tasks = re.match("[0-9]{1,6}", environ.get("SLURM_TASKS_PER_NODE", ""))  # the first node has the shell of the batch
    if job.source != "single":
        yield from check_rank_devices([HostRanks(host="this host", ranks=job.local_world, devices=_count_visible())])
    elif tasks is not None and (count := _count_visible()):
        ranks = int(tasks[0])
        evidence = f"srun starts {_ranks(ranks)} on this host, which has {_devices(count)}"
        yield judged("DEV10", _TITLE, evidence, warning=_CURE if ranks > count else "")


def check_rank_devices(hosts: Sequence[HostRanks]) -> Iterator[Check]:
    """DEV10 for the hosts of a job; nothing where none has accelerators."""
    if not any(each.devices for each in hosts):
        return
    short = [each for each in hosts if each.devices < each.ranks]
    shown = [f"{each.host}: {_ranks(each.ranks)}, {_devices(each.devices)}" for each in (short or hosts)[:_SHOWN]]
    more = f"; and {len(short or hosts) - _SHOWN} more hosts" if len(short or hosts) > _SHOWN else ""
    yield judged("DEV10", _TITLE, "; ".join(shown) + more, failure=_CURE if short else "")


def gather_host_ranks(world: World) -> list[HostRanks]:
    """Ranks and devices of each host of a job. A collective."""
    mine = {"host": socket.gethostname(), "ranks": world.job.local_world, "devices": _count_visible()}
    told = world.all_gather_json(mine if world.job.local_rank == 0 else None)
    return [HostRanks(**each) for each in told if each is not None]


def _count_visible() -> int:
    """Accelerators that torch shows to this process."""
    from unisono.device.torch_adapters import present_adapter

    adapter = present_adapter()
    return 0 if adapter.streams is None else adapter.count()


def _ranks(count: int) -> str:
    return f"{count} {'rank' if count == 1 else 'ranks'}"


def _devices(count: int) -> str:
    return f"{count} {'device' if count == 1 else 'devices'}"
