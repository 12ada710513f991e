"""A rank that is at work on something else than a step says so, and is not taken for one that hangs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from procs import wait_until

from unisono.dist import JobSpec, rank_dump, watchdog
from unisono.dist.hang import read_hang
from unisono.dist.progress import at_work, current_activity, note_progress
from unisono.dist.rank_dump import Collective, GroupState, read_dumps
from unisono.dist.watchdog import Watchdog


def test_an_activity_within_a_silent_one_is_silent_too() -> None:
    assert current_activity() is None
    with at_work("a save", silent=True), at_work("a barrier"):
        inner = current_activity()
        assert inner is not None
        assert (inner.name, inner.is_silent) == ("a barrier", True)
    with at_work("an evaluation"):
        outer = current_activity()
        assert outer is not None
        assert not outer.is_silent
    assert current_activity() is None


WAITING = GroupState(
    name="0",
    description="dp",
    ranks=(0, 1),
    num_entered=1,
    collectives=(Collective(number=1, name="all_reduce", sizes=((4,),), dtypes=("Float",), state="scheduled"),),
)


@dataclass
class Watched:
    """A watchdog whose limits are some tenths of a second, and its folder."""

    folder: Path
    watchdog: Watchdog

    @property
    def reason(self) -> str:
        return next((each.reason for each in read_dumps(self.folder)), "")

    def wait_for(self, reason: str) -> None:
        wait_until(lambda: self.reason == reason, f"{reason!r}, and not {self.reason!r}")


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    for name, value in {"_POLL_S": 0.05, "_MIN_QUIET_S": 0.4, "_LONGEST_PAUSES": 0.0, "_REPEAT_S": 0.2}.items():
        monkeypatch.setattr(watchdog, name, value)
    watching = Watchdog(JobSpec(rank=1, world_size=2), tmp_path, deadline_s=3000.0, step=lambda: 3)
    try:
        yield Watched(tmp_path, watching)
    finally:
        watching.close()


def test_without_an_activity_a_rank_that_waits_makes_no_progress(watched: Watched) -> None:
    watched.wait_for("no progress")
    assert read_dumps(watched.folder)[0].activity == ""


def test_an_evaluation_that_gets_on_works_and_one_that_does_not_hangs(watched: Watched) -> None:
    with at_work("an evaluation"):
        # on a busy machine the next moment may be without progress
        wait_until(
            lambda: note_progress() or (watched.reason == "working" and read_hang(watched.folder) is None),
            "its dump, which is no hang",
        )
        watched.wait_for("no progress")
        found = read_hang(watched.folder)
        assert found is not None
        assert (found.kind, found.ranks) == ("hang", (1,))
        assert ", in an evaluation since " in found.sentence
        wait_until(lambda: note_progress() or watched.reason == "working", "its dump")  # it was slow


def test_a_silent_activity_has_a_longer_limit(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    with at_work("a save", silent=True):
        watched.wait_for("working")
        (first,) = read_dumps(watched.folder)
        wait_until(lambda: read_dumps(watched.folder)[0].at_s > first.at_s, "it says so again")
        assert (first.activity, read_hang(watched.folder)) == ("a save", None)
        monkeypatch.setattr(watchdog, "_MAX_SILENT_S", 0.5)
        watched.wait_for("no progress")


def test_a_main_thread_that_computes_works(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    before_s, began_s = watched.watchdog._cpu_s(), time.thread_time()
    while time.thread_time() - began_s < 0.05:
        pass
    assert 0.04 < watched.watchdog._cpu_s() - before_s < 10
    # how much this thread gets, and uses while it looks for the file, depends on the machine
    monkeypatch.setattr(Watchdog, "_cpu_s", lambda self: time.monotonic())
    watched.wait_for("working")
    monkeypatch.setattr(rank_dump, "_source", lambda: [WAITING])
    watched.wait_for("no progress")  # it waits for an accelerator
    monkeypatch.setattr(rank_dump, "_source", None)
    monkeypatch.setattr(Watchdog, "_cpu_s", lambda self: 0.0)
    watched.wait_for("no progress")


def test_a_compilation_is_found_on_the_stack(watched: Watched) -> None:
    # the name of the file is what the watchdog reads; the thread itself waits, as for Inductor's processes
    space: dict[str, object] = {"wait": lambda: watched.wait_for("working")}
    exec(compile("def _compile():\n    wait()", "/lib/torch/_dynamo/convert_frame.py", "exec"), space)
    space["_compile"]()  # type: ignore[operator]
    watched.wait_for("no progress")
