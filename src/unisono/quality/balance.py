"""Class balance of a data set, and sampling weights that even it out."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from unisono.data.per_file_arrays import require_array_names
from unisono.data.sample_weights import WeightedFile, reads_per_epoch, write_sample_weights
from unisono.errors import DataError, nearest_name
from unisono.quality.balance_page import write_balance_page
from unisono.quality.class_labels import (
    IMAGES,
    LabelledFile,
    find_labelled,
    first_fields,
    read_classes,
    require_unchanged,
)
from unisono.quality.file_meter import FileMeter
from unisono.quality.job_folder import open_job
from unisono.quality.progress import SILENT, Advance, Progress
from unisono.quality.refused import refused
from unisono.sanitize import quoted
from unisono.tasks.sources import TARGETS
from unisono.tasks.targets import MAX_CLASSES

_LOG: Final = logging.getLogger("unisono")
_NO_LABEL = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassBalance:
    """A class of the data set.

    Attributes:
        name: Of the class.
        rows: Number of its rows.
        share: Of the rows with a label, from 0 to 1.
        reads_per_epoch: How often one of its rows is read in an epoch with the weights, on average; this is its weight.
        weighted_share: Of the rows that are read with the weights.
    """

    name: str
    rows: int
    share: float
    reads_per_epoch: float
    weighted_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceResult:
    """Classes of a data set, and the weights that even them out.

    Attributes:
        rows: Number of rows.
        unlabelled: Number of rows without a label, whose weight is 0.
        imbalance: Rows of the largest class over rows of the smallest.
        effective_classes: Exponential of the entropy of the shares (Hill 1973): as many classes of equal size are as balanced.
        power: Weights are in proportion to the rows of the class to the power of ``-power``.
        max_repeats: Most reads of a row in an epoch; 0 = no limit.
        classes: From the largest to the smallest, then by name.
    """

    rows: int
    unlabelled: int
    imbalance: float
    effective_classes: float
    power: float
    max_repeats: int
    classes: tuple[ClassBalance, ...]


def balance(
    paths: Sequence[Path],
    out: Path | None = None,
    *,
    field: str = TARGETS,
    power: float = 1.0,
    max_repeats: int = 0,
    skips_unreadable: bool = False,
    progress: Progress = SILENT,
) -> BalanceResult:
    """Count the classes of a data set, and compute a sampling weight for each row.

    The folder gets ``weights/NAME.npy`` for each file (see ``unisono.data.sample_weights``), ``report.json`` and ``report.html``.
    Takes 4 bytes of memory for each row, 12 while the weights are written.

    Args:
        paths: Tables, image records, folders of tables, of images (the class is the folder) or of Hugging Face's datasets.
        out: A new folder; or that of the same job, which was killed or is done already. None: nothing is written.
        field: Of the labels; ``targets`` of images and image records.
        power: 1 gives all classes the same share, 0.5 the square roots of their sizes, 0 the shares that they have.
        max_repeats: Most reads of a row in an epoch, on average over the data set; 0 = no limit.
        skips_unreadable: Whether images that cannot be read are left out, and rows that cannot get the weight 0, or both are an
            error.
        progress: Receives the stages.

    Raises:
        ConfigError: The folder belongs to something else, or another process works in it.
        DataError: A file is damaged, has no labels in the field, or has changed meanwhile; there are too many classes; or
            ``max_repeats`` reads of each labelled row are fewer than an epoch has.
    """
    files = find_labelled(paths)
    if out is not None:
        require_array_names(file.name for file in files)
    identity = {
        "balance": {"field": field, "power": power, "max_repeats": max_repeats},
        "files": [[file.name, file.kind, file.stamp] for file in files],
    }
    with ExitStack() as stack:
        job = (
            None
            if out is None
            else stack.enter_context(open_job(out, identity, paths, skips_unreadable=skips_unreadable))
        )
        if job is not None and job.is_done:
            return job.result(BalanceResult)
        names: dict[str, int] = {}
        progress.begin("reading", sum(file.size for file in files), "bytes")
        labels = [_labels(file, field, names, progress.advance, skips_unreadable) for file in files]
        if not any(of_file.size for of_file in labels):
            raise refused(
                f"{files[0].path}{' and others' if len(files) > 1 else ''}: 0 rows",
                "classes are those of rows",
                "tables with rows",
            )
        counts = np.sum([np.bincount(of_file[of_file >= 0], minlength=len(names)) for of_file in labels], axis=0)
        result, weights = _balance(counts, list(names), sum(map(len, labels)), power, max_repeats)
        require_unchanged(files)
        if job is not None and out is not None:
            by_label = np.append(weights, 0.0)  # _NO_LABEL is its last
            entries = [WeightedFile(name=file.name, stamp=file.stamp) for file in files]
            write_sample_weights(job.new, entries, (by_label[of_file] for of_file in labels))
            progress.begin("reporting", 1, "pages")
            write_balance_page(job.new / "report.html", out.name, result)
            progress.advance(1)
            job.finish(asdict(result))
    return result


def _labels(
    file: LabelledFile, field: str, names: dict[str, int], advance: Advance, skips_unreadable: bool
) -> NDArray[np.int32]:
    """The number of each row's class, int32 [rows]; ``names`` gets those that are new."""
    numbers = array("i")
    num_unreadable, first = 0, ""
    for name in read_classes(file, field, FileMeter(file.size, advance)):
        if isinstance(name, DataError):
            if not skips_unreadable:
                raise name
            num_unreadable, first = num_unreadable + 1, first or name.problems[0].given
            if file.kind == IMAGES:  # a run gives it no number
                continue
            name = None
        numbers.append(_NO_LABEL if name is None else names.setdefault(name, len(names)))
        if len(names) > MAX_CLASSES:
            raise refused(
                f"{file.path}: field {quoted(field)} with more than {MAX_CLASSES:,} different values",
                "a class has several rows",
                "the field of the class",
            )
    if num_unreadable:
        noun = "images" if file.kind == IMAGES else "rows"
        _LOG.warning("%d %s that cannot be read are left out, the first is %s", num_unreadable, noun, first)
    labels = np.array(numbers, np.int32)
    if labels.size and not (labels >= 0).any():
        raise refused(
            f"{file.path}: {len(labels):,} rows, and none with a label in the field {quoted(field)}",
            "rows have the name or the number of their class in one field",
            f"--label FIELD; {nearest_name(field, first_fields(file))}",
        )
    return labels


