"""Models of MXNet and MindSpore as folders of transformers: files of the real packages (tests/peers/make_model_fixtures.py)."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from unisono.errors import CheckpointError, ConfigError, UnisonoError
from unisono.interop.bert import load_bert
from unisono.interop.model_folder import NAME_MAPS, as_model, known_model, write_model_folder
from unisono.interop.stored_tensor import StoredTensor
from unisono.interop.weight_file import open_weights
from unisono.tasks.options import LoraOptions, TaskOptions
from unisono.tasks.pretrained import load_pretrained

transformers = pytest.importorskip("transformers", reason="NOT CHECKED: the extra 'hf' (transformers) is not installed")

MODELS = Path(__file__).parent / "models"
MAKER = Path(__file__).parents[1] / "peers" / "make_model_fixtures.py"
TOKENS = torch.from_numpy(np.random.RandomState(1).randint(0, 31, (2, 7)))
TEXTS = {
    "attention_mask": torch.tensor([[1] * 7, [1] * 4 + [0] * 3]),
    "token_type_ids": torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]]),
}
HEADS = {"num_attention_heads": "4"}
LLAMA = {**HEADS, "rms_norm_eps": "1e-6", "rope_theta": "500", "max_position_embeddings": "12"}
TOLERANCE = 1e-5  # of the largest output, in float32
IMAGES = {
    "gluon_resnet_bottleneck.params": ({}, [32]),
    "gluon_resnet_basic.params": ({}, [32]),
    "gluon_exported_bottleneck.params": ({}, [32]),
    "gluon_exported_basic.params": ({}, [32]),
    "gluoncv_resnet_v1b.params": ({}, [32]),
    "models_resnet_bottleneck.ckpt": ({"image_size": "33"}, [33]),
    "models_resnet_basic.ckpt": ({}, [32]),
    "mindcv_resnet_bottleneck.ckpt": ({"image_size": "34"}, [33, 34]),
    "mindcv_resnet_basic.ckpt": ({"image_size": "33"}, [33]),
}
SETTINGS = {
    **{name: settings for name, (settings, _) in IMAGES.items()},
    **dict.fromkeys(("gluonnlp_bert.params", "gluonnlp_bert_classifier.params", "models_bert.ckpt"), HEADS),
    **dict.fromkeys(("gluonnlp_gpt2.params", "mindformers_gpt2.ckpt"), HEADS),
    "mindformers_llama.ckpt": LLAMA,
}


def outputs(name: str) -> Mapping[str, np.ndarray[Any, Any]]:
    """What the model gave in its own framework."""
    return np.load((MODELS / name.replace("exported", "resnet")).with_suffix(".npz"))


def image(side: int) -> Tensor:
    return torch.from_numpy(np.random.RandomState(side).randn(2, 3, side, side).astype(np.float32))


def error(found: Tensor, wanted: np.ndarray[Any, Any]) -> float:
    return float((found - torch.from_numpy(wanted)).abs().max() / np.abs(wanted).max())


def folder_of(name: str, out: Path, *, family: str = "auto", **changed: str) -> Path:
    with open_weights(MODELS / name) as weights:
        write_model_folder(out, as_model(family, MODELS / name, weights.tensors, SETTINGS[name] | changed))
    return out


def opened(folder: Path) -> Any:
    """The model of a folder, of which every weight is in it and everything in it is a weight."""
    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, loading = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    assert {name: list(names) for name, names in loading.items() if names} == {}
    return model.eval()


# --- outputs of the framework itself ---------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", IMAGES)
def test_a_resnet_gives_the_same_logits(tmp_path: Path, name: str) -> None:
    model = opened(folder_of(name, tmp_path / "hf", family="resnet"))
    for side in IMAGES[name][1]:
        assert error(model(image(side)).logits, outputs(name)[f"logits{side}"]) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("name", ["gluonnlp_bert.params", "models_bert.ckpt"])
def test_bert_gives_the_same_states_and_logits(tmp_path: Path, name: str) -> None:
    model = opened(folder_of(name, tmp_path / "hf", family="bert"))
    assert type(model).__name__ == "BertForPreTraining"
    given, wanted = model(TOKENS, **TEXTS), outputs(name)
    inner = model.bert(TOKENS, **TEXTS)
    assert error(inner.last_hidden_state, wanted["states"]) < TOLERANCE
    assert error(inner.pooler_output, wanted["pooled"]) < TOLERANCE
    assert error(given.prediction_logits, wanted["masked"]) < TOLERANCE
    assert error(given.seq_relationship_logits, wanted["following"]) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "family", "inputs"),
    [
        ("gluonnlp_bert_classifier.params", "bert", TEXTS),
        ("gluonnlp_gpt2.params", "gpt2", {}),
        ("mindformers_gpt2.ckpt", "gpt2", {}),
        ("mindformers_llama.ckpt", "llama", {}),
    ],
)
def test_a_transformer_gives_the_same_logits(tmp_path: Path, name: str, family: str, inputs: dict[str, Tensor]) -> None:
    model = opened(folder_of(name, tmp_path / "hf", family=family))
    assert error(model(TOKENS, **inputs).logits, outputs(name)["logits"]) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("models_bert.ckpt", {"layer_norm_eps": "1e-12"}),
        ("models_bert.ckpt", {"hidden_act": "gelu"}),
        ("gluonnlp_bert.params", {"layer_norm_eps": "1e-7"}),
        ("gluonnlp_bert.params", {"hidden_act": "gelu_pytorch_tanh"}),
        ("gluonnlp_bert.params", {"num_attention_heads": "2"}),
    ],
)
def test_the_libraries_own_values_matter(tmp_path: Path, name: str, changed: dict[str, str]) -> None:
    model = opened(folder_of(name, tmp_path / "hf", **changed))
    assert error(model(TOKENS, **TEXTS).prediction_logits, outputs(name)["masked"]) > 2 * TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("name", ["models_resnet_bottleneck.ckpt", "mindcv_resnet_bottleneck.ckpt"])
def test_images_whose_padding_differs_are_refused_as_their_outputs_differ(tmp_path: Path, name: str) -> None:
    model = opened(folder_of(name, tmp_path / "hf"))
    assert error(model(image(32)).logits, outputs(name)["logits32"]) > 1e-2
    with pytest.raises(ConfigError) as caught:
        folder_of(name, tmp_path / "other", image_size="32")
    assert "pads below and on the right" in caught.value.problems[0].rule
    assert "--set image_size=33" in caught.value.problems[0].nearest
    assert not (tmp_path / "other").exists()


def test_the_sides_that_are_taken() -> None:
    taken: dict[str, list[int]] = {}
    for name in ("models_resnet_bottleneck.ckpt", "mindcv_resnet_bottleneck.ckpt"):
        with open_weights(MODELS / name) as weights:
            for side in range(1, 230):
                try:
                    as_model("auto", MODELS / name, weights.tensors, {"image_size": str(side)})
                except ConfigError:
                    continue
                taken.setdefault(name, []).append(side)
    assert taken["models_resnet_bottleneck.ckpt"] == [side for side in range(1, 230) if side % 32 == 1]
    assert taken["mindcv_resnet_bottleneck.ckpt"] == [side for side in range(1, 230) if side % 4 in (1, 2)]


@torch.no_grad()
def test_the_reference_bert_loads_the_folder(tmp_path: Path) -> None:
    model = load_bert(folder_of("gluonnlp_bert.params", tmp_path / "hf")).eval()
    logits: Any = model(TOKENS, TEXTS["attention_mask"], TEXTS["token_type_ids"])
    assert error(logits.logits(), outputs("gluonnlp_bert.params")["masked"]) < TOLERANCE


@torch.no_grad()
def test_runs_load_the_folder_as_a_pretrained_model(tmp_path: Path) -> None:
    """As ``model.pretrained`` does, which takes no weight that is random but a head's."""
    classes = tuple("abcde")
    name = "models_resnet_bottleneck.ckpt"
    folder = str(folder_of(name, tmp_path / "resnet"))
    image_task = TaskOptions(kind="image", classes=classes)
    model: Any = load_pretrained(folder, image_task, LoraOptions(), padding=None, cache=tmp_path)
    assert error(model.eval()(image(33)).logits, outputs(name)["logits33"]) < TOLERANCE
    folder = str(folder_of("mindformers_llama.ckpt", tmp_path / "llama"))
    model = load_pretrained(folder, TaskOptions(kind="language_model"), LoraOptions(), padding=None, cache=tmp_path)
    assert error(model.eval()(TOKENS).logits, outputs("mindformers_llama.ckpt")["logits"]) < TOLERANCE


