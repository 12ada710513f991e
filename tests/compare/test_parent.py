"""What a run gained that follows the diagnosis of its parent, where a strategy file has the settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from event_streams import write_events

from unisono.compare.parent import gain_over_parent
from unisono.diagnose import diagnose, read_run
from unisono.plan import PlanOptions, derive_plan


def strategy(path: Path, **batch: int) -> dict[str, Any]:
    """The plan that a strategy file with this ``batch`` gives: a pipeline of four stages."""
    path.write_text(json.dumps({"mesh": {"pp": 4}, "pipeline": {"schedule": "gpipe"}, "batch": batch}))
    options = PlanOptions(file=str(path), global_batch=32)
    return derive_plan(options, world_size=4, device="cpu", native_bf16=True).to_json()


@pytest.mark.parametrize(("micro_batch", "is_followed"), [(1, True), (4, False)])
def test_a_setting_that_a_strategy_file_has(tmp_path: Path, micro_batch: int, is_followed: bool) -> None:
    def run(name: str, size: int, bubble_s: float, **more: Any) -> Path:
        plan_file = tmp_path / f"{name}.plan.json"
        plan = strategy(plan_file, micro_batch=size)
        # the options are the same: what the plan has comes from the file
        settings = {"plan.file": str(plan_file), "plan.micro_batch": 0}
        times = {"forward": 0.06, "bubble": bubble_s}
        return write_events(tmp_path / name, lambda rank, step: times, ranks=4, plan=plan, settings=settings, **more)

    parent = run("run", 8, 0.045)
    (finding,) = diagnose(read_run(parent))
    assert finding.patch == {"plan.micro_batch": 1}
    origins = {"optim.lr": f"{parent}/config.toml:3"}
    facts = read_run(run("run-2", micro_batch, 0.004, start={"origins": origins}))
    gain = gain_over_parent(tmp_path / "run-2", facts, diagnose(facts))
    assert (gain is not None) == is_followed
    if gain is not None:
        assert (gain.parent, gain.gone, gain.stays) == (parent, (finding.id,), ())
        assert str(gain).startswith(
            f"since {parent}, whose diagnosis it follows: {finding.id} gone; a step takes 64 ms"
        )
