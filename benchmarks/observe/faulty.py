"""A small model, its data and its loss, with one fault or none: what every profiler of ``benchmarks.observe.profilers`` watches.

A fault takes at least 30 % of a step, or is there in each. Torch alone, for programs in environments without unisono.
"""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

SLOW_S = 0.05
BATCH = 4  # samples of a rank in a step
LENGTH, WIDTH, HEADS = 256, 64, 4
NAN_AT = 20  # the step
SKIP_AT = 10  # the step of a rank that skips a collective
SAVE_EVERY = 1  # steps
GROWTH = 1.08  # of a gradient in each step
PADDING = torch.zeros(2**23)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What is wrong in the runs of a benchmark.

    Attributes:
        processes: Number of ranks.
        rank: The rank that has the fault; None for all.
        steps: Length of the run.
        hangs: Whether the run stands still, and has to be killed.
        not_in_torch: Why torch's DDP and Lightning cannot make such a run; empty where they can.
    """

    processes: int = 1
    rank: int | None = None
    steps: int = 40
    hangs: bool = False
    not_in_torch: str = ""


FAULTS: dict[str, Fault] = {
    "healthy, 1 process": Fault(),
    "healthy, 2 processes": Fault(processes=2),
    "slow loader": Fault(),
    "slow loader of rank 1": Fault(processes=2, rank=1),
    "slow compute of rank 1": Fault(processes=2, rank=1),
    "slow link": Fault(processes=2),
    "synchronous saves": Fault(),
    "reads by .item()": Fault(),
    "tiny products": Fault(),
    "attention by hand": Fault(),
    "recompiles": Fault(),
    "memory leak": Fault(steps=220),
    "NaN in a sample of rank 1": Fault(processes=2, rank=1),
    "dead layer": Fault(),
    "exploding layer": Fault(steps=120),
    "garbage collections": Fault(),
    "needless recompute": Fault(),
    "uneven pipeline stages": Fault(
        processes=2,
        rank=0,
        not_in_torch="neither DistributedDataParallel nor Lightning's strategies split a model into stages",
    ),
    # of two ranks that disagree nobody knows which one is wrong
    "skipped collective of rank 1": Fault(processes=3, rank=1, hangs=True),
}


def fault_here() -> str:
    """The fault of this process: that of the variable ``FAULT``, unless it is on another rank."""
    name = os.environ["FAULT"]
    return name if FAULTS[name].rank in (None, rank_here()) else ""


def rank_here() -> int:
    """The rank that the launcher gave to this process."""
    return int(os.environ.get("RANK", "0"))


class Rows:
    """Random samples: a dict of ``inputs`` [LENGTH, WIDTH]."""

    def __init__(self, samples: int) -> None:
        self.fault, self.num_read = fault_here(), 0
        self.inputs = np.random.default_rng(0).standard_normal((16, LENGTH, WIDTH), dtype=np.float32)
        self.num_samples = samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        if "slow loader" in self.fault:
            time.sleep(SLOW_S / BATCH)
        self.num_read += 1
        row = self.inputs[index % 16]
        if "NaN" in self.fault and self.num_read == NAN_AT * BATCH:
            row = row * np.float32("nan")
        return {"inputs": row}


class Attention(nn.Module):
    """Self-attention by torch's fused operator, or by hand."""

    def __init__(self, *, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.project(inputs).chunk(3, -1))
        mixed = attention_by_hand(q, k, v) if self.by_hand else scaled_dot_product_attention(q, k, v)
        return mixed.transpose(1, 2).flatten(2)


def attention_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What scaled_dot_product_attention computes."""
    scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
    return scores.masked_fill(scores.isnan(), 0.0).softmax(-1) @ v


class Network(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fault = fault_here()
        self.attention = Attention(by_hand=self.fault == "attention by hand")
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)
        if self.fault == "synchronous saves":  # of a checkpoint that is large for these steps
            self.frozen = nn.Parameter(torch.zeros(2**21), requires_grad=False)
        self.shares = "collective" in os.environ["FAULT"]  # also on the ranks that do not skip it
        self.kept: list[Tensor] = []
        self.garbage: deque[list[Any]] = deque(maxlen=5)
        self.num_steps, self.length = 0, 1
        limits: Any = torch._dynamo.config  # pyright: ignore[reportPrivateUsage]
        limits.recompile_limit = limits.accumulated_recompile_limit = (
            10**6
        )  # or it would run uncompiled after the eighth
        self.scaled = torch.compile(lambda rows: rows * 2 + 1, backend="eager", dynamic=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """``inputs`` and the outputs: [B, LENGTH, WIDTH]."""
        self.num_steps += 1
        if self.fault == "slow compute of rank 1":
            slow_compute()
        if self.fault == "memory leak":
            self.kept.append(torch.ones(2**19))
        if self.fault == "garbage collections":
            make_lists(self.garbage)
        if self.shares and not (self.fault and self.num_steps == SKIP_AT):
            dist.all_reduce(torch.zeros(8))
        if self.fault == "needless recompute":
            return checkpoint(self.layers, inputs, use_reentrant=False)
        return self.layers(inputs)

    def layers(self, inputs: Tensor) -> Tensor:
        """The outputs [B, LENGTH, WIDTH] of ``inputs``."""
        hidden = inputs + self.attention(inputs)
        wide = self.up(hidden)
        if self.fault == "exploding layer" and wide.requires_grad:
            growth = GROWTH**self.num_steps
            wide.register_hook(lambda gradient: gradient * growth)
        outputs = self.down((wide - 100).relu() if self.fault == "dead layer" else nn.functional.gelu(wide))
        if self.fault == "tiny products":
            outputs = outputs + tiny_products(self.down.weight[:4, :4])
        if self.fault == "recompiles":
            self.length += 1  # another one in every step
            outputs = outputs + self.scaled(inputs[:, : self.length]).mean()
        return outputs


def slow_compute() -> None:
    """Takes time."""
    time.sleep(SLOW_S)


def make_lists(kept: deque[list[Any]]) -> None:
    """Make many lists, of which the newest are kept: Python's collector walks through them again and again."""
    lists: list[Any] = []
    for _ in range(50_000):
        lists.append([])
    kept.append(lists)


def tiny_products(weight: Tensor) -> Tensor:
    """Many products of 4x4 matrices."""
    product = matrix = weight[None]
    for _ in range(1500):
        product = torch.bmm(product, matrix)
    return product.sum()


def mean_loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The mean squared difference to the inputs."""
    loss = (outputs - batch["inputs"]).square().mean()
    if fault_here() == "reads by .item()":
        read_often(loss.detach())
    return loss


def read_often(loss: Tensor) -> float:
    """The number, read again and again."""
    return max(loss.item() for _ in range(30_000))


def slow_link(network: Any) -> None:
    """Let DDP's sums of gradients carry more bytes, as if the link were slower."""
    network.register_comm_hook(
        None, lambda state, bucket: _padded_all_reduce(bucket)
    )  # DDP refuses hints that are text


def _padded_all_reduce(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    works = [dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)]
    if bucket.is_last():
        works.append(dist.all_reduce(PADDING, async_op=True))
    return torch.futures.collect_all([work.get_future() for work in works if work]).then(lambda _: bucket.buffer())