# --- names and shapes ------------------------------------------------------------------------------------------------


def stored(tensor: Tensor) -> StoredTensor:
    return StoredTensor(dtype=tensor.dtype, shape=tuple(tensor.shape), load=lambda: tensor)


def tensors_of(name: str) -> dict[str, Tensor]:
    with open_weights(MODELS / name) as weights:
        return {key: tensor.load() for key, tensor in weights.tensors.items()}


def converted(name: str, tensors: Mapping[str, Tensor], *, family: str = "auto", **settings: str) -> Any:
    files = {key: stored(tensor) for key, tensor in tensors.items()}
    return as_model(family, Path(name), files, SETTINGS[name] | settings)


def refusal(name: str, tensors: Mapping[str, Tensor], **settings: str) -> str:
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        converted(name, tensors, **settings)
    return str(caught.value)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_file_is_of_one_model(name: str) -> None:
    with open_weights(MODELS / name) as weights:
        found = [name_map for name_map in NAME_MAPS if name_map.find(weights.tensors) is not None]
        assert len(found) == 1
        assert known_model(weights.tensors) == found[0]
        others = {name_map.family for name_map in NAME_MAPS} - {found[0].family}
        for family in others:
            with pytest.raises(CheckpointError, match=f"try:  --as {found[0].family}: "):
                as_model(family, Path(name), weights.tensors, {})


