"""Counts of a step against shapes, and what must hold of any predicted step time."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from unisono.plan.pipeline_schedule import balance_stages
from unisono.planner.devices import DEVICES, find_device
from unisono.planner.layout import Layout, LayoutError
from unisono.planner.layout_columns import read_layout
from unisono.planner.model_presets import PRESETS, find_preset
from unisono.planner.model_shape import ModelShape
from unisono.planner.simulate import predict
from unisono.planner.stage_blocks import blocks_per_rank, blocks_per_stage
from unisono.planner.step_time import Constants, efficiencies, fitted_constants, step_time
from unisono.planner.step_work import count_work

LLAMA, DEEPSEEK = PRESETS["llama-3-70b"], PRESETS["deepseek-v3"]
# exposes everything, so that each part can be checked by hand
PLAIN = Constants(
    half_tokens=0, half_width=0, half_expert_tokens=0, half_expert_width=0, attention=1, lm_head=1, activation_passes=0,
    older_attention=0.5, first_attention=0.5, score_passes=1, eager_passes=2,
    tp_factor=1, tp_latency_s=0, ep_factor=1, dp_factor=1, fsdp_factor=1, hop_s=0, stages_per_rank=1, straggler_growth=0,
    efficiency={}, other_efficiency=0.5,
)  # fmt: skip


def layout(model: ModelShape = LLAMA, device: str = "h100", **changes: Any) -> Layout:
    plan: dict[str, Any] = {"num_devices": 64, "global_batch": 512, "seq_len": 8192, "precision": "bf16", **changes}
    return Layout(model=model, device=DEVICES[device], **plan)


def seconds(*layouts: Layout, constants: Constants = PLAIN) -> Any:
    return step_time(count_work(layouts), efficiencies(layouts, constants), constants)


@pytest.mark.parametrize("name", ["llama-3-70b", "deepseek-v3", "llama-4-maverick", "gpt3-175b"])
@pytest.mark.parametrize("axes", [{}, {"tp": 4}, {"pp": 8}, {"cp": 2}, {"tp": 2, "pp": 2, "ep": 4}], ids=str)
def test_ranks_together_compute_the_models_flops(name: str, axes: dict[str, int]) -> None:
    model = PRESETS[name]
    plan: dict[str, Any] = dict(axes if model.experts else {**axes, "ep": 1})
    job = layout(model, **plan)
    work = count_work([job])
    flops = work.matmul_flops + work.expert_flops + work.attention_flops + work.lm_head_flops
    whole = float(flops[0] * work.num_micro_batches[0]) * job.num_devices
    # published figures count attention over the whole square; causal attention computes half of it
    square = 6 * model.layers * model.score_dims * job.seq_len
    assert whole == pytest.approx(float(work.tokens_per_step[0]) * (model.flops_per_token(job.seq_len) - square))
    assert work.tokens_per_step[0] == job.global_batch * job.seq_len


def test_full_recompute_is_one_more_forward_pass_of_the_blocks() -> None:
    kept, again = (count_work([layout(recompute=how)]) for how in ("none", "full"))
    assert again.matmul_flops[0] == pytest.approx(4 / 3 * kept.matmul_flops[0])
    assert again.lm_head_flops[0] == kept.lm_head_flops[0]


def test_a_pipeline_waits_for_its_other_stages() -> None:
    """(p - 1) / (m v) of the time that a rank computes (arXiv 2104.04473, section 2.2.2)."""
    jobs = [layout(pp=8, num_devices=8, global_batch=32, stages_per_rank=v) for v in (1, 2)]
    found = seconds(*jobs)
    busy = found.matmul + found.attention + found.lm_head
    np.testing.assert_allclose(found.bubble / busy, [7 / 32, 7 / 64])


def test_collectives_take_their_bytes_over_the_bandwidth() -> None:
    job = layout(tp=8, num_devices=8, global_batch=1)
    found = seconds(job)
    all_bytes = 8 * LLAMA.layers * 2 * LLAMA.hidden * 8192 * 7 / 8
    assert found.tensor_parallel[0] == pytest.approx(all_bytes / 450e9)
    two = seconds(replace(job, tp=16, num_devices=16))  # leaves the domain of fast links
    assert two.tensor_parallel[0] == pytest.approx(all_bytes * (15 / 16) / (7 / 8) / 50e9)


def test_keys_and_values_of_other_ranks_hide_behind_attention() -> None:
    """Six passes over those of a rank's heads, from each other rank; a rank has 8,192 tokens and one of eight heads."""
    job = layout(cp=8, tp=8, num_devices=64, seq_len=65536, global_batch=1)
    bytes_sent = 6 * LLAMA.layers * 2 * LLAMA.head_dim * 8192 * 7
    assert count_work([job]).cp_s[0] == pytest.approx(bytes_sent / 50e9)
    found = seconds(job)
    assert found.context_parallel[0] < 0.1 * count_work([job]).cp_s[0]
    short = replace(job, seq_len=8192, micro_batch=8, global_batch=8)  # as many bytes, an eighth of the attention
    assert count_work([short]).cp_s[0] == pytest.approx(bytes_sent / 50e9)
    assert seconds(short).context_parallel[0] > found.context_parallel[0]


