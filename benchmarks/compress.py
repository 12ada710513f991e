"""Quantized models of unisono and of torchao: bytes, quality and time of a forward pass, on this processor; and what pruning and
training with rounded numbers cost and bring (``smaller``). Prints JSON.

    python -m benchmarks.compress [--rounds 15] [--steps 300]

Models: a multi-layer perceptron 1024-4096-1024 with 32 rows, whose quality is the relative error of its outputs; and a small
GPT that is trained here for ``--steps`` on an artificial language, whose quality is its held-out loss. All contestants are in one
process and start from the same weights. In each round each makes passes, one contestant after the other; a ratio is of passes of
the same round. torchao is optional: without it (pip install torchao) its rows are not run.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.paired import ratio
from benchmarks.smaller import pruned, rounded
from torch import Tensor, nn

from unisono.errors import ConfigError
from unisono.models.gpt import GPT
from unisono.models.options import ModelOptions
from unisono.models.quantize_options import Backend, QuantizeOptions, Scheme
from unisono.models.quantized import store
from unisono.models.quantized_model import make_stored, select_layers

SCHEMES: tuple[Scheme, ...] = ("int8", "int8_dynamic", "int4")
SEEDS = (0, 1, 2)
MIN_S = 0.02  # of one timing
Quality = Callable[[nn.Module], float]


def unisono(model: nn.Module, scheme: Scheme, backend: Backend = "torch") -> nn.Module:
    """A copy with stored layers."""
    options, changed = QuantizeOptions(scheme=scheme, backend=backend), copy.deepcopy(model)
    weights = select_layers(model, options, convolutions=True).weights
    for name, layer in make_stored(changed, options, convolutions=True).items():
        store(layer, weights[name])
    return changed


def torchao(model: nn.Module, scheme: Scheme) -> nn.Module:
    """A copy that torchao has quantized with the configuration that is closest to the scheme. Raises ImportError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.quantization import (  # pyright: ignore[reportMissingImports]
            Int8DynamicActivationInt8WeightConfig,
            Int8WeightOnlyConfig,
            IntxWeightOnlyConfig,
            PerGroup,
            quantize_,
        )

        changed = copy.deepcopy(model)
        configs = {
            "int8": Int8WeightOnlyConfig,
            "int8_dynamic": Int8DynamicActivationInt8WeightConfig,
            "int4": lambda: IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),  # pyright: ignore
        }
        quantize_(changed, configs[scheme]())
    return changed


CONTESTANTS = {"unisono": unisono, "unisono by torchao": partial(unisono, backend="torchao"), "torchao": torchao}


def num_bytes(model: nn.Module) -> int:
    """Bytes of all tensors of a model; of those of torchao, of the tensors inside."""
    return sum(each.nbytes for tensor in model.state_dict().values() for each in _plain(tensor))


def _plain(tensor: Any) -> Iterator[Tensor]:
    if type(tensor) in (Tensor, nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from _plain(getattr(tensor, name))


def mlp() -> tuple[nn.Module, tuple[Tensor, ...], Quality]:
    """The perceptron, its input, and the relative error of its outputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).eval()
    x = torch.randn(32, 1024)
    with torch.no_grad():
        exact = model(x)
    return model, (x,), lambda changed: float((changed(x) - exact).norm() / exact.norm())


def gpt(steps: int) -> tuple[nn.Module, tuple[Tensor, ...], Quality]:
    """The trained GPT, tokens, and its held-out loss."""
    torch.manual_seed(0)
    model = GPT(ModelOptions(num_layers=4, dim=256, num_heads=4, num_kv_heads=4, vocab_size=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min((step + 1) / 20, 1 - step / steps)
        _loss(model, generator, 8).backward()
        optimizer.step()
        optimizer.zero_grad()

    def held_out(changed: nn.Module) -> float:
        fresh = torch.Generator().manual_seed(2)
        return sum(float(_loss(changed, fresh, 32)) for _ in range(8)) / 8

    return model.eval(), (torch.randint(0, 64, (8, 128), generator=generator),), held_out


def _loss(model: nn.Module, generator: torch.Generator, count: int) -> Tensor:
    """Of sequences in which 19 tokens in 20 follow from the one before the last; it is 4.16 for a guess."""
    follows = torch.randperm(64, generator=torch.Generator().manual_seed(7))
    tokens = torch.randint(0, 64, (count, 33), generator=generator)
    for place in range(2, 33):
        known = torch.rand(count, generator=generator) < 0.95
        tokens[:, place] = torch.where(known, follows[tokens[:, place - 2]], tokens[:, place])
    return F.cross_entropy(model(tokens[:, :-1]).logits().flatten(0, 1), tokens[:, 1:].flatten())


def seconds(model: nn.Module, inputs: tuple[Tensor, ...]) -> float:
    """Seconds of a forward pass, over at least ``MIN_S``."""
    passes, begin = 0, time.perf_counter()
    while (passed := time.perf_counter() - begin) < MIN_S or not passes:
        model(*inputs)
        passes += 1
    return passed / passes


@torch.no_grad()
def measure(model: nn.Module, inputs: tuple[Tensor, ...], quality: Quality, rounds: int) -> dict[str, Any]:
    """Bytes, quality and times of a model and of each contestant."""
    models, not_run = {"fp32": model}, dict[str, str]()
    for name, change in CONTESTANTS.items():
        for scheme in SCHEMES:
            try:
                models[f"{name} {scheme}"] = change(model, scheme).eval()
            except (ImportError, ConfigError) as error:
                not_run[f"{name} {scheme}"] = str(error)
    times: dict[str, list[float]] = {name: [] for name in models}
    for number in range(rounds + 1):
        for name, contestant in models.items():
            taken = seconds(contestant, inputs)
            if number:  # the first round warms up
                times[name].append(taken)
    measured = [scheme for scheme in SCHEMES if f"torchao {scheme}" in models]
    whole, bytes_of = num_bytes(model), {name: num_bytes(each) for name, each in models.items()}
    scores = {name: quality(each) for name, each in models.items()}
    return {
        "bytes": bytes_of,
        "bytes_over_fp32": {name: round(count / whole, 4) for name, count in bytes_of.items()},
        "quality": scores,
        "quality_minus_fp32": {name: score - scores["fp32"] for name, score in scores.items() if name != "fp32"},
        "time_over_fp32": {name: ratio(times[name], times["fp32"]) for name in models if name != "fp32"},
        "time_over_torchao": {each: ratio(times[f"unisono {each}"], times[f"torchao {each}"]) for each in measured},
        "time_by_torchao": {
            each: ratio(times[f"unisono by torchao {each}"], times[f"unisono {each}"]) for each in measured
        },
        "not_run": not_run,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module="torchao")
    models = {"mlp": mlp(), "gpt": gpt(arguments.steps)}
    found = {name: measure(*parts, arguments.rounds) for name, parts in models.items()}
    try:
        installed = version("torchao")
    except PackageNotFoundError:
        installed = "not installed"
    not_run = {name: why for each in found.values() for name, why in each.pop("not_run").items()}
    steps, further = arguments.steps, arguments.steps // 4
    prune = {f"seed {seed}": pruned(seed, steps, further) for seed in SEEDS}
    aware_steps, aware_further = 5 * steps // 3, steps // 3
    aware = {f"seed {seed}": rounded(seed, aware_steps, aware_further) for seed in SEEDS}
    result = {
        "models": found,
        "prune": {"steps": steps, "further_steps": further, "seeds": prune},
        "aware": {"steps": aware_steps, "further_steps": aware_further, "seeds": aware},
        "torchao": installed,
        "not_run": not_run,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