@pytest.mark.parametrize("name", SETTINGS)
def test_each_tensor_that_is_missing_or_one_too_many_is_named(name: str) -> None:
    tensors = tensors_of(name)
    converted(name, tensors)
    for missing in tensors:
        rest = {key: tensor for key, tensor in tensors.items() if key != missing}
        try:
            made = converted(name, rest)
        except (CheckpointError, ConfigError):
            continue
        # what may be absent: an optimizer's state, the second name of a table, or a bias before a norm, which is folded
        assert (
            missing.split(".")[0] in ("moments", "global_step", "learning_rate", "momentum", "lm_head")
            or missing.endswith(("_logits_proj.weight", "decoder.3.weight"))
            or ("resnet" in made.label.lower() and missing.endswith("bias"))
        ), missing
    extra = refusal(name, tensors | {"other.weight": torch.ones(2, 2)})
    assert "no place for 'other.weight'" in extra


def test_shapes_that_do_not_fit_each_other_are_refused() -> None:
    name = "gluonnlp_gpt2.params"
    tensors = tensors_of(name)
    said = refusal(name, tensors | {"_ffn_layers.1._out_map.bias": torch.ones(17)})
    assert "'_ffn_layers.1._out_map.bias' is [17], not [16]" in said
    said = refusal(name, tensors | {"_ffn_ln.0.gamma": torch.ones(1, 16)})
    assert "'_ffn_ln.0.gamma' is [1, 16], not [width]" in said
    wider = {key: torch.ones(51, *tensor.shape[1:]) if "qkv" in key else tensor for key, tensor in tensors.items()}
    assert "queries, keys and values of 51 in all, for a width of 16" in refusal(name, wider)


def test_a_matrix_that_is_not_the_table_is_refused() -> None:
    tensors = tensors_of("gluonnlp_gpt2.params")
    said = refusal("gluonnlp_gpt2.params", tensors | {"_logits_proj.weight": tensors["_embed.weight"] + 1})
    assert "'_logits_proj.weight' has other values than '_embed.weight'" in said


def test_state_of_an_optimizer_is_left_out_and_named() -> None:
    name = "models_resnet_bottleneck.ckpt"
    tensors = tensors_of(name)
    made = converted(name, tensors)
    assert {"global_step", "learning_rate", "momentum", "moments.end_point.weight"} <= set(made.left_out)
    assert all(key.startswith("moments.") or "." not in key for key in made.left_out)
    assert len(made.left_out) == 65
    # of another shape, or of nothing that the model has, it is something else
    assert "'moments.conv1.weight'" in refusal(name, tensors | {"moments.conv1.weight": torch.ones(3)})
    assert "'moments.x'" in refusal(name, tensors | {"moments.x": torch.ones(3)})
    assert "'teacher.conv1.weight'" in refusal(name, tensors | {"teacher.conv1.weight": tensors["conv1.weight"]})


def test_a_bert_alone_has_no_heads() -> None:
    tensors = tensors_of("models_bert.ckpt")
    bare = {key.removeprefix("bert.bert."): tensor for key, tensor in tensors.items() if key.startswith("bert.bert.")}
    made = converted("models_bert.ckpt", bare)
    assert made.config["architectures"] == ["BertModel"]
    whole = converted("models_bert.ckpt", tensors)
    assert set(made.tensors) == {key for key in whole.tensors if key.startswith("bert.")}


