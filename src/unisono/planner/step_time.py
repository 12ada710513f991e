"""Step time of a layout: what its device computes, moves and waits for. Imports no torch.

Constants that data sheets do not have are fitted to published runs (``benchmarks/planner``); ``step_time.json`` holds them. All
functions work on many layouts at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

import msgspec
import numpy as np

from unisono.planner.layout import Layout, Numbers
from unisono.planner.step_work import StepWork

# of what sharded parameters cost beside the computation: between devices of a domain, over that between domains
_IN_DOMAIN: Final = 0.7
# most that collectives beside it slow a computation down: the largest slowdown measured on A100, H100, MI210 and MI250 (arXiv
# 2507.03114, abstract)
_MOST_SLOWED: Final = 0.4
# share of the peak that products of stored scores reach, whose inner side is a head
_STORED_ATTENTION: Final = 0.5
_OVERLAP: Final = 4  # 1: one after the other; infinite: the longer one alone


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """Constants that were fitted to published runs.

    Attributes:
        half_tokens: Tokens of a micro-batch at which matrix products reach half of their efficiency.
        half_width: Width of the smaller side of a matrix on one rank, at which they do.
        half_expert_tokens: The same for the tokens of one expert in 16 bits; in fewer bits it is in proportion to the peak.
        half_expert_width: The same for the hidden units of an expert.
        attention: Speed of attention over that of other matrix products in 16 bits, causal products counted.
        older_attention: The part of this speed that kernels of an older architecture reach.
        first_attention: The part of that again that its first version reaches (arXiv 2307.08691).
        score_passes: Passes over scores of attention that are stored.
        lm_head: Efficiency of the output matrix, as a multiple of that of other products in 16 bits.
        activation_passes: Passes over the activations that a block keeps, by operations that are bound by memory.
        eager_passes: Times as many, where these are not fused.
        tp_factor: What tensor-parallel communication adds to a step, over its bytes at the bandwidth of the data sheet.
        tp_latency_s: Seconds of a tensor-parallel collective, without its bytes.
        ep_factor: The same for experts.
        dp_factor: The same for the reduction of gradients.
        fsdp_factor: By how much parameters that ranks share slow the computation down, beside which they are sent: over their
            bytes at the bandwidth of the domain's links, as the device has to move them whatever the network is. Within a
            domain a part of it. Where the network takes longer than the computation, the rest is added too.
        hop_s: Seconds from one rank of a ring to the next, without the bytes.
        stages_per_rank: Of a pipeline whose runs do not say it.
        straggler_growth: Part by which a step slows down with each doubling of the devices beyond 8.
        efficiency: Share of the peak that large matrix products reach, by device and width, and by architecture and width.
        other_efficiency: The same where neither is listed.
        spread: Of dense models, from sources that no constant was fitted to: nine of ten step times lay between the prediction
            divided and multiplied by 1 + ``spread``.
        spread_experts: The same of models with experts.
    """

    half_tokens: float
    half_width: float
    half_expert_tokens: float
    half_expert_width: float
    attention: float
    older_attention: float
    first_attention: float
    score_passes: float
    lm_head: float
    activation_passes: float
    eager_passes: float
    tp_factor: float
    tp_latency_s: float
    ep_factor: float
    dp_factor: float
    fsdp_factor: float
    hop_s: float
    stages_per_rank: float
    straggler_growth: float
    efficiency: Mapping[str, float]
    other_efficiency: float
    spread: float = 0.0
    spread_experts: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """Seconds of a step, one element for each layout: means over the pipeline ranks. The parts add up to ``total``.

    Attributes:
        matmul: Matrix products of attention and dense layers.
        expert: Those of experts.
        attention: Scores and weighted values.
        lm_head: The output matrix.
        memory_bound: Operations that are bound by memory.
        tensor_parallel: Collectives between tensor-parallel ranks.
        expert_parallel: Exchange of tokens between experts.
        context_parallel: Exchange of keys and values.
        imbalance: Waiting for the pipeline rank with the most work, which may be that of the output matrix.
        offload: Sending what blocks keep to the host and back.
        bubble: Waiting for the first and the last micro-batches in other pipeline stages.
        sharding: Gathering and reducing sharded parameters.
        gradients: Reduction of gradients.
        optimizer: The optimizer's own reading and writing.
        stragglers: Waiting for the slowest of many.
    """

    matmul: Numbers
    expert: Numbers
    attention: Numbers
    lm_head: Numbers
    memory_bound: Numbers
    tensor_parallel: Numbers
    expert_parallel: Numbers
    context_parallel: Numbers
    offload: Numbers
    imbalance: Numbers
    bubble: Numbers
    sharding: Numbers
    gradients: Numbers
    optimizer: Numbers
    stragglers: Numbers

    @property
    def total(self) -> Numbers:
        """The whole step."""
        parts: tuple[Numbers, ...] = tuple(getattr(self, name) for name in self.__slots__)
        return np.sum(parts, axis=0)


@cache
def fitted_constants() -> Constants:
    """The constants that ship with this version."""
    text = files("unisono.planner").joinpath("step_time.json").read_bytes()
    return msgspec.json.decode(text, type=Constants)


def efficiency_key(layout: Layout) -> str:
    """The key of ``Constants.efficiency`` of a layout's device."""
    return efficiency_keys(layout)[0]


