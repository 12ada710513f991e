"""What ``unisono quantize`` and ``unisono prune`` share: the model they take, the figures they print, the folder they write."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from unisono.cli.common import (
    FiniteRange,
    OutPath,
    check_output,
    chosen_checkpoint,
    load_run,
    print_result,
    require_run,
    takes_checkpoint,
    trusts_python,
)
from unisono.cli.own_code import read_code, takes_evaluation, takes_model
from unisono.cli.termination import sigterm_interrupts
from unisono.config import Resolved, load_config
from unisono.errors import ConfigError, nearest_name
from unisono.storage.run_folder import RUN_FILE
from unisono.train.config import Components, RunConfig
from unisono.train.metric_kinds import larger_is_better

if TYPE_CHECKING:
    from torch import nn

    from unisono.train.trained import TrainedRun

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class Compressed:
    """What a command made of a model.

    Attributes:
        model: The smaller model.
        resolved: The configuration by which it is built again.
        what: A line about what was done, such as "int8 weights".
        record: The details, as JSON types.
        lines: What is printed before the figures.
    """

    model: nn.Module
    resolved: Resolved[RunConfig]
    what: str
    record: Mapping[str, Any]
    lines: Iterable[str] = ()


def takes_source(function: F) -> F:
    """Decorator that adds SOURCE, which checkpoint of it, its data and code, ``--out``, and what the result may cost."""
    function = takes_model(takes_evaluation(takes_checkpoint(trusts_python(function))))
    for option in (
        click.option(
            "--max-drop",
            type=FiniteRange(min=0),
            help="Write nothing, and exit with 1, if the metric is worse by more than this fraction of its value before: a loss "
            "that rises, a score that falls.",
        ),
        click.option("--metric", default="loss", show_default=True, help="The metric that --max-drop is about."),
        click.option(
            "--maximize/--minimize",
            default=None,
            help="Whether --metric is to be large or small; needed for a metric of your own.",
        ),
        click.option(
            "--samples", type=click.IntRange(min=0), default=0, show_default=True, help="Held-out samples; 0 = all."
        ),
        click.option("--out", required=True, type=OutPath(path_type=Path), help="The new folder of the smaller model."),
        click.option(
            *("-s", "--set", "overrides"),
            multiple=True,
            metavar="KEY=VALUE",
            help="For a Hugging Face folder: its task, data and other settings, as for train.",
        ),
        click.argument("source"),
    ):
        function = option(function)
    return function


@sigterm_interrupts()
def compress(
    change: Callable[[TrainedRun, Resolved[RunConfig]], Compressed],
    *,
    as_json: bool,
    source: str,
    overrides: Sequence[str],
    out: Path,
    samples: int,
    metric: str,
    maximize: bool | None,
    max_drop: float | None,
    checkpoint: str | None,
    best: bool,
    **code: Any,
) -> int:
    """Load a model, change it, print the figures before and after, and write the result; returns the exit code.

    Args:
        change: Makes a smaller model of the run's, which it leaves as it is. It may read the training data.
        as_json: Print JSON.
        source: Folder of a run, or a Hugging Face folder.
        overrides: Settings for a Hugging Face folder.
        out: The new folder.
        samples: Held-out samples of the evaluations; 0 = all.
        metric: The metric that ``max_drop`` is about.
        maximize: Whether it is better the larger it is; None for what is known of its name.
        max_drop: Most that it may be worse, as a fraction; None for no limit.
        checkpoint: A checkpoint in place of the newest.
        best: Take the checkpoint with the lowest held-out loss.
        code: Code of a Python script's run, as ``read_code`` takes it.
    """
    check_output("--out", out, consequence="nothing was compressed")
    is_run = os.path.lexists(Path(source) / RUN_FILE) or not os.path.isfile(Path(source) / "config.json")
    if is_run:
        resolved = _of_run(source, overrides, read_code(**code))
        checkpoint = chosen_checkpoint(source, checkpoint, best=best)
    else:
        resolved = _of_folder(source, overrides, checkpoint=checkpoint, best=best, code=code)
    from unisono.compress.figures import compare
    from unisono.compress.result import write_result
    from unisono.train.trained import trained_run

    with trained_run(resolved.value, checkpoint, held_out_only=False, untrained=not is_run) as run:
        _check_metric(run, metric)
        maximize = _direction(metric) if maximize is None else maximize
        made = change(run, resolved)
        comparison = compare(run, run.model, made.model, samples=samples)
        drop = comparison.worsening(metric, maximize=maximize)
        refused = max_drop is not None and not drop <= max_drop  # also for NaN
        record = {"what": made.what, **made.record}
        if not refused:
            write_result(
                out,
                run,
                _without_own_metrics(made.resolved, code),
                made.model,
                source_hash=resolved.hash,
                comparison=comparison,
                record=record,
            )
    result = {
        "source": source,
        "out": None if refused else str(out),
        "ok": not refused,
        **record,
        "drop": drop,
        "figures": comparison.as_json(),
    }
    end = (
        f"refused: {metric} is {drop:.2%} worse, --max-drop allows {max_drop:.2%}; nothing was written"
        if refused
        else f"written to {out}"
    )
    print_result(as_json, result, [f"{source}: {made.what}", *made.lines, *comparison.rows(), end])
    return int(refused)


def _check_metric(run: TrainedRun, metric: str) -> None:
    """Refuse a metric that the evaluation does not have. One sample tells the names, also of a metric's parts."""
    names = ["loss"] if metric == "loss" else list(run.evaluate(run.model, 1))
    if metric not in names:
        raise ConfigError(
            given=f"--metric {metric}",
            rule=f"the evaluation has {', '.join(names)}",
            consequence="nothing was compressed",
            nearest=nearest_name(metric, names),
        )


