"""A layout: a model, the devices, and how the work is split between them. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from unisono.plan.options import Schedule
from unisono.plan.plan import STAGES_PER_RANK
from unisono.planner.devices import Device, Precision
from unisono.planner.model_shape import ModelShape

Numbers = NDArray[np.float64]
Recompute = Literal["none", "selective", "full", "partial"]
Cut = Literal["equal", "balanced", "given"]
AttentionKernel = Literal["new", "flash-2", "flash-1", "stored"]
Kept = Literal["gathered inputs", "norms in 32 bits", "repeated keys", "attention twice", "all products"]
KEPT: Final[tuple[Kept, ...]] = (
    *("gathered inputs", "norms in 32 bits", "repeated keys", "attention twice", "all products"),
)
# by blocks of unisono's own models
KEPT_BY_RUNS: Final[tuple[Kept, ...]] = ("gathered inputs", "norms in 32 bits", "repeated keys", "all products")
Loss = Literal["plain", "in place", "fused"]
ZERO_STAGES: Final = (0, 1, 2, 3)


class LayoutError(ValueError):
    """A job that cannot be predicted.

    Attributes:
        given: What was given.
        rule: The rule that it breaks.
        nearest: The nearest thing that works.
    """

    def __init__(self, given: str, rule: str, nearest: str) -> None:
        super().__init__(f"{given}: {rule}")
        self.given, self.rule, self.nearest = given, rule, nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A training step of ``model`` on ``num_devices`` of ``device``.

    Attributes:
        model: Its shape.
        device: The accelerator.
        precision: Of the matrix products; attention and the output matrix are computed in 16 bits.
        num_devices: Devices of the job.
        tp: Tensor-parallel ranks.
        pp: Pipeline ranks.
        stages_per_rank: Stages of each pipeline rank (an interleaved schedule has several); 0 if unknown.
        schedule: Order of a pipeline's passes (``plan.pipeline_schedule``); None: 1f1b, or interleaved with several stages.
        cut: How blocks are distributed over the pipeline: ``balanced`` in whole blocks, with fewer beside the output matrix
            (``stage_blocks``); ``given`` as ``layers_per_stage`` has them; ``equal`` takes equal parts of all work, where the cut
            of a job is not known.
        layers_per_stage: Blocks of each stage in order, of a ``given`` cut; empty with any other.
        cp: Ranks that share a sequence.
        ep: Ranks that share the experts; of all ranks of a pipeline stage.
        zero: What ``dp_shard`` x ``cp`` ranks share (ZeRO, arXiv 1910.02054): 0 nothing; 1 optimizer states, as Megatron-LM's
            distributed optimizer; 2 gradients too; 3 parameters too, which are gathered for each micro-batch.
        dp_shard: Data ranks that share them; groups of these replicate each other. 0: all.
        micro_batch: Sequences of one forward pass of a model replica.
        global_batch: Sequences of a step.
        seq_len: Tokens of a sequence.
        recompute: What of the forward pass is computed again in the backward pass. ``selective`` takes no time here. ``partial``
            is full recompute of some blocks of each stage; the others keep all (Megatron-LM's ``--recompute-method block``).
        recomputed_blocks: The number of these blocks for each stage in order, as in ``blocks_per_stage``; empty if not partial.
        offload: Whether what blocks keep for the backward pass waits in the memory of the host (``plan.offload``).
        compiled: Whether the model is compiled, which needs less memory.
        loss: ``plain`` is PyTorch's cross entropy of logits in 32 bits; ``in place`` writes the gradient over their softmax;
            ``fused`` keeps none in 32 bits: one kernel reads those in 16 bits, all or a chunk at a time.
        keeps: What blocks keep for the backward pass beyond what 16 bits and fused operations ask for: ``gathered inputs`` of
            column-wise products, with tensor parallelism (they are not gathered again); ``norms in 32 bits``, of operators of
            PyTorch: their input in 32 bits, and it normalized in 16; ``repeated keys``: keys and values of each query head;
            ``attention twice``: its output in the order of its heads and in that of its projection's tokens, which differ
            where sequences are the second dimension; ``all products``, with selective recompute: the results of all matrix
            products and of attention, of row-wise ones before they are summed over the ranks.
        attention_kernel: ``new`` has the matrix instructions of its device; ``flash-2`` is FlashAttention-2, without those of
            devices after A100; ``flash-1`` is its first version, also in Triton; ``stored`` keeps all scores in memory.
        fused: Whether operations that are bound by memory are fused, by a compiler or by the trainer's own kernels.
        states_in_16_bits: Whether weights, gradients and the optimizer's states are in 16 bits too, as some trainers have them.
        learned_factor: What all predicted times are multiplied by: measured over predicted steps of earlier runs
            (``layout_record``).
    """

    model: ModelShape
    device: Device
    precision: Precision
    num_devices: int
    tp: int = 1
    pp: int = 1
    stages_per_rank: int = 0
    schedule: Schedule | None = None
    cut: Cut = "equal"
    layers_per_stage: tuple[int, ...] = ()
    cp: int = 1
    ep: int = 1
    zero: int = 1
    dp_shard: int = 0
    micro_batch: float = 1
    global_batch: float = 1
    seq_len: int = 1
    recompute: Recompute = "none"
    recomputed_blocks: tuple[int, ...] = ()
    offload: bool = False
    compiled: bool = False
    loss: Loss = "plain"
    keeps: tuple[Kept, ...] = ()
    attention_kernel: AttentionKernel = "new"
    fused: bool = True
    states_in_16_bits: bool = False
    learned_factor: float = 1.0

    def __post_init__(self) -> None:
        """Raises LayoutError for one that no run could have."""
        model, axes = self.model, f"tp {self.tp}, pp {self.pp}, cp {self.cp}"
        if self.num_devices % (self.tp * self.pp * self.cp):
            raise LayoutError(f"{axes} on {self.num_devices} devices", "axes divide the devices", "another number")
        # the embedding and the output matrix may be stages of their own
        if self.pp * max(1, self.stages_per_rank) > model.layers + 2:
            stages = f"pp {self.pp} with {max(1, self.stages_per_rank)} stages per rank"
            raise LayoutError(stages, f"each stage has a layer, and the model has {model.layers}", "fewer stages")
        self._check_schedule()
        self._check_cut()
        if model.experts % self.ep if model.experts else self.ep > 1:
            raise LayoutError(
                f"ep {self.ep}", f"it divides the model's {model.experts} experts", "a divisor of them, or 1"
            )
        if (self.num_devices // self.pp) % self.ep:
            raise LayoutError(
                f"ep {self.ep}", f"it divides the {self.num_devices // self.pp} ranks of a stage", "a divisor"
            )
        if self.zero not in ZERO_STAGES:
            raise LayoutError(f"zero {self.zero}", "the ZeRO stage is 0, 1, 2 or 3", "zero=1")
        if self.dp_shard and self.dp % self.dp_shard:
            raise LayoutError(
                f"{self.dp_shard} ranks that share states", f"they divide {self.dp} data ranks", "a divisor"
            )
        if self.zero == 0 and self.dp_shard > 1:
            raise LayoutError(
                f"zero 0 with {self.dp_shard} ranks that share states", "with zero 0 none are shared", "zero=1"
            )
        self._check_offload()
        if self.precision not in self.device.tflops:
            raise LayoutError(f"precision {self.precision}", f"{self.device.name} does not compute it", "bf16 or fp16")
        if self.global_batch < self.dp * self.micro_batch:
            raise LayoutError(
                f"a global batch of {self.global_batch:g} sequences",
                f"each of {self.dp} replicas has a micro-batch of {self.micro_batch:g}",
                f"{self.dp * self.micro_batch:g}",
            )

        stages = self.pp * max(1, self.stages_per_rank)
        if len(self.recomputed_blocks) != (stages if self.recompute == "partial" else 0):
            raise LayoutError(
                f"recompute {self.recompute} with numbers of blocks for {len(self.recomputed_blocks)} stages",
                f"partial recompute has one for each of {stages} stages, and no other has any",
                "recompute full, without numbers",
            )

    def _check_schedule(self) -> None:
        if self.schedule is None:
            return
        stages, usual = self.stages_per_rank, STAGES_PER_RANK[self.schedule]
        if self.pp == 1:
            raise LayoutError(f"schedule {self.schedule} with pp 1", "it orders the passes of a pipeline", "pp=2")
        if stages != usual and not (self.schedule == "interleaved" and stages > 1):
            rule = "gpipe and 1f1b have one stage per rank, zbv two, interleaved two or more"
            nearest = "schedule interleaved" if stages > 1 else "two stages per rank"
            raise LayoutError(f"schedule {self.schedule} with {stages} stages per rank", rule, nearest)

    def _check_cut(self) -> None:
        if bool(self.layers_per_stage) != (self.cut == "given"):
            raise LayoutError(
                f"cut {self.cut} with layers_per_stage {list(self.layers_per_stage)}",
                "a given cut has blocks of each stage, and no other has any",
                "cut given, with layers_per_stage",
            )
        stages = self.pp * max(1, self.stages_per_rank)
        if self.layers_per_stage and (self.pp == 1 or len(self.layers_per_stage) != stages):
            raise LayoutError(
                f"layers_per_stage {list(self.layers_per_stage)} with pp {self.pp} and {max(1, self.stages_per_rank)} "
                "stages per rank",
                "it has the blocks of each stage of a pipeline, and there are pp x stages_per_rank of them",
                f"{stages} numbers" if self.pp > 1 else "pp=2",
            )
        if self.layers_per_stage:
            check_blocks(self.layers_per_stage, self.model.layers, last_may_be_empty=True)

    def _check_offload(self) -> None:
        if self.offload and (self.recompute != "none" or self.compiled):
            raise LayoutError(
                f"offload with recompute {self.recompute}" + (" of a compiled model" if self.compiled else ""),
                "it moves what a block keeps; recomputed blocks keep next to nothing, compiled ones choose for themselves",
                "recompute none, not compiled",
            )
        if self.offload and not self.device.host_bytes_per_s:
            raise LayoutError(
                f"offload on {self.device.name}",
                "no bandwidth between this device and its host is known",
                "a TOML file of the cluster with host_gb_per_s",
            )

    @property
    def passes(self) -> Schedule:
        """The order of a pipeline's passes: ``schedule``, or what it is where that is open."""
        return self.schedule or ("interleaved" if self.stages_per_rank > 1 else "1f1b")

    @property
    def head_rank(self) -> int:
        """The pipeline rank of the last stage, which has the output matrix."""
        return 0 if self.passes == "zbv" else self.pp - 1

    @property
    def dp(self) -> int:
        """Model replicas. Ranks that share experts are data ranks for the rest of the model."""
        return self.num_devices // (self.tp * self.pp * self.cp)

    @property
    def state_ranks(self) -> int:
        """Ranks that share the states of parameters outside of experts; 1 if none are shared."""
        return (self.dp_shard or self.dp) * self.cp if self.zero else 1

    @property
    def shared_axes(self) -> tuple[str, ...]:
        """Axes that more than one rank share, sorted; ``dp`` for data ranks of both kinds."""
        sizes = {"cp": self.cp, "dp": self.dp, "ep": self.ep, "pp": self.pp, "tp": self.tp}
        return tuple(axis for axis, size in sizes.items() if size > 1)

    @property
    def num_micro_batches(self) -> float:
        """Forward passes of a replica in a step."""
        return self.global_batch / (self.dp * self.micro_batch)


def check_blocks(layers_per_stage: Sequence[int], layers: int, *, last_may_be_empty: bool = False) -> None:
    """Raises LayoutError if a stage has no block, or all of them together not the ``layers`` of the model.

    ``last_may_be_empty``: the last stage may have the output matrix alone, as in some programs.
    """
    given, total = f"layers_per_stage {list(layers_per_stage)}", sum(layers_per_stage)
    nearest = _nearest_cut(layers_per_stage, layers)
    if min(layers_per_stage[:-1] if last_may_be_empty else layers_per_stage) < 1:
        raise LayoutError(given, "each stage has a block", nearest)
    if total != layers:
        raise LayoutError(f"{given}, which are {total} blocks", f"the model has {layers} blocks", nearest)


def _nearest_cut(layers_per_stage: Sequence[int], layers: int) -> str:
    """The same cut with ``layers`` blocks: the largest stages have fewer, or the smallest more."""
    stages = len(layers_per_stage)
    if stages > layers:
        return f"at most {layers} stages"
    if sum(layers_per_stage) > 2 * layers:
        layers_per_stage = (1,) * stages
    near = [max(1, blocks) for blocks in layers_per_stage]
    while (missing := layers - sum(near)) != 0:
        near[near.index(min(near) if missing > 0 else max(near))] += 1 if missing > 0 else -1
    return f"layers_per_stage={','.join(map(str, near))}"


def columns(layouts: Sequence[Layout], *values: Callable[[Layout], float]) -> tuple[Numbers, ...]:
    """One array for each of ``values``, with an element for each layout."""
    return tuple(np.array([float(value(layout)) for layout in layouts]) for value in values)


def model_columns(layouts: Sequence[Layout], *values: Callable[[ModelShape], float]) -> tuple[Numbers, ...]:
    """The same for ``values`` of the model, each counted once for a model that many layouts share."""
    models = {id(layout.model): layout.model for layout in layouts}
    places = {key: place for place, key in enumerate(models)}
    which = np.array([places[id(layout.model)] for layout in layouts], int)
    return tuple(np.array([float(value(model)) for model in models.values()])[which] for value in values)
