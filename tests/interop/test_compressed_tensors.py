"""Exports of quantized models: the names and words of compressed-tensors, and the same numbers with the real package."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from unisono.interop.huggingface import export
from unisono.models.bert import BERT, BertOptions, ClassHead, TokenClassHead
from unisono.models.gpt import GPT
from unisono.models.options import ModelOptions
from unisono.models.quantize_options import QuantizeOptions, Scheme
from unisono.models.quantized import from_integers, store, unpack
from unisono.models.quantized_model import make_stored, select_layers, stored_layers

PYTHON = os.environ.get("UNISONO_COMPRESSED_PYTHON")
SCHEMES: list[Scheme] = ["int8", "int8_dynamic", "int8_static", "int4"]
SIZES: dict[str, Any] = {"vocab_size": 64, "dim": 64, "num_layers": 2}


def build(kind: str) -> nn.Module:
    """A model of a kind, away from its initial values."""
    torch.manual_seed(0)
    bert = BertOptions(**SIZES, num_heads=4, ffn_dim=96, max_length=32)
    if kind == "llama":
        transformers = pytest.importorskip(
            "transformers", reason="NOT CHECKED: the extra 'hf' (transformers) is not installed"
        )
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes))
    elif kind in ("bert", "classes", "tokens"):
        heads = {"classes": ClassHead, "tokens": TokenClassHead}
        model = BERT(bert, heads[kind](bert, 3) if kind in heads else None)
    else:
        experts: dict[str, Any] = {"mixtral": {"num_experts": 4, "balance": "none"}, "ernie": {"num_experts": 4}}
        model = GPT(ModelOptions(**SIZES, tied=kind != "untied", **experts.get(kind, {})))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def stored(model: nn.Module, scheme: Scheme) -> nn.Module:
    options, convolutions = QuantizeOptions(scheme=scheme), isinstance(model, GPT | BERT)
    weights, changed = select_layers(model, options, convolutions=convolutions).weights, copy.deepcopy(model)
    for name, layer in make_stored(changed, options, convolutions=convolutions).items():
        store(layer, weights[name], torch.tensor([0.03]) if scheme == "int8_static" else None)
    return changed


def write(model: nn.Module, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    export(model, folder, max_length=32, end_of_document=None, tokenizer=None)
    tensors: dict[str, Tensor] = safetensors.torch.load_file(folder / "model.safetensors")
    return tensors, json.loads((folder / "config.json").read_text())["quantization_config"]


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        made = model(tokens)
        if isinstance(made, Tensor):
            return made
        return made.logits() if callable(made.logits) else made.logits


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_words_hold_the_weights_in_their_order(tmp_path: Path, scheme: Scheme) -> None:
    model = stored(build("gpt"), scheme)
    tensors, config = write(model, tmp_path / "out")
    assert config["format"] == "pack-quantized"
    assert config["ignore"] == ["lm_head"]
    bits = config["config_groups"]["group_0"]["weights"]["num_bits"]
    layer = stored_layers(model)["blocks.1.ffn.down"]
    prefix = "model.layers.1.mlp.down_proj."
    words = tensors[prefix + "weight_packed"].to(torch.int64) & 0xFFFFFFFF
    shifts = torch.arange(0, 32, bits)
    integers = (words[..., None] >> shifts & (2**bits - 1)).flatten(-2) - 2 ** (bits - 1)
    assert torch.equal(integers, unpack(layer.weight_packed, layer.form).long())
    assert tensors[prefix + "weight_shape"].tolist() == [64, 192]
    assert torch.equal(tensors[prefix + "weight_scale"], layer.weight_scale)


@pytest.mark.parametrize("scheme", ["int8_dynamic", "int8_static"])
def test_integer_activations_come_with_integer_weights(tmp_path: Path, scheme: Scheme) -> None:
    model = stored(build("bert"), scheme)
    tensors, config = write(model, tmp_path / "out")
    assert config["format"] == "int-quantized"
    layer = stored_layers(model)["blocks.0.attention.q"]
    prefix = "bert.encoder.layer.0.attention.self.query."
    assert torch.equal(tensors[prefix + "weight"], layer.weight_packed)
    assert (prefix + "input_scale" in tensors) == (scheme == "int8_static")
    assert prefix + "bias" in tensors
    assert config["ignore"] == ["cls.predictions.decoder"]


def test_rows_that_are_permuted_keep_their_scales(tmp_path: Path) -> None:
    """Ernie pairs the rows of queries and keys in another order."""
    plain, model = build("ernie"), stored(build("ernie"), "int4")
    tensors, _ = write(model, tmp_path / "out")
    export(plain, tmp_path / "plain", max_length=32, end_of_document=None, tokenizer=None)
    whole = safetensors.torch.load_file(tmp_path / "plain/model.safetensors")
    form = next(iter(stored_layers(model).values())).form
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.experts.3.down_proj"):
        prefix = f"model.layers.0.{name}."
        integers = unpack(tensors[prefix + "weight_packed"].view(torch.uint8), form)
        weight = from_integers(integers, tensors[prefix + "weight_scale"], form)
        error = float((weight - whole[prefix + "weight"]).norm() / whole[prefix + "weight"].norm())
        assert 0 < error < 0.15, name


def test_what_is_skipped_is_ignored_by_its_name_there(tmp_path: Path) -> None:
    model = build("gpt")
    options = QuantizeOptions(scheme="int8", skip=("blocks.0.attention.*",))
    make_stored(model, options, convolutions=True)
    _, config = write(model, tmp_path / "out")
    names = [f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"]
    assert config["ignore"] == [*names, "lm_head"]


# --- the real package ------------------------------------------------------------------------------------------------------

LOAD = """
import json, sys
import safetensors.torch, torch, transformers
found = {}
given = safetensors.torch.load_file(sys.argv[1])
for name, kind, folder, dequantize in json.load(sys.stdin):
    how = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)} if dequantize else {}
    model, loading = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True, **how)
    left = {key: sorted(map(str, names)) for key, names in loading.items() if names}
    if left:
        sys.exit(f"{name}: {left}")
    layers = {each: module for each, module in model.named_modules() if f"{name}/in/{each}" in given}
    with torch.no_grad():
        found[f"{name}/logits"] = model.eval()(given["tokens"]).logits.contiguous()
        for each, module in layers.items():
            found[f"{name}/out/{each}"] = module(given[f"{name}/in/{each}"]).contiguous()
