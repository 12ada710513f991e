"""Plans of the search beside published ones: what is predicted for both, and whether the published one would have been allowed.

A published layout ran, so it fitted. Rows that do not say what they recompute are taken to keep everything, which needs most.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from benchmarks.planner.fitting import PublishedRun, read_runs

from unisono.planner.layout import LayoutError
from unisono.planner.layout_space import Job
from unisono.planner.search import choose, compare
from unisono.planner.simulate import predict


def choices() -> dict[str, Any]:
    """Of each set of published rows of one model, device, number of devices, batch and precision, the fastest one beside ours."""
    jobs: defaultdict[tuple[object, ...], list[PublishedRun]] = defaultdict(list)
    for run in read_runs()[0]:
        it = run.layout
        if not run.excluded and float(it.global_batch).is_integer():
            key = (run.row["model"], it.device.name, it.num_devices, it.global_batch, it.seq_len, it.precision)
            jobs[key].append(run)
    ratios: list[float] = []
    fitting = {"all": [0, 0], "that say what they recompute": [0, 0]}
    for runs in jobs.values():
        best = max(runs, key=lambda run: run.tokens_per_s)
        it = best.layout
        job = Job(
            model=it.model,
            device=it.device,
            num_devices=it.num_devices,
            precision=it.precision,
            global_batch=int(it.global_batch),
            seq_len=it.seq_len,
            compiled=it.compiled,
            pins={},
        )
        try:
            found = choose(job, compare(job))
        except LayoutError:
            continue
        (published,) = predict([it])
        if found.best is not None:
            ratios.append(found.best.step_s / published.step_s)
        for name, count in fitting.items():
            if name == "all" or best.row["recompute"]:
                count[0] += published.needed_bytes <= found.limit_bytes
                count[1] += 1
    low, median, high = (float(value) for value in np.quantile(ratios, (0.05, 0.5, 0.95)))
    return {
        "jobs": len(ratios),
        "predicted_over_published": {"median": median, "low": low, "high": high},
        "published_that_fit": {name: {"fit": count[0], "of": count[1]} for name, count in fitting.items()},
    }
