"""``unisono tune coord-check``: whether the first steps of a model change its activations alike at all widths."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from unisono.cli.common import common_options, load_run_config, print_result, takes_config
from unisono.cli.terminal import echo
from unisono.cli.termination import sigterm_interrupts
from unisono.cli.tune_out import takes_out
from unisono.cli.tune_trials import unused_run_dir
from unisono.config.values import toml_value
from unisono.errors import ConfigError
from unisono.storage.directory import make_folder


@click.command("coord-check")
@takes_config
@takes_out("Folder for report.html and report.json; a new one.")
@click.option(
    "--widths",
    metavar="A,B,C",
    help="Values of model.dim (default: that with one key/value head, and 2, 4 and 8 times it).",
)
@click.option(
    "--steps", default=8, show_default=True, type=click.IntRange(min=1, max=1000), help="Steps of a training."
)
@click.option(
    "--seeds", default=3, show_default=True, type=click.IntRange(min=1, max=100), help="Trainings of each width."
)
@common_options
def coordinates(
    config: tuple[str, ...],
    overrides: tuple[str, ...],
    out: str,
    widths: str | None,
    steps: int,
    seeds: int,
    as_json: bool,
) -> None:
    """Check whether the first steps of CONFIG change its activations alike at all widths (coordinate check of muP).

    Trains a few steps at each width. Exit code 1: changes grow or shrink with the width, so a learning rate that is right for one
    width is not right for another.
    """
    from unisono.doctor.short_run import QUIET
    from unisono.launch.job import refuse_inside_a_job
    from unisono.tune.coordinates import CoordinateCheck, write_coordinates
    from unisono.tune.width import default_widths, settings_of_width

    folder = Path(out).absolute()
    refuse_inside_a_job(folder)
    if there := [path for name in ("report.json", "report.html") if (path := folder / name).exists()]:
        raise ConfigError(
            given=f"--out {out}, where {there[0]} exists",
            rule="this command begins anew, in a folder of its own",
            consequence="nothing was started",
            nearest="another folder, or remove that file",
        )
    files = [os.path.abspath(path) for path in config]
    quiet = {
        **QUIET,
        "run.resume": "never",
        "train.steps": steps,
        "train.epochs": 0.0,
        "checkpoint.every_steps": 0,
        "components.callbacks": "",
    }
    own = load_run_config(files, [*overrides, f"run.dir={unused_run_dir(folder)}"], is_shown=True)
    if not own.value.components.schedule:
        quiet |= {**default_schedule(), "schedule.kind": "constant"}
    texts = [*overrides, *(f"{name}={toml_value(value)}" for name, value in quiet.items())]
    given = load_run_config(files, [*texts, f"run.dir={unused_run_dir(folder)}"], is_shown=True)
    chosen = _read_widths(widths) if widths else default_widths(given.encoded)
    settings = [settings_of_width(given.encoded, width) for width in chosen]
    first_seed = given.value.run.seed
    resolved = [
        [
            load_run_config(
                files,
                [
                    *texts,
                    f"run.dir={unused_run_dir(folder)}",
                    *(f"{name}={value}" for name, value in each.items()),
                    f"run.seed={first_seed + number}",
                ],
            )
            for number in range(seeds)
        ]
        for each in settings
    ]
    from unisono.train.coordinate_check import measure_changes  # torch, once the settings are known to be good

    make_folder(folder)
    changes: dict[str, list[float]] = {}
    with (
        TemporaryDirectory(prefix=".trainings-", dir=folder, ignore_cleanup_errors=True) as temporary,
        sigterm_interrupts(),
    ):
        for width, of_width in zip(chosen, resolved, strict=True):
            squares: dict[str, float] = {}
            for number, each in enumerate(of_width):
                for name, values in measure_changes(each, Path(temporary) / f"{width}-{number}").items():
                    squares[name] = squares.get(name, 0.0) + values[-1] ** 2 / seeds
            for name, square in squares.items():
                changes.setdefault(name, []).append(square**0.5)
            if not as_json:
                echo(f"width {width}: logits changed by {changes['logits'][-1]:.3g}")
    found = CoordinateCheck(base_dim=given.value.model.mup_base_dim, widths=chosen, steps=steps, changes=changes)
    write_coordinates(folder, found)
    lines = [found.verdict(), f"report: {Path(out) / 'report.html'}"]
    if not found.is_flat and not found.base_dim:
        lines.insert(1, f"unisono tune coord-check … --set model.mup_base_dim={chosen[0]}")
    result: dict[str, Any] = {"out": out, "report": str(folder / "report.html"), **found.to_json()}
    print_result(as_json, result, lines)
    raise SystemExit(0 if found.is_flat else 1)


def default_schedule() -> dict[str, Any]:
    """All settings of the schedule with their defaults: a configuration has some that another kind of schedule does not read."""
    from unisono.config import load_config
    from unisono.train.config import RunConfig

    return {name: value for name, value in load_config(RunConfig).encoded.items() if name.startswith("schedule.")}


def _read_widths(text: str) -> list[int]:
    """Widths of the command line, rising. Raises ConfigError."""
    from unisono.tune.coordinates import FEWEST_WIDTHS

    parts = [part.strip() for part in text.split(",")]
    widths = sorted({int(part) for part in parts if part.isascii() and part.isdigit() and 0 < len(part) < 10})
    if len(widths) != len(parts) or len(widths) < FEWEST_WIDTHS or widths[0] < 1:
        raise ConfigError(
            given=f"--widths {text}",
            rule=f"a slope is estimated from {FEWEST_WIDTHS} or more different whole numbers",
            consequence="nothing was started",
            nearest="--widths 64,128,256",
        )
    return widths