@pytest.mark.parametrize(
    ("model", "axes", "name", "more"),
    [
        (LLAMA, {"tp": 8}, "tp_s", 3 / 2),
        (LLAMA, {"tp": 8}, "tp_collectives", 3 / 2),
        (DEEPSEEK, {"ep": 8}, "ep_s", 3 / 2),
        (LLAMA, {"cp": 8}, "cp_s", 4 / 3),
    ],
)
def test_full_recompute_repeats_the_collectives_of_the_forward_pass(
    model: ModelShape, axes: dict[str, Any], name: str, more: float
) -> None:
    kept, again = (getattr(count_work([layout(model, recompute=how, **axes)]), name)[0] for how in ("none", "full"))
    assert again == pytest.approx(more * kept)
    assert kept > 0


def test_activations_of_experts_are_read_and_written_for_each_copy_of_a_token() -> None:
    """Copies of its tokens are what a model with experts keeps beyond a dense one with as many hidden units for a token."""
    small = PRESETS["qwen3-30b-a3b"]
    one_expert = replace(small, experts=0, experts_per_token=0, ffn=small.ffn * small.experts_per_token)
    experts, dense = (count_work([layout(model)]).activation_bytes[0] for model in (small, one_expert))
    copies = 2 * 2 * small.hidden * small.experts_per_token * small.layers * 8192
    assert experts - dense == pytest.approx(copies)


def test_parameters_that_are_sent_beside_the_computation_slow_it_down() -> None:
    """By as long as that takes over the links of a domain with a factor of 1, and by less of it within one."""
    inside, outside = (layout(num_devices=n, zero=3, dp_shard=n, micro_batch=8) for n in (8, 64))
    for job, part in ((inside, 0.7), (outside, 1.0)):
        work = count_work([job])
        sent = float(work.num_micro_batches[0]) * 3 * 2 * LLAMA.params / 450e9
        assert work.fsdp_link_s[0] * work.num_micro_batches[0] == pytest.approx(sent)
        assert part * sent < seconds(job).sharding[0] < (part + 0.1) * sent
    hidden = seconds(inside, constants=replace(PLAIN, fsdp_factor=0)).sharding[0]
    assert 0 < hidden < seconds(inside).sharding[0] / 10


def with_network(job: Layout, bytes_per_s: float) -> Layout:
    return replace(job, device=replace(job.device, network_bytes_per_s=bytes_per_s))


def test_a_slow_network_that_the_computation_hides_costs_no_more() -> None:
    """A device moves as many bytes. Where they take longer than a pass, the rest is waited for."""
    job = layout(num_devices=64, zero=3, dp_shard=64, micro_batch=8)
    fast, slow, slower = (with_network(job, bytes_per_s) for bytes_per_s in (50e9, 4e9, 2e8))
    quick, hidden, late = (float(seconds(each).sharding[0]) for each in (fast, slow, slower))
    sent, computing = (float(found[0]) for found in (count_work([slow]).fsdp_s, seconds(slow).matmul))
    assert 0.2 * computing < sent < 0.5 * computing  # so that the charge is not of next to nothing
    assert hidden == pytest.approx(quick, rel=0.1)
    passes = float((seconds(slower).total - seconds(slower).sharding - seconds(slower).optimizer)[0])
    waited = float(count_work([slower]).fsdp_s[0]) - passes
    assert late == pytest.approx(waited + float(count_work([job]).fsdp_link_s[0]), rel=0.1)


