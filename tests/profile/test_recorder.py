"""Windows of real runs of one and two ranks: what is recorded is what was trained, and outside of windows nothing is hooked."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from pool import Pool

from unisono.observe.options import ObserveOptions
from unisono.profile import RankProfile, newest_profiles, read_profiles, recorder
from unisono.profile.rank_profile import MERGED_FILE, profile_folder, profile_folders
from unisono.profile.window import request_path, write_request
from unisono.report import write_report
from unisono.train.run_checkpoints import RunCheckpoints


def train(world: Any, run_dir: str, **changes: Any) -> dict[str, Any]:
    """A tiny run whose steps 4 and 5 are profiled, unless ``steps_text`` names others; its losses, and what it leaves."""
    observe = ObserveOptions(console="off", trackers=(), report=False, profile_steps=changes.pop("steps_text", "4:6"))
    ask_at = changes.pop("ask_at", 0)
    losses: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "QUIET", observe)
        with tiny.trainer(run_dir, world=world, **{"steps": 8, "num_workers": 0, **changes}) as run:
            timers = run._loop.runner.timers  # pyright: ignore[reportPrivateUsage]
            plain = timers.phase, timers.comm_exposed
            for step in run:
                losses.append(step.loss)
                if step.index == ask_at and run.world.rank == 0:
                    profiler = run._loop.runner.profiler  # pyright: ignore[reportPrivateUsage]
                    write_request(Path(run_dir), 2, stacks=False)
                    profiler._polled_s = -10.0  # pyright: ignore[reportPrivateUsage]
    restored = (timers.phase, timers.comm_exposed) == plain
    return {"losses": losses, "restored": restored}


def events(run_dir: Path, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    return [event for event in tiny.events(run_dir, rank) if event["kind"] == kind]


def test_a_window_of_one_rank(tmp_path: Path) -> None:
    told = train(None, str(tmp_path / "run"))
    assert told["restored"]
    (profile,), notes = newest_profiles(tmp_path / "run")
    assert notes == ()
    assert [step.step for step in profile.steps] == [4, 5]
    assert {"forward", "backward", "optimizer", "data_wait"} <= {phase.name for phase in profile.phases}
    calls = {phase.name: phase.calls for phase in profile.phases}
    assert (calls["forward"], calls["optimizer"]) == (2, 2)
    assert sum(phase.total_s for phase in profile.phases) == pytest.approx(profile.wall_s, rel=0.01)
    names = {op.name for op in profile.operators}
    assert {"aten::mm", "aten::copy_"} <= names
    assert (profile.rank, profile.world_size, profile.device, profile.is_foreign) == (0, 1, "cpu", False)
    assert (profile.patterns, profile.recompute_s, profile.compiled.compilations) == ((), 0, 0)
    assert [point.calls for point in profile.syncs] == [2]  # the loss, which the loop above reads


def test_memory_is_that_of_the_plan(tmp_path: Path) -> None:
    train(None, str(tmp_path / "run"))
    (profile,), _ = newest_profiles(tmp_path / "run")
    memory = profile.memory
    held = events(tmp_path / "run", "run_start")[0]["held_bytes"]
    assert memory.planned == held
    for category, planned in held.items():
        assert memory.at_peak[category] == pytest.approx(planned, rel=0.02), category
    assert memory.at_peak["activations"] > 0
    assert sum(memory.at_peak.values()) == memory.peak_bytes


def test_losses_are_the_same_with_a_profile(tmp_path: Path) -> None:
    assert (
        train(None, str(tmp_path / "with"), steps_text="3:5+stacks")["losses"]
        == (train(None, str(tmp_path / "without"), steps_text="")["losses"])
    )
    assert newest_profiles(tmp_path / "without") == ((), ())


def test_another_profiler_at_work_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(profiler: Any) -> None:
        raise RuntimeError("Profiler is already enabled on this thread")

    monkeypatch.setattr(recorder.profile, "start_trace", refuse)
    assert len(train(None, str(tmp_path / "run"))["losses"]) == 8
    (event,) = events(tmp_path / "run", "profile")
    assert "already enabled" in event["error"]


@pytest.mark.parametrize("plan", [{"steps_text": "4:6+stacks"}, {"dp_shard": 2}, {"tp": 2}])
def test_two_ranks_record_the_same_steps_on_one_clock(pool: Pool, tmp_path: Path, plan: dict[str, Any]) -> None:
    run = tmp_path / "run"
    pool.run(train, str(run), **plan)
    profiles, _ = newest_profiles(run)
    assert [(p.rank, p.world_size, [s.step for s in p.steps]) for p in profiles] == [(0, 2, [4, 5]), (1, 2, [4, 5])]
    axis = "tp" if "tp" in plan else "dp"
    for profile in profiles:
        rows = [row for row in profile.collectives if row.axis == axis]
        assert rows
        assert all(row.calls and row.num_bytes and row.group_size == 2 and row.bus_bytes_per_s > 0 for row in rows)
    merged = json.loads(gzip.decompress((profile_folder(run, 4) / MERGED_FILE).read_bytes()))["traceEvents"]
    assert {event["args"]["name"] for event in merged if event["name"] == "process_name"} >= {"rank 0", "rank 1"}
    spans: dict[int, dict[str, tuple[float, float]]] = {}
    for event in merged:
        if event["name"].startswith("ProfilerStep#"):
            spans.setdefault(event["pid"], {})[event["name"]] = (event["ts"], event["ts"] + event["dur"])
    (one, other) = spans.values()
    for name in ("ProfilerStep#4", "ProfilerStep#5"):  # ranks that step together are in a step at the same time
        assert one[name][0] < other[name][1]
        assert other[name][0] < one[name][1]
    (begun,) = events(run, "profile_begin")
    assert (begun["step"], begun["first_step"], begun["last_step"]) == (2, 4, 5)
    (event,) = events(run, "profile")
    assert (event["step"], event["first_step"], event["merged_ranks"]) == (5, 4, 2)
    assert "error" not in event


def test_the_schedule_of_a_pipeline(pool: Pool, tmp_path: Path) -> None:
    """The timeline of a step has every pass of every micro-batch, and a stage computes what another has computed before."""
    run = tmp_path / "run"
    pool.run(train, str(run), pp=2, micro_batch=2, global_batch=8)
    first, last = newest_profiles(run)[0]
    passes = {
        profile.rank: {
            kind: [profile.began_s + span.start_s for span in profile.spans if span.name == kind]
            for kind in ("forward", "backward")
        }
        for profile in (first, last)
    }
    assert {kind: len(found) for kind, found in passes[0].items()} == {"forward": 4, "backward": 4}
    assert {kind: len(found) for kind, found in passes[1].items()} == {"forward": 4, "backward": 4}
    assert all(one < other for one, other in zip(passes[0]["forward"], passes[1]["forward"], strict=True))
    assert all(one > other for one, other in zip(passes[0]["backward"], passes[1]["backward"], strict=True))
    assert 'id="timeline"' in write_report(run).read_text()


def test_a_request_while_the_run_goes_on(pool: Pool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    pool.run(train, str(run), steps_text="", ask_at=3, steps=12)
    assert not request_path(run).exists()
    profiles, _ = newest_profiles(run)
    numbers = [[step.step for step in profile.steps] for profile in profiles]
    assert len(numbers) == 2
    assert numbers[0] == numbers[1]
    assert len(numbers[0]) == 2
    assert numbers[0][0] >= 6  # seen in step 4, warmed up in 5


@pytest.mark.parametrize("content", [b"", b"[]", b'{"num_steps": 10000}', b'{"num_steps": "many"}', b"\xff" * 5000])
def test_a_request_that_is_none_is_dropped(tmp_path: Path, content: bytes) -> None:
    run = tmp_path / "run"
    path = request_path(run)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    train(None, str(run), steps_text="")
    assert not path.exists()
    assert newest_profiles(run) == ((), ())


def test_a_window_that_the_run_does_not_reach_is_given_up(tmp_path: Path) -> None:
    assert train(None, str(tmp_path / "run"), steps_text="7:20")["restored"]
    assert newest_profiles(tmp_path / "run") == ((), ())
    (notice,) = [event for event in events(tmp_path / "run", "notice") if event["code"] == "no_profile"]
    assert notice["what"] == "steps 7 to 19 were not profiled: the run ended after step 8"
    assert not (tmp_path / "run/profile").exists()


def test_a_resumed_run_does_not_record_steps_that_it_has_made(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(None, str(run), steps_text="", every_steps=5)
    train(None, str(run), steps_text="4:6", steps=10)
    assert newest_profiles(run) == ((), ())
    (notice,) = lost(run)
    assert notice["what"] == "steps 4 to 5 were not profiled: the run goes on after step 8"
    assert "observe.profile_steps=18:21, or +10:13" in notice["fix"]
    train(None, str(run), steps_text="+3:5", steps=16)
    (profile,), _ = newest_profiles(run)
    assert [step.step for step in profile.steps] == [13, 14]
    # it has been made: there is nothing to say when the run is started again
    train(None, str(run), steps_text="13:15", steps=18)
    assert len(lost(run)) == 1


def lost(run: Path) -> list[dict[str, Any]]:
    return [event for event in events(run, "notice") if event["code"] == "no_profile"]


def windows(run: Path) -> list[list[int]]:
    """The steps of each profile of a run."""
    return [[step.step for step in read_profiles(folder)[0][0].steps] for folder in profile_folders(run).values()]


@pytest.mark.parametrize(
    ("ask_at", "window", "expected"),
    [
        (2, "16:18", [[5, 6], [16, 17]]),  # it ends before
        (2, "7:9", [[7, 8], [11, 12]]),  # it would not
        (5, "8:12", [[8, 11], [14, 15]]),  # asked for while the profiler is warmed up
    ],
)
def test_a_request_and_the_window_of_the_configuration_are_both_recorded(
    tmp_path: Path, ask_at: int, window: str, expected: list[list[int]]
) -> None:
    run = tmp_path / "run"
    assert train(None, str(run), steps_text=window, ask_at=ask_at, steps=20)["restored"]
    assert [[steps[0], steps[-1]] for steps in windows(run)] == expected
    assert lost(run) == []


def test_a_request_that_waits_at_the_end_is_reported(tmp_path: Path) -> None:
    train(None, str(tmp_path / "run"), steps_text="6:8", ask_at=2, steps=8)
    assert windows(tmp_path / "run") == [[6, 7]]
    (notice,) = lost(tmp_path / "run")
    assert notice["what"] == "requested steps were not profiled: the run ended after step 8"


def test_files_of_an_earlier_attempt_with_more_ranks_are_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    folder = profile_folder(run, 4)
    folder.mkdir(parents=True)
    names = ("rank-0.json", "rank-3.json", "rank-3.trace.json.gz", "trace.json.gz", "notes.txt")
    for name in names:
        (folder / name).write_text("{}")
        os.utime(folder / name, (1e9, 1e9))
    train(None, str(run))
    (profile,), notes = read_profiles(folder)
    assert (profile.rank, notes) == (0, ())
    assert sorted(path.name for path in folder.iterdir()) == [
        *("notes.txt", "rank-0.json", "rank-0.trace.json.gz", "trace.json.gz"),
    ]


def test_a_trace_that_is_too_large_is_dropped_and_its_summary_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MAX_RAW_EVENTS", 10)
    train(None, str(tmp_path / "run"))
    folder = profile_folder(tmp_path / "run", 4)
    assert [path.name for path in folder.iterdir()] == ["rank-0.json"]
    (profile,), _ = read_profiles(folder)
    assert profile.trace_file == ""
    assert "was dropped" in profile.notes[0]
    assert profile.operators


def test_a_disk_that_takes_nothing_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorder, "write_atomically", refuse)
    assert len(train(None, str(tmp_path / "run"))["losses"]) == 8
    (event,) = events(tmp_path / "run", "profile")
    assert "No space left" in event["error"]


def test_traces_that_cannot_be_merged_end_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> None:
        raise TypeError("planted")

    monkeypatch.setattr(recorder, "merge_traces", fail)
    assert len(train(None, str(tmp_path / "run"))["losses"]) == 8
    (event,) = events(tmp_path / "run", "profile")
    assert (event["error"], event["merged_ranks"]) == ("TypeError: planted", 0)


def train_with_slow_writing(world: Any, run_dir: str, slow_s: float) -> int:
    """Rank 1 writes its trace, and rank 0 merges, for longer than a collective may last; returns the number of steps."""

    def slow(wrapped: Callable[..., Any]) -> Callable[..., Any]:
        def slowly(*given: Any) -> Any:
            time.sleep(slow_s)
            return wrapped(*given)

        return slowly

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "merge_traces", slow(recorder.merge_traces))
        if world.rank == 1:
            patch.setattr(recorder, "read_trace", slow(recorder.read_trace))
        return len(train(world, run_dir)["losses"])


def test_writing_a_profile_may_take_longer_than_a_collective(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(train_with_slow_writing, str(tmp_path / "run"), 4.0, comm_timeout_s=3.0) == [8, 8]
    (event,) = events(tmp_path / "run", "profile")
    assert (event["merged_ranks"], event["stopped_s"] > 8) == (2, True)


def test_a_save_is_finished_before_a_profile_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    export, finish = recorder.profile.export_chrome_trace, RunCheckpoints.finish_save

    def noting_export(profiler: Any, path: str) -> None:
        order.append("export")
        export(profiler, path)

    def noting_finish(checkpoints: RunCheckpoints) -> None:
        finish(checkpoints)
        order.append(f"saved {checkpoints.saved_step}")

    monkeypatch.setattr(recorder.profile, "export_chrome_trace", noting_export)
    monkeypatch.setattr(RunCheckpoints, "finish_save", noting_finish)
    train(None, str(tmp_path / "run"), every_steps=5)
    assert order == ["saved 5", "export"]


def test_a_disk_that_is_full_keeps_no_raw_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(profiler: Any, path: str) -> None:  # as torch, which leaves what it has written
        Path(f"{path}.tmp").write_bytes(b"{")
        raise RuntimeError("No space left on device")

    monkeypatch.setattr(recorder.profile, "export_chrome_trace", fill)
    assert len(train(None, str(tmp_path / "run"))["losses"]) == 8
    (event,) = events(tmp_path / "run", "profile")
    assert "No space left" in event["error"]
    assert list(profile_folder(tmp_path / "run", 4).iterdir()) == []


def test_the_next_window_removes_what_a_killed_rank_left_of_an_earlier_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    folder = profile_folder(run, 2)
    folder.mkdir(parents=True)
    left = (
        *("rank-0.trace.json.gz.json", "rank-0.trace.json.gz.json.tmp", "rank-0.trace.json.gz.tmp-77-0a1b2c3d"),
        *("rank-3.trace.json.gz.json.tmp", "rank-0.json.tmp-77-0a1b2c3d", "trace.json.gz.tmp-77-0a1b2c3d"),
    )
    for name in (*left, "rank-0.json", "rank-0.trace.json.gz", "notes.json.tmp"):
        (folder / name).write_text("{}")
        os.utime(folder / name, (1e9, 1e9))
    train(None, str(run))
    assert sorted(path.name for path in folder.iterdir()) == ["notes.json.tmp", "rank-0.json", "rank-0.trace.json.gz"]


def test_a_damaged_profile_is_noted(tmp_path: Path) -> None:
    train(None, str(tmp_path / "run"))
    folder = profile_folder(tmp_path / "run", 4)
    (folder / "rank-1.json").write_bytes((folder / "rank-0.json").read_bytes()[:500])
    (folder / "rank-2.json").write_text('{"rank": "two"}')
    (folder / "rank-3.json").mkdir()
    profiles, notes = newest_profiles(tmp_path / "run")
    assert [type(profile) for profile in profiles] == [RankProfile]
    assert len(notes) == 3
