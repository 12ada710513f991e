"""A GAN learns points on a circle: two models, two optimizers, two guards.

python gan.py runs/gan
unisono launch -n 2 -- python gan.py runs/gan
"""

from __future__ import annotations

import os
import sys
from contextlib import closing

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from unisono import CheckpointOptions, GuardedOptimizer, Loader, LoopCheckpoints, StepGuard, from_map_style, initialize
from unisono.data import rank_range
from unisono.dist import job_from_environ, join_world
from unisono.parallel import find_device

BATCH, NOISE = 64, 8


def circle(count: int) -> Tensor:
    """Points [count, 2] near the unit circle."""
    generator = torch.Generator().manual_seed(0)
    angle = 2 * torch.pi * torch.rand(count, generator=generator)
    return torch.stack([angle.cos(), angle.sin()], dim=1) + 0.02 * torch.randn(count, 2, generator=generator)


def noise(step: int) -> Tensor:
    """Noise of the whole batch [BATCH, NOISE], a function of the step: a run that resumes draws the same."""
    return torch.randn(BATCH, NOISE, generator=torch.Generator().manual_seed(step))


def models() -> tuple[nn.Module, nn.Module]:
    """Generator and discriminator."""
    parts = (nn.Sequential(nn.Linear(n, 32), nn.LeakyReLU(0.2), nn.Linear(32, m)) for n, m in ((NOISE, 2), (2, 1)))
    rules = [{"match": "*", "kind": "xavier", "distribution": "gaussian", "magnitude": 2.0}]
    generator, discriminator = (initialize(part, rules, seed=seed) for seed, part in enumerate(parts))
    return generator, discriminator


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.5, 0.999))


def discriminator_losses(discriminator: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    return softplus(-discriminator(real)) + softplus(discriminator(fake.detach()))


def generator_losses(discriminator: nn.Module, fake: Tensor) -> Tensor:
    return softplus(-discriminator(fake))


def main(folder: str, steps: int = 60) -> None:
    job = job_from_environ(os.environ)
    device = find_device("auto", job.local_rank)
    with closing(join_world(job, device_type=device.type, timeout_s=300)) as world:
        generator, discriminator = (model.to(device) for model in models())
        generate = GuardedOptimizer(generator, adam(generator), world, guard=StepGuard(device))
        discriminate = GuardedOptimizer(discriminator, adam(discriminator), world, guard=StepGuard(device))
        data = from_map_style([{"points": point.numpy()} for point in circle(512)])
        own = rank_range(BATCH, world.rank, world.world_size)  # this rank's rows of the batch
        loader = Loader(data, seed=0, global_batch=BATCH, rank=world.rank, world_size=world.world_size)
        parts = {"generate": generate, "discriminate": discriminate}
        with loader, LoopCheckpoints(folder, parts, world, options=CheckpointOptions(every_steps=10)) as checkpoints:
            first = checkpoints.resume()
            for batch in loader.iterate(first, steps):
                real = batch.micro_batches[0]["points"].to(device)
                fake = generator(noise(batch.step)[own.start : own.stop].to(device))
                discriminate.backward(discriminator_losses(discriminator, real, fake).sum(), len(real), last=True)
                judged = discriminate.step()
                # leaves the gradients of the discriminator alone
                generate.backward(generator_losses(discriminator, fake).sum(), len(fake), last=True)
                made = generate.step()
                if world.rank == 0:
                    print(f"step {batch.step + 1} {judged.loss:.6f} {made.loss:.6f}", flush=True)
                checkpoints.after_step(batch.step + 1)
            checkpoints.save(max(first, steps))
        generate.close()
        discriminate.close()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