safetensors.torch.save_file(found, sys.argv[2])
"""
CLASSES = {
    **dict.fromkeys(["gpt", "untied", "mixtral", "ernie", "llama"], "AutoModelForCausalLM"),
    **{
        "bert": "AutoModelForMaskedLM",
        "classes": "AutoModelForSequenceClassification",
        "tokens": "AutoModelForTokenClassification",
    },
}
EXPERTS = ("mixtral", "ernie")


@pytest.mark.peer
@pytest.mark.timeout(600)
@pytest.mark.skipif(PYTHON is None, reason="NOT CHECKED: no environment with compressed-tensors: tests/peers/venvs.sh")
def test_transformers_loads_them_and_computes_the_same(tmp_path: Path) -> None:
    """Where tokens have scales of their own, numbers next to a step of the grid differ by the order of sums before them: there
    a layer is compared, with equal inputs."""
    assert PYTHON is not None
    tokens = torch.randint(0, 64, (2, 9))
    given, expected, jobs = {"tokens": tokens}, {}, []
    for kind, loader in CLASSES.items():
        for scheme in ("int8", "int4") if kind in EXPERTS else SCHEMES:
            name, model = f"{kind}-{scheme}", stored(build(kind), scheme)
            write(model, tmp_path / name)
            jobs.append((name, loader, str(tmp_path / name), kind in EXPERTS))
            if scheme == "int8_dynamic":
                ours, theirs = {
                    "llama": ("model.layers.1.mlp.down_proj",) * 2,
                    **dict.fromkeys(["gpt", "untied"], ("blocks.1.ffn.down", "model.layers.1.mlp.down_proj")),
                }.get(kind, ("blocks.1.ffn.down", "bert.encoder.layer.1.output.dense"))
                layer = model.get_submodule(ours)
                given[f"{name}/in/{theirs}"] = x = torch.randn(2, 9, layer.in_features)
                with torch.no_grad():
                    expected[f"{name}/out/{theirs}"] = layer(x)
            else:
                expected[f"{name}/logits"] = logits(model, tokens)
    safetensors.torch.save_file(given, tmp_path / "given")
    command = [PYTHON, "-c", LOAD, str(tmp_path / "given"), str(tmp_path / "found")]
    done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = safetensors.torch.load_file(tmp_path / "found")
    for name, values in expected.items():
        torch.testing.assert_close(
            found[name], values, rtol=1e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