def test_a_basic_block_of_the_zoo_in_half_precision_folds_in_float32() -> None:
    name = "gluon_resnet_bottleneck.params"
    made = converted(name, {key: tensor.half() for key, tensor in tensors_of(name).items()})
    unit = "resnet.encoder.stages.0.layers.0.layer.0."
    assert made.tensors[f"{unit}convolution.weight"].dtype == torch.float16
    mean = made.tensors[f"{unit}normalization.running_mean"]
    assert mean.dtype == mean.load().dtype == torch.float32


def test_residual_networks_that_the_class_does_not_compute_are_refused() -> None:
    name = "gluoncv_resnet_v1b.params"
    tensors = tensors_of(name)
    wide = {key: tensor for key, tensor in tensors.items()}
    for block in (0, 1):  # 3x3 convolutions of 4 channels in a stage of 8, as in a wide ResNet
        prefix = f"layer1.{block}."
        wide[f"{prefix}conv1.weight"] = torch.ones(4, tensors[f"{prefix}conv1.weight"].shape[1], 1, 1)
        wide[f"{prefix}conv2.weight"], wide[f"{prefix}conv3.weight"] = torch.ones(4, 4, 3, 3), torch.ones(8, 4, 1, 1)
        for norm in ("bn1", "bn2"):
            wide |= {
                f"{prefix}{norm}.{kind}": torch.ones(4) for kind in ("gamma", "beta", "running_mean", "running_var")
            }
    assert "3x3 convolutions of [4, 4, 6] channels in stages of [8, 16, 24]" in refusal(name, wide)
    basic = tensors_of("gluon_resnet_basic.params")
    projected = basic | {"features.4.0.downsample.0.weight": torch.ones(4, 4, 1, 1)}
    projected |= {
        f"features.4.0.downsample.1.{kind}": torch.ones(4) for kind in ("gamma", "beta", "running_mean", "running_var")
    }
    assert "a first stage with a projection, from 4 to 4 channels" in refusal("gluon_resnet_basic.params", projected)
    small = basic | {"features.0.weight": torch.ones(4, 3, 3, 3)}  # the stem for small images
    assert "'features.0.weight' is [4, 3, 3, 3], not [4, 3, 7, 7]" in refusal("gluon_resnet_basic.params", small)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.int64, torch.bool])
@pytest.mark.parametrize("all_of_them", [True, False])
def test_weights_that_are_no_floating_point_numbers_are_refused(dtype: torch.dtype, all_of_them: bool) -> None:
    """Alone, and beside others with which they are one tensor of the class."""
    file = "mindformers_gpt2.ckpt"
    changed = tensors_of(file)
    first = "backbone.blocks.0.attention.dense1.weight"
    changed |= {name: tensor.to(dtype) for name, tensor in changed.items() if all_of_them or name == first}
    words = refusal(file, changed)
    assert f"is {str(dtype).removeprefix('torch.')}" in words
    assert all_of_them or f"'{first}' is" in words
    assert "floating-point numbers of 16, 32 or 64 bits" in words


def test_models_are_listed_apart() -> None:
    with open_weights(MODELS / "models_bert.ckpt") as weights, pytest.raises(CheckpointError) as caught:
        as_model("resnet", Path("a"), weights.tensors, {})
    labels = [name_map.label for name_map in NAME_MAPS if name_map.family == "resnet"]
    assert "; ".join(labels) in str(caught.value)
    assert not any(";" in label for label in labels)


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("gluonnlp_bert.params", {}, "no num_attention_heads"),
        ("gluonnlp_bert.params", {"num_attention_heads": "5"}, "num_attention_heads=5 for a width of 16"),
        ("gluonnlp_bert.params", {"num_attention_heads": "four"}, "num_attention_heads=four, which is no number"),
        ("gluonnlp_bert.params", {"num_attention_heads": "9" * 400}, "which is not above 0 and below 9,007,199"),
        ("gluonnlp_bert.params", {"num_attention_heads": "-4"}, "num_attention_heads=-4, which is not above 0"),
        ("gluonnlp_bert.params", {**HEADS, "hidden_act": "swish"}, "where there are gelu, gelu_pytorch_tanh, relu"),
        ("gluonnlp_bert.params", {**HEADS, "layer_norm_eps": "nan"}, "layer_norm_eps=nan, which is not above 0"),
        ("gluonnlp_bert.params", {**HEADS, "heads": "4"}, "there are num_attention_heads, layer_norm_eps"),
        ("gluon_resnet_basic.params", {"image_size": "33"}, "there is none to give"),
        ("gluonnlp_bert.params", {"model.num_heads": "4"}, "try:  --set num_attention_heads=4"),
        ("gluonnlp_bert.params", {"model.num_heads": "4"}, "values of config.json, no settings of a run"),
        ("gluonnlp_bert.params", {}, "it must be given: weights do not tell the number of heads"),
        ("mindformers_llama.ckpt", HEADS, "weights do not tell the base of the rotary positions"),
        ("mindcv_resnet_basic.ckpt", {}, "no image_size"),
        ("mindformers_llama.ckpt", HEADS, "no rope_theta"),
        ("mindformers_llama.ckpt", {**LLAMA, "num_attention_heads": "1"}, "makes heads of 16, for keys of 8"),
        ("mindformers_llama.ckpt", {**LLAMA, "num_attention_heads": "16"}, "makes heads of 1, for keys of 8"),
    ],
)
def test_settings_are_checked(name: str, given: dict[str, str], words: str) -> None:
    with open_weights(MODELS / name) as weights, pytest.raises(ConfigError) as caught:
        as_model("auto", Path(name), weights.tensors, given)
    assert words in str(caught.value)
    assert "nothing was written" in str(caught.value)


