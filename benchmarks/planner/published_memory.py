"""Predicted peak memory beside published figures, by source and device.

Compared are rows of trainings of all parameters with AdamW whose states are in the device's memory. ``ALLOCATOR_FACTOR`` of
``unisono.planner.peak_memory`` is the median over rows of torchtitan on H100; nothing else is fitted. What programs keep is from
their code (``kept_by_programs``).
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.planner.corrections import corrected
from benchmarks.planner.fitting import ROWS
from benchmarks.planner.kept_by_programs import KEPT_BY_PROGRAMS

from unisono.planner.layout import Layout, LayoutError
from unisono.planner.layout_columns import read_layout
from unisono.planner.peak_memory import peak_memory

_GIB = 2**30
_TENSORS = re.compile(r"allocated|\bactive\b", re.IGNORECASE)
_GRADIENT_FRAC = 1 / 4  # of AdamW's states that are all in the same number of bits
# what the columns of a layout do not say, each in the notes
_OTHER_METHOD = re.compile(
    r"lora|8-bit|offload|optimizer-in-b|in-bwd|unpacked|SUSPECT",
    re.IGNORECASE,
)


def published_layout(row: Mapping[str, str]) -> Layout:
    """The layout of a row, with what its program keeps."""
    return read_layout(corrected(row, KEPT_BY_PROGRAMS))


def is_comparable(row: Mapping[str, str]) -> bool:
    """Whether a row has a peak of a run that is as its columns say."""
    return bool(row["peak_mem_gib"]) and not _OTHER_METHOD.search(row["notes"])


def memory_ratios(rows: Path = ROWS) -> tuple[dict[str, list[float]], int]:
    """Of a file of rows, predicted over published for each source and device, and the number of peaks that are not compared.

    A row whose notes say "allocated" or "active" has the peak of tensors (``bytes_of_tensors``).
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
            is_of_tensors = _TENSORS.search(row["notes"])
            predicted = (bytes_of_tensors(layout) if is_of_tensors else float(peak_memory([layout]).total[0])) / _GIB
            source = row["source"].split()[0].split("/")[-1]
            ratios[f"{source} on {layout.device.name}"].append(predicted / float(row["peak_mem_gib"]))
    return ratios, others


def bytes_of_tensors(layout: Layout) -> float:
    """Their peak on a device (``torch.cuda.max_memory_allocated``): without what the allocator keeps.

    Where a step has one micro-batch, a gradient is there from its backward pass to the update alone, unless buffers hold those
    of all parameters, as replicas have them. So the peak is when the backward pass begins, or when it ends.
    """
    memory = peak_memory([layout])
    states = float(memory.states[0])
    has_no_buffer = layout.zero == 3 or (layout.dp == 1 and layout.states_in_16_bits)
    late = states * _GRADIENT_FRAC * (layout.num_micro_batches == 1 and has_no_buffer)
    return max(float(memory.counted[0]) - late, states + float((memory.gathered + memory.recomputed)[0]))


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
