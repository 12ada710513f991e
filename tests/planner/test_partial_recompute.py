"""Full recompute of some blocks: between none and full, no more blocks than memory demands, and never slower with more memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from unisono.planner.decision_flips import sensitivity
from unisono.planner.devices import DEVICES
from unisono.planner.layout import Layout, LayoutError
from unisono.planner.layout_space import Job, Space
from unisono.planner.model_presets import PRESETS
from unisono.planner.partial_recompute import least_recompute, with_blocks
from unisono.planner.peak_memory import Place, peak_memory, places_of_ranks, rank_parts, stage_memory
from unisono.planner.search import SearchResult, choose, compare, memory_limit, with_other_memory
from unisono.planner.simulate import predict
from unisono.planner.stage_blocks import blocks_per_rank, blocks_per_stage, recomputed_per_rank

GIB = 2**30


def search(given: Job) -> SearchResult:
    return choose(given, compare(given))


def job(model: str, **changes: object) -> Job:
    whole = Job(
        model=PRESETS[model],
        device=DEVICES["h100"],
        num_devices=8,
        precision="bf16",
        global_batch=64,
        seq_len=8192,
        pins={},
    )
    return replace(whole, **changes)  # pyright: ignore[reportArgumentType]


# memory between what all blocks keep and what recomputed ones do
SHORT = [
    job("llama-2-7b", global_batch=64, seq_len=4096, memory_bytes=30 * GIB),
    job("llama-3-70b", num_devices=64, global_batch=256, memory_bytes=60 * GIB),
    job("mixtral-8x7b", num_devices=64, global_batch=256, seq_len=4096, memory_bytes=48 * GIB, pins={"zero": 3}),
]
NAMES = [f"{each.model.layers} layers on {each.num_devices}" for each in SHORT]


def without_recompute(each: Job) -> list[Layout]:
    return [layout for layout in Space(each).layouts if layout.recompute == "none"]


@pytest.mark.parametrize("each", SHORT, ids=NAMES)
def test_no_blocks_are_none_and_all_blocks_are_full(each: Job) -> None:
    none = without_recompute(each)[::4]
    full = [replace(layout, recompute="full") for layout in none]
    no_block = [with_blocks(layout, (0,) * len(blocks_per_stage(layout))) for layout in none]
    every_block = [with_blocks(layout, blocks_per_stage(layout)) for layout in none]
    assert {(layout.pp > 1, layout.stages_per_rank > 1) for layout in none} >= {
        (False, False),
        (True, False),
        (True, True),
    }
    for partial, mode in ((no_block, none), (every_block, full)):
        assert peak_memory(partial).counted.tolist() == peak_memory(mode).counted.tolist()
        for one, other in zip(predict(partial), predict(mode), strict=True):
            assert one.parts_s == pytest.approx(other.parts_s, rel=1e-12, abs=1e-12 * other.step_s)


def test_each_block_saves_as_much_and_costs_as_much() -> None:
    layout = next(it for it in without_recompute(SHORT[0]) if it.pp == 1 and it.zero == 3)
    found = predict([with_blocks(layout, (count,)) for count in range(33)])
    times = np.diff([each.step_s for each in found])
    assert times == pytest.approx(np.full(32, times[0]))
    activations = np.diff([each.memory["activations"] for each in found])
    assert activations == pytest.approx(np.full(32, activations[0]))
    tokens = layout.micro_batch * layout.seq_len
    hidden, ffn = layout.model.hidden, layout.model.ffn
    # a block keeps its input alone: outputs of norms, projections and attention, and the feed-forward layer are computed again;
    # so are both inputs of norms in 32 bits, with what their weights multiply
    assert -activations[0] == pytest.approx((2 * (8 + 4) * hidden + 4 * 32 + 8 * ffn - 2 * hidden) * tokens)


def need_of_ranks(layout: Layout, recomputed: tuple[float, ...]) -> list[float]:
    """Bytes of every rank of a pipeline, each with so many recomputed blocks."""
    places = [
        Place(it.rank, it.blocks, count, it.in_flight)
        for it, count in zip(places_of_ranks(layout), recomputed, strict=True)
    ]
    return rank_parts([layout], np.zeros(len(places), int), places).sum(0).tolist()


@pytest.mark.parametrize("each", SHORT, ids=NAMES)
def test_no_rank_recomputes_more_blocks_than_it_must(each: Job) -> None:
    limit, none = memory_limit(each), without_recompute(each)[::4]
    found = {repr(replace(it, recompute="none", recomputed_blocks=())): it for it in least_recompute(none, limit)}
    assert len(found) > len(none) / 20
    several = 0
    for layout in none:
        blocks = blocks_per_rank(layout)
        # counted one by one
        least = [
            next((n for n in range(int(of_rank) + 1) if need_of_ranks(layout, (n,) * layout.pp)[rank] <= limit), None)
            for rank, of_rank in enumerate(blocks)
        ]
        if None in least or not any(least) or tuple(least) == blocks:
            assert repr(layout) not in found
            continue
        partial = found[repr(layout)]
        assert recomputed_per_rank(partial) == tuple(least)
        assert all(np.array(partial.recomputed_blocks) <= blocks_per_stage(partial))
        assert float(peak_memory([partial]).counted[0]) <= limit
        several += len(set(least)) > 1
    assert several or not any(layout.pp > 1 for layout in found.values())


@pytest.mark.parametrize("each", SHORT, ids=NAMES)
def test_more_memory_is_never_slower_and_partial_recompute_is_faster_than_full(each: Job) -> None:
    times: list[float] = []
    gained: list[float] = []
    for gib in range(16, 100, 6):
        given = replace(each, memory_bytes=gib * GIB)
        table = compare(given)
        best = table.best(memory_limit(given))
        if best is None:
            assert not times
            continue
        times.append(best.step_s)
        modes = [
            float(seconds)
            for layout, seconds, need in zip(table.layouts, table.step_s, table.needed_bytes, strict=True)
            if layout.recompute != "partial" and need <= memory_limit(given)
        ]
        gained.append(min(modes, default=np.inf) / best.step_s - 1)
    assert len(times) >= 10
    assert times == sorted(times, reverse=True)
    assert min(gained) >= 0
    assert max(gained) > 0.01  # of the three models, with the constants of today


def test_a_plan_with_partial_recompute_is_the_same_each_time_and_says_what_changes_it() -> None:
    # more memory than an H100 has, so that not nearly all blocks are recomputed
    device = replace(DEVICES["h100"], memory_bytes=96 * GIB)
    each = job("llama-3-405b", device=device, num_devices=16384, global_batch=2048, pins={"zero": 1})
    best = search(each).best
    assert best is not None
    assert best.layout.recompute == "partial"
    assert search(each) == search(replace(each, pins=dict(each.pins)))
    assert best.axes_text.endswith(f"recompute=partial ({sum(best.layout.recomputed_blocks)} of 126 blocks)")
    slower = next(it for axis, value, it in search(each).changes if (axis, value) == ("recompute", "full"))
    assert slower.step_s > 1.05 * best.step_s
    flips = {(it.changed, it.factor): it for it in sensitivity(each, compare(each)).perturbations}
    for factor in (0.5, 2):
        flip = flips["device memory", factor]
        other = search(replace(each, memory_bytes=factor * each.device.memory_bytes)).best
        assert flip.best == other is not None
        assert flip.is_other
    first, middle, last = stage_memory(best.layout).values()
    ranks = recomputed_per_rank(best.layout)
    assert [it.recomputed_blocks for it in (first, middle, last)] == [ranks[0], ranks[middle.rank], ranks[-1]]


@pytest.mark.parametrize("pins", [{}, {"recompute": "partial"}, {"recompute": "full"}])
def test_layouts_for_another_memory_are_those_of_a_new_search(pins: dict[str, int | str]) -> None:
    each = replace(SHORT[0], pins=pins, memory_bytes=24 * GIB)
    known = compare(each)
    for gib in (12, 40, 400):
        other = replace(each, memory_bytes=gib * GIB)
        found, expected = with_other_memory(other, known), compare(other)
        assert (list(found.layouts), list(found.refused)) == (list(expected.layouts), list(expected.refused))
        assert np.array_equal(found.step_s, expected.step_s)
        assert np.array_equal(found.needed_bytes, expected.needed_bytes)


@pytest.mark.parametrize("gib", [12, 40, 400])
def test_partial_recompute_can_be_pinned(gib: int) -> None:
    """The fewest blocks that fit; where none need be recomputed one, and where all are not enough all but one."""
    each = replace(SHORT[0], pins={"recompute": "partial"}, memory_bytes=gib * GIB)
    table = compare(each)
    assert {layout.recompute for layout in table.layouts} == {"partial"}
    counts = [sum(layout.recomputed_blocks) for layout in table.layouts]
    assert min(counts) >= 1
    assert max(counts) <= 31
    assert (min(counts), max(counts)) == {12: (31, 31), 40: (1, 31), 400: (1, 1)}[gib]
    assert not any(axis == "recompute" for axis, _, _ in search(each).refused)


def test_the_number_of_blocks_can_be_pinned() -> None:
    each = replace(SHORT[0], pins={"recompute": "partial", "recomputed_blocks": 3})
    layouts = compare(each).layouts
    assert {layout.pp for layout in layouts} >= {1, 8}
    for layout in layouts:
        assert layout.recomputed_blocks == tuple(min(3, blocks) for blocks in blocks_per_stage(layout))
        assert max(blocks_per_stage(layout)) > 3
    with pytest.raises(LayoutError, match="partial recompute is that of fewer blocks than a stage has"):
        compare(replace(each, pins={"recompute": "partial", "recomputed_blocks": 32}))


def test_where_no_layout_needs_it_the_rule_is_told() -> None:
    refused = search(job("llama-2-7b", seq_len=4096, memory_bytes=1000 * GIB)).refused
    assert [rule for axis, value, rule in refused if (axis, value) == ("recompute", "partial")] == [
        "each layout fits without recompute, or not with full recompute either"
    ]


def test_numbers_of_blocks_go_with_partial_recompute() -> None:
    layout = without_recompute(SHORT[0])[0]
    for wrong in ({"recomputed_blocks": (1,)}, {"recompute": "partial"}):
        with pytest.raises(LayoutError, match="with numbers of blocks for"):
            replace(layout, **wrong)  # pyright: ignore[reportArgumentType]
