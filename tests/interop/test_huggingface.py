"""An export opens where it says it opens, and computes the same."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from unisono.errors import CheckpointError
from unisono.interop.huggingface import export
from unisono.models.gpt import GPT
from unisono.models.options import ModelOptions


def gpt(**changes: object) -> GPT:
    torch.manual_seed(1)
    sizes = {
        "num_layers": 2,
        "dim": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "vocab_size": 96,
        "rope_theta": 5000.0,
        "norm_eps": 1e-4,
    }
    model = GPT(ModelOptions(**{**sizes, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # away from initialisation, where norms are 1 and a swapped pair of matrices would hardly show
            parameter.mul_(3).add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 0), (4, 0), (2, 6)])
def test_llama_of_transformers_gives_the_same_logits(tmp_path: Path, tied: bool, kv_heads: int, head_dim: int) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="NOT CHECKED: the extra 'hf' (transformers) is not installed"
    )
    model = gpt(tied=tied, num_kv_heads=kv_heads, head_dim=head_dim)
    folder = export(model, tmp_path / "out", max_length=64, end_of_document=5, tokenizer=None)
    llama, loading = transformers.LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert not loading["mismatched_keys"]
    assert (llama.config.eos_token_id, llama.config.max_position_embeddings) == (5, 64)
    tokens = torch.randint(0, 96, (3, 48))
    with torch.no_grad():
        ours, theirs = model(tokens).logits(), llama.eval()(tokens).logits
    assert ours.abs().max() > 1
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-4), (ours - theirs).abs().max()


@pytest.mark.parametrize("head_dim", [0, 6])
@pytest.mark.parametrize(("balance", "kind"), [("loss", "Mixtral"), ("none", "Mixtral"), ("bias", "Ernie4_5_Moe")])
def test_experts_open_as_a_class_that_chooses_alike(tmp_path: Path, balance: str, kind: str, head_dim: int) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="NOT CHECKED: the extra 'hf' (transformers) is not installed"
    )
    model = gpt(num_experts=6, num_experts_per_token=3, ffn_dim=24, balance=balance, tied=False, head_dim=head_dim)
    biases = [block.ffn.router.bias for block in model.blocks if balance == "bias"]
    for bias in biases:
        bias += 0.2 * torch.randn(6)
    folder = export(model, tmp_path / "out", max_length=64, end_of_document=5, tokenizer=None)
    theirs, loading = getattr(transformers, f"{kind}ForCausalLM").from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert not loading["mismatched_keys"]
    tokens = torch.randint(0, 96, (3, 48))
    with torch.no_grad():
        ours = model(tokens).logits()
        assert torch.allclose(ours, theirs.eval()(tokens).logits, rtol=0, atol=1e-4)
        for bias in biases:
            bias.zero_()
        assert torch.equal(ours, model(tokens).logits()) == (balance != "bias")
    assert isinstance(transformers.AutoModelForCausalLM.from_pretrained(folder), type(theirs))


def test_one_expert_per_token_has_no_class_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as raised:
        export(
            gpt(num_experts=4, num_experts_per_token=1),
            tmp_path / "out",
            max_length=8,
            end_of_document=5,
            tokenizer=None,
        )
    assert str(raised.value) == (
        "a model with num_experts_per_token 1\n"
        "  rule: it weighs its expert with the score; Mixtral and its like would weigh it with 1\n"
        "  so:   the export would compute something else, and nothing was exported\n"
        "  try:  num_experts_per_token=2 or more, or the checkpoint itself"
    )
    assert not list(tmp_path.iterdir())


def test_the_files_say_what_they_hold(tmp_path: Path) -> None:
    tokenizer = tmp_path / "mine.json"
    tokenizer.write_text("{}")
    model = gpt(tied=True)
    folder = export(model, tmp_path / "out", max_length=64, end_of_document=None, tokenizer=tokenizer)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    assert sum(tensor.numel() for tensor in tensors.values()) == sum(p.numel() for p in model.parameters())
    assert torch.equal(tensors["model.layers.1.self_attn.k_proj.weight"], model.blocks[1].attention.k.weight)
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["intermediate_size"] == model.options.hidden_ffn
    assert {path.name for path in tmp_path.iterdir()} == {"mine.json", "out"}


class Own(nn.Module):
    """Two names for one matrix, a buffer, and a parameter that is laid out another way."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.register_buffer("seen", torch.tensor(3))


