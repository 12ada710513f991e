"""A training step with our bucketed all-reduce and with DistributedDataParallel, in two processes. Prints JSON.

    python -m benchmarks.kvstore.step [--models gpt,resnet] [--blocks 20] [--steps 5]

Both sides train in the same two processes, in turns, with the same weights, batches and optimizer; at the end their losses agree.
The floor is 1: what both do is forward, backward, one sum over both processes and SGD.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.paired import ratio, spread
from benchmarks.parallel.ranks import run_ranks

MODELS = ("gpt", "resnet")
LARGEST_DIFFERENCE = 1e-4
_WARMUP = 2


def rank_of(name: str, blocks: int, steps: int) -> dict[str, Any]:
    """This rank's part: seconds of each block by side, and the last loss of each."""
    import torch
    import torch.distributed as dist
    from benchmarks.kvstore.models import build
    from torch.nn.parallel import DistributedDataParallel

    from unisono.dist import job_from_environ, join_world
    from unisono.kvstore.allreduce.buckets import BucketedAllReduce

    torch.set_num_threads(1)
    world = join_world(job_from_environ(os.environ), device_type="cpu", timeout_s=300)
    mine, loss_of = build(name, world.rank)
    theirs, _ = build(name, world.rank)
    ddp = DistributedDataParallel(theirs, gradient_as_bucket_view=True)
    sync = BucketedAllReduce(dict(mine.named_parameters()), world)
    optimizers = {
        side: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
        for side, model in (("mine", mine), ("ddp", theirs))
    }
    totals = torch.zeros(1)
    losses: dict[str, float] = {}

    def our_step() -> None:
        sync.zero_grad()
        loss = loss_of(mine)
        sync.prepare_last_backward()
        loss.backward()
        sync.wait(totals)
        optimizers["mine"].step()
        losses["mine"] = float(loss)

    def ddp_step() -> None:
        # the mean of both ranks' gradients; the loss is scaled to make it the sum that ours is
        optimizers["ddp"].zero_grad(set_to_none=False)
        loss = loss_of(ddp)
        (loss * world.world_size).backward()
        dist.all_reduce(totals)
        optimizers["ddp"].step()
        losses["ddp"] = float(loss)

    sides: dict[str, Callable[[], None]] = {"mine": our_step, "ddp": ddp_step}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    cpu_s: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(-_WARMUP, blocks):
        for side in list(sides) if number % 2 == 0 else list(sides)[::-1]:
            world.barrier()
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            for _ in range(steps):
                sides[side]()
            if number >= 0:
                seconds[side].append((time.perf_counter() - begin_s) / steps)
                cpu_s[side].append((time.process_time() - begin_cpu_s) / steps)
    elements = sum(parameter.numel() for parameter in mine.parameters())
    sync.close()
    world.barrier()
    world.close()
    return {"seconds": seconds, "cpu_s": cpu_s, "losses": losses, "elements": elements}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="of a block")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        print(json.dumps(rank_of(arguments.rank, arguments.blocks, arguments.steps)), flush=True)
        return
    rows: dict[str, Any] = {}
    for name in arguments.models:
        print(f"{name} …", file=sys.stderr, flush=True)
        counts = ["--blocks", str(arguments.blocks), "--steps", str(arguments.steps)]
        outputs = run_ranks(["-m", "benchmarks.kvstore.step", "--rank", name, *counts])
        ranks = [json.loads(lines[-1]) for _, lines in outputs]
        losses = ranks[0]["losses"]
        difference = abs(losses["mine"] / losses["ddp"] - 1)
        if not difference <= LARGEST_DIFFERENCE:
            raise RuntimeError(f"{name}: losses differ by {difference:.1e}, relatively: {losses}")
        slowest = {
            side: [max(each) for each in zip(*(rank["seconds"][side] for rank in ranks), strict=True)]
            for side in ("mine", "ddp")
        }
        rows[name] = {
            "elements": ranks[0]["elements"],
            "wall": ratio(slowest["mine"], slowest["ddp"]),
            "cpu": ratio(ranks[0]["cpu_s"]["mine"], ranks[0]["cpu_s"]["ddp"]),
            "ddp_s": spread(slowest["ddp"]),
            "relative_loss_difference": difference,
        }
    print(json.dumps({"models": rows, "steps_per_block": arguments.steps}, indent=1))


if __name__ == "__main__":
    main()
