"""Ranks of a 16-bit run gather in 16 bits what forward passes only read in 16 bits; every bit of the run stays the same."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import matrix
import pytest
import tiny
import torch
from commands import events_of
from pool import Pool
from torch import Tensor, nn

from unisono.dist import World
from unisono.parallel import fsdp
from unisono.parallel.timed_collectives import FSDP_ALL_GATHER
from unisono.parallel.weight_casts import parameters_to_cast
from unisono.plan.options import PlanOptions
from unisono.plan.resolve import derive_plan
from unisono.train import setup


def none_of_them(*given: Any) -> frozenset[str]:
    return parameters_to_cast(*given) & frozenset()  # the forward pass is traced all the same


CHOICES = {"as it is": parameters_to_cast, "in 32 bits": none_of_them}


def chosen(model: nn.Module, precision: str = "bf16", **inputs: Tensor) -> frozenset[str]:
    options = PlanOptions(dp_shard=2, precision=precision, global_batch=8)  # type: ignore[arg-type]
    plan = derive_plan(options, world_size=2, device="cpu", native_bf16=True)
    return parameters_to_cast(model, plan, lambda: inputs)


class Gathers:
    """FSDP2's gather, which counts bytes."""

    def __init__(self) -> None:
        self.nbytes = 0

    allocate = FSDP_ALL_GATHER.allocate

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **options: Any) -> Any:
        self.nbytes += output_tensor.nbytes
        return FSDP_ALL_GATHER(output_tensor, input_tensor, *args, **options)


