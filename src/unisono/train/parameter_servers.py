"""The parameter servers of a ``dist_async`` run: where they are, and starting them where the job's launcher did not."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from unisono.dist import JobSpec, join_world
from unisono.dist.dmlc import has_credentials, take_role
from unisono.dist.dmlc import server_addresses as dmlc_servers
from unisono.dist.secret import secret_descriptor
from unisono.errors import ConfigError, LaunchError
from unisono.kvstore.server.child_servers import child_servers
from unisono.kvstore.wire.tls import TLS_VARIABLE, read_tls
from unisono.launch.options import LaunchOptions, server_environ, tls_folder
from unisono.plan.plan import Plan


def server_addresses(job: JobSpec) -> list[tuple[str, int]]:
    """Host and port of each server of the job. Raises LaunchError where it has none."""
    if not job.server_addresses and _has_servers_of_dmlc(job):
        return dmlc_servers(job)
    if not job.server_addresses:
        raise LaunchError(
            given=f"plan.sync 'dist_async' in a job that {job.source} started without parameter servers",
            rule="asynchronous workers meet at servers",
            consequence="no server would take the gradients, so nothing was started",
            nearest="unisono train (it starts launch.num_servers of them), or unisono launch --servers 1 -- unisono train",
        )
    pairs = (address.rpartition(":") for address in job.server_addresses)
    return [(host, int(port)) for host, _, port in pairs]


def _has_servers_of_dmlc(job: JobSpec) -> bool:
    return job.source == "dmlc" and job.servers > 0 and has_credentials(os.environ)


@contextmanager
def start_servers(plan: Plan, job: JobSpec, launch: LaunchOptions, run_dir: Path) -> Generator[JobSpec]:
    """``job`` with the addresses of parameter servers.

    If the plan needs servers and the launcher started none (torchrun, mpirun, srun, one process, or MXNet's tracker without a
    secret or certificates), workers start them as their children, which is a collective. Their snapshots are in ``run_dir``
    until the next such job begins there.

    Raises ConfigError if ``launch.tls`` would have no effect or its folder cannot be used.
    """
    if plan.sync.kind != "dist_async":
        if launch.tls:
            raise ConfigError(
                given=f"launch.tls {launch.tls!r} with plan.sync {plan.sync.kind!r}",
                rule="TLS is for traffic between asynchronous workers and servers; Gloo and NCCL encrypt nothing",
                consequence="it would have no effect, so nothing was started",
                nearest="plan.sync='dist_async', or a private network and no launch.tls",
            )
        yield job
        return
    with _tls_variable(launch) as tls:
        if job.server_addresses or _has_servers_of_dmlc(job):
            take_role(job)
            addresses = server_addresses(job)
            yield replace(job, servers=len(addresses), server_addresses=tuple(f"{h}:{p}" for h, p in addresses))
            return
        # ranks meet once, to exchange addresses
        world = join_world(job, device_type="cpu", timeout_s=launch.timeout_s)
        try:
            folder = run_dir.absolute() / "servers"
            if world.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            snapshots = str(folder / world.broadcast_json(secrets.token_hex(4)))
            more = server_environ(launch) | {"UNISONO_SNAPSHOTS": snapshots}
            count = job.servers or launch.num_servers
            with child_servers(world, count, tls=tls, restarts=launch.max_restarts, more=more) as (addresses, secret):
                world.close()
                with _secret_variable(secret):
                    yield replace(job, servers=len(addresses), server_addresses=tuple(f"{h}:{p}" for h, p in addresses))
        finally:
            world.close()


@contextmanager
def _secret_variable(secret: bytes) -> Generator[None]:
    """Inside, ``secret`` is what ``read_or_create_secret`` reads from this process's environment."""
    before = {
        name: value for name in ("UNISONO_SECRET_FD", "UNISONO_SECRET_FILE") if (value := os.environ.pop(name, None))
    }
    fd = secret_descriptor(secret)
    os.environ["UNISONO_SECRET_FD"] = str(fd)
    try:
        yield
    finally:
        os.close(fd)
        del os.environ["UNISONO_SECRET_FD"]
        os.environ.update(before)


@contextmanager
def _tls_variable(launch: LaunchOptions) -> Generator[str]:
    """Inside, UNISONO_TLS is the folder of the setting or of this process's launcher, if there is one; tried here, before
    anything is started."""
    folder = tls_folder(launch, os.environ)
    with ExitStack() as stack:
        if folder and not os.environ.get(TLS_VARIABLE):
            os.environ[TLS_VARIABLE] = folder
            stack.callback(os.environ.pop, TLS_VARIABLE, None)
        read_tls(os.environ)
        yield folder
