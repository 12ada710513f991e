"""``unisono train``: trains a model in one or more processes.

Started directly, this process launches workers and supervises them. Under torchrun, srun or mpirun, and in the workers, it is
one rank of the job. With ``--debug`` the whole job runs in this process.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import click

from unisono.cli.common import (
    LOG,
    ExpandedPath,
    common_options,
    load_run_config,
    log_level,
    print_json,
    takes_config,
    trust_arguments,
)
from unisono.config import Resolved
from unisono.dist import JobSpec, job_from_environ
from unisono.dist.jobspec import idle_role
from unisono.errors import CommError, ConfigError, LaunchError, UnisonoError
from unisono.exit_codes import REQUEUE, USER_ERROR
from unisono.plan.options import PlanOptions
from unisono.plan.resolve import with_strategy_file
from unisono.storage import directory
from unisono.storage.files import open_new
from unisono.storage.run_folder import LAUNCH_FILE, PLAN_FILE, RUN_FILE
from unisono.train.config import RunConfig


@click.command("train")
@takes_config
@click.option(
    "--plan",
    "plan_file",
    type=ExpandedPath(),
    help="Strategy file; the same as --set plan.file=FILE. auto = search the fastest plan first (unisono plan auto).",
)
@click.option("--debug", is_flag=True, help="One process, eager, no workers or threads: for a debugger. Same samples.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Train nothing: trace a step of some ranks here, and print the memory that each needs.",
)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    help="With --dry-run, ranks of the job (default: those of the strategy file, else launch.num_processes).",
)
@click.option(
    "--rank",
    "ranks",
    type=click.IntRange(min=0),
    multiple=True,
    help="With --dry-run, a rank to trace; may be repeated (default: one of each pipeline stage).",
)
@common_options
def command(
    config: tuple[str, ...],
    overrides: tuple[str, ...],
    plan_file: str | None,
    debug: bool,
    dry_run: bool,
    processes: int | None,
    ranks: tuple[int, ...],
    as_json: bool,
) -> int:
    """Train as CONFIG says: TOML files, later ones winning, or a Python file with config().

    Without CONFIG a small GPT learns Python from the standard library's own source. A run found in run.dir is resumed
    where its last committed checkpoint stands.
    """
    if plan_file == "auto":
        overrides = (*overrides, *_searched(config, overrides))
    elif plan_file is not None:
        overrides = (*overrides, f"plan.file={json.dumps(os.path.abspath(plan_file))}")
    resolved = load_run_config(config, overrides)
    if dry_run:
        from unisono.cli import dry_run as traced

        traced.dry_run(resolved, processes, ranks, as_json=as_json)
        return 0
    if processes is not None or ranks:
        raise ConfigError(
            given="--processes or --rank without --dry-run",
            rule="they are ranks of a job that is traced in this process",
            consequence="nothing was started",
            nearest="--dry-run, or --set launch.num_processes=N for a job of N processes",
        )
    job = job_from_environ(os.environ)
    sync = _sync(resolved.value.plan)
    if job.role != "worker":
        _take_role(job, sync)
    if (leaves := idle_role(job, "dist_sync" if sync == "auto" else sync)) is not None:
        click.echo(leaves)
        return 0
    if debug and job.world_size > 1:
        raise LaunchError(
            given=f"train --debug as rank {job.rank} of {job.world_size} of a job that {job.source} started",
            rule="--debug is the whole run in one process",
            consequence=f"{job.world_size} runs would write into one folder, so nothing was started",
            nearest="start it outside the job, or leave --debug out",
        )
    servers = job.servers or resolved.value.launch.num_servers
    if sync == "dist_async" and resolved.value.launch.num_replicas > servers:
        raise ConfigError(
            given=f"launch.num_replicas {resolved.value.launch.num_replicas} with {servers} "
            f"server{'' if servers == 1 else 's'}",
            rule="a replica is on another server than its primary",
            consequence="nothing was started",
            nearest=f"launch.num_servers={resolved.value.launch.num_replicas}, or launch.num_replicas=1",
        )
    run_dir = Path(resolved.value.run.dir)
    # a worker's launcher has looked, and has written a launch.json of its own since
    if not config and job.source == "single" and resolved.origins["run.dir"] != "default":
        _warn_of_no_run(run_dir)
    new_folders = make_folder(run_dir)
    code = 1
    try:
        if debug:
            code = _work(_eager(resolved), JobSpec(), as_json=as_json)
        elif job.source != "single":
            code = _work(resolved, job, as_json=as_json)
        else:
            code = _launch(resolved, [*config, *(f"--set={text}" for text in overrides)], as_json=as_json)
        return code
    except UnisonoError as error:
        code = error.exit_code
        if isinstance(error, CommError) and code != USER_ERROR and job.world_size > 1:
            _leave(error)
        raise
    finally:
        # the configuration file is written before the first step: without it there is no run in the folder
        if code == USER_ERROR and new_folders and job.rank == 0 and not os.path.lexists(run_dir / RUN_FILE):
            _remove_folders(new_folders)


def _warn_of_no_run(run_dir: Path) -> None:
    """Warn if a run was to begin in the folder and did not: no file there has its settings, which its user may expect."""
    if os.path.isfile(run_dir / LAUNCH_FILE) and not os.path.lexists(run_dir / RUN_FILE):
        LOG.warning(
            "%s has a launch.json and no %s: no run began there, so the defaults apply, apart from what this command sets; "
            "name the CONFIG of that start if it had one",
            run_dir,
            RUN_FILE,
        )


def _take_role(job: JobSpec, sync: str) -> None:
    """Become the scheduler, or a server that the workers use, where MXNet's tracker started this process for that."""
    from unisono.dist.dmlc import has_credentials, take_role

    if job.role == "scheduler" or (sync == "dist_async" and has_credentials(os.environ)):
        take_role(job)


