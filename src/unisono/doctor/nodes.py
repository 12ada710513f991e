"""What differs between the hosts of a job: versions, devices, variables, limits, clocks, and the folder of runs. A collective."""

from __future__ import annotations

import os
import platform
import resource
import secrets
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import psutil
import xxhash

from unisono.dist import World
from unisono.doctor.check import Check, judged
from unisono.doctor.storage import nearest_folder
from unisono.doctor.versions import driver_version
from unisono.launch.resources import cpu_quota
from unisono.measure.links import clock_offsets
from unisono.observe.host_memory import host_memory_limit_bytes
from unisono.sanitize import is_secret, shorten
from unisono.storage.files import file_digest, open_new, os_reason
from unisono.storage.run_folder import RUN_FILE
from unisono.units import GIB

_PREFIXES: Final = ("NCCL_", "TORCH_", "PYTORCH_", "GLOO_", "OMP_", "MKL_", "CUDA_", "HIP_", "MALLOC_", "UNISONO_")
# what a launcher gives each rank or host for itself, and what tells no more than its host's name
_OWN: Final = ("UNISONO_LAUNCH", "UNISONO_LOGS", "UNISONO_SECRET_FD", "TORCH_NCCL_RANKS", "TORCHELASTIC_RUN_ID")
_CLOCK_WARNING_S, _CLOCK_FAILURE_S = 0.5, 5.0
_SHOWN_CHARS: Final = 80

Facts = dict[str, str]


def compare_nodes(world: World, run_dir: Path, environ: Mapping[str, str]) -> list[Check]:
    """NODE01 to NODE06, on every rank alike: what differs, and which host has it.

    Args:
        run_dir: Folder of runs, or of one run, whose configuration is then compared too.
        environ: Environment variables of this rank.
    """
    mine = {
        "versions": version_facts(run_dir),
        "devices": device_facts(),
        "variables": variable_facts(environ),
        "limits": limit_facts(),
    }
    places = world.all_gather_json({"host": socket.gethostname(), "node": world.rank - world.job.local_rank})
    hosts = [f"{place['host']}" for place in places]
    nodes = [int(place["node"]) for place in places]
    facts: list[dict[str, Facts]] = world.all_gather_json(mine)

    def group(name: str) -> str:
        return "; ".join(differences([each[name] for each in facts], hosts, nodes))

    num_nodes = len(set(nodes))
    alike = f"alike on {world.world_size} ranks of {num_nodes} {'host' if num_nodes == 1 else 'hosts'}"
    versions, devices, variables, limits = (group(name) for name in mine)
    return [
        judged(
            "NODE01",
            "versions and configuration",
            versions or alike,
            failure="install the same on all hosts, such as from one lock file, and start the same interpreter"
            if versions
            else "",
        ),
        judged("NODE02", "devices", devices or alike, failure="leave out the host that differs" if devices else ""),
        judged(
            "NODE03",
            "environment variables",
            variables or alike,
            warning="set them for all hosts (unisono launch --env), or in no host's profile" if variables else "",
        ),
        judged("NODE04", "limits", limits or alike, warning="the limits of the other hosts" if limits else ""),
        _clock(clock_offsets(world), hosts),
        _shared_folder(world, run_dir, hosts, num_nodes),
    ]


def differences(facts: Sequence[Facts], hosts: Sequence[str], nodes: Sequence[int]) -> list[str]:
    """One text for each fact that is not the same on all ranks: the ranks that differ from most, and what most have.

    Args:
        facts: Facts of each rank.
        hosts: Name of each rank's host.
        nodes: First rank of each rank's host.
    """
    found: list[str] = []
    for name in dict.fromkeys(name for each in facts for name in each):
        ranks: dict[str, list[int]] = {}
        for rank, each in enumerate(facts):
            ranks.setdefault(each.get(name, "not set"), []).append(rank)
        if len(ranks) == 1:
            continue
        usual = max(ranks, key=lambda value: len(ranks[value]))  # of equally many that of the lowest rank
        odd = [
            f"{shorten(value, _SHOWN_CHARS)} on {_places(ranks[value], hosts, nodes)}"
            for value in ranks
            if value != usual
        ]
        found.append(
            f"{name}: {', '.join(odd)}; {shorten(usual, _SHOWN_CHARS)} on {_places(ranks[usual], hosts, nodes)}"
        )
    return found


def _places(ranks: Sequence[int], hosts: Sequence[str], nodes: Sequence[int]) -> str:
    """Hosts of which all ranks are meant, and single ranks of others."""
    names: list[str] = []
    for node in dict.fromkeys(nodes[rank] for rank in ranks):
        all_ranks = [rank for rank, other in enumerate(nodes) if other == node]
        here = [rank for rank in all_ranks if rank in ranks]
        listed = ", ".join(map(str, here[:4])) + (", …" if len(here) > 4 else "")
        names.append(f"{hosts[node]} ({'rank' if len(here) == 1 else 'ranks'} {listed})")
    return " and ".join(names)


# --- the facts of a rank ---------------------------------------------------------------------------------------------


