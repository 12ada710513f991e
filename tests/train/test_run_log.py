"""``run.log``: a number of the user's own in the event log, the table, TensorBoard's files and the report."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from report_pages import charts
from torch import nn

from unisono import CheckpointOptions, ObserveOptions, PlanOptions, Trainer, TrainOptions
from unisono.errors import ConfigError
from unisono.observe.events import EventLog, events_path, read_events
from unisono.observe.own_values import log_image, log_text, log_value
from unisono.train import mean_squared_error


def decode_png(data: bytes) -> np.ndarray:
    """Pixels [H, W, 3], of a gray picture [H, W]."""
    return np.asarray(Image.open(io.BytesIO(data)))


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


def test_texts_and_pictures_are_files_and_events_that_tensorboard_shows(tmp_path: Path) -> None:
    pictures = [np.random.default_rng(n).integers(0, 256, (5, 7, 3), np.uint8) for n in range(2)]
    with trainer(tmp_path, 2) as run:
        for step, picture in zip(run, pictures, strict=True):
            run.log_text("own/words", f"step **{step.index}**, password=hunter22")
            run.log_image("own/picture", picture)
            run.log_image("own/gray", torch.from_numpy(picture[:, :, 0].copy()))
    events = read_events(events_path(tmp_path, 0)).events
    texts = [event for event in events if event["kind"] == "log_text"]
    assert [(event["step"], event["name"], event["path"]) for event in texts] == [
        (n, "own/words", f"media/rank00000/own/words/step-0000000{n}.txt") for n in (1, 2)
    ]
    assert (tmp_path / texts[0]["path"]).read_text() == "step **1**, password=[redacted]"
    shown = [event for event in events if event["kind"] == "log_image"]
    assert [(event["height"], event["width"], event["channels"]) for event in shown] == [(5, 7, 3), (5, 7, 1)] * 2
    assert (decode_png((tmp_path / shown[2]["path"]).read_bytes()) == pictures[1]).all()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"images": 0}).Reload()  # type: ignore[no-untyped-call]
    assert set(read.Tags()["images"]) == {"own/picture", "own/gray"}
    for number, image in enumerate(read.Images("own/picture")):
        assert (image.step, image.height, image.width) == (number + 1, 5, 7)
        assert (decode_png(image.encoded_image_string) == pictures[number]).all()
    (gray, _) = read.Images("own/gray")
    assert (decode_png(gray.encoded_image_string) == pictures[0][:, :, 0]).all()
    words = read.Tensors("own/words")
    assert [(each.step, each.tensor_proto.string_val[0].decode()) for each in words] == [
        (n, f"step **{n}**, password=[redacted]") for n in (1, 2)
    ]
    assert read.SummaryMetadata("own/words").plugin_data.plugin_name == "text"
    assert (tmp_path / "report.html").exists()


def test_tensorboard_has_the_settings_and_the_end_of_the_run_in_the_run_itself(tmp_path: Path) -> None:
    for steps in (2, 3):
        with trainer(tmp_path, steps) as run:
            list(run)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import api_pb2, metadata

    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()  # type: ignore[no-untyped-call]
    assert [path.is_dir() for path in (tmp_path / "tensorboard").iterdir()] == [False, False]  # no run of its own
    start = metadata.parse_session_start_info_plugin_data(
        read.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    )
    assert start.hparams["optim.lr"].number_value == pytest.approx(0.002)
    assert start.hparams["plan.precision"].string_value == "fp32"
    assert start.hparams["observe.report"].bool_value
    end = metadata.parse_session_end_info_plugin_data(
        read.SummaryMetadata(metadata.SESSION_END_INFO_TAG).plugin_data.content
    )
    assert end.status == api_pb2.STATUS_SUCCESS
    assert [each.step for each in read.Scalars("train/loss")] == [1, 2, 3]


@pytest.fixture
def events(tmp_path: Path) -> EventLog:
    return EventLog(tmp_path / "events.jsonl", rank=0, run_id="r", attempt=1)


@pytest.mark.filterwarnings("error")
def test_a_tensor_with_a_gradient_is_logged_without_a_warning(events: EventLog) -> None:
    log_value(events, 1, "own/loss", torch.tensor(2.5, requires_grad=True) * 2)
    assert read_events(events.path).events[0]["own/loss"] == 5.0


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


@pytest.mark.parametrize(
    ("image", "given"),
    [
        (np.zeros((2, 2, 3)), "a ndarray of float64 [2, 2, 3]"),
        (np.zeros((2, 2, 4), np.uint8), "a ndarray of uint8 [2, 2, 4]"),
        (np.zeros((3, 2, 2), np.uint8), "a ndarray of uint8 [3, 2, 2]"),
        (np.zeros((0, 2, 3), np.uint8), "a ndarray of uint8 [0, 2, 3]"),
        (torch.zeros(2, 2, 3), "a Tensor [2, 2, 3]"),
        ([[1]], "a list"),
        ("p.png", "a str"),
    ],
)
def test_pictures_that_are_refused(events: EventLog, tmp_path: Path, image: Any, given: str) -> None:
    with pytest.raises(ConfigError) as caught:
        log_image(events, tmp_path, 1, "x", image)
    (problem,) = caught.value.problems
    assert problem.given == f"log_image of 'x' with {given}"
    assert events.path.read_text() == ""
    assert not (tmp_path / "media").exists()


@pytest.mark.parametrize("name", ["train/x", "a/../../b", "../b", "a/.", "", "password", "sys/x", "a" * 201])
def test_names_of_texts_and_pictures_that_are_refused(events: EventLog, tmp_path: Path, name: str) -> None:
    for call in (
        lambda: log_text(events, tmp_path, 1, name, "x"),
        lambda: log_image(events, tmp_path, 1, name, np.zeros((1, 1), np.uint8)),
    ):
        with pytest.raises(ConfigError, match="nothing was logged"):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["events.jsonl"]


@pytest.mark.parametrize(("text", "given"), [(3, "a int"), ("é" * 600_000, "1,200,000 bytes")])
def test_texts_that_are_refused(events: EventLog, tmp_path: Path, text: Any, given: str) -> None:
    with pytest.raises(ConfigError, match=f"log_text of 'x' with {given}"):
        log_text(events, tmp_path, 1, "x", text)
    assert events.path.read_text() == ""


def test_a_file_in_the_place_of_the_folder_is_a_warning(events: EventLog, tmp_path: Path) -> None:
    (tmp_path / "media").write_text("mine")
    log_text(events, tmp_path, 4, "x", "text")
    (warning,) = read_events(events.path).events
    assert (warning["kind"], warning["step"], warning["code"]) == ("warning", 4, "media_not_written")
    assert "media/rank00000/x/step-00000004.txt could not be written" in warning["message"]
    assert (tmp_path / "media").read_text() == "mine"
