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

_OVERLAP: Final = 4  # 1: one after the other; infinite: the longer one alone


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """What was fitted.

    Attributes:
        half_tokens: Tokens of a micro-batch at which matrix products reach half of their efficiency.
        half_width: Width of the smaller side of a matrix on one rank, at which they do.
        half_expert_tokens: The same for the tokens of one expert.
        half_expert_width: The same for the hidden units of an expert.
        attention: Share of the 16-bit peak that attention reaches, causal products counted.
        head: Efficiency of the output matrix, as a multiple of that of other products in 16 bits.
        traffic: Passes over a layer's activations by operations that are bound by memory.
        tp_exposed: Share of tensor-parallel communication that is waited for; above 1, links do not reach their data sheet.
        tp_latency_s: Seconds of a tensor-parallel collective, without its bytes.
        ep_exposed: The same share for experts.
        dp_exposed: The same share for the reduction of gradients.
        fsdp_exposed: The same share for sharded parameters.
        hop_s: Seconds from one rank of a ring to the next, without the bytes.
        virtual_stages: Of a pipeline whose runs do not say it.
        growth: Part by which a step slows down with each doubling of the devices beyond 8.
        efficiency: Share of the peak that large matrix products reach, by device and width.
        other_efficiency: The same for a device that is not listed.
        spread: Of dense models, from sources that no constant was fitted to: nine of ten step times lay between the prediction
            divided and multiplied by 1 + ``spread``.
        spread_experts: The same of models with experts.
    """

    half_tokens: float
    half_width: float
    half_expert_tokens: float
    half_expert_width: float
    attention: float
    head: float
    traffic: float
    tp_exposed: float
    tp_latency_s: float
    ep_exposed: float
    dp_exposed: float
    fsdp_exposed: float
    hop_s: float
    virtual_stages: float
    growth: float
    efficiency: Mapping[str, float]
    other_efficiency: float
    spread: float = 0.0
    spread_experts: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of a step, one element for each layout. The parts add up to ``total``.

    Attributes:
        matmul: Matrix products of attention and dense layers.
        expert: Those of experts.
        attention: Scores and weighted values.
        head: The output matrix.
        memory: Operations that are bound by memory.
        tensor_parallel: Collectives between tensor-parallel ranks.
        expert_parallel: Exchange of tokens between experts.
        context_parallel: Exchange of keys and values.
        bubble: Waiting for other pipeline stages.
        sharding: Gathering and reducing sharded parameters.
        gradients: Reduction of gradients.
        stragglers: Waiting for the slowest of many.
    """

    matmul: Numbers
    expert: Numbers
    attention: Numbers
    head: Numbers
    memory: Numbers
    tensor_parallel: Numbers
    expert_parallel: Numbers
    context_parallel: Numbers
    bubble: Numbers
    sharding: Numbers
    gradients: Numbers
    stragglers: Numbers

    @property
    def total(self) -> Numbers:
        """The step."""
        parts: tuple[Numbers, ...] = tuple(getattr(self, name) for name in self.__slots__)
        return np.sum(parts, axis=0)


@cache
def fitted_constants() -> Constants:
    """Those of this version."""
    text = files("unisono.planner").joinpath("step_time.json").read_bytes()
    return msgspec.json.decode(text, type=Constants)


def efficiency_key(layout: Layout) -> str:
    """The key of ``Constants.efficiency``."""
    width = layout.arithmetic if layout.arithmetic in ("fp8", "fp4") else "16-bit"
    return f"{layout.device.name}/{width}"


def efficiencies(layouts: Sequence[Layout], fitted: Constants) -> Numbers:
    """``Constants.efficiency`` of each layout."""
    return np.array([fitted.efficiency.get(efficiency_key(layout), fitted.other_efficiency) for layout in layouts])


def step_time(work: StepWork, efficiency: Numbers, fitted: Constants) -> StepTime:
    """Step times of the layouts that ``work`` was counted for; ``efficiency`` is that of each layout."""
    at_tokens = work.tokens / (work.tokens + fitted.half_tokens)
    at_width = work.matmul_width / (work.matmul_width + fitted.half_width)
    at_expert_tokens = work.expert_tokens / (work.expert_tokens + fitted.half_expert_tokens)
    at_expert_width = work.expert_width / (work.expert_width + fitted.half_expert_width)
    products = work.peak_flops * efficiency
    # narrow products reach less of their higher peak, so 16-bit ones on the same device reach more; no product has reached 0.85
    products_16 = work.peak_flops_16 * np.minimum(1.3 * efficiency, 0.85)
    each = {  # of one micro-batch
        "matmul": work.matmul_flops / (products * at_tokens * at_width),
        "expert": work.expert_flops / (products * at_expert_tokens * at_expert_width),
        "attention": work.attention_flops / (products_16 * fitted.attention),
        "head": work.head_flops / (products_16 * fitted.head * at_tokens),
        "memory": fitted.traffic * work.activation_bytes / work.memory_bytes_per_s,
        "tensor_parallel": fitted.tp_exposed * work.tp_s + fitted.tp_latency_s * 8 * work.layers * (work.tp_s > 0),
        "expert_parallel": fitted.ep_exposed * work.ep_s,
    }
    # keys and values are sent while those before them are used (ring attention, arXiv 2310.01889)
    each["context_parallel"] = _beyond(each["attention"], work.cp_s)
    device = np.sum(tuple(each.values()), axis=0)
    sharding = work.fsdp_s + fitted.hop_s * work.fsdp_hops
    each["sharding"] = fitted.fsdp_exposed * sharding + _beyond(device, sharding)
    parts = {name: seconds * work.num_micro_batches for name, seconds in each.items()}
    busy = np.sum(tuple(parts.values()), axis=0)
    virtual = np.where(work.virtual_stages > 0, work.virtual_stages, fitted.virtual_stages)
    # Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.2
    parts["bubble"] = busy * (work.stages - 1) / work.num_micro_batches / virtual
    parts["gradients"] = fitted.dp_exposed * (work.gradient_s + fitted.hop_s * work.gradient_hops)
    alone = np.sum(tuple(parts.values()), axis=0)
    parts["stragglers"] = alone * fitted.growth * np.log2(np.maximum(1, work.num_devices / 8))
    return StepTime(**parts)


def _beyond(busy: Numbers, other: Numbers) -> Numbers:
    """What ``other`` adds to ``busy`` where both run at once: little, until it takes about the same time."""
    return (busy**_OVERLAP + other**_OVERLAP) ** (1 / _OVERLAP) - busy