def version_facts(run_dir: Path) -> Facts:
    """Versions, the interpreter, the code of unisono, and the configuration in ``run_dir``."""
    import torch

    from unisono.device.torch_adapters import library_versions, toolkit

    package = Path(__file__).parents[1]
    code = xxhash.xxh3_64()
    for path in sorted(package.rglob("*.py")):
        code.update(path.relative_to(package).as_posix().encode())
        with suppress(OSError):
            code.update(file_digest(path).encode())
    facts = {
        "Python": platform.python_version(),
        "interpreter": sys.executable,
        "torch": torch.__version__,
        "CUDA or ROCm": toolkit(),
        "unisono": _version("unisono"),
        "code of unisono": code.hexdigest(),
        "numpy": _version("numpy"),
        "driver": driver_version() or "none",
    }
    facts |= library_versions()
    try:
        facts[f"{run_dir / RUN_FILE}"] = file_digest(run_dir / RUN_FILE)
    except OSError:
        facts[f"{run_dir / RUN_FILE}"] = "none"
    return facts


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def device_facts() -> Facts:
    """Number, names and memory of the accelerators of a host."""
    from unisono.device.torch_adapters import present_adapter

    adapter = present_adapter()
    if adapter.name == "cpu":
        return {"devices": "the CPU alone", "processor": platform.machine()}
    count = adapter.count()
    names = [adapter.device_name(index) for index in range(count)]
    memory = [f"{told.limit_bytes / GIB:.3g}" for index in range(count) if (told := adapter.memory(index)) is not None]
    return {
        "number of devices": str(count),
        "devices": ", ".join(dict.fromkeys(names)),
        "memory of devices in GiB": ", ".join(dict.fromkeys(memory)),
    }


def variable_facts(environ: Mapping[str, str]) -> Facts:
    """Variables that NCCL, torch, Gloo, OpenMP, the allocator and unisono read, without those of a rank's place and secrets."""
    from unisono.dist.jobspec import OWN_VARIABLES

    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(_PREFIXES) and name not in OWN_VARIABLES and name not in _OWN and not is_secret(name)
    }


def limit_facts() -> Facts:
    """Limits of processes, cores, memory and shared memory."""

    def limit(number: int) -> str:
        soft = resource.getrlimit(number)[0]
        return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)

    facts = {
        "open files": limit(resource.RLIMIT_NOFILE),
        "locked memory": limit(resource.RLIMIT_MEMLOCK),
        "processes": limit(resource.RLIMIT_NPROC),
        "cores": str(psutil.cpu_count(logical=False) or os.cpu_count()),
        "CPU quota": str(cpu_quota()),
        "memory in GiB": f"{host_memory_limit_bytes() / GIB:.2g}",
    }
    with suppress(OSError):
        facts["/dev/shm in GiB"] = f"{shutil.disk_usage('/dev/shm').total / GIB:.2g}"
    return facts


# --- clocks and the folder of runs -----------------------------------------------------------------------------------


def _clock(offsets: Sequence[float], hosts: Sequence[str]) -> Check:
    worst = max(range(len(offsets)), key=lambda rank: abs(offsets[rank]))
    skew_s = abs(offsets[worst])
    text = "less than 1 ms" if skew_s < 0.001 else f"{skew_s:.3g} s"
    way = "ahead of" if offsets[worst] > 0 else "behind"
    evidence = (
        f"{text} apart"
        if skew_s < _CLOCK_WARNING_S
        else (f"the clock of {hosts[worst]} (rank {worst}) is {text} {way} that of {hosts[0]} (rank 0)")
    )
    cure = f"start a time service on {hosts[worst]} (systemctl enable --now systemd-timesyncd): times of hosts are compared"
    return judged(
        "NODE05",
        "clocks",
        evidence,
        failure=cure if skew_s > _CLOCK_FAILURE_S else "",
        warning=cure if skew_s > _CLOCK_WARNING_S else "",
    )


def _shared_folder(world: World, run_dir: Path, hosts: Sequence[str], num_nodes: int) -> Check:
    """Whether every rank sees what rank 0 writes into the folder of runs."""
    title = "the folder of runs"
    if num_nodes == 1:
        return judged("NODE06", title, f"{nearest_folder(run_dir).resolve()}, on one host")
    word, trouble = secrets.token_hex(8), ""
    folder = nearest_folder(run_dir).absolute()
    path = folder / f".unisono-doctor-{word}"
    if world.rank == 0:
        try:
            with open_new(path) as file:
                file.write(word.encode())
        except OSError as error:
            trouble = f"{folder} on {hosts[0]}: {os_reason(error)}"
    told = world.broadcast_json({"path": str(path), "word": word, "trouble": trouble})
    mine = told["trouble"] or _seen(Path(told["path"]), told["word"])
    answers: list[str] = world.all_gather_json(mine)
    if world.rank == 0:
        with suppress(OSError):
            path.unlink()
    blind = {hosts[rank]: answer for rank, answer in enumerate(answers) if answer}
    evidence = told["trouble"] or _unseen(Path(told["path"]).parent, hosts[0], blind)
    cure = "mount the same folder on all hosts, or give them one with run.dir: ranks share checkpoints there"
    return judged("NODE06", title, evidence or f"all hosts see {folder}", failure=cure if evidence else "")


def _seen(path: Path, word: str) -> str:
    """Why this rank does not see a file with that content; empty if it does."""
    try:
        return "" if path.read_text(errors="replace") == word else "another file is there"
    except OSError as error:
        return os_reason(error)


def _unseen(folder: Path, host: str, blind: Mapping[str, str]) -> str:
    return "; ".join(
        f"{other} does not see a file that {host} wrote into {folder} ({why})" for other, why in blind.items()
    )
