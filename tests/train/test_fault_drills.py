"""Kill -9 at seeded points of a launched run: it ends with the bits and the samples of an undisturbed one.

Every drill is real: processes of our launcher, SIGKILL to themselves at a named point, a restart at a new epoch from the newest
committed checkpoint. At most the steps since that checkpoint are repeated, and afterwards nothing is left behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
from little_memory import small_memory
from pool import Pool
from procs import wait_until

SUPPORT = Path(tiny.__file__).parent
SETTINGS = {"steps": 6, "every_steps": 2, "dropout": 0.1, "micro_batch": 2, "asynchronous": False}
IN_A_STEP = ["forward", "backward", "all_reduce", "optimizer"]
IN_A_SAVE = ["before_shard", "mid_shard", "before_manifest", "before_rename", "before_commit", "after_commit"]


def environment(**extra: str) -> dict[str, str]:
    source = str(Path(__file__).parents[2] / "src")
    return {**os.environ, "PYTHONPATH": source, "PYTHONWARNINGS": "ignore", **extra}


def start(run_dir: Path, ranks: int, settings: dict[str, Any], **extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SUPPORT / "launch_tiny.py"), str(run_dir), str(ranks), json.dumps(settings)],
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(run: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = run.communicate(timeout=150)
    assert run.returncode == 0, f"exit {run.returncode}\n{out}\n{err}"
    return json.loads([line for line in out.splitlines() if line.startswith("{")][-1])


def left_behind(run_dir: Path) -> list[str]:
    """Processes that name the run's folder, and files that no finished run should have."""
    found = []
    for status in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = status.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(run_dir) in text and int(status.parent.name) != os.getpid():
            found.append(text)
    return found + [str(p) for p in run_dir.rglob("*") if ".tmp-" in p.name or p.name.endswith((".trash", ".partial"))]


def on_ranks(world, run_dir: str, changes: dict[str, Any]) -> dict:
    return tiny.complete(run_dir, world=world, **SETTINGS, **changes)


def undisturbed(tmp_path: Path, pool: Pool, ranks: int, **changes: Any) -> dict[str, Any]:
    return pool.run(on_ranks, str(tmp_path / "whole"), changes, ranks=ranks)[0]


@pytest.mark.full
def test_killed_for_lack_of_memory_it_goes_on_with_the_same_bits(tmp_path: Path, pool: Pool) -> None:
    whole = undisturbed(tmp_path, pool, 2)
    with small_memory(48) as members:
        run = start(tmp_path / "run", 2, {**SETTINGS, "hoard_from": (3, str(members))})
        out, err = run.communicate(timeout=150)
    assert run.returncode == 0, err
    assert "rank 1 (pid " in err
    assert "most likely out of memory" in err
    assert "restarting all ranks as attempt 1" in err
    after = json.loads(out.splitlines()[-1])
    assert after["digest"] == whole["digest"]
    kept = len(after["losses"])
    assert kept < SETTINGS["steps"]
    assert (after["losses"], after["samples"]) == (whole["losses"][-kept:], whole["samples"][-kept:])


def drill(tmp_path: Path, pool: Pool, ranks: int, fault: str, **changes: Any) -> None:
    whole = undisturbed(tmp_path, pool, ranks, **changes)
    run_dir = tmp_path / "run"
    after = outcome(start(run_dir, ranks, SETTINGS | changes, UNISONO_FAULT=fault))
    assert after["digest"] == whole["digest"]
    kept = len(after["losses"])
    assert after["losses"] == whole["losses"][-kept:]
    assert after["samples"] == whole["samples"][-kept:]
    attempts = {event["attempt"] for event in tiny.events(run_dir)}
    assert len(attempts) == 2, "the fault did not fire"
    assert kept <= 4, "more than the steps since the last commit were repeated"
    assert left_behind(run_dir) == []


@pytest.mark.parametrize(
    ("ranks", "fault"), [pytest.param(2, "all_reduce@3:0", marks=pytest.mark.full), (1, "before_commit@4")]
)
def test_killed_once_per_class(tmp_path: Path, pool: Pool, ranks: int, fault: str) -> None:
    drill(tmp_path, pool, ranks, fault)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("point", [f"{p}@3" for p in IN_A_STEP] + [f"{p}@4" for p in IN_A_SAVE])
def test_killed_at_every_point(tmp_path: Path, pool: Pool, ranks: int, point: str) -> None:
    # the manifest and what follows are rank 0's work; everything before is done by all
    by_rank_0 = point.startswith(("before_manifest", "before_rename", "before_commit", "after_commit"))
    drill(tmp_path, pool, ranks, f"{point}:{0 if by_rank_0 else ranks - 1}")


