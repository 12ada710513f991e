"""The model of ``faulty`` as a configuration: ``FAULT=healthy unisono train benchmarks/observe/faulty_run.py``."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from benchmarks.observe.faulty import BATCH, FAULTS, PADDING, Network, Rows, fault_here, mean_loss
from torch import Tensor

from unisono import Components, RunConfig
from unisono.kvstore.allreduce.buckets import BucketedAllReduce


class NamedRows(Rows):
    """The samples with a fingerprint, so that none is read to make one: the fault counts what is read."""

    fingerprint = "rows"

    def read(self, indices: Any) -> dict[str, Any]:
        return {"inputs": np.stack([self[int(index)]["inputs"] for index in indices])}


def objective(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The loss as sum and weight."""
    weight = torch.tensor(float(len(outputs)))
    return mean_loss(outputs, batch) * weight, weight


def config() -> RunConfig:
    """The configuration of one rank."""
    fault = FAULTS[os.environ["FAULT"]]
    if fault_here() == "slow link":
        wait = BucketedAllReduce.wait

        def slow_wait(self: BucketedAllReduce, totals: Any) -> Any:
            dist.all_reduce(PADDING)
            return wait(self, totals)

        BucketedAllReduce.wait = slow_wait
    return RunConfig(
        components=Components(
            model=lambda run: Network(),
            objective=objective,
            data=lambda run: (NamedRows(fault.steps * fault.processes * BATCH), NamedRows(BATCH)),
        )
    )
