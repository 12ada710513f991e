"""Small runs with one planted divergence each, and a search that replays them in this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tiny
import torch
import torch.nn.functional as F
from pool import Pool
from torch import Tensor, nn

from unisono import CheckpointOptions, OptimOptions, PlanOptions, Trainer, TrainOptions
from unisono.compare.first_difference import FirstDifference, find_first_difference
from unisono.compare.replayable import ReplayableRun
from unisono.compare.step_record import REPLAY_VARIABLE, ReplayRequest
from unisono.dist import World
from unisono.train.objectives import next_token

STEPS = 3
DIM, HEADS = 16, 2
Objective = Callable[[Any, Any], tuple[Tensor, Tensor]]


class Attention(nn.Module):
    """Attention whose scale and mask can be planted."""

    def __init__(self, scale: float, masked: int) -> None:
        super().__init__()
        self.scale, self.masked = scale, masked
        self.qkv = nn.Linear(DIM, 3 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) * self.scale
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        if self.masked >= 0:
            hidden[self.masked + 1 :, self.masked] = True
        return (scores.masked_fill(hidden, -1e9).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Scale(nn.Module):
    """User code of one layer."""

    def __init__(self, change: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(DIM))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain if self.change == 1.0 else x * self.gain * self.change


class Up(nn.Linear):
    """A linear layer that may compute in another precision."""

    is_low = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_low:
            return super().forward(x)
        assert self.bias is not None
        return F.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16()).float()


class Net(nn.Module):
    """Layers of several kinds, one of them called twice; each can be planted."""

    def __init__(
        self,
        *,
        eps: float = 1e-5,
        approximate: str = "none",
        activation: str = "gelu",
        rate: float = 0.1,
        scale: float = 0.3,
        masked: int = -1,
        change: float = 1.0,
        shift: float = 0.0,
        is_low: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(tiny.VOCAB, DIM)
        self.norm = nn.LayerNorm(DIM, eps=eps)
        self.attention = Attention(scale, masked)
        self.scale = Scale(change)
        self.up = Up(DIM, 2 * DIM)
        self.up.is_low = is_low
        self.act = nn.GELU(approximate=approximate) if activation == "gelu" else nn.ReLU()
        self.down = nn.Linear(2 * DIM, DIM)
        self.drop = nn.Dropout(rate)
        self.register_buffer("shift", torch.full((DIM,), shift))
        self.head = nn.Linear(DIM, tiny.VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens))
        x = x + self.attention(x)
        x = self.scale(x) + self.shift
        x = x + self.drop(self.down(self.act(self.up(x))))
        return self.head(self.norm(x))


class Spoilt(tiny.RaggedTokens):
    """One entry of one sample is another one."""

    def __init__(self, sample: int, entry: str) -> None:
        super().__init__()
        self._sample, self._entry = sample, entry

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        batch = {name: value.copy() for name, value in super().read(indices).items()}
        rows = [int(index) == self._sample for index in indices]
        batch[self._entry][rows, 2] = 1 - batch[self._entry][rows, 2] if self._entry == "weights" else 0
        return batch


def mean_loss(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """The loss of ``next_token``, but the mean where it has the sum."""
    loss, weight = next_token(outputs, batch)
    return loss / weight, weight


def halved_loss(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Divided by the accumulation steps, as if nobody else did."""
    loss, weight = next_token(outputs, batch)
    return loss / 2, weight


def falls(step: int) -> float:
    """A learning rate."""
    return 1e-2 / (1 + step)


def falls_but_once(step: int) -> float:
    """The same but in the second step."""
    return falls(step) * (1.001 if step == 1 else 1.0)


def higher_at_first(step: int) -> float:
    """The same but in the first step."""
    return falls(step) * (1.001 if step == 0 else 1.0)


OBJECTIVES: dict[str, Objective] = {"sum": next_token, "mean": mean_loss, "halved": halved_loss}
RATES: dict[str, Callable[[int], float]] = {"falls": falls, "once": falls_but_once, "first": higher_at_first}


