"""One job from start to end, wherever its processes are: what ``unisono launch`` and runs with parameter servers call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from unisono.dist.jobspec import LOOPBACK
from unisono.launch.elastic import supervise_elastic
from unisono.launch.fleet import Fleet
from unisono.launch.interface import named, towards
from unisono.launch.layout import Job
from unisono.launch.local import launch, refuse_inside_a_job
from unisono.launch.supervise import make_folders, say, supervise


def run_job(job: Job, run_dir: Path) -> int:
    """Runs ``job`` and returns its exit code: 0, 1, 2, 75 (requeue) or 76 (do not repeat).

    ``run_dir/launch.json`` and ``run_dir/logs`` are as with ``unisono.launch.launch``, which does it where all ranks are on this
    host and there are no servers. Otherwise every process's output is also shown here, with its name in front.

    Raises LaunchError when nothing can be started, CommError when a host that was lost does not come back.
    """
    if job.plain:
        way = named(job.interface) if job.interface else towards(LOOPBACK)
        options = replace(job.options, processes=len(job.workers))
        return launch(job.command, options, run_dir=run_dir, run_id=job.run_id, environ=job.environ, interface=way)
    refuse_inside_a_job(run_dir)
    make_folders(run_dir)
    with Fleet(job, run_dir / "logs", say) as fleet:
        record = {"run_id": job.run_id, "command": list(job.command), "hosts": fleet.facts}
        if job.servers:
            record["server_command"] = list(job.server_command)
            return supervise_elastic(fleet.start_one, job.seats, job.options, run_dir=run_dir, record=record)
        return supervise(fleet.start_all, job.options, run_dir=run_dir, record=record)
