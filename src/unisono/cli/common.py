"""Shared by the verbs: the options every verb has, and how a verb finds its configuration."""

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
from unisono.errors import CheckpointError, ConfigError
from unisono.train.config import RunConfig

F = TypeVar("F", bound=Callable[..., Any])

RESOLVED = "config.toml"
PLAN = "plan.json"
LOG = logging.getLogger("unisono")
LEVELS = ("debug", "info", "warning", "error")

_LEVEL = "unisono.log_level"


def every_verb(function: F) -> F:
    """Add ``--json``, ``-v`` and ``--log-level`` to a verb; the level takes effect while options are parsed."""
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
    """Add the configuration files and ``--set`` to a verb."""
    function = click.argument("config", nargs=-1, type=click.Path())(function)
    return click.option(
        "-s", "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set one value; wins over every file."
    )(function)


def log_level() -> str | None:
    """The log level of this command line, for processes it starts; None if it sets none."""
    return click.get_current_context().meta.get(_LEVEL)


def load_run_config(files: Sequence[str], overrides: Sequence[str]) -> Resolved[RunConfig]:
    """Load the configuration. Without files, if ``run.dir`` holds a run, that run's own file is the base."""
    own_file = None if files else _own_file(overrides)
    resolved = load_config(RunConfig, [own_file] if own_file else files, overrides=overrides, environ=os.environ)
    one_time = resolved.value.run.resume not in ("auto", "strict")
    if own_file is not None and one_time and resolved.origins["run.resume"].startswith(f"{own_file}:"):
        # "never" or a path was meant for that one start; using the folder again resumes the run
        resolved = load_config(RunConfig, [own_file], overrides=["run.resume=auto", *overrides], environ=os.environ)
        resolved = replace(resolved, origins=resolved.origins | {"run.resume": "default"})
    LOG.info("configuration %s from %s", resolved.hash, own_file or ", ".join(files) or "defaults")
    return resolved


def _own_file(overrides: Sequence[str]) -> Path | None:
    """The configuration file in the run's folder, if any. Only ``run.dir`` is evaluated; other overrides need that file."""
    folder = [text for text in overrides if text.partition("=")[0].strip() == "run.dir"]
    environ = {name: value for name, value in os.environ.items() if name == "UNISONO__RUN__DIR"}
    with suppress(ConfigError):  # reported when the whole configuration is loaded
        path = Path(load_config(RunConfig, overrides=folder, environ=environ).value.run.dir) / RESOLVED
        return path if path.is_file() else None
    return None


def load_run(run_dir: str) -> Resolved[RunConfig]:
    """The configuration a run was started with, updated by ``UNISONO__…`` variables.

    Raises CheckpointError if the folder holds no run.
    """
    own_file = require_run(run_dir) / RESOLVED
    overrides = [f"run.dir={json.dumps(run_dir)}"]
    return load_config(RunConfig, [own_file], overrides=overrides, environ=os.environ)


def require_run(run_dir: str) -> Path:
    """The folder of a run. Raises CheckpointError if it holds no run."""
    if (Path(run_dir) / RESOLVED).is_file():
        return Path(run_dir)
    raise CheckpointError(
        given=f"run folder {run_dir!r}",
        rule=f"a run's folder holds its {RESOLVED}",
        consequence="it is unknown which model and data to use",
        nearest="the folder given as run.dir when training (default runs/first)",
    )


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object to standard output; infinities and NaN become null."""
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
    """Set the level of our logger; other packages stay at warning."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", force=True)
    LOG.setLevel(level.upper())
    context.meta[_LEVEL] = level
