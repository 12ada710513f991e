"""What is read of a training that an examination started, whatever it has left."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from event_streams import write_events

from unisono.doctor.child import TrainOutcome, train_child


def outcome(run_dir: Path, code: int | None = 0, said: str = "") -> TrainOutcome:
    return TrainOutcome(run_dir=run_dir, code=code, took_s=61.2, said=said)


@pytest.mark.parametrize("every", [1, 4])
def test_losses_steps_and_samples(tmp_path: Path, every: int) -> None:
    def times(rank: int, step: int) -> dict[str, float]:
        return {"forward": 9.0 if step <= every else 0.5}  # the first reading compiles

    write_events(tmp_path, times, every=every, fields_of=lambda rank, step: {"train/loss": 1.0 / step})
    (tmp_path / "plan.json").write_text('{"batch": {"global_batch": 32}}')
    found = outcome(tmp_path)
    assert found.losses()[:2] == [1.0, 0.5]
    assert found.step_s() == pytest.approx(0.5)
    assert (found.samples(), found.trouble) == (32, "")


@pytest.mark.parametrize(
    "plan",
    [None, "", "[]", "{}", '{"batch": 3}', '{"batch": {"global_batch": "8"}}', '{"batch": {"global_batch": -1}}'],
)
def test_a_run_that_has_left_nothing(tmp_path: Path, plan: str | None) -> None:
    if plan is not None:
        (tmp_path / "plan.json").write_text(plan)
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "rank00000.jsonl").write_text('{"kind": "step", "step": "x"}\nnot json\n{"kind": "st')
    found = outcome(tmp_path)
    assert (found.losses(), found.step_s(), found.samples()) == ([], None, None)


def test_why_it_failed(tmp_path: Path) -> None:
    assert outcome(tmp_path, None).trouble == "not done after 61 s"
    assert outcome(tmp_path, -9).trouble == "it ended with exit code -9"
    assert outcome(tmp_path, 2, "unisono: no\n  rule: yes\n").trouble == "no\n  rule: yes"


def test_a_training_whose_time_is_over_is_ended(tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    found = train_child(tmp_path / "run", [f"--set=run.dir={tmp_path}/run"], timeout_s=0.3)
    assert found.code is None
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
