"""One job from start to end, wherever its processes are: what ``unisono launch`` and runs with parameter servers call."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from unisono.dist.jobspec import LOOPBACK
from unisono.launch.elastic import supervise_elastic
from unisono.launch.host_resources import count_accelerators
from unisono.launch.hostfile import Host
from unisono.launch.local import launch_local, refuse_inside_a_job
from unisono.launch.multi_host_job import MultiHostJob
from unisono.launch.network_interface import interface_by_name, interface_towards
from unisono.launch.options import LaunchOptions, tls_folder
from unisono.launch.process_layout import JobLayout, assign_processes
from unisono.launch.supervise import make_folders, print_message, supervise

SERVER = (sys.executable, "-m", "unisono.kvstore.server")


def with_servers(command: Sequence[str], options: LaunchOptions, run_dir: Path) -> JobLayout:
    """``command`` as the workers of an asynchronous job on this host, with parameter servers beside them."""
    processes = options.num_processes or max(1, count_accelerators())
    hosts = (Host(name="this host", slots=processes, here=True),)
    return JobLayout(
        command=tuple(command),
        server_command=SERVER,
        hosts=hosts,
        seats=assign_processes(hosts, processes, options.num_servers),
        run_id=run_dir.absolute().name,
        options=options,
        environ={
            "UNISONO_REPLICAS": str(options.num_replicas),
            "UNISONO_SNAPSHOT_EVERY_S": str(options.snapshot_every_s),
        },
        snapshots=str(run_dir.absolute() / "servers"),
    )


def run_job(job: JobLayout, run_dir: Path) -> int:
    """Runs ``job`` and returns its exit code: 0, 1, 2, 75 (requeue) or 76 (do not repeat).

    ``run_dir/launch.json`` and ``run_dir/logs`` are as with ``unisono.launch.launch``, which does it where all ranks are on this
    host and there are no servers. Otherwise every process's output is also shown here, with its name in front.

    Raises LaunchError when nothing can be started, CommError when a host that was lost does not come back.
    """
    if job.plain:
        way = interface_by_name(job.interface) if job.interface else interface_towards(LOOPBACK)
        options = replace(job.options, num_processes=len(job.workers))
        return launch_local(
            job.command, options, run_dir=run_dir, run_id=job.run_id, environ=job.environ, interface=way
        )
    refuse_inside_a_job(run_dir)
    tls_folder(job.options, {**os.environ, **job.environ})
    make_folders(run_dir)
    if job.snapshots:  # they are for restarts of a server within one launch; a later launch begins from a checkpoint
        shutil.rmtree(job.snapshots, ignore_errors=True)
        job = replace(job, snapshots=f"{job.snapshots}/{secrets.token_hex(4)}")
    with MultiHostJob(job, run_dir / "logs", print_message) as fleet:
        record = {"run_id": job.run_id, "command": list(job.command), "hosts": fleet.facts}
        if job.servers:
            record["server_command"] = list(job.server_command)
            return supervise_elastic(fleet.start_one, job.seats, job.options, run_dir=run_dir, record=record)
        return supervise(fleet.start_all, job.options, run_dir=run_dir, record=record)