def both(world: World, folder: str, model: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The run as it is, and one that gathers all in 32 bits."""
    found: list[dict[str, Any]] = []
    for name, choose in (
        ("as it is", parameters_to_cast),
        ("in 32 bits", lambda *given: parameters_to_cast(*given) & frozenset()),
    ):
        network, data, objective = matrix.MODELS[model](4)
        common = {"steps": 3, "global_batch": 8, "micro_batch": 2, "precision": "bf16", **settings}
        gathers = Gathers()
        with (
            warnings.catch_warnings(action="ignore") if "compile" in settings else nullcontext(),  # the compiler's own
            patch.object(setup, "parameters_to_cast", choose),
            patch.object(fsdp, "FSDP_ALL_GATHER", gathers),
            tiny.trainer(
                f"{folder}/{name}", world=world, network=network, data=data, objective=objective, **common
            ) as run,
        ):
            steps = [(step.loss, float(step.stats[1])) for step in run]
            found.append({"steps": steps, "digest": tiny.digest(run), "gathered": gathers.nbytes})
    return found


CASES = [
    ("gpt", 2, {"dp_shard": 2, "zero": 3}),
    ("gpt", 4, {"dp_shard": 2, "pp": 2, "zero": 1}),
    ("gpt-moe", 2, {"dp_shard": 2, "ep": 2}),
    *(
        pytest.param(*case, marks=pytest.mark.full)
        for case in [
            ("gpt", 2, {"dp_shard": 2, "zero": 1}),
            ("gpt", 2, {"dp_shard": 2, "zero": 2}),
            ("gpt", 2, {"dp_shard": 2, "precision": "fp16"}),
            ("gpt", 2, {"dp_shard": 2, "recompute": "full"}),
            ("gpt", 2, {"dp_shard": 2, "recompute": "selective"}),
            ("gpt", 2, {"dp_shard": 2, "compile": "regional"}),
            ("gpt", 2, {"cp": 2}),
            ("gpt-moe", 2, {"dp_shard": 2, "zero": 1}),
            ("bert", 2, {"dp_shard": 2}),
            ("resnet", 2, {"dp_shard": 2}),
            ("gpt", 4, {"dp_shard": 2, "tp": 2}),
            ("gpt", 4, {"dp_shard": 2, "dp_replicate": 2}),
            ("gpt", 4, {"dp_shard": 2, "pp": 2, "schedule": "interleaved", "recompute": "full"}),
        ]
    ),
]


@pytest.mark.parametrize(("model", "ranks", "settings"), CASES)
def test_the_run_has_the_same_bits_as_one_that_gathers_in_32_bits(
    pool: Pool, tmp_path: Path, model: str, ranks: int, settings: dict[str, Any]
) -> None:
    for now, before in pool.run(both, str(tmp_path), model, settings, ranks=ranks, timeout_s=180):
        assert (now["steps"], now["digest"]) == (before["steps"], before["digest"])
        # embeddings, norms and the head are gathered in 32 bits; they are much of a tiny model
        assert 0.5 < now["gathered"] / before["gathered"] < 0.75


class Mixed(nn.Module):
    """Parameters that are read in all ways that models have."""

    def __init__(self) -> None:
        super().__init__()
        self.converted = nn.Linear(8, 8)
        self.turned = nn.Parameter(torch.ones(8, 8))
        self.in_32_bits = nn.Linear(8, 8)
        self.twice = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.converted(x)) @ self.turned.mT[:, :4].repeat(1, 2).to(torch.bfloat16)
        with torch.autocast("cpu", enabled=False):
            x = self.in_32_bits(x.float())
        return self.norm(x) + self.twice.weight.square().sum()


def test_only_parameters_that_are_read_in_16_bits_alone_are_chosen() -> None:
    names = chosen(Mixed(), x=torch.ones(2, 8))
    assert names == {"converted.weight", "converted.bias", "twice.bias"}
    assert chosen(Mixed(), "fp32", x=torch.ones(2, 8)) == frozenset()


def test_of_a_gpt_these_are_the_matrices_of_its_blocks_and_of_a_mixture_all_but_its_router() -> None:
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    model = tiny.model(num_experts=4, num_experts_per_token=2)
    names = {name for name in chosen(model, tokens=tokens) if name.startswith("blocks")}
    assert names == {
        name
        for name, each in model.named_parameters()
        if name.startswith("blocks") and each.dim() > 1 and "router" not in name
    }
    tied = tiny.model(tied=True)
    assert "embedding.weight" not in chosen(tied, tokens=tokens)


class EverySecond(nn.Module):
    """A layer that every second pass uses."""

    def __init__(self, layer: nn.Module, calls: int) -> None:
        super().__init__()
        self.layer, self.calls = layer, calls

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) if self.calls % 2 else torch.zeros_like(x)


def skipping(world: World, folder: str, calls: int) -> list[Any]:
    found: list[Any] = []
    for name, choose in (
        ("as it is", parameters_to_cast),
        ("in 32 bits", lambda *given: parameters_to_cast(*given) & frozenset()),
    ):
        network = tiny.model()
        for block in network.blocks:
            block.ffn = EverySecond(block.ffn, calls)
        settings = {"dp_shard": 2, "zero": 1, "micro_batch": 2, "precision": "bf16"}
        with (
            patch.object(setup, "parameters_to_cast", choose),
            tiny.trainer(f"{folder}/{name}", world=world, network=network, steps=3, **settings) as run,
        ):
            steps = [(step.loss, float(step.stats[1])) for step in run]
            found.append((steps, tiny.digest(run)))
    return found


@pytest.mark.parametrize("calls", [0, 1])
def test_a_parameter_that_only_one_micro_batch_uses(pool: Pool, tmp_path: Path, calls: int) -> None:
    """Of two micro-batches the first or the second: its gradient is in 16 bits where others have accumulated in 32."""
    for now, before in pool.run(skipping, str(tmp_path), calls, ranks=2):
        assert now == before


class ReadsValues(nn.Module):
    """A GPT whose forward pass depends on the value of a token."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = tiny.model()

    def forward(self, tokens: Tensor) -> Any:
        return self.gpt(tokens if int(tokens[0, 0]) < 1 << 40 else tokens + 1)


def reading_values(world: World, folder: str) -> list[dict[str, Any]]:
    with tiny.trainer(folder, world=world, network=ReadsValues(), dp_shard=2, precision="bf16", steps=1) as run:
        list(run)
    return [event for event in events_of(Path(folder)) if event.get("code") == "gathered_in_32_bits"]


def test_a_model_that_needs_values_says_that_it_gathers_in_32_bits(pool: Pool, tmp_path: Path) -> None:
    for told in pool.run(reading_values, str(tmp_path / "run"), ranks=2):
        (notice,) = told
        assert notice["what"] == "parameters are gathered in 32 bits"
        assert "ReadsValues" in notice["why"]