def efficiency_keys(layout: Layout) -> tuple[str, ...]:
    """Keys of ``Constants.efficiency``, the first choice first: the device, and its architecture if it is known."""
    width = layout.precision if layout.precision in ("fp8", "fp4") else "16-bit"
    return tuple(f"{name}/{width}" for name in (layout.device.name, layout.device.architecture) if name)


def efficiencies(layouts: Sequence[Layout], fitted: Constants) -> Numbers:
    """Share of the peak that large products reach [layouts]: measured on the layout's device, else ``Constants.efficiency``.

    That of an architecture is that of its first device; others have it in proportion to their power.
    """

    def of(layout: Layout) -> float:
        own, *shared = efficiency_keys(layout)
        if layout.device.efficiency:
            return layout.device.efficiency
        if own in fitted.efficiency:
            return fitted.efficiency[own]
        if shared and shared[0] in fitted.efficiency:
            return min(1.0, fitted.efficiency[shared[0]] * layout.device.power_share)
        return fitted.other_efficiency

    return np.array([of(layout) for layout in layouts])


def step_time(work: StepWork, efficiency: Numbers, fitted: Constants) -> StepParts:
    """Step times of the layouts that ``work`` was counted for; ``efficiency`` is that of each layout."""
    at_tokens = work.tokens / (work.tokens + fitted.half_tokens)
    at_width = work.matmul_width / (work.matmul_width + fitted.half_width)
    # small products wait for memory, so they must grow with the peak over its bandwidth to reach as much of that peak (the
    # roofline, Williams et al. 2009); in fewer bits a device has a higher peak and the same memory
    ridge = work.peak_flops / work.peak_flops_16
    at_expert_tokens = work.expert_tokens / (work.expert_tokens + ridge * fitted.half_expert_tokens)
    at_expert_width = work.expert_width / (work.expert_width + ridge * fitted.half_expert_width)
    matmul = work.peak_flops * efficiency
    # products in fewer bits reach less of their peak than those in 16 bits on the same device
    matmul_16 = work.peak_flops_16 * np.minimum(1.3 * efficiency, 0.85)
    attention = fitted.attention * np.where(work.older_attention > 0, fitted.older_attention, 1)
    attention *= np.where(work.first_attention > 0, fitted.first_attention, 1)
    attention = np.where(work.score_bytes > 0, _STORED_ATTENTION, attention)
    passes = fitted.activation_passes * np.where(work.eager > 0, fitted.eager_passes, 1)
    each = {  # of one micro-batch
        "matmul": work.matmul_flops / (matmul * at_tokens * at_width),
        "expert": work.expert_flops / (matmul * at_expert_tokens * at_expert_width),
        "attention": work.attention_flops / (matmul_16 * attention),
        "lm_head": work.lm_head_flops / (matmul_16 * fitted.lm_head * at_tokens),
        "memory_bound": (passes * work.activation_bytes + fitted.score_passes * work.score_bytes)
        / work.memory_bytes_per_s,
        "tensor_parallel": fitted.tp_factor * work.tp_s + fitted.tp_latency_s * work.tp_collectives,
        "expert_parallel": fitted.ep_factor * work.ep_s,
    }
    each["offload"] = work.offload_s  # copies run in the stream of the passes, not beside them
    # keys and values are sent while those before them are used (ring attention, arXiv 2310.01889)
    each["context_parallel"] = _exposed(each["attention"], work.cp_s)
    device = np.sum(tuple(each.values()), axis=0)
    each["sharding"] = _sharding(work, device, fitted)
    parts = {name: seconds * work.num_micro_batches for name, seconds in each.items()}
    busy = np.sum(tuple(parts.values()), axis=0)
    chunks = np.where(work.stages_per_rank > 0, work.stages_per_rank, fitted.stages_per_rank)
    # (p - 1) / (m v) of the busy time: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.2
    parts["bubble"] = busy * (work.pp - 1) / (work.num_micro_batches * chunks)
    late = _bubble_of_zbv(work, device + each["sharding"], each["matmul"])
    parts["bubble"] = np.where(work.later_share > 0, late, parts["bubble"])
    head = each["lm_head"] * work.pp  # the last rank has all of it; ``each`` are means over the pipeline ranks
    block = np.sum(tuple(seconds for name, seconds in each.items() if name != "lm_head"), axis=0) / work.layers
    slowest = np.maximum(work.most_blocks * block, work.last_blocks * block + head)
    parts["imbalance"] = np.maximum(0, slowest * work.num_micro_batches - busy) * (work.most_blocks > 0) * (work.pp > 1)
    parts["gradients"] = fitted.dp_factor * (work.gradient_s + fitted.hop_s * work.gradient_hops)
    parts["optimizer"] = work.optimizer_bytes / work.memory_bytes_per_s
    alone = np.sum(tuple(parts.values()), axis=0)
    parts["stragglers"] = alone * fitted.straggler_growth * np.log2(np.maximum(1, work.num_devices / 8))
    return StepParts(**parts)


