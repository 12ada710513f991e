"""``unisono plan simulate``: predicted step times of jobs on clusters that are not here."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from unisono.cli.common import common_options, print_result
from unisono.errors import ConfigError

if TYPE_CHECKING:
    from unisono.planner.simulate import Prediction

_NEEDED = ("model", "gpu_type", "gpus")


@click.command("simulate")
@click.argument("settings", nargs=-1, metavar="[COLUMN=VALUE]...")
@click.option(
    "--rows",
    type=click.Path(exists=True, dir_okay=False),
    help="A CSV file: one job in each row, predictions appended.",
)
@common_options
def simulate(settings: tuple[str, ...], rows: str | None, as_json: bool) -> None:
    """Predict the step time of a job on a cluster that is not here. Nothing is run.

    One job: unisono plan simulate model=llama-3-70b gpu_type=h100 gpus=1024 tp=8 pp=4 micro_batch=1 global_batch=1024

    Columns: model, gpu_type, gpus (needed); seq_len, tp, pp, cp, ep, fsdp, micro_batch, global_batch, precision, recompute, notes
    (VP=2: virtual stages); layers, hidden, heads, kv_heads, ffn, vocab of a model without a preset.
    """
    if (rows is None) == (not settings):
        raise ConfigError(
            given="both a job and --rows" if rows else "no job",
            rule="either the columns of one job are given, or --rows with a CSV file",
            consequence="nothing was predicted",
            nearest="unisono plan simulate model=llama-3-8b gpu_type=h100 gpus=8 fsdp=8",
        )
    if rows is not None:
        _print_rows(Path(rows), as_json)
        return
    from unisono.planner.published_rows import RowError, read_layout
    from unisono.planner.simulate import predict

    given = dict(_column(setting) for setting in settings)
    try:
        layout = read_layout(given)
    except RowError as error:
        raise ConfigError(
            given=" ".join(settings),
            rule=str(error),
            consequence="nothing was predicted",
            nearest="unisono plan simulate --help lists the columns; a model without a preset needs its shape",
        ) from error
    (prediction,) = predict([layout])
    print_result(as_json, {"job": given, **asdict(prediction)}, _lines(prediction))


def _column(setting: str) -> tuple[str, str]:
    name, equals, value = setting.partition("=")
    from unisono.planner.published_rows import COLUMNS

    if not equals or name not in COLUMNS:
        raise ConfigError(
            given=setting,
            rule=f"a job is described by COLUMN=VALUE, where COLUMN is one of {', '.join(COLUMNS)}",
            consequence="nothing was predicted",
            nearest="model=llama-3-8b",
        )
    return name, value


def _print_rows(path: Path, as_json: bool) -> None:
    from unisono.planner.simulate import PREDICTED, predict_rows

    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restkey="", restval="", strict=True)
            columns = list(reader.fieldnames or ())
            found = [{name: row[name] for name in columns} for row in reader]
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(
            given=f"--rows {path}: {error}",
            rule="rows are read from a CSV file in UTF-8 with a first line of column names",
            consequence="nothing was predicted",
            nearest="a file with the columns model,gpu_type,gpus and those of the plan",
        ) from error
    missing = [name for name in _NEEDED if name not in columns]
    if missing:
        raise ConfigError(
            given=f"--rows {path}: no column {', '.join(missing)}",
            rule=f"the columns {', '.join(_NEEDED)} say what runs where",
            consequence="nothing was predicted",
            nearest="add the columns; a row may leave others empty",
        )
    predicted = predict_rows(found)
    header = [*columns, *(name for name in PREDICTED if name not in columns)]
    print_result(as_json, {"rows": predicted}, _csv_lines(header, predicted))


def _csv_lines(header: list[str], rows: list[dict[str, str]]) -> Iterator[str]:
    text = io.StringIO()
    writer = csv.DictWriter(text, header, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    yield text.getvalue().removesuffix("\n")


def _lines(prediction: Prediction) -> Iterator[str]:
    step_s, factor = prediction.step_s, 1 + prediction.spread
    yield f"step {step_s:.4g} s; nine of ten such runs lie between {step_s / factor:.4g} and {step_s * factor:.4g} s"
    yield (
        f"{prediction.tokens_per_s:,.0f} tokens/s, {prediction.model_flops_per_s / 1e12:,.0f} TFLOP/s of each device, "
        f"{prediction.utilization:.1%} of its peak"
    )
    yield from _parts(prediction.parts_s, step_s)


def _parts(parts_s: Mapping[str, float], step_s: float) -> Iterator[str]:
    for name, seconds in sorted(parts_s.items(), key=lambda item: -item[1]):
        if seconds >= 0.001 * step_s:
            yield f"  {name.replace('_', ' '):<18}{seconds:>10.4g} s  {seconds / step_s:>6.1%}"
