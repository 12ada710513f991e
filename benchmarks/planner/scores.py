"""How far predicted step times are from measured ones, and whether they rank layouts as measured ones do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from benchmarks.planner.fitting import PublishedRun
from scipy.stats import spearmanr

from unisono.planner.layout import Numbers
from unisono.planner.step_work import count_work

GROUP = 4


def errors(predicted: Numbers, measured: Numbers) -> dict[str, float]:
    """Mean and median of the relative errors."""
    off = np.abs(predicted / measured - 1)
    return {"mean": float(off.mean()), "median": float(np.median(off))}


def groups(runs: Sequence[PublishedRun], measured: Numbers, predicted: Numbers) -> dict[str, Any]:
    """Rank correlation and regret within one model on one number of devices, by speed."""
    members: defaultdict[str, list[int]] = defaultdict(list)
    for i, run in enumerate(runs):
        members[f"{run.row['model']} on {run.layout.num_devices} {run.layout.device.name}"].append(i)
    found: dict[str, Any] = {}
    for name, inside in members.items():
        layouts = {repr(runs[i].layout) for i in inside}
        if len(layouts) < GROUP:
            continue
        tokens = count_work([runs[i].layout for i in inside]).tokens_per_step
        real, said = tokens / measured[inside], tokens / predicted[inside]
        found[name] = {
            "rows": len(inside),
            "layouts": len(layouts),
            "spearman": float(spearmanr(real, said).statistic),
            "regret": float(real.max() / real[np.argmax(said)] - 1),
        }
    return found
