"""Tensor bytes of a rank where the state is sharded over two, by ZeRO stage: FSDP2 by hand and under Accelerate. Prints JSON.

    python -m benchmarks.parallel.memory [--rounds 3] [--steps 4] [--set KEY=VALUE] [--cache DIR]

Each contestant is two processes that train the same GPT on the same batches, two micro-batches of one sample a rank. ``state`` is
what the rank's parameters and optimizer state take, and must be what the plan says to the byte: rows of every parameter, two
moments of the same shape and a step count. ``peak`` is the most of a step after the first, over all tensors (``allocations``),
of the larger rank, the median over rounds: how far gathering is ahead of computing depends on who is faster.
The hand-written side keeps at each stage what ours keeps. Accelerate leaves FSDP off on a CPU; here its state is set as it
would set it elsewhere.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.hand import torch_batches
from benchmarks.parallel.allocations import Allocations
from benchmarks.parallel.ranks import RANKS, run_ranks
from benchmarks.parallel.sides import LARGEST_DIFFERENCE, SIZE, by_trainer
from benchmarks.workload import Workload, prepare
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

MICRO_BATCH = 1
BATCH = (f"plan.global_batch={2 * RANKS * MICRO_BATCH}", f"plan.micro_batch={MICRO_BATCH}")
STAGES = (1, 2, 3)
CONTESTANTS = (*(f"{side} {zero}" for zero in STAGES for side in ("unisono", "hand")), "accelerate 2", "accelerate 3")


def expected_state_bytes(shapes: Mapping[str, tuple[int, ...]], rank: int) -> int:
    """What AdamW's parameters in float32, cut by rows, take on a rank: by arithmetic."""
    total = 0
    for shape in shapes.values():
        rows = -(-shape[0] // RANKS)
        here = max(0, min(rows, shape[0] - rank * rows))
        total += 3 * 4 * here * math.prod(shape[1:]) + 4
    return total


def held_bytes(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
    """What a rank's parameters and the optimizer's state of them take."""

    def local(tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    tensors = [*parameters, *(value for state in optimizer.state.values() for value in state.values())]
    return sum(local(tensor).nbytes for tensor in tensors)


def report(seen: Allocations, state_bytes: int, losses: list[float]) -> None:
    """Write this rank's result."""
    peaks = [peak for name, (_, peak) in seen.phases().items() if name.startswith("step") and name != "step 0"]
    print(json.dumps({"state_bytes": state_bytes, "peak_bytes": max(peaks), "losses": losses}), flush=True)


def ours(arguments: argparse.Namespace, zero: int) -> None:
    """The trainer, whole."""
    from unisono.dist import job_from_environ, join_world

    world = join_world(job_from_environ(os.environ), device_type="cpu", timeout_s=300)
    settings = [*arguments.set, *BATCH, f"plan.dp_shard={RANKS}", f"plan.zero={zero}"]
    losses: list[float] = []
    try:
        with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder, Allocations() as seen:
            shared = Path(world.broadcast_json(folder))
            with by_trainer(settings, shared, world, arguments.steps) as (run, steps):
                for number in range(arguments.steps):
                    seen.mark(f"step {number}")
                    losses.append(float(next(steps).stats[0]))
                seen.mark("end")
                state_bytes = held_bytes(list(run.state.sharded.parameters.values()), run.state.optimizer)
            world.barrier()
        report(seen, state_bytes, losses)
    finally:
        world.close()


def hand(arguments: argparse.Namespace, zero: int) -> None:
    """FSDP2 by hand."""
    import torch.distributed as dist
    from benchmarks.parallel.hand.data import accumulating, cut

    dist.init_process_group("gloo")
    workload = Workload.read(arguments.workload)
    with Allocations() as seen:
        model, optimizer = cut(workload, zero=zero)
        step = accumulating(model, optimizer, workload.optim["clip_norm"], zero=zero, micro_batch=MICRO_BATCH)
        losses: list[float] = []
        for number, (batch, lr) in enumerate(zip(torch_batches(workload), workload.lrs, strict=True)):
            seen.mark(f"step {number}")
            losses.append(step(batch, lr))
        seen.mark("end")
    report(seen, held_bytes(list(model.parameters()), optimizer), losses)
    dist.destroy_process_group()


def accelerated(arguments: argparse.Namespace, zero: int) -> None:
    """Accelerate's FSDP2, in an environment of its own; below stage 3 parameters stay gathered after the forward pass."""
    import accelerate
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from benchmarks.hand import build_adamw, build_gpt, mean_loss, set_lr

    workload = Workload.read(arguments.workload)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=zero == 3,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
    )
    with Allocations() as seen:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
        model = build_gpt(workload)
        model, optimizer = accelerator.prepare(model, build_adamw(model, workload.optim, fused=True))
        losses: list[float] = []
        for number, (batch, lr) in enumerate(zip(torch_batches(workload), workload.lrs, strict=True)):
            seen.mark(f"step {number}")
            weight, rank, total = batch["weights"].sum(), accelerator.process_index, torch.zeros(())
            for first in range(0, 2 * MICRO_BATCH, MICRO_BATCH):
                begin = 2 * MICRO_BATCH * rank + first
                micro = {name: tensor[begin : begin + MICRO_BATCH] for name, tensor in batch.items()}
                with accelerator.accumulate(model):
                    # it divides by the micro-batches, FSDP by the ranks, a mean by its own weight
                    loss = mean_loss(model, micro) * micro["weights"].sum() / weight
                    accelerator.backward(loss * 2 * RANKS)
                    total += loss.detach()
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), workload.optim["clip_norm"])
                    set_lr(optimizer, lr)
                    optimizer.step()
                    optimizer.zero_grad()
            losses.append(accelerator.reduce(total, "sum").item())
        seen.mark("end")
    report(seen, held_bytes(list(model.parameters()), optimizer.optimizer), losses)
    accelerator.end_training()


