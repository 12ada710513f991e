"""One job from start to end: on this host by ``launch_local``, on several hosts or with servers by ``run_job``;
``--dry-run``.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from unisono.dist import JobSpec, job_from_environ
from unisono.dist.address import free_port
from unisono.dist.interpreter import module_command
from unisono.dist.jobspec import LOOPBACK
from unisono.dist.secret import new_secret
from unisono.errors import LaunchError
from unisono.launch.elastic import supervise_elastic
from unisono.launch.host_agent_client import agent_command, agent_script
from unisono.launch.hostfile import Host
from unisono.launch.membership import open_to_workers
from unisono.launch.multi_host_job import MultiHostJob
from unisono.launch.network_interface import NetworkInterface, choose_interface
from unisono.launch.options import LaunchOptions, server_environ, tls_folder
from unisono.launch.process_layout import JobLayout, assign_processes
from unisono.launch.resources import count_accelerators, divide_host
from unisono.launch.supervise import job_folder, print_message, supervise
from unisono.launch.workers import Reaper, Worker, WorkerSpec, open_log, start_worker
from unisono.storage.run_folder import LOGS_FOLDER

SERVER = tuple(module_command("unisono.kvstore.server"))


def launch_local(
    command: Sequence[str],
    options: LaunchOptions,
    *,
    run_dir: Path,
    run_id: str,
    environ: Mapping[str, str] | None = None,
    interface: NetworkInterface | None = None,
) -> int:
    """Run ``command`` in every process of this host, and restart all of them after a crash.

    Workers find their place with ``job_from_environ``. Rank 0 writes to this terminal, the others to
    ``run_dir/logs/rank-N.attempt-K.log``; ``run_dir/launch.json`` records the settings and how each attempt ended. Call it
    on the main thread, in a process without other threads.

    Args:
        command: Program and arguments of every process.
        options: Number of processes, their threads, restarts and time-outs.
        run_dir: Folder of the run, created if it is missing.
        run_id: Name of the run, equal on all its processes.
        environ: Variables that override inherited ones. Default: none.
        interface: Network interface for Gloo and NCCL; None lets them choose, which is loopback on one host.

    Returns:
        The exit status: 0, 1, 2, 75 (requeue) or 76 (do not repeat).

    Raises:
        LaunchError: Nothing can be started: unwritable folder, unknown command, or already inside a job.
        ConfigError: Another launch uses ``run_dir``.
    """
    refuse_inside_a_job(run_dir)
    extra = {**(interface.environ() if interface else {}), **(environ or {})}
    share = divide_host(options, {**os.environ, **extra})
    job = JobSpec(run_id=run_id, world_size=share.processes, local_world=share.processes, source="unisono")
    spec = WorkerSpec(
        command=command, job=job, share=share, logs=run_dir / LOGS_FOLDER, environ=extra, secret=new_secret()
    )
    record = {"run_id": run_id, "command": list(command), **share.record()}
    if interface is not None:
        record |= {"interface": interface.name, "interface_why": interface.why}
    with Reaper() as reaper:

        def start(attempt: int, restarted: bool) -> list[Worker]:
            return _start_ranks(replace(spec, job=replace(job, restart_count=attempt), restarted=restarted), reaper)

        with job_folder(run_dir):
            return supervise(start, options, run_dir=run_dir, record=record)


def _start_ranks(spec: WorkerSpec, reaper: Reaper) -> list[Worker]:
    """Start all ranks of one attempt; they meet at a fresh loopback port that rank 0 already holds.

    Raises LaunchError if one cannot be started; then none is left running.
    """
    job = spec.job
    listener = socket.create_server((LOOPBACK, 0), backlog=2048) if job.world_size > 1 else None
    if listener is not None:
        job = replace(job, master_port=listener.getsockname()[1])
    workers: list[Worker] = []
    try:
        for rank in range(job.world_size):
            fd = listener.fileno() if listener is not None and rank == 0 else None
            rank_spec = replace(spec, job=replace(job, rank=rank, local_rank=rank, listen_fd=fd))
            if rank == 0:
                workers.append(start_worker(rank_spec, reaper))
                continue
            log = spec.logs / f"rank-{rank}.attempt-{job.restart_count}.log"
            with open_log(log) as output:
                workers.append(start_worker(rank_spec, reaper, log=log, output=output))
    except LaunchError:
        for worker in workers:
            worker.kill_group()
        raise
    finally:
        if listener is not None:
            # rank 0 has inherited it; when it ends, the port is free
            listener.close()
    return workers


def refuse_inside_a_job(run_dir: Path) -> None:
    """Raises LaunchError if another launcher has started this process as one of several ranks."""
    outer = job_from_environ(os.environ)
    if outer.world_size > 1:
        raise LaunchError(
            given=f"this process is rank {outer.rank} of {outer.world_size} of a job that {outer.source} started",
            rule="the local launcher starts a whole job by itself",
            consequence=f"{outer.world_size} jobs would write into {run_dir}, so nothing was started",
            nearest="run the training command itself here; it joins the job it is started in",
        )


def with_servers(command: Sequence[str], options: LaunchOptions, run_dir: Path) -> JobLayout:
    """The layout of an asynchronous job on this host: ``command`` as workers, with parameter servers."""
    processes = options.num_processes or max(1, count_accelerators())
    hosts = (Host(name="this host", slots=processes, here=True),)
    return JobLayout(
        command=tuple(command),
        server_command=SERVER,
        hosts=hosts,
        slots=assign_processes(hosts, processes, options.num_servers),
        run_id=run_dir.absolute().name,
        options=options,
        environ=server_environ(options),
        snapshots=str(run_dir.absolute() / "servers"),
    )


def run_job(job: JobLayout, run_dir: Path) -> int:
    """Run ``job``; returns 0, 1, 2, 75 (requeue) or 76 (do not repeat).

    A job of one host without servers runs as ``launch_local`` does. Otherwise every process's output is also shown
    here, prefixed with its name. ``run_dir/launch.json`` and ``run_dir/logs`` are as with ``launch_local``.

    Raises:
        LaunchError: Nothing can be started.
        ConfigError: Another launch uses ``run_dir``.
        CommError: A lost host does not come back.
    """
    if job.plain:
        interface = choose_interface(job.interface, LOOPBACK)
        options = replace(job.options, num_processes=len(job.workers))
        return launch_local(
            job.command, options, run_dir=run_dir, run_id=job.run_id, environ=job.environ, interface=interface
        )
    refuse_inside_a_job(run_dir)
    tls_folder(job.options, {**os.environ, **job.environ})
    with ExitStack() as stack:
        stack.enter_context(job_folder(run_dir))
        if (
            job.snapshots
        ):  # they are for restarts of a server within one launch; a later launch begins from a checkpoint
            shutil.rmtree(job.snapshots, ignore_errors=True)
            job = replace(job, snapshots=f"{job.snapshots}/{secrets.token_hex(4)}")
        running = stack.enter_context(MultiHostJob(job, run_dir / LOGS_FOLDER, print_message))
        record = {"run_id": job.run_id, "command": list(job.command), "hosts": running.facts}
        if job.servers:
            record["server_command"] = list(job.server_command)
        if job.servers or job.joins is not None:
            if job.elastic and running.secret is not None:
                workers = len(job.workers)
                stack.enter_context(open_to_workers(run_dir, job.run_id, workers, running.addresses, running.secret))
            return supervise_elastic(
                running.start_one, job.slots, job.options, run_dir=run_dir, record=record, elastic=job.elastic
            )
        return supervise(running.start_all, job.options, run_dir=run_dir, record=record)


# --- dry run ---------------------------------------------------------------------------------------------------------


def describe_launch(job: JobLayout) -> dict[str, Any]:
    """Describe, in JSON types, the processes that ``run_job`` would start. Starts nothing and contacts no host.

    ``hosts`` has the command run here for each host, ``processes`` each process's argument vector and variables in
    start order. Ports are free ones of now; a launch chooses again. The secret is not shown: it is made when the job
    starts.
    """
    tls_folder(job.options, {**os.environ, **job.environ})
    addresses = [f"{job.rendezvous_host(slot)}:{free_port(LOOPBACK)}" for slot in job.servers]
    workers = job.workers
    if job.servers or len(workers) == 1:
        master = f"{LOOPBACK}:0"
    else:
        master = f"{job.rendezvous_host(workers[0])}:{job.port or free_port(LOOPBACK)}"
    processes: list[dict[str, Any]] = []
    for slot in [*job.servers, *workers]:
        host = job.hosts[slot.host]
        spec = job.job_spec(slot, restart_count=0, master=master, servers=addresses)
        environ = job.variables(slot) | spec.environ()
        if host.here:
            share = divide_host(replace(job.options, num_processes=len(workers)), {**os.environ, **job.environ})
            interface = choose_interface(job.interface, LOOPBACK)
            environ |= share.environ() | interface.environ()
        processes.append(
            {"name": slot.name, "host": host.name, "command": job.argv(slot), "environ": dict(sorted(environ.items()))}
        )
    hosts: list[dict[str, Any]] = []
    for host in [] if job.plain else [job.hosts[number] for number in sorted({slot.host for slot in job.slots})]:
        script = None if host.here else agent_script(job.environ)
        hosts.append({"host": host.name, "command": agent_command(host), "standard_input": script})
    later: list[str] = []
    if not all(job.hosts[slot.host].here for slot in job.slots):
        later.append("threads, allocator and interface, by the agent of each host")
    if job.joins is None and len(job.slots) > 1:
        later.append("the job's secret, which its processes get by a descriptor")
    return {"run_id": job.run_id, "hosts": hosts, "processes": processes, "decided_at_start": later}


def dry_run_text(description: dict[str, Any]) -> str:
    """``describe_launch`` as text; each process's line can be pasted into a shell."""
    lines: list[str] = []
    for host in description["hosts"]:
        lines += [f"# {host['host']}: its agent", shlex.join(host["command"])]
        if host["standard_input"] is not None:
            lines += ["# which reads", *(f"#   {line}" for line in host["standard_input"].splitlines())]
    for process in description["processes"]:
        settings = [f"{name}={value}" for name, value in process["environ"].items()]
        lines += [f"# {process['name']} on {process['host']}", shlex.join(["env", *settings, *process["command"]])]
    lines += [f"# decided when the job starts: {item}" for item in description["decided_at_start"]]
    return "\n".join(lines)
