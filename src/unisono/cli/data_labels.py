"""``unisono data labels`` and ``relabel``: labels that are likely wrong, and a data set without them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from unisono.cli.common import ExpandedPath, OutPath, common_options, print_result
from unisono.cli.data_common import (
    IMAGE_NEAR,
    InputPath,
    duplicate_options,
    text_duplicate_options,
    unreadable_lines,
    with_places,
    worker_options,
)
from unisono.cli.job_progress import resumable
from unisono.errors import ConfigError
from unisono.sanitize import printable

if TYPE_CHECKING:
    from unisono.quality.labels.label_errors import LabelsResult
    from unisono.quality.labels.relabel import RelabelResult

_SHOWN: Final = 5  # pairs of labels that fit on a screen


@click.command("labels")
@click.argument("inputs", nargs=-1, required=True, type=InputPath())
@click.option(
    "--label", metavar="FIELD", help="Field of the labels (default: the folder of files, the class of image records)."
)
@click.option("--out", required=True, type=OutPath(path_type=Path), help="A new folder for the results.")
@click.option(
    "--losses",
    type=ExpandedPath(path_type=Path),
    help="Folder of unisono tune folds --sample-losses over INPUTS: also look for labels that its models contradict.",
)
@click.option("--whole-rows", is_flag=True, help="Compare rows without their label: for tables without a text.")
@click.option(
    "--max-shown",
    type=click.IntRange(min=1),
    default=200,
    show_default=True,
    help="Conflicts, and suspects, that the page shows.",
)
@IMAGE_NEAR
@text_duplicate_options
@common_options
def find_labels(
    inputs: tuple[Path, ...],
    label: str | None,
    out: Path,
    losses: Path | None,
    whole_rows: bool,
    max_shown: int,
    on_error: str,
    column: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Find labels of INPUTS that are likely wrong, and write a page on which they can be marked.

    INPUTS are tables with a field of text or images, folders of these, or folders of images; they do not change. Conflicts are
    documents that are the same or near each other and have different labels. Suspects are documents whose label models
    contradict that did not train on them. The same command goes on after an interruption.

    \b
    OUT/report.html      both, with buttons; saves marks.json, which unisono data relabel takes
    OUT/conflicts.jsonl  each conflict: its documents, their labels and similarities
    OUT/suspects.jsonl   each suspect, the most suspicious first
    """
    from unisono.quality.labels.label_errors import find_label_errors

    if whole_rows and column is not None:
        raise ConfigError(
            given=f"--whole-rows and --column {column}",
            rule="documents are compared by one field, or by all but the label",
            consequence="nothing was read",
            nearest="one of the two",
        )
    with resumable(out) as progress:
        result = find_label_errors(
            inputs,
            out,
            label,
            losses=losses,
            options=duplicate_options(options),
            column=column,
            whole_rows=whole_rows,
            skips_unreadable=on_error == "skip",
            most=max_shown,
            workers=options["workers"],
            progress=progress,
        )
    print_result(as_json, with_places(out, result), _labels_lines(result, out))


def _labels_lines(result: LabelsResult, out: Path) -> list[str]:
    lines = [
        f"{result.documents:,} documents with {len(result.labels):,} labels",
        f"{result.conflicts:,} conflicts of {result.in_conflict:,} documents",
    ]
    if result.ranked_by:
        lines.append(f"{result.suspects:,} suspects among {result.evaluated:,} documents with a loss")
    if result.is_near_chance:
        lines.append(
            f"warning: the models are hardly better than chance (mean loss {result.mean_loss:.3g}, of chance "
            f"{result.chance_loss:.3g}): what they contradict says little; train the folds longer"
        )
    lines += [
        printable(f"     {count:,} {label}, likely {suggested}")
        for label, suggested, count in result.confusions[:_SHOWN]
    ]
    if len(result.confusions) > _SHOWN:
        lines.append(f"     and {len(result.confusions) - _SHOWN:,} more pairs of labels")
    if result.num_capped:
        noun = "images" if result.content == "images" else "texts"
        lines.append(f"{result.num_capped:,} {noun} had too many candidates to be compared with all of them")
    return [*lines, *unreadable_lines(result.unreadable), f"look through and mark: {out / 'report.html'}"]


@click.command("relabel")
@click.argument("inputs", nargs=-1, required=True, type=InputPath())
@click.option(
    "--marks",
    required=True,
    type=ExpandedPath(path_type=Path),
    help="The file that the page of unisono data labels saved.",
)
@click.option("--out", required=True, type=OutPath(path_type=Path), help="A new folder for the results.")
@worker_options
@common_options
def relabel_documents(
    inputs: tuple[Path, ...], marks: Path, out: Path, workers: int | str | None, as_json: bool
) -> None:
    """Write INPUTS with marked labels changed, and without the documents that were marked to be dropped, into a new folder.

    INPUTS are those of unisono data labels; they do not change. Marks of other data are refused. A file whose label is its
    folder goes into the folder of its new label.

    \b
    OUT/data           the documents, in files of the inputs' names and formats
    OUT/kept           the row indices of the kept rows of each table, as .npy
    OUT/changes.jsonl  each change: file, row, label before and after
    """
    from unisono.quality.labels.relabel import relabel

    with resumable(out) as progress:
        result = relabel(inputs, out, marks, workers=workers, progress=progress)
    print_result(as_json, with_places(out, result), _relabel_lines(result, out))


def _relabel_lines(result: RelabelResult, out: Path) -> list[str]:
    lines = [
        f"{result.changed:,} of {result.documents:,} labels changed, {result.num_dropped:,} documents dropped, "
        f"{result.confirmed:,} labels confirmed"
    ]
    lines += [printable(f"     {count:,} {label} to {to}") for label, to, count in result.changes]
    return [*lines, *unreadable_lines(result.unreadable), f"report: {out / 'report.html'}"]
