"""Shapes by ``config.json``: all parameters of the classes of transformers, of published models, and what is refused."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from unisono.errors import ConfigError
from unisono.interop.bert import bert_config
from unisono.interop.gpt import gpt_config
from unisono.models.bert import BERT, BertOptions
from unisono.models.gpt import GPT
from unisono.models.options import ModelOptions
from unisono.planner.hugging_face_shape import hugging_face_shape
from unisono.planner.model_presets import PRESETS
from unisono.planner.model_shape import ModelShape

_LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 6, "qk_nope_head_dim": 10, "v_head_dim": 10, "qk_rope_head_dim": 4,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "moe_intermediate_size": 7,
}  # fmt: skip
_SPARSE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 9}
_ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 9, "moe_num_shared_experts": 1}
FAMILIES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", [{}, {"attention_bias": True}, {"mlp_bias": True}, {"head_dim": 24}]),
    "mistral": ("MistralForCausalLM", [{}, {"head_dim": 24, "sliding_window": 16}]),
    "mixtral": ("MixtralForCausalLM", [{"num_local_experts": 3}]),
    "qwen2": ("Qwen2ForCausalLM", [{}, {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}]),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        [
            _SPARSE | {"shared_expert_intermediate_size": 12},
            _SPARSE | {"shared_expert_intermediate_size": 12, "decoder_sparse_step": 2, "qkv_bias": False},
        ],
    ),
    "qwen3": ("Qwen3ForCausalLM", [{"head_dim": 24}, {"head_dim": 16, "attention_bias": True}]),
    "qwen3_moe": ("Qwen3MoeForCausalLM", [_SPARSE | {"head_dim": 24}, _SPARSE | {"attention_bias": True}]),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", [_ERNIE, _ERNIE | {"moe_layer_start_index": 0}]),
    "deepseek_v2": ("DeepseekV2ForCausalLM", [_LATENT, _LATENT | {"q_lora_rank": None}]),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        [_LATENT | {"n_group": 2, "topk_group": 1}, _LATENT | {"n_group": 2, "topk_group": 1, "q_lora_rank": None}],
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        [
            {"n_layer": 3, "n_embd": 24, "n_head": 4, "n_positions": 32},
            {"n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 8, "n_inner": 40},
        ],
    ),
    "bert": ("BertForMaskedLM", [{"tie_word_embeddings": True, "type_vocab_size": 3}]),
}
CASES = [(family, name, more) for family, (name, cases) in FAMILIES.items() for more in cases]


def written(folder: Path, content: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(content))
    return file


def num_trained(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize(("family", "name", "more"), CASES)
def test_a_shape_has_all_parameters_of_the_class_of_transformers(
    tmp_path: Path, family: str, name: str, more: dict[str, Any]
) -> None:
    library: Any = pytest.importorskip("transformers", reason="NOT CHECKED: the extra 'hf' is not installed")
    rng = random.Random(f"{family} {more}")
    for _ in range(3):
        sizes = {
            "vocab_size": rng.randrange(50, 200),
            "hidden_size": rng.choice([32, 64]),
            "num_hidden_layers": rng.randrange(2, 6),
            "num_attention_heads": 4,
            "num_key_value_heads": rng.choice([1, 2, 4]),
            "intermediate_size": rng.randrange(10, 70),
            "max_position_embeddings": rng.randrange(8, 64),
            "tie_word_embeddings": rng.random() < 0.5,
        }
        config = library.AutoConfig.for_model(family, **(sizes | more))
        with torch.device("meta"):
            model = getattr(library, name)(config)
        model.config.architectures = [name]
        model.config.save_pretrained(tmp_path)
        shape = hugging_face_shape(tmp_path / "config.json")
        assert shape.params == num_trained(model), sizes
        (tmp_path / "config.json").unlink()


OPTIONS = [
    ModelOptions(vocab_size=96, tied=False),
    ModelOptions(vocab_size=100, dim=64, num_layers=3, num_heads=8, num_kv_heads=2),
    ModelOptions(vocab_size=64, num_experts=4, balance="none"),
    ModelOptions(vocab_size=64, num_experts=6, num_experts_per_token=3, ffn_dim=40, tied=False),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_file_of_an_export_has_the_shape_of_the_exported_gpt(tmp_path: Path, options: ModelOptions) -> None:
    with torch.device("meta"):
        model = GPT(options)
    shape = hugging_face_shape(written(tmp_path, gpt_config(model, 256, None)))
    assert (shape.params, shape.max_seq_len, shape.experts) == (num_trained(model), 256, options.num_experts)


def test_the_file_of_an_export_has_the_shape_of_the_exported_bert(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = BERT(BertOptions(vocab_size=100, num_layers=3, dim=48, num_heads=4, ffn_dim=50, max_length=20))
    assert hugging_face_shape(written(tmp_path, bert_config(model))).params == num_trained(model)


def llama(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, tokens: int, **more: object
) -> dict[str, object]:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": tokens,
        **more,
    }


# parameters as the published weights add up to; of DeepSeek-V3 without its biases of routers, which have no gradient
PUBLISHED: dict[str, tuple[dict[str, object], int]] = {
    "llama-3-8b": (llama(32, 4096, 32, 8, 14336, 128256, 8192), 8_030_261_248),
    "llama-3-70b": (llama(80, 8192, 64, 8, 28672, 128256, 8192), 70_553_706_496),
    "mixtral-8x7b": (
        llama(
            32, 4096, 32, 8, 14336, 32000, 4096, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2
        ),
        46_702_792_704,
    ),
    "gpt2-124m": (
        {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257},
        124_439_808,
    ),
    "deepseek-v3": (
        llama(
            61, 7168, 128, 128, 18432, 129280, 4096, model_type="deepseek_v3", moe_intermediate_size=2048,
            n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=3, moe_layer_freq=1,
            q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
            num_nextn_predict_layers=1, quantization_config={"quant_method": "fp8"},
        ),
        671_026_404_352,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_file_of_a_published_model_has_the_shape_of_its_preset(tmp_path: Path, name: str) -> None:
    content, params = PUBLISHED[name]
    shape = hugging_face_shape(written(tmp_path, content))
    assert replace(shape, other_params=0) == replace(PRESETS[name], dense_ffn=shape.dense_ffn)
    assert shape.params == params
    assert PRESETS[name].params + shape.other_params == params


LLAMA = llama(2, 64, 4, 2, 96, 100, 128)
LATENT = LLAMA | {"model_type": "deepseek_v3"} | _LATENT


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "no object"),
        ({}, "model_type = "),
        (LLAMA | {"hidden_size": None}, "no hidden_size"),
        ({name: value for name, value in LLAMA.items() if name != "hidden_size"}, "no hidden_size"),
        (LLAMA | {"model_type": "abacus"}, 'model_type = "abacus"'),
        (LLAMA | {"model_type": {"a": ["b"]}}, "model_type = "),
        *((LLAMA | {"hidden_size": value}, "hidden_size") for value in (-64, 0, "64", 64.0, True, [[64]], 10**30)),
        (LLAMA | {"num_hidden_layers": 10**30}, f"num_hidden_layers = {10**30}"),
        (LLAMA | {"vocab_size": 2**40}, "vocab_size = 1099511627776"),
        (LLAMA | {"tie_word_embeddings": 1}, "tie_word_embeddings = 1"),
        (LLAMA | {"num_attention_heads": 7}, "num_attention_heads = 7"),
        (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        (LLAMA | {"kv_lora_rank": 16}, "kv_lora_rank = 16"),
        (LLAMA | {"num_local_experts": 4}, "num_local_experts = 4"),
        (LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, "architectures = "),
        (LLAMA | {"architectures": {"a": 1}}, "architectures = "),
        (LLAMA | {"layer_types": ["full_attention", "linear_attention"]}, "layer_types with 'linear_attention'"),
        (LLAMA | {"layer_types": [["full_attention"]]}, 'layer_types with ["full_attention"]'),
        (LLAMA | {"layer_types": 2}, "layer_types = 2"),
        (LLAMA | {"model_type": "mistral", "num_key_value_heads": None}, "no num_key_value_heads"),
        (LLAMA | {"model_type": "qwen3"}, "no head_dim"),
        (LLAMA | {"model_type": "mixtral", "num_experts_per_tok": 2}, "no num_local_experts"),
        (
            LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok = 5",
        ),
        (LLAMA | {"model_type": "qwen3_moe", "num_local_experts": 4} | _SPARSE, "num_local_experts = 4"),
        (LLAMA | {"model_type": "qwen3_moe", "mlp_only_layers": [0]} | _SPARSE, "mlp_only_layers = [0]"),
        (LATENT | {"v_head_dim": 12}, "v_head_dim = 12"),
        (LATENT | {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        (LATENT | {"first_k_dense_replace": 2}, "first_k_dense_replace = 2"),
        (LLAMA | {"model_type": "bert", "position_embedding_type": "relative_key"}, "position_embedding_type = "),
        (LLAMA | {"model_type": "bert", "is_decoder": True}, "is_decoder = true"),
    ],
    ids=str,
)  # fmt: skip
def test_what_no_shape_can_be_of_is_refused_with_its_key_and_file(tmp_path: Path, content: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hugging_face_shape(written(tmp_path, content))
    (problem,) = caught.value.problems
    assert problem.given.startswith(f"{tmp_path / 'config.json'}: {said}")
    assert len(problem.given) < len(str(tmp_path)) + 200


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "line 1"), ("[" * 10**5, "inside each other"), (f'{{"hidden_size": {"9" * 5000}}}', "4,300 digits")],
    ids=["cut", "nested", "digits"],
)
def test_a_file_that_is_no_json_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        hugging_face_shape(file)
    with pytest.raises(ConfigError, match="ENOENT"):
        hugging_face_shape(tmp_path / "none.json")


def test_versions_of_transformers_write_the_number_of_experts_under_several_names(tmp_path: Path) -> None:
    sizes = {name: value for name, value in _SPARSE.items() if name != "num_experts"}
    shapes: list[ModelShape] = []
    for name in ("num_experts", "num_local_experts"):
        shapes.append(hugging_face_shape(written(tmp_path, LLAMA | {"model_type": "qwen3_moe", name: 6} | sizes)))
    assert shapes[0] == shapes[1]
    assert shapes[0].experts == 6