def run_all(arguments: argparse.Namespace, settings: list[str], workload: Path) -> dict[str, Any]:
    """Every contestant, one after the other; the ratios."""
    from benchmarks.contestants import interpreter  # needs more than Accelerate's environment has

    rows: dict[str, Any] = {}
    not_run: dict[str, str] = {}
    losses: dict[str, list[float]] = {}
    shapes = {name: value.shape for name, value in Workload.read(workload).weights.items()}
    expected = [expected_state_bytes(shapes, rank) for rank in range(RANKS)]
    for name in arguments.contestants:
        print(f"{name} …", file=sys.stderr, flush=True)
        python = interpreter("accelerate" if name.startswith("accelerate") else "", arguments.cache)
        command = ["-m", "benchmarks.parallel.memory", "--rank", name, "--workload", str(workload)]
        command += ["--steps", str(arguments.steps), *(part for each in settings for part in ("--set", each))]
        rounds: list[list[dict[str, Any]]] = []
        try:
            for _ in range(arguments.rounds):
                rounds.append([json.loads(lines[-1]) for _, lines in run_ranks(command, python=python)])
        except RuntimeError as error:
            not_run[name] = str(error).strip().splitlines()[-1]
            continue
        ranks = rounds[0]
        losses[name] = ranks[0]["losses"]
        peaks = [max(rank["peak_bytes"] for rank in each) for each in rounds]
        rows[name] = {
            "peak_bytes": int(np.median(peaks)),
            "peaks_bytes": peaks,
            "state_bytes": [rank["state_bytes"] for rank in ranks],
            "state_minus_expected_bytes": [
                rank["state_bytes"] - want for rank, want in zip(ranks, expected, strict=True)
            ],
        }
    base = next(iter(losses.values()))
    for name, row in rows.items():
        difference = max(abs(a / b - 1) for a, b in zip(losses[name], base, strict=True))
        if not difference <= LARGEST_DIFFERENCE:
            raise ValueError(f"{name}: losses differ by {difference:.1e}, relatively")
        row["largest_relative_loss_difference"] = difference
        side, zero = name.split()
        if side == "unisono":
            for other in (f"hand {zero}", f"accelerate {zero}"):
                if other in rows:
                    row[f"peak_over_{other}"] = round(row["peak_bytes"] / rows[other]["peak_bytes"], 4)
    return {"contestants": rows, "not_run": not_run, "expected_state_bytes": expected, "settings": [*settings, *BATCH]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--contestants", type=lambda text: text.split(","), default=list(CONTESTANTS))
    parser.add_argument("--set", action="append", default=[], help="a setting of the run, as for unisono train")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/unisono-bench").expanduser())
    parser.add_argument("--rank", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--workload", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        torch.set_num_threads(1)
        side, zero = arguments.rank.split()
        {"unisono": ours, "hand": hand, "accelerate": accelerated}[side](arguments, int(zero))
        return
    settings = [*SIZE, *arguments.set]
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        prepare(Path(folder), [*settings, *BATCH], arguments.steps)
        print(json.dumps(run_all(arguments, settings, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