def test_collectives_beside_the_computation_slow_it_down_by_no_more_than_was_measured() -> None:
    """By 40 % (arXiv 2507.03114), whatever their bytes: a short sequence has few tokens for all of its parameters."""
    job = with_network(layout(num_devices=64, zero=3, dp_shard=64, global_batch=64, seq_len=512), 1e15)
    work, constants = count_work([job]), replace(PLAIN, fsdp_factor=10)
    found = seconds(job, constants=constants)
    passes = float((found.total - found.sharding - found.optimizer)[0])
    assert 10 * work.fsdp_link_s[0] > passes
    exposed = float(seconds(job, constants=replace(PLAIN, fsdp_factor=0)).sharding[0])
    assert found.sharding[0] == pytest.approx(0.4 * passes + exposed)


def test_gathers_of_the_forward_pass_do_not_hide_behind_the_backward_pass() -> None:
    """ZeRO 2 reduces beside the backward pass alone; ZeRO 3 gathers once beside the forward pass, a third of what it sends."""
    two, three = (layout(num_devices=64, zero=zero, dp_shard=64, global_batch=64) for zero in (2, 3))
    constants = replace(PLAIN, fsdp_factor=0)
    for job, ahead in ((two, 0), (three, 1 / 3)):
        found, sent = seconds(job, constants=constants), float(count_work([job]).fsdp_s[0])
        once = found.gradients + found.optimizer + found.sharding
        passes = float((found.total - once)[0])

        def waited(busy: float, other: float) -> float:
            return (busy**4 + other**4) ** 0.25 - busy

        both = waited(passes / 3, ahead * sent) + waited(2 * passes / 3, (1 - ahead) * sent)
        assert found.sharding[0] == pytest.approx(both)


@pytest.mark.parametrize("side", ["half_expert_tokens", "half_expert_width"])
def test_experts_need_larger_products_in_fewer_bits(side: str) -> None:
    """Twice the peak beside the same memory: a product reaches half of it where its sides are twice as long."""
    jobs = [layout(DEEPSEEK, ep=32, precision=precision) for precision in ("bf16", "fp8")]
    work = count_work(jobs)
    length = float(work.expert_tokens[0] if side == "half_expert_tokens" else work.expert_width[0])
    plain, (bf16, fp8) = seconds(*jobs).expert, seconds(*jobs, constants=replace(PLAIN, **{side: length})).expert
    assert bf16 == pytest.approx(2 * plain[0])
    assert fp8 == pytest.approx(3 * plain[1], rel=1e-3)


def test_older_kernels_of_attention_are_slower_on_newer_devices_alone() -> None:
    for device, times, first in (("h100", 2, 4), ("b200", 2, 4), ("a100-80", 1, 1), ("l40s", 1, 1)):
        new, second, old = (
            seconds(layout(device=device, attention_kernel=kernel)) for kernel in ("new", "flash-2", "flash-1")
        )
        assert second.attention[0] == pytest.approx(times * new.attention[0])
        assert old.attention[0] == pytest.approx(first * new.attention[0])
        assert old.matmul[0] == new.matmul[0]


@pytest.mark.parametrize(
    ("notes", "kernel", "fused"),
    [
        ("FSDP2; FlashAttention-2 or older", "flash-2", True),
        ("FSDP2 eager; FlashAttention-2", "flash-2", False),
        ("FlashAttention-2 or older; eager; FlashAttention-1 in Triton", "flash-1", False),
        ("stored scores", "stored", True),
        ("compile, eagerly awaited", "new", True),
    ],
)
def test_notes_say_which_kernels_a_run_has(notes: str, kernel: str, fused: bool) -> None:
    found = read_layout({"model": "llama-3-8b", "gpu_type": "H100", "gpus": "8", "notes": notes})
    assert (found.attention_kernel, found.fused) == (kernel, fused)