def trainer(run_dir: str, plant: dict[str, Any], world: World | None = None) -> Trainer:
    """A run with a planted divergence; without any for an empty ``plant``."""
    if "tiny" in plant:
        sizes = {"num_layers": 4, "num_heads": 4, "num_kv_heads": 2}
        return tiny.trainer(run_dir, world=world, steps=STEPS, sizes=sizes, every_steps=1, keep_last=9, **plant["tiny"])
    data = Spoilt(*plant["spoilt"]) if "spoilt" in plant else tiny.RaggedTokens()
    optim = {"lr": 1e-2, "weight_decay": 0.1, "clip_norm": 0.1, **plant.get("optim", {})}
    return Trainer(
        Net(**plant.get("net", {})),
        data,
        PlanOptions(device="cpu", global_batch=8, precision="fp32", **plant.get("plan", {})),
        objective=OBJECTIVES[plant.get("objective", "sum")],
        optimizer=OptimOptions(**optim),
        schedule=RATES[plant.get("rate", "falls")],
        options=TrainOptions(steps=STEPS, eval_every_steps=0),
        checkpoint=CheckpointOptions(every_steps=plant.get("every", 1), keep_last=9),
        run_dir=run_dir,
        seed=plant.get("seed", 0),
        resume=plant.get("start", "auto"),
        observe=tiny.QUIET,
        world=world,
    )


def spoil(run: Trainer, plant: dict[str, Any]) -> None:
    """Plant what is no argument of the trainer."""
    if "reseeded" in plant and run.state.step == 0:
        torch.manual_seed(plant["reseeded"])
    if "gradient" in plant:
        layer = dict(run.model.named_modules())[plant["gradient"]]
        layer.register_forward_hook(lambda _layer, _args, out: out.register_hook(lambda g: g * 1.001) and None)
    layers = dict(run.model.named_modules())
    if plant.get("fault") in layers:  # a stage of a pipeline has some alone
        layers[plant["fault"]].register_forward_hook(lambda _layer, _args, out: out * 3)
    if "spoilt_rank" in plant and run.world.rank == plant["spoilt_rank"]:
        dict(run.model.named_modules())["down"].register_forward_hook(lambda _layer, _args, out: out * 1.5)
    if "left_out" in plant:
        sync: Any = run._loop.runner.train_step.sync
        reduce = sync._sum

        def without(tensor: Tensor) -> Any:
            if run.world.rank == plant["left_out"] and tensor.numel() > 8:
                tensor.numpy()[:] = 0
            return reduce(tensor)

        sync._sum = without


def train(world: World | None, run_dir: str, plant: dict[str, Any]) -> None:
    """Make the run; between two of its steps a value of its state may change (``flipped``)."""
    with suppress(SystemExit), trainer(run_dir, plant, world) as run:  # a replay ends the process
        spoil(run, plant)
        for step in run:
            if step.index == 2 and "flipped" in plant:
                tensor = run.state.local_state()[plant["flipped"]]
                with torch.no_grad():
                    first = tensor.view(-1)[3:4]
                    first.copy_(torch.nextafter(first, first + 1))


def replayed(world: World | None, run_dir: str, plant: dict[str, Any], request: str) -> None:
    """Make the steps of a replay."""
    os.environ[REPLAY_VARIABLE] = request
    try:
        train(world, run_dir, plant)
    finally:
        del os.environ[REPLAY_VARIABLE]


def search(
    folder: Path, pool: Pool, a: dict[str, Any], b: dict[str, Any], *, ranks: tuple[int, int] = (1, 1)
) -> FirstDifference:
    """Make two runs, and find where they diverge; neither folder changes by it."""
    plants = {folder / "a": (a, ranks[0]), folder / "b": (b, ranks[1])}
    for run_dir, (plant, count) in plants.items():
        if count == 1:
            train(None, str(run_dir), plant)
        else:
            pool.run(train, str(run_dir), plant, ranks=count)
    return find(folder, pool, plants)


def find(folder: Path, pool: Pool, plants: dict[Path, tuple[dict[str, Any], int]]) -> FirstDifference:
    """Find where the two runs of ``plants`` diverge."""

    def replay(run: ReplayableRun, request: ReplayRequest) -> None:
        file = Path(request.record_dir).parent / "request.json"
        file.write_bytes(msgspec.json.encode(request))
        plant, count = plants[run.run_dir]
        if count == 1:
            replayed(None, str(run.run_dir), plant, str(file))
        else:
            pool.run(replayed, str(run.run_dir), plant, str(file), ranks=count)

    scratch = folder / "scratch"
    scratch.mkdir(parents=True)
    before = {run_dir: _files(run_dir) for run_dir in plants}
    found = find_first_difference(*plants, replay=replay, scratch=scratch)
    assert before == {run_dir: _files(run_dir) for run_dir in plants}
    return found


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}
