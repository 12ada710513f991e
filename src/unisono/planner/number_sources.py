"""Where the numbers of a prediction are from: counted exactly from shapes, modelled by a formula, or fitted to published runs.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["exact", "modelled", "fitted"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """How a number is known, and from what."""

    kind: Kind
    text: str


def _fitted(text: str) -> Source:
    return Source(kind="fitted", text=f"{text}; constants fitted to published runs (step_time.json)")


# of a layout on a cluster, nothing of which is measured here, by the names of ``StepParts`` and ``MemoryParts`` and of totals
LAYOUT_SOURCES: Final[Mapping[str, Source]] = {
    "params": Source(kind="exact", text="parameters of the model's shape; of a preset, its matrices"),
    "step_s": _fitted("the sum of the parts of the step"),
    "spread": _fitted("errors of published runs whose source no constant was fitted to"),
    "matmul": _fitted("FLOPs over the peak of the data sheet, by a share of it for each device and width"),
    "expert": _fitted("FLOPs over the peak of the data sheet, by a share of it for each number of tokens"),
    "attention": _fitted("FLOPs of causal attention over the peak of the data sheet, by a share of it"),
    "lm_head": _fitted("FLOPs over the peak of the data sheet, by a share of it"),
    "memory_bound": _fitted("passes over activations at the memory bandwidth of the data sheet"),
    "tensor_parallel": _fitted("8 collectives of a block (arXiv 2205.05198) at the bandwidth of the data sheet"),
    "expert_parallel": _fitted("4 exchanges of each token's copies at the bandwidth of the data sheet"),
    "context_parallel": Source(
        kind="modelled", text="keys and values at the bandwidth of the data sheet, behind attention (arXiv 2310.01889)"
    ),
    "offload": Source(
        kind="modelled",
        text="what operations of blocks save, out and back at the bandwidth of the host link (data sheet), beside nothing else",
    ),
    "imbalance": Source(
        kind="modelled", text="work of the rank with most blocks, or with the output matrix, over the mean"
    ),
    "bubble": Source(
        kind="modelled",
        text="(p - 1) / (m v) of the time that a rank is busy (arXiv 2104.04473); of zbv by its order (arXiv 2401.10241)",
    ),
    "sharding": _fitted("passes of the ZeRO stage over parameters with each micro-batch (arXiv 1910.02054)"),
    "gradients": _fitted("bytes of the ZeRO stage once in a step (arXiv 1910.02054)"),
    "optimizer": Source(
        kind="modelled", text="30 bytes of each parameter of AdamW at the memory bandwidth of the data sheet"
    ),
    "stragglers": _fitted("a part of the step for each doubling of the devices"),
    "needed_bytes": Source(kind="modelled", text="the sum of the parts of the memory but the allocator's"),
    "states": Source(
        kind="exact", text="bytes of a parameter with AdamW by ZeRO stage (arXiv 1910.02054; Megatron-LM)"
    ),
    "gathered": Source(
        kind="modelled", text="parameters of two blocks and gradients of one, and what lies outside of blocks"
    ),
    "activations": Source(
        kind="modelled",
        text="what a block keeps (arXiv 2205.05198) for each micro-batch in flight; none of it with offload",
    ),
    "recomputed": Source(kind="modelled", text="what one block keeps while its backward pass runs"),
    "logits": Source(
        kind="modelled", text="12 bytes for each logit of a micro-batch, and the gathered input of the output matrix"
    ),
    "traced": Source(
        kind="exact",
        text="tensors of the rank that needs most, from traces of a few blocks of unisono's own model (--trace)",
    ),
    "allocator": Source(
        kind="fitted",
        text="reserved over counted bytes, the median of published runs (benchmarks/planner/published_memory.py)",
    ),
}