def test_stored_scores_are_computed_over_the_whole_square_and_pass_through_memory() -> None:
    new, stored = (layout(seq_len=2048, attention_kernel=kernel) for kernel in ("new", "stored"))
    fast, slow = count_work([new, stored]).attention_flops
    assert slow == pytest.approx(2 * fast)
    scores = LLAMA.layers * LLAMA.heads * 2048 * 2048  # of one sequence
    assert list(count_work([new, stored]).score_bytes) == pytest.approx([0, 2 * scores])
    spent = seconds(stored)
    assert spent.memory_bound[0] == pytest.approx(8 * 2 * scores / 3.35e12)  # of eight micro-batches
    # selective recompute repeats them, which kernels that store none do anyway
    again = count_work([replace(job, recompute="selective") for job in (new, stored)]).attention_flops
    assert list(again) == pytest.approx([fast, 4 / 3 * slow])


def test_operations_that_are_not_fused_pass_more_often_over_activations() -> None:
    constants = replace(PLAIN, activation_passes=3)
    fused, eager = (seconds(layout(fused=fused), constants=constants) for fused in (True, False))
    assert eager.memory_bound[0] == pytest.approx(2 * fused.memory_bound[0])
    assert eager.matmul[0] == fused.matmul[0]


def test_the_optimizer_reads_and_writes_the_states_of_a_rank_once_in_a_step() -> None:
    shared, whole = (layout(num_devices=8, zero=zero, global_batch=64, tp=1) for zero in (1, 0))
    for job, ranks in ((shared, 8), (whole, 1)):
        assert seconds(job).optimizer[0] == pytest.approx(30 * LLAMA.params / ranks / 3.35e12)


def test_blocks_that_are_recomputed_are_their_part_of_one_more_forward_pass() -> None:
    none, some = (
        count_work([layout(recompute=how, recomputed_blocks=blocks)])
        for how, blocks in (("none", ()), ("partial", (40,)))
    )
    assert some.matmul_flops[0] == pytest.approx((1 + 40 / 80 / 3) * none.matmul_flops[0])


def test_devices_of_an_architecture_differ_by_their_power() -> None:
    """Watts of data sheets over the peak: 1,400 W and 1,000 W beside 1,200 W, of 2.5, 2.25 and 2.5 PFLOP/s."""
    constants = replace(PLAIN, efficiency={"blackwell/fp8": 0.6})
    jobs = [layout(device=name, precision="fp8") for name in ("gb200", "gb300", "b200", "h100")]
    assert list(efficiencies(jobs, constants)) == pytest.approx(
        [0.6, 0.6 * 14 / 12, 0.6 * (1000 / 2250) / (1200 / 2500), 0.5]
    )
    assert efficiencies([jobs[1]], replace(constants, efficiency={"blackwell/fp8": 0.95}))[0] == 1


def test_a_device_without_published_runs_has_the_efficiency_of_its_architecture() -> None:
    constants = replace(PLAIN, efficiency={"hopper/16-bit": 0.7, "h100/16-bit": 0.75})
    jobs = [layout(device=name) for name in ("h100", "h200", "b200", "l40s")]
    assert list(efficiencies(jobs, constants)) == [0.75, 0.7, 0.5, 0.5]
    ranked = fitted_constants().efficiency
    assert {
        "ampere/16-bit",
        "hopper/16-bit",
        "hopper/fp8",
        "blackwell/16-bit",
        "blackwell/fp8",
        "blackwell/fp4",
    } <= set(ranked)
    assert not [key for key in ranked if key.startswith("/")]


def test_gradients_are_reduced_once_in_a_step() -> None:
    few, many = (seconds(layout(num_devices=8, global_batch=batch)) for batch in (8, 64))
    assert few.gradients[0] == many.gradients[0] == pytest.approx(6 * LLAMA.params / 450e9)
    assert many.matmul[0] == pytest.approx(8 * few.matmul[0])


