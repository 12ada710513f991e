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
from unisono.errors import ConfigError, LaunchError
from unisono.kvstore.server.child_servers import child_servers
from unisono.kvstore.wire.tls import TLS_VARIABLE, read_tls
from unisono.launch.options import LaunchOptions, tls_folder
from unisono.plan.plan import Plan


def server_addresses(job: JobSpec) -> list[tuple[str, int]]:
    """Host and port of each server of the job. Raises LaunchError where it has none."""
    if not job.server_addresses:
        raise LaunchError(
            given=f"plan.sync 'dist_async' in a job that {job.source} started without parameter servers",
            rule="asynchronous workers meet at servers",
            consequence="there is nobody to push gradients to, so nothing was started",
            nearest="unisono train (it starts launch.num_servers of them), or unisono launch --servers 1 -- unisono train",
        )
    pairs = (address.rpartition(":") for address in job.server_addresses)
    return [(host, int(port)) for host, _, port in pairs]


@contextmanager
def start_servers(plan: Plan, job: JobSpec, launch: LaunchOptions, run_dir: Path) -> Generator[JobSpec]:
    """``job`` with the addresses of parameter servers. Where its launcher started none (torchrun, mpirun, srun, one process) and
    the plan needs some, workers start them as their children, and know the way to them inside only. A collective then. Their
    snapshots are in ``run_dir``, and go when the next such job begins there. Raises ConfigError where ``launch.tls`` would act on
    nothing, or its folder is no good."""
    if plan.sync.kind != "dist_async":
        if launch.tls:
            raise _unused_tls_error(plan, launch)
        yield job
        return
    with _tls_variable(launch) as tls:
        if job.server_addresses:
            yield job
            return
        # all meet once, to tell each other addresses and a secret; from then on they do without each other
        world = join_world(job, device_type="cpu", timeout_s=launch.timeout_s)
        try:
            folder = run_dir.absolute() / "servers"
            if world.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            more = {
                "UNISONO_REPLICAS": str(launch.num_replicas),
                "UNISONO_SNAPSHOTS": str(folder / world.broadcast_json(secrets.token_hex(4))),
                "UNISONO_SNAPSHOT_EVERY_S": str(launch.snapshot_every_s),
            }
            count = job.servers or launch.num_servers
            with child_servers(world, count, tls=tls, restarts=launch.max_restarts, more=more) as (addresses, secret):
                world.close()
                file = os.memfd_create("unisono-secret", os.MFD_CLOEXEC)
                os.pwrite(file, secret, 0)
                os.environ["UNISONO_SECRET_FD"] = str(file)  # whoever reads it closes it
                yield replace(job, servers=len(addresses), server_addresses=tuple(f"{h}:{p}" for h, p in addresses))
        finally:
            world.close()
            os.environ.pop("UNISONO_SECRET_FD", None)


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


def _unused_tls_error(plan: Plan, launch: LaunchOptions) -> ConfigError:
    return ConfigError(
        given=f"launch.tls {launch.tls!r} with plan.sync {plan.sync.kind!r}",
        rule="TLS is for what asynchronous workers and their servers say; Gloo and NCCL encrypt nothing",
        consequence="it would act on nothing, and nothing was started",
        nearest="plan.sync='dist_async', or a private network and no launch.tls",
    )