# --- files that are anything -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
def test_names_in_any_disorder_are_an_error_in_words(name: str) -> None:
    tensors, chance = tensors_of(name), random.Random(0)
    names = list(tensors)
    for _ in range(40):
        changed = dict(tensors)
        for _ in range(chance.randint(1, 3)):
            first, second = chance.choice(names), chance.choice(names)
            kind = chance.randrange(4)
            if kind == 0:
                changed[first] = tensors[second]
            elif kind == 1:
                changed[first + second] = changed.pop(first, torch.ones(1))
            elif kind == 2:
                changed[first] = torch.ones([2] * chance.randint(0, 5))
            else:
                changed[first.replace("0", str(10**12)).replace("1", "-1")] = changed.pop(first, torch.ones(1))
        said = ""
        try:
            converted(name, changed)
        except UnisonoError as error:
            said = str(error)
        assert len(said) < 4000
        assert not said or "nothing was written" in said


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0

    def watched(tensor: StoredTensor) -> StoredTensor:
        def load() -> Tensor:
            nonlocal most
            values = tensor.load()
            alive.add(values)
            most = max(most, len(alive))
            return values

        return replace(tensor, load=load)

    name = "gluoncv_resnet_v1b.params"
    with open_weights(MODELS / name) as weights:
        tensors = {key: watched(tensor) for key, tensor in weights.tensors.items()}
        write_model_folder(tmp_path / "hf", as_model("auto", Path(name), tensors, {}))
    assert most == 1


def test_a_folder_that_cannot_be_finished_leaves_nothing(tmp_path: Path) -> None:
    def fails() -> Tensor:
        raise OSError(28, "No space left on device")

    name = "gluoncv_resnet_v1b.params"
    with open_weights(MODELS / name) as weights:
        tensors = dict(weights.tensors)
        tensors["fc.bias"] = replace(tensors["fc.bias"], load=fails)
        with pytest.raises(OSError, match="No space"):
            write_model_folder(tmp_path / "hf", as_model("auto", Path(name), tensors, {}))
    assert list(tmp_path.iterdir()) == []


def test_nothing_of_transformers_is_needed_to_write_a_folder() -> None:
    code = "import sys, unisono.interop.model_folder; print({'transformers', 'mxnet', 'mindspore'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.peer
@pytest.mark.parametrize("package", ["mxnet", "mindspore"])
def test_the_fixtures_are_what_the_package_writes(tmp_path: Path, package: str) -> None:
    python = os.environ.get(f"UNISONO_{package.upper()}_PYTHON")
    if not python:
        pytest.skip(f"set UNISONO_{package.upper()}_PYTHON to an interpreter with {package}: nothing was compared")
    subprocess.run([python, str(MAKER), package, str(tmp_path)], check=True, capture_output=True)
    made = sorted(tmp_path.iterdir())
    assert made
    for path in made:
        if path.suffix == ".npz":
            ours, theirs = np.load(MODELS / path.name), np.load(path)
            assert list(ours) == list(theirs)
            assert all(error(torch.from_numpy(ours[key]), theirs[key]) < TOLERANCE for key in ours)
            continue
        with open_weights(MODELS / path.name) as first, open_weights(path) as second:
            assert list(first.tensors) == list(second.tensors)
            for key, tensor in first.tensors.items():
                assert torch.equal(tensor.load(), second.tensors[key].load())
