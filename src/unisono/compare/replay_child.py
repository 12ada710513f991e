"""Starts a run again as a child process that replays some of its steps."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from unisono.compare.replayable import ReplayableRun
from unisono.compare.step_record import REPLAY_VARIABLE, ReplayRequest
from unisono.config.toml_file import read_toml
from unisono.config.values import CALLABLE
from unisono.dist.interpreter import module_command
from unisono.doctor.child import run_child
from unisono.doctor.short_run import set_arguments
from unisono.errors import ConfigError
from unisono.storage.files import write_atomically
from unisono.storage.run_folder import RUN_FILE

_RANKS_PER_CORE: Final = 8  # a run folder may say any number of them
# a replay writes to no tracker and uploads nothing; whatever it does not need is off
_QUIET: Final[dict[str, Any]] = {
    "observe.console": "off",
    "observe.trackers": [],
    "observe.report": False,
    "observe.monitor_every_s": 0.0,
    "observe.profile_steps": "",
    "observe.replay_nonfinite": False,
    "launch.max_restarts": 0,
    "checkpoint.upload_to": "",
}


def replay_as_child(
    run: ReplayableRun, request: ReplayRequest, *, script: str | None, flags: Sequence[str], timeout_s: float
) -> None:
    """Replay a run in child processes, as many as it had ranks, on this host.

    Args:
        run: The run.
        request: What to replay.
        script: Command line of the Python script that made it, without the interpreter; None for a run of ``unisono train``.
        flags: Options of ``unisono train``, such as ``--trust-python``.
        timeout_s: Most seconds that it may take.

    Raises:
        ConfigError: It is the run of a script and ``script`` is None, it had more ranks than this host can start, or the child
            failed.
    """
    most = _RANKS_PER_CORE * len(os.sched_getaffinity(0))
    if run.world > most:
        raise ConfigError(
            given=f"{run.run_dir}, by its events a run of {run.world:,} ranks",
            rule=f"a replay starts them all on this host, whose cores allow {most}",
            consequence="it was not replayed",
            nearest="a host with more cores; or the same comparison of two runs with fewer ranks",
        )
    folder = Path(request.record_dir).parent
    file = folder / "request.json"
    write_atomically(file, msgspec.json.encode(request))
    if script is not None:
        command = [sys.executable, *shlex.split(script)]
        if run.world > 1:
            options = ["-n", str(run.world), "--max-restarts", "0", "--dir", str(folder / "launch")]
            command = module_command("unisono", "launch", *options, "--", *command)
    else:
        if is_of_script(run.run_dir):
            raise ConfigError(
                given=f"{run.run_dir}, the run of a Python script",
                rule="its folder holds names of its code and no code",
                consequence="it was not replayed",
                nearest="--script 'train.py ARGUMENTS', the command line that made it; twice where the runs have other code",
            )
        settings = {
            **_QUIET,
            "run.dir": request.run_dir,
            "run.resume": request.resume or "auto",
            "launch.num_processes": run.world,
        }
        arguments = [*flags, str(run.run_dir / RUN_FILE), *set_arguments(settings)]
        command = module_command("unisono", "train", *arguments)
    outcome = run_child(Path(request.run_dir), command, timeout_s=timeout_s, variables={REPLAY_VARIABLE: str(file)})
    if outcome.trouble:
        raise ConfigError(
            given=f"the replay of {run.run_dir}: {outcome.trouble}",
            rule="a run is replayed with the configuration and code it had, in the folder where it was started",
            consequence="the first divergence is not known",
            nearest="repair the error above; start in the working folder, with the files and packages, of the run",
        )


def is_of_script(run_dir: Path) -> bool:
    """Whether a run is that of a Python script. Raises ConfigError for a folder without a configuration."""
    try:
        components: Any = read_toml(run_dir / RUN_FILE).values.get("components")
    except OSError:
        raise ConfigError(
            given=f"{run_dir}, which has no {RUN_FILE}",
            rule="a run is replayed with the configuration in its folder",
            consequence="nothing was replayed",
            nearest="the folder of a run (run.dir), whole",
        ) from None
    return isinstance(components, dict) and any(
        isinstance(label, str) and label.startswith(CALLABLE) for label in list(components.values())
    )
