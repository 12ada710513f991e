"""``unisono tune system``: settings with which steps are faster."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from unisono.cli.common import common_options, load_run_config, print_result, takes_config, train_arguments
from unisono.cli.job_progress import resumable
from unisono.cli.terminal import echo
from unisono.cli.tune_out import takes_out
from unisono.cli.tune_trials import identity_of
from unisono.config.values import literal, toml_value
from unisono.errors import ConfigError
from unisono.sanitize import printable
from unisono.storage.directory import make_folder

if TYPE_CHECKING:
    from unisono.config import Resolved
    from unisono.doctor.child import TrainOutcome
    from unisono.train.config import RunConfig
    from unisono.tune.system import Candidate, Comparison

_TRAININGS: Final = ".trainings"  # removed at the end, or by the next command


@click.command("system")
@takes_config
@takes_out("Folder for the page and the overlay; goes on where it has comparisons.")
@click.option(
    "--try",
    "tries",
    multiple=True,
    metavar="NAME=A,B",
    help="Try these values, where CONFIG has another one, and no others.",
)
@click.option("--steps", default=30, show_default=True, type=click.IntRange(min=12), help="Steps of a training.")
@click.option(
    "--pairs", default=3, show_default=True, type=click.IntRange(min=1), help="Pairs of trainings of a setting."
)
@common_options
def system(config: tuple[str, ...], overrides: tuple[str, ...], out: str, as_json: bool, **options: Any) -> None:
    """Find settings with which steps are faster: precision, compilation, workers, threads, allocator, micro-batch.

    Each is tried in short trainings, side by side with the settings so far. system.toml has those that were faster in every pair.
    Page and overlay are written after each setting; a command that was killed, or stopped by Ctrl-C, goes on behind the last one.
    """
    from unisono.doctor.child import train_child
    from unisono.doctor.short_run import QUIET, set_arguments
    from unisono.launch.job import refuse_inside_a_job
    from unisono.storage.folder_lock import FolderLock
    from unisono.tune.folder import read_record, require_own
    from unisono.tune.system import (
        PAGE_FILE,
        RECORD_FILE,
        Sweep,
        SweepRecord,
        micro_batch_candidates,
        sweep,
        write_sweep,
    )
    from unisono.tune.unwritable import unwritable_error, unwritable_reason

    folder = Path(out).absolute()
    refuse_inside_a_job(folder)
    if len(config) > 1:
        raise ConfigError(
            given=f"{len(config)} files of configuration",
            rule="the overlay that is written goes over one file",
            consequence="nothing was started",
            nearest="one file that has the others as its base",
        )
    files = [os.path.abspath(path) for path in config]
    base = files[0] if files else ""
    trainings = folder / _TRAININGS
    resolved = load_run_config(files, [*overrides, f"run.dir={trainings / '0'}"], is_shown=True)
    settings = resolved.encoded
    first = _candidates(resolved, options["tries"])
    if options["tries"]:
        for each in first:  # an unknown setting or a wrong value is refused before any training
            tried = f"{each.name}={toml_value(each.value)}"
            load_run_config(files, [*overrides, tried, f"run.dir={trainings / '0'}"], is_shown=True)
    own = {name.strip(): literal(text.strip()) for name, _, text in (each.partition("=") for each in overrides)}
    quiet = {name: value for name, value in QUIET.items() if name in settings}
    quiet |= {"train.steps": options["steps"], "train.epochs": 0.0, "checkpoint.every_steps": 0}
    given = train_arguments(files, overrides)
    numbers = count(1)
    require_own(folder, RECORD_FILE, (".lock",))
    make_folder(folder)
    lock = FolderLock(folder / ".lock", work="tries settings", nearest="wait for its end, or another folder (--out)")
    try:
        record = read_record(
            folder / RECORD_FILE,
            SweepRecord,
            {
                **identity_of(resolved),
                "--try": options["tries"],
                **{f"--{name}": options[name] for name in ("steps", "pairs")},
            },
            "sweep",
        )
        shutil.rmtree(trainings, ignore_errors=True)
        make_folder(trainings, may_be_link=False)

        def train(changes: Mapping[str, Any]) -> TrainOutcome:
            run_dir = trainings / str(next(numbers))
            arguments = set_arguments({**quiet, **changes, "run.dir": str(run_dir)})
            outcome = train_child(run_dir, [*given, *arguments], timeout_s=1800.0)
            if outcome.trouble and (reason := unwritable_reason(trainings, outcome.trouble)):
                raise unwritable_error(trainings, reason)
            if record.micro_batch is None:  # the first training has no changes
                record.micro_batch, record.accumulation = outcome.micro_batch(), outcome.accumulation()
            return outcome

        def candidates() -> Iterator[Candidate]:
            yield from first
            if not options["tries"] and record.micro_batch is not None and record.accumulation is not None:
                yield from micro_batch_candidates(record.micro_batch, record.accumulation)

        def on_comparison(comparison: Comparison) -> None:
            record.comparisons.append(comparison)
            write_sweep(folder, base, record, own)
            if not as_json:
                echo(printable(f"{comparison.name}={comparison.value}: {comparison.words}"))

        with resumable(Path(out)):
            sweep(
                train,
                candidates(),
                pairs=options["pairs"],
                on_comparison=on_comparison,
                made=tuple(record.comparisons),
            )
        overlay = write_sweep(folder, base, record, own)
    finally:
        shutil.rmtree(trainings, ignore_errors=True)
        lock.close()
    found = Sweep(comparisons=record.comparisons)
    lines = [found.verdict(), f"report: {folder / PAGE_FILE}"]
    if overlay is not None:
        lines.insert(1, f"unisono train {overlay}")
    result = {"out": out, "report": str(folder / PAGE_FILE), "overlay": None if overlay is None else str(overlay)}
    print_result(as_json, {**result, **found.to_json()}, lines)


def _candidates(resolved: Resolved[RunConfig], tries: Sequence[str]) -> list[Candidate]:
    """What is tried: the values of ``--try``, or without it those that depend on no training.

    Raises:
        ConfigError: A range of ``--try`` has no steps, or it has no other values than the configuration's own.
    """
    from unisono.launch.resources import count_accelerators, divide_host
    from unisono.tune.space import Range, read_space
    from unisono.tune.system import Candidate, candidates_of

    if not tries:
        threads = divide_host(resolved.value.launch, busy_frac=0.0).threads
        return candidates_of(resolved.encoded, has_accelerator=count_accelerators() > 0, threads=threads)
    candidates: list[Candidate] = []
    for name, parameter in read_space(tries).items():
        texts = parameter.grid()
        if texts is None:
            assert isinstance(parameter, Range)
            raise ConfigError(
                given=f"--try {name}={parameter.text}",
                rule="every value is tried, so it needs a list, an integer range or a range with a step",
                consequence="nothing was started",
                nearest=f"--try {name}={','.join(map(parameter.value_text, (parameter.low, parameter.high)))}",
            )
        candidates += [Candidate(name=name, value=literal(text)) for text in texts]
    others = [each for each in candidates if each.value != resolved.encoded.get(each.name)]
    if not others:
        raise ConfigError(
            given=f"--try {' --try '.join(tries)}, which the configuration has",
            rule="a value is compared with that of the configuration",
            consequence="nothing was started",
            nearest="another value",
        )
    return others
