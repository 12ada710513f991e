"""Gathering parameters in a 16-bit run of two processes: the trainer and FSDP2 by hand in two ways. Prints JSON.

    python -m benchmarks.parallel.gathers [--blocks 24] [--steps 1] [--set KEY=VALUE]

    autocast    FSDP2 gathers in fp32 and torch's autocast converts in each pass
    policy      FSDP2's MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32): norms and hidden states are in bf16 too, so
                losses differ by more

Both sides train the same GPT on the same batches with ZeRO 3, in the same processes of one thread, block by block in turns. Bytes
are those that a rank's gathers of a step return.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from benchmarks.hand import build_adamw, build_gpt, ranks_step, torch_batches
from benchmarks.parallel.hand.common import Batch, rows
from benchmarks.parallel.ranks import run_ranks
from benchmarks.parallel.sides import SIZE, by_trainer
from benchmarks.step_time import WARMUP_STEPS, alternate, compare
from benchmarks.workload import Workload, prepare
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from unisono.dist import job_from_environ, join_world
from unisono.parallel import fsdp
from unisono.parallel.timed_collectives import FSDP_ALL_GATHER

OTHERS = ("autocast", "policy")
_SETTINGS = ("plan.dp_shard=2", "plan.zero=3")


class Gathers:
    """A gather of FSDP2 that counts the bytes it returns."""

    def __init__(self, gather: Callable[..., Any]) -> None:
        self._gather, self.nbytes = gather, 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the result."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False, **_: Any
    ) -> Any:
        self.nbytes += output_tensor.nbytes
        return self._gather(output_tensor, input_tensor, group=group, async_op=async_op)


def by_hand(name: str, workload: Workload, gathers: Gathers) -> Callable[[Batch, float], float]:
    """The step of one of ``OTHERS``."""
    model = build_gpt(workload)
    in_bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = in_bf16 if name == "policy" else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy, reshard_after_forward=False)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.set_custom_all_gather(gathers)
    optimizer, clip = build_adamw(model, workload.optim, fused=True), workload.optim["clip_norm"]

    def step(batch: Batch, lr: float) -> float:
        # no copy is kept: it would outlive the gathered weight
        casts = torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if name == "autocast" else nullcontext()
        with casts:
            return ranks_step(model, optimizer, rows(batch), lr, clip).item()

    return step


def one_rank(arguments: argparse.Namespace) -> dict[str, Any]:
    """This process's part: the trainer and one other in turns."""
    torch.set_num_threads(1)
    world = join_world(job_from_environ(os.environ), device_type="cpu", timeout_s=300)
    workload = Workload.read(arguments.workload)
    losses: dict[str, list[float]] = {"mine": [], "other": []}
    gathers = {"mine": Gathers(FSDP_ALL_GATHER), "other": Gathers(dist.all_gather_into_tensor)}
    try:
        with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
            shared = Path(world.broadcast_json(folder))
            step = by_hand(arguments.other, workload, gathers["other"])
            batches = zip(torch_batches(workload), workload.lrs, strict=True)
            settings = [*arguments.set, *_SETTINGS]
            with (
                patch.object(fsdp, "FSDP_ALL_GATHER", gathers["mine"]),
                by_trainer(settings, shared, world, len(workload.lrs), precision="bf16") as (_, ours),
            ):

                def mine() -> None:
                    losses["mine"].append(float(next(ours).stats[0]))

                def other() -> None:
                    losses["other"].append(step(*next(batches)))

                for _ in range(WARMUP_STEPS):
                    mine()
                    other()
                times = alternate(mine, other, arguments.blocks, arguments.steps, world.barrier)
            ranks = world.all_gather_json({name: value.tolist() for name, value in times.items()})
            for name in times:
                of_ranks = np.array([each[name] for each in ranks])  # [ranks, blocks, 2]
                times[name] = np.stack([of_ranks[..., 0].max(0), of_ranks[..., 1].sum(0)], axis=-1)
            world.barrier()
    finally:
        world.close()
    per_step = {name: each.nbytes / len(losses[name]) for name, each in gathers.items()}
    difference = np.abs(np.array(losses["mine"]) / np.array(losses["other"]) - 1).max()
    return {
        **compare(times),
        "gathered_bytes_per_step": per_step["mine"],
        "gathered_bytes_over_hand": round(per_step["mine"] / per_step["other"], 4),
        "largest_relative_loss_difference": float(difference),
        "steps_compared": len(losses["mine"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=24, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=1, help="steps per block")
    parser.add_argument("--set", action="append", default=[], help="a setting of the run, as for unisono train")
    parser.add_argument("--other", choices=OTHERS, help=argparse.SUPPRESS)
    parser.add_argument("--workload", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.other:
        result = one_rank(arguments)
        if os.environ["RANK"] == "0":
            print(json.dumps(result), flush=True)
        return
    settings = [*SIZE, "model.tied=false", *arguments.set]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        prepare(Path(folder), settings, arguments.blocks * arguments.steps + WARMUP_STEPS)
        command = ["-m", "benchmarks.parallel.gathers", "--workload", folder]
        command += ["--blocks", str(arguments.blocks), "--steps", str(arguments.steps)]
        command += [part for setting in settings for part in ("--set", setting)]
        for name in OTHERS:
            print(f"{name} …", file=sys.stderr, flush=True)
            lines = next(lines for _, lines in run_ranks([*command, "--other", name]) if lines)
            found[name] = json.loads(lines[-1])
    print(json.dumps({"others": found, "settings": settings, "blocks": arguments.blocks}, indent=1))


if __name__ == "__main__":
    main()
