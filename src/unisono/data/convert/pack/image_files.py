"""Images to ``.rec`` files that MXNet's ImageRecordIter reads, as im2rec writes them, and side columns for unisono's own.

A record is MXNet's image header (label or labels, the key as id) and the image. Beside it: ``label`` (a number, or float32
[labels] where any image has several), ``width``, ``height``, and with tiles ``tiles``, uint32 bytes per tile of the JPEG
(``TileGrid.from_column``), none where it has no tiles. Keys are the index of a .lst, else the position in the listing.
All labels of a .lst are kept, as im2rec --pack-label does.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from unisono.data.convert.formats.table import unwritable_error
from unisono.data.convert.pack.image_encoding import ImageOptions
from unisono.data.convert.pack.image_listing import BadInput, ImageListing, ListedImage, list_images, shuffle_by_hash
from unisono.data.convert.pack.pack_job import (
    UNSPLIT,
    OnError,
    PackJob,
    PackResult,
    check_suffix,
    cut_by_bytes,
    cut_by_count,
    run_pack_job,
)
from unisono.data.convert.pack.resumable_shards import PackedInput, ShardSeries
from unisono.data.convert.pack.worker import RecordAnswer, image_maker, make_records, worker_count
from unisono.data.recordio import ImageHeader, RecordWriter, pack_header
from unisono.errors import missing_extra

_HEADER_BYTES = 24


def pack_images(
    source: Path,
    target: Path,
    options: ImageOptions | None = None,
    *,
    root: Path | None = None,
    follow_links: bool = False,
    split: Mapping[str, Fraction] | None = None,
    shuffle: int | None = None,
    shards: int = 1,
    shard_bytes: int | None = None,
    workers: int | None = None,
    on_error: OnError = "fail",
) -> PackResult:
    """Pack a folder, ``.lst`` or ``.csv`` of images (see ``list_images``) into ``target``, a ``.rec``.

    ``split``: name → fraction, of sum 1; ``target`` then becomes ``STEM-NAME.rec`` for each. Sizes are the fractions of the
    number of images, rounded so that their sum is that number; an image's place goes by the keyed hash of its name.
    Images that prove bad only when they are read are missing in their part.
    ``shuffle``: another order, by keyed hash of seed and name. ``shards``: that many files of equal numbers of images (of each
    part of a split), or files that end when they hold ``shard_bytes``. ``workers``: processes, 0 = this one.

    Class names go to ``TARGET.classes.txt``, one a line, what became of the inputs to ``TARGET.report.json``. Killed and
    called again, it goes on at the first unfinished shard, to the same bytes. Raises DataError for bad inputs
    (all that the listing shows at once) unless ``on_error`` is "skip", ExtraError for what is not installed.
    """
    options = options or ImageOptions()
    check_suffix(target, (".rec",), "images")
    check_image_packages(options)
    listing = list_images(source, root=root, follow_links=follow_links)
    samples = listing.samples
    if shuffle is not None:
        samples = [samples[at] for at in shuffle_by_hash([sample.name for sample in samples], f"order {shuffle}")]
    parts = {UNSPLIT: samples} if split is None else split_samples(samples, split)
    if shard_bytes is None and any(len(part) < shards for part in parts.values()) and shards > 1:
        raise unwritable_error(
            f"{shards} shards of {min(map(len, parts.values()))} images",
            "a shard has an image at least",
            "fewer --shards",
        )
    identity = {
        "images": str(source.absolute()),
        "root": str(listing.root.absolute()),
        "options": asdict(options),
        "samples": {name: _digest(part) for name, part in parts.items()},
        "shards": [shards, shard_bytes],
        "bad": [asdict(each) for each in listing.bad],
        "on_error": on_error,
    }
    job = PackJob(
        source=str(source),
        target=target,
        identity=identity,
        on_error=on_error,
        bad=listing.bad,
        left_out=listing.left_out,
        side_files={".classes.txt": "".join(f"{name}\n" for name in listing.classes)} if listing.classes else {},
    )
    count = worker_count(
        0 if workers is None and options.passes_through and not options.tiles else workers, len(samples)
    )
    return run_pack_job(
        job, [_series(name, part, listing, options, count, shards, shard_bytes) for name, part in parts.items()]
    )


def split_samples(samples: Sequence[ListedImage], split: Mapping[str, Fraction]) -> dict[str, list[ListedImage]]:
    """The samples in parts of these fractions, each in its order; every sample is in exactly one of them."""
    if sum(split.values()) != 1 or any(fraction <= 0 for fraction in split.values()) or not all(map(_is_name, split)):
        told = ", ".join(f"{name}={float(fraction):g}" for name, fraction in split.items())
        raise unwritable_error(
            f"the split {told}",
            "fractions are above 0 and their sum is 1, so that no image is lost; a name is letters, digits and _",
            "train=0.9 test=0.1",
        )
    order = shuffle_by_hash([sample.name for sample in samples], "split")
    ends = [round(len(samples) * sum(list(split.values())[: number + 1])) for number in range(len(split))]
    parts: dict[str, list[ListedImage]] = {}
    for name, begin, end in zip(split, [0, *ends], ends, strict=False):
        parts[name] = [samples[at] for at in sorted(order[begin:end])]
    return parts


def _digest(samples: Sequence[ListedImage]) -> str:
    """Of all that is known of them before they are read, their order included."""
    digest = xxhash.xxh3_128()
    for sample in samples:
        digest.update(repr((sample.name, sample.labels, sample.key, sample.stamp)).encode())
    return digest.hexdigest()


def _series(
    name: str,
    samples: list[ListedImage],
    listing: ImageListing,
    options: ImageOptions,
    workers: int,
    shards: int,
    size: int | None,
) -> ShardSeries:
    several = any(len(sample.labels) > 1 for sample in listing.samples)
    whole = all(label.is_integer() for sample in listing.samples for label in map(float, sample.labels))

    def source(start: int) -> Generator[PackedInput]:
        arguments = ["images", msgspec.json.encode(options).decode()]
        inputs = ((sample.name, os.fsencode(listing.root / sample.name)) for sample in samples[start:])
        with closing(make_records(inputs, image_maker(options), arguments, workers=workers)) as made:
            for sample, (_, done) in zip(samples[start:], made, strict=True):
                if done.reason:
                    yield PackedInput(bad=BadInput(path=sample.name, reason=done.reason))
                else:
                    yield make_image_record(done, sample.key, sample.labels, several=several, whole=whole)

    return ShardSeries(
        name=name,
        source=source,
        file=lambda _: "part.rec",
        write=write_image_records,
        cut=cut_by_count(len(samples), shards) if size is None else cut_by_bytes(size),
        total=len(samples),
    )


def make_image_record(
    done: RecordAnswer, key: int, labels: Sequence[float], *, several: bool, whole: bool
) -> PackedInput:
    """The record of an image. ``several``: its side column has all labels, else one, an integer where ``whole``."""
    values = np.array(labels, np.float32)
    side: dict[str, Any] = {
        "label": values if several else int(labels[0]) if whole else float(labels[0]),
        "width": done.width,
        "height": done.height,
    }
    if done.tiles is not None:
        side["tiles"] = np.frombuffer(done.tiles, "<u4")
    label = values if len(values) > 1 else float(values[0])
    payload = pack_header(ImageHeader(label=label, id=key), done.records[0])
    return PackedInput(records=((payload, key, side),), size=len(payload))


def write_image_records(path: Path, records: Iterator[Any]) -> None:
    """One shard of what ``make_image_record`` made."""
    with RecordWriter(path) as writer:
        for payload, key, side in records:
            writer.write(payload, key=key, side=side)


def check_image_packages(options: ImageOptions) -> None:
    """Said once and before anything is read, not by every worker."""
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


def _is_name(name: str) -> bool:
    return name.replace("_", "").isalnum() and name != UNSPLIT
