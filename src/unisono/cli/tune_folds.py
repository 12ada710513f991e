"""``unisono tune folds``: cross-validation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unisono.cli.common import common_options, load_run_config, print_result, takes_config, trust_arguments
from unisono.cli.terminal import echo
from unisono.cli.termination import sigterm_interrupts
from unisono.cli.tune_out import takes_out
from unisono.cli.tune_trials import check_searched, identity_of, run_trials, unused_run_dir
from unisono.config.values import toml_value
from unisono.errors import ConfigError, nearest_name

if TYPE_CHECKING:
    from unisono.config import Resolved
    from unisono.train.config import RunConfig
    from unisono.tune.folds import CrossValidation
    from unisono.tune.study import TrialRecord


@click.command("folds")
@takes_config
@takes_out("Folder of the trainings; goes on where it has some.")
@click.option("--folds", default=5, show_default=True, type=click.IntRange(min=2, max=1000), help="Number of folds.")
@click.option("--group", metavar="COLUMN", help="Hold out all samples with one value of a column together.")
@click.option(
    "--metric",
    default="eval/loss",
    show_default=True,
    help="Metric in the run's events, such as eval/accuracy; its last value is used.",
)
@click.option("--parallel", type=click.IntRange(min=1), default=1, show_default=True, help="Trainings at a time.")
@click.option(
    "--sample-losses",
    is_flag=True,
    help="Write losses.safetensors: the loss of each sample, and the probability of each class, from the model that held it out.",
)
@common_options
def folds(config: tuple[str, ...], overrides: tuple[str, ...], out: str, as_json: bool, **options: Any) -> None:
    """Cross-validate: train once for each fold of data.train that is held out; mean and spread of a metric.

    Each sample is held out once, and a fold is evaluated whole unless train.num_eval_samples says otherwise. Of a task with
    classes each fold has every class in its proportion. A command that was killed, or stopped by Ctrl-C, goes on where it was.
    Exit code 1: a fold has no value.
    """
    from unisono.data.sample_losses import LOSSES_FILE
    from unisono.launch.job import refuse_inside_a_job
    from unisono.tune.fold_losses import write_fold_losses
    from unisono.tune.folds import FOLD, cross_validation, fold_settings, folds_space, write_folds_page
    from unisono.tune.search import Budget
    from unisono.tune.study import Study, StudyOptions

    folder, num_folds = Path(out), int(options["folds"])
    refuse_inside_a_job(folder)
    files, space = [os.path.abspath(path) for path in config], folds_space(num_folds)
    checked = {name: parameter.checked_values() for name, parameter in space.items()}
    if any(text.partition("=")[0].strip() in ("data.eval_frac", "data.eval") for text in overrides):
        raise ConfigError(
            given="--set data.eval_frac or data.eval with tune folds",
            rule="each fold of data.train is held out in turn",
            consequence="nothing was started",
            nearest="--folds, and neither of them",
        )
    given = load_run_config(files, [*overrides, f"run.dir={unused_run_dir(folder)}"], is_shown=True)
    whole = given.origins["train.num_eval_samples"] == "default"
    settings = [*overrides, *fold_settings(num_folds, whole=whole), *_split_setting(given, options["group"])]
    resolved = check_searched(files, settings, checked, folder)
    _refuse_token_shards(resolved.value)
    if options["group"] is not None:
        _check_group(resolved.value, options["group"])
    chosen = StudyOptions(metric=options["metric"], sampler="grid")
    study = Study(folder.absolute(), space, chosen, identity_of(resolved))

    def write() -> tuple[CrossValidation, list[TrialRecord]]:
        records = study.records()
        found = cross_validation(chosen.metric, num_folds, records)
        write_folds_page(folder / "report.html", found, records)
        return found, records

    try:
        run_trials(
            study,
            folder,
            resolved,
            files,
            settings,
            chosen.metric,
            Budget(),
            options["parallel"],
            write=write,
            as_json=as_json,
        )
    finally:
        found, records = write()
    trials = [{**record.to_json(), "fold": int(record.settings[FOLD])} for record in records if record.settings]
    result = {"out": out, "report": str(folder / "report.html"), **found.to_json(), "trials": trials}
    lines = [found.verdict(), f"report: {folder / 'report.html'}"]
    if options["sample_losses"]:
        with sigterm_interrupts():
            losses = write_fold_losses(
                folder,
                records,
                trust_arguments(),
                on_fold=lambda fold: None if as_json else echo(f"losses of the samples of fold {fold}"),
            )
        result["losses"] = str(folder / LOSSES_FILE)
        lines.append(
            f"losses of {len(losses.sample):,} of {losses.about.num_samples:,} samples: {folder / LOSSES_FILE}"
        )
    print_result(as_json, result, lines)
    if len(found.values) < num_folds:
        raise SystemExit(1)


def _split_setting(given: Resolved[RunConfig], group: str | None) -> list[str]:
    """``data.eval_split`` as ``--set`` takes it, if the configuration does not give it: by ``--group``, else by class.

    Raises:
        ConfigError: ``--group`` is given, and the configuration gives ``data.eval_split``.
    """
    from unisono.data.options import EVAL_GROUP, EVAL_STRATIFIED
    from unisono.tasks.options import PREDICTORS

    config, is_given = given.value, given.origins["data.eval_split"] != "default"
    if is_given and group is not None:
        raise ConfigError(
            given=f"--group {group} with data.eval_split={config.data.eval_split}",
            rule="the samples are divided in one way",
            consequence="nothing was started",
            nearest="one of them",
        )
    if group is not None:
        return [f"data.eval_split={toml_value(EVAL_GROUP + group)}"]
    has_classes = config.task.kind in PREDICTORS and config.task.predicts == "class"
    return [f"data.eval_split={EVAL_STRATIFIED}"] if has_classes and not is_given and config.data.train else []


def _check_group(config: RunConfig, group: str) -> None:
    """Raise ConfigError for a column that the first sample of ``data.train`` does not have; DataError if it cannot be read."""
    from unisono.tasks.sources import first_sample

    if not config.data.train:
        return
    columns = list(first_sample(config.data, config.task))
    if group not in columns:
        raise ConfigError(
            given=f"--group {group}, and {config.data.train} without this column",
            rule="all samples with one value of a column are held out together",
            consequence="nothing was started",
            nearest=nearest_name(group, columns),
        )


def _refuse_token_shards(config: RunConfig) -> None:
    """Raise ConfigError for token shards: of their windows the last ones are held out, and no others."""
    from unisono.tasks.options import LANGUAGE_MODELS
    from unisono.tasks.sources import token_shards

    if config.task.kind in LANGUAGE_MODELS and token_shards(config.data.train, config.data) is not None:
        raise ConfigError(
            given=f"tune folds with the token shards {config.data.train}",
            rule="each fold of the samples of data.train is held out in turn, and of token shards the last windows are held out",
            consequence="only the first training could be made, so nothing was started",
            nearest="data.train=FILE with a text in each row; or unisono train with data.eval=SHARDS",
        )
