"""What a search of layouts learns from runs: layouts that were really run, predicted from shapes alone. Prints JSON.

    python -m benchmarks.planner.learned_layouts

Reads the measured steps of the committed results of ``benchmarks.planner.measured_layouts``. Each layout is predicted as
``unisono plan`` predicts it, and again with what it learns from all other layouts of the same run of that benchmark. Figures of
the device are those that ``unisono plan calibrate --processes 2`` gave on a host of the same kind; constants were fitted to
accelerators.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.planner.measured_layouts import RANKS, settings_of
from benchmarks.workload import run_config
from scipy.stats import spearmanr

from unisono.plan.resolve import derive_plan
from unisono.planner.cluster_file import ClusterOptions, TflopsOptions, as_cluster
from unisono.planner.layout_record import MeasuredLayout, learned_factors, predicted_steps_s
from unisono.planner.run_layout import layout_of_run

RESULTS = Path(__file__).parent.parent / "results" / "planner_layouts.json"
BOX = ClusterOptions(
    device="a core of an EPYC",
    num_devices=RANKS,
    devices_per_domain=RANKS,
    memory_gib=11.7,
    memory_tb_per_s=0.016,
    link_gb_per_s=0.45,
    tflops=TflopsOptions(bf16=0.0894),
)
VOCABULARY = 512


def measured(rows: Sequence[Mapping[str, Any]]) -> list[MeasuredLayout]:
    """The layouts of one run of the benchmark with what they took."""
    device = as_cluster(BOX, place="box").device
    found: list[MeasuredLayout] = []
    for number, row in enumerate(rows):
        config = run_config([*settings_of(row, ()), "plan.precision=bf16"])
        plan = derive_plan(config.plan, world_size=RANKS, device="cpu", native_bf16=True)
        layout = layout_of_run(config, plan, device, VOCABULARY)
        if layout is not None:
            took = MeasuredLayout(
                layout=layout, step_s=row["measured_s"], steps=1, data_wait_frac=0.0, at_s=float(number)
            )
            found.append(took)
    return found


def scores(runs: Sequence[MeasuredLayout]) -> dict[str, dict[str, float]]:
    """Errors, rank correlation and the choice, without and with what the other layouts teach."""
    plain = np.array(predicted_steps_s([run.layout for run in runs]))
    real = np.array([run.step_s for run in runs])
    factors = [
        learned_factors([*runs[:i], *runs[i + 1 :]], run.layout.model, run.layout.device).of(run.layout.shared_axes)
        for i, run in enumerate(runs)
    ]
    learned = plain * [each.factor for each in factors]
    return {
        name: {
            "median": float(np.median(np.abs(predicted / real - 1))),
            "mean": float(np.mean(np.abs(predicted / real - 1))),
            "rank_correlation": float(spearmanr(predicted, real).statistic),
            "chosen_over_best": float(real[predicted.argmin()] / real.min()),
        }
        for name, predicted in (("without", plain), ("with", learned))
    }


def main() -> None:
    """Print the medians over the runs of the benchmark."""
    runs = [measured(run["result"]["rows"]) for run in json.loads(RESULTS.read_text())["runs"]]
    found = [scores(run) for run in runs]
    summary = {
        kind: {name: statistics.median(each[kind][name] for each in found) for name in found[0][kind]}
        for kind in ("without", "with")
    }
    print(json.dumps({"layouts": len(runs[0]), "runs": len(runs), "summary": summary, "each": found}))


if __name__ == "__main__":
    main()
