"""Trainings for tests of searches: processes that write an empty configuration and one event of an evaluation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from unisono.observe.events import events_path
from unisono.tune import trial_run

_TRAINING = """
import json, sys, time
from pathlib import Path

settings = dict(text.removeprefix("--set=").split("=", 1) for text in sys.argv[1:] if text.startswith("--set="))
if FULL is not None and Path(FULL).exists():
    sys.exit(Path(FULL).read_text())
if settings.get("data.eval_fold") in FAILING:
    sys.exit("unisono: no sample\\n  rule: one or more")
path = Path(settings["run.dir"]) / PLACE
path.parent.mkdir(parents=True)
(Path(settings["run.dir"]) / "config.toml").touch()
names = NAMES[: int(settings.get("count", len(NAMES)))]
path.write_text(json.dumps({"kind": "eval", "step": 1, **dict.fromkeys(names, 1.5)}) + "\\n")
time.sleep(float(settings.get("seconds", 0)))
"""
NAMES = ("train/loss", "eval/loss", "eval/accuracy")


def install(
    monkeypatch: pytest.MonkeyPatch, *, failing_folds: tuple[str, ...] = (), full: Path | None = None
) -> list[list[str]]:
    """Have the trials of searches be such processes; returns a list that gets the arguments of each.

    The setting ``count`` is how many of ``NAMES`` a training has, and ``seconds`` how long it runs. As long as there is
    a file ``full``, trainings fail with the words in it.
    """
    calls: list[list[str]] = []
    values: dict[str, object] = {"PLACE": str(events_path(Path(), 0)), "NAMES": NAMES, "FAILING": failing_folds}
    values["FULL"] = None if full is None else str(full)
    script = _TRAINING
    for name, value in values.items():
        script = script.replace(name, repr(value))

    def command(*words: str) -> list[str]:
        calls.append(list(words[2:]))
        return [sys.executable, "-S", "-E", "-c", script, *words[2:]]

    monkeypatch.setattr(trial_run, "module_command", command)
    return calls
