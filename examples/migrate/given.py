"""What the snippets of torch are given: a network, samples, a loader of this rank's share, a loss, and the ranks."""

import os

import torch
from nets import deep, dense, half_square
from shared_samples import INPUTS, TARGETS, parts

from unisono import Loader, from_map_style
from unisono.dist import job_from_environ, join_world


def objective(outputs, batch):
    """That sum, and the number of samples."""
    return half_square(outputs, batch["targets"]), torch.tensor(
        float(len(outputs))
    )


def given():
    """Each thing by its name in the snippets, as a function that makes it; ``world`` and ``loader`` are of one job."""
    made = {}
    data = from_map_style(list(zip(INPUTS, TARGETS, strict=True)))

    def world():
        if "world" not in made:
            job = job_from_environ(os.environ)
            made["world"] = join_world(
                job, device_type="cpu", timeout_s=60
            )
        return made["world"]

    def loader():
        place = {
            "rank": world().rank,
            "world_size": world().world_size,
        }
        return Loader(
            data, seed=0, global_batch=16, shuffle=False, **place
        )

    return {
        "net": dense,
        "deep_net": lambda: deep,
        "data": lambda: data,
        "batches": lambda: [
            (torch.from_numpy(x), torch.from_numpy(y))
            for x, y in parts(4)
        ],
        "loss_fn": lambda: half_square,
        "objective": lambda: objective,
        "loader": loader,
        "world": world,
    }