def _sharding(work: StepWork, passes: Numbers, fitted: Constants) -> Numbers:
    """Seconds that sharded parameters add to a micro-batch.

    A block's parameters are gathered while the block before it computes, and its gradients reduced while the next one does
    (FSDP, arXiv 2304.11277, section 3.3): each pass hides what it has, up to its own length. Collectives take instructions and
    bandwidth of memory from the computation; that is for each byte, so a slow network costs no more of it.

    Args:
        work: Counts of the layouts.
        passes: Seconds of both passes of a micro-batch through a rank.
        fitted: Constants.
    """
    sent = work.fsdp_s + fitted.hop_s * work.fsdp_hops
    ahead, forward = work.fsdp_forward * sent, work.forward_share * passes
    exposed = _exposed(forward, ahead) + _exposed(passes - forward, sent - ahead)
    slowed = fitted.fsdp_factor * np.where(work.fsdp_network > 0, 1, _IN_DOMAIN) * work.fsdp_link_s
    return np.minimum(slowed, _MOST_SLOWED * passes) + exposed


def _bubble_of_zbv(work: StepWork, passes: Numbers, matmul: Numbers) -> Numbers:
    """Seconds that a rank waits in the order of ``plan.pipeline_schedule`` whose stages are equal.

    The backward pass of inputs, I, takes no less than the forward pass, and that of weights, W, no more. From 2 p - 1
    micro-batches on a rank waits (p - 1) max(I / 2, I - W), and (p - 1) I with p of them, as all are then in flight at once;
    between both numbers what lies on the line between is at most 3 % of a step too much.

    Args:
        work: Counts of the layouts.
        passes: Seconds of all passes of a micro-batch through a rank.
        matmul: Those of them that are products of attention and dense layers.
    """
    weights = work.later_share * matmul
    inputs = (1 - work.forward_share) * passes - weights
    missing = np.clip(2 * work.pp - 1 - work.num_micro_batches, 0, work.pp - 1) / np.maximum(1, work.pp - 1)
    full = np.maximum(inputs / 2, inputs - weights)
    return (work.pp - 1) * (full + missing * (inputs - full))


def _exposed(busy: Numbers, other: Numbers) -> Numbers:
    """What ``other`` adds to ``busy`` where both run at once: little, until it takes about as long."""
    return (busy**_OVERLAP + other**_OVERLAP) ** (1 / _OVERLAP) - busy
