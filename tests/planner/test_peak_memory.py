"""Memory of layouts against counts by hand, and its direction with each axis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from unisono.planner.devices import DEVICES
from unisono.planner.layout import Layout
from unisono.planner.layout_columns import read_layout
from unisono.planner.model_presets import PRESETS
from unisono.planner.peak_memory import ALLOCATOR_FACTOR, MemoryParts, peak_memory, stage_memory
from unisono.planner.stage_blocks import blocks_per_rank, blocks_per_stage

GIB = 2**30
ALONE = Layout(
    model=PRESETS["llama-3-8b"],
    device=DEVICES["b200"],
    precision="bf16",
    num_devices=8,
    zero=3,
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
    assert found["allocator"] == pytest.approx(counted * (ALLOCATOR_FACTOR - 1))


def test_a_fused_loss_keeps_logits_in_16_bits_and_their_gradient() -> None:
    """And one in place keeps them and their softmax in 32 bits, which the gradient replaces."""
    found = [parts(replace(ALONE, loss=loss))["logits"] for loss in ("plain", "in place", "fused")]
    assert found == [each * 128256 * 2 * 8192 for each in (12, 8, 4)]
    row = {"model": "mpt-7b", "gpu_type": "H100", "gpus": "8"}
    notes = ("compile", "loss in place", "FULL_SHARD; fused loss")
    assert [read_layout({**row, "notes": each}).loss for each in notes] == ["plain", "in place", "fused"]


def test_the_input_of_the_output_matrix_is_gathered() -> None:
    split = replace(ALONE, tp=4, dp_shard=2)
    assert parts(split)["logits"] == (12 * 128256 / 4 + 2 * 4096 * 3 / 4) * 2 * 8192


def kept(**changes: Any) -> float:
    """Bytes of a token that a block keeps."""
    return parts(replace(ALONE, **changes))["activations"] / (32 * 2 * 8192)


def test_a_compiled_block_keeps_less() -> None:
    """It computes SiLU of the gate again; with selective recompute it keeps no output of the last product, which the backward
    pass does not need. Without a gate the activation is the input of a product."""
    hidden, key_value, units = 4096, 1024, 14336
    plain = 2 * (6 * hidden + 2 * key_value) + 4 * 32 + 8 * units
    assert (kept(), kept(compiled=True)) == (plain, plain - 2 * units)
    selective = 2 * (2 * hidden + 2 * hidden + key_value + units) + 4 * 32
    assert kept(recompute="selective") == selective
    assert kept(recompute="selective", compiled=True) == selective - 2 * hidden
    model = replace(ALONE.model, gated=False)
    assert kept(model=model, compiled=True) == kept(model=model)


@pytest.mark.parametrize(
    ("keeps", "more"),
    [
        ("norms in 32 bits", 2 * 4 * 4096),
        ("repeated keys", 2 * 2 * (4096 - 1024)),
        ("attention twice", 2 * 4096),
        ("gathered inputs", 0),
        ("repeated keys, attention twice", 2 * 2 * (4096 - 1024) + 2 * 4096),
    ],
)
def test_what_a_program_keeps_besides_is_said(keeps: str, more: int) -> None:
    row = {"model": "llama-3-8b", "gpu_type": "B200", "gpus": "8", "fsdp": "8", "micro_batch": "2", "keeps": keeps}
    said = read_layout(row).keeps
    assert said == tuple(keeps.split(", "))
    assert kept(keeps=said) - kept() == more
    # a block that is recomputed has it while its backward pass runs, and keeps its input alone
    full, other = (parts(replace(ALONE, recompute="full", keeps=each)) for each in (said, ()))
    assert full["activations"] == other["activations"]
    assert full["recomputed"] - other["recomputed"] == more * 2 * 8192


def test_selective_recompute_may_keep_the_results_of_all_products() -> None:
    """Those of row-wise layers are not divided by tensor parallelism; without recompute it says nothing."""
    row = {"model": "llama-3-8b", "gpu_type": "B200", "gpus": "8", "fsdp": "8", "micro_batch": "2"}
    row |= {"keeps": "all products", "recompute": "selective"}
    for tp in (1, 4):
        layout = read_layout(row | {"tp": str(tp), "fsdp": str(8 // tp)})
        kept_bytes = 4 * 4096 + 2 * (2 * 4096 + 2 * 1024 + 2 * 4096 * tp + 2 * 14336) + 4 * 32
        assert parts(layout)["activations"] == 32 * kept_bytes * 2 * layout.seq_len / tp
        plain = replace(layout, recompute="none")
        assert parts(plain) == parts(replace(plain, keeps=()))


def test_what_is_kept_depends_on_the_layout() -> None:
    """Inputs are gathered by tensor parallelism alone, and were there while a block was used; one sequence has one order; a
    compiler fuses norms."""
    split = replace(ALONE, tp=4, dp_shard=2)
    without, gathered = (parts(replace(split, keeps=keeps)) for keeps in ((), ("gathered inputs",)))
    more = 2 * 2 * 4096 * 3 / 4 * 2 * 8192
    assert gathered["activations"] - without["activations"] == 32 * more
    assert without["recomputed"] - gathered["recomputed"] == more
    single = replace(ALONE, micro_batch=1)
    assert parts(replace(single, keeps=("attention twice",))) == parts(single)
    compiled = replace(ALONE, compiled=True)
    assert parts(replace(compiled, keeps=("norms in 32 bits",))) == parts(compiled)


def test_a_rank_may_have_the_output_matrix_and_no_block() -> None:
    row = {"model": "llama-3-8b", "gpu_type": "H100", "gpus": "4", "pp": "4", "notes": "VP=1", "micro_batch": "1"}
    layout = read_layout(row | {"layers_per_stage": "12, 11,9,0"})
    assert (layout.cut, layout.layers_per_stage, blocks_per_rank(layout)) == ("given", (12, 11, 9, 0), (12, 11, 9, 0))
    found = stage_memory(layout)
    assert [stage.blocks for stage in found.values()] == [12, 11, 0]
    again = stage_memory(replace(layout, recompute="full"))["last"]
    assert (found["last"].activations, again.activations, again.recomputed) == (0, 0, 0)
    assert found["last"].states == 18 * 128256 * 4096
    sharded = read_layout(row | {"gpus": "8", "fsdp": "2", "layers_per_stage": "12,11,9,0"})
    assert 0 < stage_memory(sharded)["last"].gathered < float("inf")


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
    piped = replace(ALONE, zero=1, dp_shard=2, pp=4, stages_per_rank=1, num_devices=8, micro_batch=1, global_batch=32)
    alone = parts(replace(ALONE, micro_batch=1))["activations"]
    assert parts(piped)["activations"] == pytest.approx(alone)  # a quarter of the layers, four micro-batches
    assert parts(replace(piped, global_batch=6))["activations"] == pytest.approx(
        alone * 3 / 4
    )  # three micro-batches in all
    assert parts(replace(piped, stages_per_rank=2))["activations"] == pytest.approx(alone * (1 + 3 / 8))
    last = replace(piped, recompute="full", model=replace(ALONE.model, layers=4))
    assert parts(last)["logits"] == 12 * 128256 * 8192  # with few layers the last stage needs most


@pytest.mark.parametrize(("zero", "of_each"), [(0, 18), (1, 6 + 12 / 8), (2, 2 + 16 / 8), (3, 16 / 8)])
def test_states_of_each_zero_stage(zero: int, of_each: float) -> None:
    """Bytes of a parameter with gradients in 32 bits: those of the ZeRO paper (arXiv 1910.02054), and Megatron's 6 + 12 / d."""
    params = ALONE.model.params
    layout = replace(ALONE, zero=zero, dp_shard=8 if zero else 1)
    assert parts(layout)["states"] == pytest.approx(of_each * params)
    piped = replace(layout, num_devices=16, pp=2, global_batch=64, micro_batch=1, model=replace(ALONE.model, layers=64))
    outer = ALONE.model.vocab * ALONE.model.hidden
    assert stage_memory(piped)["first"].states == pytest.approx(of_each * (ALONE.model.dense_params + outer))


