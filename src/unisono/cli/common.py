"""Options that all commands share, and loading of a run's configuration."""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from unisono.cli.terminal import TextFormatter, echo
from unisono.config import Resolved, check_file, load_config
from unisono.config.fields import BASE
from unisono.config.renames import announce
from unisono.config.toml_file import read_toml
from unisono.config.trust import record_python
from unisono.config.values import CALLABLE, SET
from unisono.errors import CheckpointError, ConfigError
from unisono.storage.ownership import untrusted_reason
from unisono.storage.run_folder import CHECKPOINTS_FOLDER, PLAN_FILE, RUN_FILE
from unisono.tasks.options import PREDICTORS
from unisono.train.config import RunConfig
from unisono.train.options import two_lengths

F = TypeVar("F", bound=Callable[..., Any])

LOG = logging.getLogger("unisono")
LEVELS = ("debug", "info", "warning", "error")

_LEVEL = "unisono.log_level"
_TRUST = "--trust-python"


class ExpandedPath(click.Path):
    """A path in which ``~`` at the beginning is the user's home, also in ``--out=~/results``, where no shell expands it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See click."""
        return super().convert(os.path.expanduser(value), param, ctx)


class OutPath(ExpandedPath):
    """The folder for results. Without a name, as an empty variable of a shell gives it, it would be the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See click."""
        if value == "":
            raise ConfigError(
                given="--out without a name, ''",
                rule="results are written into a folder",
                consequence="nothing was written",
                nearest="the path of a new folder",
            )
        return super().convert(value, param, ctx)


def check_output(option: str, path: str | Path, *, consequence: str) -> None:
    """Refuse the file ``path``, which ``option`` names, before the work whose result it is for.

    Raises:
        ConfigError: It exists, or its folder does not. ``consequence`` is what has not been done.
    """
    folder = Path(path).parent
    file = next((above for above in Path(path).parents if os.path.lexists(above)), folder)
    if os.path.lexists(path):
        rule, nearest = "a file that exists is not overwritten", "another name"
    elif not file.is_dir():
        rule, nearest = (
            f"the file is written into a folder, and {file} is none",
            f"a path that does not lead through {file}",
        )
    elif not folder.is_dir():
        rule, nearest = "the file is written into a folder that exists", f"mkdir -p {shlex.quote(str(folder))}"
    else:
        return
    raise ConfigError(given=f"{option} {path}", rule=rule, consequence=consequence, nearest=nearest)


class FiniteRange(click.FloatRange):
    """Numbers of a range. click's own takes NaN, which is neither below nor above a bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See click."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number.", param, ctx)
        return number


def common_options(function: F) -> F:
    """Decorator that adds ``--json``, ``-v`` and ``--log-level``; the level is applied while options are parsed."""
    function = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")(function)
    function = click.option(
        "-v", "--verbose", is_flag=True, expose_value=False, callback=_set_level, help="Same as --log-level debug."
    )(function)
    return click.option(
        "--log-level",
        type=click.Choice(LEVELS),
        expose_value=False,
        callback=_set_level,
        help="Least severe message on standard error (default warning); debug shows every event and tracebacks.",
    )(function)


def trusts_python(function: F) -> F:
    """Decorator that adds ``--trust-python``, which the functions below that load a run's configuration read."""
    return click.option(
        "--trust-python",
        is_flag=True,
        expose_value=False,
        callback=_set_trust,
        help="Run the Python file that a run's folder names, also one that you have not run before.",
    )(function)


def takes_config(function: F) -> F:
    """Decorator that adds the arguments CONFIG and ``--set``, and ``--trust-python``."""
    function = trusts_python(function)
    function = click.argument("config", nargs=-1, type=ExpandedPath())(function)
    return click.option(
        "-s", "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set one value; wins over every file."
    )(function)


