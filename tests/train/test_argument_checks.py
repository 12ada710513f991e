"""Each argument of a ``Trainer`` is checked when it is constructed, before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unisono import CheckpointOptions, ObserveOptions, PlanOptions, Trainer, TrainOptions
from unisono.config import load_config
from unisono.errors import ConfigError, DataError
from unisono.train.config import RunConfig

DATA = [(torch.ones(3), torch.ones(1))] * 4


def refused(folder: Path, **wrong: Any) -> str:
    """The text of the error of these arguments; nothing is on disk after it."""
    arguments = {"model": nn.Linear(3, 1), "data": DATA, "objective": "mean_squared_error", "run_dir": folder / "run"}
    with pytest.raises((ConfigError, DataError)) as caught:
        Trainer(**arguments | wrong)
    assert not list(folder.iterdir())
    for problem in caught.value.problems:
        assert all((problem.given, problem.rule, problem.consequence, problem.nearest))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "given", "rule", "nearest"),
    [
        ("seed", "x", "seed='x'", "a whole number, at least 0", "seed=0"),
        ("seed", -1, "seed=-1", "a whole number, at least 0", "seed=0"),
        ("seed", True, "seed=True", "a whole number", "seed=0"),
        ("callbacks", print, "callbacks=print", "a list of observers Every(…)", "[Every(steps=100, call=print)]"),
        ("callbacks", [print], "callbacks=[<built-in", "a list of observers", "[Every(steps=100, call=print)]"),
        ("plan", {"global_batch": 8}, "plan={'global_batch': 8}", "PlanOptions or Plan", "PlanOptions(global_batch=8)"),
        ("options", {"steps": 8}, "options={'steps': 8}", "TrainOptions", "TrainOptions(steps=8)"),
        ("options", {"stepz": 8}, "options={'stepz': 8}", "TrainOptions", "TrainOptions(…)"),
        ("options", TrainOptions, "options=TrainOptions", "an object of TrainOptions", "TrainOptions(…)"),
        ("checkpoint", 5, "checkpoint=5", "CheckpointOptions", "CheckpointOptions(…)"),
        ("loader", 2, "loader=2", "LoaderOptions", "LoaderOptions(…)"),
        ("observe", "csv", "observe='csv'", "ObserveOptions", "ObserveOptions(…)"),
        ("model", "x", "model='x'", "a torch.nn.Module, or a function", "Trainer(torch.nn.Linear(3, 1), …)"),
        ("world", 3, "world=3", "the World that join_world returns", "unisono launch -n 3"),
        ("transform", 3, "transform=3", "a function (sample, rng) -> sample", "leave it out"),
        ("pair_transform", 3, "pair_transform=3", "a function (a, b, rng) -> sample", "leave it out"),
        ("batch_transform", 3, "batch_transform=3", "a function (batch) -> batch", "leave it out"),
        ("collate_fn", 3, "collate_fn=3", "a function (list of samples) -> batch", "leave it out"),
        ("optimizer", "adamw", "optimizer='adamw'", "OptimOptions", 'OptimOptions(kind="adamw"), or torch.optim.AdamW'),
        ("optimizer", "Lamb", "optimizer='Lamb'", "OptimOptions", 'OptimOptions(kind="lamb")'),
        ("optimizer", "adamv", "optimizer='adamv'", "OptimOptions", "did you mean 'adam"),
        ("optimizer", {}, "optimizer={}", "several by pattern", 'OptimOptions(kind="adamw")'),
        ("schedule", 3, "schedule=3", "ScheduleOptions", 'ScheduleOptions(kind="cosine")'),
        ("schedule", "linear", "schedule='linear'", "ScheduleOptions", 'ScheduleOptions(kind="linear")'),
        ("clip_norm", "1", "clip_norm='1'", "largest global gradient norm", "clip_norm=1.0"),
        ("shuffle_block", -1, "shuffle_block=-1", "a number of samples", "shuffle_block=0"),
        ("metrics", 3, "metrics=3", "names of built-in metrics", 'metrics=["accuracy"]'),
        ("metrics", [print], "metrics=[<built-in", "names of built-in metrics", 'metrics={"name": metric}'),
        ("metrics", {1: "accuracy"}, "metrics={1: 'accuracy'}", "has metrics by name", 'metrics={"name": metric}'),
        ("run_dir", 3, "run_dir=3", "the path of a local or mounted folder", 'run_dir="runs/first"'),
        ("run_dir", "s3://b/run", "run_dir='s3://b/run'", "a local or mounted folder", "CheckpointOptions(upload_to="),
        ("flops_per_token", "x", "flops_per_token='x'", "a number of FLOPs", "leave it out"),
        ("events", 3, "events=3", "an EventLog", "leave it out"),
        ("provenance", 3, "provenance=3", "JSON types by name", "leave it out"),
        ("resume", 3, "resume=3", "auto, strict, never, or a path", 'resume="auto"'),
        ("data", [], "data with 0 samples (list)", "at least one sample", "files were found"),
        ("eval_data", [], "eval_data with 0 samples (list)", "at least one sample", "leave eval_data out"),
        ("eval_data", {"a": 1}, "eval_data of type dict", "samples come from a Dataset", "list(…) of it"),
        ("eval_data", 3, "eval_data of type int", "samples come from a Dataset", "list(…) of it"),
    ],
)
def test_an_argument_of_a_wrong_kind(
    tmp_path: Path, name: str, value: Any, given: str, rule: str, nearest: str
) -> None:
    lines = refused(tmp_path, **{name: value}).splitlines()
    assert len(lines) == 4
    assert lines[0].startswith(given)
    assert lines[1].startswith("  rule: ")
    assert rule in lines[1]
    assert lines[2].startswith("  so:   ")
    assert nearest in lines[3]


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    text = refused(tmp_path, seed="x", transform=3, resume="newest")
    assert text.startswith("3 problems\n1. seed='x'\n")
    assert "\n2. transform=3\n" in text
    assert "\n3. resume 'newest'\n" in text


def test_resume_has_the_rule_of_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(RunConfig, overrides=["run.resume=newest"])
    there = caught.value.problems[0]
    text = refused(tmp_path, resume="newest")
    assert text == (
        "resume 'newest'\n"
        "  rule: auto, strict, never, or a path (with a '/')\n"
        "  so:   it is unclear what to resume from\n"
        "  try:  resume='./newest' if it is a folder"
    )
    assert there.rule in text
    assert there.nearest == "run.resume='./newest' if it is a folder"


@pytest.mark.parametrize(
    ("settings", "name", "value", "rule"),
    [
        (
            {"options": TrainOptions(early_stop_patience=2)},
            "early_stop_patience",
            2,
            "it counts evaluations of eval_data",
        ),
        ({"options": TrainOptions(eval_every_steps=1)}, "eval_every_steps", 1, "fit() evaluates eval_data"),
        (
            {"checkpoint": CheckpointOptions(keep_best=3)},
            "keep_best",
            3,
            "it counts checkpoints with a loss on eval_data",
        ),
    ],
)
def test_settings_that_only_eval_data_brings_to_act(
    tmp_path: Path, settings: dict[str, Any], name: str, value: int, rule: str
) -> None:
    assert refused(tmp_path, **settings) == (
        f"{name} {value} without eval_data\n"
        f"  rule: {rule}\n"
        "  so:   it would change nothing\n"
        f"  try:  eval_data=…, or leave {name} out"
    )
    Trainer(nn.Linear(3, 1), DATA, objective="mean_squared_error", eval_data=DATA, **settings)


def test_defaults_and_zeros_need_no_eval_data() -> None:
    for options in (TrainOptions(), TrainOptions(eval_every_steps=0), TrainOptions(eval_every_steps=100)):
        for checkpoint in (CheckpointOptions(keep_best=0), CheckpointOptions(keep_best=1)):
            Trainer(nn.Linear(3, 1), DATA, objective="mean_squared_error", options=options, checkpoint=checkpoint)


def test_metrics_without_eval_data_are_noticed_by_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A loop of one's own may evaluate other data with them."""

    class Line(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs)

    def shown(name: str, **given: Any) -> str:
        run = Trainer(
            Line(3, 1),
            DATA,
            PlanOptions(device="cpu", global_batch=4),
            objective="mean_squared_error",
            metrics=["rmse"],
            options=TrainOptions(steps=1),
            run_dir=tmp_path / name,
            observe=ObserveOptions(trackers=(), report=False),
            **given,
        )
        with run:
            assert "rmse" in run.evaluate(DATA)
            run.fit()
        return capsys.readouterr().out

    said = "inert_metrics: metrics rmse have no effect on fit(); why: they are computed in evaluations, and there is no eval_data"
    assert said in shown("without")
    assert said not in shown("with", eval_data=DATA)


def test_arguments_of_all_legal_kinds(tmp_path: Path) -> None:
    """None of them is refused: a path as resume, classes, functions and mappings of them."""
    for legal in (
        {"resume": tmp_path / "checkpoints/step-00000001"},
        {"resume": str(tmp_path)},
        {"optimizer": torch.optim.SGD},
        {"optimizer": {"*": torch.optim.AdamW}},
        {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1), "clip_norm": 1},
        {"schedule": lambda step: 0.1},
        {"metrics": "mae"},
        {"model": lambda: nn.Linear(3, 1)},
        {"data": {0: DATA[0]}},
        {"run_dir": str(tmp_path / "run")},
    ):
        given: dict[str, Any] = {"model": nn.Linear(3, 1), "data": DATA} | legal
        Trainer(objective="mean_squared_error", **given)
