"""What a rank computes and moves in a step, counted from shapes. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from unisono.planner.layout import Layout, Numbers, columns, model_columns
from unisono.planner.stage_blocks import blocks_per_rank

# FlashAttention-2 has the instructions of Ampere (arXiv 2407.08608, section 1)
_AFTER_AMPERE: Final = ("hopper", "blackwell")
_BYTES: Final = 2  # of an activation and of a parameter that is sent
# forward and backward: a block's activations in collectives of tensor parallelism (Korthikanti et al. 2022, section 4.2.2),
# those of each copy of a token that goes to an expert and back, and keys and values of other ranks
_TP_PASSES, _EP_PASSES, _CP_PASSES = 8, 4, 6
_TP_FORWARD, _EP_FORWARD, _CP_FORWARD = 4, 2, 2  # those of the forward pass, which full recompute repeats
# forward and backward of causal attention that keeps its scores: products of the whole square, twice those of half of it, and
# bytes of each score in 16 bits
_STORED_PRODUCTS, _SCORE_BYTES = 2, 2
# of AdamW: it reads a gradient, a weight and two moments in 32 bits, and writes the latter three and a weight in 16
_OPTIMIZER_BYTES: Final = 30
# of a parameter: ranks that share optimizer states (ZeRO 1) reduce its gradient in 32 bits and gather it in 16, once in a step;
# those that share gradients (ZeRO 2) only gather it then; replicas sum its gradient in 32 bits, which is sent twice
_ONCE_BYTES: Final = (0, 6, 2, 0)
_SUM_BYTES: Final = 8
# passes over parameters with each micro-batch, in 16 bits: gradients are reduced; ZeRO 3 gathers for forward and backward too
_SHARED_PASSES: Final = (0, 0, 1, 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """Counts for many layouts, one element for each.

    FLOPs, bytes and seconds are those of one rank and one micro-batch, forward and backward. Those of blocks have
    what full recompute adds, and so have their collectives. Seconds are those of all bytes at the bandwidth of the data sheet.

    Attributes:
        tokens: Tokens of a micro-batch on a rank.
        layers: Blocks of a rank.
        matmul_flops: Products with matrices of attention and dense layers.
        matmul_width: Width of the smaller side of such a matrix on a rank. A layer with experts has those of attention and shared
            experts, which are taken to be no narrower than four experts.
        expert_flops: Products with matrices of experts.
        expert_tokens: Tokens of an expert.
        expert_width: Hidden units of an expert.
        attention_flops: Scores and weighted values, of causal attention; of the whole square where scores are stored.
        older_attention: 1 where its kernels are those of an older architecture than the device's, else 0.
        first_attention: 1 where they are those of FlashAttention's first version besides, else 0.
        score_bytes: Scores of attention that are stored; 0 where none are.
        lm_head_flops: Products with the output matrix, the mean over the pipeline ranks.
        most_blocks: Blocks of the pipeline rank that has most, without that of the output matrix; 0 if the cut is equal.
        last_blocks: Blocks of the pipeline rank that has the output matrix; 0 if the cut is equal.
        forward_share: Part of all passes that the forward pass takes.
        later_share: With the schedule zbv, the part of ``matmul_flops`` whose gradients of weights are computed later; else 0.
        activation_bytes: Activations that blocks keep.
        eager: 1 where operations on them are not fused, else 0.
        tp_s: Collectives of tensor parallelism.
        tp_collectives: Their number.
        ep_s: Exchange of tokens between experts.
        cp_s: Exchange of keys and values.
        fsdp_s: Gathering and reducing parameters and gradients that ranks share, with each micro-batch.
        fsdp_link_s: The same, were it within a domain of fast links.
        fsdp_forward: Part of it beside the forward pass.
        fsdp_hops: Steps of the rings that do it, from one rank to the next.
        fsdp_network: Whether these ranks are in several domains.
        gradient_s: Reduction of gradients and gathering of what the optimizer changed, once in a step.
        gradient_hops: Steps of the rings that do it.
        optimizer_bytes: What the optimizer reads and writes, once in a step.
        offload_s: What blocks keep, sent to the host and back.
        num_micro_batches: Micro-batches of a rank in a step.
        pp: Pipeline ranks.
        stages_per_rank: Stages of each rank of a pipeline; 0 if unknown.
        num_devices: Devices of the job.
        tokens_per_step: Tokens of all ranks.
        peak_flops: FLOP/s of the device in the precision of matrix products.
        peak_flops_16: FLOP/s in 16 bits.
        memory_bytes_per_s: Bandwidth of the device's memory.
    """

    tokens: Numbers
    layers: Numbers
    matmul_flops: Numbers
    matmul_width: Numbers
    expert_flops: Numbers
    expert_tokens: Numbers
    expert_width: Numbers
    attention_flops: Numbers
    older_attention: Numbers
    first_attention: Numbers
    score_bytes: Numbers
    lm_head_flops: Numbers
    most_blocks: Numbers
    last_blocks: Numbers
    forward_share: Numbers
    later_share: Numbers
    activation_bytes: Numbers
    eager: Numbers
    tp_s: Numbers
    tp_collectives: Numbers
    ep_s: Numbers
    cp_s: Numbers
    fsdp_s: Numbers
    fsdp_link_s: Numbers
    fsdp_forward: Numbers
    fsdp_hops: Numbers
    fsdp_network: Numbers
    gradient_hops: Numbers
    gradient_s: Numbers
    optimizer_bytes: Numbers
    offload_s: Numbers
    num_micro_batches: Numbers
    pp: Numbers
    stages_per_rank: Numbers
    num_devices: Numbers
    tokens_per_step: Numbers
    peak_flops: Numbers
    peak_flops_16: Numbers
    memory_bytes_per_s: Numbers


def count_work(layouts: Sequence[Layout]) -> StepWork:
    """The work of each of ``layouts``."""
    layers, hidden, heads, vocab, score_dims, kept = model_columns(
        layouts,
        lambda it: it.layers,
        lambda it: it.hidden,
        lambda it: it.heads,
        lambda it: it.vocab,
        lambda it: it.score_dims,
        lambda it: it.block_activation_bytes,
    )
    (kv_dims,) = columns(
        layouts,
        lambda it: it.model.kv_rank or it.model.kv_heads * it.model.head_dim / min(it.tp, it.model.kv_heads),
    )
    dense, expert, expert_layers, experts, active, units, all_params = model_columns(
        layouts,
        lambda it: it.dense_products,
        lambda it: it.expert_params,
        lambda it: it.expert_layers,
        lambda it: max(1, it.experts),
        lambda it: it.experts_per_token,
        lambda it: it.ffn,
        lambda it: it.params,
    )
    tp, pp, cp, ep, dp, shared, zero = columns(
        layouts,
        lambda it: it.tp,
        lambda it: it.pp,
        lambda it: it.cp,
        lambda it: it.ep,
        lambda it: it.dp,
        lambda it: it.state_ranks,
        lambda it: it.zero if it.state_ranks > 1 else 0,
    )
    link, network, domain, memory = columns(
        layouts,
        lambda it: it.device.link_bytes_per_s,
        lambda it: it.device.network_bytes_per_s,
        lambda it: it.device.domain,
        lambda it: it.device.memory_bytes_per_s,
    )
    micro, sequences, seq_len, devices, per_rank, recomputes, selects, older, first, stored, eager = columns(
        layouts,
        lambda it: it.num_micro_batches,
        lambda it: it.micro_batch,
        lambda it: it.seq_len,
        lambda it: it.num_devices,
        lambda it: it.stages_per_rank,
        lambda it: sum(it.recomputed_blocks) / it.model.layers if it.recomputed_blocks else it.recompute == "full",
        lambda it: it.recompute == "selective" and it.attention_kernel == "stored",
        lambda it: it.attention_kernel in ("flash-2", "flash-1") and it.device.architecture in _AFTER_AMPERE,
        lambda it: it.attention_kernel == "flash-1" and it.device.architecture in _AFTER_AMPERE,
        lambda it: it.attention_kernel == "stored",
        lambda it: not it.fused,
    )
    peak, peak_16 = columns(
        layouts,
        lambda it: it.device.peak_flops(it.precision) or 0,
        lambda it: it.device.peak_flops("bf16") or it.device.peak_flops("fp16") or 0,
    )
    tokens = sequences * seq_len / cp
    part = tokens / (tp * pp)  # of the work of all blocks
    recomputed = 1 + recomputes / 3  # one more forward pass, which is a third of both passes
    scored = recomputed + selects / 3  # selective recompute repeats stored scores (Korthikanti et al. 2022, section 5)
    block_bytes = _BYTES * hidden * tokens
    # activations in collectives of a micro-batch
    tp_passes, ep_passes, cp_passes = (
        every + forward * recomputes
        for every, forward in ((_TP_PASSES, _TP_FORWARD), (_EP_PASSES, _EP_FORWARD), (_CP_PASSES, _CP_FORWARD))
    )
    beyond = np.maximum(0, 1 - domain / (ep * tp))  # of the tokens that leave the domain of fast links
    routed = expert_layers / pp * active * block_bytes / tp
    params_per_rank = (all_params - expert_layers * experts * expert) / (tp * pp) + expert_layers * experts * expert / (
        tp * pp * ep
    )
    replicas = dp * cp / shared  # that sum their gradients once in a step
    once, passes = (np.take(np.array(each, float), zero.astype(int)) for each in (_ONCE_BYTES, _SHARED_PASSES))
    cuts = [blocks_per_rank(layout) if layout.cut != "equal" else (0.0,) * layout.pp for layout in layouts]
    head_ranks = [layout.head_rank for layout in layouts]
    forward_share = 1 / (3 + recomputes)

    def bandwidth(ranks: Numbers) -> Numbers:
        """Of a group of ranks; those in one domain each bring a part of the others' bytes over their own network card."""
        return np.where(ranks * tp <= domain, link, np.minimum(link, network * np.maximum(1, domain / tp)))

    return StepWork(
        tokens=tokens,
        layers=layers / pp,
        matmul_flops=6 * dense * part * recomputed,
        matmul_width=np.minimum(hidden, units * np.where(expert_layers > 0, 4, 1)) / tp,
        expert_flops=6 * expert_layers * active * expert * part * recomputed,
        expert_tokens=np.maximum(1, tokens * active * ep / experts),
        expert_width=units,
        attention_flops=6 * layers * score_dims * seq_len * part * scored * np.where(stored > 0, _STORED_PRODUCTS, 1),
        older_attention=older,
        first_attention=first,
        score_bytes=stored * _SCORE_BYTES * layers * heads * seq_len * part * scored,
        lm_head_flops=6 * vocab * hidden * part,
        most_blocks=np.array(
            [max((*cut[:head], *cut[head + 1 :]), default=0.0) for cut, head in zip(cuts, head_ranks, strict=True)]
        ),
        last_blocks=np.array([cut[head] for cut, head in zip(cuts, head_ranks, strict=True)]),
        forward_share=forward_share,
        later_share=forward_share * np.array([_delayed(layout) for layout in layouts]),
        activation_bytes=layers / pp * kept * tokens / tp * recomputed,
        eager=eager,
        tp_s=tp_passes * layers / pp * block_bytes * (tp - 1) / tp / np.where(tp <= domain, link, network),
        tp_collectives=tp_passes * layers / pp * (tp > 1),
        ep_s=ep_passes * routed * (ep - 1) / ep * ((1 - beyond) / link + beyond / network),
        cp_s=cp_passes
        * layers
        / pp
        * _BYTES
        * kv_dims
        * tokens
        * (cp - 1)
        / np.where(tp * cp <= domain, link, network),
        fsdp_s=passes * _BYTES * params_per_rank / bandwidth(shared),
        fsdp_link_s=passes * _BYTES * params_per_rank / link,
        fsdp_forward=np.where(zero == 3, 1 / _SHARED_PASSES[3], 0),
        # a ring for each block, and one for what lies outside of them
        fsdp_hops=passes * (layers / pp + 1) * (shared - 1),
        fsdp_network=(shared * tp > domain).astype(float),
        gradient_s=once * params_per_rank / bandwidth(shared)
        + (replicas > 1) * _SUM_BYTES * params_per_rank / shared / bandwidth(dp * cp),
        optimizer_bytes=_OPTIMIZER_BYTES * params_per_rank / shared,
        gradient_hops=(once > 0) * np.where(zero == 1, 2, 1) * (shared - 1) + 2 * (replicas - 1),
        offload_s=np.array(
            [2 * offloaded_bytes(it) / it.device.host_bytes_per_s if it.offload else 0 for it in layouts]
        )
        * layers
        / pp,
        num_micro_batches=micro,
        pp=pp,
        stages_per_rank=per_rank,
        num_devices=devices,
        tokens_per_step=dp * micro * sequences * seq_len,
        peak_flops=peak,
        peak_flops_16=peak_16,
        memory_bytes_per_s=memory,
    )