@pytest.mark.full
def test_a_save_in_the_background_that_was_not_committed_does_not_count(tmp_path: Path, pool: Pool) -> None:
    """These steps take a millisecond: the kill comes while step 2 is still being written, and the run begins again."""
    whole = undisturbed(tmp_path, pool, 2)
    settings = {**SETTINGS, "asynchronous": True}
    after = outcome(start(tmp_path / "run", 2, settings, UNISONO_FAULT="backward@3:1"))
    assert after["digest"] == whole["digest"]
    assert after["losses"] == whole["losses"][-len(after["losses"]) :]


@pytest.mark.full
@pytest.mark.parametrize("point", ["backward@3:2", "before_manifest@4:0"])
def test_three_ranks_survive_a_kill_bit_for_bit(tmp_path: Path, pool: Pool, point: str) -> None:
    drill(tmp_path, pool, 3, point)


@pytest.mark.full
@pytest.mark.parametrize("point", ["backward@3:1", "optimizer@3:0", "mid_shard@4:1", "before_commit@4:0"])
def test_a_sharded_run_survives_a_kill_bit_for_bit(tmp_path: Path, pool: Pool, point: str) -> None:
    """The digest is of rank 0's part; the losses are everybody's."""
    drill(tmp_path, pool, 2, point, dp_shard=2)


AXES = {
    "pp": {"pp": 2, "sizes": {"num_layers": 4}},
    "zbv": {"pp": 2, "schedule": "zbv", "sizes": {"num_layers": 4}},
    "cp": {"cp": 2},
    "tp": {"tp": 2, "sequence_parallel": True, "sizes": {"num_kv_heads": 2}},
    "ep": {"dp_shard": 2, "ep": 2, "sizes": {"num_experts": 4}},
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("axis", "fault"),
    [
        *((axis, "backward@3:1") for axis in AXES),
        *((axis, "forward@3:1") for axis in ("pp", "ep")),
        *(("pp", fault) for fault in ("backward@3:0", "optimizer@3:0", "mid_shard@4:1", "before_commit@4:0")),
        ("ep", "before_commit@4:0"),
    ],
)
def test_a_run_cut_along_any_axis_survives_a_kill_bit_for_bit(
    tmp_path: Path, pool: Pool, axis: str, fault: str
) -> None:
    """The digest is of rank 0's part; the losses are everybody's."""
    drill(tmp_path, pool, 2, fault, **AXES[axis])


@pytest.mark.full
@pytest.mark.parametrize("axis", ["dp", *AXES])
def test_the_others_end_within_seconds_and_name_the_rank(tmp_path: Path, axis: str) -> None:
    check_the_others(tmp_path / "run", 2, AXES.get(axis, {}))


FOUR: dict[str, dict[str, Any]] = {
    "pp": {"pp": 4, "sizes": {"num_layers": 4}},
    "pp-tp": {"pp": 2, "tp": 2, "sizes": {"num_layers": 4, "num_kv_heads": 2}},
    "pp-ep": {"pp": 2, "dp_shard": 2, "ep": 2, "sizes": {"num_layers": 4, "num_experts": 4}},
}


@pytest.mark.full
@pytest.mark.parametrize("axes", FOUR)
def test_those_who_do_not_talk_to_it_name_it_too(tmp_path: Path, axes: str) -> None:
    """Of four ranks some are in no group with the one that dies: they end when those between do, and say who was first."""
    check_the_others(tmp_path / "run", 4, FOUR[axes])


def check_the_others(run_dir: Path, ranks: int, axes: dict[str, Any]) -> None:
    """Rank 1 dies in a backward pass."""
    run = start(run_dir, ranks, {**SETTINGS, "max_restarts": 0, **axes}, UNISONO_FAULT="backward@3:1")
    _, err = run.communicate(timeout=150)
    assert run.returncode not in (0, 75)
    ends = {rank: [e for e in tiny.events(run_dir, rank) if e["kind"] == "run_end"] for rank in range(ranks)}
    assert ends.pop(1) == [], "rank 1 was killed"
    last = max(e["t"] for e in tiny.events(run_dir, 1))
    for (end,) in ends.values():
        assert (end["reason"], end["error"]) == ("failed", "CommError")
        assert "rank 1 (pid " in end["message"]
        assert end["t"] - last < (6 if ranks == 2 else 12)  # its last event is older than its death
    assert "rank 1" in err