def test_what_zero_stages_send_with_each_micro_batch_and_once() -> None:
    """Of each parameter. 0: the sum of gradients in 32 bits, sent twice. 1: reduced in 32 bits, gathered in 16. 2: reduced in 16
    bits with each micro-batch, gathered once. 3: gathered twice and reduced with each micro-batch.
    """
    params = LLAMA.params / 450e9
    work = count_work([layout(num_devices=8, zero=zero, dp_shard=8 if zero else 1) for zero in (0, 1, 2, 3)])
    assert list(work.gradient_s / params) == pytest.approx([8, 6, 2, 0])
    assert list(work.fsdp_s / params) == pytest.approx([0, 0, 2, 6])
    assert list(work.gradient_hops) == [14, 14, 7, 0]
    assert list(work.fsdp_hops) == [0, 0, 81 * 7, 3 * 81 * 7]
    # also where a pipeline divides the parameters
    piped = count_work([layout(num_devices=16, pp=2, zero=zero, dp_shard=8, global_batch=64) for zero in (2, 3)])
    assert list(piped.fsdp_s / params) == pytest.approx([1, 3])


def test_the_stage_with_the_most_work_decides() -> None:
    """A step takes as long as the rank with the most blocks, or the last one with its output matrix, does all of it."""
    equal = layout(pp=8, num_devices=8, global_batch=64, stages_per_rank=1, model=replace(LLAMA, layers=81))
    cut = replace(equal, cut="balanced")
    mean, found = seconds(equal), seconds(cut)
    assert mean.imbalance[0] == 0
    blocks = blocks_per_rank(cut)
    assert sum(blocks) == 81
    block = (mean.matmul + mean.attention)[0] * 8 / 81
    of_rank = [count * block for count in blocks]
    of_rank[-1] += mean.lm_head[0] * 8
    busy = (mean.matmul + mean.attention + mean.lm_head)[0]
    assert busy + found.imbalance[0] == pytest.approx(max(of_rank))
    assert found.total[0] == pytest.approx(mean.total[0] + found.imbalance[0])
    assert seconds(replace(cut, pp=1, num_devices=1)).imbalance[0] == 0


@given(st.integers(2, 12), st.integers(0, 40), st.integers(1, 1 << 21))
def test_cuts_are_those_of_runs(pp: int, more: int, vocab: int) -> None:
    model = replace(LLAMA, layers=pp + more, vocab=vocab)
    job = layout(model, pp=pp, num_devices=pp, stages_per_rank=1, cut="balanced")
    block = model.dense_params / model.layers + model.score_dims * job.seq_len
    head = vocab * model.hidden / block
    assert blocks_per_rank(job) == balance_stages([1.0] * model.layers, 0.0, head, pp)


def test_thousands_of_blocks_are_cut() -> None:
    model = replace(LLAMA, layers=1 << 16)
    blocks = blocks_per_rank(layout(model, pp=64, stages_per_rank=1, cut="balanced"))
    assert (sum(blocks), max(blocks), blocks[-1] < min(blocks[:-1])) == (1 << 16, 1025, True)


