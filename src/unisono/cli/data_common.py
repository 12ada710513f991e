"""Options that the commands on data share, and parts of what they print."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from unisono.cli.common import FiniteRange
from unisono.errors import ConfigError, DataError

if TYPE_CHECKING:
    from unisono.quality.options import DuplicateOptions

F = TypeVar("F", bound=Callable[..., Any])


class InputPath(click.Path):
    """A file or folder that is read. Without a name, as an empty variable of a shell gives it, it would be the current folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See click."""
        if value == "":
            raise ConfigError(
                given="an input without a name, ''",
                rule="an input is the path of a file or folder",
                consequence="nothing was read",
                nearest="its path; . is the current folder",
            )
        return super().convert(value, param, ctx)


ON_ERROR = click.option(
    "--on-error",
    type=click.Choice(("fail", "skip")),
    default="fail",
    show_default=True,
    help="On an unreadable document.",
)
COLUMN = click.option(
    "--column",
    metavar="NAME",
    help="Field of the text or image in tables (default: text, else the only string, else the only bytes).",
)


def worker_options(function: F) -> F:
    """Decorator that adds ``--workers`` and ``--ray``; ``workers`` is the one of them that is given, an int or a string."""

    @wraps(function)
    def with_workers(*arguments: Any, workers: int | None, ray: str | None, **options: Any) -> Any:
        if ray is not None:
            from unisono.quality.duplicates.ray_map import require_ray

            if workers is not None:
                raise ConfigError(
                    given=f"--workers {workers} and --ray {ray}",
                    rule="documents go to processes of this machine, or to a cluster",
                    consequence="nothing was read",
                    nearest="one of the two; a Ray cluster uses the CPUs that it was started with",
                )
            require_ray(ray)
        return function(*arguments, workers=workers if ray is None else ray, **options)

    for option in (
        click.option(
            "--ray",
            metavar="ADDRESS",
            help="Send documents to a Ray cluster: auto (that of this machine), HOST:PORT, or local (one for this command).",
        ),
        click.option(
            "--workers",
            type=click.IntRange(min=0),
            help="Maximum number of worker processes; 0 = in this process (default: by size and cores).",
        ),
    ):
        with_workers = option(with_workers)
    return cast(F, with_workers)


def text_duplicate_options(function: F) -> F:
    """Decorator that adds the options by which documents are compared."""
    for option in (
        worker_options,
        ON_ERROR,
        COLUMN,
        click.option(
            "--seed",
            type=click.IntRange(min=0),
            default=0,
            show_default=True,
            help="Seed of the MinHash hash functions and, for data split, of the assignment.",
        ),
        click.option(
            "--num-perm",
            type=click.IntRange(min=16, max=1024),
            help="Number of MinHash permutations (default: 128).",
        ),
        click.option("--ngram", type=click.IntRange(min=1, max=50), help="Words per shingle (default: 5)."),
        click.option("--exact", is_flag=True, help="Only documents with the same text, or the same file of an image."),
        click.option(
            "--near",
            type=FiniteRange(min=0.1, max=1.0),
            help="Minimum Jaccard similarity of two duplicates (default: 0.8).",
        ),
    ):
        function = option(function)
    return function


IMAGE_NEAR = click.option(
    "--image-near",
    type=FiniteRange(min=0.1, max=1.0),
    help="Correlation of the gradients of thumbnails from which on images count as the same (default: 0.85).",
)


def image_duplicate_options(function: F) -> F:
    """Decorator that adds the options by which images are compared."""
    crops = click.option(
        "--crops/--no-crops",
        default=None,
        help="Whether a part of an image counts as the image (default: of data leak and split: yes, else no).",
    )
    return IMAGE_NEAR(crops(function))


def source_of(source: Path, verb: str, rest: str, *, is_table: bool) -> Path:
    """What a command that reads one table takes of SOURCE: of a folder of results its data, of a folder its only table.

    Args:
        source: A file or a folder.
        verb: The command: ``convert``.
        rest: What follows SOURCE in the command line.
        is_table: Whether a folder that has no results is looked into, too.

    Raises:
        DataError: The folder has results without data, or several tables.
    """
    from unisono.data.convert.table_files import files_of
    from unisono.data.result_files import data_of_results
    from unisono.quality.input_files import WHOLE_FILE, list_files
    from unisono.sanitize import listed, quoted

    if not os.path.isdir(source):
        return source
    folder = data_of_results(source)
    if folder == source and not is_table:
        return source
    files, _ = list_files([folder])
    tables = [file.path for file in files if file.kind != WHOLE_FILE]
    if tables and set(files_of(tables[0])) == set(tables):
        return tables[0]
    if not tables:
        return folder
    names = listed(quoted(os.path.relpath(path, source)) for path in tables)
    raise DataError(
        given=f"{source}, a folder of {len(tables):,} tables: {names}",
        rule="one table, or one set name-00000-of-00005, is read at a time",
        consequence="nothing was written",
        nearest=f"each by itself, to a target of its own: unisono data {verb} {tables[0]} {rest}",
    )


def unreadable_lines(count: int) -> list[str]:
    """How many documents were left out; no line if none was."""
    return [f"{count:,} documents could not be read and were left out"] if count else []


def duplicate_options(options: dict[str, Any], *, draws: bool = False) -> DuplicateOptions:
    """What counts as a duplicate, by the options of a command; ``draws``: its seed is not of the signatures alone."""
    from unisono.quality.options import DuplicateOptions

    names = ("near", "ngram", "num_perm", "image_near")
    settings = {name: options[name] for name in names if options.get(name) is not None}
    if options["exact"] and options["seed"] and not draws:
        settings["seed"] = options["seed"]
    if options["exact"] and settings:
        given = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in settings.items())
        raise ConfigError(
            given=f"--exact and {given}",
            rule="documents are the same by their text alone, or by the similarity of their shingles",
            consequence="nothing was read",
            nearest="one of the two",
        )
    if options["exact"]:
        settings |= {"near": 0.0, "image_near": 0.0}
    return DuplicateOptions(**settings, crops=options.get("crops"), seed=options["seed"])


def with_places(out: Path | None, result: Any) -> dict[str, Any]:
    """What ``--json`` prints: the folder of the results and its page, if there is one, and the result."""
    places = {} if out is None else {"out": str(out), "report": str(out / "report.html")}
    return {**places, **asdict(result)}
