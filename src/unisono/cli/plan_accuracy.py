"""``unisono plan accuracy``: what plans were predicted to take on this machine, and what runs with them took."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from unisono.cli.common import common_options, print_result
from unisono.data.options import default_cache_dir
from unisono.units import GIB

if TYPE_CHECKING:
    from unisono.planner.plan_record import MeasuredRun


@click.command("accuracy")
@common_options
def accuracy(as_json: bool) -> None:
    """Show predicted and measured step times of plans that unisono plan auto predicted and that runs had.

    The error is that of the prediction without what was learned from earlier runs, as a part of the measured time.
    """
    from unisono.planner.plan_record import PLAN_RECORD_FILE, read_plan_record

    path = default_cache_dir(os.environ) / PLAN_RECORD_FILE
    record = read_plan_record(path)
    machines = {run.predicted.machine: None for run in record.runs}
    shown = [
        {
            "host": machine.host,
            "device": machine.device,
            "torch": machine.torch,
            **_errors(runs := [run for run in record.runs if run.predicted.machine == machine]),
            "plans": list(_plans(runs)),
        }
        for machine in machines
    ]
    result = {"file": str(path), "predictions": len(record.predictions), "runs": len(record.runs), "machines": shown}
    print_result(as_json, result, _lines(result))


def _errors(runs: Sequence[MeasuredRun]) -> dict[str, Any]:
    return {"runs": len(runs), "median_error_frac": statistics.median(abs(1 / run.ratio - 1) for run in runs)}


def _plans(runs: Sequence[MeasuredRun]) -> Iterator[dict[str, Any]]:
    """One object for each plan and work, with the newest prediction; those with the newest run are last."""
    groups: dict[tuple[str, str], list[MeasuredRun]] = {}
    for run in runs:
        key = run.predicted.plan, run.predicted.work
        groups[key] = [*groups.pop(key, []), run]
    for (_, work), group in groups.items():
        newest = group[-1].predicted
        peaks = [run.peak_bytes for run in group if run.peak_bytes is not None]
        yield {
            "plan": newest.words,
            "axes": newest.axes,
            "work": work,
            **_errors(group),
            "steps": sum(run.steps for run in group),
            "predicted_step_s": newest.step_s,
            "predicted_parts_s": dict(newest.parts_s),
            "measured_step_s": statistics.median(run.step_s for run in group),
            "ratio": statistics.median(run.ratio for run in group),
            "data_wait_frac": statistics.median(run.data_wait_frac for run in group),
            "predicted_peak_bytes": newest.peak_bytes,
            "measured_peak_bytes": max(peaks, default=None),
        }


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    if not result["runs"]:
        predicted = result["predictions"]
        yield f"no run is recorded; {predicted or 'no'} predicted plan{'' if predicted == 1 else 's'} in {result['file']}"
        yield "unisono plan auto predicts plans; a run of 12 steps or more with one of them is recorded"
        return
    for machine in result["machines"]:
        yield f"{machine['host']}, {machine['device']}, torch {machine['torch']}"
        for plan in machine["plans"]:
            yield f"  {plan['plan']}"
            yield f"    {_line(plan)}"
        yield f"  median error of {_runs(machine['runs'])}: {machine['median_error_frac']:.1%}"


def _line(plan: Mapping[str, Any]) -> str:
    text = (
        f"predicted {plan['predicted_step_s']:.4g} s, measured {plan['measured_step_s']:.4g} s, {plan['ratio']:.3g} times as "
        f"long ({_runs(plan['runs'])}, {plan['steps']} steps)"
    )
    if plan["data_wait_frac"] >= 0.005:
        text += f"; {plan['data_wait_frac']:.0%} of it waiting for data"
    if plan["measured_peak_bytes"] is not None:
        peaks = (plan[f"{kind}_peak_bytes"] / GIB for kind in ("predicted", "measured"))
        text += "; memory predicted {:.4g} GiB, measured {:.4g} GiB".format(*peaks)
    return text


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"
