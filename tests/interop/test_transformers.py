"""What a run of a transformers model exports, ``from_pretrained`` opens: weights, configuration, tokenizer and adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from unisono.interop.huggingface import export

transformers = pytest.importorskip("transformers", reason="NOT CHECKED: the extra 'hf' (transformers) is not installed")
HOW: dict[str, Any] = {"max_length": 16, "end_of_document": None}
VOCAB = 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


def build(kind: str, tied: bool) -> Any:
    torch.manual_seed(3)
    if kind == "GPT2LMHeadModel":
        config = transformers.GPT2Config(vocab_size=VOCAB, n_layer=2, n_head=2, n_embd=16, tie_word_embeddings=tied)
    else:
        family = kind.partition("For")[0]
        heads = {"num_key_value_heads": 2, "head_dim": 8} if family != "Bert" else {}
        config = getattr(transformers, f"{family}Config")(**SIZES, **heads, tie_word_embeddings=tied)
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # away from initialisation, where a lost tensor would not show
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


KINDS = ("LlamaForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [*KINDS, "BertForSequenceClassification"])
def test_from_pretrained_opens_the_export(tmp_path: Path, kind: str, tied: bool) -> None:
    model = build(kind, tied)
    folder = export(model, tmp_path / "out", tokenizer=None, **HOW)
    opened, loading = type(model).from_pretrained(folder, output_loading_info=True)
    assert {name: list(names) for name, names in loading.items() if names} == {}
    tokens = torch.randint(0, VOCAB, (2, 9))
    with torch.no_grad():
        assert torch.equal(opened.eval()(tokens).logits, model(tokens).logits)
    assert json.loads((folder / "config.json").read_text())["architectures"] == [kind]
    assert opened.config.tie_word_embeddings == tied
    embedded, output = opened.get_input_embeddings(), opened.get_output_embeddings()
    if output is not None:
        assert (embedded.weight is output.weight) == tied
    auto = (
        transformers.AutoModelForCausalLM if "Causal" in kind or "LMHead" in kind else transformers.AutoModelForMaskedLM
    )
    if kind != "BertForSequenceClassification":
        assert isinstance(auto.from_pretrained(folder), type(model))
    export(model, folder, tokenizer=None, **HOW)  # it takes the place of itself


def test_settings_of_generation_are_in_the_export(tmp_path: Path) -> None:
    model = build("LlamaForCausalLM", True)
    model.generation_config.max_new_tokens = 7
    folder = export(model, tmp_path / "out", tokenizer=None, **HOW)
    assert transformers.LlamaForCausalLM.from_pretrained(folder).generation_config.max_new_tokens == 7


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    """A tokenizer of words, as transformers saves it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "text": 2, "</s>": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    saved = tmp_path / "tokenizer"
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", eos_token="</s>").save_pretrained(
        saved
    )
    return saved


@pytest.mark.parametrize("given", ["", "tokenizer.json"])
def test_a_tokenizer_comes_with_all_of_its_files(tmp_path: Path, tokenizer_folder: Path, given: str) -> None:
    folder = export(build("LlamaForCausalLM", True), tmp_path / "out", tokenizer=tokenizer_folder / given, **HOW)
    opened = transformers.AutoTokenizer.from_pretrained(folder)
    assert opened("a text").input_ids == [1, 2]
    assert (opened.eos_token, opened.unk_token) == ("</s>", "[UNK]")


def test_a_tokenizer_under_another_name_comes_alone(tmp_path: Path, tokenizer_folder: Path) -> None:
    mine = tokenizer_folder / "mine.json"
    shutil.copyfile(tokenizer_folder / "tokenizer.json", mine)
    folder = export(build("LlamaForCausalLM", True), tmp_path / "out", tokenizer=mine, **HOW)
    assert "tokenizer_config.json" not in {path.name for path in folder.iterdir()}
    assert json.loads((folder / "tokenizer.json").read_text()) == json.loads(mine.read_text())


# --- adapters --------------------------------------------------------------------------------------------------------


def adapted(kind: str, **changes: Any) -> nn.Module:
    peft = pytest.importorskip("peft", reason="NOT CHECKED: the extra 'dev' (peft) is not installed")
    targets = (
        ["c_attn"] if kind == "GPT2LMHeadModel" else ["query", "value"] if "Bert" in kind else ["q_proj", "v_proj"]
    )
    settings = {"r": 4, "lora_alpha": 8, "target_modules": targets, "init_lora_weights": False}
    settings |= {"fan_in_fan_out": kind == "GPT2LMHeadModel", **changes}
    return peft.get_peft_model(build(kind, "modules_to_save" not in changes), peft.LoraConfig(**settings))


@pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)  # by peft, of transformers
@pytest.mark.parametrize("kind", KINDS)
def test_peft_opens_an_exported_adapter(tmp_path: Path, kind: str) -> None:
    import peft

    whole = {"modules_to_save": ["lm_head"]} if kind == "Qwen3ForCausalLM" else {}
    model = adapted(kind, **whole).eval()
    folder = export(model, tmp_path / "out", tokenizer=None, **HOW)
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    written = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    model.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    expected = safetensors.torch.load_file(tmp_path / "theirs/adapter_model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    opened = peft.PeftModel.from_pretrained(build(kind, not whole), folder).eval()
    tokens = torch.randint(0, VOCAB, (2, 9))
    with torch.no_grad():
        assert torch.equal(opened(tokens).logits, model(tokens).logits)
        assert not torch.equal(opened(tokens).logits, build(kind, not whole)(tokens).logits)
