"""What the benchmarks of observe measure: accounting that is left out and put back, and events that are made up."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path
from typing import Any

import tiny

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks are no part of what is installed

from benchmarks.observe import overhead, scale

from unisono.diagnose import read_run
from unisono.observe.goodput import read_goodput
from unisono.observe.rank_status import rank_statuses
from unisono.observe.system_monitor import SystemMonitor


def functions() -> list[Any]:
    return [getattr(owner, name) for owner, name, *_ in (*overhead.CALLED, *overhead.WATCHING)]


def test_accounting_is_left_out_and_put_back(tmp_path: Path) -> None:
    before = functions()
    with tiny.trainer(tmp_path / "run", steps=6) as run:
        steps = iter(run)
        next(steps)
        num_callbacks = len(gc.callbacks)
        with overhead.Accounting(run) as accounting:
            for number in range(2, 6):
                accounting.switch(on=number % 2 == 0)
                next(steps)
                assert len(gc.callbacks) == num_callbacks - number % 2
        assert len(gc.callbacks) == num_callbacks
        next(steps)
    assert functions() == before
    events = tiny.events(tmp_path / "run")
    assert [event["step"] for event in events if event["kind"] == "step"] == [1, 2, 4, 6]


def test_what_watches_waits_while_accounting_is_left_out(tmp_path: Path) -> None:
    with tiny.trainer(tmp_path / "run") as run, overhead.Accounting(run) as accounting:
        steps = iter(run)
        next(steps)
        monitor = next(each for each in run._resources if isinstance(each, SystemMonitor))
        accounting.switch(on=False)
        thread = threading.Thread(target=monitor._sample)  # pyright: ignore[reportPrivateUsage]
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        accounting.switch(on=True)
        thread.join()
        assert accounting.rare_s() >= 0


def test_made_up_events_are_read_as_those_of_a_run(tmp_path: Path) -> None:
    scale.make_run(tmp_path, ranks=16, steps=500)
    facts = read_run(tmp_path)
    assert [(each.axis, each.ranks, each.steps) for each in facts.ranks[15].axes] == [("dp", 2, 500), ("tp", 8, 500)]
    assert facts.ranks[0].monitor.steps.tolist() == [100, 200, 300, 400, 500]
    assert facts.training.eval_losses.tolist() == [2.5]
    statuses = rank_statuses(tmp_path)
    assert [status.rank for status in statuses] == list(range(16))
    assert statuses[8].system["host"] == "host001"
    assert (ledger := read_goodput(tmp_path)) is not None
    assert ledger.wall_s > 49
