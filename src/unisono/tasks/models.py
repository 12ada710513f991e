"""Models by name: ``gpt``, ``moe``, ``bert``, ``resnet50`` and its relatives, and ``mlp`` for tables."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Final

from torch import nn

from unisono.errors import ConfigError
from unisono.models.bert import BERT, BertOptions, ClassHead, TokenClassHead
from unisono.models.gpt import GPT
from unisono.models.options import ModelOptions
from unisono.models.resnet import ResNet, ResNetOptions
from unisono.models.table import TableNet, TableOptions
from unisono.tasks.columns import number_columns
from unisono.tasks.model_names import DEFAULT_EXPERTS, MODELS, RESNET_DEPTHS
from unisono.tasks.options import ImageOptions, TaskOptions

SMALL_IMAGE: Final = 64  # pixels; up to here the first layers of a ResNet keep height and width


def num_outputs(task: TaskOptions) -> int:
    """Classes of a resolved task, or the numbers that it predicts."""
    return len(task.classes) if task.has_classes else task.num_numbers


def build_named(
    name: str, model: ModelOptions, task: TaskOptions, image: ImageOptions, *, seq_len: int, vocab_size: int
) -> nn.Module:
    """The model ``name`` for a resolved task, initialised from torch's current generator.

    Args:
        name: One of ``MODELS``.
        model: Its sizes.
        task: The task, with its classes.
        image: Size and channels of images.
        seq_len: Largest length of a text in tokens.
        vocab_size: Number of token ids.

    Raises:
        ConfigError: There is no such model, or it does not fit the task.
    """
    kinds = MODELS.get(name)
    if kinds is None or task.kind not in kinds:
        fitting = [other for other, tasks in MODELS.items() if task.kind in tasks]
        raise ConfigError(
            given=f"components.model {name!r} for task.kind {task.kind!r}",
            rule=f"models for it are {', '.join(fitting)}",
            consequence="nothing was started",
            nearest=f"components.model={fitting[0]}",
        )
    if name in ("gpt", "moe"):
        experts = model.num_experts or (DEFAULT_EXPERTS if name == "moe" else 0)
        return GPT(replace(model, vocab_size=vocab_size, num_experts=experts))
    if name == "bert":
        return _bert(model, task, seq_len=seq_len, vocab_size=vocab_size)
    if name == "mlp":
        return TableNet(
            TableOptions(
                numbers=len(number_columns(task)),
                categories=len(task.categories),
                outputs=num_outputs(task),
                num_layers=model.num_layers,
                dim=model.dim,
                buckets=vocab_size,
                dropout=model.dropout,
            )
        )
    depth = re.fullmatch(r"resnet(\d*)", name)
    assert depth is not None
    return ResNet(
        ResNetOptions(
            classes=num_outputs(task),
            channels=3 if image.color == "rgb" else 1,
            depths=RESNET_DEPTHS[depth[1] or "50"],
            inner_width=model.ffn_dim,
            stem="small" if image.size <= SMALL_IMAGE else "image",
        )
    )


def _bert(model: ModelOptions, task: TaskOptions, *, seq_len: int, vocab_size: int) -> BERT:
    options = BertOptions(
        vocab_size=vocab_size,
        num_layers=model.num_layers,
        dim=model.dim,
        num_heads=model.num_heads,
        ffn_dim=model.ffn_dim or 4 * model.dim,
        max_length=seq_len,
        dropout=model.dropout,
        norm_eps=model.norm_eps,
    )
    if task.kind == "masked_language_model":
        return BERT(options)
    head: Any = TokenClassHead if task.kind == "sequence_labelling" else ClassHead
    return BERT(options, head=head(options, num_outputs(task)))