@given(st.sampled_from(sorted(PRESETS)), st.integers(1, 8), st.integers(1, 4))
def test_cuts_have_all_blocks_and_none_is_better(name: str, pp: int, stages: int) -> None:
    model = PRESETS[name]
    assume(pp * stages <= model.layers)
    job = layout(model, pp=pp, num_devices=pp, stages_per_rank=stages if pp > 1 else 0, cut="balanced")
    ranks, parts = blocks_per_rank(job), blocks_per_stage(job)
    assert sum(ranks) == sum(parts) == model.layers
    assert min(parts) >= 1
    assert [sum(parts[rank::pp]) for rank in range(pp)] == list(ranks)
    # any other number of blocks on the last rank leaves some rank with as much work or more
    work = count_work([job])
    per_block = float((work.matmul_flops + work.expert_flops + work.attention_flops)[0]) * pp / model.layers
    head, least = float(work.lm_head_flops[0]) * pp / per_block, max(1, job.stages_per_rank)
    most = [
        max(-(-(model.layers - last) // max(1, pp - 1)), last + head)
        for last in range(least, model.layers - (pp - 1) * least + 1)
        if pp > 1 or last == model.layers
    ]
    assert max(*ranks[:-1], ranks[-1] + head, 0) == pytest.approx(min(most))


def test_experts_see_the_tokens_of_all_ranks_that_share_them() -> None:
    alone, shared = count_work([layout(DEEPSEEK), layout(DEEPSEEK, ep=32)]).expert_tokens
    assert alone == pytest.approx(8192 * 8 / 256)
    assert shared == pytest.approx(32 * alone)


def test_replicas_sum_gradients_that_are_sharded_or_shared_along_the_context() -> None:
    whole, context, hybrid = count_work(
        [layout(num_devices=8), layout(num_devices=8, cp=8), layout(num_devices=64, zero=3, dp_shard=8)]
    ).gradient_s
    assert whole == context == pytest.approx(6 * LLAMA.params / 450e9)
    assert hybrid == pytest.approx(8 * LLAMA.params / 8 / (8 * 50e9))  # all cards of a host of eight
    gathered = count_work([layout(num_devices=64, zero=3, dp_shard=shard) for shard in (8, 64)]).fsdp_s
    assert gathered[0] == pytest.approx(3 * 2 * LLAMA.params / 450e9)
    assert gathered[1] == pytest.approx(3 * 2 * LLAMA.params / (8 * 50e9))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tp": 3}, "tp 3, pp 1, cp 1 on 64 devices: axes divide the devices"),
        ({"pp": 64, "stages_per_rank": 2, "model": LLAMA}, "pp 64 with 2 stages per rank: each stage has a layer"),
        ({"ep": 2}, "ep 2: it divides the model's 0 experts"),
        ({"ep": 128, "model": DEEPSEEK}, "ep 128: it divides the 64 ranks of a stage"),
        ({"dp_shard": 3}, "3 ranks that share states: they divide 64 data ranks"),
        ({"zero": 4}, "zero 4: the ZeRO stage is 0, 1, 2 or 3"),
        ({"zero": 0, "dp_shard": 8}, "zero 0 with 8 ranks that share states: with zero 0 none are shared"),
        ({"precision": "fp8", "device": "a100-80"}, "precision fp8: a100-80 does not compute it"),
        ({"global_batch": 32}, "a global batch of 32 sequences: each of 64 replicas has a micro-batch of 1"),
    ],
    ids=str,
)
def test_layouts_that_cannot_be_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(LayoutError) as raised:
        layout(**changes)
    assert str(raised.value).startswith(said)


def jobs() -> st.SearchStrategy[Layout]:
    """Layouts of any kind."""
    power = st.integers(0, 3).map(lambda exponent: 2**exponent)
    return st.builds(
        lambda model, device, tp, pp, cp, dp, ep, micro, batches, recompute: Layout(
            model=PRESETS[model],
            device=DEVICES[device],
            precision="bf16",
            num_devices=tp * pp * cp * dp * ep,
            tp=tp,
            pp=pp,
            cp=cp,
            ep=ep if PRESETS[model].experts and PRESETS[model].experts % ep == 0 else 1,
            micro_batch=micro,
            global_batch=micro * batches * dp * ep,
            seq_len=4096,
            recompute=recompute,
        ),
        st.sampled_from(sorted(PRESETS)),
        st.sampled_from(sorted(name for name in DEVICES if name != "v100")),
        *([power] * 6),
        st.integers(1, 64),
        st.sampled_from(["none", "full"]),
    )


@given(jobs())
def test_parts_add_up_and_none_is_negative(job: Layout) -> None:
    (found,) = predict([job])
    assert sum(found.parts_s.values()) == pytest.approx(found.step_s)
    assert min(found.parts_s.values()) >= 0
    assert 0 < found.utilization < 1
    assert found.tokens_per_s * found.step_s * job.num_devices == pytest.approx(job.global_batch * job.seq_len)


@given(jobs())
def test_what_is_slower_or_more_takes_longer(job: Layout) -> None:
    device = job.device
    slower = [
        replace(job, device=replace(device, memory_bytes_per_s=device.memory_bytes_per_s / 2)),
        replace(job, device=replace(device, link_bytes_per_s=device.link_bytes_per_s / 2)),
        replace(job, device=replace(device, network_bytes_per_s=device.network_bytes_per_s / 2)),
        replace(job, device=replace(device, tflops={name: flops / 2 for name, flops in device.tflops.items()})),
        replace(job, global_batch=2 * job.global_batch),
        replace(job, recompute="full"),
    ]
    first, *others = predict([job, *slower])
    assert all(other.step_s >= first.step_s * (1 - 1e-9) for other in others)


