"""What becomes of a sample before the model sees it, by task: the columns that it has, its transform, and how batches are padded.

Training, evaluation and prediction of new data take them from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from unisono.data.dataset import Batch
from unisono.data.options import DataOptions
from unisono.data.tokens.tokenizer import Tokenizer
from unisono.errors import ConfigError
from unisono.tasks.columns import number_columns
from unisono.tasks.inputs import (
    EncodeMasked,
    EncodeRow,
    EncodeText,
    EncodeWindows,
    EncodeWords,
    PadBatch,
    Transform,
    image_augment,
    text_augment,
)
from unisono.tasks.options import ImageOptions, TaskOptions, TextOptions
from unisono.tasks.sources import TARGETS
from unisono.tasks.targets import IGNORED, split_words, text_of

_ENTRIES = {
    "image": ("image",),
    "text": ("text", "text_pair"),
    "sequence_labelling": ("words",),
    "language_model": ("text",),
    "masked_language_model": ("text",),
}


def input_columns(task: TaskOptions) -> dict[str, str]:
    """The column of each entry of a sample that a model predicts from; of a language model, without ``task.inputs``, none.

    Raises:
        ConfigError: ``task.inputs`` has more columns than the task reads.
    """
    entries = task.inputs if task.kind == "table" else _ENTRIES[task.kind]
    if len(task.inputs) > len(entries):
        raise ConfigError(
            given=f"task.inputs with {len(task.inputs)} columns for task.kind {task.kind!r}",
            rule=f"it reads {len(entries)} column{'s' if len(entries) > 1 else ''}",
            consequence="the others would not be read",
            nearest=f"task.inputs with {len(entries)} of them",
        )
    return dict(zip(entries, task.inputs, strict=False))


def predictor_transform(
    task: TaskOptions,
    data: DataOptions,
    image: ImageOptions,
    text: TextOptions,
    *,
    tokenizer: Tokenizer | None,
    buckets: int,
    training: bool,
) -> Transform:
    """The transform of the samples of a resolved task that predicts classes or numbers.

    Args:
        task: Result of ``resolve_task``.
        data: Lengths.
        image: Decoding and augmentation of images.
        text: Augmentation of texts.
        tokenizer: Encodes texts; None for images and tables.
        buckets: See ``EncodeRow``.
        training: Whether samples are augmented.
    """
    if task.kind == "image":
        from unisono.data.image.transform import ImageTransform

        return ImageTransform(augment=image_augment(image, training=training))
    if task.kind == "table":
        return EncodeRow(
            numbers=number_columns(task),
            mean=task.input_mean,
            std=task.input_std,
            categories=task.categories,
            buckets=buckets,
        )
    assert tokenizer is not None
    common: dict[str, Any] = {"tokenizer": tokenizer, "length": data.seq_len, "fixed": not data.bucket_batches}
    if task.kind == "sequence_labelling":
        return EncodeWords(**common)
    return EncodeText(**common, augment=text_augment(text)) if training else EncodeText(**common)


def padding_of(data: DataOptions, tokenizer: Tokenizer, task: TaskOptions) -> PadBatch | None:
    """What pads the samples of a batch to the longest one; None where all have ``data.seq_len`` tokens."""
    if not data.bucket_batches:
        return None
    ignored = task.kind == "sequence_labelling" or task.kind == "masked_language_model"
    return PadBatch(fillers=(("tokens", tokenizer.padding), (TARGETS, IGNORED if ignored else 0)))


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeNumberedWords:
    """``EncodeWords`` of words without labels: the first token of a word has the word's number in its place."""

    encode: Transform

    def __call__(self, sample: Batch) -> Batch:
        return self.encode({**sample, TARGETS: np.arange(len(split_words(text_of(sample["words"]))))})


def new_sample_encoder(
    task: TaskOptions,
    data: DataOptions,
    image: ImageOptions,
    text: TextOptions,
    *,
    tokenizer: Tokenizer | None,
    buckets: int,
) -> Callable[[Batch], Iterable[Batch]]:
    """What makes of a new sample, without target, what the model sees, as evaluation does; of a long text of a language model
    several windows. A sample that has ``tokens`` already stays as it is. Arguments as for ``predictor_transform``.
    """
    if task.kind == "language_model":
        assert tokenizer is not None
        windows = EncodeWindows(tokenizer=tokenizer, length=data.seq_len)
        return lambda sample: [sample] if "tokens" in sample else windows(sample)
    if task.kind == "masked_language_model":
        assert tokenizer is not None
        encode: Callable[[Batch], Batch] = EncodeMasked(
            tokenizer=tokenizer, length=data.seq_len, fixed=not data.bucket_batches
        )
    else:
        encode = predictor_transform(task, data, image, text, tokenizer=tokenizer, buckets=buckets, training=False)
        if task.kind == "sequence_labelling":
            encode = EncodeNumberedWords(encode=encode)
    return lambda sample: [encode(sample)]
