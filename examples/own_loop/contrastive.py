"""Two towers learn which picture and text belong together: every pair of the global batch is an example of each other pair.

python contrastive.py runs/contrastive
unisono launch -n 2 -- python contrastive.py runs/contrastive
"""

from __future__ import annotations

import os
import sys
from contextlib import closing

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from unisono import CheckpointOptions, GuardedOptimizer, Loader, LoopCheckpoints, LossScaler, autocast, from_map_style
from unisono.data import Dataset, rank_range
from unisono.dist import World, job_from_environ, join_world
from unisono.parallel import find_device

BATCH, TEMPERATURE = 32, 0.1


def pairs(count: int) -> Dataset:
    """A picture [16] and a text [12] of each of ``count`` things."""
    generator = torch.Generator().manual_seed(0)
    things = torch.randn(count, 6, generator=generator)
    pictures, texts = (things @ torch.randn(6, size, generator=generator) for size in (16, 12))
    return from_map_style([{"picture": p.numpy(), "text": t.numpy()} for p, t in zip(pictures, texts, strict=True)])


def towers() -> nn.ModuleDict:
    torch.manual_seed(0)
    sizes = {"picture": 16, "text": 12}
    return nn.ModuleDict({k: nn.Sequential(nn.Linear(n, 32), nn.GELU(), nn.Linear(32, 8)) for k, n in sizes.items()})


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=5e-3)


def contrast(pictures: Tensor, texts: Tensor) -> Tensor:
    """Mean loss of finding each one's partner among all, in both directions."""
    logits = normalize(pictures.float()) @ normalize(texts.float()).mT / TEMPERATURE
    partners = torch.arange(len(logits), device=logits.device)
    return (cross_entropy(logits, partners) + cross_entropy(logits.mT, partners)) / 2


def with_others(own: Tensor, rows: range, world: World) -> Tensor:
    """The rows of all ranks [BATCH, dim], of which this rank's carry gradients."""
    whole = torch.zeros(BATCH, own.shape[1], dtype=own.dtype, device=own.device)
    whole[rows.start : rows.stop] = own.detach()
    world.all_reduce(whole)
    return torch.cat([whole[: rows.start], own, whole[rows.stop :]])


def main(folder: str, steps: int = 60) -> None:
    job = job_from_environ(os.environ)
    device = find_device("auto", job.local_rank)
    precision = "fp32" if device.type == "cpu" else "fp16"
    with closing(join_world(job, device_type=device.type, timeout_s=300)) as world:
        model = towers().to(device)
        scaler = LossScaler(device)  # in fp32 a scale of 2^16 changes no bit
        optimizer = GuardedOptimizer(model, adam(model), world, clip_norm=1.0, scaler=scaler, expected_weight=BATCH)
        own = rank_range(BATCH, world.rank, world.world_size)
        loader = Loader(pairs(256), seed=0, global_batch=BATCH, rank=world.rank, world_size=world.world_size)
        with (
            loader,
            LoopCheckpoints(
                folder, {"optimizer": optimizer}, world, options=CheckpointOptions(every_steps=10)
            ) as checkpoints,
        ):
            first = checkpoints.resume()
            for batch in loader.iterate(first, steps):
                rows = batch.micro_batches[0]
                with autocast(precision, device.type):
                    codes = {name: tower(rows[name].to(device)) for name, tower in model.items()}
                # Each rank has the loss of the whole batch, but gradients of its own rows only, so their sum over the ranks is
                # the gradient of that loss, once. (A learned temperature would get its whole gradient on every rank.)
                loss = contrast(*(with_others(code.float(), own, world) for code in codes.values()))
                optimizer.backward(loss * BATCH, len(own), last=True)
                skipped = optimizer.step().skipped
                if world.rank == 0:
                    print(f"step {batch.step + 1} {loss:.6f}{' skipped' if skipped else ''}", flush=True)
                checkpoints.after_step(batch.step + 1)
            checkpoints.save(max(first, steps))
        optimizer.close()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
