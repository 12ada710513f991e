from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from unisono.observe.options import ObserveOptions


def test_defaults_are_fine() -> None:
    assert list(ObserveOptions().problems()) == []
    assert list(ObserveOptions(trackers=("csv", "tensorboard", "wandb")).problems()) == []


def test_unknown_and_repeated_trackers() -> None:
    found = list(ObserveOptions(trackers=("tensorbord", "csv", "csv")).problems())
    assert [field for field, _ in found] == ["trackers", "trackers"]
    unknown, repeated = (problem for _, problem in found)
    assert unknown.given == "unknown tracker 'tensorbord'"
    assert unknown.rule == "a tracker is built in or an installed entry point of the group 'unisono.sinks'"
    assert unknown.consequence == "nothing would be tracked under that name"
    assert unknown.nearest == "did you mean 'tensorboard'?"
    assert repeated.given == "tracker 'csv' is listed 2 times"
    assert repeated.nearest == "list 'csv' once"


def test_the_room_loads_without_torch_and_without_trackers() -> None:
    src = Path(__file__).parents[2] / "src"
    names = [f"unisono.observe.{path.stem}" for path in (src / "unisono" / "observe").glob("*.py")]
    assert len(names) > 10
    code = f"import sys, {', '.join(names)}; print(sorted({{'torch', 'wandb', 'tensorboard', 'plotly'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(src)}, capture_output=True)
    assert done.stdout == b"[]\n"