def test_what_is_gathered_for_each_zero_stage() -> None:
    """Parameters of two blocks and gradients of one with ZeRO 3, gradients of one with ZeRO 2, none with ZeRO 1."""
    params, outer = ALONE.model.params, 2 * ALONE.model.vocab * ALONE.model.hidden
    block = (params - outer) / 32
    found = [parts(replace(ALONE, zero=zero))["gathered"] for zero in (1, 2, 3)]
    assert found == pytest.approx([0, 2 * (block + outer), 2 * (3 * block + outer)])


def test_states_of_one_device() -> None:
    one = replace(ALONE, dp_shard=0, zero=1, num_devices=1, global_batch=2)
    assert parts(one)["states"] == pytest.approx(18 * ALONE.model.params)
    assert parts(replace(one, states_in_16_bits=True))["states"] == pytest.approx(8 * ALONE.model.params)


@pytest.mark.parametrize(("zero", "bytes_per_param"), [(0, 8), (1, 4 + 4 / 8), (2, 2 + 6 / 8), (3, 8 / 8)])
def test_states_in_16_bits_are_shared_by_the_stage(zero: int, bytes_per_param: float) -> None:
    narrow = replace(ALONE, zero=zero, dp_shard=8 if zero else 0, states_in_16_bits=True)
    assert parts(narrow)["states"] == pytest.approx(bytes_per_param * ALONE.model.params)


