"""``unisono plan simulate``: predicted step times and memory of jobs on clusters that are not here."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path

import click

from unisono.cli.common import ExpandedPath, common_options, print_result
from unisono.cli.prediction_text import layout_facts, prediction_lines
from unisono.errors import ConfigError, nearest_name
from unisono.storage.files import os_reason
from unisono.storage.limits import MAX_TEXT_BYTES, read_limited

_NEEDED = ("model", "gpu_type", "gpus")


@click.command("simulate")
@click.argument("settings", nargs=-1, metavar="[COLUMN=VALUE]...")
@click.option(
    "--rows",
    type=ExpandedPath(exists=True, dir_okay=False),
    help="A CSV file: one job in each row, predictions appended.",
)
@common_options
def simulate(settings: tuple[str, ...], rows: str | None, as_json: bool) -> None:
    """Predict step time and memory of a job on a cluster that is not here. Nothing is run.

    One job: unisono plan simulate model=llama-3-70b gpu_type=h100 gpus=1024 tp=8 pp=4 micro_batch=1 global_batch=1024

    Columns: model (a preset, a folder of Hugging Face or its config.json, or a run's configuration), gpu_type, gpus (needed; of a
    cluster in a TOML file gpu_type=FILE.toml alone); seq_len, tp, pp, cp, ep, fsdp, zero, micro_batch, global_batch, precision,
    recompute, cut, layers_per_stage, keeps, notes (VP=2: two stages per rank); layers, hidden, heads, kv_heads, ffn, vocab and
    tied of a model without a preset.
    """
    if (rows is None) == (not settings):
        raise _refused(
            "both a job and --rows" if rows else "no job",
            "either the columns of one job are given, or --rows with a CSV file",
            "unisono plan simulate model=llama-3-8b gpu_type=h100 gpus=8 fsdp=8",
        )
    if rows is not None:
        _print_rows(Path(rows), as_json)
        return
    from unisono.planner.layout import LayoutError
    from unisono.planner.layout_columns import read_layout
    from unisono.planner.simulate import predict

    given = _columns(settings)
    try:
        layout = read_layout(given)
    except LayoutError as error:
        raise _refused(error.given, error.rule, error.nearest) from error
    (prediction,) = predict([layout])
    print_result(
        as_json,
        {"job": given, "layout": layout_facts(layout), **asdict(prediction), "peak_bytes": prediction.peak_bytes},
        prediction_lines(layout, prediction),
    )


def _columns(settings: tuple[str, ...]) -> dict[str, str]:
    from unisono.planner.layout_columns import COLUMNS

    given: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or name not in COLUMNS:
            rule = f"a job is described by COLUMN=VALUE, where COLUMN is one of {', '.join(COLUMNS)}"
            raise _refused(setting, rule, nearest_name(name, COLUMNS))
        if name in given:
            raise _refused(f"{name}={given[name]} and {setting}", "a column has one value", setting)
        given[name] = value
    return given


def _refused(given: str, rule: str, nearest: str) -> ConfigError:
    return ConfigError(given=given, rule=rule, consequence="nothing was predicted", nearest=nearest)


def _print_rows(path: Path, as_json: bool) -> None:
    from unisono.planner.simulate import PREDICTED, predict_rows

    columns, found, faults = _read_rows(path)
    predicted = predict_rows(found)
    for number, fault in faults.items():
        predicted[number].update(dict.fromkeys(PREDICTED, "") | {"error": fault})
    header = [*columns, *(name for name in PREDICTED if name not in columns)]
    print_result(as_json, {"rows": predicted}, _csv_lines(header, predicted))


def _read_rows(path: Path) -> tuple[list[str], list[dict[str, str]], dict[int, str]]:
    """Columns and rows of a file, and what is wrong with rows of more cells than the header, by number."""
    try:
        text = io.StringIO(read_limited(path, MAX_TEXT_BYTES).decode("utf-8-sig"), newline="")
        columns, *lines = [line for line in csv.reader(text, strict=True) if line] or [[]]
    except (csv.Error, OSError, ValueError) as error:
        raise _refused(
            f"--rows {path}: {os_reason(error) if isinstance(error, OSError) else error}",
            f"rows are read from a CSV file of at most {MAX_TEXT_BYTES:,} bytes in UTF-8 with a first line of column names",
            "a file with the columns model,gpu_type,gpus and those of the plan",
        ) from error
    missing = [name for name in _NEEDED if name not in columns]
    if missing or len(set(columns)) < len(columns):
        what = f"no column {', '.join(missing)}" if missing else "a column that is there twice"
        raise _refused(
            f"--rows {path}: {what}",
            f"the columns {', '.join(_NEEDED)} say what runs where, and each column is there once",
            "a first line with these columns; a row may leave others empty",
        )
    rows = [dict(zip_longest(columns, line[: len(columns)], fillvalue="")) for line in lines]
    faults = {
        number: f"{len(line)} cells, where the header has {len(columns)}"
        for number, line in enumerate(lines)
        if len(line) > len(columns)
    }
    return columns, rows, faults


def _csv_lines(header: list[str], rows: list[dict[str, str]]) -> Iterator[str]:
    text = io.StringIO()
    writer = csv.DictWriter(text, header, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    yield text.getvalue().removesuffix("\n")
