"""``unisono plan accuracy``: what plans were predicted to take on this machine, and what runs with them took."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from unisono.cli.common import common_options, print_result
from unisono.data.options import default_cache_dir
from unisono.units import GIB

if TYPE_CHECKING:
    from unisono.planner.layout_record import MeasuredLayout
    from unisono.planner.plan_record import MeasuredRun


@click.command("accuracy")
@common_options
def accuracy(as_json: bool) -> None:
    """Show predicted and measured step times of plans and layouts that runs had.

    Plans are those that unisono plan auto predicted; layouts are predicted as unisono plan --cluster does now. The error is
    that of the prediction without what was learned from earlier runs, as a part of the measured time.
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
    result = {
        "file": str(path),
        "predictions": len(record.predictions),
        "runs": len(record.runs),
        "machines": shown,
        "layout_runs": len(record.layouts),
        "devices": list(_devices(record.layouts)),
    }
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


def _devices(runs: Sequence[MeasuredLayout]) -> Iterator[dict[str, Any]]:
    """One object for each device with its layouts; those with the newest run are last."""
    from unisono.planner.layout_record import predicted_steps_s
    from unisono.planner.search import PredictedLayout

    groups: dict[str, dict[str, list[tuple[MeasuredLayout, float]]]] = {}
    for run, step_s in zip(runs, predicted_steps_s([run.layout for run in runs]), strict=True):
        if not math.isnan(step_s):
            layouts, key = groups.setdefault(run.layout.device.name, {}), repr(run.layout)
            layouts[key] = [*layouts.pop(key, []), (run, step_s)]
    for device, layouts in groups.items():
        errors = [abs(step_s / run.step_s - 1) for group in layouts.values() for run, step_s in group]
        yield {
            "device": device,
            "runs": len(errors),
            "median_error_frac": statistics.median(errors),
            "layouts": [
                {
                    "layout": PredictedLayout(layout=group[0][0].layout, step_s=group[0][1], needed_bytes=0).axes_text,
                    "num_devices": group[0][0].layout.num_devices,
                    "params": group[0][0].layout.model.params,
                    "runs": len(group),
                    "steps": sum(run.steps for run, _ in group),
                    "predicted_step_s": group[0][1],
                    "measured_step_s": (measured_s := statistics.median(run.step_s for run, _ in group)),
                    "ratio": measured_s / group[0][1],
                    "data_wait_frac": statistics.median(run.data_wait_frac for run, _ in group),
                }
                for group in layouts.values()
            ],
        }


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    if not result["runs"] and not result["devices"]:
        predicted = result["predictions"]
        yield f"no run is recorded; {predicted or 'no'} predicted plan{'' if predicted == 1 else 's'} in {result['file']}"
        yield "unisono plan auto predicts plans; a run of 12 steps or more with one of them is recorded"
        return
    for machine in result["machines"]:
        title = f"{machine['host']}, {machine['device']}, torch {machine['torch']}"
        yield from _group_lines(title, machine, [(plan["plan"], plan) for plan in machine["plans"]])
    for device in result["devices"]:
        yield from _group_lines(
            f"layouts on {device['device']}, as unisono plan --cluster predicts them",
            device,
            [
                (f"{each['params'] / 1e6:.4g} M parameters, {each['num_devices']:,} devices: {each['layout']}", each)
                for each in device["layouts"]
            ],
        )


def _group_lines(
    title: str, group: Mapping[str, Any], members: Sequence[tuple[str, Mapping[str, Any]]]
) -> Iterator[str]:
    """The runs of a ``group``, whose ``members`` are plans or layouts in words, with their times."""
    yield title
    for words, member in members:
        yield f"  {words}"
        yield f"    {_line(member)}"
    yield f"  median error of {_runs(group['runs'])}: {group['median_error_frac']:.1%}"


def _line(plan: Mapping[str, Any]) -> str:
    text = (
        f"predicted {plan['predicted_step_s']:.4g} s, measured {plan['measured_step_s']:.4g} s, {plan['ratio']:.3g} times as "
        f"long ({_runs(plan['runs'])}, {plan['steps']} steps)"
    )
    if plan["data_wait_frac"] >= 0.005:
        text += f"; {plan['data_wait_frac']:.0%} of it waiting for data"
    if plan.get("measured_peak_bytes") is not None:
        peaks = (plan[f"{kind}_peak_bytes"] / GIB for kind in ("predicted", "measured"))
        text += "; memory predicted {:.4g} GiB, measured {:.4g} GiB".format(*peaks)
    return text


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"
