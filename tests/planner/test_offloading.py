"""Activations in the memory of the host: what a run moves, what it saves and takes, and where it is compared."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from unisono.models.gpt import GPT, ModelOptions
from unisono.models.loss import cross_entropy_sum
from unisono.parallel import recompute
from unisono.planner.devices import DEVICES
from unisono.planner.layout import Layout, LayoutError
from unisono.planner.layout_space import Job, Space
from unisono.planner.model_presets import PRESETS
from unisono.planner.model_shape import ModelShape
from unisono.planner.offloading import with_offload
from unisono.planner.peak_memory import peak_memory
from unisono.planner.search import SearchResult, choose, compare, memory_limit, with_other_memory
from unisono.planner.simulate import predict
from unisono.planner.step_work import offloaded_bytes

GIB = 2**30
JOB = Job(
    model=PRESETS["llama-3-70b"],
    device=DEVICES["gh200"],
    num_devices=64,
    precision="bf16",
    global_batch=256,
    seq_len=8192,
    pins={},
)
LAYOUT = Layout(
    model=PRESETS["llama-3-8b"],
    device=DEVICES["h100"],
    precision="bf16",
    num_devices=8,
    zero=3,
    dp_shard=8,
    micro_batch=2,
    global_batch=32,
    seq_len=8192,
)


def search(job: Job) -> SearchResult:
    return choose(job, compare(job))


@pytest.mark.parametrize(("kv_heads", "ffn"), [(8, 704), (2, 1024)])
def test_bytes_that_a_run_moves(monkeypatch: pytest.MonkeyPatch, kv_heads: int, ffn: int) -> None:
    """Counted as blocks of a GPT hand them to the host, with the copies of weights in 16 bits."""
    moved: list[Tensor] = []

    class Counted(torch.autograd.graph.save_on_cpu):
        def __init__(self, pin_memory: bool) -> None:
            super().__init__(pin_memory)
            inner = self.pack_hook
            self.pack_hook = lambda tensor: (moved.append(tensor), inner(tensor))[1]

    monkeypatch.setattr(recompute, "save_on_cpu", Counted)
    layers, tokens, width = 2, 512, 256
    shape = ModelShape(
        layers=layers, hidden=width, heads=8, kv_heads=kv_heads, head_dim=32, ffn=ffn, gated=True, vocab=64
    )  # fmt: skip
    model = GPT(
        ModelOptions(num_layers=layers, dim=width, num_heads=8, num_kv_heads=kv_heads, ffn_dim=ffn, vocab_size=64)
    )
    recompute.offload_activations(list(model.blocks), pinned=False)
    batch = torch.zeros(1, tokens, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = cross_entropy_sum(model(batch), batch, torch.ones(1, tokens))
    loss.backward()
    found = sum(tensor.nbytes for tensor in moved) / layers
    layout = replace(
        LAYOUT, model=shape, zero=0, dp_shard=1, num_devices=1, micro_batch=1, global_batch=1, seq_len=tokens
    )  # fmt: skip
    assert offloaded_bytes(replace(layout, offload=True)) == pytest.approx(found, rel=0.07)
    sharded = replace(layout, zero=3, dp_shard=2, num_devices=2, global_batch=2)
    assert offloaded_bytes(layout) - offloaded_bytes(sharded) == 2 * shape.dense_params / layers


def test_memory_falls_by_what_is_kept_and_time_grows_by_the_copies() -> None:
    kept, moved = predict([LAYOUT, replace(LAYOUT, offload=True)])
    assert moved.memory["activations"] == 0 < kept.memory["activations"]
    # one block's are there while its backward pass runs
    block = LAYOUT.model.block_activation_bytes * 2 * 8192
    assert moved.memory["recomputed"] - kept.memory["recomputed"] == pytest.approx(block)
    assert (kept.host_bytes, kept.parts_s["offload"]) == (0, 0)
    assert moved.host_bytes == 32 * offloaded_bytes(LAYOUT)
    assert moved.parts_s["offload"] == pytest.approx(
        2 * 2 * moved.host_bytes / 64e9
    )  # out and back, of two micro-batches
    slower = replace(LAYOUT.device, host_bytes_per_s=32e9)
    assert predict([replace(LAYOUT, offload=True, device=slower)])[0].parts_s["offload"] == pytest.approx(
        2 * moved.parts_s["offload"]
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"recompute": "full"}, "offload with recompute full: it moves what a block keeps"),
        ({"compiled": True}, "offload with recompute none of a compiled model: "),
        ({"device": DEVICES["tpu-v5p"]}, "offload on tpu-v5p: no bandwidth between this device and its host is known"),
    ],
)
def test_what_no_run_could_move_is_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(LayoutError) as raised:
        replace(LAYOUT, offload=True, **changes)  # pyright: ignore[reportArgumentType]
    assert str(raised.value).startswith(reason)


def test_it_is_compared_where_it_fits_and_full_recompute_is_slower_or_does_not_fit() -> None:
    limit = memory_limit(JOB)
    layouts = Space(JOB).layouts
    needs = peak_memory(layouts).counted
    found, rule = with_offload(JOB, layouts, needs, limit)
    assert found
    assert rule == ""
    assert (peak_memory(found).counted <= limit).all()
    assert (peak_memory([replace(layout, offload=False) for layout in found]).counted > limit).all()
    full = [replace(layout, offload=False, recompute="full") for layout in found]
    for moved, again, of_full in zip(predict(found), predict(full), full, strict=True):
        assert moved.step_s < again.step_s or float(peak_memory([of_full]).counted[0]) > limit
    assert {(layout.recompute, layout.passes == "zbv") for layout in found} == {("none", False)}


def rule_of(job: Job) -> str:
    (rule,) = [rule for axis, value, rule in search(job).refused if (axis, value) == ("offload", True)]
    return rule


def test_families_without_it_have_a_rule() -> None:
    assert rule_of(replace(JOB, compiled=True)) == "compiled blocks choose for themselves what they keep"
    assert rule_of(replace(JOB, pins={"recompute": "full"})).startswith("recomputed blocks keep next to nothing")
    tpu = replace(JOB, device=DEVICES["tpu-v5p"], num_devices=256)
    assert rule_of(tpu).startswith("no bandwidth between the device and its host is known (host_gb_per_s")
    assert rule_of(replace(JOB, memory_bytes=10_000 * GIB)).startswith("each layout without recompute fits without it")
    slow = replace(JOB, pins={"pp": 1, "tp": 1, "cp": 1, "micro_batch": 1, "zero": 3}, device=DEVICES["h100"])
    assert rule_of(slow) == "copies over PCIe 5.0 x16 take longer than full recompute"
    fast = search(JOB)
    assert fast.best is not None
    assert fast.best.layout.offload  # the link of GH200 is seven times as fast
    assert "offload=true" in fast.best.axes_text


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_pin_is_kept(is_pinned: bool) -> None:
    found = search(replace(JOB, pins={"offload": is_pinned}))
    assert found.best is not None
    for candidate in (found.best, *found.pareto, *(each for _, _, each in found.changes)):
        assert candidate.layout.offload is is_pinned
    assert all(axis != "offload" for axis, _, _ in (*found.changes, *found.refused))


def test_more_memory_never_gives_a_slower_plan_and_other_memory_is_searched_anew() -> None:
    compared = compare(JOB)
    times: list[float] = []
    offloads: set[bool] = set()
    for gib in (40, 60, 80, 96, 130, 200, 400, 2000):
        other = replace(JOB, memory_bytes=gib * GIB)
        best = choose(other, compare(other)).best
        assert best == choose(other, with_other_memory(other, compared)).best
        if best is not None:
            times.append(best.step_s)
            offloads.add(best.layout.offload)
    assert len(times) >= 5
    assert times == sorted(times, reverse=True)
    assert offloads == {True, False}