def test_experts_are_divided_by_their_ranks() -> None:
    """Ranks that share experts are among those that share states: with all of them, no rank is left to share an expert's."""
    mixtral = replace(ALONE, model=PRESETS["mixtral-8x7b"], zero=1, micro_batch=1, global_batch=8, seq_len=4096)
    model = mixtral.model
    experts = model.expert_layers * model.experts * model.expert_params
    fewer = parts(mixtral)["states"] - parts(replace(mixtral, ep=8))["states"]
    assert fewer == pytest.approx((6 + 12 / 8) * experts - 18 * experts / 8)
    sharded = replace(mixtral, zero=3)
    assert parts(sharded)["states"] == pytest.approx(parts(replace(sharded, ep=4))["states"])


def test_each_stage_of_a_pipeline_has_its_own_memory() -> None:
    """The first stage has the embedding and most micro-batches, the last the output matrix, its logits and fewer blocks."""
    layout = Layout(
        model=PRESETS["llama-3-405b"],
        device=DEVICES["h100"],
        precision="bf16",
        num_devices=64,
        tp=8,
        pp=8,
        stages_per_rank=1,
        cut="balanced",
        micro_batch=1,
        global_batch=32,
        seq_len=8192,
    )
    found = stage_memory(layout)
    blocks = blocks_per_rank(layout)
    assert sum(blocks) == 126
    assert list(found) == ["first", "middle", "last"]
    first, middle, last = found.values()
    assert (first.rank, last.rank) == (0, 7)
    assert [stage.blocks for stage in (first, middle, last)] == [blocks[0], blocks[middle.rank], blocks[7]]
    of_micro_batch = first.activations / blocks[0] / 8
    assert middle.activations == pytest.approx(of_micro_batch * blocks[middle.rank] * (8 - middle.rank))
    assert last.activations == pytest.approx(of_micro_batch * blocks[7])
    assert first.logits == middle.logits == 0 < last.logits
    matrix = 18 * 128256 * 16384 / 8
    assert first.states / blocks[0] * blocks[middle.rank] - middle.states == pytest.approx(
        matrix * blocks[middle.rank] / blocks[0]
    )
    assert float(peak_memory([layout]).counted[0]) == max(stage.counted for stage in found.values())


def test_the_output_matrix_of_a_v_is_on_the_first_rank() -> None:
    """It has the embedding too, which is counted once where both are one, and fewer blocks than the others."""
    layout = Layout(
        model=PRESETS["llama-3-8b"],
        device=DEVICES["h100"],
        precision="bf16",
        num_devices=4,
        pp=4,
        stages_per_rank=2,
        schedule="zbv",
        cut="balanced",
        micro_batch=1,
        global_batch=16,
        seq_len=8192,
    )
    assert (layout.head_rank, replace(layout, schedule=None).head_rank) == (0, 3)
    blocks = blocks_per_rank(layout)
    assert (sum(blocks), min(blocks)) == (32, blocks[0])
    assert blocks_per_stage(layout) == (3, 4, 5, 5, 4, 4, 4, 3)
    found = stage_memory(layout)
    assert found["first"].logits > 0 == found["last"].logits
    tied = stage_memory(replace(layout, model=replace(layout.model, tied=True)))
    assert found["first"].states - tied["first"].states == pytest.approx(18 * 128256 * 4096)
    # gradients of weights wait with what was recomputed
    again = stage_memory(replace(layout, recompute="full"))
    assert again["last"].activations == found["last"].activations
