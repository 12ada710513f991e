"""Trials of ``unisono tune``: checked before they begin, and run, with a line for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.cli.common import load_run_config, train_arguments
from unisono.cli.job_progress import resumable
from unisono.cli.terminal import echo
from unisono.errors import ConfigError
from unisono.sanitize import printable

if TYPE_CHECKING:
    from unisono.config import Resolved
    from unisono.train.config import RunConfig
    from unisono.tune.search import Budget
    from unisono.tune.study import Outcome, Study, Trial


def unused_run_dir(out: Path) -> Path:
    """A ``run.dir`` without a run, in the folder of a search: the configuration of a run that is there would be read."""
    return out.absolute() / "trials" / "none"


def run_trials(
    study: Study,
    out: Path,
    resolved: Resolved[RunConfig],
    files: Sequence[str],
    overrides: Sequence[str],
    metric: str,
    budget: Budget,
    parallel: int,
    *,
    write: Callable[[], object],
    as_json: bool,
) -> None:
    """Run the trials of a study.

    Args:
        study: Where they come from.
        out: Its folder, as it was given.
        resolved: The configuration without the settings that are searched.
        files: Its files.
        overrides: Settings of the command line.
        metric: Name of the number that counts.
        budget: When no further trial begins.
        parallel: Trials at a time.
        write: Called after each trial, to write the report of those made so far.
        as_json: Whether no lines are printed.
    """
    from unisono.tune.search import Search
    from unisono.tune.slots import divide_into_slots

    printed = _Printed(metric=metric, as_json=as_json)

    def on_end(trial: Trial, outcome: Outcome, value: float | None, reason: str) -> None:
        printed.on_end(trial, outcome, value, reason)
        write()

    launch = resolved.value.launch
    search = Search(
        study=study,
        arguments=train_arguments(files, overrides),
        metric=metric,
        budget=budget,
        slots=divide_into_slots(parallel, launch.num_processes, has_num_threads=launch.num_threads != 0),
        on_start=printed.on_start,
        on_end=on_end,
    )
    with resumable(out):
        search.run()


def check_searched(
    files: Sequence[str], overrides: Sequence[str], checked: Mapping[str, Sequence[str]], out: Path
) -> Resolved[RunConfig]:
    """The configuration without the settings that are searched; ``checked`` has values with which each
    of those is tried.

    Raises:
        ConfigError: A value is none of its setting, or a setting is given too.
    """
    given = {text.partition("=")[0].strip() for text in overrides}
    for name in ("run.dir", "run.resume"):
        if name in checked or name in given:
            raise ConfigError(
                given=name,
                rule="each trial is a run of its own, in a folder of the search",
                consequence="nothing was started",
                nearest="leave it out; --out is the folder of the search",
            )
    if both := sorted(given & set(checked)):
        raise ConfigError(
            given=f"--set {both[0]} with --space {both[0]}",
            rule="a setting has one value, or is searched",
            consequence="nothing was started",
            nearest="one of them",
        )
    folder = f"run.dir={unused_run_dir(out)}"
    for name, values in checked.items():
        for value in values:
            load_run_config(files, [*overrides, folder, f"{name}={value}"], is_shown=True)
    return load_run_config(files, [*overrides, folder], is_shown=True)


def identity_of(resolved: Resolved[RunConfig]) -> dict[str, Any]:
    """What the trials of a search have in common."""
    code = {} if resolved.python is None else {"python_file": resolved.python.digest}
    return {name: value for name, value in resolved.encoded.items() if name != "run.dir"} | code


class _Printed:
    """Lines about trials, as they begin and end."""

    def __init__(self, *, metric: str, as_json: bool) -> None:
        self._metric, self._as_json = metric, as_json

    def on_start(self, trial: Trial) -> None:
        settings = " ".join(f"{name}={text}" for name, text in trial.settings.items())
        self._print(f"trial {trial.number}: {settings}")

    def on_end(self, trial: Trial, outcome: Outcome, value: float | None, reason: str) -> None:
        figure = "" if value is None else f"{self._metric} {value:.6g}"
        words = outcome.replace("_", " ")
        why, *more = reason.splitlines() or [""]
        shown = [figure if outcome == "done" else f"{words}{f', {figure}' if figure else ''}", why]
        shown += [f"try: {line.strip().removeprefix('try:').strip()}" for line in more if line.startswith("  try:")]
        self._print(f"trial {trial.number}: {'; '.join(filter(None, shown))}")

    def _print(self, line: str) -> None:
        if not self._as_json:
            echo(printable(line))
