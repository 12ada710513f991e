"""What pruning costs a GPT and what further training brings back, and what training with rounded numbers brings int4.

For ``benchmarks.compress``. Each function is one seed's run.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from unisono.cli.main import cli
from unisono.models.gpt import GPT
from unisono.models.options import ModelOptions
from unisono.models.quantize_options import QuantizeOptions
from unisono.models.quantized import store
from unisono.models.quantized_model import make_aware, make_stored, select_layers
from unisono.optim import OptimOptions, build_optimizer

CRITERIA: Final = ("activation", "magnitude", "taylor")


def unisono(*arguments: object) -> dict[str, Any]:
    """The JSON that a command prints. It runs in this process, so that no start is waited for."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        cli.main([*map(str, arguments), "--json"], standalone_mode=False)
    return json.loads(out.getvalue())


def pruned(seed: int, steps: int, further_steps: int) -> dict[str, Any]:
    """Held-out losses of a GPT on the standard library's source before and after pruning, and after further training.

    Half of the heads and of the hidden units go. The further training is that of the run, from the pruned weights and from
    drawn ones.
    """
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"XDG_CACHE_HOME": f"{folder}/cache"}):
        root = Path(folder)
        settings = {
            "model.num_layers": 3,
            "model.dim": 64,
            "train.steps": steps,
            "train.eval_every_steps": 0,
            "run.seed": seed,
            "plan.precision": "fp32",
            "observe.console": "off",
        }

        def trained(name: str, *given: str) -> float:
            return unisono("train", "--debug", *given, f"--set=run.dir={root / name}")["evaluation"]["loss"]

        losses = {"whole": trained("whole", *(f"--set={key}={value}" for key, value in settings.items()))}
        figures: dict[str, Any] = {}
        for criterion in CRITERIA:
            out = f"--out={root / criterion}"
            found = unisono("prune", root / "whole", "--heads=0.5", "--ffn=0.5", f"--criterion={criterion}", out)
            figures = found["figures"]
            losses[f"pruned by {criterion}"] = figures["after"]["evaluation"]["loss"]
        small, tuning = root / CRITERIA[0], f"--set=train.steps={further_steps}"
        for name, weights in (
            (f"by {CRITERIA[0]}, trained further", small),
            ("from drawn weights, trained so long", ""),
        ):
            start = f"--set=model.weights={weights}"
            losses[name] = trained(name.replace(" ", "-"), str(small / "config.toml"), tuning, start)
    sizes = {when: figures[when]["stored_bytes"] / 2**20 for when in ("before", "after")}
    return {"loss": losses, "mib": sizes, "time_ratio": figures["latency_ratio"]}


def rounded(seed: int, steps: int, further_steps: int) -> dict[str, float]:
    """Held-out losses of one trained model after the same further steps in floating point or with rounded numbers, and of
    both as int4."""
    options = QuantizeOptions(scheme="int4")
    sizes = ModelOptions(num_layers=2, dim=32, num_heads=4, num_kv_heads=4, ffn_dim=64, vocab_size=256)
    torch.manual_seed(seed)
    start = GPT(sizes)
    _train(start, steps, seed, lr=1e-2)
    losses: dict[str, float] = {}
    for name in ("float", "aware"):
        model = copy.deepcopy(start)
        if name == "aware":
            make_aware(model, options, convolutions=True)
        _train(model, further_steps, seed + 100, lr=2e-3)
        losses[name] = _held_out_loss(model)
        weights = select_layers(model, options, convolutions=True).weights
        for layer, made in make_stored(model, options, convolutions=True).items():
            store(made, weights[layer])
        losses[f"{name}, int4"] = _held_out_loss(model)
    return losses


def _train(model: GPT, steps: int, seed: int, lr: float) -> None:
    """AdamW with a rate that falls to 0."""
    optimizer = build_optimizer(model, OptimOptions(lr=lr))
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / steps)
        _loss_of(model, generator).backward()
        optimizer.step()
        optimizer.zero_grad()


def _held_out_loss(model: GPT) -> float:
    generator = torch.Generator().manual_seed(12345)
    with torch.no_grad():
        return sum(float(_loss_of(model.eval(), generator)) for _ in range(16)) / 16


def _loss_of(model: GPT, generator: torch.Generator) -> Tensor:
    """Mean loss of sequences of which each token has one that follows it, in 19 of 20 cases."""
    follows = torch.randperm(256, generator=torch.Generator().manual_seed(7))
    tokens = torch.randint(0, 256, (32, 17), generator=generator)
    for place in range(2, 17):
        known = torch.rand(32, generator=generator) < 0.95
        tokens[:, place] = torch.where(known, follows[tokens[:, place - 1]], tokens[:, place])
    return F.cross_entropy(model(tokens[:, :-1]).logits().flatten(0, 1), tokens[:, 1:].flatten())
