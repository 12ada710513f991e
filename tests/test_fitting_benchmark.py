"""Speeds of published runs: which FLOPs a row counts, and what is fitted where rows say little."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.planner.corrections import CORRECTIONS, corrected
from benchmarks.planner.fitting import (
    ROWS,
    PublishedRun,
    fit,
    left_out,
    measured_s,
    quantile_spread,
    read_runs,
    recomputed_over_model_flops,
    superseded,
)

from unisono.planner.devices import DEVICES
from unisono.planner.layout import Layout
from unisono.planner.model_presets import PRESETS
from unisono.planner.step_time import efficiencies, step_time
from unisono.planner.step_work import count_work


def test_flops_that_count_recompute_are_more_than_those_of_the_model() -> None:
    """Narayanan et al. 2021, table 1: 145.6 billion parameters at 148 TFLOP/s, a quarter of it the repeated forward pass."""
    runs = read_runs()[0]
    (run,) = [
        run for run in runs if run.row["model"] == "gpt-145.6b" and "arXiv:2104.04473 Table 1" in run.row["source"]
    ]
    flops = run.layout.model.flops_per_token(run.layout.seq_len) * run.tokens_per_s
    assert flops == pytest.approx(148e12 / recomputed_over_model_flops(run.layout))
    assert 1.31 < recomputed_over_model_flops(run.layout) < 4 / 3
    # a row of the same formula that does not say what it recomputed
    (other,) = [run for run in runs if "deepspeed-azure" in run.row["source"] and run.row["model"] == "gpt-175b"]
    assert other.row["recompute"] == ""
    assert other.layout.recompute == "full"


def test_efficiencies_are_pooled_by_architecture() -> None:
    """A device with few rows keeps to its architecture, and one without rows has that of it."""
    base = Layout(
        model=PRESETS["llama-3-8b"],
        device=DEVICES["h100"],
        precision="bf16",
        num_devices=8,
        global_batch=64,
        seq_len=4096,
    )
    layouts = [replace(base, micro_batch=size) for size in (1, 2, 4, 8)] * 4
    layouts += [replace(base, device=DEVICES["a100-80"], micro_batch=size) for size in (1, 2, 4, 8)] * 4
    real = np.where([layout.device.name == "h100" for layout in layouts], 0.5, 0.8)
    work = count_work(layouts)
    known = fit(layouts, step_time(work, real, fit(layouts, np.ones(len(layouts)))).total)
    devices = ("h100", "h200", "a100-40", "gb200")
    h100, h200, a100, gb200 = efficiencies([replace(base, device=DEVICES[name]) for name in devices], known)
    assert h100 < gb200 < a100
    assert h200 == pytest.approx(h100, rel=0.1)


def test_each_correction_changes_rows_and_leaves_those_of_other_sources() -> None:
    with ROWS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for correction in CORRECTIONS:
        meant = [row for row in rows if correction.source in row["source"]]
        meant = [row for row in meant if correction.where is None or correction.where(row)]
        assert meant, correction.text
        assert all(corrected(row) != row for row in meant), correction.text
    untouched = [row for row in rows if not any(correction.source in row["source"] for correction in CORRECTIONS)]
    assert all(corrected(row) == row for row in untouched)
    assert len(untouched) > 300


def test_a_step_time_alone_is_a_speed() -> None:
    """Korthikanti et al. 2022, table 5: 530 billion parameters, 280 sequences of 2,048 tokens in 37.83 s on 280 devices."""
    runs = [run for run in read_runs()[0] if "2205.05198" in run.row["source"] and run.row["model"] == "gpt-530b"]
    assert sorted(run.tokens_per_s for run in runs) == pytest.approx([2048 / 49.05, 2048 / 37.83])
    # the utilization that the paper gives beside it
    assert runs[0].utilization == pytest.approx(0.56, abs=0.01)


def test_batch_time_and_flops_of_the_megatron_tables_agree() -> None:
    """Each row gives all three, so that they say how long a sequence was."""
    runs = [run for run in read_runs()[0] if "tables.tex" in run.row["source"]]
    assert len(runs) == 8
    for run in runs:
        seconds = float(run.row["global_batch"]) * run.layout.seq_len / run.tokens_per_s / run.layout.num_devices
        assert seconds == pytest.approx(float(run.row["step_time_s"]), rel=0.04)


def test_sources_of_many_rows_do_not_decide_alone() -> None:
    base = Layout(
        model=PRESETS["llama-3-8b"],
        device=DEVICES["h100"],
        precision="bf16",
        num_devices=8,
        global_batch=64,
        seq_len=4096,
    )
    layouts = [replace(base, micro_batch=size) for size in (1, 2, 4, 8)] * 17
    real = np.array([0.4] * 64 + [0.6] * 4)
    work = count_work(layouts)
    measured = step_time(work, real, fit(layouts, np.ones(len(layouts)))).total
    equal = fit(layouts, measured).efficiency["h100/16-bit"]
    by_source = fit(layouts, measured, ["many"] * 64 + ["few"] * 4).efficiency["h100/16-bit"]
    assert equal < by_source


def released(run: PublishedRun, release: str, model: str = "", tokens_per_s: float = 1000) -> PublishedRun:
    row = {**run.row, "notes": f"{release} NeMo Container; a row", "model": model or run.row["model"]}
    return replace(run, row=row, tokens_per_s=tokens_per_s)


def test_a_later_release_of_the_same_job_supersedes_a_row() -> None:
    run = next(run for run in read_runs()[0] if run.layout.device.name == "h100")
    more = {"num_devices": 2 * run.layout.num_devices, "global_batch": 2 * run.layout.global_batch}
    others = replace(run, layout=replace(run.layout, **more))
    rows = [
        released(run, "25.09", "a model"),
        released(run, "26.02", "a model (with a remark)"),
        released(run, "26.02.01", "a model"),
        released(run, "25.09", "another model"),
        released(others, "25.09", "a model"),
        run,
    ]
    assert superseded(rows) == [True, True, False, False, False, False]


def test_constants_are_not_fitted_to_superseded_rows() -> None:
    """But these are predicted as the others are."""
    runs = [run for run in read_runs()[0] if run.layout.device.name == "a100-80" and not run.excluded]
    unlike = replace(runs[0], row={**runs[0].row, "source": "a report"})
    slow = [released(unlike, "25.09", tokens_per_s=unlike.tokens_per_s / 10) for _ in range(100)]
    every = [*runs, *slow, released(unlike, "26.02", tokens_per_s=unlike.tokens_per_s)]
    sources = [run.row["source"] for run in every]
    predicted = left_out(every, sources)
    measured = measured_s(every, count_work([run.layout for run in every]))
    as_before = left_out([*runs, every[-1]], [*sources[: len(runs)], sources[-1]])
    np.testing.assert_allclose(predicted[: len(runs)], as_before[:-1], rtol=1e-3)
    assert (measured / predicted)[len(runs) : -1].min() > 5


def test_each_source_has_the_same_weight_in_an_interval() -> None:
    """Of ten sources nine have errors of 10 %, one of 60 %; the rows of the many are of one source."""
    ratios = np.array([*[1.1] * 99, *[1.1] * 8, 1.6, 1.6])
    sources = ["many"] * 99 + [f"one of {i}" for i in range(8)] + ["far"] * 2
    assert quantile_spread(ratios, sources) == pytest.approx(0.1)
    assert quantile_spread(ratios, [*sources[:-1], "also far"]) == pytest.approx(0.6)
    assert quantile_spread(1 / ratios, [*sources[:-1], "also far"]) == pytest.approx(0.6)


def test_the_intervals_that_ship_are_those_of_sources_that_are_left_out() -> None:
    """They hold nine of ten rows of a source that is drawn at random."""
    from benchmarks.planner.published import coverage

    runs = [run for run in read_runs()[0] if not run.excluded]
    measured = measured_s(runs, count_work([run.layout for run in runs]))
    found = coverage(runs, measured / left_out(runs, [run.row["source"] for run in runs]))
    assert 0.85 < found["sources"] < 0.95
