"""A run that evaluates, saves, loads or compiles for long is not diagnosed as one that hangs; one that hangs in it is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from procs import wait_until

from unisono.checkpoint.writer import SaveWriter
from unisono.diagnose import diagnose, read_run
from unisono.dist import watchdog
from unisono.dist.progress import current_activity, num_heartbeats
from unisono.dist.rank_dump import read_dumps


def activity() -> str:
    current = current_activity()
    return "" if current is None else f"{current.name}{' (silent)' if current.is_silent else ''}"


class Held(tiny.RaggedTokens):
    """Held-out samples; ``at_read`` is called before each batch is read."""

    at_read: Any = None

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        self.at_read()
        return super().read(indices)


def test_what_a_run_is_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[str]] = {"read": set(), "save": set(), "evaluation": set(), "step": set()}
    data, held_out, prepare = Held(), Held(), SaveWriter._prepare
    data.at_read = lambda: seen["read"].add(activity())
    held_out.at_read = lambda: seen["evaluation"].add(activity())

    def prepared(writer: SaveWriter, save: Any) -> Any:
        seen["save"].add(activity())
        return prepare(writer, save)

    monkeypatch.setattr(SaveWriter, "_prepare", prepared)
    heartbeats = num_heartbeats()
    run = tiny.trainer(
        *(tmp_path / "run",),
        steps=4,
        data=data,
        eval_data=held_out,
        every_steps=2,
        asynchronous=False,
        eval_every_steps=2,
        num_workers=0,
    )
    with run:
        run.model.register_forward_pre_hook(lambda *_: seen["step"].add(activity()))
        run.fit()
    assert seen == {
        "read": {"the first batches (silent)", ""},
        "evaluation": {"an evaluation"},
        "save": {"a save (silent)"},
        "step": {"the first steps (silent)", "", "an evaluation"},
    }
    assert num_heartbeats() > heartbeats
    assert current_activity() is None


def test_a_long_evaluation_is_no_hang_and_a_hang_in_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # unlike a read that hangs, the one here computes: it looks for dumps
    values = {"_POLL_S": 0.05, "_MIN_QUIET_S": 0.5, "_LONGEST_PAUSES": 0.0, "_COMPUTES_FRAC": 2.0}
    for name, value in values.items():
        monkeypatch.setattr(watchdog, name, value)
    run_dir, held_out = tmp_path / "run", Held()
    found: list[Any] = []

    def reason() -> str:
        return next((each.reason for each in read_dumps(run_dir / "logs")), "")

    def hangs() -> list[Any]:
        return [finding for finding in diagnose(read_run(run_dir)) if finding.id == "HANG01"]

    def slow() -> None:
        time.sleep(0.2)
        if reason() == "working" and not found:
            found.append(hangs())
            wait_until(lambda: reason() == "no progress", "a dump")  # the read of this batch hangs
            found.append(hangs())

    held_out.at_read = slow
    with tiny.trainer(run_dir, steps=2, eval_data=held_out, eval_every_steps=0, micro_batch=1) as run:
        for _ in run:
            pass
        run.evaluate()
    assert found[0] == []
    (hang,) = found[1]
    assert (hang.severity, hang.ranks) == ("critical", (0,))
    assert "rank 0 is in procs.py:" in hang.evidence[0]
    assert " wait_until(), in an evaluation since " in hang.evidence[0]
    assert read_dumps(run_dir / "logs") == []
