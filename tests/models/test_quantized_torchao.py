"""Quantized layers that torchao computes: the same weights, the same files, and outputs as near as the numbers allow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
import torch
from peer_packages import folder_of_packages

from unisono.errors import ConfigError
from unisono.models import quantized_torchao
from unisono.models.gpt import GPT
from unisono.models.options import ModelOptions
from unisono.models.quantize_options import QuantizeOptions
from unisono.models.quantized_model import make_stored, stored_layers
from unisono.models.quantized_torchao import kept_from_torchao, torchao_row
from unisono.models.resnet import ResNet, ResNetOptions

PYTHON = os.environ.get("UNISONO_TORCHAO_PYTHON")
PEER = [
    pytest.mark.peer,
    pytest.mark.timeout(600),
    pytest.mark.skipif(PYTHON is None, reason="NOT CHECKED: no environment with torchao: tests/peers/venvs.sh torchao"),
]
TORCHAO = QuantizeOptions(scheme="int8", backend="torchao")
CPU = torch.device("cpu")


def with_version(monkeypatch: pytest.MonkeyPatch, number: str | None) -> None:
    """Let this version of torchao be installed; None for no torchao."""

    def version(name: str) -> str:
        assert name == "torchao"
        if number is None:
            raise PackageNotFoundError(name)
        return number

    monkeypatch.setattr(quantized_torchao, "version", version)


def gpt(**sizes: Any) -> GPT:
    return GPT(ModelOptions(vocab_size=64, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, **sizes))


# --- refusals and what is told -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "given", "nearest"),
    [
        (None, "whose package torchao is not installed", "pip install torchao; or quantize.backend=torch"),
        ("0.16.2", "with torchao 0.16.2", "pip install --upgrade torchao"),
    ],
)
def test_without_the_package(monkeypatch: pytest.MonkeyPatch, number: str | None, given: str, nearest: str) -> None:
    with_version(monkeypatch, number)
    model = gpt()
    with pytest.raises(ConfigError) as caught:
        make_stored(model, TORCHAO, convolutions=True)
    assert given in str(caught.value)
    assert nearest in str(caught.value)
    assert not stored_layers(model)
    assert make_stored(model, QuantizeOptions(scheme="int8"), convolutions=True)


def test_a_model_of_which_it_would_compute_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with_version(monkeypatch, "0.18.0")
    model = ResNet(ResNetOptions(classes=4, depths=(1,), widths=(8,), stem="small"))
    with pytest.raises(ConfigError, match="for a model without a linear layer that is quantized"):
        make_stored(model, TORCHAO, convolutions=True)


def test_what_it_does_not_compute_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with_version(monkeypatch, "0.17.0+cpu")
    layers = make_stored(gpt(num_experts=2, balance="none"), TORCHAO, convolutions=True)
    told = torchao_row(layers, CPU)
    assert told == f"torchao computes 8 of {len(layers)} quantized layers; torch computes {len(layers) - 8}: experts"
    all_of_it = make_stored(gpt(), TORCHAO, convolutions=True)
    assert torchao_row(all_of_it, CPU) == "torchao computes 14 of 14 quantized layers"


def test_a_processor_that_cuts_sums_keeps_our_integer_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchao has no other product on a processor than the one that is cut there."""
    with_version(monkeypatch, "0.18.0")
    monkeypatch.setattr(quantized_torchao, "int_mm_is_exact", lambda _device: False)
    dynamic = make_stored(gpt(), QuantizeOptions(scheme="int8_dynamic", backend="torchao"), convolutions=True)
    assert "torchao computes 0 of 14" in torchao_row(dynamic, CPU)
    layer = next(iter(dynamic.values()))
    with torch.no_grad():
        assert layer(torch.ones(2, 64)).shape == (2, 64)  # torchao is not imported for it
    assert kept_from_torchao(next(iter(make_stored(gpt(), TORCHAO, convolutions=True).values())), CPU) == ""


# --- the real package ----------------------------------------------------------------------------------------------------