@pytest.mark.full
def test_killed_before_the_first_commit_it_begins_again(tmp_path: Path, pool: Pool) -> None:
    whole = undisturbed(tmp_path, pool, 1)
    after = outcome(start(tmp_path / "run", 1, SETTINGS, UNISONO_FAULT="optimizer@0"))
    assert (after["digest"], after["losses"]) == (whole["digest"], whole["losses"])


def wait_for_step(run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + 90
    path = run_dir / "events/rank00000.jsonl"
    while time.monotonic() < deadline:
        if path.exists() and f'"step":{step},"steps_total"' in path.read_text():
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was never reached")


LONG = {**SETTINGS, "steps": 4000, "every_steps": 0}


@pytest.mark.parametrize("sent", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_a_signal_saves_exits_75_and_the_next_start_goes_on(tmp_path: Path, sent: signal.Signals) -> None:
    run_dir = tmp_path / "run"
    run = start(run_dir, 2, LONG)
    wait_for_step(run_dir, 5)
    run.send_signal(sent)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 75, out + err
    stopped_at = json.loads(out.splitlines()[-1])["step"]
    (kept,) = [p.name for p in (run_dir / "checkpoints").iterdir()]
    assert kept == f"step-{stopped_at:08d}"
    assert left_behind(run_dir) == []
    again = outcome(start(run_dir, 2, {**LONG, "steps": stopped_at + 2}))
    assert again["step"] == stopped_at + 2
    assert len(again["losses"]) == 2, "no step was repeated"


@pytest.mark.full
@pytest.mark.parametrize("times", [1, 2])
def test_a_signal_during_a_save_lets_it_finish_and_counts_once(tmp_path: Path, times: int) -> None:
    run_dir = tmp_path / "run"
    run = start(run_dir, 2, {**LONG, "every_steps": 3, "fsync_s": 0.3})
    wait_for_step(run_dir, 4)
    wait_until(lambda: saving(run_dir) != [], "a save is under way")
    under_way = saving(run_dir)
    for _ in range(times):
        run.send_signal(signal.SIGTERM)
        time.sleep(0.15)
    assert set(saving(run_dir)) & set(under_way), "the save was over too soon"
    out, err = run.communicate(timeout=60)
    assert run.returncode == 75, out + err
    (event,) = [e for e in tiny.events(run_dir) if e["kind"] == "preempt"]
    stopped_at = json.loads(out.splitlines()[-1])["step"]
    assert event["step"] == stopped_at
    assert (run_dir / f"checkpoints/step-{stopped_at:08d}/COMMIT").exists()
    assert left_behind(run_dir) == []
    again = outcome(start(run_dir, 2, {**LONG, "steps": stopped_at + 2}))
    assert (again["step"], len(again["losses"])) == (stopped_at + 2, 2), "no step was repeated"


def saving(run_dir: Path) -> list[str]:
    """Folders of checkpoints that are not committed yet."""
    return [path.name for path in (run_dir / "checkpoints").iterdir() if ".tmp-" in path.name]


@pytest.mark.full
def test_a_signal_to_one_worker_during_a_blocked_collective_stops_all(tmp_path: Path) -> None:
    """Rank 1 stands still, so rank 0 hangs in the all-reduce when SIGTERM comes; both save once rank 1 goes on."""
    run_dir = tmp_path / "run"
    run = start(run_dir, 2, LONG)
    wait_for_step(run_dir, 3)
    workers = {}
    for status in Path("/proc").glob("[0-9]*/environ"):
        try:
            text = status.read_bytes()
        except OSError:
            continue
        for rank in (0, 1):
            if (
                f"UNISONO_RANK={rank}".encode() in text.split(b"\0")
                and str(run_dir).encode() in (status.parent / "cmdline").read_bytes()
            ):
                workers[rank] = int(status.parent.name)
    os.kill(workers[1], signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(workers[0], signal.SIGTERM)
    time.sleep(0.5)
    os.kill(workers[1], signal.SIGCONT)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 75, out + err
    (event,) = [e for e in tiny.events(run_dir) if e["kind"] == "preempt"]
    assert event["signal"] == "SIGTERM"
    assert (run_dir / f"checkpoints/step-{event['step']:08d}/COMMIT").exists()


@pytest.mark.full
def test_a_crash_that_repeats_at_one_step_stops(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run = start(run_dir, 1, {**SETTINGS, "poison_from": 3, "max_skips": 1, "max_restarts": 9})
    _, err = run.communicate(timeout=150)
    assert run.returncode == 1
    assert "NumericsError in step 4 on rank 0, 2 times in a row" in err
    assert "a crash with the same type, message and step as the one before is not restarted again" in err
    assert len({e["attempt"] for e in tiny.events(run_dir)}) == 2
