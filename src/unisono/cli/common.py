"""What verbs share: the options every verb has, and how a verb finds its configuration."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from unisono.config import Resolved, load_config
from unisono.config.renames import announce
from unisono.dist import job_from_environ
from unisono.errors import CheckpointError, ConfigError, LaunchError
from unisono.train.config import RunConfig

F = TypeVar("F", bound=Callable[..., Any])

RESOLVED = "config.toml"
PLAN = "plan.json"
LOG = logging.getLogger("unisono")
LEVELS = ("debug", "info", "warning", "error")

_LEVEL = "unisono.log_level"


def every_verb(function: F) -> F:
    """Adds ``--json``, ``-v`` and ``--log-level``; the level is applied while options are parsed."""
    function = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")(function)
    function = click.option(
        "-v", "--verbose", is_flag=True, expose_value=False, callback=_verbose, help="Same as --log-level debug."
    )(function)
    return click.option(
        "--log-level",
        type=click.Choice(LEVELS),
        expose_value=False,
        callback=_set_level,
        help="Least severe message on standard error (default warning); debug shows every event and tracebacks.",
    )(function)


def takes_config(function: F) -> F:
    """Adds the configuration files and ``--set``."""
    function = click.argument("config", nargs=-1, type=click.Path())(function)
    return click.option(
        "-s", "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set one value; wins over every file."
    )(function)


def log_level() -> str | None:
    """The level this command line asked for, to be handed to processes it starts; None where it asked for none."""
    return click.get_current_context().meta.get(_LEVEL)


def load_run_config(files: Sequence[str], overrides: Sequence[str]) -> Resolved[RunConfig]:
    """The run's configuration. Where no file is given and ``run.dir`` holds a run, that run's own file is the base."""
    kept = None if files else _kept(overrides)
    resolved = load_config(RunConfig, [kept] if kept else files, overrides=overrides, environ=os.environ)
    one_time = resolved.value.run.resume not in ("auto", "strict")
    if kept is not None and one_time and resolved.origins["run.resume"].startswith(f"{kept}:"):
        # "never" and a path were about that one start; asking again for the folder means: go on
        resolved = load_config(RunConfig, [kept], overrides=["run.resume=auto", *overrides], environ=os.environ)
        resolved = replace(resolved, origins=resolved.origins | {"run.resume": "default"})
    _announce("the configuration", resolved.renamed)
    LOG.info("configuration %s from %s", resolved.hash, kept or ", ".join(files) or "defaults")
    return resolved


def _kept(overrides: Sequence[str]) -> Path | None:
    """The configuration kept in the run's folder. Only ``run.dir`` is looked at: what else is asked for is judged together
    with what was kept, not with the defaults."""
    folder = [text for text in overrides if text.partition("=")[0].strip() == "run.dir"]
    environ = {name: value for name, value in os.environ.items() if name == "UNISONO__RUN__DIR"}
    with suppress(ConfigError):  # said when the whole is loaded
        kept = Path(load_config(RunConfig, overrides=folder, environ=environ).value.run.dir) / RESOLVED
        return kept if kept.is_file() else None
    return None


def load_run(run_dir: str) -> Resolved[RunConfig]:
    """The configuration a run was started with, and ``UNISONO__…`` variables over it.

    Raises CheckpointError when the folder holds no run.
    """
    kept = require_run(run_dir) / RESOLVED
    here = [f"run.dir={json.dumps(run_dir)}"]
    resolved = load_config(RunConfig, [kept], overrides=here, environ=os.environ)
    _announce(str(kept), resolved.renamed)
    return resolved


def _announce(where: str, renamed: Sequence[str]) -> None:
    """Print what was renamed, in one process of a job: rank 0, or the launcher that started it."""
    with suppress(LaunchError):
        job = job_from_environ(os.environ)
        if job.rank == 0 and job.source != "unisono":
            announce(where, renamed)


def require_run(run_dir: str) -> Path:
    """The folder of a run. Raises CheckpointError when it holds none."""
    if (Path(run_dir) / RESOLVED).is_file():
        return Path(run_dir)
    raise CheckpointError(
        given=f"run folder {run_dir!r}",
        rule=f"a run's folder holds its {RESOLVED}",
        consequence="it is unknown which model and data to use",
        nearest="the folder given as run.dir when training (default runs/first)",
    )


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on standard output; JSON has no infinity and no NaN, they become null."""
    click.echo(json.dumps(_finite(value), default=str, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in cast("list[Any]", value)]
    return value


def _verbose(context: click.Context, _option: click.Parameter, value: bool) -> None:
    if value:
        _apply_level(context, "debug")


def _set_level(context: click.Context, _option: click.Parameter, value: str | None) -> None:
    if value:
        _apply_level(context, value)


def _apply_level(context: click.Context, level: str) -> None:
    """Other packages stay at warning: their debugging is not what was asked for."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", force=True)
    LOG.setLevel(level.upper())
    context.meta[_LEVEL] = level