COMPUTE = '''
import copy, json
import torch
from unisono.models.gpt import GPT
from unisono.models.options import ModelOptions
from unisono.models.quantize_options import QuantizeOptions
from unisono.models.quantized import ACTIVATION_STEPS, from_integers, store, unpack
from unisono.models.quantized_model import make_stored, select_layers
from unisono.models.quantized_torchao import torchao_weight

def stored(model, scheme, backend, group):
    options, changed = QuantizeOptions(scheme=scheme, backend=backend, group_size=group), copy.deepcopy(model)
    weights = select_layers(model, options, convolutions=True).weights
    layers = make_stored(changed, options, convolutions=True)
    for name, layer in layers.items():
        store(layer, weights[name], torch.tensor([4 / ACTIVATION_STEPS]) if scheme == "int8_static" else None)
    return changed, layers

def relative(one, other):
    return float((one.float() - other.float()).norm() / other.float().norm())

def above_bound(ours, theirs):
    """How far outputs differ beyond the bound: a step for each input in the middle between two integers, and float rounding."""
    x = torch.randn(64, ours.in_features)
    scale = torch.full((64, 1), 4 / ACTIVATION_STEPS)
    if ours.form.activations == "dynamic":
        scale = x.abs().amax(-1, keepdim=True) / ACTIVATION_STEPS
    steps = x / scale
    in_the_middle = ((steps - steps.floor() - 0.5).abs() < 1e-4) & (ours.form.activations != "float")
    weight = from_integers(unpack(ours.weight_packed, ours.form), ours.weight_scale, ours.form).abs()
    rounding = 1e-6 * x.abs() @ weight.t()
    bound = (in_the_middle * scale) @ weight.t() + rounding
    return float(((ours(x) - theirs(x)).abs() - bound).max())

torch.manual_seed(0)
model = GPT(ModelOptions(vocab_size=64, dim=64, num_layers=2, num_heads=4, num_kv_heads=2)).eval()
for parameter in model.parameters():
    parameter.data.add_(0.1 * torch.randn_like(parameter))
tokens, found = torch.randint(0, 64, (2, 17)), {}
with torch.no_grad():
    exact = model(tokens).logits()
    for scheme, group in [("int8", 32), ("int8_dynamic", 32), ("int8_static", 32), ("int4", 32), ("int4", 8)]:
        (ours, layers), (theirs, same) = (stored(model, scheme, backend, group) for backend in ("torch", "torchao"))
        mine, other = ours.state_dict(), theirs.state_dict()
        weights = True
        for layer in same.values():
            weight = from_integers(unpack(layer.weight_packed, layer.form), layer.weight_scale, layer.form)
            weights &= torch.equal(torchao_weight(layer, torch.float32).dequantize(), weight)
        of_torch = ours(tokens).logits()
        of_torchao = theirs(tokens).logits()
        with torch.autocast("cpu", torch.bfloat16):
            bf16 = ours(tokens).logits(), theirs(tokens).logits()
        name = "blocks.1.ffn.down"
        width = layers[name].in_features
        grid = torch.randint(-127, 128, (3, 5, width)) * (4 / ACTIVATION_STEPS)  # whole steps: none lies between two integers
        grid[..., 0] = 4
        of_layer, at_zero, of_none = (
            (layers[name](x), same[name](x)) for x in (grid, torch.zeros(2, width), torch.zeros(0, 3, width))
        )
        found[f"{scheme} {group}"] = {
            "same_files": list(mine) == list(other) and all(
                torch.equal(mine[key], other[key]) and type(mine[key]) is type(other[key]) for key in mine
            ),
            "same_weights": weights,
            "classes": sorted({type(torchao_weight(layer, torch.float32)).__name__ for layer in same.values()}),
            "difference": relative(of_torchao, of_torch),
            "errors": [relative(made, exact) for made in (of_torch, of_torchao)],
            "above_bound": above_bound(layers[name], same[name]),
            "on_the_grid": relative(of_layer[1], of_layer[0]),
            "zeros": bool(torch.equal(*at_zero)),
            "no_rows": of_none[0].shape == of_none[1].shape,
            "bf16_errors": [relative(made, exact) for made in bf16],
            "bf16_dtypes": [str(made.dtype) for made in bf16],
        }
print(json.dumps(found))
'''
CASES = [
    pytest.param(f"{scheme} {group}", marks=PEER)
    for scheme, group in [("int8", 32), ("int8_dynamic", 32), ("int8_static", 32), ("int4", 32), ("int4", 8)]
]


@pytest.fixture(scope="module")
def computed() -> dict[str, dict[str, Any]]:
    """What both back ends compute, by scheme and group size."""
    assert PYTHON is not None
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([*filter(None, sys.path), folder_of_packages(PYTHON)])}
    done = subprocess.run(
        [sys.executable, "-c", COMPUTE], env=environ, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_weights_and_files_are_the_same(computed: dict[str, dict[str, Any]], case: str) -> None:
    found = computed[case]
    assert found["same_weights"]
    assert found["same_files"]
    assert found["classes"] == ["IntxUnpackedToInt8Tensor" if case.startswith("int4") else "Int8Tensor"]


@pytest.mark.parametrize("case", CASES)
def test_a_layer_differs_by_ties_alone(computed: dict[str, dict[str, Any]], case: str) -> None:
    """Torchao multiplies by 1 / scale where we divide, so only an input in the middle between two integers may be rounded to the
    other one; the largest negative ones are there. 1e-6 of the sum of sizes is the rounding of float32."""
    found = computed[case]
    assert found["above_bound"] <= 0
    assert found["on_the_grid"] < 1e-6
    assert found["zeros"]
    assert found["no_rows"]


@pytest.mark.parametrize("case", CASES)
def test_a_model_is_as_near_to_the_exact_one(computed: dict[str, dict[str, Any]], case: str) -> None:
    """Without rounded activations only the order of sums differs: 1e-5. With them a step in one layer moves others in the next,
    and what can be compared is the distance to the model in floating point; 1.25: two draws of the same rounding."""
    found = computed[case]
    if case.split()[0] in ("int8", "int4"):
        assert found["difference"] < 1e-5
    ours, theirs = found["errors"]
    assert 1 / 1.25 < theirs / ours < 1.25
    ours, theirs = found["bf16_errors"]
    assert 1 / 1.25 < theirs / ours < 1.25
    assert found["bf16_dtypes"] == ["torch.bfloat16"] * 2
