"""A model starts with weights that exist, whatever holds them, and with none that are another model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from unisono.checkpoint.conversion import write_model
from unisono.errors import CheckpointError
from unisono.interop.huggingface import export
from unisono.interop.initial_weights import load_weights
from unisono.models.bert import BERT, BertOptions, ClassHead
from unisono.models.gpt import GPT
from unisono.models.options import ModelOptions
from unisono.models.resnet import ResNet, ResNetOptions
from unisono.parallel.deferred_init import deferred_init

SIZES = {"num_layers": 2, "dim": 32, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 96}
HOW: dict[str, Any] = {"max_length": 16, "end_of_document": None, "tokenizer": None}
BERT_SIZES = BertOptions(vocab_size=64, num_layers=2, dim=16, num_heads=2, ffn_dim=32, max_length=16)


def resnet(classes: int = 5) -> ResNet:
    return ResNet(ResNetOptions(classes=classes, channels=3, depths=(1, 1, 1, 1), stem="small"))


MODELS = {
    "tied": lambda: GPT(ModelOptions(**SIZES)),
    "untied": lambda: GPT(ModelOptions(**SIZES, tied=False)),
    "mixtral": lambda: GPT(ModelOptions(**SIZES, num_experts=4, balance="loss")),
    "ernie": lambda: GPT(ModelOptions(**SIZES, num_experts=4, balance="bias")),
    "bert": lambda: BERT(BERT_SIZES),
    "resnet": resnet,
}


def drawn(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return with_gaps(MODELS[kind]())


def with_gaps(model: nn.Module) -> nn.Module:
    """Away from initialisation, where norms are 1 and lost tensors would not show."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.1 * torch.rand_like(tensor))
    return model


def assert_same(one: nn.Module, other: nn.Module) -> None:
    theirs = other.state_dict()
    different = [name for name, value in one.state_dict().items() if not torch.equal(value, theirs[name])]
    assert different == []


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("holder", ["export", "sharded", "file", "checkpoint"])
def test_every_holder_gives_the_same_values(tmp_path: Path, kind: str, holder: str) -> None:
    model, other = drawn(kind, 1), drawn(kind, 2)
    if holder == "export":
        source = export(model, tmp_path / "out", **HOW)
    elif holder == "sharded":
        source = export(model, tmp_path / "out", max_shard_bytes=4000, **HOW)
        assert len(list(source.glob("*.safetensors"))) > 3
    elif holder == "file":
        source = tmp_path / "own.safetensors"
        safetensors.torch.save_model(model, str(source))
    else:
        source = write_model(tmp_path, dict(model.named_parameters()) | dict(model.named_buffers()), step=3, meta={})
    load_weights(other, str(source), new_head=False)
    assert_same(model, other)


@pytest.mark.parametrize("kind", ["tied", "ernie", "bert"])
def test_a_model_built_without_values_takes_them(tmp_path: Path, kind: str) -> None:
    model = drawn(kind, 1)
    for source in (
        export(model, tmp_path / "out", **HOW),
        write_model(tmp_path, dict(model.named_parameters()) | dict(model.named_buffers()), step=3, meta={}),
    ):

        def build(source: Path = source) -> nn.Module:
            other = MODELS[kind]()
            load_weights(other, str(source), new_head=False)
            return other

        deferred = deferred_init(build)
        state = model.state_dict()
        found = {name: value.clone() for name, value in deferred.values(set(state))}
        assert found.keys() >= dict(model.named_parameters()).keys()
        assert [name for name, value in found.items() if not torch.equal(value, state[name])] == []


@pytest.mark.parametrize("bare", [False, True])
def test_a_folder_of_transformers(tmp_path: Path, bare: bool) -> None:
    transformers: Any = pytest.importorskip(
        "transformers", reason="NOT CHECKED: the extra 'hf' (transformers) is not installed"
    )
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
    )
    theirs = with_gaps(transformers.LlamaForCausalLM(config)).eval()
    (theirs.model if bare else theirs).save_pretrained(tmp_path / "theirs")
    model = drawn("tied", 2).eval()
    load_weights(model, str(tmp_path / "theirs"), new_head=False)
    tokens = torch.randint(0, 96, (2, 9))
    with torch.no_grad():
        assert torch.allclose(model(tokens).logits(), theirs(tokens).logits, rtol=0, atol=1e-5)
    scaled = json.loads((tmp_path / "theirs" / "config.json").read_text())
    scaled["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(scaled))
    with pytest.raises(CheckpointError, match="rotary positions are scaled"):
        load_weights(model, str(tmp_path / "theirs"), new_head=False)


def test_a_head_for_other_classes_is_new(tmp_path: Path) -> None:
    ten = with_gaps(resnet(10))
    source = str(export(ten, tmp_path / "out", **HOW))
    five = with_gaps(resnet(5))
    head = five.head.weight.clone()
    with pytest.raises(CheckpointError, match=r"'head.weight' has shape \[10, .*\], not \[5, "):
        load_weights(five, source, new_head=False)
    load_weights(five, source, new_head=True)
    assert torch.equal(five.head.weight, head)
    body = {name: value for name, value in ten.state_dict().items() if not name.startswith("head")}
    assert [name for name, value in body.items() if not torch.equal(value, five.state_dict()[name])] == []
    masked = drawn("bert", 1)
    texts = with_gaps(BERT(BERT_SIZES, head=ClassHead(BERT_SIZES, 3)))
    load_weights(texts, str(export(masked, tmp_path / "bert", **HOW)), new_head=True)
    assert torch.equal(texts.embedding.weight, masked.embedding.weight)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rope_theta": 5.0}, "its config.json has rope_theta 10000.0, here 5.0"),
        ({"norm_eps": 1e-3}, "its config.json has rms_norm_eps 1e-05, here 0.001"),
        ({"num_layers": 3}, "its config.json has num_hidden_layers 2, here 3"),
        ({"num_kv_heads": 4}, "num_key_value_heads 2, here 4"),
    ],
)
def test_a_model_of_other_settings_is_refused(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    source = str(export(drawn("tied", 1), tmp_path / "out", **HOW))
    other = GPT(ModelOptions(**{**SIZES, **settings}))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError) as refused:
        load_weights(other, source, new_head=False)
    assert said in str(refused.value)
    assert [name for name, value in other.state_dict().items() if not torch.equal(value, before[name])] == []


def test_files_without_weights_are_refused(tmp_path: Path) -> None:
    model = drawn("tied", 1)
    file = tmp_path / "net.safetensors"
    safetensors.torch.save_model(model, str(file))
    whole = file.read_bytes()
    cases: list[tuple[bytes, str]] = [
        (whole[:-1], "tensors end at byte"),
        (b"", "too few for a header"),
        (b"\xff" * 8 + whole[8:], "does not fit a file"),
        (whole.replace(b"norm.weight", b"norm.wright"), "is missing"),
    ]
    for content, said in cases:
        file.write_bytes(content)
        with pytest.raises(CheckpointError) as refused:
            load_weights(model, str(file), new_head=False)
        assert said in str(refused.value), said
    folder = export(model, tmp_path / "out", max_shard_bytes=4000, **HOW)
    index = folder / "model.safetensors.index.json"
    for weight_map in ({"a": "../net.safetensors"}, {}, [], {"a": 1}):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match="no weight_map with the names of files"):
            load_weights(model, str(folder), new_head=False)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        load_weights(model, str(tmp_path / "none"), new_head=False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"neither config\.toml nor model\.safetensors"):
        load_weights(model, str(tmp_path / "empty"), new_head=False)
