"""Predicted step times and memory beside published ones. Prints JSON.

    python -m benchmarks.planner.published [--folds 5]

Constants of step times are fitted twice: without one of five random parts of the rows, and without one source (a document that
reports runs) at a time. Each row is predicted by constants that have not seen it. The guess beside it is one utilization for
each device and arithmetic: the median of its rows, which is not held out, so it is better than a real guess. Intervals are
those of other sources, each with the same weight. Groups are the rows of one model, kind and number of devices with at least four
layouts; they are ranked by predictions that have not seen their source. ``unseen`` scores the constants that ship on rows that
are in no fit (``benchmarks.planner.unseen``).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from benchmarks.planner.fitting import (
    STARTS,
    PublishedRun,
    by_source,
    fit,
    left_out,
    measured_s,
    quantile_spread,
    read_runs,
    superseded,
)
from benchmarks.planner.published_memory import memory_errors
from benchmarks.planner.scores import errors, groups
from benchmarks.planner.unseen import scores

from unisono.planner.layout import Numbers
from unisono.planner.step_time import efficiencies, efficiency_key, step_time
from unisono.planner.step_work import count_work

MANY_ROWS = 20


def by_device(runs: Sequence[PublishedRun], measured: Numbers, held_out: dict[str, Numbers]) -> dict[str, Any]:
    """Errors for each device and arithmetic with enough rows."""
    keys = np.array([efficiency_key(run.layout) for run in runs])
    utilization = np.array([run.utilization for run in runs])
    found: dict[str, Any] = {}
    for key, count in Counter(keys.tolist()).most_common():
        if count < MANY_ROWS:
            continue
        inside = keys == key
        guess = utilization[inside] / np.median(utilization[inside])  # of times: measured utilization over the guessed
        found[key] = {
            "rows": count,
            "sources": len({run.row["source"] for run, within in zip(runs, inside, strict=True) if within}),
            "guess": float(np.mean(np.abs(guess - 1))),
            **{name: errors(times[inside], measured[inside]) for name, times in held_out.items()},
        }
    return found


def coverage(runs: Sequence[PublishedRun], ratios: Numbers) -> dict[str, float]:
    """Part of the rows that lie in intervals of nine of ten, which are made from other sources.

    ``all``, ``dense`` and ``experts`` are of rows; ``sources`` is the mean of the parts of each source.
    """
    experts = np.array([bool(run.layout.model.experts) for run in runs])
    names = np.array([run.row["source"] for run in runs])
    inside = np.zeros(len(runs), bool)
    for kind in (experts, ~experts):
        for name in set(names[kind]):
            here, other = kind & (names == name), kind & (names != name)
            spread = quantile_spread(ratios[other], names[other].tolist())
            inside[here] = np.abs(np.log(ratios[here])) <= np.log1p(spread)
    return {
        "all": float(inside.mean()),
        "dense": float(inside[~experts].mean()),
        "experts": float(inside[experts].mean()),
        "sources": float(np.mean([inside[names == name].mean() for name in set(names)])),
    }


def sensitivity(runs: Sequence[PublishedRun], measured: Numbers) -> dict[str, Any]:
    """Each constant, and how much the mean error grows where it is a half more or less."""
    layouts = [run.layout for run in runs]
    current = [i for i, earlier in enumerate(superseded(runs)) if not earlier]
    fitted = fit([layouts[i] for i in current], measured[current], [runs[i].row["source"] for i in current])
    work = count_work(layouts)
    efficiency = efficiencies(layouts, fitted)

    def mean_error(**changed: float) -> float:
        return errors(step_time(work, efficiency, replace(fitted, **changed)).total, measured)["mean"]

    now = mean_error()
    return {
        name: {
            "value": float(f"{getattr(fitted, name):.3g}"),
            "growth": max(mean_error(**{name: getattr(fitted, name) * factor}) for factor in (1.5, 1 / 1.5)) - now,
        }
        for name in STARTS
    }


def main() -> None:
    """Print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folds", type=int, default=5)
    parts = parser.parse_args().folds
    every, refused = read_runs()
    runs = [run for run in every if not run.excluded]
    measured = measured_s(runs, count_work([run.layout for run in runs]))
    folds = np.random.default_rng(1).integers(0, parts, len(runs))
    held_out = {
        "folds": left_out(runs, [str(fold) for fold in folds]),
        "sources_left_out": left_out(runs, by_source(runs)),
    }
    unseen = held_out["sources_left_out"]
    result = {
        "rows": {"compared": len(runs), "not fitted to": len(every) - len(runs), "without prediction": len(refused)},
        "devices": by_device(runs, measured, held_out),
        "coverage": coverage(runs, measured / unseen),
        "groups": groups(runs, measured, unseen),
        "constants": sensitivity(runs, measured),
        "memory": memory_errors(),
        "unseen": scores(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
