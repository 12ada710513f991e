"""``unisono init``: the files it writes are configurations that ``unisono train`` reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Desk

from unisono.cli.common import load_run_config
from unisono.config import Resolved
from unisono.tasks.starters import TASKS
from unisono.train.config import RunConfig


@pytest.mark.parametrize("flags", [[], ["--python"]])
def test_the_file_is_read_under_todays_names(desk: Desk, tmp_path: Path, flags: list[str]) -> None:
    path = tmp_path / ("run.py" if flags else "run.toml")
    done = desk.here("init", *flags, str(path))
    assert done.code == 0, done.err
    resolved: Resolved[RunConfig] = load_run_config([str(path)], [f"run.dir={tmp_path / 'run'}"])
    assert resolved.renamed == ()
    assert resolved.value.run.dir == str(tmp_path / "run")
    model, objective = resolved.value.components.model, resolved.value.components.objective
    assert (callable(model), callable(objective)) == (bool(flags), bool(flags))


@pytest.mark.parametrize("task", TASKS)
def test_the_parts_of_a_split_replace_the_data_of_a_starter(desk: Desk, tmp_path: Path, task: str) -> None:
    path = tmp_path / "run.toml"
    assert desk.here("init", "--task", task, str(path)).code == 0
    corpus = ["data.corpus=stdlib"] if "language_model" in task else []
    settings = [f"run.dir={tmp_path / 'run'}", "data.train=parts/train", "data.eval=parts/valid", *corpus]
    if task == "masked_language_model":
        settings.append('task.inputs=["text"]')
    data = load_run_config([str(path)], settings).value.data
    assert (data.train, data.eval) == ("parts/train", "parts/valid")
