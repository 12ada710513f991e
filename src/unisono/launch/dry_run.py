"""What a launch would do, as data and as text that a shell can run: ``--dry-run``. Nothing is started and no host is asked.

Each process is shown with its argument vector and every variable the launcher would set. Ports are chosen as they are free
here and now; a launch chooses anew, and holds them from then on. A secret is not shown: it is made when the job starts.
"""

from __future__ import annotations

import os
import shlex
import socket
from dataclasses import replace
from typing import Any

from unisono.dist.jobspec import LOOPBACK
from unisono.launch.host_agent_client import agent_command, agent_script
from unisono.launch.network_interface import interface_by_name, interface_towards
from unisono.launch.options import tls_folder
from unisono.launch.process_layout import JobLayout
from unisono.launch.resources import divide_host


def describe_launch(job: JobLayout) -> dict[str, Any]:
    """JSON types: ``hosts`` with the command that is run here for each, ``processes`` in the order they are started."""
    tls_folder(job.options, {**os.environ, **job.environ})
    addresses = [f"{job.meeting_host(seat)}:{_free_port()}" for seat in job.servers]
    workers = job.workers
    if job.servers or len(workers) == 1:
        master = f"{LOOPBACK}:0"
    else:
        master = f"{job.meeting_host(workers[0])}:{job.port or _free_port()}"
    processes: list[dict[str, Any]] = []
    for seat in [*job.servers, *workers]:
        host = job.hosts[seat.host]
        environ = job.variables(seat) | job.place(seat, epoch=0, master=master, servers=addresses).environ()
        if host.here:
            own = {**os.environ, **job.environ}
            environ |= divide_host(replace(job.options, num_processes=len(workers)), own).environ()
            environ |= (interface_by_name(job.interface) if job.interface else interface_towards(LOOPBACK)).environ()
        processes.append(
            {"name": seat.name, "host": host.name, "command": job.argv(seat), "environ": dict(sorted(environ.items()))}
        )
    hosts: list[dict[str, Any]] = []
    for number in [] if job.plain else sorted({seat.host for seat in job.seats}):
        host = job.hosts[number]
        script = None if host.here else agent_script(job.environ)
        hosts.append({"host": host.name, "command": agent_command(host), "standard_input": script})
    later = (
        ["threads, allocator and interface, by the agent of each host"]
        if not all(job.hosts[s.host].here for s in job.seats)
        else []
    )
    if job.servers:
        later.append("the job's secret, which servers and workers get by a pipe")
    return {"run_id": job.run_id, "hosts": hosts, "processes": processes, "decided_at_start": later}


def dry_run_text(shown: dict[str, Any]) -> str:
    """For people; each process's line can be pasted into a shell."""
    lines: list[str] = []
    for host in shown["hosts"]:
        lines += [f"# {host['host']}: its agent", shlex.join(host["command"])]
        if host["standard_input"] is not None:
            lines += ["# which reads", *(f"#   {line}" for line in host["standard_input"].splitlines())]
    for process in shown["processes"]:
        settings = [f"{name}={value}" for name, value in process["environ"].items()]
        lines += [f"# {process['name']} on {process['host']}", shlex.join(["env", *settings, *process["command"]])]
    lines += [f"# decided when the job starts: {what}" for what in shown["decided_at_start"]]
    return "\n".join(lines)


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as probe:
        return int(probe.getsockname()[1])
