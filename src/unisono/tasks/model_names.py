"""Names of the built-in models, the tasks they are for, and the options that they read. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from unisono.errors import Problem
from unisono.models.options import ModelOptions
from unisono.tasks.options import inert_settings

DEFAULT_EXPERTS: Final = 8  # of a moe whose number is not set
RESNET_DEPTHS: Final = {
    "14": (1, 1, 1, 1),
    "26": (2, 2, 2, 2),
    "50": (3, 4, 6, 3),
    "101": (3, 4, 23, 3),
    "152": (3, 8, 36, 3),
}
MODELS: Final[dict[str, tuple[str, ...]]] = {
    "gpt": ("language_model",),
    "moe": ("language_model",),
    "bert": ("masked_language_model", "text", "sequence_labelling"),
    "resnet": ("image",),
    **{f"resnet{depth}": ("image",) for depth in RESNET_DEPTHS},
    "mlp": ("table",),
}
_OF_ALL: Final = ("pretrained", "weights")
_GPT: Final = tuple(name for name in ModelOptions.__dataclass_fields__ if name not in _OF_ALL)
_READS: Final[dict[str, tuple[str, ...]]] = {
    "gpt": _GPT,
    "moe": tuple(name for name in _GPT if name != "mup_base_dim"),
    "bert": ("num_layers", "dim", "num_heads", "ffn_dim", "vocab_size", "dropout", "norm_eps"),
    "mlp": ("num_layers", "dim", "vocab_size", "dropout"),
    **{name: ("ffn_dim",) for name in MODELS if name.startswith("resnet")},
}


def default_model(kind: str) -> str:
    """Name of the model of a task whose ``components.model`` is auto."""
    return next(name for name, kinds in MODELS.items() if kind in kinds)


def unread_settings(name: str, model: ModelOptions) -> Iterator[tuple[str, Problem]]:
    """A problem for each option of ``model`` that the built-in model ``name`` does not read, by field name."""
    acts = {field: field in _READS.get(name, ()) or field in _OF_ALL for field in ModelOptions.__dataclass_fields__}
    yield from inert_settings(model, ModelOptions(), acts, f"the model {name!r}")
