"""``unisono data balance``: classes of a data set, and sampling weights for a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from unisono.cli.common import ExpandedPath, FiniteRange, common_options, print_result
from unisono.cli.data_common import InputPath, with_places
from unisono.cli.job_progress import resumable
from unisono.sanitize import printable

if TYPE_CHECKING:
    from unisono.quality.balance import BalanceResult

_SHOWN: Final = 20  # classes that fit on a screen


@click.command("balance")
@click.argument("inputs", nargs=-1, required=True, type=InputPath())
@click.option("--label", default="targets", show_default=True, metavar="FIELD", help="Field of the label.")
@click.option("--out", type=ExpandedPath(path_type=Path), help="A new folder for the weights and a report.")
@click.option(
    "--power",
    type=FiniteRange(min=0.0, max=2.0),
    default=1.0,
    show_default=True,
    help="Weights are size of the class ^ -POWER: 1 = equal shares, 0.5 = square roots, 0 = as they are.",
)
@click.option(
    "--max-repeats", type=click.IntRange(min=1), help="Most reads of a row in an epoch, on average (default: no limit)."
)
@common_options
def balance_classes(
    inputs: tuple[Path, ...], label: str, out: Path | None, power: float, max_repeats: int | None, as_json: bool
) -> None:
    """Count the classes of INPUTS, and compute a sampling weight for each row: those of rare classes are read more often.

    INPUTS are tables, image records, or folders of tables, of images (a class for each folder) or of Hugging Face's datasets.
    They do not change. The label of images is in the field targets. Rows without a label get the weight 0. A run reads OUT with
    data.sample_weights=OUT.

    \b
    OUT/weights      the weight of each row of each file, as .npy: how often it is read in an epoch
    OUT/report.html  classes and their shares without and with the weights; OUT/report.json the same
    """
    from unisono.quality.balance import balance

    with resumable(out) as progress:
        result = balance(inputs, out, field=label, power=power, max_repeats=max_repeats or 0, progress=progress)
    print_result(
        as_json, with_places(out, result), [*_lines(result), *([f"report: {out / 'report.html'}"] if out else [])]
    )


def _lines(result: BalanceResult) -> list[str]:
    lines = [
        f"{result.rows:,} rows of {len(result.classes):,} classes, effectively {result.effective_classes:.4g}; the largest has "
        f"{result.imbalance:.4g} times the rows of the smallest"
    ]
    if result.unlabelled:
        lines.append(f"{result.unlabelled:,} rows without a label, which get the weight 0")
    lines += [
        f"{each.share:8.2%} {printable(each.name)}: {each.rows:,} rows; with the weights {each.weighted_share:.2%}, "
        f"a row {each.reads_per_epoch:.4g} times an epoch"
        for each in result.classes[:_SHOWN]
    ]
    if len(result.classes) > _SHOWN:
        lines.append(f"and {len(result.classes) - _SHOWN:,} classes more (--json has all of them)")
    return lines
