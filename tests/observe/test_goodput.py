"""The goodput ledger: exact on events whose times are known, and it adds up to the wall time whatever a folder holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attempts import T0, Stream
from histories import history_of
from hypothesis import example, given
from hypothesis import strategies as st

from unisono.observe.events import Event
from unisono.observe.goodput import CATEGORIES, Goodput, GoodputLedger, read_goodput
from unisono.observe.run_summary import goodput_text


def seconds(goodput: Goodput | None) -> dict[str, float]:
    assert goodput is not None
    assert sum(goodput.seconds.values()) == pytest.approx(goodput.wall_s, rel=1e-9)
    for attempt in goodput.attempts:
        assert sum(attempt.seconds.values()) == pytest.approx(attempt.wall_s, rel=1e-9)
    return {name: value for name, value in goodput.seconds.items() if abs(value) > 1e-6}


def test_attempts_without_number(tmp_path: Path) -> None:
    """The time to read them grows with their number, not with its square: these would take a quarter of an hour."""
    stream = Stream(tmp_path)
    for attempt in range(1, 10_001):
        stream.emit("step", step=attempt % 4, attempt=attempt, t=T0 + attempt, m=float(attempt))
    found = read_goodput(tmp_path)
    assert found is not None
    assert [each.lost_steps for each in found.attempts[-4:]] == [1, 1, 1, 0]
    assert [each.repeated_steps for each in found.attempts[-4:]] == [0, 0, 0, 1]


@pytest.mark.parametrize("every", [1, 5])
def test_a_kill_and_a_restart(tmp_path: Path, every: int) -> None:
    """Killed in step 36 of 60, resumed from 20: steps 21 to 35 are made twice."""
    stream = Stream(tmp_path)
    stream.start(0.0, loads_s=4.0)
    stream.steps(1, 35, every=every, ckpt_stall=0.5, eval=0.25, other=0.125)
    stream.now_s += 3.0
    stream.emit("system", step=35)  # the last sign of life
    stream.start(stream.now_s + 10.0, loads_s=6.0, resumed=20)
    stream.steps(21, 60, every=every)
    stream.now_s += 2.0
    stream.emit("eval", step=60)
    stream.now_s += 1.0
    stream.emit("checkpoint_saved", step=60)
    stream.emit("run_end", reason="finished", step=60)
    stream.now_s += 0.5
    stream.emit("sample", step=60)
    found = read_goodput(tmp_path)
    readings = 35 / every
    assert seconds(found) == pytest.approx(
        {
            "useful": 20.0 + 25.0,
            "repeated": 15.0,
            "lost": 15.0 + 3.0,
            "waiting": 10.0,
            "starting": 10.0,
            "checkpoint": 0.5 * readings + 1.0,
            "evaluation": 0.25 * readings + 2.0,
            "other": 0.125 * readings + 0.5,
        }
    )
    assert found is not None
    assert found.goodput_frac == pytest.approx(60.0 / found.wall_s)
    assert [(each.first_step, each.last_step, each.lost_steps, each.repeated_steps) for each in found.attempts] == [
        (1, 35, 15, 0),
        (21, 60, 0, 15),
    ]
    assert [each.end for each in found.attempts] == ["no end", "finished"]
    assert goodput_text(found).startswith(f"{60 / found.wall_s:.0%} of ")


def test_steps_that_were_made_three_times(tmp_path: Path) -> None:
    """The second attempt repeats what the first lost and loses it again; the third keeps it."""
    stream = Stream(tmp_path)
    stream.start(0.0, loads_s=1.0)
    stream.steps(1, 10)
    stream.start(stream.now_s, loads_s=1.0, resumed=5)
    stream.steps(6, 12)
    stream.start(stream.now_s, loads_s=1.0, resumed=5)
    stream.steps(6, 20)
    stream.emit("run_end", reason="finished", step=20)
    found = read_goodput(tmp_path)
    assert seconds(found) == pytest.approx({"useful": 5.0 + 8.0, "repeated": 7.0, "lost": 5.0 + 7.0, "starting": 3.0})
    assert found is not None
    assert [each.lost_steps for each in found.attempts] == [5, 7, 0]


def test_an_end_by_an_error(tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    stream.start(0.0, loads_s=1.0)
    stream.steps(1, 4)
    stream.now_s += 2.0
    stream.emit("run_end", reason="failed", error="CommError", step=4)
    stream.emit("checkpoint_failed", step=4)
    stream.start(stream.now_s, loads_s=1.0, resumed=4)
    stream.steps(5, 6)
    stream.now_s += 1.0
    stream.emit("run_end", reason="failed", error="ValueError", step=6)
    found = read_goodput(tmp_path)
    # after the last attempt nothing is rolled back
    assert seconds(found) == pytest.approx({"useful": 6.0, "lost": 2.0, "starting": 2.0, "other": 1.0})
    assert found is not None
    assert [each.end for each in found.attempts] == ["CommError", "ValueError"]


def test_a_rollback_inside_an_attempt(tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    stream.start(0.0, loads_s=1.0)
    stream.steps(1, 8)
    stream.steps(5, 10)
    stream.emit("run_end", reason="finished", step=10)
    assert seconds(read_goodput(tmp_path)) == pytest.approx(
        {"useful": 4.0 + 2.0, "repeated": 4.0, "lost": 4.0, "starting": 1.0}
    )


def test_ranks_share_the_time_of_an_attempt(tmp_path: Path) -> None:
    """The second rank waits 2 s longer for its checkpoint and is killed 1 s earlier; a third is new in the second attempt."""
    for rank, (late_s, dies_s) in enumerate([(0.0, 2.0), (2.0, 1.0)]):
        stream = Stream(tmp_path, rank)
        stream.start(late_s, loads_s=2.0)
        stream.steps(1, 10)
        stream.now_s = 12.0 + dies_s
        stream.emit("system", step=10)
    for rank in range(3):
        stream = Stream(tmp_path, rank)
        stream.attempt = 1
        stream.start(20.0, loads_s=1.0, resumed=6)
        stream.steps(7, 12)
        stream.emit("run_end", reason="finished", step=12)
    assert seconds(read_goodput(tmp_path)) == pytest.approx(
        {
            "useful": 6.0 + 2.0,
            "repeated": 4.0,  # also of the rank that has not made them before
            "lost": 4.0 + (2.0 + 0.0) / 2,
            "waiting": 20.0 - 14.0,
            "starting": (2.0 + 4.0) / 2 + 1.0,
        }
    )


def test_the_launcher_tells_when_processes_began(tmp_path: Path) -> None:
    """A first attempt without any event, one that was killed, and one that goes on."""
    stream = Stream(tmp_path)
    stream.start(20.0, loads_s=1.0)
    stream.steps(1, 10)
    stream.start(45.0, loads_s=1.0, resumed=10)
    stream.steps(11, 20)
    spans = [(0.0, 8.0), (10.0, 33.0)]
    record = {
        "attempt": 2,
        "began_at_s": T0 + 34.0,
        "attempts": [{"attempt": n, "began_at_s": T0 + a, "ended_at_s": T0 + b} for n, (a, b) in enumerate(spans)],
    }
    (tmp_path / "launch.json").write_text(json.dumps(record))
    assert seconds(read_goodput(tmp_path)) == pytest.approx(
        {"useful": 20.0, "lost": 2.0, "starting": 11.0 + 12.0, "waiting": 10.0 + 1.0}
    )


def test_workers_that_step_alone_count_their_own_attempts(tmp_path: Path) -> None:
    plan = {"sync": {"kind": "dist_async"}}
    first = Stream(tmp_path, 0)
    first.start(0.0, loads_s=1.0, plan=plan)
    first.steps(1, 19)
    first.emit("run_end", reason="finished", step=19)
    second = Stream(tmp_path, 1)
    second.start(0.0, loads_s=1.0, plan=plan)
    second.steps(2, 10)
    second.start(14.0, loads_s=2.0, plan=plan)
    second.steps(20, 23)
    second.emit("run_end", reason="finished", step=23)
    assert seconds(read_goodput(tmp_path)) == pytest.approx(
        {"useful": (19.0 + 13.0) / 2, "starting": (1.0 + 3.0) / 2, "waiting": 4.0 / 2}
    )


def test_a_run_without_steps(tmp_path: Path) -> None:
    assert read_goodput(tmp_path) is None
    stream = Stream(tmp_path)
    stream.start(0.0, loads_s=3.0)
    assert read_goodput(tmp_path) is None  # no time has passed
    stream.emit("system", step=0)
    assert seconds(read_goodput(tmp_path)) == pytest.approx({"starting": 3.0})


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"attempts": 7}', b'{"attempts": [3, {"began_at_s": "x"}]}'])
def test_a_launch_record_that_is_none(tmp_path: Path, content: bytes) -> None:
    stream = Stream(tmp_path)
    stream.start(0.0, loads_s=3.0)
    stream.steps(1, 2)
    (tmp_path / "launch.json").write_bytes(content)
    assert seconds(read_goodput(tmp_path)) == pytest.approx({"starting": 3.0, "useful": 2.0})


VALUES = st.one_of(
    st.none(), st.integers(-5, 50), st.floats(), st.sampled_from(["NaN", "x", True, [1], 1e300, 1 << 60, -1])
)


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "kind": st.sampled_from(
                    ["step", "eval", "resumed", "run_end", "run_start", "system", "checkpoint_saved"]
                )
            },
            optional={
                name: VALUES
                for name in (
                    "t",
                    "m",
                    "step",
                    "attempt",
                    "plan",
                    "reason",
                    "time/window_s",
                    "time/other_frac",
                    "time/eval_frac",
                )
            },
        ),
        max_size=12,
    )
)
@example([{"kind": "step", "t": 9e307, "m": 0, "step": 0}] * 2)
def test_it_adds_up_whatever_the_events_are(events: list[Event]) -> None:
    ledger = GoodputLedger()
    ledger.add(history_of(events))
    found = ledger.result()
    if found is not None:
        assert set(found.seconds) == set(CATEGORIES)
        assert all(value >= -1e-6 * found.wall_s for value in found.seconds.values())
        assert sum(found.seconds.values()) == pytest.approx(found.wall_s, rel=1e-6)