def _balance(
    counts: NDArray[np.int64], names: Sequence[str], rows: int, power: float, max_repeats: int
) -> tuple[BalanceResult, NDArray[np.float64]]:
    """The result, and the weight of each class in the order of ``names``."""
    labelled = int(counts.sum())
    if max_repeats and max_repeats * labelled < rows:
        raise refused(
            f"--max-repeats {max_repeats} with {rows:,} rows, of which {labelled:,} have a label",
            "an epoch reads as many rows as there are, and only those with a label",
            f"--max-repeats {-(-rows // labelled)}, or the data without the other rows",
        )
    weights = reads_per_epoch(counts, rows, power=power, max_repeats=max_repeats)
    shares = counts / labelled
    order = sorted(range(len(names)), key=lambda number: (-counts[number], names[number]))
    classes = tuple(
        ClassBalance(
            name=names[number],
            rows=int(counts[number]),
            share=float(shares[number]),
            reads_per_epoch=float(weights[number]),
            weighted_share=float(weights[number] * counts[number] / rows),
        )
        for number in order
    )
    result = BalanceResult(
        rows=rows,
        unlabelled=rows - labelled,
        imbalance=float(counts.max() / counts.min()),
        effective_classes=float(np.exp(-np.sum(shares * np.log(shares)))),
        power=power,
        max_repeats=max_repeats,
        classes=classes,
    )
    return result, weights