def test_a_model_of_ones_own_opens_with_safetensors(tmp_path: Path) -> None:
    model = Own()
    folder = export(model, tmp_path / "out", max_length=64, end_of_document=None, tokenizer=None)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    assert tensors.keys() in ({"table.weight", "turned", "seen"}, {"head.weight", "turned", "seen"})
    assert torch.equal(tensors["turned"], model.turned)
    assert model.turned.stride() == (1, 5)  # the model itself is left as it was
    other = Own()
    safetensors.torch.load_model(other, folder / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_a_new_export_replaces_an_old_one_whole(tmp_path: Path) -> None:
    export(gpt(), tmp_path / "out", max_length=64, end_of_document=None, tokenizer=None)
    export(Own(), tmp_path / "out", max_length=64, end_of_document=None, tokenizer=None)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_export_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    folder = export(gpt(), tmp_path / "out", max_length=64, end_of_document=None, tokenizer=None)
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError) as raised:
        export(gpt(tied=False), folder, max_length=64, end_of_document=None, tokenizer=tmp_path / "gone.json")
    assert str(raised.value) == (
        f"export to '{folder}': No such file or directory\n"
        "  rule: an export is a new folder, or takes the place of an earlier export\n"
        "  so:   nothing was exported\n"
        "  try:  a path in a folder you may write to, with room for the weights: unisono checkpoint export RUN PATH"
    )
    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_link_is_no_export(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "other")
    with pytest.raises(CheckpointError, match="where there is out"):
        export(gpt(), tmp_path / "out", max_length=64, end_of_document=None, tokenizer=None)


def test_large_models_are_written_tensor_by_tensor_into_several_files(tmp_path: Path) -> None:
    model = gpt(tied=False)
    whole = dict(model.named_parameters())
    with torch.device("meta"):
        empty = GPT(model.options)
    live = peak = 0

    def forget(size: int) -> None:
        nonlocal live
        live -= size

    def read(name: str, out: torch.Tensor) -> None:
        nonlocal live, peak
        live += out.nbytes
        peak = max(peak, live)
        weakref.finalize(out.untyped_storage(), forget, out.nbytes)
        out.copy_(whole[name].detach())

    limit = sum(p.nbytes for p in model.parameters()) // 4
    folder = export(
        empty, tmp_path / "out", max_length=64, end_of_document=5, tokenizer=None, read=read, max_shard_bytes=limit
    )
    largest = max(p.nbytes for p in model.parameters())
    assert largest <= peak <= 2 * largest
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    assert 4 <= len(files) <= 6
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
    single = export(model, tmp_path / "one", max_length=64, end_of_document=5, tokenizer=None)
    expected = safetensors.torch.load_file(single / "model.safetensors")
    assert index["weight_map"].keys() == expected.keys()
    for name in files:
        tensors = safetensors.torch.load_file(folder / name)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= max(limit, largest)
        for key, tensor in tensors.items():
            assert index["weight_map"][key] == name
            assert torch.equal(tensor, expected[key]), key
    again = export(gpt(), folder, max_length=64, end_of_document=5, tokenizer=None)
    assert sorted(path.name for path in again.iterdir()) == ["config.json", "model.safetensors"]


def test_transformers_opens_several_files(tmp_path: Path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="NOT CHECKED: the extra 'hf' (transformers) is not installed"
    )
    model = gpt()
    folder = export(model, tmp_path / "out", max_length=64, end_of_document=5, tokenizer=None, max_shard_bytes=20_000)
    assert len(list(folder.glob("*.safetensors"))) > 1
    llama = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert torch.equal(llama.state_dict()["model.layers.1.mlp.up_proj.weight"], model.blocks[1].ffn.up.weight)
