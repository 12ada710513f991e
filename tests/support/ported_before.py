"""Runs a program that trains with torch on given samples: its samplers give the order that unisono draws. Needs only torch.

    python ported_before.py PROGRAM DRAWS.json

``DRAWS.json`` has ``epochs``, the sample ids of each epoch in order, and ``mixup``, what ``numpy.random.beta`` returns.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler, RandomSampler


def give_order(epochs: list[list[int]]) -> None:
    """The samplers that shuffle yield ``epochs``: torch's one after the other, those of processes by their ``set_epoch``."""
    passes = iter(epochs)
    in_order = DistributedSampler.__iter__

    def shuffled(sampler: RandomSampler) -> Iterator[int]:
        order = next(passes)
        assert len(order) == len(sampler)
        return iter(order)

    def shared(sampler: DistributedSampler[Any]) -> Iterator[int]:
        if not sampler.shuffle:
            return in_order(sampler)
        order = epochs[sampler.epoch]
        assert len(order) == sampler.total_size
        return iter(order[sampler.rank :: sampler.num_replicas])

    RandomSampler.__iter__ = shuffled  # type: ignore[method-assign]
    DistributedSampler.__iter__ = shared  # type: ignore[method-assign]


def give_shares(shares: list[float]) -> None:
    """``numpy.random.beta`` returns ``shares``, as many as it is asked for."""
    left = iter(shares)
    np.random.beta = lambda a, b, size: np.array([next(left) for _ in range(size)])  # type: ignore[method-assign]


def main(program: str, draws: str, folder: str = ".") -> int:
    os.chdir(folder)
    drawn = json.loads(Path(draws).read_text())
    give_order(drawn["epochs"])
    give_shares(drawn["mixup"])
    sys.argv = [program]
    runpy.run_path(program, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
