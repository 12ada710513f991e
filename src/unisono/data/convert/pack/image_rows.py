"""Images that are fields of rows, as in webdataset's tars, packed as ``image_records`` packs those that are files."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from unisono.data.convert.formats import open_table
from unisono.data.convert.formats.detection import files_of
from unisono.data.convert.formats.png import encode_image_column
from unisono.data.convert.formats.table import shorten
from unisono.data.convert.pack.image_encoding import ImageOptions
from unisono.data.convert.pack.image_files import check_image_packages, make_image_record, write_image_records
from unisono.data.convert.pack.image_listing import BadInput, label_problem
from unisono.data.convert.pack.pack_job import (
    UNSPLIT,
    OnError,
    PackJob,
    PackResult,
    check_suffix,
    cut_by_bytes,
    run_pack_job,
)
from unisono.data.convert.pack.resumable_shards import PackedInput, ShardSeries
from unisono.data.convert.pack.worker import image_bytes_maker, make_records, worker_count

_MANY = 1 << 20  # how many rows there are is not known before they are read


def pack_image_rows(
    source: Path,
    target: Path,
    options: ImageOptions | None = None,
    *,
    field: str,
    label: str,
    base64: Collection[str] = (),
    shard_bytes: int | None = None,
    workers: int | None = None,
    on_error: OnError = "fail",
) -> PackResult:
    """Pack the rows of a table of any format that is read, whose ``field`` is an encoded image, or a picture as an array.

    ``label``: the field of its label, a number, or labels, an array; all rows have the one or the other, and integers or
    floats, as the first one. Records, their side columns and what happens after a kill are those of ``pack_images``; keys are
    row numbers. Raises DataError for what the source does not allow, and for rows that are no such images
    unless ``on_error`` is "skip".
    """
    options = options or ImageOptions()
    check_suffix(target, (".rec",), "images")
    check_image_packages(options)
    identity = {
        "image rows": str(source.absolute()),
        "files": [
            (path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files_of(source) if path.exists()
        ],
        "options": asdict(options),
        "fields": [field, label, *sorted(base64)],
        "shard_bytes": shard_bytes,
        "on_error": on_error,
    }
    if workers is None and options.passes_through and not options.tiles:
        workers = 0
    count = worker_count(workers, _MANY)

    def rows() -> Iterator[Any]:
        return iter(encode_image_column(open_table(source, columns=[field, label], base64=base64)).rows)

    def made(start: int) -> Generator[PackedInput]:
        first = next(rows(), None)
        kind = None if first is None else _kind(first[label])
        # what has been read and not yet come back: a row's number and labels, or why it was not sent
        waiting: deque[tuple[int, Sequence[float]] | PackedInput] = deque()

        def inputs() -> Iterator[tuple[str, bytes]]:
            for number, row in enumerate(islice(rows(), start, None), start):
                name = f"{source.name}: row {number}"
                labels = _labels(row[label])
                if not isinstance(row[field], bytes):
                    waiting.append(
                        PackedInput(
                            bad=BadInput(path=name, reason=f"field {field!r} is {shorten(row[field])}, no image")
                        )
                    )
                elif labels is None or _kind(row[label]) != kind:
                    reason = f"field {label!r} is {shorten(row[label])}, not a label as that of the first row"
                    waiting.append(PackedInput(bad=BadInput(path=name, reason=reason)))
                elif (reason := label_problem(labels)) is not None:
                    waiting.append(PackedInput(bad=BadInput(path=name, reason=reason)))
                else:
                    waiting.append((number, labels))
                    yield name, row[field]

        arguments = ["image-bytes", msgspec.json.encode(options).decode()]
        with closing(make_records(inputs(), image_bytes_maker(options), arguments, workers=count)) as answers:
            for name, done in answers:
                while isinstance(head := waiting.popleft(), PackedInput):
                    yield head
                if done.reason:
                    yield PackedInput(bad=BadInput(path=name, reason=done.reason))
                else:
                    yield make_image_record(done, head[0], head[1], several=kind == "labels", whole=kind == "int")
        for head in waiting:
            assert isinstance(head, PackedInput)
            yield head

    series = ShardSeries(
        name=UNSPLIT, source=made, file=lambda _: "part.rec", write=write_image_records, cut=cut_by_bytes(shard_bytes)
    )
    return run_pack_job(PackJob(source=str(source), target=target, identity=identity, on_error=on_error), [series])


def _kind(value: Any) -> str:
    return "labels" if isinstance(value, np.ndarray) else type(value).__name__


def _labels(value: Any) -> Sequence[float] | None:
    """As numbers; None for what is no label."""
    if isinstance(value, np.ndarray):
        array = cast("NDArray[Any]", value)
        return array.tolist() if array.ndim == 1 and array.size and array.dtype.kind in "iuf" else None
    return (value,) if type(value) in (int, float) else None
