"""Settings of the local launcher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from unisono.config import option
from unisono.config.fields import options_repr
from unisono.errors import LaunchError

# workers, or servers, of one host; more is a mistake that would take the host's memory before it fails
MAX_PROCESSES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions:
    """How many processes run on this host, their share of it, restarts and time-outs."""

    __repr__ = options_repr

    num_processes: int = option(
        0, "Processes on this host; 0 = one per accelerator, or one where there is none.", ge=0, le=MAX_PROCESSES
    )
    num_threads: int = option(0, "CPU threads of each process; 0 = an even share of the physical cores allowed.", ge=0)
    allocator: str = option(
        "tuned", "C allocator: 'tuned' keeps freed memory for the next step.", choices=("tuned", "system")
    )
    num_servers: int = option(
        1,
        "Parameter servers, in addition to the processes (plan.sync=dist_async).",
        applies_with="plan.sync = dist_async",
        ge=1,
        le=MAX_PROCESSES,
    )
    num_replicas: int = option(
        1,
        "2 = each server keeps a copy of another's parameters; no acknowledged push is lost.",
        applies_with="plan.sync = dist_async",
        ge=1,
        le=2,
    )
    snapshot_every_s: float = option(
        60.0, "Seconds between two snapshots of a server, for its restart.", applies_with="plan.sync = dist_async", gt=0
    )
    tls: str = option(
        "",
        "Folder with certificate.pem, key.pem, authority.pem: encrypts what goes to servers.",
        applies_with="plan.sync = dist_async",
    )
    max_restarts: int = option(3, "Restarts from the newest checkpoint after a crash.", ge=0)
    timeout_s: float = option(
        300.0,
        "Seconds a rank waits for its peers in one collective (60 or more at the start), and for MASTER_ADDR to resolve.",
        gt=0,
    )
    collective_backend: str = option(
        "auto",
        "Back end of torch.distributed on the run's device: auto = the device's own (gloo, nccl, hccl by torch_npu); or a name "
        "that torch or an entry point knows.",
        applies_with="two ranks or more that meet (not plan.sync = dist_async)",
    )
    grace_s: float = option(30.0, "Seconds a stopped run gets to save and end before it is killed.", ge=0)


# options that only parameter servers read
SERVER_OPTIONS = ("num_servers", "num_replicas", "snapshot_every_s")


def server_environ(options: LaunchOptions) -> dict[str, str]:
    """Variables of a parameter server: number of replicas, seconds between snapshots."""
    return {
        "UNISONO_REPLICAS": str(options.num_replicas),
        "UNISONO_SNAPSHOT_EVERY_S": str(options.snapshot_every_s),
    }


def tls_folder(options: LaunchOptions, environ: Mapping[str, str]) -> str:
    """The folder of certificates, from launch.tls or UNISONO_TLS; empty for none. Raises LaunchError if they differ."""
    from_environ = environ.get("UNISONO_TLS", "")
    if options.tls and from_environ not in ("", options.tls):
        raise LaunchError(
            given=f"launch.tls {options.tls!r} where UNISONO_TLS is {from_environ!r}",
            rule="a process has one folder of certificates",
            consequence="nothing was started",
            nearest=f"launch.tls={from_environ}, or leave one out",
        )
    return options.tls or from_environ


# field → key of the message that starts a host agent
_MESSAGE_KEYS = {
    name: name.removeprefix("num_") for name in ("num_processes", "num_threads", "num_servers", "num_replicas")
}


def options_message(options: LaunchOptions) -> dict[str, Any]:
    """``options`` as JSON types, for a host agent."""
    return {_MESSAGE_KEYS.get(name, name): value for name, value in asdict(options).items()}


def options_of_message(message: Mapping[str, Any]) -> LaunchOptions:
    """The inverse of ``options_message``."""
    names = {key: name for name, key in _MESSAGE_KEYS.items()}
    values = {names.get(key, key): value for key, value in message.items() if key != "numa"}  # of earlier versions
    return LaunchOptions(**values)
