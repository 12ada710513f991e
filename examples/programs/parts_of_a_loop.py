"""A plain torch loop with three parts of unisono: its loader, its key-value store and its loss scale.

python parts_of_a_loop.py
unisono launch -n 2 -- python parts_of_a_loop.py
"""

from __future__ import annotations

import os
from contextlib import closing

import torch
from torch import nn

from unisono import Loader, LossScaler, create_kvstore, from_map_style
from unisono.dist import job_from_environ, join_world
from unisono.optim import make_skippable


def points(count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Points of a square, and whether each is in the circle in it."""
    square = 2 * torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) - 1
    return list(zip(square, (square.norm(dim=1) < 0.8).float(), strict=True))


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = make_skippable(torch.optim.Adam(model.parameters(), lr=1e-2))
    parameters = dict(model.named_parameters())
    scaler = LossScaler(torch.device("cpu"), init_scale=2.0**24, growth_interval=50)
    with closing(join_world(job_from_environ(os.environ), device_type="cpu", timeout_s=300)) as world:
        store = create_kvstore("dist_sync", world)
        store.init(parameters)  # every worker begins with rank 0's values
        loader = Loader(
            from_map_style(points(2048, 1)), seed=0, global_batch=128, rank=world.rank, world_size=world.world_size
        )
        with loader, closing(store):
            for batch in loader.iterate(0, 160):
                for rows in batch.micro_batches:
                    with torch.autocast("cpu", torch.float16):
                        logits = model(rows["inputs"])[:, 0]
                    losses = nn.functional.binary_cross_entropy_with_logits(
                        logits.float(), rows["targets"], reduction="sum"
                    )
                    scaler.scale(losses / 128).backward()
                gradients = [parameter.grad for parameter in parameters.values()]
                store.pushpull(dict(zip(parameters, gradients, strict=True)), out=gradients).wait()
                finite = torch.stack([gradient.isfinite().all() for gradient in gradients]).all()
                optimizer.found_inf, optimizer.grad_scale = (~finite).float(), scaler.value
                optimizer.step()
                scaler.update(~finite)
                optimizer.zero_grad()
    held_out = points(1024, 2)
    with torch.no_grad():
        inside = model(torch.stack([point for point, _ in held_out]))[:, 0] > 0
    accuracy = float((inside == torch.stack([label for _, label in held_out]).bool()).float().mean())
    print(f"rank {world.rank} of {world.world_size}: accuracy {accuracy:.3f}, loss scale {float(scaler.value):g}")
    assert accuracy > 0.93, accuracy
    assert float(scaler.value) < 2.0**24  # the first steps overflowed and were skipped


if __name__ == "__main__":
    main()
