"""Stages as even as can be; orders of passes that are complete and free of deadlock, with the papers' bubbles and memory."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_simulation import simulate
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

from unisono.errors import PlanError
from unisono.plan.pipeline_schedule import Action, balance_stages, forward_order, schedule_order, stage_index

PIPELINES = [(pp, micros) for pp in (1, 2, 3, 4, 7, 8) for micros in (1, 2, pp, pp + 1, 2 * pp, 3 * pp + 2, 5 * pp)]
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zbv", 2)]
UNIT = {"F": 1, "B": 2, "I": 1, "W": 1}


def unit(action: Action) -> float:
    return UNIT[action.kind]


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_every_stage_runs_every_micro_batch_once_and_nobody_waits_for_ever(schedule: str, chunks: int) -> None:
    for pp, micros in PIPELINES:
        if schedule == "interleaved" and micros % pp:
            with pytest.raises(ValueError, match=f"{micros} micro-batches are no multiple of {pp}"):
                schedule_order(schedule, pp, chunks, micros)
            continue
        orders = schedule_order(schedule, pp, chunks, micros)
        kinds = "FIW" if schedule == "zbv" else "FB"
        for rank, mine in enumerate(orders):
            stages = [stage_index(schedule, pp, rank, chunk) for chunk in range(chunks)]
            assert sorted(mine) == sorted(Action(k, s, m) for k in kinds for s in stages for m in range(micros))
            for kind in kinds:
                for stage in stages:  # links between stages have no tags: first in, first out
                    came = [action.micro for action in mine if (action.kind, action.stage) == (kind, stage)]
                    assert came == list(range(micros))
            for before, after in pairwise(kinds):
                for stage in stages:
                    for micro in range(micros):
                        assert mine.index(Action(before, stage, micro)) < mine.index(Action(after, stage, micro))
        assert simulate(orders, unit).makespan >= 3 * chunks * micros


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_forward_passes_alone_take_any_number_of_micro_batches(schedule: str, chunks: int) -> None:
    for pp, micros in PIPELINES:
        orders = [forward_order(schedule, pp, rank, chunks, micros) for rank in range(pp)]
        assert simulate(orders, unit).makespan >= chunks * micros
        stages = {(action.stage, action.micro) for mine in orders for action in mine}
        assert len(stages) == sum(map(len, orders)) == pp * chunks * micros


def test_a_v_comes_back_to_the_first_rank() -> None:
    assert [stage_index("zbv", 3, rank, chunk) for chunk in (0, 1) for rank in range(3)] == [0, 1, 2, 5, 4, 3]
    assert [stage_index("interleaved", 3, rank, chunk) for chunk in (0, 1) for rank in range(3)] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("pp", "micros"), [(2, 2), (4, 4), (4, 12), (8, 64)])
def test_bubbles_are_those_of_the_papers(pp: int, micros: int) -> None:
    def bubble(schedule: str, chunks: int) -> float:
        makespan = simulate(schedule_order(schedule, pp, chunks, micros), unit).makespan
        return (makespan - 3 * chunks * micros) / makespan

    for schedule in ("gpipe", "1f1b"):
        assert bubble(schedule, 1) == (pp - 1) / (micros + pp - 1)
    for chunks in (2, 4):
        assert bubble("interleaved", chunks) == (pp - 1) / (chunks * micros + pp - 1)


@pytest.mark.parametrize(("pp", "micros"), [(2, 3), (4, 4), (4, 16), (8, 20)])
def test_memory_is_bounded_by_the_pipeline_not_by_the_batch(pp: int, micros: int) -> None:
    assert simulate(schedule_order("gpipe", pp, 1, micros), unit).peak == (micros,) * pp
    assert simulate(schedule_order("1f1b", pp, 1, micros), unit).peak == tuple(
        min(micros, pp - rank) for rank in range(pp)
    )
    assert max(simulate(schedule_order("zbv", pp, 2, micros), unit).peak) <= 2 * pp  # stages half the size of 1f1b's


def torchs_zbv(pp: int, micros: int) -> list[list[Action]]:
    """The order of torch's class, which wants a process group for everything else."""
    made = ScheduleZBVZeroBubble.__new__(ScheduleZBVZeroBubble)
    made.pp_group_size, made.num_stages, made._n_microbatches = pp, 2 * pp, micros
    kinds = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    return [
        [
            Action(kinds[op.computation_type.name], op.stage_index, op.microbatch_index)
            for op in made._calculate_single_rank_operations(rank)
            if op is not None
        ]
        for rank in range(pp)
    ]


def test_zbv_is_as_short_as_torchs_and_shorter_than_1f1b() -> None:
    for pp in (2, 3, 4, 5, 8):
        for micros in (1, pp - 1, pp, pp + 1, 2 * pp - 2, 2 * pp, 3 * pp + 1, 40):
            mine = simulate(schedule_order("zbv", pp, 2, micros), unit)
            theirs = simulate(torchs_zbv(pp, micros), unit)
            assert mine.makespan <= theirs.makespan
            # a stage of 1f1b is two of zbv
            whole = simulate(schedule_order("1f1b", pp, 1, micros), lambda action: 2 * unit(action))
            if micros >= pp:
                assert mine.makespan < whole.makespan


def test_a_deadlock_is_an_error() -> None:
    first = [Action("F", 0, 0), Action("B", 0, 0)]
    second = [Action("B", 1, 0), Action("F", 1, 0)]
    with pytest.raises(ValueError, match=r"wait for each other: \{0: .*B.* 1: .*B"):
        simulate([first, second], unit)


def heaviest(blocks: list[int], before: int, after: int, splits: tuple[int, ...]) -> int:
    sums, start = [], 0
    for count in splits:
        sums.append(sum(blocks[start : start + count]))
        start += count
    sums[0] += before
    sums[-1] += after
    return max(sums)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(0, 30), st.integers(0, 30), st.data())
def test_no_other_split_is_lighter(blocks: list[int], before: int, after: int, data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(blocks)))
    chosen = balance_stages(blocks, before, after, num_stages)
    assert len(chosen) == num_stages
    assert sum(chosen) == len(blocks)
    assert min(chosen) >= 1
    every = [
        tuple(b - a for a, b in zip((0, *ends), (*ends, len(blocks)), strict=True))
        for ends in combinations(range(1, len(blocks)), num_stages - 1)
    ]
    assert heaviest(blocks, before, after, chosen) == min(heaviest(blocks, before, after, each) for each in every)


def test_a_heavy_head_gets_fewer_blocks() -> None:
    assert balance_stages([1] * 8, 0, 2, 2) == (5, 3)
    with pytest.raises(PlanError, match="a model of 3 blocks in 4 stages"):
        balance_stages([1, 1, 1], 0, 0, 4)
