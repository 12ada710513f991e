"""Memory of layouts against counts by hand, and its direction with each axis."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unisono.planner.devices import DEVICES
from unisono.planner.layout import Layout
from unisono.planner.model_presets import PRESETS
from unisono.planner.peak_memory import COMPILED_FACTOR, EAGER_FACTOR, MemoryParts, peak_memory

GIB = 2**30
ALONE = Layout(
    model=PRESETS["llama-3-8b"],
    device=DEVICES["b200"],
    precision="bf16",
    num_devices=8,
    dp_shard=8,
    micro_batch=2,
    global_batch=16,
    seq_len=8192,
)


def parts(layout: Layout) -> dict[str, float]:
    found = peak_memory([layout])
    return {name: float(getattr(found, name)[0]) for name in MemoryParts.__slots__}


def total(layout: Layout) -> float:
    return float(peak_memory([layout]).total[0])


def test_parts_by_hand() -> None:
    found = parts(ALONE)
    params = 8_029_995_008
    assert found["states"] == pytest.approx(16 * params / 8)
    hidden, kv, ffn, vocab, tokens = 4096, 1024, 14336, 128256, 2 * 8192
    block = 2 * (6 * hidden + 2 * kv) + 4 * 32 + 8 * ffn
    assert found["activations"] == pytest.approx(32 * block * tokens)
    assert found["recomputed"] == 0
    assert found["logits"] == 12 * vocab * tokens
    of_block = (params - 2 * vocab * hidden) / 32
    assert found["gathered"] == pytest.approx(2 * (3 * of_block + 2 * vocab * hidden))
    counted = sum(found.values()) - found["allocator"]
    assert found["allocator"] == pytest.approx(counted * (EAGER_FACTOR - 1))
    assert total(replace(ALONE, compiled=True)) == pytest.approx(counted * COMPILED_FACTOR)


def test_a_published_run() -> None:
    """torchtitan's Llama 3.1 8B on 8 and 128 H100 with PyTorch's selective checkpoint (its table of December 2024)."""
    selective = replace(ALONE, device=DEVICES["h100-hbm2e"], recompute="selective")
    for layout, gib in (
        (selective, 82.4),
        (replace(selective, compiled=True), 77.0),
        (replace(selective, num_devices=128, dp_shard=128, global_batch=256), 67.0),
    ):
        assert total(layout) / GIB == pytest.approx(gib, rel=0.02)


def test_the_allocator_reserves_no_more_than_the_device_has() -> None:
    near = replace(
        ALONE, device=DEVICES["h100-hbm2e"], recompute="selective", num_devices=4, dp_shard=4, global_batch=8
    )
    assert total(near) == 96 * GIB > float(peak_memory([near]).counted[0])
    over = replace(ALONE, device=DEVICES["h100"])
    assert parts(over)["allocator"] == 0
    assert total(over) > 80 * GIB


def test_recompute_keeps_less() -> None:
    none, selective, full = (total(replace(ALONE, recompute=kind)) for kind in ("none", "selective", "full"))
    assert full < selective < none


def test_tensor_and_context_parallelism_divide_activations() -> None:
    whole = parts(ALONE)["activations"]
    assert parts(replace(ALONE, tp=2, dp_shard=4))["activations"] == pytest.approx(whole / 2)
    assert parts(replace(ALONE, cp=2, dp_shard=4, global_batch=8))["activations"] == pytest.approx(whole / 2)


def test_the_first_stage_keeps_what_all_stages_have_in_flight() -> None:
    piped = replace(ALONE, dp_shard=1, pp=4, stages_per_rank=1, num_devices=8, micro_batch=1, global_batch=32)
    alone = parts(replace(ALONE, micro_batch=1))["activations"]
    assert parts(piped)["activations"] == pytest.approx(alone)  # a quarter of the layers, four micro-batches
    assert parts(replace(piped, global_batch=6))["activations"] == pytest.approx(
        alone * 3 / 4
    )  # three micro-batches in all
    assert parts(replace(piped, stages_per_rank=2))["activations"] == pytest.approx(alone * (1 + 3 / 8))
    last = replace(piped, recompute="full", model=replace(ALONE.model, layers=4))
    assert parts(last)["logits"] == 12 * 128256 * 8192  # with few layers the last stage needs most


def test_states_of_replicas_and_of_one_device() -> None:
    params = ALONE.model.params
    assert parts(replace(ALONE, dp_shard=1))["states"] == pytest.approx((6 + 12 / 8) * params)
    one = replace(ALONE, dp_shard=1, num_devices=1, global_batch=2)
    assert parts(one)["states"] == pytest.approx(8 * params)


def test_experts_are_divided_by_their_ranks() -> None:
    mixtral = replace(ALONE, model=PRESETS["mixtral-8x7b"], dp_shard=1, micro_batch=1, global_batch=8, seq_len=4096)
    model = mixtral.model
    experts = model.expert_layers * model.experts * model.expert_params
    fewer = parts(mixtral)["states"] - parts(replace(mixtral, ep=8))["states"]
    assert fewer == pytest.approx((6 + 12 / 8) * experts * 7 / 8)
