"""What the snippets of torch are given: a network, samples, a loader of this rank's share, a loss, and the ranks."""

import os

import numpy as np
import torch
from samples import BIAS, DOWN, INPUTS, TARGETS, UP, WEIGHT, parts
from torch import nn

from unisono import Loader, from_map_style
from unisono.dist import job_from_environ, join_world


def dense():
    """A layer with the weights that each library begins with."""
    net = nn.Linear(3, 1)
    net.load_state_dict(
        {
            "weight": torch.from_numpy(WEIGHT),
            "bias": torch.from_numpy(BIAS),
        }
    )
    return net


class Block(nn.Module):
    """Two matrix products of a residual block."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(3, 8, bias=False)
        self.down = nn.Linear(8, 3, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Module):
    """Two blocks and a sum over the features."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return inputs.sum(1, keepdim=True)


def deep():
    """``Blocks`` with the weights that each library begins with."""
    net = Blocks()
    with torch.no_grad():
        for block in net.blocks:
            block.up.weight.copy_(torch.from_numpy(UP))
            block.down.weight.copy_(torch.from_numpy(0.1 * np.tile(DOWN, (3, 1))))
    return net


def half_square(outputs, targets):
    """The sum of half the squared errors."""
    return 0.5 * (outputs - targets).square().sum()


def objective(outputs, batch):
    """That sum, and the number of samples."""
    return half_square(outputs, batch["targets"]), torch.tensor(float(len(outputs)))


def given():
    """Each thing by its name in the snippets, as a function that makes it; ``world`` and ``loader`` are of one job."""
    made = {}
    data = from_map_style(list(zip(INPUTS, TARGETS, strict=True)))

    def world():
        if "world" not in made:
            job = job_from_environ(os.environ)
            made["world"] = join_world(job, device_type="cpu", timeout_s=60)
        return made["world"]

    def loader():
        place = {"rank": world().rank, "world_size": world().world_size}
        return Loader(data, seed=0, global_batch=8, shuffle=False, **place)

    return {
        "net": dense,
        "deep_net": lambda: deep,
        "data": lambda: data,
        "batches": lambda: [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in parts(4)],
        "loss_fn": lambda: half_square,
        "objective": lambda: objective,
        "loader": loader,
        "world": world,
    }
