"""Predicted peak memory beside published figures, by source and device.

Compared are rows of trainings of all parameters with AdamW whose states are in the device's memory. ``allocator`` constants of
``unisono.planner.peak_memory`` are the medians over rows of torchtitan on H100; nothing else is fitted.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.planner.fitting import ROWS

from unisono.planner.layout import Layout, LayoutError
from unisono.planner.layout_columns import read_layout
from unisono.planner.peak_memory import peak_memory

_GIB = 2**30
# what the columns of a layout do not say, each in the notes
_OTHER_METHOD = re.compile(
    r"lora|8-bit|offload|optimizer-in-b|in-bwd|unpacked|chunked|activation checkpointing|ac mode = config default|SUSPECT",
    re.IGNORECASE,
)


def published_layout(row: Mapping[str, str]) -> Layout:
    """The layout of a row. torchtune's recipes for one device keep all states in 16 bits, which its columns do not say."""
    is_torchtune = row["source"].startswith("pytorch/torchtune") and row["gpus"] == "1"
    return read_layout({**row, "precision": "bf16-true"} if is_torchtune else row)


def is_comparable(row: Mapping[str, str]) -> bool:
    """Whether a row has a peak of a run that is as its columns say."""
    return bool(row["peak_mem_gib"]) and not _OTHER_METHOD.search(row["notes"])


def memory_ratios(rows: Path = ROWS) -> tuple[dict[str, list[float]], int]:
    """Of a file of rows, predicted over published for each source and device, and the number of peaks that are not compared.

    A row whose notes say "allocated" has the peak of tensors, which is compared without what the allocator keeps.
    """
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    others = 0
    with rows.open(newline="") as file:
        for row in csv.DictReader(file):
            if not row["peak_mem_gib"]:
                continue
            try:
                layout = published_layout(row)
            except LayoutError:
                others += 1
                continue
            if not is_comparable(row):
                others += 1
                continue
            memory = peak_memory([layout])
            predicted = float((memory.counted if "allocated" in row["notes"] else memory.total)[0]) / _GIB
            source = row["source"].split()[0].split("/")[-1]
            ratios[f"{source} on {layout.device.name}"].append(predicted / float(row["peak_mem_gib"]))
    return ratios, others


def memory_errors() -> dict[str, Any]:
    """Of each source and device, and of all rows: their number, the median error, and the range of predicted over published."""
    ratios, others = memory_ratios()
    every = [ratio for each in ratios.values() for ratio in each]
    return {**{name: spread(each) for name, each in ratios.items()}, "all": {**spread(every), "not compared": others}}


def spread(ratios: Sequence[float]) -> Mapping[str, float]:
    """Their number, the median error, the least and the most of them."""
    return {
        "rows": len(ratios),
        "median": float(np.median(np.abs(np.array(ratios) - 1))),
        "least": min(ratios),
        "most": max(ratios),
    }
