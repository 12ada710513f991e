"""Peak memory of a rank of a layout, counted from shapes. Imports no torch.

Counted are AdamW's states, gathered parameters, activations (Korthikanti et al. 2022, arXiv 2205.05198, section 4, with attention
that keeps no scores) and logits. What the allocator reserves beyond them is fitted to published runs (``benchmarks/planner``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.plan.options import Schedule
from unisono.planner.layout import Kept, Layout, Loss, Numbers, Recompute, columns, model_columns
from unisono.planner.model_shape import ModelShape
from unisono.planner.stage_blocks import blocks_per_rank, recomputed_per_rank
from unisono.planner.step_time import fitted_constants
from unisono.planner.step_work import offloaded_bytes

_BYTES: Final = 2  # of an activation
# of each parameter with AdamW, by ZeRO stage: what each rank holds, and what ranks share. The passes need a weight in 16 bits and
# a gradient in 32, the optimizer a weight and two moments in 32 (Megatron-LM); ZeRO 3 gathers the weight of 32 bits
_HELD, _SHARED = (18, 6, 2, 0), (0, 12, 16, 16)
_HELD_16, _SHARED_16 = (8, 4, 2, 0), (0, 4, 6, 8)  # all of it in 16 bits
# blocks whose parameters (this one's, the next one's) and gradients (this one's) are there in 16 bits while they are used
_GATHERED_BLOCKS: Final = (0, 0, 1, 3)
# bytes of a logit. Plain: the logarithms of its softmax and two gradients, in 32 bits. In place: itself and its softmax, which
# its gradient takes the place of. Fused: itself and its gradient in 16 bits
_LOGIT: Final[Mapping[Loss, int]] = {"plain": 12, "in place": 8, "fused": 4}
_LOG_SUM: Final = 4  # bytes of the logarithm that attention keeps for each head and token
# reserved over counted: the median of torchtitan's published runs on H100 (benchmarks/planner/published_memory.py)
ALLOCATOR_FACTOR: Final = 1.1
COUNTED: Final = ("states", "gathered", "activations", "recomputed", "logits")  # of ``MemoryParts`` and ``StageMemory``


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryParts:
    """Bytes of the rank that needs most, one element for each layout. The parts add up to ``total``.

    Attributes:
        states: Parameters, gradients and optimizer states that the rank holds.
        gathered: Parameters and gradients of sharded blocks while they are used.
        activations: What the forward passes of all micro-batches in flight keep for the backward pass.
        recomputed: What one block keeps while its backward pass runs, beyond ``activations``.
        logits: Of one micro-batch, with their loss, and the gathered input of the output matrix.
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
        recomputed_blocks: Those of them that the backward pass computes again in full.
        states: Parameters, gradients and optimizer states.
        gathered: Parameters and gradients of blocks while they are used.
        activations: Of all micro-batches in flight.
        recomputed: Beyond these, while a block's backward pass runs.
        logits: Of one micro-batch; 0 on all ranks but that of the last stage.
    """

    rank: int
    blocks: float
    recomputed_blocks: float
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
    def parts(self) -> tuple[float, ...]:
        """Those of ``COUNTED``."""
        return tuple(getattr(self, name) for name in COUNTED)


def peak_memory(layouts: Sequence[Layout]) -> MemoryParts:
    """The memory of each of ``layouts``: of the rank of its pipeline that needs most."""
    places = [_places(layout) for layout in layouts]
    every = np.tile(np.arange(len(layouts)), 3)
    parts = rank_parts(layouts, every, [place[which] for which in range(3) for place in places])
    parts = parts.reshape(len(COUNTED), 3, len(layouts)).swapaxes(0, 1)
    counted = np.take_along_axis(parts, parts.sum(1).argmax(0)[None, None, :], 0)[0]
    room = np.array([layout.device.memory_bytes for layout in layouts]) - counted.sum(0)
    states, gathered, activations, recomputed, logits = counted
    return MemoryParts(
        states=states,
        gathered=gathered,
        activations=activations,
        recomputed=recomputed,
        logits=logits,
        allocator=np.clip(counted.sum(0) * (ALLOCATOR_FACTOR - 1), 0, np.maximum(0, room)),
    )


def host_bytes(layout: Layout) -> float:
    """Bytes of the host's memory that the rank with most of them takes for activations; 0 without ``offload``."""
    most = max(place.blocks * place.in_flight for place in places_of_ranks(layout))
    return most * offloaded_bytes(layout) if layout.offload else 0.0


