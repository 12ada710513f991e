"""``unisono data clean``, ``recipe``, ``dedup``, ``leak`` and ``split``: documents before a run."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from unisono.cli.common import ExpandedPath, OutPath, common_options, fractions, print_result
from unisono.cli.data_common import (
    COLUMN,
    InputPath,
    duplicate_options,
    image_duplicate_options,
    text_duplicate_options,
    unreadable_lines,
    with_places,
    worker_options,
)
from unisono.cli.job_progress import resumable

if TYPE_CHECKING:
    from unisono.quality.clean import CleanResult
    from unisono.quality.leak import LeakResult

_SHOWN: Final = 20  # pairs that fit on a screen
_LANGUAGES: Final = 10  # languages that fit on a line


_INPUTS = click.argument("inputs", nargs=-1, required=True, type=InputPath())
_OUT = click.option("--out", required=True, type=OutPath(path_type=Path), help="A new folder for the results.")
_INDEX_ONLY = click.option(
    "--index-only",
    is_flag=True,
    help="Write only the indices of the kept rows (kept/), no copy of the data.",
)


@click.command("dedup")
@_INPUTS
@_OUT
@_INDEX_ONLY
@image_duplicate_options
@text_duplicate_options
@common_options
def dedup_documents(
    inputs: tuple[Path, ...],
    out: Path,
    on_error: str,
    index_only: bool,
    column: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Write INPUTS without their duplicates into a new folder; of each the first document is kept.

    INPUTS are tables with a field of text or images, files of these, or folders; they do not change. Documents are duplicates if
    their text is the same, or if their sets of word n-grams are similar enough. The same command goes on after an interruption.

    \b
    OUT/data           the kept documents, in files of the inputs' names and formats
    OUT/kept           the row indices of the kept rows of each table, as .npy
    OUT/dropped.jsonl  each dropped document, and the kept one it is a copy of
    OUT/report.html    counts, similarities and examples; OUT/report.json the counts
    """
    from unisono.quality.clean import clean
    from unisono.quality.options import only_dedup

    with resumable(out) as progress:
        result = clean(
            inputs,
            out,
            only_dedup(duplicate_options(options)),
            column=column,
            skips_unreadable=on_error == "skip",
            index_only=index_only,
            workers=options["workers"],
            progress=progress,
        )
    print_result(as_json, with_places(out, result), _clean_lines(result, out))


@click.command("clean")
@_INPUTS
@_OUT
@click.option(
    "--recipe",
    "recipes",
    multiple=True,
    type=ExpandedPath(),
    help="A TOML file with the steps (default: all but masking and decontamination); unisono data recipe prints one.",
)
@click.option(
    "-s",
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set one value of the recipe; wins over the file.",
)
@click.option(
    "--on-error",
    type=click.Choice(("fail", "skip")),
    default="fail",
    show_default=True,
    help="On an unreadable document. Unreadable images are always dropped while images.enabled is true.",
)
@_INDEX_ONLY
@COLUMN
@worker_options
@common_options
def clean_documents(
    inputs: tuple[Path, ...],
    out: Path,
    recipes: tuple[str, ...],
    overrides: tuple[str, ...],
    on_error: str,
    index_only: bool,
    column: str | None,
    workers: int | str | None,
    as_json: bool,
) -> None:
    """Write INPUTS without poor and duplicate documents into a new folder, by the steps of a recipe.

    INPUTS are tables with a field of text or images, files of these, or folders; they do not change. The steps, each a section
    of the recipe: normalize, filter, mask, decontaminate and dedup of texts, images and dedup of images. All their settings and
    defaults are printed by unisono data recipe. The same command goes on after an interruption.

    \b
    OUT/data           the kept documents, in files of the inputs' names and formats
    OUT/kept           the row indices of the kept rows of each table, as .npy
    OUT/dropped.jsonl  each dropped document, and the step that dropped it or the limit that it failed
    OUT/report.html    counts, what each limit cuts and examples; OUT/report.json the counts
    """
    from unisono.quality.clean import clean
    from unisono.quality.recipe_file import load_recipe

    recipe = load_recipe(recipes, overrides)
    with resumable(out) as progress:
        result = clean(
            inputs,
            out,
            recipe,
            column=column,
            skips_unreadable=on_error == "skip",
            index_only=index_only,
            workers=workers,
            progress=progress,
        )
    print_result(as_json, with_places(out, result), _clean_lines(result, out))


@click.command("recipe")
@common_options
def print_recipe(as_json: bool) -> None:
    """Print a recipe for data clean, with every step and setting, its default and what it does.

    The settings are comments, so the recipe is the default one until a # is removed: unisono data recipe > clean.toml
    """
    from unisono.config import starter
    from unisono.quality.options import CleanRecipe

    text = starter(CleanRecipe).rstrip("\n")
    print_result(as_json, {"toml": text}, text)


