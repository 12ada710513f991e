"""``unisono data pack``: pack images, text, tables and results of functions into record files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from unisono.cli.common import ExpandedPath, common_options, fractions, print_result
from unisono.cli.data_common import source_of
from unisono.cli.terminal import echo
from unisono.cli.termination import sigterm_interrupts
from unisono.errors import DataError
from unisono.exit_codes import REQUEUE

if TYPE_CHECKING:
    from unisono.data.convert.pack import PackOptions, PackResult, RecordSchema

KINDS: Final = ("images", "text", "rows", "python")
_SHOWN = 20
_SEEN = 1000  # files of a folder by which its kind is guessed
_TEXT: Final = frozenset({".txt", ".md", ".rst", ".text", ".py", ".tex", ".html"})
_LISTED: Final = ("root", "follow_links", "split", "shuffle", "shards")  # of images that are files


def _columns(_context: click.Context, _option: click.Parameter, values: Sequence[str]) -> dict[str, str] | None:
    pairs = [(old, new or old) for old, _, new in (value.partition("=") for value in values)]
    if len({old for old, _ in pairs}) < len(pairs) or len({new for _, new in pairs}) < len(pairs):
        raise click.BadParameter("a field is named twice")
    return dict(pairs) or None


_KINDS_OF: dict[str, tuple[str, str]] = {}  # parameter → kinds its option is for, and the option


def _option(kinds: str, *names: str, help: str, **settings: Any) -> Callable[[Any], Any]:
    """An option for some kinds of inputs, which its help names; given for another kind, it is an error."""
    flag = names[0].partition("/")[0]
    parameter = next((name for name in names if not name.startswith("-")), flag[2:].replace("-", "_"))
    _KINDS_OF[parameter] = kinds, flag
    return click.option(*names, help=f"{kinds.replace(' ', ', ')}: {help}", **settings)


@click.command("pack")
@click.argument("source", type=ExpandedPath(path_type=Path, allow_dash=True))
@click.argument("target", type=ExpandedPath(path_type=Path))
@click.option("--kind", type=click.Choice(KINDS), help="What SOURCE holds; guessed where that is clear.")
@click.option(
    "--on-error", type=click.Choice(["fail", "skip"]), default="fail", show_default=True, help="On a bad input."
)
@_option(
    "images text python",
    "--workers",
    type=click.IntRange(min=0),
    help="processes; 0 = this one. Default: by cores and work.",
)
@click.option("--shard-size", type=click.IntRange(min=1), metavar="MIB", help="A file ends when it holds this much.")
@_option("images", "--shards", type=click.IntRange(min=1), help="files, of equal numbers of images.")
@_option("images", "--image", metavar="NAME", help="SOURCE is a table or a tar, this field the image.")
@_option("images", "--label", metavar="NAME", help="… and this one its label or labels.")
@_option("images", "--root", type=ExpandedPath(path_type=Path), help="folder of a list's paths; default the list's.")
@_option("images", "--follow-links", is_flag=True, default=None, help="links that lead out of the folder, too.")
@_option("images", "--resize", type=click.IntRange(min=1), metavar="PX", help="the short side.")
@_option("images", "--center-crop", is_flag=True, default=None, help="the largest centred square, before resizing.")
@_option("images", "--quality", type=click.IntRange(1, 100), help="of JPEG; default 95 where pixels are made.")
@_option("images", "--encoding", type=click.Choice(["jpeg", "png"]), help="default jpeg where pixels are made.")
@_option("images", "--color", type=click.Choice(["rgb", "gray"]), help="default rgb where pixels are made.")
@_option(
    "images", "--pass-through", is_flag=True, default=None, help="bytes untouched; so too if nothing asks for pixels."
)
@_option(
    "images", "--tiles", is_flag=True, default=None, help="restart markers and tile sizes; lossless if not re-encoded."
)
@_option("images", "--exif/--no-exif", default=None, help="turn re-encoded JPEGs as EXIF says (default) or not.")
@_option("images", "--split", multiple=True, callback=fractions, metavar="NAME=FRACTION", help="parts; again for each.")
@_option("images", "--shuffle", type=int, metavar="SEED", help="order by keyed hash instead of the listing's.")
@_option("text", "--tokenizer", help="bytes (default), or a tokenizer.json or its folder.")
@_option("text", "--lines", is_flag=True, default=None, help="each line is a document, not each file.")
@_option("text", "--text-column", metavar="NAME", help="SOURCE is a table, this field the document.")
@_option(
    "rows",
    "--column",
    "columns",
    multiple=True,
    callback=_columns,
    metavar="NAME[=NEW]",
    help="only this field; again for each.",
)
@_option("rows", "--payload", metavar="NAME", help="the field that is a .rec's payload.")
@_option("rows images", "--base64", multiple=True, metavar="NAME", help="a field of bytes that CSV has as base64.")
@_option(
    "rows", "--array", "arrays", multiple=True, metavar="NAME", help="a feature of TFRecord that is always an array."
)
@_option("rows python", "--schema", metavar="NAME=TYPE[DIMS],…", help="types of the fields; ? is any size.")
@_option("python", "--function", metavar="MODULE:NAME", help="gives rows: of each line of SOURCE, or all if that is -.")
@common_options
def pack(source: Path, target: Path, kind: str | None, as_json: bool, **options: Any) -> None:
    """Pack SOURCE into TARGET, which is complete or absent. The same command goes on after an interruption.

    \b
    images  a folder (class = folder), a .lst of MXNet, a .csv of path,label, or by --image and --label
            a tar or another table → .rec, as im2rec
    text    files, lines or a table's column → NAME.bin, as token shards NAME-00000.bin …
    rows    any table that convert reads → .mindrecord, .jsonl, .parquet, .tar, .csv,
            or .rec of one field of bytes or text (--payload) and numbers
    python  rows that --function gives, with the fields of --schema → the same

    Of a folder of results of clean, split or relabel its data are packed; a folder with one table stands for the table.

    What became of every input is written to TARGET.report.json. -v shows progress and time left. After Ctrl-C
    or SIGTERM the exit code is 75.
    """
    from unisono.data.convert.pack import PackOptions

    if str(source) != "-" and not os.path.exists(source):
        raise _refused(
            f"{source}, which is not there", "SOURCE is a file or a folder, or - with --function", "its path"
        )
    column = options["text_column"]
    given = "" if column is None else f" --text-column {column}"
    is_table = column is not None or options["image"] is not None or kind == "rows"
    source = source_of(source, "pack", f"{target}{given}", is_table=is_table)
    set_options = {name for name, value in options.items() if value not in (None, (), {}) and name in _KINDS_OF}
    kind = kind or ("images" if options["image"] else _guess(source, target, options["function"]))
    if inert := sorted(name for name in set_options if kind not in _KINDS_OF[name][0].split()):
        flags = ", ".join(_KINDS_OF[name][1] for name in inert)
        raise _refused(
            f"{flags} with --kind {kind}", "these options are for other kinds", "leave them out; --help lists the kinds"
        )
    shard_bytes = None if options["shard_size"] is None else options["shard_size"] << 20
    settings = PackOptions(
        shard_bytes=shard_bytes,
        shards=options["shards"] or 1,
        workers=options["workers"],
        on_error=options["on_error"],
    )
    try:
        with sigterm_interrupts():
            packed = _PACK[kind](source, target, options, settings)
    except KeyboardInterrupt:
        kept = f"{target}.part"
        more = (
            f"; finished shards are kept in {kept}, and the same command goes on there" if os.path.exists(kept) else ""
        )
        echo(f"unisono: packing was interrupted{more}", err=True)
        sys.exit(REQUEUE)
    value = {
        "files": [str(path) for path in packed.files],
        "inputs": packed.num_inputs,
        "records": packed.num_records,
        "empty": packed.num_empty,
        "left_out": packed.num_left_out,
        "splits": packed.splits,
        "bad": [{"path": bad.path, "reason": bad.reason} for bad in packed.bad],
        "report": str(packed.report),
    }
    print_result(as_json, value, _result_lines(packed))


def _result_lines(packed: PackResult) -> Iterator[str]:
    yield from map(str, packed.files)
    parts = [f"{packed.num_records:,} records of {packed.num_inputs:,} inputs"]
    parts += [f"{count:,} in {name}" for name, count in packed.splits.items()]
    parts += [f"{len(packed.bad):,} bad"] if packed.bad else []
    parts += [f"{packed.num_empty:,} empty"] if packed.num_empty else []
    parts += [f"{packed.num_left_out:,} files that are not images left out"] if packed.num_left_out else []
    yield ", ".join(parts)
    yield from (f"     bad {bad.path}: {bad.reason}" for bad in packed.bad[:_SHOWN])
    if len(packed.bad) > _SHOWN:
        yield f"     and {len(packed.bad) - _SHOWN:,} more (all in {packed.report})"


def _images(source: Path, target: Path, options: Mapping[str, Any], pack: PackOptions) -> PackResult:
    from unisono.data.convert.pack import ImageOptions, pack_image_rows, pack_images

    names = ("resize", "center_crop", "quality", "encoding", "color", "tiles", "exif")
    image = ImageOptions(**{name: options[name] for name in names if options[name] is not None})
    if image.passes_through and options["exif"] is not None:
        raise _refused(
            "--exif or --no-exif with images passed through", "untouched bytes keep their EXIF", "leave it out"
        )
    if options["pass_through"] and not image.passes_through:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in names[:5] if options[name] is not None)
        raise _refused(f"--pass-through and {flags}", "bytes stay as they are, or pixels are made", "one of the two")
    if options["image"] is not None or options["label"] is not None or options["base64"]:
        listed = [name for name in _LISTED if options[name] is not None]
        if options["image"] is None or options["label"] is None or listed:
            raise _refused(
                f"--image {options['image']}, --label {options['label']}" + "".join(f", --{name}" for name in listed),
                "images of a table have an image field and a label field, and come one by one in the table's order",
                "both, and --shard-size for several files",
            )
        rest = {name: options[name] for name in ("label", "base64")}
        return pack_image_rows(source, target, image, field=options["image"], **rest, pack=pack)
    if options["shards"] and pack.shard_bytes:
        raise _refused("--shards and --shard-size", "one of them says where a file ends", "one of the two")
    rest = {name: options[name] for name in ("root", "split", "shuffle")}
    return pack_images(
        source,
        target,
        image,
        follow_links=bool(options["follow_links"]),
        **rest,
        pack=pack,
    )


def _text(source: Path, target: Path, options: Mapping[str, Any], pack: PackOptions) -> PackResult:
    from unisono.data.convert.pack import pack_text

    if options["lines"] and options["text_column"]:
        raise _refused("--lines and --text-column", "a document is a line, or a row's text", "one of the two")
    return pack_text(
        source,
        target,
        tokenizer=options["tokenizer"] or "bytes",
        lines=bool(options["lines"]),
        column=options["text_column"],
        pack=pack,
    )


def _rows(source: Path, target: Path, options: Mapping[str, Any], pack: PackOptions) -> PackResult:
    from unisono.data.convert.pack import pack_rows

    rest = {name: options[name] for name in ("columns", "payload", "base64", "arrays")}
    return pack_rows(source, target, schema=_schema(options), **rest, pack=pack)


def _python(source: Path, target: Path, options: Mapping[str, Any], pack: PackOptions) -> PackResult:
    from unisono.data.convert.pack import pack_function

    schema = _schema(options)
    if options["function"] is None or schema is None:
        raise _refused(
            "--kind python without --function or --schema", "both say what is packed", "--function MODULE:NAME"
        )
    if str(source) == "-" and options["workers"]:
        raise _refused("--workers for a function without items", "it is one generator", "SOURCE with an item per line")
    items = None if str(source) == "-" else source
    return pack_function(options["function"], target, schema, items=items, pack=pack)


_PACK: Final = {"images": _images, "text": _text, "rows": _rows, "python": _python}


def _schema(options: Mapping[str, Any]) -> RecordSchema | None:
    from unisono.data.convert.pack import RecordSchema

    return None if options["schema"] is None else RecordSchema.parse(options["schema"])


def _guess(source: Path, target: Path, function: str | None) -> str:
    """The kind of inputs, from the names alone. Raises DataError if it is not clear."""
    from unisono.data.convert.file_kind import kind_of_name
    from unisono.data.convert.pack.image_listing import IMAGE_SUFFIXES
    from unisono.data.convert.table_files import read_formats

    if function is not None:
        return "python"
    if target.suffix == ".bin":
        return "text"
    if source.suffix == ".lst":
        return "images"
    if os.path.isdir(source):
        suffixes = _suffixes(source)
        if suffixes & IMAGE_SUFFIXES:
            return "images"
        if suffixes and suffixes <= _TEXT:
            return "text"
    elif kind_of_name(source) in read_formats():
        return "rows"
    elif source.suffix in _TEXT:
        return "text"
    raise _refused(
        f"{source}, whose kind is not clear",
        f"the kinds are {', '.join(KINDS)}",
        "--kind, one of these",
    )


def _suffixes(folder: Path) -> set[str]:
    suffixes: set[str] = set()
    seen = 0
    for _, _, names in os.walk(folder):
        suffixes |= {Path(name).suffix.lower() for name in names if not name.startswith(".")}
        seen += len(names)
        if seen > _SEEN:
            break
    return suffixes


def _refused(given: str, rule: str, nearest: str) -> DataError:
    return DataError(given=given, rule=rule, consequence="nothing was packed", nearest=nearest)
