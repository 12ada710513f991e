"""``unisono tune``: settings found by search."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from unisono.cli.common import FiniteRange, common_options, load_run_config, print_result, takes_config, train_arguments
from unisono.cli.job_progress import resumable
from unisono.cli.terminal import echo
from unisono.cli.termination import sigterm_interrupts
from unisono.cli.tune_folds import folds
from unisono.cli.tune_out import takes_out
from unisono.cli.tune_system import system
from unisono.cli.tune_transfer import read_transfer, transfer_options, with_check
from unisono.cli.tune_trials import check_searched, identity_of, run_trials, unused_run_dir
from unisono.cli.tune_width import coordinates, default_schedule
from unisono.config.values import toml_value
from unisono.errors import ConfigError
from unisono.sanitize import printable
from unisono.storage.directory import make_folder

if TYPE_CHECKING:
    from unisono.config import Resolved
    from unisono.train.config import RunConfig
    from unisono.tune.batch_size import Probe
    from unisono.tune.space import Space
    from unisono.tune.study import Study, StudyOptions
    from unisono.tune.transfer import WidthTransfer

_NUM_EVAL_SAMPLES: Final = "train.num_eval_samples"


@click.group("tune")
def command() -> None:
    """Find settings by search: each trial is a training of its own."""


command.add_command(coordinates)
command.add_command(folds)
command.add_command(system)


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
@takes_out("Folder of the search; goes on where it has one.")
@click.option(
    "--metric",
    default="eval/loss",
    show_default=True,
    help="Metric in the run's events, such as eval/accuracy; its last value is used.",
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
@click.option("--max-s", type=FiniteRange(min=0, min_open=True), help="Start no new trial after this many seconds.")
@click.option(
    "--max-device-s",
    type=FiniteRange(min=0, min_open=True),
    help="Start no new trial once all have used this many device-seconds (processes x seconds).",
)
@click.option("--parallel", type=click.IntRange(min=1), default=1, show_default=True, help="Trials at a time.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the sampler.")
@transfer_options
@common_options
def params(
    config: tuple[str, ...], overrides: tuple[str, ...], space: tuple[str, ...], as_json: bool, **options: Any
) -> None:
    """Search for the values of settings with which CONFIG trains best.

    The first trial has CONFIG's own values, where they are in the ranges. The folder gets a run for each trial, report.html,
    and best.toml, which unisono train takes, both after each trial. A search that was interrupted (exit code 75 after Ctrl-C or
    SIGTERM) goes on with the same command; several may work on one folder. With --transfer a coordinate check comes first. Exit
    code 1: no trial has a result, or the check says that the learning rate does not transfer.
    """
    from unisono.launch.job import refuse_inside_a_job
    from unisono.train.metric_kinds import larger_is_better
    from unisono.tune.search import Budget
    from unisono.tune.space import grid_size, read_space, settings_within
    from unisono.tune.study import Study, StudyOptions
    from unisono.tune.transfer import require_transferred

    out = Path(options["out"])
    refuse_inside_a_job(out)
    searched = read_space(space)
    if options["sampler"] == "grid":
        grid_size(searched)
    files = [os.path.abspath(path) for path in config]
    resolved = check_searched(
        files, overrides, {name: parameter.checked_values() for name, parameter in searched.items()}, out
    )
    settings, identity = list(overrides), identity_of(resolved)
    unused = unused_run_dir(out)
    transfer = read_transfer(files, overrides, options["transfer"], options["proxy_width"], unused)
    if transfer is not None:
        require_transferred(searched)
        settings += transfer.proxy_overrides()
        resolved = load_run_config(files, [*settings, f"run.dir={unused}"], is_shown=True)
        identity = {**transfer.identity(), **identity_of(resolved)}
    if options["maximize"] is None:
        options["maximize"] = bool(larger_is_better(options["metric"]))
    chosen = StudyOptions(**{name: options[name] for name in ("metric", "maximize", "sampler", "pruner", "seed")})
    own = None if chosen.sampler == "grid" else settings_within(searched, resolved.encoded)
    study = Study(out.absolute(), searched, chosen, identity, first=own)
    limit = options["trials"] if options["trials"] or options["sampler"] == "grid" else 20
    budget = Budget(trials=limit, seconds=options["max_s"], device_s=options["max_device_s"])
    try:
        if transfer is not None:
            transfer = with_check(transfer, out, files, overrides, as_json=as_json)
        if transfer is None or transfer.holds:
            run_trials(
                study,
                out,
                resolved,
                files,
                settings,
                chosen.metric,
                budget,
                options["parallel"],
                write=lambda: _write(out, searched, chosen, study, resolved, transfer),
                as_json=as_json,
            )
    finally:
        result, lines = _write(out, searched, chosen, study, resolved, transfer)
    print_result(as_json, result, lines)
    if result["best"] is None or (transfer is not None and not transfer.holds):
        raise SystemExit(1)


@command.command("lr")
@takes_config
@takes_out("Folder for the training and its page; a new one.")
@click.option(
    "--low", default=1e-6, show_default=True, type=FiniteRange(min=0, min_open=True), help="First learning rate."
)
@click.option(
    "--high", default=1.0, show_default=True, type=FiniteRange(min=0, min_open=True), help="Last learning rate."
)
@click.option(
    "--steps",
    default=100,
    show_default=True,
    type=click.IntRange(min=10, max=100_000),
    help="Training steps; the rate rises at each.",
)
@transfer_options
@common_options
def lr(config: tuple[str, ...], overrides: tuple[str, ...], out: str, as_json: bool, **options: Any) -> None:
    """Find the range of learning rates: one training whose rate rises at every step until the loss rises too.

    Proposes the rate at which the loss fell fastest. It depends on the batch size and the optimizer: change those first. With
    --transfer a coordinate check comes first; exit code 1: it says that the learning rate does not transfer.
    """
    from unisono.launch.job import refuse_inside_a_job
    from unisono.tune.folder import require_empty
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
    require_empty(folder)
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
        make_folder(folder)
        transfer = with_check(transfer, folder, files, overrides, as_json=as_json)
    result: dict[str, Any] = {"out": out, "transfer": None if transfer is None else transfer.to_json()}
    if transfer is not None and not transfer.holds:
        page = folder / CHECK_FOLDER / "report.html"
        print_result(as_json, {**result, "report": str(page)}, [transfer.verdict(), f"report: {page}"])
        raise SystemExit(1)
    with sigterm_interrupts():
        found = run_range_test(
            folder.absolute() / "run",
            train_arguments(files, texts),
            steps=steps,
            on_step=lambda rate, loss: None if as_json else echo(f"lr {rate:.3g}: loss {loss:.5g}"),
        )
    write_range_page(folder / "report.html", found, transfer)
    lines, base = [range_verdict(found)], ""
    if transfer is not None:
        lines.append(transfer.verdict())
        base = f" --set model.mup_base_dim={transfer.proxy_width}"
    if found.suggested_lr is not None:
        lines.append(f"unisono train … --set optim.lr={found.suggested_lr:.2g}{base}")
    lines.append(f"report: {folder / 'report.html'}")
    print_result(as_json, {**result, "report": str(folder / "report.html"), **found.to_json()}, lines)


@command.command("batch")
@takes_config
@takes_out("Folder for the page; goes on where it has trainings.")
@click.option(
    "--max-micro-batch",
    default=1024,
    show_default=True,
    type=click.IntRange(min=1),
    help="Largest micro-batch to try.",
)
@common_options
def batch(config: tuple[str, ...], overrides: tuple[str, ...], out: str, max_micro_batch: int, as_json: bool) -> None:
    """Find the largest micro-batch that fits into memory, by short trainings in processes of their own.

    Doubles the micro-batch until it does not fit, then bisects. A running job is not touched. A command that was killed, or
    stopped by Ctrl-C, goes on behind its last training.
    """
    from unisono.launch.job import refuse_inside_a_job
    from unisono.launch.resources import count_accelerators
    from unisono.storage.folder_lock import FolderLock
    from unisono.tune.batch_size import (
        PAGE_FILE,
        RECORD_FILE,
        BatchRecord,
        batch_verdict,
        data_ranks,
        find_largest,
        probe_size,
        write_batch,
    )
    from unisono.tune.folder import read_record, require_own

    folder = Path(out).absolute()
    refuse_inside_a_job(folder)
    files = [os.path.abspath(path) for path in config]
    trials = folder / "trials"
    resolved = load_run_config(files, [*overrides, f"run.dir={unused_run_dir(folder)}"], is_shown=True)
    ranks = resolved.value.launch.num_processes or max(1, count_accelerators())
    arguments = train_arguments(files, overrides)
    require_own(folder, RECORD_FILE, (".lock",))
    make_folder(folder)
    lock = FolderLock(folder / ".lock", work="tries sizes", nearest="wait for its end, or another folder (--out)")
    try:
        record = read_record(
            folder / RECORD_FILE, BatchRecord, identity_of(resolved), "search of the largest micro-batch"
        )
        made = {probe.micro_batch: probe for probe in record.probes}

        def try_size(size: int) -> Probe:
            if size in made:
                return made[size]
            shutil.rmtree(trials / str(size), ignore_errors=True)  # of one that was killed
            probe = probe_size(trials / str(size), arguments, size, ranks, settings=resolved.encoded)
            made[size] = probe
            record.probes.append(probe)
            write_batch(folder, record)
            if not as_json:
                memory = f", {probe.peak_bytes / 2**30:.3g} GiB" if probe.peak_bytes else ""
                speed = f", {probe.samples_per_s:.4g} samples/s" if probe.samples_per_s else ""
                echo(printable(f"{size}: {f'fits{memory}{speed}' if probe.fits else f'does not fit: {probe.reason}'}"))
            return probe

        with resumable(Path(out)):
            try_size(1)
            found = find_largest(
                try_size,
                max_micro_batch=max_micro_batch,
                share=max(1, resolved.value.plan.global_batch // data_ranks(trials / "1")),
                on_host=count_accelerators() == 0,
            )
        write_batch(folder, record, found)
    finally:
        lock.close()
    print_result(
        as_json,
        {"out": out, "report": str(folder / PAGE_FILE), **found.to_json()},
        [
            batch_verdict(found),
            f"unisono train … --set plan.micro_batch={found.proposed}, which divides the global batch",
            f"report: {Path(out) / PAGE_FILE}",
        ],
    )


def _write(
    out: Path,
    space: Space,
    chosen: StudyOptions,
    study: Study,
    resolved: Resolved[RunConfig],
    transfer: WidthTransfer | None,
) -> tuple[dict[str, Any], list[str]]:
    """Write the report and the file of the best trial.

    Args:
        out: The folder of the search.
        space: The settings that are searched.
        chosen: How it chooses.
        study: Its trials.
        resolved: The configuration of its trials.
        transfer: The widths, if the result is for a wider model.

    Returns:
        The result as JSON types and as lines.
    """
    from unisono.tune.best import BEST_FILE, write_best
    from unisono.tune.search_page import REPORT_FILE, verdict, why_no_importance, write_search_page
    from unisono.tune.space import num_combinations

    records, best = study.records(), study.best()
    importances = study.importances()
    samples = 0
    if chosen.metric.startswith("eval/") and _NUM_EVAL_SAMPLES not in space:
        samples = resolved.value.train.num_eval_samples
    write_search_page(out / REPORT_FILE, space, chosen, records, best, importances, transfer, num_eval_samples=samples)
    lines = [verdict(chosen, best)]
    if transfer is not None:
        lines.append(transfer.verdict())
    if samples and best is not None:
        lines.append(f"compared by at most {samples} held-out samples; {_NUM_EVAL_SAMPLES}=0 takes all")
    if (size := num_combinations(space)) is not None and size <= sum(record.outcome != "running" for record in records):
        lines.append(f"all {size} combinations are tried")
    if best is not None and (missing := why_no_importance(sum(record.outcome == "done" for record in records))):
        lines.append(missing)
    result: dict[str, Any] = {
        "out": str(out),
        "report": str(out / REPORT_FILE),
        "metric": chosen.metric,
        "num_eval_samples": samples or None,
        "combinations": size,
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