def tries_plans(*, budget_s: float | None) -> Callable[[F], F]:
    """Decorator that adds ``--processes``, ``--memory-gib``, ``--budget-s`` and ``--apply`` of a command that tries plans.

    ``budget_s`` is the default of the budget; None for no limit.
    """
    options = (
        click.option(
            "--processes", type=click.IntRange(min=1), help="Ranks of the job (default: launch.num_processes)."
        ),
        click.option(
            "--memory-gib",
            type=FiniteRange(min=0, max=1e6, min_open=True),
            help="Memory for the tensors of a rank (default: a rank's part of this machine's, without what a process takes).",
        ),
        click.option(
            "--budget-s",
            type=FiniteRange(min=0, min_open=True),
            default=budget_s,
            show_default="no limit" if budget_s is None else True,
            help="Seconds after which no further plan is tried.",
        ),
        click.option(
            "--apply",
            "overlay",
            type=ExpandedPath(dir_okay=False),
            help="Write the settings over CONFIG to this TOML file.",
        ),
    )

    def add(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def takes_checkpoint(function: F) -> F:
    """Decorator that adds ``--checkpoint`` and ``--best``; ``chosen_checkpoint`` reads them."""
    function = click.option("--best", is_flag=True, help="The checkpoint with the lowest held-out loss.")(function)
    return click.option("--checkpoint", help="A checkpoint folder instead of the newest good one.")(function)


def chosen_checkpoint(run_dir: str, checkpoint: str | None, *, best: bool) -> str | None:
    """The checkpoint that the options name; None for the newest good one.

    Raises:
        ConfigError: Both options are given.
        CheckpointError: No checkpoint can be called the best.
    """
    if not best:
        return checkpoint
    if checkpoint:
        raise ConfigError(
            given=f"--checkpoint {checkpoint} with --best",
            rule="one checkpoint is chosen",
            consequence="nothing was loaded",
            nearest="one of them",
        )
    from unisono.checkpoint import find_best

    return str(find_best(Path(run_dir) / CHECKPOINTS_FOLDER))


def is_python_trusted() -> bool:
    """Whether this command line has ``--trust-python``."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_TRUST))


def trust_arguments() -> list[str]:
    """Arguments by which another command runs Python files as this command line does."""
    return [_TRUST] if is_python_trusted() else []


def train_arguments(files: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Arguments of ``unisono train`` for a configuration of this command line: its files and its settings.

    Args:
        files: Files of the configuration.
        overrides: Settings, as ``--set`` takes them.
    """
    return [*files, *trust_arguments(), *(f"--set={text}" for text in overrides)]


def log_level() -> str | None:
    """The log level of this command line, for processes that it starts; None if it has none."""
    return click.get_current_context().meta.get(_LEVEL)


def load_run_config(files: Sequence[str], overrides: Sequence[str], *, is_shown: bool = False) -> Resolved[RunConfig]:
    """Load the run's configuration. Without ``files`` the base is the configuration of the run in ``run.dir``, if any.

    ``is_shown``: it is only to be shown, so that labels may stand for the code of a Python script's run.

    Raises:
        ConfigError: A file or a value is wrong, or it is the run of a Python script.
    """
    run_file = None if files else _file_of_run(overrides)
    sources = [str(run_file)] if run_file else files
    script_run, placeholders = next(
        ((Path(path).parent, found) for path in sources if (found := code_placeholders(Path(path)))), (None, {})
    )
    if placeholders and is_shown:
        return load_config(RunConfig, sources, overrides=overrides, environ=os.environ, planned=placeholders)
    if placeholders:
        raise ConfigError(
            given=f"{script_run}, the run of a Python script",
            rule="the script has its model and data, and trains it; the folder holds their names only",
            consequence="nothing was started",
            nearest=f"run the script again; to evaluate it: unisono eval {script_run} --model SCRIPT.py:NAME",
        )
    try:
        resolved = _load(sources, overrides)
    except ConfigError as error:
        if run_file is not None:
            _require_task_of_run(run_file, overrides, error)
        raise
    one_time = resolved.value.run.resume not in ("auto", "strict")
    if run_file is not None and one_time and resolved.origins["run.resume"].startswith(f"{run_file}:"):
        # "never" and a path applied to that one start; starting the folder again continues the run
        resolved = _load([run_file], ["run.resume=auto", *overrides])
        resolved = replace(resolved, origins=resolved.origins | {"run.resume": "default"})
    if run_file is not None:
        resolved = _without_places_of_others(resolved, run_file)
    train, origin = resolved.value.train, resolved.origins["train.steps"]
    # a file may list all options with their defaults; a command line or variable that gives one means it
    if train.epochs and origin.startswith(("--set", "env ")):
        problem = two_lengths(train.steps, train.epochs)
        raise ConfigError(replace(problem, given=f"{origin}: train.steps: {problem.given}"))
    if files and not is_shown:
        _check_run_file(Path(resolved.value.run.dir) / RUN_FILE)
    announce("the configuration", resolved.renamed)
    LOG.info("configuration %s from %s", resolved.hash, run_file or ", ".join(files) or "defaults")
    return resolved


def _check_run_file(run_file: Path) -> None:
    """Raise ConfigError for an error in a run's own file. The start replaces that file, and somebody may have edited it.

    Code that the file names does not run: of such a file keys and values are checked, but not whether they fit together.
    """
    if not _is_run_file(run_file):
        return
    has_base = False
    with suppress(OSError, ConfigError):  # reported below
        has_base = BASE in read_toml(run_file).values
    if has_base or code_placeholders(run_file):
        check_file(RunConfig, run_file)
    else:
        load_config(RunConfig, [run_file])


def _load(
    sources: Sequence[str | Path], overrides: Sequence[str], planned: Mapping[str, Any] | None = None
) -> Resolved[RunConfig]:
    """Load a configuration, and record that the user runs its Python file."""
    trust = is_python_trusted()
    resolved = load_config(
        RunConfig, sources, overrides=overrides, environ=os.environ, planned=planned or {}, trust_python=trust
    )
    if resolved.executed is not None:
        record_python(resolved.executed.path, resolved.executed.digest, os.environ)
    return resolved


def _without_places_of_others(
    resolved: Resolved[RunConfig], run_file: Path, *, uploads: bool = True
) -> Resolved[RunConfig]:
    """Another user's run does not choose where copies of this user's data and checkpoints are kept.

    There that user might read them, and at the address of another run its checkpoints would be replaced and deleted.
    """
    config, own = resolved.value, ("default", "env ", SET)
    places = {"data.cache_dir": config.data.cache_dir}
    places |= {"checkpoint.upload_to": config.checkpoint.upload_to} if uploads else {}
    chosen = [name for name, place in places.items() if place and not resolved.origins[name].startswith(own)]
    if not chosen or not (reason := untrusted_reason(run_file)):
        return resolved
    names, is_used = " and ".join(chosen), "are" if len(chosen) > 1 else "is"
    LOG.warning("%s: its %s %s not used; --set gives one of your own", reason, names, is_used)
    if "data.cache_dir" in chosen:
        config = replace(config, data=replace(config.data, cache_dir=""))
    if "checkpoint.upload_to" in chosen:
        config = replace(config, checkpoint=replace(config.checkpoint, upload_to=""))
    return resolved.updated(config, chosen, "default")


def code_placeholders(file: Path) -> dict[str, Any]:
    """Placeholders for the code that the configuration of a Python script's run names, by dotted key; empty for others."""
    if file.name != RUN_FILE or not os.path.isfile(file.parent / PLAN_FILE):
        return {}
    document: dict[str, Any] = {}
    with suppress(OSError, ConfigError):  # reported when the whole configuration is loaded
        document = read_toml(file).values
    components = {} if BASE in document else document.get("components")
    return {
        f"components.{name}": _MissingCode(str(file.parent), name, label)
        for name, label in (cast("dict[str, Any]", components).items() if isinstance(components, dict) else ())
        if isinstance(label, str) and label.startswith(CALLABLE)
    }


def _require_task_of_run(run_file: Path, overrides: Sequence[str], error: ConfigError) -> None:
    """Raise ConfigError if ``overrides`` choose another task than that of the run, whose file has settings of its own task."""
    chosen = [text for text in overrides if text.partition("=")[0].strip() in ("task.kind", "task.predicts")]
    if not chosen or not any(problem.given.startswith(f"{run_file}:") for problem in error.problems):
        return
    task = load_config(RunConfig, [run_file], trust_python=is_python_trusted()).value.task
    predicts = f" with task.predicts={task.predicts}" if task.kind in PREDICTORS else ""
    raise ConfigError(
        given=f"{' '.join(chosen)} for {run_file.parent}, a run of task.kind={task.kind}{predicts}",
        rule="the run in a folder keeps its task",
        consequence="nothing was started",
        nearest="another run.dir for another task",
    ) from error


def _file_of_run(overrides: Sequence[str]) -> Path | None:
    """The configuration file in the run's folder, or None. Reads only ``run.dir``; other values are validated later."""
    folder = [text for text in overrides if text.partition("=")[0].strip() == "run.dir"]
    environ = {name: value for name, value in os.environ.items() if name == "UNISONO__RUN__DIR"}
    try:
        run_file = Path(load_config(RunConfig, overrides=folder, environ=environ).value.run.dir) / RUN_FILE
    except ConfigError:  # reported when the whole configuration is loaded
        return None
    return run_file if _is_run_file(run_file) else None


def _is_run_file(run_file: Path) -> bool:
    """Whether a run's folder has its configuration. Raises ConfigError for what is there under its name and is no file."""
    kind = _irregular_kind(run_file)
    if kind:
        raise ConfigError(
            given=f"{run_file}, which is {kind}",
            rule=f"a run's folder holds its {RUN_FILE}, a file with its settings",
            consequence="the settings of the run are unknown, and nothing was started",
            nearest=f"another run.dir for a new run, or the {RUN_FILE} of this one in its place (ls -l {run_file})",
        )
    return os.path.isfile(run_file)


def _irregular_kind(path: Path) -> str:
    """What is at a path, for an error, if it is no regular file; empty for one, and where nothing can be seen."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return "a link to nothing" if path.is_symlink() else ""
    except (OSError, ValueError):  # reported where the folder is used
        return ""
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}
    found = next((kind for test, kind in kinds.items() if test(mode)), "a device")
    return "" if stat.S_ISREG(mode) else found


def load_run(run_dir: str, **code: Any) -> Resolved[RunConfig]:
    """Load the configuration that a run was started with, overridden by ``UNISONO__…`` variables.

    A run of a Python script has only the names of its code: ``code`` gives components of that run, and one that is missing
    raises ConfigError when it is used.

    Raises:
        CheckpointError: The folder has no run.
        ConfigError: ``code`` is given for a run of the command line, which has its own.
    """
    run_file = require_run(run_dir) / RUN_FILE
    placeholders = code_placeholders(run_file)
    if code and not placeholders:
        raise ConfigError(
            given=f"--{min(code)} for {run_dir}, a run of unisono train",
            rule=f"its {RUN_FILE} tells its model and data; only runs of Python scripts take them from a file",
            consequence="nothing was loaded",
            nearest=f"leave --{min(code)} out",
        )
    resolved = _load([run_file], [f"run.dir={json.dumps(run_dir)}"], placeholders)
    resolved = _without_places_of_others(resolved, run_file, uploads=False)
    announce(str(run_file), resolved.renamed)
    config = resolved.value
    return replace(resolved, value=replace(config, components=replace(config.components, **code)))


class _MissingCode:
    """Stands for code that a run's folder only names. Raises ConfigError when it is called."""

    def __init__(self, run_dir: str, component: str, label: str) -> None:
        self.__qualname__ = label.removeprefix(CALLABLE)
        self._run_dir, self._component = run_dir, component

    def __call__(self, *given: Any) -> Any:
        name = self.__qualname__ if self.__qualname__.isidentifier() else "NAME"
        what = {
            "model": "where it is a module, or a class or function without arguments that makes one",
            "data": "where it is the held-out data set, or a function that returns it",
            "objective": "where it is what Trainer got as objective, or the name of a built-in one",
        }.get(self._component, "which defines it")
        raise ConfigError(
            given=f"{self._run_dir}, the run of a Python script, without --{self._component}",
            rule=f"its folder holds names of its code and no code: the {self._component} was {self.__qualname__}",
            consequence="nothing was loaded",
            nearest=f"--{self._component} SCRIPT.py:{'DATA' if self._component == 'data' else name}, {what}",
        )


def require_run(run_dir: str) -> Path:
    """Return the folder of a run.

    Raises:
        CheckpointError: The folder has no run.
        ConfigError: Its configuration is no file.
    """
    if _is_run_file(Path(run_dir) / RUN_FILE):
        return Path(run_dir)
    raise CheckpointError(
        given=f"run folder {run_dir!r}",
        rule=f"a run's folder holds its {RUN_FILE}",
        consequence="it is unknown which model and data to use",
        nearest="the folder given as run.dir when training (default runs/first)",
    )


def fractions(_context: click.Context, _option: click.Parameter, values: Sequence[str]) -> dict[str, Fraction] | None:
    """Callback of an option: fractions by name from texts such as train=0.9 or train=9/10; None for none."""
    parts: dict[str, Fraction] = {}
    for value in values:
        name, _, text = value.partition("=")
        try:
            parts[name] = Fraction(text)
        except (ValueError, ZeroDivisionError):
            raise click.BadParameter(f"{value!r} is not NAME=FRACTION, as train=0.9 or train=9/10") from None
    if len(parts) < len(values):
        raise click.BadParameter("a part is named twice")
    return parts or None


def print_result(as_json: bool, value: dict[str, Any], lines: str | Iterable[str]) -> None:
    """Print ``value`` as one JSON object with ``as_json``, else the text, of one line or several."""
    if as_json:
        print_json(value)
        return
    for line in (lines,) if isinstance(lines, str) else lines:
        echo(line)


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object on standard output; infinities and NaN become null."""
    click.echo(json.dumps(_finite(value), default=str, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in cast("list[Any]", value)]
    return value


def _set_trust(context: click.Context, _option: click.Parameter, value: bool) -> None:
    context.meta[_TRUST] = value


def _set_level(context: click.Context, _option: click.Parameter, value: str | bool | None) -> None:
    """Set the level of unisono's messages, ``debug`` for True; other packages stay at warning."""
    if not value:
        return
    level = value if isinstance(value, str) else "debug"
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter("%(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    LOG.setLevel(level.upper())
    context.meta[_LEVEL] = level
