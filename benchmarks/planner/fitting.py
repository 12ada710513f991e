"""Fits the constants of ``unisono.planner.step_time`` to published runs.

    python -m benchmarks.planner.fitting  # writes src/unisono/planner/step_time.json

The logarithms of constants are fitted to the logarithms of measured step times (least squares with a soft L1 loss, so that single
rows do not decide). Rows of one source are no independent samples, so the weight of a source is the root of their number. Each
constant has a first value, from data sheets or common sense, that it returns to where rows say nothing.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from benchmarks.planner.corrections import corrected, network_bytes_per_s
from scipy.optimize import least_squares

from unisono.planner.layout import Layout, LayoutError, Numbers
from unisono.planner.layout_columns import read_layout
from unisono.planner.step_time import Constants, efficiencies, efficiency_key, efficiency_keys, step_time
from unisono.planner.step_work import StepWork, count_work

ROWS = Path(__file__).with_name("published_runs.csv")
WRITTEN = Path(__file__).parents[2] / "src/unisono/planner/step_time.json"

# first value, least, most; what few rows know of has a narrow range on the side of caution, as a search would exploit it
STARTS: dict[str, tuple[float, float, float]] = {
    "half_tokens": (600, 50, 8000),
    "half_width": (300, 10, 4000),
    "half_expert_tokens": (200, 10, 20000),
    "half_expert_width": (300, 10, 20000),
    "attention": (0.45, 0.15, 1),
    "older_attention": (0.6, 0.2, 1),  # FlashAttention-3 is 1.5 to 2.0 times as fast on H100 (arXiv 2407.08608)
    "first_attention": (
        0.6,
        0.3,
        1,
    ),  # FlashAttention-2 is 1.3 to 2.5 times as fast as the first in Triton (arXiv 2307.08691)
    "score_passes": (6, 1, 40),
    "lm_head": (0.8, 0.3, 1.2),
    "activation_passes": (5, 0.25, 30),
    "eager_passes": (1.5, 1, 3),
    "tp_factor": (0.6, 0.05, 4),
    "tp_latency_s": (2e-5, 1e-7, 1e-3),
    "ep_factor": (1, 0.05, 8),
    "dp_factor": (0.3, 0.02, 3),
    "fsdp_factor": (1, 0.01, 3),
    "hop_s": (3.4e-6, 5e-7, 4.7e-6),
    "stages_per_rank": (2, 1, 4),
    "straggler_growth": (0.02, 1e-4, 0.3),
}
SMALL_SOURCE = 8
_RELEASE = re.compile(r"(\d\d\.\d\d(?:\.\d\d)?) NeMo Container")
FEW_ROWS = 3  # devices and architectures with fewer have no efficiency of their own
_OTHER = "other"
FIRST_EFFICIENCY, LEAST_EFFICIENCY = 0.7, 0.2
# as a natural logarithm: how far measured times of one layout lie apart, and how far a constant may go from its first value
ROW_SPREAD, START_SPREAD, EFFICIENCY_SPREAD = 0.1, 1.3, 0.33
DEVICE_SPREAD = 0.1  # how far efficiencies of devices lie from that of their architecture
_COUNTS_RECOMPUTE = re.compile(
    r"includes? recompute|recompute-inclusive", re.IGNORECASE
)  # published FLOPs, in the notes


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRun:
    """A row with a measured speed.

    Attributes:
        row: Its columns.
        layout: What was run.
        tokens_per_s: Measured, of one device.
        excluded: Why constants are not fitted to it; empty if they are.
    """

    row: dict[str, str]
    layout: Layout
    tokens_per_s: float
    excluded: str = ""

    @property
    def utilization(self) -> float:
        """Model FLOPs over the peak."""
        peak = self.layout.device.peak_flops(self.layout.precision)
        assert peak is not None  # read_layout
        return self.layout.model.flops_per_token(self.layout.seq_len) * self.tokens_per_s / peak


def read_runs(rows: Path = ROWS) -> tuple[list[PublishedRun], list[str]]:
    """All rows of a file that can be compared, and why the others cannot. Constants are fitted to those of ``ROWS`` alone."""
    runs: list[PublishedRun] = []
    refused: list[str] = []
    with rows.open(newline="") as file:
        for row in map(corrected, csv.DictReader(file)):
            try:
                layout = read_layout(row)
            except LayoutError as error:
                refused.append(str(error))
                continue
            tokens = float(row["tokens_per_s_per_gpu"] or 0)
            flops = float(row["tflops_per_gpu"] or 0) * 1e12
            if not tokens and _COUNTS_RECOMPUTE.search(row["notes"]):
                layout = replace(layout, recompute="full")  # some of these rows do not say it otherwise
                flops /= recomputed_over_model_flops(layout)
            tokens = tokens or flops / layout.model.flops_per_token(layout.seq_len)
            if not tokens and row["step_time_s"] and row["global_batch"]:
                tokens = layout.global_batch * layout.seq_len / float(row["step_time_s"]) / layout.num_devices
            if not tokens:
                refused.append("no speed was measured")
                continue
            network = network_bytes_per_s(row, layout.device.network_bytes_per_s)
            layout = replace(layout, device=replace(layout.device, network_bytes_per_s=network))
            runs.append(PublishedRun(row=row, layout=layout, tokens_per_s=tokens, excluded=_excluded(row)))
    return runs, refused


def recomputed_over_model_flops(layout: Layout) -> float:
    """Published FLOPs that count full recompute, over those of the model: a third more, but for the output matrix.

    Source:
        Narayanan et al. 2021 (arXiv 2104.04473), appendix: 96 in place of 72.
    """
    every = layout.model.flops_per_token(layout.seq_len)
    return 1 + (every - 6.0 * layout.model.vocab * layout.model.hidden) / 3 / every


def _excluded(row: dict[str, str]) -> str:
    if "unpacked" in row["notes"]:
        return "tokens of padding are not counted"
    if "power limited" in row["gpu_type"]:
        return "the limit is not said"
    if "SUSPECT" in row["notes"]:
        return "marked as suspect"
    if row["gpu_type"].startswith("TPU"):
        return "another kind of device: constants would serve neither"
    return ""


def superseded(runs: Sequence[PublishedRun]) -> list[bool]:
    """Whether a later release of the program reports the same model, kind and number of devices and precision.

    One layout takes up to twice as long in an earlier release, which no column says, and a job runs on a current one.
    """
    releases = [_RELEASE.match(run.row["notes"]) for run in runs]
    jobs = [
        # a remark in brackets after the model's name is of the release too
        (run.row["model"].partition("(")[0].strip(), efficiency_key(run.layout), run.layout.num_devices)
        for run in runs
    ]
    last: dict[tuple[str, str, int], str] = {}
    for job, release in zip(jobs, releases, strict=True):
        if release:
            last[job] = max(last.get(job, ""), release[1])
    return [bool(release) and release[1] != last[job] for job, release in zip(jobs, releases, strict=True)]


def measured_s(runs: Sequence[PublishedRun], work: StepWork) -> Numbers:
    """Measured step times: those of the tokens of ``work``."""
    speed = np.array([run.tokens_per_s for run in runs])
    return work.tokens_per_step / speed / work.num_devices


def fit(layouts: Sequence[Layout], measured: Numbers, sources: Sequence[str] = ()) -> Constants:
    """Constants for ``measured`` step times of ``layouts``.

    ``sources`` are those of the layouts; without them each row has the same weight.
    """
    rows_of = Counter(sources)
    weights = np.array([rows_of[source] ** -0.5 for source in sources]) if sources else np.ones(len(layouts))
    root_weights = np.sqrt(weights / weights.mean())
    work, names = count_work(layouts), list(STARTS)
    counts = Counter(key for layout in layouts for key in efficiency_keys(layout))
    keys = [_OTHER, *sorted(key for key, count in counts.items() if count >= FEW_ROWS)]
    place = {key: i for i, key in enumerate(keys)}
    chosen = [next((place[key] for key in efficiency_keys(layout) if key in place), 0) for layout in layouts]
    which = np.array(chosen)
    # an efficiency returns to that of the architecture where rows say nothing, and this to that of all
    parent, away = np.zeros(len(keys), int), np.full(len(keys), EFFICIENCY_SPREAD)
    for device, *architecture in set(map(efficiency_keys, layouts)):
        if device in place and architecture:
            parent[place[device]], away[place[device]] = place[architecture[0]], DEVICE_SPREAD
    # large products are limited by power, so devices of an architecture differ as their power over their peak does
    power, alone = np.zeros(len(keys)), np.zeros(len(layouts))
    for i, layout in enumerate(layouts):
        own, *architecture = efficiency_keys(layout)
        if own in place:
            power[place[own]] = np.log(layout.device.power_share)
        elif architecture and architecture[0] in place:
            alone[i] = np.log(layout.device.power_share)
    shared = len(names)
    starts = np.log([*(STARTS[name][0] for name in names), *[FIRST_EFFICIENCY] * len(keys)])
    low = np.log([*(STARTS[name][1] for name in names), *[LEAST_EFFICIENCY] * len(keys)])
    high = np.log([*(STARTS[name][2] for name in names), *[1.0] * len(keys)])

    def constants(x: Numbers) -> Constants:
        values = np.exp(x)
        efficiency = dict(zip(keys, map(float, values[shared:]), strict=True))
        common = dict(zip(names, map(float, values[:shared]), strict=True))
        return Constants(**common, other_efficiency=efficiency.pop(_OTHER), efficiency=efficiency)

    def residuals(x: Numbers) -> Numbers:
        efficiency = np.minimum(1, np.exp(x[shared:][which] + alone))
        predicted = step_time(work, efficiency, constants(x)).total
        returns: Numbers = np.take(x[shared:], parent) + power
        returns[0] = starts[shared]
        return np.concatenate(
            [
                np.log(predicted / measured) / ROW_SPREAD * root_weights,
                (x[:shared] - starts[:shared]) / START_SPREAD,
                (x[shared:] - returns) / away,
            ]
        )

    found = least_squares(residuals, starts, bounds=(low, high), loss="soft_l1", max_nfev=100)
    return constants(found.x)


def left_out(runs: Sequence[PublishedRun], groups: Sequence[str]) -> Numbers:
    """Predicted step times of ``runs``, each by constants that are fitted to the runs of all other groups."""
    layouts = [run.layout for run in runs]
    measured = measured_s(runs, count_work(layouts))
    predicted = np.zeros(len(runs))
    of, earlier = np.array(groups), superseded(runs)
    for group in sorted(set(groups)):
        inside = np.flatnonzero(of == group)
        outside = [i for i, other in enumerate(groups) if other != group and not runs[i].excluded and not earlier[i]]
        sources = [runs[i].row["source"] for i in outside]
        constants = fit([layouts[i] for i in outside], measured[outside], sources)
        chosen = [layouts[i] for i in inside]
        predicted[inside] = step_time(count_work(chosen), efficiencies(chosen, constants), constants).total
    return predicted


def by_source(runs: Sequence[PublishedRun]) -> list[str]:
    """The group of each run: its source, or "others" for sources of few rows."""
    sources = [run.row["source"] for run in runs]
    return [source if sources.count(source) >= SMALL_SOURCE else "others" for source in sources]


def quantile_spread(ratios: Numbers, sources: Sequence[str]) -> float:
    """The spread in which nine of ten of ``ratios`` (measured over predicted) of a source lie that is drawn at random.

    Errors of one source are alike, and a new run is of another one. So each source has the same weight, whatever its rows: the
    pooled distribution of two-layer models (arXiv 1809.07441, section 3).
    """
    rows_of, errors = Counter(sources), np.abs(np.log(ratios))
    order = np.argsort(errors)
    share = np.cumsum(np.array([1 / rows_of[source] for source in sources])[order]) / len(rows_of)
    return float(np.expm1(errors[order][np.searchsorted(share, 0.9 - 1e-9)]))


def main() -> None:
    """Write the constants that fit all runs."""
    runs = [run for run in read_runs()[0] if not run.excluded]
    layouts = [run.layout for run in runs]
    measured = measured_s(runs, count_work(layouts))
    current = [i for i, earlier in enumerate(superseded(runs)) if not earlier]
    fitted = fit([layouts[i] for i in current], measured[current], [runs[i].row["source"] for i in current])
    ratios = measured / left_out(runs, by_source(runs))
    values = {item.name: getattr(fitted, item.name) for item in fields(fitted)}
    for name, has_experts in (("spread", False), ("spread_experts", True)):
        inside = [i for i, layout in enumerate(layouts) if bool(layout.model.experts) == has_experts]
        values[name] = quantile_spread(ratios[inside], [runs[i].row["source"] for i in inside])
    WRITTEN.write_text(json.dumps(_rounded(values), indent=2, sort_keys=True) + "\n")


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    assert isinstance(value, float)
    return float(f"{value:.4g}")


if __name__ == "__main__":
    main()
