"""Two small models with something to learn, trained by the Trainer as one rank of a run: what ``convergence`` compares.

``gpt``: text of a Markov chain of order two over 64 symbols; the best that can be reached is its entropy. ``resnet``: one of ten
patterns, shifted, under noise; every fifth has a class drawn at random, so that here too the best is known. Every sample of a
run is seen once, so held-out loss is what was learned, not remembered.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unisono import (
    CheckpointOptions,
    ModelOptions,
    OptimOptions,
    PlanOptions,
    ScheduleOptions,
    Trainer,
    TrainOptions,
)
from unisono.models.gpt import GPT
from unisono.models.resnet import ResNet, ResNetOptions
from unisono.train.objectives import cross_entropy, next_token

SYMBOLS, LENGTH, _KINDS = 64, 64, 2
CLASSES, SIDE, _NOISE, _WRONG = 10, 8, 0.4, 0.2
HELD_OUT = 1024
BATCH: Mapping[str, int] = {"gpt": 16, "resnet": 32}
WARMUP_STEPS = 16

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Learning:
    """One run: the model, its optimizer, and what the plan says beyond batch and device."""

    model: str
    optimizer: str
    lr: float
    plan: Mapping[str, Any]
    seed: int
    steps: int
    run_dir: str


class Held:
    """Samples in memory."""

    def __init__(self, arrays: Arrays, fingerprint: str) -> None:
        self._arrays, self.fingerprint = arrays, fingerprint

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def read(self, indices: NDArray[np.int64]) -> Arrays:
        """Copies of them."""
        return {name: array[indices] for name, array in self._arrays.items()}


@cache
def chain() -> NDArray[np.float64]:
    """Of the next symbol, after one of a kind [2] and a symbol [64]: probabilities [2, 64, 64], a few of them large."""
    scores = np.random.default_rng(11).standard_normal((_KINDS, SYMBOLS, SYMBOLS))
    likely = np.exp(2.5 * scores)
    return likely / likely.sum(-1, keepdims=True)


def least_loss(model: str) -> float:
    """What no model can be better than, in nats: the entropy of a symbol of ``chain`` given those before, or that of a class
    where the pattern is known."""
    if model == "resnet":
        wrong = _WRONG / CLASSES
        right = 1 - _WRONG + wrong
        return -right * math.log(right) - (CLASSES - 1) * wrong * math.log(wrong)
    rows = chain().reshape(-1, SYMBOLS)
    nats = -(rows * np.log(rows)).sum(-1)  # [kind x symbol]
    follows = np.zeros((_KINDS, SYMBOLS, _KINDS, SYMBOLS))  # a context comes after another, by the symbol between
    for symbol in range(SYMBOLS):
        follows[:, symbol, symbol % _KINDS, :] = chain()[:, symbol]
    moves = follows.reshape(_KINDS * SYMBOLS, -1)
    often = np.full(len(moves), 1 / len(moves))
    for _ in range(100):
        often = often @ moves
    return float(often @ nats)


@cache
def text(samples: int, seed: int) -> Held:
    """``samples`` pieces of text [samples, 64], with the symbols that follow as targets."""
    draws = np.random.default_rng(seed)
    edges = chain().cumsum(-1)
    symbols = np.zeros((samples, LENGTH + 3), np.int64)
    symbols[:, :2] = draws.integers(SYMBOLS, size=(samples, 2))
    for place in range(2, symbols.shape[1]):
        context = edges[symbols[:, place - 2] % _KINDS, symbols[:, place - 1]]
        symbols[:, place] = (context < draws.random((samples, 1))).sum(-1).clip(max=SYMBOLS - 1)
    tokens, targets = symbols[:, 2:-1], symbols[:, 3:]
    return Held({"tokens": tokens, "targets": targets, "weights": np.ones(tokens.shape, np.float32)}, f"chain-{seed}")


@cache
def images(samples: int, seed: int) -> Held:
    """``samples`` images [samples, 3, 8, 8] of ten classes."""
    coarse = np.random.default_rng(12).standard_normal((CLASSES, 3, 4, 4))
    patterns = coarse.repeat(SIDE // 4, 2).repeat(SIDE // 4, 3)
    draws = np.random.default_rng(seed)
    targets = draws.integers(CLASSES, size=samples)
    shown = draws.standard_normal((samples, 3, SIDE, SIDE), np.float32) * _NOISE
    for image, (down, right), target in zip(shown, draws.integers(SIDE, size=(samples, 2)), targets, strict=True):
        image += np.roll(patterns[target], (down, right), (1, 2))
    targets = np.where(draws.random(samples) < _WRONG, draws.integers(CLASSES, size=samples), targets)
    return Held({"image": shown, "targets": targets}, f"patterns-{seed}")


def build(model: str) -> torch.nn.Module:
    """GPT or ResNet with group norm, of 0.1 to 0.2 million parameters."""
    if model == "gpt":
        return GPT(ModelOptions(num_layers=2, dim=64, num_heads=4, num_kv_heads=4, vocab_size=SYMBOLS))
    sizes = ResNetOptions(classes=CLASSES, depths=(1, 1, 1), widths=(16, 32, 64), norm="group", groups=8, stem="small")
    return ResNet(sizes)


def learn(learning: Learning, environ: Mapping[str, str]) -> None:
    """Be one rank of this run, which ``environ`` says; held-out loss after half the steps and all is in its events."""
    for name in [name for name in os.environ if name.startswith("UNISONO_")]:
        del os.environ[name]  # of the run before
    os.environ.update(environ)
    torch.set_num_threads(1)
    torch.manual_seed(learning.seed)
    batch, data = BATCH[learning.model], text if learning.model == "gpt" else images
    with Trainer(
        build(learning.model),
        data(batch * learning.steps, 1),
        PlanOptions(device="cpu", precision="fp32", global_batch=batch, **learning.plan),
        objective=next_token if learning.model == "gpt" else cross_entropy,
        optimizer=OptimOptions(kind=learning.optimizer, lr=learning.lr),
        schedule=ScheduleOptions(kind="cosine", warmup_steps=WARMUP_STEPS),
        options=TrainOptions(steps=learning.steps, eval_every_steps=learning.steps // 2, num_eval_samples=0),
        checkpoint=CheckpointOptions(every_steps=0),
        run_dir=Path(learning.run_dir),
        seed=learning.seed,
        eval_data=data(HELD_OUT, 2),
    ) as run:
        run.fit()
