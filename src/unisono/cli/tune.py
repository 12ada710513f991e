"""``unisono tune``: settings found by search."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from unisono.cli.common import FiniteRange, every_verb, is_python_trusted, load_run_config, print_result, takes_config
from unisono.cli.terminal import echo
from unisono.cli.termination import sigterm_interrupts
from unisono.cli.tune_transfer import read_transfer, takes_transfer, with_check
from unisono.cli.tune_width import coordinates, default_schedule
from unisono.config.values import literal, toml_value
from unisono.errors import ConfigError
from unisono.sanitize import printable
from unisono.storage.directory import make_folder

if TYPE_CHECKING:
    from unisono.config import Resolved
    from unisono.doctor.child import TrainOutcome
    from unisono.train.config import RunConfig
    from unisono.tune.batch_size import Probe
    from unisono.tune.search import Budget
    from unisono.tune.space import Space
    from unisono.tune.study import Outcome, Study, StudyOptions, Trial
    from unisono.tune.system import Comparison
    from unisono.tune.transfer import WidthTransfer
    from unisono.tune.trial_run import RunEnd


@click.group("tune")
def command() -> None:
    """Find settings by search: each trial is a training of its own."""


command.add_command(coordinates)


@command.command("params")
@takes_config
@click.option(
    "--space",
    multiple=True,
    required=True,
    metavar="NAME=RANGE",
    help="A setting to search: optim.lr=log:1e-4..1e-2, model.num_layers=2..8/2, optim.kind=adamw,lamb; or a TOML file "
    "with a table [space].",
)
@click.option(
    "--out", required=True, type=click.Path(file_okay=False), help="Folder of the search; goes on where it has one."
)
@click.option(
    "--metric", default="eval/loss", show_default=True, help="Number of a run's events; its last value counts."
)
@click.option(
    "--maximize/--minimize",
    default=None,
    help="Look for its largest or its smallest value (default: the largest of accuracy, f1, mcc, auc, r2, spearman, topK).",
)
@click.option("--sampler", type=click.Choice(("tpe", "random", "grid")), default="tpe", show_default=True)
@click.option(
    "--pruner",
    type=click.Choice(("none", "median", "halving")),
    default="none",
    show_default=True,
    help="End trials early that are worse than others at the same step.",
)
@click.option("--trials", type=click.IntRange(min=1), help="Trials in the whole search (default: 20, a grid: all).")
@click.option("--max-s", type=FiniteRange(min=0, min_open=True), help="No trial begins after so many seconds.")
@click.option(
    "--max-device-s",
    type=FiniteRange(min=0, min_open=True),
    help="No trial begins once all have used so many seconds times processes.",
)
@click.option("--parallel", type=click.IntRange(min=1), default=1, show_default=True, help="Trials at a time.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the sampler.")
@takes_transfer
@every_verb
def params(
    config: tuple[str, ...], overrides: tuple[str, ...], space: tuple[str, ...], as_json: bool, **options: Any
) -> None:
    """Search for the values of settings with which CONFIG trains best.

    The folder gets a run for each trial, report.html, and best.toml, which unisono train takes. A search that was killed, or
    stopped by Ctrl-C, goes on with the same command; several may work on one folder. With --transfer a coordinate check comes
    first. Exit code 1: no trial has a result, or the check says that the learning rate does not transfer.
    """
    from unisono.launch.job import refuse_inside_a_job
    from unisono.tune.search import Budget
    from unisono.tune.space import grid_size, read_space
    from unisono.tune.study import Study, StudyOptions, larger_is_better
    from unisono.tune.transfer import require_transferred

    out = Path(options["out"])
    refuse_inside_a_job(out)
    searched = read_space(space)
    if options["sampler"] == "grid":
        grid_size(searched)
    files = [os.path.abspath(path) for path in config]
    resolved = _check(files, overrides, {name: parameter.ends() for name, parameter in searched.items()}, out)
    settings, identity = list(overrides), _identity(resolved)
    none = out.absolute() / "trials" / "none"
    transfer = read_transfer(files, overrides, options["transfer"], options["proxy_width"], none)
    if transfer is not None:
        require_transferred(searched)
        settings += transfer.proxy_overrides()
        resolved = load_run_config(files, [*settings, f"run.dir={none}"], is_shown=True)
        identity = {**transfer.identity(), **_identity(resolved)}
    if options["maximize"] is None:
        options["maximize"] = larger_is_better(options["metric"])
    chosen = StudyOptions(**{name: options[name] for name in ("metric", "maximize", "sampler", "pruner", "seed")})
    study = Study(out.absolute(), searched, chosen, identity)
    limit = options["trials"] if options["trials"] or options["sampler"] == "grid" else 20
    budget = Budget(trials=limit, seconds=options["max_s"], device_s=options["max_device_s"])
    try:
        if transfer is not None:
            transfer = with_check(transfer, out, files, overrides, as_json=as_json)
        if transfer is None or transfer.holds:
            _make_trials(study, resolved, files, settings, chosen.metric, budget, options["parallel"], as_json=as_json)
    finally:
        result, lines = _write(out, searched, chosen, study, transfer)
    print_result(as_json, result, lines)
    if result["best"] is None or (transfer is not None and not transfer.holds):
        raise SystemExit(1)


@command.command("lr")
@takes_config
@click.option(
    "--out", required=True, type=click.Path(file_okay=False), help="Folder for the training and its page; a new one."
)
@click.option(
    "--low", default=1e-6, show_default=True, type=FiniteRange(min=0, min_open=True), help="First learning rate."
)
@click.option(
    "--high", default=1.0, show_default=True, type=FiniteRange(min=0, min_open=True), help="Last learning rate."
)
@click.option(
    "--steps", default=100, show_default=True, type=click.IntRange(min=10, max=100_000), help="Number of rates."
)
@takes_transfer
@every_verb
def lr(config: tuple[str, ...], overrides: tuple[str, ...], out: str, as_json: bool, **options: Any) -> None:
    """Find the range of learning rates: one training whose rate rises at every step until the loss rises too.

    Proposes the rate at which the loss fell fastest. It depends on the batch size and the optimizer: change those first. With
    --transfer a coordinate check comes first; exit code 1: it says that the learning rate does not transfer.
    """
    from unisono.launch.job import refuse_inside_a_job
    from unisono.tune.lr_range import range_settings, range_verdict, run_range_test, write_range_page
    from unisono.tune.transfer import CHECK_FOLDER

    folder, steps = Path(out), int(options["steps"])
    refuse_inside_a_job(folder)
    if options["low"] >= options["high"]:
        raise ConfigError(
            given=f"--low {options['low']:g} with --high {options['high']:g}",
            rule="the rate rises",
            consequence="nothing was started",
            nearest=f"--low {options['high']:g} --high {options['low']:g}",
        )
    _require_new(folder / "run", out)
    files = [os.path.abspath(path) for path in config]
    transfer = read_transfer(files, overrides, options["transfer"], options["proxy_width"], folder.absolute() / "run")
    settings = {
        **range_settings(options["low"], options["high"], steps, default_schedule()),
        "run.dir": str(folder.absolute() / "run"),
    }
    narrow = [] if transfer is None else transfer.proxy_overrides()
    texts = [*overrides, *narrow, *(f"{name}={toml_value(value)}" for name, value in settings.items())]
    load_run_config(files, texts, is_shown=True)
    if transfer is not None:
        _require_new(folder / CHECK_FOLDER, out)
        make_folder(folder)
        transfer = with_check(transfer, folder, files, overrides, as_json=as_json)
    result: dict[str, Any] = {"out": out, "transfer": None if transfer is None else transfer.to_json()}
    if transfer is not None and not transfer.holds:
        page = folder / CHECK_FOLDER / "report.html"
        print_result(as_json, {**result, "report": str(page)}, [transfer.verdict(), f"report: {page}"])
        raise SystemExit(1)
    trust = ["--trust-python"] if is_python_trusted() else []
    with sigterm_interrupts():
        found = run_range_test(
            folder.absolute() / "run",
            [*files, *trust, *(f"--set={text}" for text in texts)],
            steps=steps,
            tell=lambda rate, loss: None if as_json else echo(f"lr {rate:.3g}: loss {loss:.5g}"),
        )
    write_range_page(folder / "report.html", found, transfer)
    lines, base = [range_verdict(found)], ""
    if transfer is not None:
        lines.append(transfer.verdict())
        base = f" --set model.mup_base_dim={transfer.proxy_width}"
    if found.steepest is not None:
        lines.append(f"unisono train … --set optim.lr={found.steepest:.2g}{base}")
    lines.append(f"report: {folder / 'report.html'}")
    print_result(as_json, {**result, "report": str(folder / "report.html"), **found.to_json()}, lines)


@command.command("batch")
@takes_config
@click.option("--out", required=True, type=click.Path(file_okay=False), help="Folder for the page; a new one.")
@click.option("--most", default=1024, show_default=True, type=click.IntRange(min=1), help="Largest micro-batch to try.")
@every_verb
def batch(config: tuple[str, ...], overrides: tuple[str, ...], out: str, most: int, as_json: bool) -> None:
    """Find the largest micro-batch that fits into memory, by short trainings in processes of their own.

    Doubles the micro-batch until it does not fit, then bisects. A running job is not touched.
    """
    from unisono.launch.job import refuse_inside_a_job
    from unisono.launch.resources import count_accelerators
    from unisono.tune.batch_size import batch_verdict, data_ranks, find_largest, probe_size, write_batch_page

    folder = Path(out).absolute()
    refuse_inside_a_job(folder)
    _require_new(folder / "trials", out)
    files = [os.path.abspath(path) for path in config]
    resolved = load_run_config(files, [*overrides, f"run.dir={folder / 'trials' / 'none'}"], is_shown=True)
    ranks = resolved.value.launch.num_processes or max(1, count_accelerators())
    trust = ["--trust-python"] if is_python_trusted() else []
    arguments = [*files, *trust, *(f"--set={text}" for text in overrides)]

    def try_size(size: int) -> Probe:
        probe = probe_size(folder / "trials" / str(size), arguments, size, ranks, settings=resolved.encoded)
        if not as_json:
            memory = f", {probe.peak_bytes / 2**30:.3g} GiB" if probe.peak_bytes else ""
            speed = f", {probe.samples_per_s:.4g} samples/s" if probe.samples_per_s else ""
            echo(printable(f"{size}: {f'fits{memory}{speed}' if probe.fits else f'does not fit: {probe.reason}'}"))
        return probe

    with sigterm_interrupts():
        first = try_size(1)
        share = resolved.value.plan.global_batch // data_ranks(folder / "trials" / "1")
        found = find_largest(
            lambda size: first if size == 1 else try_size(size),
            most=most,
            share=max(1, share),
            on_host=count_accelerators() == 0,
        )
    write_batch_page(folder / "report.html", found)
    print_result(
        as_json,
        {"out": out, "report": str(folder / "report.html"), **found.to_json()},
        [
            batch_verdict(found),
            f"unisono train … --set plan.micro_batch={found.proposed}, which divides the global batch",
            f"report: {Path(out) / 'report.html'}",
        ],
    )


@command.command("system")
@takes_config
@click.option(
    "--out", required=True, type=click.Path(file_okay=False), help="Folder for the page and the overlay; a new one."
)
@click.option("--try", "tries", multiple=True, metavar="NAME=A,B", help="Try these values, and none but those given.")
@click.option("--steps", default=30, show_default=True, type=click.IntRange(min=12), help="Steps of a training.")
@click.option(
    "--pairs", default=3, show_default=True, type=click.IntRange(min=1), help="Pairs of trainings of a setting."
)
@every_verb
def system(config: tuple[str, ...], overrides: tuple[str, ...], out: str, as_json: bool, **options: Any) -> None:
    """Find settings with which steps are faster: precision, compilation, workers, threads, allocator, micro-batch.

    Each is tried in short trainings, side by side with the settings so far. system.toml has those that were faster in every pair.
    """
    from unisono.doctor.child import train_child
    from unisono.doctor.short_run import QUIET, set_arguments
    from unisono.launch.job import refuse_inside_a_job
    from unisono.launch.resources import allowed_cores, count_accelerators
    from unisono.tune.space import read_space
    from unisono.tune.system import Candidate, candidates_of, sweep, write_sweep

    folder = Path(out).absolute()
    refuse_inside_a_job(folder)
    _require_new(folder / "report.html", out)
    if len(config) > 1:
        raise ConfigError(
            given=f"{len(config)} files of configuration",
            rule="the overlay that is written goes over one file",
            consequence="nothing was started",
            nearest="one file that has the others as its base",
        )
    files = [os.path.abspath(path) for path in config]
    make_folder(folder)
    with TemporaryDirectory(prefix=".trainings-", dir=folder, ignore_cleanup_errors=True) as temporary:
        resolved = load_run_config(files, [*overrides, f"run.dir={temporary}/0"], is_shown=True)
        settings = resolved.encoded
        if options["tries"]:
            space = {
                name: parameter.grid() or parameter.ends() for name, parameter in read_space(options["tries"]).items()
            }
            candidates = [Candidate(name=name, value=literal(text)) for name, texts in space.items() for text in texts]
        else:
            cores = len(allowed_cores())
            candidates = candidates_of(settings, has_accelerator=count_accelerators() > 0, cores=cores)
        quiet = {name: value for name, value in QUIET.items() if name in settings}
        quiet |= {"train.steps": options["steps"], "train.epochs": 0.0, "checkpoint.every_steps": 0}
        trust = ["--trust-python"] if is_python_trusted() else []
        given = [*files, *trust, *(f"--set={text}" for text in overrides)]
        numbers = count(1)

        def train(changes: Mapping[str, Any]) -> TrainOutcome:
            run_dir = Path(temporary) / str(next(numbers))
            arguments = set_arguments({**quiet, **changes, "run.dir": str(run_dir)})
            return train_child(run_dir, [*given, *arguments], timeout_s=1800.0)

        def tell(comparison: Comparison) -> None:
            if not as_json:
                echo(printable(f"{comparison.name}={comparison.value}: {comparison.words}"))

        with sigterm_interrupts():
            found = sweep(train, candidates, pairs=options["pairs"], tell=tell)
    own = {name.strip(): literal(text.strip()) for name, _, text in (each.partition("=") for each in overrides)}
    overlay = write_sweep(folder, files[0] if files else "", found, own)
    lines = [found.verdict(), f"report: {folder / 'report.html'}"]
    if overlay is not None:
        lines.insert(1, f"unisono train {overlay}")
    result = {
        "out": out,
        "report": str(folder / "report.html"),
        "overlay": None if overlay is None else str(overlay),
    }
    print_result(as_json, {**result, **found.to_json()}, lines)


@command.command("folds")
@takes_config
@click.option(
    "--out", required=True, type=click.Path(file_okay=False), help="Folder of the trainings; goes on where it has some."
)
@click.option("--folds", default=5, show_default=True, type=click.IntRange(min=2, max=1000), help="Number of parts.")
@click.option(
    "--metric", default="eval/loss", show_default=True, help="Number of a run's events; its last value counts."
)
@click.option("--parallel", type=click.IntRange(min=1), default=1, show_default=True, help="Trainings at a time.")
@click.option(
    "--sample-losses",
    is_flag=True,
    help="Write losses.safetensors: the loss of each sample, and the probability of each class, from the model that held it out.",
)
@every_verb
def folds(config: tuple[str, ...], overrides: tuple[str, ...], out: str, as_json: bool, **options: Any) -> None:
    """Cross-validate: train once for each part of data.train that is held out; mean and spread of a metric.

    Each sample is held out once. A command that was killed, or stopped by Ctrl-C, goes on where it was.
    """
    from unisono.launch.job import refuse_inside_a_job
    from unisono.tune.fold_losses import LOSSES_FILE, write_fold_losses
    from unisono.tune.folds import FOLD, cross_validation, fold_settings, folds_space, write_folds_page
    from unisono.tune.search import Budget
    from unisono.tune.study import Study, StudyOptions

    folder, num_folds = Path(out), int(options["folds"])
    refuse_inside_a_job(folder)
    files, space = [os.path.abspath(path) for path in config], folds_space(num_folds)
    ends = {name: parameter.ends() for name, parameter in space.items()}
    if any(text.partition("=")[0].strip() in ("data.eval_frac", "data.eval") for text in overrides):
        raise ConfigError(
            given="--set data.eval_frac or data.eval with tune folds",
            rule="each part of data.train is held out in turn",
            consequence="nothing was started",
            nearest="--folds, and neither of them",
        )
    settings = [*overrides, *fold_settings(num_folds)]
    resolved = _check(files, settings, ends, folder)
    chosen = StudyOptions(metric=options["metric"], sampler="grid")
    study = Study(folder.absolute(), space, chosen, _identity(resolved))
    try:
        _make_trials(study, resolved, files, settings, chosen.metric, Budget(), options["parallel"], as_json=as_json)
    finally:
        records = study.records()
        found = cross_validation(chosen.metric, num_folds, records)
        write_folds_page(folder / "report.html", found, records)
    trials = [{**record.to_json(), "fold": int(record.settings[FOLD])} for record in records]
    result = {"out": out, "report": str(folder / "report.html"), **found.to_json(), "trials": trials}
    lines = [found.verdict(), f"report: {folder / 'report.html'}"]
    if options["sample_losses"]:
        trust = ["--trust-python"] if is_python_trusted() else []
        with sigterm_interrupts():
            losses = write_fold_losses(folder, records, trust, lambda line: None if as_json else echo(line))
        result["losses"] = str(folder / LOSSES_FILE)
        lines.append(
            f"losses of {len(losses.sample):,} of {losses.about.num_samples:,} samples: {folder / LOSSES_FILE}"
        )
    print_result(as_json, result, lines)
    if found.mean is None:
        raise SystemExit(1)


def _require_new(path: Path, out: str) -> None:
    """Raise ConfigError where an earlier command has written there."""
    if path.exists():
        raise ConfigError(
            given=f"--out {out}, where {path} exists",
            rule="this command begins anew, in a folder of its own",
            consequence="nothing was started",
            nearest="another folder, or remove that one",
        )


def _make_trials(
    study: Study,
    resolved: Resolved[RunConfig],
    files: Sequence[str],
    overrides: Sequence[str],
    metric: str,
    budget: Budget,
    parallel: int,
    *,
    as_json: bool,
) -> None:
    """Make the trials of a study.

    Args:
        study: Where they come from.
        resolved: The configuration without the settings that are searched.
        files: Its files.
        overrides: Settings of the command line.
        metric: Name of the number that counts.
        budget: When no further trial begins.
        parallel: Trials at a time.
        as_json: Whether no lines are printed.
    """
    from unisono.tune.search import Search
    from unisono.tune.slots import divide_into_slots

    launch = resolved.value.launch
    trust = ["--trust-python"] if is_python_trusted() else []
    search = Search(
        study=study,
        arguments=[*files, *trust, *(f"--set={text}" for text in overrides)],
        metric=metric,
        budget=budget,
        slots=divide_into_slots(parallel, launch.num_processes, sets_threads=launch.num_threads != 0),
        tell=_Printed(metric=metric, as_json=as_json).tell,
    )
    with sigterm_interrupts():
        search.run()


def _check(
    files: Sequence[str], overrides: Sequence[str], ends: Mapping[str, Sequence[str]], out: Path
) -> Resolved[RunConfig]:
    """The configuration without the settings that are searched; each of those is tried at the ends of its range.

    Raises:
        ConfigError: A value is none of its setting, or a setting is given too.
    """
    given = {text.partition("=")[0].strip() for text in overrides}
    for name in ("run.dir", "run.resume"):
        if name in ends or name in given:
            raise ConfigError(
                given=name,
                rule="each trial is a run of its own, in a folder of the search",
                consequence="nothing was started",
                nearest="leave it out; --out is the folder of the search",
            )
    if both := sorted(given & set(ends)):
        raise ConfigError(
            given=f"--set {both[0]} with --space {both[0]}",
            rule="a setting has one value, or is searched",
            consequence="nothing was started",
            nearest="one of them",
        )
    folder = f"run.dir={out.absolute() / 'trials' / 'none'}"  # the configuration of a run that is there would be read
    for name, values in ends.items():
        for value in values:
            load_run_config(files, [*overrides, folder, f"{name}={value}"], is_shown=True)
    return load_run_config(files, [*overrides, folder], is_shown=True)


def _identity(resolved: Resolved[RunConfig]) -> dict[str, Any]:
    """What the trials of a search have in common."""
    code = {} if resolved.python is None else {"the Python file": resolved.python.digest}
    return {name: value for name, value in resolved.encoded.items() if name != "run.dir"} | code


class _Printed:
    """Lines about trials, as they begin and end."""

    def __init__(self, *, metric: str, as_json: bool) -> None:
        self._metric, self._as_json = metric, as_json

    def tell(self, trial: Trial, end: RunEnd | None, outcome: Outcome | None, value: float | None) -> None:
        if self._as_json:
            return
        settings = " ".join(f"{name}={text}" for name, text in trial.settings.items())
        if end is None or outcome is None:
            echo(printable(f"trial {trial.number}: {settings}"))
            return
        figure = "" if value is None else f"{self._metric} {value:.6g}"
        words = outcome.replace("_", " ")
        why = end.reason.partition("\n")[0]
        shown = [figure if outcome == "done" else f"{words}{f', {figure}' if figure else ''}", why]
        echo(printable(f"trial {trial.number}: {'; '.join(filter(None, shown))}"))


def _write(
    out: Path, space: Space, chosen: StudyOptions, study: Study, transfer: WidthTransfer | None
) -> tuple[dict[str, Any], list[str]]:
    """Write the report and the file of the best trial.

    Args:
        out: The folder of the search.
        space: The settings that are searched.
        chosen: How it chooses.
        study: Its trials.
        transfer: The widths, if the result is for a wider model.

    Returns:
        The result as JSON types and as lines.
    """
    from unisono.tune.best import BEST_FILE, write_best
    from unisono.tune.search_page import REPORT_FILE, verdict, write_search_page

    records, best = study.records(), study.best()
    importances = study.importances()
    write_search_page(out / REPORT_FILE, space, chosen, records, importances, transfer)
    lines = [verdict(chosen, best)]
    if transfer is not None:
        lines.append(transfer.verdict())
    result: dict[str, Any] = {
        "out": str(out),
        "report": str(out / REPORT_FILE),
        "metric": chosen.metric,
        "trials": [record.to_json() for record in records],
        "importances": importances,
        "transfer": None if transfer is None else transfer.to_json(),
        "best": None,
    }
    if best is not None:
        write_best(out / BEST_FILE, best, {} if transfer is None else transfer.full)
        result |= {"best": best.to_json(), "best_file": str(out / BEST_FILE)}
        lines.append(f"train with it: unisono train {out / BEST_FILE}")
    lines.append(f"report: {out / REPORT_FILE}")
    return result, lines
