"""Peak memory of a rank of a layout, counted from shapes. Imports no torch.

Counted are AdamW's states, gathered parameters, activations (Korthikanti et al. 2022, arXiv 2205.05198, section 4, with attention
that keeps no scores) and logits. What the allocator reserves beyond them is fitted to published runs (``benchmarks/planner``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from unisono.planner.layout import Layout, Numbers
from unisono.planner.step_time import fitted_constants

_BYTES: Final = 2  # of an activation
# of each parameter with AdamW: weight, gradient and two moments in 32 bits (FSDP2's mixed precision); the weight in 16 bits and
# the gradient in 32, with a weight and moments in 32 bits that replicas share (ZeRO 1, Megatron-LM); all in 16 bits (one device)
_SHARDED, _REPLICATED, _SHARED, _ALONE = 16, 6, 12, 8
_GATHERED_BLOCKS: Final = 3  # parameters of this block and the next, gradients of this one, in 16 bits
_LOGIT: Final = 12  # bytes of a logit: in 16 and in 32 bits, the logarithms of its softmax, and its gradient
_LOG_SUM: Final = 4  # bytes of the logarithm that attention keeps for each head and token
# reserved over counted, the medians of published runs that say how they were run (benchmarks/planner/published_memory.py)
EAGER_FACTOR: Final = 1.12
COMPILED_FACTOR: Final = 1.04


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryParts:
    """Bytes of the rank that needs most, one element for each layout. The parts add up to ``total``.

    Attributes:
        states: Parameters, gradients and optimizer states that the rank holds.
        gathered: Parameters and gradients of sharded blocks while they are used.
        activations: What the forward passes of all micro-batches in flight keep for the backward pass.
        recomputed: What one block keeps while its backward pass runs, beyond ``activations``.
        logits: Of one micro-batch, with their loss.
        allocator: What PyTorch's allocator reserves beyond these where there is room.
    """

    states: Numbers
    gathered: Numbers
    activations: Numbers
    recomputed: Numbers
    logits: Numbers
    allocator: Numbers

    @property
    def counted(self) -> Numbers:
        """What must fit into the device."""
        return self.states + self.gathered + self.activations + self.recomputed + self.logits

    @property
    def total(self) -> Numbers:
        """The peak of what the allocator reserves."""
        return self.counted + self.allocator


def peak_memory(layouts: Sequence[Layout]) -> MemoryParts:
    """The memory of each of ``layouts``."""
    counted = np.array([_largest(layout) for layout in layouts]).reshape(len(layouts), 5)
    factor = np.array([COMPILED_FACTOR if layout.compiled else EAGER_FACTOR for layout in layouts])
    room = np.array([layout.device.memory_bytes for layout in layouts]) - counted.sum(1)
    states, gathered, activations, recomputed, logits = counted.T
    return MemoryParts(
        states=states,
        gathered=gathered,
        activations=activations,
        recomputed=recomputed,
        logits=logits,
        allocator=np.clip(counted.sum(1) * (factor - 1), 0, np.maximum(0, room)),
    )


def _largest(layout: Layout) -> tuple[float, float, float, float, float]:
    """States, gathered, activations, recomputed and logits of the first or the last stage, whichever needs more."""
    return max((_stage(layout, is_last=is_last) for is_last in {layout.pp == 1, True}), key=sum)


def _stage(layout: Layout, *, is_last: bool) -> tuple[float, float, float, float, float]:
    """The same of the last stage, or of the first one of several."""
    model, tp, pp = layout.model, layout.tp, layout.pp
    outer = model.vocab * model.hidden * (1 if pp > 1 or model.tied else 2) / tp  # embedding, output matrix
    experts = model.expert_layers * model.experts * model.expert_params / layout.ep
    blocks = (model.dense_params + experts) / (tp * pp)
    replicas = layout.dp * layout.cp
    gathered = 0.0
    if layout.dp_shard > 1:
        states = _SHARDED * (blocks + outer) / (layout.dp_shard * layout.cp)
        # what lies outside of the blocks stays gathered from forward to backward
        gathered = _BYTES * (_GATHERED_BLOCKS * blocks * pp / model.layers + outer)
    elif layout.num_devices == 1:
        states = _ALONE * (blocks + outer)
    else:
        states = (_REPLICATED + _SHARED / replicas) * (blocks + outer)
    kept, block = _block_bytes(layout)
    tokens = layout.micro_batch * layout.seq_len / layout.cp / tp  # with sequence parallelism beside tensor parallelism
    in_flight = 1.0 if is_last else _in_flight(layout)
    logits = _LOGIT * model.vocab * tokens if is_last else 0.0
    return states, gathered, kept * tokens * model.layers / pp * in_flight, (block - kept) * tokens, logits


def _in_flight(layout: Layout) -> float:
    """Micro-batches of which the first stage keeps activations (1F1B; interleaved as Narayanan et al. 2021, section 2.2)."""
    pp, per_rank = layout.pp, layout.stages_per_rank or fitted_constants().stages_per_rank
    more = 1 + (pp - 1) / (pp * per_rank) if per_rank > 1 else 1.0
    return min(pp, layout.num_micro_batches) * more


def _block_bytes(layout: Layout) -> tuple[float, float]:
    """Bytes of a token that a block keeps for its backward pass, and those that it has while that runs; means over the blocks."""
    model = layout.model
    hidden, query, key_value = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
    matrices = 3 if model.gated else 2
    # inputs of both norms, outputs of both, queries, keys, values and weighted values
    attention = _BYTES * (4 * hidden + 2 * query + 2 * key_value) + _LOG_SUM * model.heads
    # of each matrix: gate, up, their activation and their product; or up and its activation
    per_unit = _BYTES * (matrices - 1) * 2
    units = model.ffn
    if model.experts:
        dense_layers = model.layers - model.expert_layers
        of_experts = model.experts_per_token * model.ffn + model.shared_ffn
        units = (dense_layers * (model.dense_ffn or model.ffn) + model.expert_layers * of_experts) / model.layers
        # the copies of a token that go to experts and come back
        attention += _BYTES * 2 * hidden * model.experts_per_token * model.expert_layers / model.layers
    block = attention + per_unit * units
    if layout.tp > 1:  # inputs and outputs of both layers are gathered while they are used
        block += 4 * _BYTES * hidden * (layout.tp - 1)
    if layout.recompute == "full":
        return _BYTES * hidden, block
    if layout.recompute == "selective" and layout.dp_shard > 1:
        # torchtitan's: every second matrix product and attention are kept (PyTorch's selective checkpoint)
        kept = _BYTES * (2 * hidden + 2 * query + key_value + units) + _LOG_SUM * model.heads
        return kept, block
    return attention + per_unit * units, block