def stage_memory(layout: Layout) -> Mapping[str, StageMemory]:
    """Memory of ranks of the pipeline: the first, of those between the one that needs most, and the last."""
    first, middle, last = _places(layout)
    names = {"only": first} if layout.pp == 1 else {"first": first, "middle": middle, "last": last}
    if layout.pp == 2:
        del names["middle"]
    found: dict[str, StageMemory] = {}
    for name, place in names.items():
        values = rank_parts([layout], np.zeros(1, int), [place])[:, 0]
        parts = dict(zip(COUNTED, map(float, values), strict=True))
        found[name] = StageMemory(rank=place.rank, blocks=place.blocks, recomputed_blocks=place.recomputed, **parts)
    return found


class Place(NamedTuple):
    """A rank of a pipeline: its number, its blocks, how many of them are recomputed in full, and the micro-batches of which it
    keeps activations."""

    rank: int
    blocks: float
    recomputed: float
    in_flight: float


def places_of_ranks(layout: Layout) -> tuple[Place, ...]:
    """Every rank of the pipeline."""
    per_rank = layout.stages_per_rank or fitted_constants().stages_per_rank
    blocks, recomputed = blocks_per_rank(layout), recomputed_per_rank(layout)
    return _ranks(blocks, recomputed, per_rank, layout.num_micro_batches, layout.passes)


def _places(layout: Layout) -> tuple[Place, Place, Place]:
    """The first rank, the one between that keeps most activations, and the last; without one between, the first in its place."""
    kept, least, _ = _block_bytes(layout) if layout.recompute == "partial" else (1, 1, 1)
    return _ends_and_middle(places_of_ranks(layout), least / kept)


@lru_cache(maxsize=4096)
def _ranks(
    blocks: tuple[float, ...],
    recomputed: tuple[float, ...],
    per_rank: float,
    micro_batches: float,
    passes: Schedule,
) -> tuple[Place, ...]:
    """``places_of_ranks`` for so many blocks of each rank, of which so many are recomputed.

    Args:
        blocks: Blocks of each rank.
        recomputed: Those that are recomputed.
        per_rank: Stages of each rank.
        micro_batches: Micro-batches of a step.
        passes: The order of passes.
    """
    pp = len(blocks)
    if passes == "gpipe":
        most = (micro_batches,) * pp
    elif passes == "zbv":  # at most 2 pp of two chunks (Qi et al. 2023, section 6), until their weights have gradients
        most = tuple(min(2 * pp, micro_batches + rank + 1) / 2 for rank in range(pp))
    else:
        # 1F1B; interleaved as Narayanan et al. 2021, section 2.2: the first ranks hold more chunks, the last ones fewer
        most = tuple(pp + (pp - 1 - 2 * rank) / per_rank if per_rank > 1 else pp - rank for rank in range(pp))
    return tuple(
        Place(rank, blocks[rank], recomputed[rank], min(flying, micro_batches)) for rank, flying in enumerate(most)
    )


@lru_cache(maxsize=4096)
def _ends_and_middle(ranks: tuple[Place, ...], share: float) -> tuple[Place, Place, Place]:
    """A recomputed block keeps a ``share`` of what another does."""
    middle = max(ranks[1:-1], key=lambda it: (it.blocks - it.recomputed * (1 - share)) * it.in_flight, default=ranks[0])
    return ranks[0], middle, ranks[-1]


