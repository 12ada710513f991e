"""Peak memory of a rank of a layout, counted from shapes. Imports no torch.

Counted are AdamW's states, gathered parameters, activations (Korthikanti et al. 2022, arXiv 2205.05198, section 4, with attention
that keeps no scores) and logits. What the allocator reserves beyond them is fitted to published runs (``benchmarks/planner``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from unisono.planner.layout import Layout, Numbers
from unisono.planner.stage_blocks import blocks_per_rank
from unisono.planner.step_time import fitted_constants

_BYTES: Final = 2  # of an activation
# of each parameter with AdamW, by ZeRO stage: what each rank holds, and what ranks share. The passes need a weight in 16 bits and
# a gradient in 32, the optimizer a weight and two moments in 32 (Megatron-LM); ZeRO 3 gathers the weight of 32 bits
_HELD, _SHARED = (18, 6, 2, 0), (0, 12, 16, 16)
_ALONE: Final = 8  # on one device, all in 16 bits
# blocks whose parameters (this one's, the next one's) and gradients (this one's) are there in 16 bits while they are used
_GATHERED_BLOCKS: Final = (0, 0, 1, 3)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """Bytes of one rank of a pipeline, by the names of ``MemoryParts``.

    Attributes:
        rank: Its place in the pipeline.
        blocks: Blocks of the model that it has; a mean if the model has fewer than the pipeline stages.
        states: Parameters, gradients and optimizer states.
        gathered: Parameters and gradients of blocks while they are used.
        activations: Of all micro-batches in flight.
        recomputed: Beyond these, while a block's backward pass runs.
        logits: Of one micro-batch; 0 on all ranks but the last.
    """

    rank: int
    blocks: float
    states: float
    gathered: float
    activations: float
    recomputed: float
    logits: float

    @property
    def counted(self) -> float:
        """What must fit into the device."""
        return sum(self.parts)

    @property
    def parts(self) -> tuple[float, float, float, float, float]:
        """States, gathered, activations, recomputed and logits."""
        return self.states, self.gathered, self.activations, self.recomputed, self.logits


def peak_memory(layouts: Sequence[Layout]) -> MemoryParts:
    """The memory of each of ``layouts``: of the rank of its pipeline that needs most."""
    largest = [max(stage_memory(layout).values(), key=lambda stage: stage.counted) for layout in layouts]
    counted = np.array([stage.parts for stage in largest]).reshape(len(layouts), 5)
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


def stage_memory(layout: Layout) -> Mapping[str, StageMemory]:
    """Memory of ranks of the pipeline: the first, of those between the one that needs most, and the last."""
    blocks = blocks_per_rank(layout)
    names = {0: "first", layout.pp - 1: "last"} if layout.pp > 1 else {0: "only"}
    if layout.pp > 2:
        kept = [blocks[rank] * _in_flight(layout, rank) for rank in range(1, layout.pp - 1)]
        names[1 + int(np.argmax(kept))] = "middle"
    return {names[rank]: _stage(layout, rank, blocks[rank]) for rank in sorted(names)}


def _stage(layout: Layout, rank: int, blocks: float) -> StageMemory:
    """Memory of a ``rank`` of the pipeline that has so many ``blocks``."""
    model, tp = layout.model, layout.tp
    is_first, is_last = rank == 0, rank == layout.pp - 1
    # embedding and output matrix; a tied one is on both ends of a pipeline
    matrices = 1 if layout.pp == 1 and model.tied else is_first + is_last
    outer = matrices * model.vocab * model.hidden / tp
    dense = blocks * model.dense_params / (model.layers * tp) + outer
    experts = blocks * model.expert_layers * model.experts * model.expert_params / (model.layers * tp * layout.ep)
    if layout.num_devices == 1:
        states = _ALONE * (dense + experts)
    else:
        zero, ranks = layout.zero, layout.state_ranks
        of_dense, of_expert = (_HELD[zero] + _SHARED[zero] / each for each in (ranks, max(1.0, ranks / layout.ep)))
        states = of_dense * dense + of_expert * experts
    gathered = 0.0
    if layout.state_ranks > 1 and layout.zero > 1:
        # what lies outside of the blocks stays gathered from forward to backward
        gathered = _BYTES * (_GATHERED_BLOCKS[layout.zero] * (dense - outer + experts) / blocks + outer)
    kept, block = _block_bytes(layout)
    tokens = layout.micro_batch * layout.seq_len / layout.cp / tp  # with sequence parallelism beside tensor parallelism
    return StageMemory(
        rank=rank,
        blocks=blocks,
        states=states,
        gathered=gathered,
        activations=kept * tokens * blocks * _in_flight(layout, rank),
        recomputed=(block - kept) * tokens,
        logits=_LOGIT * model.vocab * tokens if is_last else 0.0,
    )


def _in_flight(layout: Layout, rank: int) -> float:
    """Micro-batches of which a ``rank`` of the pipeline keeps activations (1F1B; interleaved as Narayanan et al. 2021, section
    2.2: the first ranks hold more chunks, the last ones fewer).
    """
    pp, per_rank = layout.pp, layout.stages_per_rank or fitted_constants().stages_per_rank
    most = pp + (pp - 1 - 2 * rank) / per_rank if per_rank > 1 else pp - rank
    return min(most, layout.num_micro_batches)


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
    if layout.recompute == "selective" and layout.zero > 1 and layout.state_ranks > 1:
        # torchtitan's: every second matrix product and attention are kept (PyTorch's selective checkpoint)
        kept = _BYTES * (2 * hidden + 2 * query + key_value + units) + _LOG_SUM * model.heads
        return kept, block
    return attention + per_unit * units, block