@given(st.lists(jobs(), min_size=2, max_size=4))
def test_layouts_do_not_change_each_other(several: list[Layout]) -> None:
    together = predict(several)
    for job, found in zip(several, together, strict=True):
        assert predict([job])[0].step_s == pytest.approx(found.step_s, rel=1e-12)


def test_every_constant_counts() -> None:
    """No constant of the cost model may be without effect."""
    varied = [
        layout(tp=8, pp=4, cp=2, zero=3, dp_shard=2, num_devices=512),
        layout(DEEPSEEK, ep=32, num_devices=512, precision="fp8"),
        layout(PRESETS["gpt2-124m"], device="l40s"),
        layout(attention_kernel="flash-1"),
        layout(attention_kernel="stored"),
        layout(fused=False),
    ]
    now = fitted_constants()
    for item in fields(Constants):
        value = getattr(now, item.name)
        if item.name == "efficiency":
            changed = {key: share / 2 for key, share in value.items()}
        else:
            changed = value / 2
        if item.name.startswith("spread"):
            continue  # of the interval, not of the time
        other = replace(now, **{item.name: changed})
        before, after = (seconds(*varied, constants=constants).total for constants in (now, other))
        assert not np.allclose(before, after, rtol=1e-9), item.name


# of the papers and model cards, in billions: parameters, and those of one token
KNOWN = {
    "llama-3-8b": (8.03, None),
    "llama-3-70b": (70.6, None),
    "llama-3-405b": (405.9, None),
    "mixtral-8x7b": (46.7, 12.9),
    "deepseek-v3": (671, 37),
    "kimi-k2": (1026, 32),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22),
    "gpt-oss-120b": (116.8, 5.1),
    "gpt-oss-20b": (20.9, 3.6),
    "llama-4-scout": (109, 17),
    "llama-4-maverick": (400, 17),
    "qwen2-57b-a14b": (57.4, 14.2),
    "olmo-2-32b": (32.2, None),
    "nemotron-4-340b": (341, None),
    "gpt3-175b": (174.6, None),
    "gpt-529.6b": (529.6, None),
    "gpt-1t": (1008, None),
    "bloom-176b": (176.2, None),
    "maxtext-1024b": (1000, None),
    "maxtext-22b": (22, None),
    "maxtext-52b": (52, None),
}


@pytest.mark.parametrize("name", KNOWN)
def test_presets_have_the_published_parameters(name: str) -> None:
    total, active = KNOWN[name]
    assert PRESETS[name].params / 1e9 == pytest.approx(total, rel=0.025)
    if active:
        assert PRESETS[name].active_params / 1e9 == pytest.approx(active, rel=0.08)


@pytest.mark.parametrize(
    ("written", "preset"),
    [
        ("LLAMA3.1_405B", "llama-3-405b"),
        ("llama3.1-70b SFT", "llama-3-70b"),
        ("llama3.2-1b", "llama-3.2-1b"),
        ("DeepSeekV3 (w/o MTP)", "deepseek-v3"),
        ("deepseek3-671b", "deepseek-v3"),
        ("Qwen3_30B_a3B", "qwen3-30b-a3b"),
        ("GPT OSS 120B", "gpt-oss-120b"),
    ],
)
def test_presets_are_found_however_they_are_written(written: str, preset: str) -> None:
    assert find_preset(written) is PRESETS[preset]


@pytest.mark.parametrize(
    ("written", "preset"),
    [
        ("A100-40GB", "a100-40"),
        ("A100-80GB (NDm v4)", "a100-80"),
        ("H100-96GB-HBM2e-500W", "h100-hbm2e"),
        ("GB300", "gb300"),
        ("TPU7x (Ironwood)", "tpu-v7x"),
        ("h100-pcie", "h100-pcie"),
    ],
)
def test_devices_are_found_however_they_are_written(written: str, preset: str) -> None:
    assert find_device(written) is DEVICES[preset]
    assert find_device("Abacus") is None


@pytest.mark.parametrize("written", ["h1000", "H1000-PCIe", "A1000-40GB", "14090"])
def test_a_longer_number_is_another_device(written: str) -> None:
    assert find_device(written) is None


def test_a_preset_that_is_not_there_is_none() -> None:
    assert find_preset("abacus-7b") is None
    assert find_preset("llama-3-8bb") is None
