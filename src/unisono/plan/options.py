"""The fields of a plan that a user may pin; the rest is derived."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from unisono.config import option
from unisono.config.fields import options_repr
from unisono.storage.limits import MAX_STEP_SAMPLES

MOST_RANKS: Final = 1 << 20  # of a mesh axis, and of a job

Precision = Literal["auto", "fp32", "bf16", "fp16", "fp8"]
Recompute = Literal["none", "full", "selective"]
Compile = Literal["off", "model", "regional"]
Zero = Literal[1, 2, 3]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zbv"]
Sync = Literal["local", "dist_sync", "dist_async", "dist_local"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """How the model and the batch are laid out on the hardware."""

    __repr__ = options_repr

    file: str = option(
        "",
        "Strategy file (JSON) with some fields of a plan or all; options and the planner fill in what it leaves out.",
    )
    device: str = option("auto", "auto = the accelerator torch finds, else cpu; or a torch device type.")
    global_batch: int = option(8, "Samples per step, over all ranks.", ge=1, le=MAX_STEP_SAMPLES)
    micro_batch: int = option(0, "Samples per forward pass on one rank; 0 = a rank's whole share, at most 32.", ge=0)
    dp_shard: int = option(
        1,
        "Ranks that share one copy of parameters and optimizer state; groups of them replicate each other. 0 = all.",
        ge=0,
        le=MOST_RANKS,
    )
    zero: Zero = option(
        3,
        "What dp_shard shards: 1 = optimizer state, 2 = gradients too, 3 = parameters too.",
        applies_with="plan.dp_shard or plan.cp above 1",
    )
    tp: int = option(
        1, "Ranks that share each block's linear layers (tensor parallel); next to each other.", ge=1, le=MOST_RANKS
    )
    sequence_parallel: bool = option(
        False,
        "With tp, shard activations between tensor-parallel layers along the sequence (Megatron-LM).",
        applies_with="plan.tp above 1",
    )
    cp: int = option(
        1, "Ranks that share each sequence (context parallel); they share the state too.", ge=1, le=MOST_RANKS
    )
    pp: int = option(1, "Ranks in a row that each run some of the blocks (pipeline).", ge=1, le=MOST_RANKS)
    schedule: Schedule = option(
        "1f1b",
        "Order of a pipeline's forward and backward passes; interleaved and zbv give a rank two stages.",
        applies_with="plan.pp above 1",
    )
    ep: int = option(1, "Ranks among those of dp_shard x cp that share the experts of a layer.", ge=1, le=MOST_RANKS)
    precision: Precision = option(
        "auto",
        "Compute dtype; parameters stay fp32. auto = bf16 where the device computes it natively. fp8 = the linear layers of "
        "blocks, the rest bf16.",
    )
    recompute: Recompute = option("none", "Activations dropped in forward and computed again in backward.")
    offload: bool = option(
        False,
        "Keep activations of blocks in pinned host memory until the backward pass.",
        applies_with="an accelerator",
    )
    compile: Compile = option("off", "torch.compile: the whole model, or each distinct block once (regional).")
    sync: Literal["auto", "local", "dist_sync", "dist_async", "dist_local"] = option(
        "auto",
        "Who keeps ranks in step: dist_sync = all-reduce in every step, dist_async = parameter servers, dist_local = averages "
        "every local_steps. auto = dist_sync from two ranks.",
    )
    compression: str = option(
        "none",
        "Codec of what ranks send: none, auto, fp16, bf16, int8, 1bit, 2bit:0.5, topk:0.01, powersgd:2, an entry point.",
        applies_with="two ranks or more that send gradients or parameters",
    )
    staleness: int | None = option(
        None,
        "Steps a rank may be ahead of the slowest (dist_async); none = no bound, 0 = wait for all.",
        applies_with="plan.sync = dist_async",
        ge=0,
    )
    staleness_lr_decay: bool = option(
        False,
        "Divide the learning rate of a late gradient by 1 + its lateness (dist_async).",
        applies_with="plan.sync = dist_async",
    )
    local_steps: int = option(
        16, "Steps of each rank between two averages (dist_local).", applies_with="plan.sync = dist_local", ge=1
    )
    outer_lr: float = option(
        0.7,
        "Step along the mean change of a round; 1 with outer_momentum 0 = plain mean (dist_local).",
        applies_with="plan.sync = dist_local",
        gt=0,
    )
    outer_momentum: float = option(
        0.9, "Nesterov momentum of that step (dist_local).", applies_with="plan.sync = dist_local", ge=0, lt=1
    )
    num_fragments: int = option(
        1,
        "Parts of the model that are averaged at different steps of a round (dist_local).",
        applies_with="plan.sync = dist_local",
        ge=1,
    )
    outer_delay_steps: int = option(
        0,
        "Steps an average may be under way before it is applied (dist_local).",
        applies_with="plan.sync = dist_local",
        ge=0,
    )
    tf32: bool = option(False, "Allow TF32 matrix products where the device has them.", applies_with="a CUDA device")
    autotune: bool = option(
        False,
        "Let convolution and compile kernels be chosen by timing (not reproducible across runs).",
        applies_with="a CUDA device",
    )
    channels_last: bool = option(
        False, "Lay 4-D parameters and inputs out as NHWC.", applies_with="a model with 4-D parameters"
    )