def _launch(resolved: Resolved[RunConfig], arguments: Sequence[str], *, as_json: bool) -> int:
    """Start this command line in every process of this host; return the exit code of the job."""
    from unisono.dist.interpreter import module_command
    from unisono.launch import LaunchOptions, launch_local
    from unisono.launch.child import IS_CHILD
    from unisono.launch.job import run_job, with_servers
    from unisono.launch.options import SERVER_OPTIONS

    level = log_level()
    flags = [*(["--json"] if as_json else []), *([f"--log-level={level}"] if level else [])]
    flags += trust_arguments()
    run_dir, options = Path(resolved.value.run.dir), resolved.value.launch
    command_line = module_command("unisono", "train", *flags, *arguments)
    if (sync := _sync(resolved.value.plan)) != "dist_async":
        if any(getattr(options, name) != getattr(LaunchOptions(), name) for name in SERVER_OPTIONS):
            LOG.warning("no servers are started: plan.sync %r all-reduces gradients among the ranks", sync)
        code = launch_local(command_line, options, run_dir=run_dir, run_id=run_dir.absolute().name)
        if code not in (0, REQUEUE) and resolved.value.observe.report and IS_CHILD not in os.environ:
            from unisono.cli.out_of_memory import explain

            explain(run_dir, arguments)
        return code
    return run_job(with_servers(command_line, options, run_dir), run_dir)


def _leave(error: CommError) -> NoReturn:
    """Print the error and exit immediately: a normal exit would wait another time-out for Gloo's pending operations."""
    from unisono.cli.main import show_error

    show_error(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.exit_code)


def _searched(config: tuple[str, ...], overrides: tuple[str, ...]) -> list[str]:
    """Settings of the fastest plan; of a run that has begun, its own plan, if it is for as many ranks.

    Raises PlanError if none is found.
    """
    from unisono.cli.plan_auto import found_settings

    job = job_from_environ(os.environ)
    if job.world_size > 1:
        raise ConfigError(
            given=f"train --plan auto as rank {job.rank} of a job of {job.world_size}",
            rule="the search is made once, before the ranks are started",
            consequence="nothing was started",
            nearest="unisono plan auto --apply FILE before, and FILE as the configuration of the job",
        )
    resolved = load_run_config(config, overrides)
    begun = Path(resolved.value.run.dir) / PLAN_FILE
    if resolved.value.run.resume != "never" and begun.exists():
        from unisono.plan.plan import Plan

        if Plan.load(begun).mesh.world_size == max(1, resolved.value.launch.num_processes):
            return [f"plan.file={json.dumps(str(begun.absolute()))}"]
    return found_settings(resolved, config, overrides)


def _sync(options: PlanOptions) -> str:
    return with_strategy_file(options)[0].sync


def _work(resolved: Resolved[RunConfig], job: JobSpec, *, as_json: bool) -> int:
    """Run one rank and return its exit code."""
    from unisono.cli.rank import run_rank

    if job.interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", job.interface)
    config = resolved.value
    if config.run.resume not in ("auto", "strict") and _restarted(job):
        # a given start applies once; a restart continues from the run's own checkpoints
        LOG.info("restarted: run.resume %r becomes 'auto'", config.run.resume)
        resolved = replace(resolved, value=replace(config, run=replace(config.run, resume="auto")))
    outcome = run_rank(resolved, job, quiet=as_json)
    if as_json and job.rank == 0:
        print_json(outcome)
    return REQUEUE if outcome["reason"] == "preempted" else 0


def _restarted(job: JobSpec) -> bool:
    """Whether a launcher started this process in place of a crashed one."""
    if job.source == "unisono":
        return bool(json.loads(os.environ.get("UNISONO_LAUNCH", "{}")).get("restarted"))
    return job.restart_count > 0


def _eager(resolved: Resolved[RunConfig]) -> Resolved[RunConfig]:
    """The run without compilation and background work; the configuration file in the folder is unchanged."""
    config = resolved.value
    eager = replace(
        config,
        plan=replace(config.plan, compile="off"),
        loader=replace(config.loader, num_workers=0),
        checkpoint=replace(config.checkpoint, asynchronous=False),
    )
    return replace(resolved, value=eager)


def make_folder(run_dir: Path) -> list[Path]:
    """Create the run's folder and check that it is writable.

    Returns:
        The folders that this process created, outermost first.

    Raises:
        ConfigError: The folder cannot be created or written.
    """
    missing = [folder for folder in (run_dir, *run_dir.parents) if not os.path.lexists(folder)]
    new_folders = list(reversed(missing))
    try:
        directory.make_folder(run_dir)
        # ranks of several hosts create it at the same time, and in containers each may be process 1
        probe = run_dir / f".writable-{secrets.token_hex(8)}"
        open_new(probe).close()
        probe.unlink()
    except OSError as error:
        _remove_folders(new_folders)
        raise ConfigError(
            given=f"run.dir {str(run_dir)!r}: {error.strerror or error}",
            rule="a run keeps its configuration, events and checkpoints in a folder it can write to",
            consequence="nothing was started",
            nearest="run.dir in a folder of your own, such as runs/first",
        ) from None
    return new_folders


def _remove_folders(folders: Sequence[Path]) -> None:
    """Delete the last folder with its content, and the folders around it if they are empty."""
    for folder in reversed(folders):
        if folder == folders[-1]:
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            folder.rmdir()
