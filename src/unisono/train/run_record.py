"""The files of a Python script's run that say what it is: ``config.toml`` and ``plan.json``.

``config.toml`` has the form of the command line's, with a ``python:`` label for each part that is code. Nothing of it can run:
``unisono eval`` and ``unisono checkpoint export`` take the code from a file that their own options name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from unisono.checkpoint import CheckpointOptions
from unisono.config.values import CALLABLE, encode, is_code, toml_value
from unisono.data.dataset import Dataset, read_samples
from unisono.data.options import LoaderOptions
from unisono.observe.options import ObserveOptions
from unisono.optim import OptimOptions, ScheduleOptions
from unisono.plan.options import PlanOptions
from unisono.plan.plan import Plan
from unisono.sanitize import without_credentials
from unisono.storage.files import write_atomically
from unisono.storage.run_folder import PLAN_FILE, RUN_FILE
from unisono.train.metrics import METRICS, Metric
from unisono.train.objectives import OBJECTIVES
from unisono.train.options import TrainOptions

TOKEN_ENTRIES = ("tokens", "input_ids")
MIN_SEQ_LEN = 2  # of data.seq_len


def write_run_record(
    run_dir: Path,
    *,
    given_dir: Path,
    seed: int,
    model: Any,
    objective: Any,
    data: Any,
    data_kind: str,
    metrics: Mapping[str, Metric],
    given_plan: Plan | PlanOptions,
    plan: Plan,
    optimizer: Any,
    schedule: Any,
    optimization: str,
    options: TrainOptions,
    checkpoint: CheckpointOptions,
    loader: LoaderOptions,
    observe: ObserveOptions,
) -> None:
    """Write ``config.toml`` and ``plan.json`` of a run whose code is the user's.

    Args:
        given_dir: ``run_dir`` as the script gave it.
        data_kind: Name of the class of the training data as the script gave them; ``data`` is made of them.
        given_plan: The plan as the script gave it; ``plan`` is the resolved one.
        optimizer: As given. Options of ours are a section of the file, code a label; ``optimization`` describes any in words.
        schedule: The schedule that is used, likewise.
    """
    plan.save(run_dir / PLAN_FILE)
    components = {
        "model": _label(type(model) if isinstance(model, nn.Module) else model),
        "objective": next((name for name, known in OBJECTIVES.items() if known is objective), None)
        or _label(objective),
        "data": CALLABLE + data_kind,
        "metrics": [name for metric in metrics.values() for name, known in METRICS.items() if known is metric],
    }
    if not isinstance(optimizer, OptimOptions):
        components["optimizer"] = _label(optimizer)
    if not isinstance(schedule, ScheduleOptions):
        components["schedule"] = _label(schedule)
    sections: dict[str, Any] = {
        "run": {"dir": str(given_dir), "seed": seed},
        "components": components,
        "data": {"seq_len": length} if (length := sequence_length(data)) >= MIN_SEQ_LEN else {},
        "loader": loader,
        "plan": given_plan if isinstance(given_plan, PlanOptions) else _plan_section(given_plan),
        "optim": optimizer if isinstance(optimizer, OptimOptions) else {},
        "schedule": schedule if isinstance(schedule, ScheduleOptions) else {},
        "train": options,
        "checkpoint": checkpoint,
        "observe": observe,
    }
    lines = [
        f"# the run of {sys.argv[0] or 'a Python session'}, whose code is not in this folder",
        f"# optimization: {optimization}",
        f"# the plan in full: {PLAN_FILE}",
    ]
    for section, values in sections.items():
        if not isinstance(values, dict):
            values = {field.name: getattr(values, field.name) for field in fields(values)}
        if values:
            lines += ["", f"[{section}]", *(f"{name} = {_toml(value)}" for name, value in values.items())]
    write_atomically(run_dir / RUN_FILE, ("\n".join(lines) + "\n").encode())


def sequence_length(data: Any) -> int:
    """Tokens of a sample of texts that all have one length, judged by the first and the last; 0 for other data, or a stream."""
    if not isinstance(data, Dataset) or not len(data):
        return 0
    samples = read_samples(data, np.array([0, len(data) - 1]))
    lengths = {len(sample[name]) for sample in samples for name in TOKEN_ENTRIES if np.ndim(sample.get(name, 0))}
    return lengths.pop() if len(lengths) == 1 else 0


def _toml(value: Any) -> str:
    return without_credentials(toml_value(encode(value)))


def _label(code: Any) -> str:
    """The label of a class, function or callable object."""
    return str(encode(code)) if is_code(code) else CALLABLE + type(code).__qualname__


def _plan_section(plan: Plan) -> dict[str, Any]:
    """What an evaluation takes from a plan that was given whole."""
    return {
        "device": plan.mesh.device,
        "precision": plan.precision.compute,
        "global_batch": plan.batch.global_batch,
        "micro_batch": plan.batch.micro_batch,
    }
