"""What a diagnosis says of a run that failed or stands still: the launcher's record first, else the dumps of its ranks."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from event_streams import write_events

from unisono.diagnose import diagnose, read_run
from unisono.diagnose.finding import Finding
from unisono.dist.rank_dump import Collective, GroupState, RankDump, dump_path

CAUSE = {
    "kind": "out_of_memory",
    "ranks": [1],
    "sentence": "rank 1 was killed by signal 9 (SIGKILL)",
    "evidence": ["the kernel ended 1 process(es)"],
    "words": "out of memory",
    "advice": "a smaller plan.micro_batch",
}
HANG = {**CAUSE, "kind": "hang", "sentence": "rank 1 has not entered all_reduce #3"}


def endings(run: Path) -> list[Finding]:
    return [finding for finding in diagnose(read_run(run)) if finding.id.startswith(("HANG", "EXIT"))]


def recorded(run: Path, content: Any, *, at_s: float = 60.0) -> None:
    """``launch.json``, written ``at_s`` from now; no events are as new."""
    path = run / "launch.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    os.utime(path, (time.time() + at_s,) * 2)


def attempt(cause: Any, number: int = 0) -> dict[str, Any]:
    return {"attempt": number, "cause": cause}


def waits(run: Path, *, at_s: float) -> None:
    """Rank 0 waits in a collective of two ranks."""
    each = Collective(number=3, name="all_reduce", sizes=((4,),), dtypes=("Float",), state="scheduled")
    state = GroupState(name="0", description="dp", ranks=(0, 1), num_entered=3, collectives=(each,))
    dump = RankDump(
        rank=0,
        restart_count=0,
        reason="no progress",
        step=2,
        at_s=at_s,
        quiet_s=30.0,
        threads=(),
        groups=(state,),
    )
    (run / "logs").mkdir(exist_ok=True)
    dump_path(run / "logs", 0).write_bytes(msgspec.json.encode(dump))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_events(tmp_path / "run", lambda rank, step: {"forward": 0.06}, began_s=time.time())
    return tmp_path / "run"


@pytest.mark.parametrize(("cause", "code"), [(CAUSE, "EXIT01"), (HANG, "HANG01")])
def test_the_launcher_has_the_last_word(run: Path, cause: dict[str, Any], code: str) -> None:
    waits(run, at_s=time.time() + 50)
    recorded(run, {"attempt": 0, "attempts": [attempt(cause)]})
    (found,) = endings(run)
    assert (found.id, found.ranks, found.severity) == (code, (1,), "critical")
    assert found.evidence == (cause["sentence"], *cause["evidence"])
    assert "out of memory" in found.title or code == "HANG01"


def test_a_run_that_hangs_now(run: Path) -> None:
    waits(run, at_s=time.time() + 50)
    recorded(run, {"attempt": 1, "attempts": [attempt(CAUSE)]})  # the next one is under way
    (found,) = endings(run)
    assert (found.id, found.ranks) == ("HANG01", (1,))
    assert "rank 1 has not entered all_reduce #3 of [4] float on axis dp, in which rank 0 waits" in found.evidence[0]


def test_what_is_older_than_the_last_step_is_over(run: Path) -> None:
    waits(run, at_s=1.0)
    recorded(run, {"attempt": 0, "attempts": [attempt(CAUSE)]}, at_s=-1e9)
    assert endings(run) == []


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"attempt": 0}', '{"attempt": 0, "attempts": []}', {"attempt": 0, "attempts": [{"attempt": 0}]}],
)
def test_a_record_of_another_form_says_nothing(run: Path, content: Any) -> None:
    recorded(run, content)
    assert endings(run) == []


def test_fields_of_other_types_do_no_harm(run: Path) -> None:
    recorded(run, {"attempt": 0, "attempts": [attempt({"kind": 3, "ranks": ["x", 1, None], "evidence": "text"})]})
    (found,) = endings(run)
    assert (found.id, found.ranks) == ("EXIT01", (1,))


def test_an_attempt_that_ended_well(run: Path) -> None:
    waits(run, at_s=time.time() + 50)
    recorded(run, {"attempt": 0, "attempts": [attempt(None)]})
    assert endings(run) == []
