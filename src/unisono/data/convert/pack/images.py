"""Pack images into ``.rec`` files that MXNet's ImageRecordIter reads, as im2rec writes them, with side columns for unisono.

A record is MXNet's image header (label or labels, the key as id) and the image. Its side columns are ``label`` (a number, or
float32 [labels] if any image has several), ``width``, ``height`` and, with tiles, ``tiles``: uint32 bytes per tile of the JPEG
(``TileGrid.from_column``), empty without tiles. A key is the index of a ``.lst``, else the position in the listing or table.
All labels of a ``.lst`` are stored, as with im2rec --pack-label.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from unisono.data.cleaning_record import cleaning_file
from unisono.data.convert.formats.table import describe_value, encode_image_column, unwritable_error
from unisono.data.convert.pack.image_encoding import ImageOptions
from unisono.data.convert.pack.image_listing import (
    ImageListing,
    ListedImage,
    label_problem,
    list_images,
    shuffle_by_hash,
)
from unisono.data.convert.pack.pack_job import (
    PackJob,
    PackOptions,
    PackResult,
    RecordAnswer,
    check_suffix,
    cut_by_bytes,
    cut_by_count,
    file_stamps,
    run_pack_job,
)
from unisono.data.convert.pack.partial_target import UNSPLIT, BadInput, PackedInput, ShardSeries
from unisono.data.convert.pack.worker import make_records, worker_count
from unisono.data.convert.table_files import open_table
from unisono.data.recordio import ImageHeader, RecordWriter, pack_header
from unisono.errors import missing_extra

_MANY = 1 << 20  # the number of a table's rows is not known before they are read


def pack_images(
    source: Path,
    target: Path,
    options: ImageOptions | None = None,
    *,
    root: Path | None = None,
    follow_links: bool = False,
    split: Mapping[str, Fraction] | None = None,
    shuffle: int | None = None,
    pack: PackOptions | None = None,
) -> PackResult:
    """Pack a folder, ``.lst`` or ``.csv`` of images (see ``list_images``) into a ``.rec``.

    Class names are written to ``TARGET.classes.txt``, one per line, the outcome of all inputs to
    ``TARGET.report.json``. A killed call that is repeated continues at the first unfinished shard, to the same bytes.

    Args:
        source: A folder, whose subfolders are the classes, or a list of paths and labels.
        target: The ``.rec`` to write; several shards append a number to its stem.
        options: Processing of each image. By default its bytes stay unchanged.
        root: Folder that the paths of a list are relative to. By default the list's folder.
        follow_links: Whether links to folders, and links out of the folder, are followed; else they are bad inputs.
        split: Name → fraction, in sum 1; ``target`` then becomes ``STEM-NAME.rec`` for each. An image's part depends on
            the hash of its name. The sizes are the fractions of the number of images, rounded to add up; images that
            prove bad only when they are read are missing. By default one part.
        shuffle: Seed; orders images by a keyed hash of seed and name. By default they keep the order of ``source``.
        pack: Shards, workers and the treatment of bad inputs; ``pack.shards`` counts the files of each part.

    Raises:
        DataError: There are bad inputs (all that the listing shows at once), unless ``pack.on_error`` is "skip";
            ``target`` exists or has another suffix; options contradict each other.
        ExtraError: Pillow or simplejpeg is not installed.
    """
    options, pack = options or ImageOptions(), pack or PackOptions()
    check_suffix(target, (".rec",), "images")
    _check_packages(options)
    # before the listing: the root itself may be exchanged by a link afterwards
    confined_to = "" if follow_links else os.path.realpath(source if os.path.isdir(source) else root or source.parent)
    listing = list_images(source, root=root, follow_links=follow_links)
    samples = listing.samples
    if shuffle is not None:
        samples = [samples[at] for at in shuffle_by_hash([sample.name for sample in samples], f"order {shuffle}")]
    parts = {UNSPLIT: samples} if split is None else split_samples(samples, split)
    if pack.shard_bytes is None and any(len(part) < pack.shards for part in parts.values()) and pack.shards > 1:
        raise unwritable_error(
            f"{pack.shards} shards of {min(map(len, parts.values()))} images",
            "a shard has at least one image",
            "fewer --shards",
        )
    identity = {
        "images": str(source.absolute()),
        "root": str(listing.root.absolute()),
        "options": asdict(options),
        "samples": {name: _samples_digest(part) for name, part in parts.items()},
        "shards": [pack.shards, pack.shard_bytes],
        "bad": [asdict(bad) for bad in listing.bad],
    }
    job = PackJob(
        source=str(source),
        target=target,
        identity=identity,
        on_error=pack.on_error,
        bad=listing.bad,
        left_out=listing.left_out,
        side_files=cleaning_file([source, listing.root])
        | ({".classes.txt": "".join(f"{name}\n" for name in listing.classes)} if listing.classes else {}),
    )
    return run_pack_job(job, [_series(name, part, listing, confined_to, options, pack) for name, part in parts.items()])


def split_samples(samples: Sequence[ListedImage], split: Mapping[str, Fraction]) -> dict[str, list[ListedImage]]:
    """The samples in parts of these fractions, in their order; each sample is in exactly one part."""
    if sum(split.values()) != 1 or any(fraction <= 0 for fraction in split.values()) or not all(map(_is_name, split)):
        fractions = ", ".join(f"{name}={float(fraction):g}" for name, fraction in split.items())
        raise unwritable_error(
            f"the split {fractions}",
            "fractions are above 0 and their sum is 1, so that no image is lost; a name is letters, digits and _",
            "train=0.9 test=0.1",
        )
    order = shuffle_by_hash([sample.name for sample in samples], "split")
    ends = [round(len(samples) * sum(list(split.values())[: number + 1])) for number in range(len(split))]
    parts: dict[str, list[ListedImage]] = {}
    for name, begin, end in zip(split, [0, *ends], ends, strict=False):
        parts[name] = [samples[at] for at in sorted(order[begin:end])]
    return parts


def pack_image_rows(
    source: Path,
    target: Path,
    options: ImageOptions | None = None,
    *,
    field: str,
    label: str,
    base64: Collection[str] = (),
    pack: PackOptions | None = None,
) -> PackResult:
    """Pack the rows of a table in any readable format (webdataset's tars) into image records, as ``pack_images`` does.

    Args:
        source: The table, or one file of its set.
        target: The ``.rec`` to write; several shards append a number to its stem.
        options: Processing of each image. By default its bytes stay unchanged.
        field: Name of the field with an encoded image, or an image as an array.
        label: Name of the field with a number, or an array of labels; all rows must be like the first, also in type.
        base64: Columns of a CSV file that hold bytes as base64.
        pack: Shards, workers and the treatment of bad inputs.

    Raises:
        DataError: The source is unsuitable, ``target`` exists or has another suffix, or a row has no such image or
            label, unless ``pack.on_error`` is "skip".
        ExtraError: Pillow or simplejpeg is not installed.
    """
    options, pack = options or ImageOptions(), pack or PackOptions()
    check_suffix(target, (".rec",), "images")
    _check_packages(options)
    identity = {
        "image rows": str(source.absolute()),
        "files": file_stamps(source),
        "options": asdict(options),
        "fields": [field, label, *sorted(base64)],
        "shard_bytes": pack.shard_bytes,
    }

    def rows() -> Iterator[Any]:
        table = open_table(source, columns=[field, label], base64=base64)
        return iter(encode_image_column(table).rows)

    def packed(start: int) -> Generator[PackedInput]:
        first = next(rows(), None)
        kind = None if first is None else _kind(first[label])
        requests = (
            _image_request(f"{source.name}: row {number}", number, row, field, label, kind)
            for number, row in enumerate(islice(rows(), start, None), start)
        )
        return _packed_images(
            requests, ("image-bytes",), options, workers=workers, several=kind == "labels", whole=kind == "int"
        )

    workers = _num_workers(options, pack, _MANY)
    series = ShardSeries(
        source=packed,
        file=lambda _: "part.rec",
        write=_write_records,
        cut=cut_by_bytes(pack.shard_bytes),
    )
    job = PackJob(
        source=str(source),
        target=target,
        identity=identity,
        on_error=pack.on_error,
        side_files=cleaning_file([source]),
    )
    return run_pack_job(job, [series])


_ImageRequest = tuple[ListedImage | BadInput, bytes | None]  # and its path or content; None for a bad input


def _image_request(
    name: str, number: int, row: Mapping[str, Any], field: str, label: str, kind: str | None
) -> _ImageRequest:
    """The image of a row; ``kind`` is that of the first row's label."""
    labels = _labels(row[label])
    if not isinstance(row[field], bytes):
        reason = f"field {field!r} is {describe_value(row[field])}, no image"
    elif labels is None or _kind(row[label]) != kind:
        reason = f"field {label!r} is {describe_value(row[label])}, not a label as that of the first row"
    elif (reason := label_problem(labels)) is None:
        return ListedImage(name=name, labels=tuple(labels), key=number), row[field]
    return BadInput(path=name, reason=reason), None


def _series(
    name: str,
    samples: list[ListedImage],
    listing: ImageListing,
    confined_to: str,
    options: ImageOptions,
    pack: PackOptions,
) -> ShardSeries:
    """The shards of a part. ``confined_to``: the folder without links that images lie in; empty if links may lead out."""
    several = any(len(sample.labels) > 1 for sample in listing.samples)
    whole = all(label.is_integer() for sample in listing.samples for label in map(float, sample.labels))
    workers = _num_workers(options, pack, len(listing.samples))

    def source(start: int) -> Generator[PackedInput]:
        requests = ((sample, os.fsencode(listing.root / sample.name)) for sample in samples[start:])
        kind = ("images", confined_to)
        return _packed_images(requests, kind, options, workers=workers, several=several, whole=whole)

    cut = cut_by_count(len(samples), pack.shards) if pack.shard_bytes is None else cut_by_bytes(pack.shard_bytes)
    return ShardSeries(
        name=name, source=source, file=lambda _: "part.rec", write=_write_records, cut=cut, total=len(samples)
    )


def _num_workers(options: ImageOptions, pack: PackOptions, inputs: int) -> int:
    """Worker processes; by default 0 if bytes are only copied."""
    copies = options.passes_through and not options.tiles
    return worker_count(0 if pack.workers is None and copies else pack.workers, inputs)


def _packed_images(
    requests: Iterable[_ImageRequest],
    kind: tuple[str, ...],
    options: ImageOptions,
    *,
    workers: int,
    several: bool,
    whole: bool,
) -> Generator[PackedInput]:
    """The outcome of each image. ``kind``: its name and root, see ``worker``; ``several``, ``whole``: see ``_packed_image``."""
    arguments = [kind[0], msgspec.json.encode(options).decode(), *kind[1:]]
    with closing(make_records(requests, arguments, workers=workers)) as answers:
        for image, answer in answers:
            if isinstance(image, BadInput):
                yield PackedInput(bad=image)
            elif answer.reason:
                yield PackedInput(bad=BadInput(path=image.name, reason=answer.reason))
            else:
                yield _packed_image(image, answer, several=several, whole=whole)


def _packed_image(image: ListedImage, answer: RecordAnswer, *, several: bool, whole: bool) -> PackedInput:
    """The record of an image. ``several``: its side column has all labels; else one, an integer if ``whole``."""
    values = np.array(image.labels, np.float32)
    side: dict[str, Any] = {
        "label": values if several else int(image.labels[0]) if whole else float(image.labels[0]),
        "width": answer.width,
        "height": answer.height,
    }
    if answer.tiles is not None:
        side["tiles"] = np.frombuffer(answer.tiles, "<u4")
    label = values if len(values) > 1 else float(values[0])
    payload = pack_header(ImageHeader(label=label, id=image.key), answer.records[0])
    return PackedInput(records=((payload, image.key, side),), size=len(payload))


def _write_records(path: Path, records: Iterator[Any]) -> None:
    """Write one shard of the records that ``_packed_image`` makes."""
    with RecordWriter(path) as writer:
        for payload, key, side in records:
            writer.write(payload, key=key, side=side)


def _check_packages(options: ImageOptions) -> None:
    """Report missing packages and contradictory options once, before anything is read."""
    for package, module in (("simplejpeg", "simplejpeg"), ("pillow", "PIL")):
        if importlib.util.find_spec(module) is None:
            raise missing_extra("images", package, "packing images")
    if options.tiles and options.encoding == "png":
        raise unwritable_error("--tiles with --encoding png", "tiles are of JPEGs", "--encoding jpeg, or no --tiles")
    if options.tiles and options.passes_through and shutil.which("jpegtran") is None:
        raise unwritable_error(
            "--tiles without encoding again, and no jpegtran on the PATH",
            "markers are put into an existing JPEG by jpegtran, which loses nothing",
            "apt install libjpeg-turbo-progs (brew install jpeg-turbo); or --quality N encodes again and sets them",
        )
    if options.encoding == "png" and options.quality:
        raise unwritable_error("--quality with --encoding png", "PNG loses nothing and has no quality", "no --quality")


def _samples_digest(samples: Sequence[ListedImage]) -> str:
    """Digest of all that is known of the samples before they are read, and of their order."""
    digest = xxhash.xxh3_128()
    for sample in samples:
        digest.update(repr((sample.name, sample.labels, sample.key, sample.stamp)).encode())
    return digest.hexdigest()


def _is_name(name: str) -> bool:
    return name.replace("_", "").isalnum() and name != UNSPLIT


def _kind(value: Any) -> str:
    return "labels" if isinstance(value, np.ndarray) else type(value).__name__


def _labels(value: Any) -> Sequence[float] | None:
    """The labels as numbers; None if the value is not a label."""
    if isinstance(value, np.ndarray):
        array = cast("NDArray[Any]", value)
        return array.tolist() if array.ndim == 1 and array.size and array.dtype.kind in "iuf" else None
    return (value,) if type(value) in (int, float) else None
