"""Layouts that keep activations in the memory of the host, where that can be the fastest that fits. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from unisono.planner.layout import Layout, Numbers
from unisono.planner.layout_space import Job
from unisono.planner.layout_time import layout_time
from unisono.planner.peak_memory import peak_memory

_NOT_NEEDED: Final = "each layout without recompute fits without it, or not with it either"


def with_offload(job: Job, layouts: Sequence[Layout], needs: Numbers, limit_bytes: float) -> tuple[list[Layout], str]:
    """Those of ``layouts`` that fit into ``limit_bytes`` with offload alone; and if there are none, the rule.

    Left out are those that take no less time than the same layout with full recompute, where that fits.

    Args:
        job: The job, with its pins.
        layouts: Layouts without partial recompute.
        needs: Bytes that each of them needs [layouts].
        limit_bytes: Memory of a device.
    """
    if rule := _rule(job):
        return [], rule
    over = [
        layout
        for layout, need in zip(layouts, needs, strict=True)
        if layout.recompute == "none" and layout.passes != "zbv" and need > limit_bytes
    ]
    fitting = _fitting([replace(layout, offload=True) for layout in over], limit_bytes)
    if not fitting or "recompute" in job.pins:
        return fitting, "" if fitting else _NOT_NEEDED
    full = [replace(layout, offload=False, recompute="full") for layout in fitting]
    slower = layout_time(fitting).total >= layout_time(full).total
    kept = np.flatnonzero(~(slower & (peak_memory(full).counted <= limit_bytes)))
    reasons = Counter(_slower(layout) for layout, is_slower in zip(fitting, slower, strict=True) if is_slower)
    return [fitting[int(index)] for index in kept], "" if len(kept) else reasons.most_common(1)[0][0]


def _fitting(layouts: Sequence[Layout], limit_bytes: float) -> list[Layout]:
    if not layouts:
        return []
    return [layouts[int(index)] for index in np.flatnonzero(peak_memory(layouts).counted <= limit_bytes)]


def _rule(job: Job) -> str:
    """The rule that any layout of ``job`` with offload would break (``Layout``); empty if there is none."""
    if job.pins.get("recompute", "none") != "none":
        return "recomputed blocks keep next to nothing that it could move"
    if job.compiled:
        return "compiled blocks choose for themselves what they keep"
    if not job.device.host_bytes_per_s:
        return "no bandwidth between the device and its host is known (host_gb_per_s of a cluster's file)"
    return ""


def _slower(layout: Layout) -> str:
    return f"copies over {layout.device.host_link} take longer than full recompute"
