"""Statistics of a file of records or tokens, and a page of its images.

Statistics come from the index and the side columns of all records. Labels and image sizes without a side column come from evenly
spread records, whose number is ``sampled``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unisono.data.convert.checking import require_kind
from unisono.data.convert.file_kind import RECORDIO, TOKENS
from unisono.data.image import contact_sheet, decode, probe
from unisono.data.recordio import RecordFile, unpack_header
from unisono.data.recordio.index import RaggedColumn
from unisono.data.tokens.shards import open_tokens
from unisono.errors import DataError

_SAMPLED: Final = 1000
_CLASSES: Final = 10_000  # different labels up to which they are counted one by one
_SHEET: Final = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantiles:
    """Quantiles of a set of numbers.

    Attributes:
        least: The minimum.
        p10: The 10 % quantile.
        median: The median.
        p90: The 90 % quantile.
        most: The maximum.
        mean: The mean.
    """

    least: float
    p10: float
    median: float
    p90: float
    most: float
    mean: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordStats:
    """Statistics of a file of records or tokens, from ``record_stats``.

    Attributes:
        records: Number of records; of token shards, of documents.
        bytes: Size of the file in bytes.
        spreads: Quantiles by name: "payload bytes", "width px", "height px" and "label", or "document tokens" of token
            shards.
        labels: Count of each label; empty if there are none, or more than 10,000 different ones.
        sampled: Number of records read for labels and image sizes; 0 if they come from side columns, or there are none.
    """

    records: int
    bytes: int
    spreads: dict[str, Quantiles]
    labels: dict[float, int]
    sampled: int


def record_stats(file: Path) -> RecordStats:
    """Statistics of a ``.rec``, or a ``.bin`` of tokens.

    Args:
        file: The file, with its index beside it.

    Raises:
        DataError: The file is of another kind, or damaged.
    """
    if require_kind(file, (RECORDIO, TOKENS), "stats", f"unisono data inspect {file}") == TOKENS:
        shard = open_tokens([file]).shards[0]
        sizes = np.diff(shard.starts, append=shard.tokens.size) - 1  # without the token that ends a document
        spreads = {"document tokens": _spread(sizes)} if sizes.size else {}
        return RecordStats(records=sizes.size, bytes=shard.tokens.nbytes, spreads=spreads, labels={}, sampled=0)
    records = RecordFile(file)
    columns: dict[str, NDArray[Any]] = {"payload bytes": records.lengths}
    sampled = 0
    if {"label", "width", "height"} <= records.side.keys():
        label = records.side["label"]
        columns["label"] = np.concatenate(label.tolist()) if isinstance(label, RaggedColumn) else label
        columns |= {"width px": np.asarray(records.side["width"]), "height px": np.asarray(records.side["height"])}
    elif (from_sample := _sampled(records)) is not None:
        sampled = len(from_sample["width px"])
        columns |= from_sample
    spreads = {name: _spread(values) for name, values in columns.items() if len(values)}
    values, counts = np.unique(columns.get("label", np.empty(0)), return_counts=True)
    labels = dict(zip(values.tolist(), counts.tolist(), strict=True)) if len(values) <= _CLASSES else {}
    return RecordStats(records=len(records), bytes=file.stat().st_size, spreads=spreads, labels=labels, sampled=sampled)


def record_sheet(file: Path) -> bytes:
    """Draw up to 64 images of a ``.rec`` on one page, each with its number and its label or labels.

    The images are spread evenly over the file.

    Args:
        file: The ``.rec`` of image records.

    Returns:
        The page as PNG.

    Raises:
        DataError: The file is no ``.rec``, or its records are not images.
    """
    require_kind(file, (RECORDIO,), "a sheet of images", f"unisono data convert {file} {file.stem}.rec")
    records = RecordFile(file)
    images: list[NDArray[np.uint8]] = []
    labels: list[str] = []
    for number in _spaced(len(records), _SHEET):
        header, image = unpack_header(records.read(number))
        images.append(decode(image))
        values = np.atleast_1d(np.asarray(header.label)).tolist()
        labels.append(f"{number}: {', '.join(f'{label:g}' for label in values)}")
    return contact_sheet(images, labels)


def _sampled(records: RecordFile) -> dict[str, NDArray[Any]] | None:
    """Labels, widths and heights of evenly spread records; None if they are not images."""
    labels: list[float] = []
    sizes: list[tuple[int, int]] = []
    try:
        for number in _spaced(len(records), _SAMPLED):
            header, image = unpack_header(records.read(number))
            info = probe(image)
            labels += np.atleast_1d(np.asarray(header.label)).tolist()
            sizes.append((info.width, info.height))
    except DataError:
        return None
    if not sizes:
        return None
    table = np.array(sizes)
    return {"label": np.array(labels), "width px": table[:, 0], "height px": table[:, 1]}


def _spread(values: NDArray[Any]) -> Quantiles:
    p10, median, p90 = np.percentile(values, [10, 50, 90]).tolist()
    return Quantiles(
        least=float(values.min()), p10=p10, median=median, p90=p90, most=float(values.max()), mean=float(values.mean())
    )


def _spaced(count: int, most: int) -> list[int]:
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64)).tolist()
