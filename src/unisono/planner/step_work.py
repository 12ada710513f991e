"""What a rank computes and moves in a step, counted from shapes. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from unisono.planner.layout import Layout, Numbers, columns

_BYTES: Final = 2  # of an activation and of a parameter that is sent
# forward and backward: a block's activations in collectives of tensor parallelism (Korthikanti et al. 2022, section 4.2.2),
# those of each copy of a token that goes to an expert and back, and keys and values of other ranks
TP_PASSES, _EP_PASSES, _CP_PASSES = 8, 4, 6
_GRADIENT_BYTES: Final = 6  # for each parameter: reduced in 32 bits, gathered in 16
_FSDP_PASSES: Final = 3  # gathered for forward and backward, reduced


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """Counts for many layouts, one element for each.

    FLOPs, bytes and seconds are those of one rank and one micro-batch, forward and backward, with what is recomputed. Seconds
    are those of all bytes at the bandwidth of the data sheet.

    Attributes:
        tokens: Tokens of a micro-batch on a rank.
        layers: Blocks of a rank.
        matmul_flops: Products with matrices of attention and dense layers.
        matmul_width: Width of the smaller side of such a matrix on a rank. A layer with experts has those of attention and shared
            experts, which are taken to be no narrower than four experts.
        expert_flops: Products with matrices of experts.
        expert_tokens: Tokens of an expert.
        expert_width: Hidden units of an expert.
        attention_flops: Scores and weighted values, of causal attention.
        lm_head_flops: Products with the output matrix, shared by all stages.
        activation_bytes: Activations between the blocks.
        tp_s: Collectives of tensor parallelism.
        ep_s: Exchange of tokens between experts.
        cp_s: Exchange of keys and values.
        fsdp_s: Gathering and reducing sharded parameters.
        fsdp_hops: Steps of the rings that do it, from one rank to the next.
        gradient_s: Reduction of gradients, once in a step.
        gradient_hops: Steps of the ring that does it.
        num_micro_batches: Micro-batches of a rank in a step.
        stages: Ranks of a pipeline.
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
    lm_head_flops: Numbers
    activation_bytes: Numbers
    tp_s: Numbers
    ep_s: Numbers
    cp_s: Numbers
    fsdp_s: Numbers
    fsdp_hops: Numbers
    gradient_hops: Numbers
    gradient_s: Numbers
    num_micro_batches: Numbers
    stages: Numbers
    stages_per_rank: Numbers
    num_devices: Numbers
    tokens_per_step: Numbers
    peak_flops: Numbers
    peak_flops_16: Numbers
    memory_bytes_per_s: Numbers


def count_work(layouts: Sequence[Layout]) -> StepWork:
    """The work of each of ``layouts``."""
    layers, hidden, vocab, score_dims, kv_dims = columns(
        layouts,
        lambda it: it.model.layers,
        lambda it: it.model.hidden,
        lambda it: it.model.vocab,
        lambda it: it.model.score_dims,
        lambda it: it.model.kv_rank or it.model.kv_heads * it.model.head_dim / min(it.tp, it.model.kv_heads),
    )
    dense, expert, expert_layers, experts, active, units, all_params = columns(
        layouts,
        lambda it: it.model.dense_params,
        lambda it: it.model.expert_params,
        lambda it: it.model.expert_layers,
        lambda it: max(1, it.model.experts),
        lambda it: it.model.experts_per_token,
        lambda it: it.model.ffn,
        lambda it: it.model.params,
    )
    tp, pp, cp, ep, dp, shard = columns(
        layouts,
        lambda it: it.tp,
        lambda it: it.pp,
        lambda it: it.cp,
        lambda it: it.ep,
        lambda it: it.dp,
        lambda it: it.dp_shard,
    )
    link, network, domain, memory = columns(
        layouts,
        lambda it: it.device.link_bytes_per_s,
        lambda it: it.device.network_bytes_per_s,
        lambda it: it.device.domain,
        lambda it: it.device.memory_bytes_per_s,
    )
    micro, sequences, seq_len, devices, per_rank, recomputes = columns(
        layouts,
        lambda it: it.num_micro_batches,
        lambda it: it.micro_batch,
        lambda it: it.seq_len,
        lambda it: it.num_devices,
        lambda it: it.stages_per_rank,
        lambda it: it.recompute == "full",
    )
    peak, peak_16 = columns(
        layouts,
        lambda it: it.device.peak_flops(it.precision) or 0,
        lambda it: it.device.peak_flops("bf16") or it.device.peak_flops("fp16") or 0,
    )
    tokens = sequences * seq_len / cp
    part = tokens / (tp * pp)  # of the work of all blocks
    recomputed = 1 + recomputes / 3  # one more forward pass, which is a third of both passes
    block_bytes = _BYTES * hidden * tokens
    beyond = np.maximum(0, 1 - domain / (ep * tp))  # of the tokens that leave the domain of fast links
    routed = expert_layers / pp * active * block_bytes / tp
    params_per_rank = (all_params - expert_layers * experts * expert) / (tp * pp) + expert_layers * experts * expert / (
        tp * pp * ep
    )
    gathers = shard > 1  # the parameters, with each micro-batch
    replicas = np.where(gathers, dp * cp / shard, dp * cp)  # that sum their gradients once in a step
    summed = params_per_rank / np.where(gathers, shard, 1)

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
        attention_flops=6 * layers * score_dims * seq_len * part * recomputed,
        lm_head_flops=6 * vocab * hidden * part,
        activation_bytes=layers / pp * block_bytes / tp * recomputed,
        tp_s=TP_PASSES * layers / pp * block_bytes * (tp - 1) / tp / np.where(tp <= domain, link, network),
        ep_s=_EP_PASSES * routed * (ep - 1) / ep * ((1 - beyond) / link + beyond / network),
        cp_s=_CP_PASSES
        * layers
        / pp
        * _BYTES
        * kv_dims
        * tokens
        * (cp - 1)
        / np.where(tp * cp <= domain, link, network),
        fsdp_s=np.where(gathers, _FSDP_PASSES * _BYTES * params_per_rank / bandwidth(shard), 0),
        # a ring for each block, and one for what lies outside of them
        fsdp_hops=np.where(gathers, _FSDP_PASSES * (layers / pp + 1) * (shard - 1), 0),
        gradient_s=np.where(replicas > 1, _GRADIENT_BYTES * summed / bandwidth(dp * cp), 0),
        gradient_hops=2 * (replicas - 1),
        num_micro_batches=micro,
        stages=pp,
        stages_per_rank=per_rank,
        num_devices=devices,
        tokens_per_step=dp * micro * sequences * seq_len,
        peak_flops=peak,
        peak_flops_16=peak_16,
        memory_bytes_per_s=memory,
    )