def calibration_source(run: TrainedRun) -> str:
    """What calibration reads: a script's run has no other samples than those of ``--data``."""
    return "samples of --data, which also judge the result" if run.trains_on_held_out else "training samples"


def _of_run(source: str, overrides: Sequence[str], code: Mapping[str, Any]) -> Resolved[RunConfig]:
    require_run(source)
    if overrides:
        raise ConfigError(
            given=f"--set {overrides[0]} with the run folder {source!r}",
            rule=f"a run's {RUN_FILE} tells its settings; --set gives those of a Hugging Face folder",
            consequence="nothing was compressed",
            nearest="leave --set out",
        )
    return load_run(source, **code)


def _direction(metric: str) -> bool:
    """Whether ``metric`` is better the larger it is. Raises ConfigError for one that is not built in."""
    known = larger_is_better(metric)
    if known is None:
        raise ConfigError(
            given=f"--metric {metric}, which is no built-in metric",
            rule="how much worse a model is depends on whether its metric is to be large or small",
            consequence="nothing was compressed",
            nearest=f"--metric {metric} --maximize, or --minimize",
        )
    return known


def _without_own_metrics(resolved: Resolved[RunConfig], code: Mapping[str, Any]) -> Resolved[RunConfig]:
    """The configuration without metrics that an option named: each command that evaluates the result names its own."""
    if not code.get("metrics"):
        return resolved
    components = replace(resolved.value.components, own_metrics=Components().own_metrics)
    return resolved.updated(replace(resolved.value, components=components), ["components.own_metrics"], "default")


def _of_folder(
    source: str, overrides: Sequence[str], *, checkpoint: str | None, best: bool, code: Mapping[str, Any]
) -> Resolved[RunConfig]:
    """The configuration of a Hugging Face folder's model, with the classes and statistics of its training data."""
    given = [f"--{name.replace('_', '-')}" for name, value in code.items() if value]
    given += [name for name, is_given in (("--checkpoint", checkpoint), ("--best", best)) if is_given]
    if given:
        raise ConfigError(
            given=f"{given[0]} with the Hugging Face folder {source!r}",
            rule="it is of a run's folder; a Hugging Face folder has its model alone",
            consequence="nothing was compressed",
            nearest="--set task.kind=…, --set data.train=… or --set data.corpus=… for its data",
        )
    from unisono.dist import JobSpec, World
    from unisono.train.build import resolve_run

    folder = os.path.abspath(source)
    resolved = load_config(RunConfig, [], overrides=[f"model.pretrained={folder}", *overrides], environ=os.environ)
    return resolve_run(resolved, World.alone(JobSpec()))
