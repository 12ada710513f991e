"""A data set of image records, written by MXNet's im2rec or ``unisono data pack``, for ``ImageTransform``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from unisono.data.dataset import Batch
from unisono.data.recordio import RecordDataset, RecordFile, unpack_header
from unisono.errors import DataError

TILES = "tiles"


def image_records(files: Sequence[RecordFile | Path | str], *, classes: bool = True) -> RecordDataset:
    """A data set of image records, written by MXNet's im2rec or ``unisono data pack``, for ``ImageTransform``.

    A sample has ``image``, uint8 [bytes], encoded, and ``targets``. If every file has the side column ``tiles``,
    samples have ``tiles`` too, and a crop decodes only the tiles under it.

    Args:
        files: The ``.rec`` files, in the order of the samples.
        classes: True: ``targets`` is a class, int64. False: the stored label, float32, or float32 [labels] for several.

    Raises:
        DataError: While reading, a record has no image header, or with ``classes`` a label that is not a class.
    """
    opened = [file if isinstance(file, RecordFile) else RecordFile(file) for file in files]
    side = (TILES,) if opened and all(TILES in file.side for file in opened) else ()
    return RecordDataset(opened, _of_a_class if classes else _as_labelled, side=side)


def _of_a_class(record: memoryview) -> Batch:
    header, image = unpack_header(record)
    label = np.asarray(header.label, np.float64).reshape(-1)
    if label.size != 1 or not (label[0] >= 0 and float(label[0]).is_integer()):
        raise DataError(
            given=f"label {label.tolist()}",
            rule="a class is one integer from 0",
            consequence="it cannot be trained on as a class",
            nearest="task.predicts=number; in Python image_records(files, classes=False) gives labels as they are",
        )
    return {"image": np.frombuffer(image, np.uint8), "targets": np.array(int(label[0]))}


def _as_labelled(record: memoryview) -> Batch:
    header, image = unpack_header(record)
    return {"image": np.frombuffer(image, np.uint8), "targets": np.asarray(header.label, np.float32)}
