"""``run.log``: a number of the user's own in the event log, the table, TensorBoard's files and the report."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from report_page import charts
from torch import nn

from unisono import CheckpointOptions, ObserveOptions, PlanOptions, Trainer, TrainOptions
from unisono.errors import ConfigError
from unisono.observe.events import EventLog, events_path, read_events
from unisono.observe.own_values import log_value
from unisono.train import mean_squared_error


def trainer(run_dir: Path, steps: int) -> Trainer:
    return Trainer(
        nn.Linear(3, 1),
        [(torch.ones(3), torch.ones(1))] * 8,
        PlanOptions(device="cpu", precision="fp32", global_batch=4),
        objective=mean_squared_error,
        options=TrainOptions(steps=steps, eval_every_steps=0),
        checkpoint=CheckpointOptions(every_steps=1),
        run_dir=run_dir,
        observe=ObserveOptions(console="off", trackers=("csv", "tensorboard")),
    )


def test_a_value_is_in_events_table_tensorboard_and_report(tmp_path: Path) -> None:
    with trainer(tmp_path, 3) as run:
        for step in run:
            run.log("weights/mean", run.model.weight.detach().mean())  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess, reportCallIssue]
            run.log("ones", torch.ones(1, 1))
            if step.index == 2:
                run.log("rare", math.nan)
    logged = [event for event in read_events(events_path(tmp_path, 0)).events if event["kind"] == "log"]
    assert [event["step"] for event in logged if "ones" in event] == [1, 2, 3]
    assert [event["rare"] for event in logged if "rare" in event] == ["NaN"]
    with (tmp_path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "log"]
    assert [row["ones"] for row in rows if row["ones"]] == ["1.0"] * 3
    assert [(row["step"], row["rare"]) for row in rows if row["rare"]] == [("2", "nan")]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()  # type: ignore[no-untyped-call]
    assert [(scalar.step, scalar.value) for scalar in read.Scalars("ones")] == [(1, 1.0), (2, 1.0), (3, 1.0)]
    assert "weights/mean" in json.dumps(charts((tmp_path / "report.html").read_text()))


@pytest.fixture
def events(tmp_path: Path) -> EventLog:
    return EventLog(tmp_path / "events.jsonl", rank=0, run_id="r", attempt=1)


@pytest.mark.parametrize(
    ("name", "value", "given", "rule", "nearest"),
    [
        (
            "train/loss",
            1.0,
            "log of 'train/loss'",
            "are names of the run's own numbers",
            "run.log('own/train_loss', …)",
        ),
        ("step", 1.0, "log of 'step'", "are names of the run's own numbers", "run.log('own/step', …)"),
        ("self", 1.0, "log of 'self'", "are names of the run's own numbers", "run.log('own/self', …)"),
        ("my loss", 1.0, "log of 'my loss'", "a name has ASCII letters", "run.log('own/my_loss', …)"),
        ("", 1.0, "log of ''", "a name has ASCII letters", "run.log('own/value', …)"),
        ("password", 1.0, "log of 'password'", "that of a secret", "run.log('own/value', …)"),
        ("x", torch.ones(2), "log of 'x' with a Tensor [2]", "one number", "run.log('x', values.mean())"),
        ("x", "3", "log of 'x' with a str", "one number", "run.log('x', values.mean())"),
        ("x", None, "log of 'x' with a NoneType", "one number", "run.log('x', values.mean())"),
    ],
)
def test_names_and_values_that_are_refused(
    events: EventLog, name: str, value: Any, given: str, rule: str, nearest: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        log_value(events, 1, name, value)
    (problem,) = caught.value.problems
    assert (problem.given, problem.consequence, problem.nearest) == (given, "nothing was logged", nearest)
    assert rule in problem.rule
    assert events.path.read_text() == ""