def offloaded_bytes(layout: Layout) -> float:
    """Bytes of a micro-batch that a block sends to the host with ``offload``: the mean over the blocks of a rank.

    Weights that no ranks share are converted to 16 bits in each pass, and those copies are sent too (``parallel.recompute``).
    """
    model, tokens = layout.model, layout.micro_batch * layout.seq_len / layout.cp / layout.tp
    experts = model.expert_layers * model.experts * model.expert_params / layout.ep
    weights = (model.dense_params + experts) / model.layers / layout.tp if layout.state_ranks == 1 else 0
    return model.block_offload_bytes * tokens + _BYTES * weights


def _delayed(layout: Layout) -> float:
    """Of the weights of attention and dense layers, the part whose gradients zbv computes later; 0 with another schedule.

    Row-wise layers of tensor parallelism compute theirs at once (``parallel.pipeline.weight_gradients``).
    """
    if layout.passes != "zbv" or layout.tp == 1 or layout.model.traced:
        return float(layout.passes == "zbv")
    model = layout.model
    units = model.shared_ffn * model.expert_layers + (model.dense_ffn or model.ffn) * (
        model.layers - model.expert_layers
    )
    row_wise = model.layers * model.heads * model.head_dim * model.hidden + units * model.hidden
    return 1 - row_wise / model.dense_params
