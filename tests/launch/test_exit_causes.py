"""Failures of our own making: the launcher names the cause and the rank, in one paragraph, and records what it decided."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from failures import FAILURES, Failing
from launching import run

from unisono.dist import Failure
from unisono.dist.rank_dump import Collective, GroupState, RankDump, dump_path
from unisono.launch.exit_cause import find_cause

MIN_RIGHT_FRAC = 0.95
# by name: whether the first attempt is followed by another one
QUICK = {"kill-1": True, "full-disk-1": False, "name-1": False, "bytes-0": False}
# what the reason of a decision begins with or has in it, where a restart would be decided against although some are left
NOT_RESTARTED = {
    "disk_full": "a restart finds the same disk",
    "program": "would come back",
    "bad_data": "would come back",
}


def launched(failing: Failing, folder: Path, *, max_restarts: int = 0) -> tuple[dict[str, Any], str]:
    """The record of the first attempt, and what the launcher said."""
    folder.mkdir(parents=True, exist_ok=True)
    code, said, launch = run(failing.text(), folder, num_processes=failing.ranks, max_restarts=max_restarts)
    assert code != 0, said
    return launch.record()["attempts"][0], said


def found(attempt: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    cause = attempt["cause"] or {"kind": "none", "ranks": []}
    return cause["kind"], tuple(cause["ranks"])


@pytest.mark.parametrize("name", QUICK)
def test_the_cause_and_its_rank(tmp_path: Path, name: str) -> None:
    failing = next(each for each in FAILURES if each.name == name)
    attempt, said = launched(failing, tmp_path, max_restarts=1)
    assert found(attempt) == failing.label
    assert attempt["cause"]["sentence"]
    assert attempt["decision"]["restart"] is QUICK[name]
    assert ("restarting all ranks as attempt 1" in said) is QUICK[name]
    assert NOT_RESTARTED.get(failing.cause, "") in attempt["decision"]["why"]


def test_a_rank_that_left_the_collective_in_which_the_other_waits(tmp_path: Path) -> None:
    """Its dump stays, in which it waits too."""
    waiting = Collective(number=1, name="all_reduce", sizes=((8,),), dtypes=("Float",), state="scheduled")
    group = GroupState(name="0", description="dp", ranks=(0, 1), num_entered=1, collectives=(waiting,))
    for rank in (0, 1):
        dump = RankDump(
            rank=rank, restart_count=0, reason="stop", step=3, at_s=1.0, quiet_s=30.0, threads=(), groups=(group,)
        )
        dump_path(tmp_path, rank).write_bytes(msgspec.json.encode(dump))
    failure = Failure(
        rank=1,
        restart_count=0,
        step=3,
        type="CommError",
        message="m",
        traceback="",
        at_monotonic_s=1.0,
        cause="communication",
    )
    worker: Any = SimpleNamespace(killed_by_us=False, log=None)
    cause = find_cause(
        dict.fromkeys((0, 1), worker),
        {0: 0, 1: 1},
        {1: failure},
        root=1,
        folder=tmp_path,
        attempt=0,
        oom_kills_before=None,
    )
    assert cause is not None
    assert (cause.kind, cause.ranks) == ("peer_left", (0,))
    assert "rank 0 no longer takes part in all_reduce #1" in cause.sentence
    assert cause.sentence.endswith("in which rank 1 waits; rank 0 had ended (exit code 0)")


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_cause_and_the_first_rank_of_nearly_all_failures(tmp_path: Path) -> None:
    assert len(FAILURES) >= 60
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(lambda each: launched(each, tmp_path / each.name), FAILURES))
    wrong = [
        f"{each.name}: {found(attempt)} is not {each.label}\n{said}"
        for each, (attempt, said) in zip(FAILURES, ends, strict=True)
        if found(attempt) != each.label
    ]
    right_frac = 1 - len(wrong) / len(FAILURES)
    print(f"{len(FAILURES) - len(wrong)} of {len(FAILURES)} right")
    assert right_frac >= MIN_RIGHT_FRAC, "\n".join(wrong)
    print("\n".join(wrong))
    for each, (attempt, said) in zip(FAILURES, ends, strict=True):
        assert set(attempt["decision"]) == {"restart", "why"}
        # the reason of the rule comes before that of restarts that are used up
        assert NOT_RESTARTED.get(found(attempt)[0], "") in attempt["decision"]["why"], (each.name, attempt["decision"])
        if each.cause in ("hang", "collective_mismatch", "peer_left"):
            explained = [line for line in said.splitlines() if line.startswith("launch: attempt 0: ")]
            assert len(explained) == 1, said
            assert "Traceback" not in "".join(line for line in said.splitlines() if line.startswith("launch:")), said


@pytest.mark.full
def test_mismatched_collectives_are_not_started_a_third_time(tmp_path: Path) -> None:
    failing = next(each for each in FAILURES if each.name == "dtype-1")
    code, said, launch = run(failing.text(), tmp_path, num_processes=3, max_restarts=5)
    attempts = launch.record()["attempts"]
    assert (code, len(attempts)) == (1, 2), said
    assert [attempt["decision"]["restart"] for attempt in attempts] == [True, False]
    assert "mismatched collectives, 2 times in a row" in said