def _clean_lines(result: CleanResult, out: Path) -> list[str]:
    lines = [f"{result.kept:,} of {result.documents:,} documents kept"]
    lines += [f"     {count:,} dropped by {reason}" for reason, count in result.dropped.items()]
    if result.changed:
        lines.append(f"     {result.changed:,} kept with another text")
    lines += [f"     {count:,} times {kind} replaced" for kind, count in result.masked.items()]
    if result.languages:
        shown = [f"{code} {count:,}" for code, count in result.languages.items()][:_LANGUAGES]
        lines.append(f"languages: {', '.join(shown)}{', ...' if len(result.languages) > _LANGUAGES else ''}")
    if result.num_capped:
        lines.append(f"{result.num_capped:,} kept documents had too many candidates to be compared with all of them")
    if result.unchecked_items:
        items = sum(result.unchecked_items.values())
        lines.append(f"{items:,} of {result.benchmark_items:,} items of benchmarks had too few words to be looked for")
    return [*lines, f"report: {out / 'report.html'}"]


@click.command("leak")
@click.argument("train", type=InputPath())
@click.argument("others", nargs=-1, required=True, type=InputPath(), metavar="TEST...")
@click.option(
    "--out",
    type=OutPath(path_type=Path),
    help="A new folder for a report and the row indices of documents that do not leak.",
)
@image_duplicate_options
@text_duplicate_options
@common_options
def find_leaking(
    train: Path,
    others: tuple[Path, ...],
    out: Path | None,
    on_error: str,
    column: str | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Find documents of the sets TEST that are in TRAIN too, or in a TEST before theirs. Exit code 1 if there are any.

    Sets are tables with a field of text or images, files of these, or folders. Documents are the same if their text is, or if
    their sets of word n-grams are similar enough. OUT/kept has the indices of the rows of each table that do not
    leak, as .npy.
    """
    from unisono.quality.leak import find_leaks

    with resumable(out) as progress:
        result = find_leaks(
            train,
            others,
            out=out,
            options=duplicate_options(options),
            column=column,
            skips_unreadable=on_error == "skip",
            workers=options["workers"],
            progress=progress,
        )
    print_result(
        as_json, with_places(out, result), [*_leak_lines(result), *([f"report: {out / 'report.html'}"] if out else [])]
    )
    return 1 if result.pairs else 0


@click.command("split")
@_INPUTS
@_OUT
@click.option(
    "--part",
    "parts",
    multiple=True,
    required=True,
    callback=fractions,
    metavar="NAME=SHARE",
    help="A part, as train=0.9 or train=9/10; again for each. Shares sum up to 1.",
)
@click.option("--stratify", metavar="FIELD", help="Field whose values have the same shares in all parts, as a class.")
@click.option("--group", metavar="FIELD", help="Column whose equal values stay in one part, such as a user id.")
@_INDEX_ONLY
@image_duplicate_options
@text_duplicate_options
@common_options
def split_documents(
    inputs: tuple[Path, ...],
    out: Path,
    parts: dict[str, Fraction],
    stratify: str | None,
    group: str | None,
    on_error: str,
    index_only: bool,
    column: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Split INPUTS into parts, so that no document is in two: duplicates, near-duplicates and groups stay together.

    INPUTS are tables with a field of text or images, files of these, or folders; they do not change. The same
    command goes on after an interruption.

    \b
    OUT/PART/data      the documents of each part, in files of the inputs' names and formats
    OUT/PART/kept      the row indices of the part's rows of each table, as .npy
    OUT/dropped.jsonl  each document that --on-error skip left out
    OUT/report.html    counts and classes of the parts; OUT/report.json the same
    """
    from unisono.quality.split import split, why_empty

    with resumable(out) as progress:
        result = split(
            inputs,
            out,
            parts,
            class_field=stratify,
            group_field=group,
            options=duplicate_options(options, draws=True),
            column=column,
            skips_unreadable=on_error == "skip",
            index_only=index_only,
            workers=options["workers"],
            progress=progress,
        )
    lines = [
        f"{part.name}: {part.documents:,} documents, "
        f"{part.documents / max(result.documents - result.unreadable, 1):.2%}"
        + ("" if part.documents else f"; {why_empty(part, result)}")
        for part in result.parts
    ]
    lines.append(f"{result.clusters:,} clusters, the largest of {result.largest:,} documents")
    if result.num_capped:
        lines.append(f"{result.num_capped:,} documents had too many candidates to be compared with all of them")
    lines += unreadable_lines(result.unreadable)
    print_result(as_json, with_places(out, result), [*lines, f"report: {out / 'report.html'}"])


def _leak_lines(result: LeakResult) -> list[str]:
    lines = [
        f"{'leak' if split.exact + split.near else 'ok  '} {split.path}: {split.documents:,} documents, {split.exact:,} with "
        f"the same content as one of a set before it, {split.near:,} near one"
        for split in result.splits[1:]
    ]
    for pair in result.pairs[:_SHOWN]:
        of, how = pair["duplicate_of"], "same content" if pair["exact"] else f"similarity {pair['similarity']:.3f}"
        lines.append(f"     {pair['file']} row {pair['row']} and {of['file']} row {of['row']}: {how}")
    if len(result.pairs) > _SHOWN:
        lines.append(f"     and {len(result.pairs) - _SHOWN:,} more")
    if result.num_capped:
        lines.append(f"{result.num_capped:,} documents had too many candidates to be compared with all of them")
    return [*lines, *unreadable_lines(sum(split.unreadable for split in result.splits))]
