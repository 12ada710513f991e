"""CIFAR's binary version: ``data_batch_1.bin`` to ``_5``, ``test_batch.bin`` (CIFAR-10), ``train.bin``, ``test.bin`` (CIFAR-100).

a record   1 byte label (CIFAR-100: coarse label, fine label) | 1,024 red | 1,024 green | 1,024 blue, each 32 rows of 32
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from unisono.data.convert.formats.byte_source import ByteSource
from unisono.data.convert.formats.table import Row, Table, damaged_error, unreadable_error
from unisono.data.mindrecord import FieldType

_SIDE: Final = 32
_LABELS: Final = ({"label": 10}, {"coarse_label": 20, "fine_label": 100})  # numbers of classes


def read(path: Path) -> Table:
    """Rows of ``image``, uint8 [32, 32, 3] in RGB, and ``label``, or ``coarse_label`` and ``fine_label``."""
    with ByteSource(path) as source:
        size = source.size or 0
    pixels = _SIDE * _SIDE * 3
    fitting = [labels for labels in _LABELS if size and size % (pixels + len(labels)) == 0]
    if len(fitting) == 2:  # the name decides
        fitting = [_LABELS[path.stem in ("train", "test")]]
    if not fitting:
        raise unreadable_error(
            f"{path} of {size:,} bytes",
            f"a CIFAR file is records of {pixels + 1:,} bytes (CIFAR-10) or {pixels + 2:,} (CIFAR-100)",
            "a whole copy of the file",
        )
    (labels,) = fitting
    image = FieldType(type="uint8", shape=(_SIDE, _SIDE, 3))
    schema = {"image": image} | dict.fromkeys(labels, FieldType(type="int64"))
    return Table(rows=_rows(path, labels), schema=schema, image="image")


def _rows(path: Path, labels: dict[str, int]) -> Iterator[Row]:
    with ByteSource(path) as source:
        number = 0
        while source.size is None or source.offset < source.size:
            offset = source.offset
            record = source.read(len(labels) + _SIDE * _SIDE * 3, "a record", record=number)
            for name, label in zip(labels, record, strict=False):
                if label >= labels[name]:
                    damage = f"{name} {label}, where there are {labels[name]} classes"
                    raise damaged_error(path, offset, damage, record=number)
            planes = np.frombuffer(record, np.uint8, offset=len(labels)).reshape(3, _SIDE, _SIDE)
            image = np.ascontiguousarray(planes.transpose(1, 2, 0))
            yield {"image": image, **dict(zip(labels, record, strict=False))}
            number += 1
