"""Conversion of BERT to and from the folder layout of Hugging Face's ``BertForMaskedLM``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from unisono.errors import CheckpointError, UnisonoError
from unisono.interop.exported_tensor import ExportedTensor
from unisono.models.bert import BERT, BertOptions, ClassHead, TokenClassHead
from unisono.storage.files import require_regular
from unisono.storage.limits import read_json

_NAMES = {
    "embedding": "bert.embeddings.word_embeddings",
    "positions": "bert.embeddings.position_embeddings",
    "segments": "bert.embeddings.token_type_embeddings",
    "norm": "bert.embeddings.LayerNorm",
    "attention.q": "attention.self.query",
    "attention.k": "attention.self.key",
    "attention.v": "attention.self.value",
    "attention.out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "ffn.up": "intermediate.dense",
    "ffn.down": "output.dense",
    "ffn_norm": "output.LayerNorm",
    "head.dense": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
    "head.pooler": "bert.pooler.dense",
    "head.classifier": "classifier",
    "head": "cls.predictions",
}
# tensors of other heads and of older versions
_IGNORED = re.compile(
    r"bert\.pooler\.|cls\.seq_relationship\.|cls\.predictions\.decoder\.|bert\.embeddings\.position_ids"
)
_SETTINGS = {
    "vocab_size": "vocab_size",
    "num_hidden_layers": "num_layers",
    "hidden_size": "dim",
    "num_attention_heads": "num_heads",
    "intermediate_size": "ffn_dim",
    "max_position_embeddings": "max_length",
    "type_vocab_size": "segments",
    "hidden_dropout_prob": "dropout",
    "layer_norm_eps": "norm_eps",
}
TIED = ("cls.predictions.decoder",)  # the table of tokens, which has no tensor of its own
_LAYER_TENSORS = 16  # each of the eight modules of a layer has a weight and a bias
_FRACTIONS = ("hidden_dropout_prob", "layer_norm_eps")
_FIXED = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False}


def bert_name(name: str) -> str:
    """Name in the classes of transformers, such as ``BertForMaskedLM``, of the parameter ``name`` of ``BERT``."""
    layer = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    module, _, kind = (layer[2] if layer else name).rpartition(".")
    return (f"bert.encoder.layer.{layer[1]}." if layer else "") + f"{_NAMES[module]}.{kind}"


def bert_tensors(model: BERT) -> list[ExportedTensor]:
    """All parameters with their exported names. The output matrix is the token table and is not written twice."""
    return [ExportedTensor(bert_name(name), name) for name in model.state_dict(keep_vars=True)]


def bert_config(model: BERT) -> dict[str, Any]:
    """Content of ``config.json`` for ``BertForMaskedLM``, or for the class of transformers with the model's head."""
    architecture, labels = "BertForMaskedLM", {}
    if isinstance(model.head, ClassHead | TokenClassHead):
        text = isinstance(model.head, ClassHead)
        architecture = "BertForSequenceClassification" if text else "BertForTokenClassification"
        labels = {"num_labels": model.head.classifier.out_features, "classifier_dropout": model.options.dropout}
    return {
        "architectures": [architecture],
        **labels,
        **_FIXED,
        **{theirs: getattr(model.options, ours) for theirs, ours in _SETTINGS.items()},
        "attention_probs_dropout_prob": 0.0,
        "tie_word_embeddings": True,
        "pad_token_id": None,
        "dtype": "float32",
    }


def load_bert(folder: Path | str) -> BERT:
    """Load a ``BERT`` from a folder that ``BertForMaskedLM.save_pretrained`` wrote.

    Ignores a pooler, a next-sentence head and the dropout inside attention.

    Args:
        folder: Has ``config.json`` and ``model.safetensors``.

    Returns:
        The model on the CPU, in training mode, with parameters of torch's default dtype.

    Raises:
        CheckpointError: A file is missing, or the configuration or a tensor does not match ``BERT``.
    """
    folder = Path(folder)
    library: Any = safetensors.torch  # partly typed
    try:
        content: Any = read_json(folder / "config.json")
        require_regular(folder / "model.safetensors")
        stored: Mapping[str, Tensor] = library.load_file(folder / "model.safetensors")
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise _mismatch(folder, f"{type(error).__name__}: {error}") from error
    if not isinstance(content, dict):
        raise _mismatch(folder, "config.json is not an object")
    config = cast("dict[str, Any]", content)
    other = {name: config[name] for name, value in _FIXED.items() if config.get(name, value) != value}
    absent = sorted(set(_SETTINGS) - config.keys())
    if other or absent:
        raise _mismatch(folder, ", ".join([*(f"{k} = {v!r}" for k, v in other.items()), *(f"no {k}" for k in absent)]))
    # more layers than the tensors can be of would take time and memory before a name is missing
    if wrong := [theirs for theirs in _SETTINGS if not _is_size(config[theirs], theirs)] or (
        ["num_hidden_layers"] if config["num_hidden_layers"] * _LAYER_TENSORS > len(stored) else []
    ):
        raise _mismatch(folder, ", ".join(f"{theirs} = {config[theirs]!r}" for theirs in wrong))
    try:
        options = BertOptions(**{ours: config[theirs] for theirs, ours in _SETTINGS.items()})
        shapes = _shapes(options)  # compared before anything is allocated
    except UnisonoError as error:
        raise _mismatch(folder, error.problems[0].given) from error
    except (ValueError, RuntimeError) as error:
        raise _mismatch(folder, f"{type(error).__name__}: {error}") from error
    tensors = {_modern_name(name): tensor for name, tensor in stored.items() if not _IGNORED.match(name)}
    problems = [f"{name} is missing" for name in sorted(shapes.keys() - tensors.keys())]
    problems += [f"{name} has no place" for name in sorted(tensors.keys() - shapes.keys())]
    problems += [
        f"{name} is {list(tensors[name].shape)}, not {list(shapes[name])}"
        for name in sorted(shapes.keys() & tensors.keys())
        if tensors[name].shape != shapes[name]
    ]
    if problems:
        raise _mismatch(folder, "; ".join(problems[:3]) + (f"; {len(problems) - 3} more" if len(problems) > 3 else ""))
    with torch.random.fork_rng(devices=[]):  # initial values are replaced: the global random state is not advanced
        model = BERT(options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[bert_name(name)])
    return model


def _shapes(options: BertOptions) -> dict[str, torch.Size]:
    """The shapes by exported name. One layer is built and stands for all: thousands take a minute, even without memory."""
    with torch.device("meta"):
        model = BERT(replace(options, num_layers=1))
    shapes: dict[str, torch.Size] = {}
    for name, parameter in model.named_parameters():
        kind = name.removeprefix("blocks.0.")
        each = [name] if kind == name else [f"blocks.{layer}.{kind}" for layer in range(options.num_layers)]
        shapes |= dict.fromkeys(map(bert_name, each), parameter.shape)
    return shapes


def _is_size(value: Any, name: str) -> bool:
    if name in _FRACTIONS:
        return type(value) in (int, float) and 0 <= value < 1
    return type(value) is int and 0 < value < 1 << 31


def _modern_name(name: str) -> str:
    """Rename the norms' gamma and beta, as in files of the first versions, to weight and bias."""
    return re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name))


def _mismatch(folder: Path, given: str) -> CheckpointError:
    return CheckpointError(
        given=f"{folder}: {given}",
        rule="it has config.json and model.safetensors of a BertForMaskedLM with gelu and learned positions",
        consequence="no model was loaded",
        nearest="BertForMaskedLM.from_pretrained(…).save_pretrained(folder)",
    )