def rank_parts(layouts: Sequence[Layout], which: NDArray[np.int_], places: Sequence[Place] | Numbers) -> Numbers:
    """Bytes of ``places`` in those of ``layouts`` whose numbers are ``which`` [COUNTED, places]."""
    rank, blocks, again, in_flight = np.array(places, float).reshape(-1, 4).T
    layers, vocab, hidden, dense_params, expert_params, tied = model_columns(
        layouts,
        lambda it: it.layers,
        lambda it: it.vocab,
        lambda it: it.hidden,
        lambda it: it.dense_params + it.other_params,
        lambda it: it.expert_layers * it.experts * it.expert_params,
        lambda it: it.tied,
    )
    tp, pp, ep, zero, ranks, in_16_bits = columns(
        layouts,
        lambda it: it.tp,
        lambda it: it.pp,
        lambda it: it.ep,
        lambda it: it.zero,
        lambda it: it.state_ranks,
        lambda it: it.states_in_16_bits,
    )
    # of a sequence on a rank, with sequence parallelism beside tensor parallelism
    tokens, logit, head_rank, is_zbv, is_offloaded = columns(
        layouts,
        lambda it: it.micro_batch * it.seq_len / it.cp / it.tp,
        lambda it: _LOGIT[it.loss],
        lambda it: it.head_rank,
        lambda it: it.passes == "zbv",
        lambda it: it.offload,
    )
    kept, least, block = np.array([_block_bytes(layout) for layout in layouts]).reshape(-1, 3).T
    # what waits in the host's memory comes back for one block at a time
    kept = np.where((is_offloaded > 0) & (is_zbv == 0), 0, kept)
    # what a backward pass computes again it keeps for the gradients of weights, which the last rank computes much later
    least = np.where(is_zbv > 0, kept, least)
    layers, vocab, hidden, dense_params, expert_params, tied = (
        each[which] for each in (layers, vocab, hidden, dense_params, expert_params, tied)
    )
    tp, pp, ep, zero, ranks, in_16_bits = (each[which] for each in (tp, pp, ep, zero, ranks, in_16_bits))
    tokens, logit, kept, least, block = (each[which] for each in (tokens, logit, kept, least, block))
    is_last = rank == head_rank[which]
    # embedding and output matrix; a tied one is on both ends of a pipeline, which a V has on one rank
    matrices = np.where((rank == 0) & is_last & (tied > 0), 1, (rank == 0) + 1.0 * is_last)
    outer = matrices * vocab * hidden / tp
    inner, experts = blocks / layers * dense_params / tp, blocks / layers * expert_params / (tp * ep)
    stage, narrow = zero.astype(int), in_16_bits.astype(int)
    held, shared = (np.array(each, float)[narrow, stage] for each in ((_HELD, _HELD_16), (_SHARED, _SHARED_16)))
    used = np.array(_GATHERED_BLOCKS, float)[stage]
    states = (held + shared / ranks) * (inner + outer) + (held + shared / np.maximum(1, ranks / ep)) * experts
    # what lies outside of the blocks stays gathered from forward to backward
    of_block = dense_params / layers / tp + expert_params / layers / (tp * ep)
    gathered = _BYTES * (used * of_block + outer) * ((ranks > 1) & (zero > 1))
    return np.stack(
        [
            states,
            gathered,
            kept * tokens * (blocks - again) * in_flight + least * tokens * again * in_flight,
            (block - np.where(again > 0, least, kept)) * tokens * (blocks > 0),
            # the input of the output matrix is gathered
            (logit * vocab + _BYTES * hidden * (tp - 1)) * tokens * is_last,
        ]
    )


def _block_bytes(layout: Layout) -> tuple[float, float, float]:
    """``_bytes_of_block`` of a layout."""
    fused = {"norms in 32 bits"} if layout.compiled else set[Kept]()
    one_order = {"attention twice"} if layout.micro_batch <= 1 else set[Kept]()
    keeps = tuple(each for each in layout.keeps if each not in fused | one_order)
    is_fsdp = layout.zero > 1 and layout.state_ranks > 1
    return _bytes_of_block(layout.model, layout.tp, layout.recompute, keeps, is_fsdp=is_fsdp, compiled=layout.compiled)


@lru_cache(maxsize=1024)
def _bytes_of_block(
    model: ModelShape, tp: int, recompute: Recompute, keeps: tuple[Kept, ...], *, is_fsdp: bool, compiled: bool
) -> tuple[float, float, float]:
    """Bytes of a token, means over the blocks: those that a block keeps for its backward pass, those that one which is recomputed
    in full keeps, and those that a block has while that pass runs. Over ``tp``, they are those of a rank.

    Args:
        model: Its shape.
        tp: Tensor-parallel ranks.
        recompute: What of the forward pass is computed again.
        keeps: What blocks keep beyond what they need.
        is_fsdp: Whether parameters or gradients are shared.
        compiled: Whether the model is compiled.
    """
    hidden, query, key_value = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
    kept = model.block_activation_bytes
    if model.traced is None:
        # SiLU of the gate is computed again where its product is fused with it
        kept -= _BYTES * model.units_per_token * (compiled and model.gated)
        # of a norm, four bytes of the input in place of two, and two of what its weight multiplies
        kept += 2 * 2 * _BYTES * hidden * ("norms in 32 bits" in keeps)
        kept += 2 * _BYTES * (query - key_value) * ("repeated keys" in keeps)
        kept += _BYTES * query * ("attention twice" in keeps)
    # inputs and outputs of both layers are gathered while they are used
    block = kept + 4 * _BYTES * hidden * (tp - 1)
    if "gathered inputs" in keeps:
        kept += 2 * _BYTES * hidden * (tp - 1)
    least = _BYTES * hidden  # its input
    if recompute == "selective" and "all products" in keeps:
        # those of both row-wise layers before they are summed over the ranks, and the input in 32 bits
        rows = 2 + (model.experts_per_token - 1) * model.expert_layers / model.layers
        kept = 2 * _BYTES * hidden + _BYTES * (2 * query + 2 * key_value + rows * hidden * tp)
        kept += (2 if model.gated else 1) * _BYTES * model.units_per_token + _LOG_SUM * model.heads
    elif recompute == "selective" and is_fsdp:
        # torchtitan's: every second matrix product and attention are kept (PyTorch's selective checkpoint). A compiled block does
        # not keep the output of the last product, which no backward pass needs
        kept = _BYTES * ((1 if compiled else 2) * hidden + 2 * query + key_value + model.units_per_token)
        kept += _LOG_SUM * model.heads
    return kept, least, block
