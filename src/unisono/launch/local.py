"""The launcher of one host: N processes of one command, which meet at a loopback port. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from unisono.dist import job_from_environ
from unisono.errors import LaunchError
from unisono.launch.network_interface import NetworkInterface
from unisono.launch.options import LaunchOptions
from unisono.launch.resources import divide_host
from unisono.launch.supervise import supervise
from unisono.launch.workers import Reaper, Worker, start_workers


def launch_local(
    command: Sequence[str],
    options: LaunchOptions,
    *,
    run_dir: Path,
    run_id: str,
    environ: Mapping[str, str] | None = None,
    interface: NetworkInterface | None = None,
) -> int:
    """Runs ``command`` in every process and returns the exit code of the whole: 0, 1, 2, 75 (requeue) or 76 (do not repeat).

    Workers find their place with ``job_from_environ``, and ``environ`` over what they inherit; ``interface`` is the one their
    transports are told (None: they choose, and jobs of one host choose loopback). Rank 0 writes to this terminal,
    the others to ``run_dir/logs/rank-N.attempt-K.log``; ``run_dir/launch.json`` says what was set and how each attempt ended.
    Call it on the main thread, in a process without other threads.

    Raises LaunchError when nothing can be started: unwritable folder, unknown command, or already inside a job.
    """
    refuse_inside_a_job(run_dir)
    set_for_all = {**(interface.environ() if interface else {}), **(environ or {})}
    share = divide_host(options, {**os.environ, **set_for_all})
    with Reaper() as guard:

        def start(epoch: int, restarted: bool) -> list[Worker]:
            return start_workers(
                command,
                share,
                run_id=run_id,
                epoch=epoch,
                logs=run_dir / "logs",
                guard=guard,
                keep_faults=not restarted,
                environ=set_for_all,
            )

        record = {"run_id": run_id, "command": list(command), **share.record()}
        if interface is not None:
            record |= {"interface": interface.name, "interface_why": interface.why}
        return supervise(start, options, run_dir=run_dir, record=record)


def refuse_inside_a_job(run_dir: Path) -> None:
    """Raises LaunchError where another launcher has started several of this process."""
    outer = job_from_environ(os.environ)
    if outer.world_size > 1:
        raise LaunchError(
            given=f"this process is rank {outer.rank} of {outer.world_size} of a job that {outer.source} started",
            rule="the local launcher starts a whole job by itself",
            consequence=f"{outer.world_size} jobs would write into {run_dir}, so nothing was started",
            nearest="run the training command itself here; it joins the job it is started in",
        )
