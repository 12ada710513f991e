"""The predictor as it ships, scored on published runs that nothing was fitted to.

``unseen_rows.csv`` has the columns of ``published_runs.csv``, and three of a layout besides: ``zero``, ``cut`` and
``recomputed_blocks``. ``network_gbit_per_s`` is that of each device to other hosts, where a document says another network than
the data sheet's system has. Each row names its document with the commit or the release; none is a source of
``published_runs.csv``. Numbers alone were taken over. Notes say the program and what a row leaves open.

Left out are adapters, models that are no plain transformers, speeds that a document itself calls impaired, rows that it repeats,
and rows whose layout it does not say. Of nanotron's many logs and of NeMo's tables of 2025 those are there that could be had.
Of runs over several hosts whose network is not said, memory alone is there. Where recompute is "selective", its blocks follow
from published HFU over MFU. "Eager" is said of programs in PyTorch that compile nothing.

The guess beside the predictions is one utilization for each device and arithmetic: the median of the rows of
``published_runs.csv``.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.planner.fitting import PublishedRun, measured_s, read_runs
from benchmarks.planner.published_memory import memory_ratios, spread
from benchmarks.planner.scores import errors, groups

from unisono.planner.step_time import efficiencies, efficiency_key, fitted_constants, step_time
from unisono.planner.step_work import count_work

UNSEEN = Path(__file__).with_name("unseen_rows.csv")
# programs whose states and measure of memory are known: AdamW, and reserved or allocated bytes
KNOWN_MEMORY = ("torchtitan", "torchtune", "litgpt", "nanotron")


def document(run: PublishedRun) -> str:
    """What reports a row, without commit and release."""
    return run.row["source"].split()[0]


def scores() -> dict[str, Any]:
    """Errors by device and arithmetic and by document, ranks within groups, and errors of memory."""
    runs, refused = read_runs(UNSEEN)
    layouts = [run.layout for run in runs]
    work, constants = count_work(layouts), fitted_constants()
    predicted = step_time(work, efficiencies(layouts, constants), constants).total
    measured = measured_s(runs, work)
    known = [run for run in read_runs()[0] if not run.excluded]
    keys, known_keys = (np.array([efficiency_key(run.layout) for run in each]) for each in (runs, known))
    utilization, known_utilization = (np.array([run.utilization for run in each]) for each in (runs, known))
    documents = np.array([document(run) for run in runs])
    devices: dict[str, Any] = {}
    for key, count in Counter(keys.tolist()).most_common():
        inside = keys == key
        guess = utilization[inside] / np.median(known_utilization[known_keys == key])
        devices[key] = {
            "rows": count,
            "sources": len(set(documents[inside])),
            "guess": float(np.mean(np.abs(guess - 1))),
            **errors(predicted[inside], measured[inside]),
        }
    spread = np.array([constants.spread_experts if layout.model.experts else constants.spread for layout in layouts])
    return {
        "rows": {"compared": len(runs), "without speed or prediction": len(refused)},
        "devices": devices,
        "documents": {
            name: {
                "rows": int(sum(documents == name)),
                **errors(predicted[documents == name], measured[documents == name]),
            }
            for name in dict.fromkeys(documents.tolist())
        },
        "coverage": float(np.mean(np.abs(np.log(measured / predicted)) <= np.log1p(spread))),
        "groups": groups(runs, measured, predicted),
        "memory": _memory(),
    }


def _memory() -> dict[str, Any]:
    """Errors of rows whose program is in ``KNOWN_MEMORY``, and of each program and device."""
    ratios, _ = memory_ratios(UNSEEN)
    known = [ratio for name, each in ratios.items() if name.split()[0] in KNOWN_MEMORY for ratio in each]
    return {"known": spread(known), "programs": {name: spread(each) for name, each in ratios.items()}}
