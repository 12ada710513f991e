"""From the dumps of ranks follows who is missing where, or what they issued differently; broken files do no harm."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from modes import PRIVATE, mode_of
from procs import wait_until

from unisono.dist import JobSpec, rank_dump
from unisono.dist.hang import explain_hang, read_hang, read_stuck, stuck_path
from unisono.dist.rank_dump import (
    Collective,
    GroupState,
    RankDump,
    RootedCall,
    StackFrame,
    ThreadStack,
    dump_path,
    parse_stacks,
    read_dumps,
    thread_stacks,
    write_dump,
)
from unisono.dist.watchdog import Watchdog

SUM = ("all_reduce", ((8,),), ("Float",))
GATHER = ("all_gather", ((8,),), ("Float",))
USERS = StackFrame(file="/home/me/user_loader.py", line=42, function="read", is_users=True)
TORCHS = StackFrame(file="/lib/torch/distributed/c10d.py", line=7, function="all_reduce", is_users=False)


def group(issued: Sequence[tuple], *, done: int, name: str = "0", axis: str = "dp", ranks=(0, 1, 2)) -> GroupState:
    """Collectives from number 1 on, of which the first ``done`` have completed."""
    collectives = tuple(
        Collective(
            number=n, name=each[0], sizes=each[1], dtypes=each[2], state="completed" if n <= done else "scheduled"
        )
        for n, each in enumerate(issued, start=1)
    )
    return GroupState(name=name, description=axis, ranks=tuple(ranks), num_entered=len(issued), collectives=collectives)


def dump(rank: int, *groups: GroupState, frame: StackFrame = TORCHS, reason: str = "CommError", root=None) -> RankDump:
    return RankDump(
        rank=rank,
        restart_count=0,
        reason=reason,
        step=3,
        at_s=100.0,
        quiet_s=30.0,
        threads=(ThreadStack(name="main", frames=(frame,)),),
        groups=groups,
        rooted=None if root is None else RootedCall(name="broadcast", root=root),
    )


def test_a_rank_that_has_not_entered_is_named_with_its_place() -> None:
    waiting = group([SUM, GATHER], done=1)
    found = explain_hang([dump(0, waiting), dump(1, waiting), dump(2, group([SUM], done=1), frame=USERS)])
    assert found is not None
    assert (found.kind, found.ranks) == ("hang", (2,))
    assert found.sentence == (
        "rank 2 has not entered all_gather #2 of [8] float on axis dp, in which ranks 0-1 wait; "
        "rank 2 is in user_loader.py:42 read()"
    )


def test_a_rank_without_a_dump_is_missing_too() -> None:
    waiting = group([SUM], done=0)
    found = explain_hang([dump(0, waiting), dump(2, waiting)], ended={1: "had ended (exit code 0)"})
    assert found is not None
    assert found.ranks == (1,)
    assert found.sentence.endswith("in which ranks 0, 2 wait; rank 1 had ended (exit code 0)")


def test_a_rank_that_ended_in_the_collective_in_which_others_wait() -> None:
    waiting = group([SUM], done=0, ranks=(0, 1))
    found = explain_hang([dump(0, waiting), dump(1, waiting)], ended={0: "had ended (exit code 1)"})
    assert found is not None
    assert (found.kind, found.ranks) == ("hang", (0,))
    assert found.sentence == (
        "rank 0 no longer takes part in all_reduce #1 of [8] float on axis dp, in which rank 1 waits; "
        "rank 0 had ended (exit code 1)"
    )


def test_ranks_that_have_all_ended_wait_for_nobody() -> None:
    waiting = group([SUM], done=0, ranks=(0, 1))
    assert explain_hang([dump(0, waiting), dump(1, waiting)], ended=dict.fromkeys((0, 1), "had ended")) is None


def test_a_dump_whose_numbers_contradict_each_other() -> None:
    # of a broken file: it waits in a collective that it says it has not entered
    odd = msgspec.structs.replace(group([SUM], done=0, ranks=(0, 1)), num_entered=0)
    assert explain_hang([dump(0, odd), dump(1, odd)]) is None


def test_of_a_chain_the_last_one_is_named() -> None:
    # rank 0 waits for 1 along dp, which waits for 3 along tp, which is in the user's code
    found = explain_hang(
        [
            dump(0, group([SUM, SUM], done=1, ranks=(0, 1))),
            dump(1, group([SUM], done=1, ranks=(0, 1)), group([GATHER], done=0, name="1", axis="tp", ranks=(1, 3))),
            dump(3, frame=USERS),
        ]
    )
    assert found is not None
    assert (found.ranks, "on axis tp" in found.sentence) == ((3,), True)


def test_ranks_that_wait_for_each_other() -> None:
    dp, tp = {"ranks": (0, 1)}, {"ranks": (0, 1), "name": "1", "axis": "tp"}
    found = explain_hang(
        [
            dump(0, group([SUM, SUM], done=1, **dp), group([SUM], done=1, **tp)),
            dump(1, group([SUM], done=1, **dp), group([SUM, SUM], done=1, **tp)),
        ]
    )
    assert found is not None
    assert (found.kind, found.ranks) == ("collective_mismatch", (0, 1))
    assert "wait for each other in different groups" in found.sentence


def test_the_one_of_three_ranks_that_skipped_a_collective_of_another_group() -> None:
    dp, own = {"ranks": (0, 1, 2)}, {"ranks": (0, 1, 2), "name": "1", "axis": "tp"}
    usual = [group([SUM], done=1, **dp), group([SUM], done=0, **own)]
    found = explain_hang([dump(0, *usual), dump(1, group([SUM, SUM], done=1, **dp)), dump(2, *usual)])
    assert found is not None
    assert (found.kind, found.ranks) == ("collective_mismatch", (1,))


def test_a_skipped_collective() -> None:
    usual = group([SUM, GATHER, SUM, SUM], done=3)
    found = explain_hang([dump(0, usual), dump(1, group([SUM, SUM, SUM], done=2)), dump(2, usual)])
    assert found is not None
    assert (found.kind, found.ranks) == ("collective_mismatch", (1,))
    assert found.sentence == "rank 1 skipped all_gather #2 of [8] float on axis dp, which ranks 0, 2 issued"


@pytest.mark.parametrize("odd", [("all_reduce", ((9,),), ("Float",)), ("all_reduce", ((8,),), ("Double",)), GATHER])
def test_a_collective_of_another_count_type_or_kind(odd: tuple) -> None:
    usual = group([SUM, SUM], done=1)
    found = explain_hang([dump(0, usual), dump(1, usual), dump(2, group([SUM, odd], done=1))])
    assert found is not None
    assert (found.kind, found.ranks) == ("collective_mismatch", (2,))
    assert "#2" in found.sentence


def test_parts_of_an_all_to_all_may_have_any_size() -> None:
    first, second = ("all_to_all", ((8,),), ("Float",)), ("all_to_all", ((3,),), ("Float",))
    states = [group([SUM, each], done=2, ranks=(0, 1)) for each in (first, second)]
    assert explain_hang([dump(rank, state) for rank, state in enumerate(states)]) is None


def test_different_roots() -> None:
    broadcast = group([("broadcast", ((8,),), ("Float",))], done=0)
    found = explain_hang([dump(0, broadcast, root=0), dump(1, broadcast, root=1), dump(2, broadcast, root=0)])
    assert found is not None
    assert (found.kind, found.ranks) == ("collective_mismatch", (1,))
    assert "root 0 on ranks 0, 2, root 1 on rank 1" in found.sentence


def test_a_rank_that_stands_still_without_a_collective() -> None:
    found = explain_hang([dump(0, reason="no progress"), dump(1, frame=USERS, reason="no progress")])
    assert found is not None
    assert (found.kind, found.ranks) == ("hang", (1,))
    assert (
        found.sentence
        == "no step has ended for 30 s; rank 1 is in user_loader.py:42 read(), and rank 0 waits for others"
    )


@pytest.mark.parametrize("file", ["/home/me/unisono/dist/train.py", "/home/me/site/torch/distributed/mine.py"])
def test_a_user_s_file_in_a_folder_named_as_ours_waits_for_nobody(file: str) -> None:
    frame = StackFrame(file=file, line=5, function="train", is_users=True)
    found = explain_hang([dump(0, reason="no progress"), dump(1, frame=frame, reason="no progress")])
    assert found is not None
    assert found.ranks == (1,)


def test_ranks_that_wait_for_one_at_work_do_not_hang() -> None:
    waiting, done = group([SUM, SUM], done=1, ranks=(0, 1)), group([SUM], done=1, ranks=(0, 1))
    dumps = [dump(0, waiting, reason="no progress"), dump(1, done, frame=USERS, reason="working")]
    assert explain_hang(dumps, working={1}) is None
    found = explain_hang(dumps)
    assert found is not None
    assert found.ranks == (1,)


def test_the_wait_for_a_rank_that_waits_for_one_at_work_is_none_either() -> None:
    first, tp = group([SUM, SUM], done=1, ranks=(0, 1)), {"name": "1", "axis": "tp", "ranks": (1, 3)}
    dumps = [
        dump(0, first),
        dump(1, group([SUM], done=1, ranks=(0, 1)), group([SUM], done=0, **tp)),
        dump(3, reason="working"),
    ]
    assert explain_hang(dumps, working={3}) is None


def test_a_rank_at_work_that_waits_itself_hides_nothing() -> None:
    # ranks 0 and 1 wait for each other, both in a save
    dp, tp = {"ranks": (0, 1)}, {"ranks": (0, 1), "name": "1", "axis": "tp"}
    dumps = [
        dump(0, group([SUM, SUM], done=1, **dp), group([SUM], done=1, **tp)),
        dump(1, group([SUM], done=1, **dp), group([SUM, SUM], done=1, **tp)),
    ]
    found = explain_hang(dumps, working={0, 1})
    assert found is not None
    assert found.kind == "collective_mismatch"


def test_a_rank_that_no_longer_says_that_it_works_is_missing(tmp_path: Path) -> None:
    waiting, done = group([SUM, SUM], done=1, ranks=(0, 1)), group([SUM], done=1, ranks=(0, 1))
    for at_s, ranks in ((time.time(), None), (time.time() - 100, (1,))):
        working = msgspec.structs.replace(dump(1, done, reason="working"), at_s=at_s)
        for each in (dump(0, waiting, reason="no progress"), working):
            dump_path(tmp_path, each.rank).write_bytes(msgspec.json.encode(each))
        found = read_hang(tmp_path)
        assert (None if found is None else found.ranks) == ranks


def test_dumps_of_earlier_releases_have_no_activity(tmp_path: Path) -> None:
    fields = msgspec.to_builtins(dump(0, reason="no progress"))
    del fields["activity"], fields["activity_s"]
    dump_path(tmp_path, 0).write_bytes(msgspec.json.encode(fields))
    (read,) = read_dumps(tmp_path)
    assert read.activity == ""


def test_ranks_that_meet_explain_nothing() -> None:
    done = group([SUM], done=1)
    assert explain_hang([dump(rank, done) for rank in range(3)]) is None


def test_a_dump_has_all_threads_and_no_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_dump, "_source", lambda: [group([SUM, SUM], done=2)])
    go_on = threading.Event()

    def stuck_in_user_code(value: str) -> None:
        go_on.wait(60)

    thread = threading.Thread(target=stuck_in_user_code, args=("this is private",), name="theirs")
    thread.start()
    try:
        write_dump(tmp_path, JobSpec(rank=2, world_size=3), "CommError", step=7, in_collective=True)
    finally:
        go_on.set()
        thread.join()
    path = dump_path(tmp_path, 2)
    assert mode_of(path) == PRIVATE
    assert "this is private" not in path.read_text()
    (read,) = read_dumps(tmp_path)
    assert (read.rank, read.step, read.reason) == (2, 7, "CommError")
    assert "stuck_in_user_code" in [frame.function for each in read.threads for frame in each.frames]
    # torch's recorder has retired the collective whose error this is
    assert [each.state for each in read.groups[0].collectives] == ["completed", "failed"]


def test_broken_dumps_are_left_out(tmp_path: Path) -> None:
    good = dump(0, group([SUM], done=0), reason="no progress")
    dump_path(tmp_path, 0).write_bytes(msgspec.json.encode(good))
    texts = ["", "{", "[]", '{"rank": 1}', msgspec.json.encode(good).decode(), "\0" * 100]
    for rank, text in enumerate(texts, start=1):
        dump_path(tmp_path, rank).write_text(text)
    (tmp_path / "stacks-rank-x.json").write_text("{}")
    dump_path(tmp_path, 9).mkdir()
    assert [each.rank for each in read_dumps(tmp_path)] == [0]
    assert read_dumps(tmp_path / "no such folder") == []
    assert read_hang(tmp_path) is not None
    assert read_hang(tmp_path, since_s=101.0) is None


def test_stacks_of_a_blocked_interpreter(tmp_path: Path) -> None:
    text = (
        "Timeout (0:00:05)!\nThread 0x01 (most recent call first):\n"
        '  File "/usr/x.py", line 1 in wait\n\nThread 0x02 (most recent call first):\n'
        '  File "/home/me/train.py", line 3 in solve\n  File "/home/me/train.py", line 9 in <module>\n'
    )
    main, other = parse_stacks(text)
    assert ([str(frame) for frame in main.frames], len(other.frames)) == (
        ["train.py:3 solve()", "train.py:9 <module>()"],
        1,
    )
    stuck_path(tmp_path, 4, 0).write_text(text)
    stuck_path(tmp_path, 5, 0).write_text("")
    (tmp_path / "stuck-rank-x.attempt-0.txt").write_text(text)
    assert {rank: str(frame) for rank, frame in read_stuck(tmp_path, 0).items()} == {4: "train.py:3 solve()"}


def test_the_main_thread_comes_first() -> None:
    assert thread_stacks()[0].name == "main"
    assert thread_stacks()[0].frames[-1].function in ("<module>", "_run_module_as_main")  # the latter with python -m


def test_a_watchdog_writes_and_a_rank_that_goes_on_removes(tmp_path: Path) -> None:
    step = 0
    watchdog = Watchdog(JobSpec(rank=1, world_size=2), tmp_path, deadline_s=0.4, step=lambda: step)
    try:
        wait_until(dump_path(tmp_path, 1).exists, "the dump")
        (read,) = read_dumps(tmp_path)
        assert (read.reason, read.step) == ("no progress", 0)
        step = 1
        wait_until(lambda: not dump_path(tmp_path, 1).exists() or read_dumps(tmp_path)[0].step == 1, "it is gone")
        wait_until(dump_path(tmp_path, 1).exists, "the next dump")
    finally:
        watchdog.close(failed=True)
    assert dump_path(tmp_path, 1).exists()
    watchdog.close()
    assert dump_path(tmp_path, 1).exists()


def test_steps_before_a_block_do_not_remove_its_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_LOGS", str(tmp_path))
    step, stacks = 0, stuck_path(tmp_path, 1, 0)
    watchdog = Watchdog(JobSpec(rank=1, world_size=2), tmp_path, deadline_s=2.0, step=lambda: step)
    try:
        step = 1
        ctypes.PyDLL(None).usleep(2_500_000)  # holds the interpreter
        wait_until(dump_path(tmp_path, 1).exists, "a dump, some looks later")
        assert read_stuck(tmp_path, 0)[1].function == "test_steps_before_a_block_do_not_remove_its_stacks"
        step = 2
        wait_until(lambda: not stacks.stat().st_size, "they are gone")
    finally:
        watchdog.close()
    assert list(tmp_path.iterdir()) == []


def test_a_watchdog_of_a_rank_that_ends_well_leaves_nothing(tmp_path: Path) -> None:
    watchdog = Watchdog(JobSpec(rank=1, world_size=2), tmp_path, deadline_s=0.4)
    wait_until(dump_path(tmp_path, 1).exists, "the dump")
    watchdog.close()
    assert list(tmp_path.iterdir()) == []


def test_progress_is_long_in_coming_after_many_times_the_longest_pause(tmp_path: Path) -> None:
    watchdog = Watchdog(JobSpec(), tmp_path, deadline_s=300.0)
    try:
        assert watchdog.quiet_limit_s == 20.0
        watchdog._longest_s = 4.0
        assert watchdog.quiet_limit_s == 40.0
        watchdog._longest_s = 90.0
        assert watchdog.quiet_limit_s == 150.0
    finally:
        watchdog.close()
