"""Starts a run again as a child process that replays some of its steps."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from unisono.compare.replayable import ReplayableRun
from unisono.compare.step_record import REPLAY_VARIABLE, ReplayRequest, read_replays
from unisono.config.fields import BASE
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
_SCRIPT_FORM: Final = "--script 'train.py ARGUMENTS', the command line that made it, without python"


def replay_as_child(
    run: ReplayableRun, request: ReplayRequest, *, script: str | None, flags: Sequence[str], timeout_s: float
) -> None:
    """Replay a run in child processes, as many as it had ranks, on this host.

    Args:
        run: The run.
        request: What to replay.
        script: Command line of the Python script that made it, without the interpreter; None for a run of ``unisono train``,
            whose folder names its Python file where it has one.
        flags: Options of ``unisono train``, such as ``--trust-python``.
        timeout_s: Most seconds that it may take.

    Raises:
        ConfigError: It is the run of a script and ``script`` is None, or the other way round; ``script`` begins with no file; the
            run had more ranks than this host can start; or the child failed, or made no step of a ``Trainer``.
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
        command = [sys.executable, *_script_words(script, run.run_dir)]
        if run.world > 1:
            options = ["-n", str(run.world), "--max-restarts", "0", "--dir", str(folder / "launch")]
            command = module_command("unisono", "launch", *options, "--", *command)
    else:
        if is_of_script(run.run_dir):
            raise ConfigError(
                given=f"{run.run_dir}, the run of a Python script",
                rule="its folder holds names of its code and no code",
                consequence="it was not replayed",
                nearest=f"{_SCRIPT_FORM}; twice, for A and then for B, where the runs have other arguments or code",
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
    if script is not None and not read_replays(Path(request.record_dir)):
        raise ConfigError(
            given=f"--script {script!r}, which ended without a step of a Trainer",
            rule="a script is replayed by the Trainer that it makes",
            consequence="the first divergence is not known",
            nearest=f"{_SCRIPT_FORM}, with all its arguments",
        )


def _script_words(script: str, run_dir: Path) -> list[str]:
    """The words of a script's command line, which Python gets as arguments. Raises ConfigError."""
    file = run_dir / RUN_FILE
    if file.is_file() and BASE in read_toml(file).values:
        raise ConfigError(
            given=f"--script {script!r} for {run_dir}, a run of unisono train",
            rule=f"its {RUN_FILE} names the Python file with its code, which unisono train reads again",
            consequence="it was not replayed",
            nearest="the same without --script",
        )
    try:
        words = shlex.split(script)
    except ValueError:  # a quotation mark without a second one
        words = []
    # "-m package" is a command line of Python too
    is_python = bool(words) and re.fullmatch(r"python[0-9.]*", os.path.basename(words[0])) is not None
    if not words or is_python or not (words[0].startswith("-") or os.path.isfile(words[0])):
        raise ConfigError(
            given=f"--script {script!r}",
            rule=f"it begins with the path of the script, from this folder ({os.getcwd()}), without python before it",
            consequence="it was not replayed",
            nearest=_SCRIPT_FORM,
        )
    return words


def is_of_script(run_dir: Path) -> bool:
    """Whether a Python script with a ``Trainer`` made the run. A run of ``unisono train`` names its Python file as ``base``.

    Raises ConfigError for a folder without a configuration.
    """
    try:
        values = read_toml(run_dir / RUN_FILE).values
    except OSError:
        raise ConfigError(
            given=f"{run_dir}, which has no {RUN_FILE}",
            rule="a run is replayed with the configuration in its folder",
            consequence="nothing was replayed",
            nearest="the folder of a run (run.dir), whole",
        ) from None
    components: Any = values.get("components")
    return (
        BASE not in values
        and isinstance(components, dict)
        and any(isinstance(label, str) and label.startswith(CALLABLE) for label in list(components.values()))
    )
