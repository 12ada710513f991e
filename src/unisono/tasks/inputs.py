"""Inputs of the tasks: transforms that make of a sample's columns what a model sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from unisono.data.dataset import Batch
from unisono.data.image.augmentation import Augment, CenterCrop, Erase, Jitter, RandomResizedCrop
from unisono.data.image.mixing import CutMix, Mixup
from unisono.data.text.augment import TextAugment, load_synonyms
from unisono.data.tokens.tokenizer import MASK_NAMES, Tokenizer
from unisono.errors import DataError
from unisono.sanitize import shorten
from unisono.tasks.options import ImageOptions, TextOptions
from unisono.tasks.targets import IGNORED, infinite_error, number, split_words, text_of

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# of the grey values of ImageNet's images
_GRAY_MEAN, _GRAY_STD = (0.449,), (0.226,)

Transform = Callable[..., Batch]


def image_augment(options: ImageOptions, *, training: bool) -> Augment:
    """Decoding, crop and augmentation of images; in evaluation the centre crop alone."""
    gray = options.color == "gray"
    mean, std = (_GRAY_MEAN, _GRAY_STD) if gray else (IMAGENET_MEAN, IMAGENET_STD)
    common: dict[str, Any] = {
        "size": (options.size, options.size),
        "mean": options.mean or mean,
        "std": options.std or std,
        "color": options.color,
    }
    center = CenterCrop(share=options.center_frac)
    if not training:
        return Augment(crop=center, **common)
    strength = options.jitter
    jitter = Jitter(brightness=strength, contrast=strength, saturation=0.0 if gray else strength)
    return Augment(
        crop=RandomResizedCrop(scale=(options.min_crop_frac, 1.0)) if options.crop == "random" else center,
        flip=options.flip,
        rotate=options.rotate_degrees,
        jitter=jitter if strength else None,
        erase=Erase(probability=options.erase) if options.erase else None,
        **common,
    )


def image_mixing(options: ImageOptions, num_classes: int) -> Mixup | CutMix | None:
    """Mixup or CutMix, if one is set."""
    if options.mixup_alpha:
        return Mixup(classes=num_classes, alpha=options.mixup_alpha)
    return CutMix(classes=num_classes, alpha=options.cutmix_alpha) if options.cutmix_alpha else None


def text_augment(options: TextOptions) -> TextAugment | None:
    """Random edits of texts, if any are set. Raises DataError for a bad file of synonyms."""
    if not (options.replace or options.swap or options.delete):
        return None
    synonyms = load_synonyms(options.synonyms) if options.synonyms else {}
    return TextAugment(replace=options.replace, swap=options.swap, delete=options.delete, synonyms=synonyms)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeText:
    """Replaces ``text``, and optionally ``text_pair``, by ``tokens``, ``segments`` and ``attention_mask``, each [length].

    ``tokens`` int64 are the tokens with the tokenizer's special tokens, padded; a text that is too long is cut. ``segments``
    int64 is 1 at the tokens of the pair. ``attention_mask`` int64 is 1 at tokens and 0 at padding.

    Attributes:
        tokenizer: Encodes the texts.
        length: Tokens of every sample.
        augment: Random edits of training texts. By default none.
        fixed: Pad every sample to ``length``; else ``PadBatch`` pads a micro-batch to its longest sample.
    """

    tokenizer: Tokenizer
    length: int
    augment: TextAugment | None = None
    fixed: bool = True

    def __call__(self, sample: Batch, rng: np.random.Generator | None = None) -> Batch:
        texts = [text_of(sample[name]) for name in ("text", "text_pair") if name in sample]
        if self.augment is not None and rng is not None:
            texts = [self.augment(text, rng) for text in texts]
        ids, segments = self.tokenizer.encode_marked(texts, self.length)
        rest = {name: value for name, value in sample.items() if name not in ("text", "text_pair")}
        size = self.length if self.fixed else len(ids)
        return {
            **rest,
            "tokens": _padded(ids, size, self.tokenizer.padding),
            "segments": _padded(segments, size, 0),
            "attention_mask": _padded([1] * len(ids), size, 0),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeWords:
    """Replaces ``words`` by ``tokens`` and ``attention_mask``, and ``targets`` of words by those of tokens, each [length].

    The first token of a word has the word's target; other tokens and padding have -100, which does not count. Attributes as for
    ``EncodeText``; there is no augmentation.

    Raises:
        DataError: A sample has not as many targets as words.
    """

    tokenizer: Tokenizer
    length: int
    fixed: bool = True

    def __call__(self, sample: Batch, rng: np.random.Generator | None = None) -> Batch:
        words = split_words(text_of(sample["words"]))
        labels = np.asarray(sample["targets"], np.int64)
        if len(words) != labels.size:
            raise DataError(
                given=f"{len(words)} words with {labels.size} targets",
                rule="every word has one target",
                consequence="it is unknown which target belongs to which word",
                nearest="correct the sample: lists of equal length, or texts with as many words",
            )
        ids, word_of = self.tokenizer.encode_words(words, self.length)
        size = self.length if self.fixed else len(ids)
        targets = np.full(size, IGNORED, np.int64)
        previous = -1
        for place, word in enumerate(word_of):
            if word >= 0 and word != previous:
                targets[place] = labels[word]
            previous = word
        rest = {name: value for name, value in sample.items() if name != "words"}
        return {
            **rest,
            "tokens": _padded(ids, size, self.tokenizer.padding),
            "attention_mask": _padded([1] * len(ids), size, 0),
            "targets": targets,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeLine:
    """Replaces ``text`` by a sample of a language model: ``tokens``, ``targets`` and ``weights``, each [length].

    The text is cut or padded to ``length`` + 1 tokens, with the end-of-document token behind it.
    """

    tokenizer: Tokenizer
    length: int
    fixed: bool = True

    def __call__(self, sample: Batch, rng: np.random.Generator | None = None) -> Batch:
        end = self.tokenizer.end_of_document
        ids: list[int] = [*self.tokenizer.encode([text_of(sample["text"])])[0].ids.tolist(), end][: self.length + 1]
        return _window(ids, self.length if self.fixed else max(1, len(ids) - 1), end)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeWindows:
    """All of a text as windows of a language model, one after the other: the first one is what ``EncodeLine`` gives.

    A window has ``tokens``, ``targets``, ``weights`` and ``target_bytes``, each [length], as those of ``TokenWindows``.
    """

    tokenizer: Tokenizer
    length: int

    def __call__(self, sample: Batch) -> Iterator[Batch]:
        end = self.tokenizer.end_of_document
        (encoded,) = self.tokenizer.encode([text_of(sample["text"])])
        ids, sizes = np.append(encoded.ids, end), np.append(encoded.token_bytes, 0)
        return (
            {
                **_window(ids[start : start + self.length + 1].tolist(), self.length, end),
                "target_bytes": _padded(sizes[start + 1 : start + self.length + 1].tolist(), self.length, 0).astype(
                    np.float32
                ),
            }
            for start in range(0, max(1, ids.size - 1), self.length)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeMasked:
    """Replaces ``text`` by the entries of ``EncodeText``; each ``[MASK]`` or ``<mask>`` in it is the token that hides others.

    Raises:
        DataError: There is no such mark, or none among the first ``length`` tokens.
    """

    tokenizer: Tokenizer
    length: int
    fixed: bool = True

    def __call__(self, sample: Batch) -> Batch:
        text = text_of(sample["text"])
        ids = self.tokenizer.encode_masked(text, self.length)
        if self.tokenizer.mask not in ids:
            raise DataError(
                given=f"the text {shorten(text, 80)!r} without {MASK_NAMES[0]} among its first {len(ids)} tokens",
                rule=f"a masked language model predicts what {' or '.join(MASK_NAMES)} stands for",
                consequence="there is nothing to predict",
                nearest=f"the same text with {MASK_NAMES[0]} in place of a word",
            )
        size = self.length if self.fixed else len(ids)
        return {
            "tokens": _padded(ids, size, self.tokenizer.padding),
            "segments": np.zeros(size, np.int64),
            "attention_mask": _padded([1] * len(ids), size, 0),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceTargets:
    """Moves the targets of ``MaskTokens`` to their places, for models that give the logits of all tokens.

    ``targets`` become int64 [T], -100 where nothing is predicted; ``predicted`` and ``weights`` go.
    """

    before: Transform

    def __call__(self, sample: Batch, rng: np.random.Generator | None = None) -> Batch:
        sample = self.before(sample, rng)
        counted = sample["weights"] > 0
        targets = np.full(sample["tokens"].size, IGNORED, np.int64)
        targets[sample["predicted"][counted]] = sample["targets"][counted]
        rest = {name: value for name, value in sample.items() if name not in ("predicted", "weights")}
        return {**rest, "targets": targets}


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeRow:
    """Replaces the columns of a table's row by ``numbers`` float32 [F] and ``categories`` int64 [C].

    A number is standardised; an absent one counts as the mean. A category is the hash of its column and text, below ``buckets``;
    a whole number is the same category as an integer, a float or a text.

    Attributes:
        numbers: Columns of numbers.
        mean: Mean of each, as of the training data.
        std: Standard deviation of each.
        categories: Columns of categories.
        buckets: Rows of the model's embedding table.
    """

    numbers: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    categories: tuple[str, ...]
    buckets: int

    def __call__(self, sample: Batch, rng: np.random.Generator | None = None) -> Batch:
        entries: Batch = {"targets": sample["targets"]} if "targets" in sample else {}
        if self.numbers:
            values = np.array([number(sample[name], f"in the column {name!r}") for name in self.numbers], np.float64)
            with np.errstate(over="ignore"):  # reported below, with the column
                standard = ((values - self.mean) / self.std).astype(np.float32)
            if (bad := np.isinf(standard)).any():
                place = int(bad.argmax())
                raise infinite_error(f"{values[place]} in the column {self.numbers[place]!r}")
            entries["numbers"] = np.nan_to_num(standard, nan=0.0)
        if self.categories:
            texts = (f"{name}={text_of(sample[name])}".encode() for name in self.categories)
            entries["categories"] = np.array(
                [xxhash.xxh3_64_intdigest(text) % self.buckets for text in texts], np.int64
            )
        return entries


@dataclass(frozen=True, kw_only=True, slots=True)
class PadBatch:
    """Collates samples whose arrays differ in length: each entry is padded behind to its longest one in the batch.

    Attributes:
        fillers: (entry, value of its padding); the padding of other entries is 0.
    """

    fillers: tuple[tuple[str, int], ...]

    def __call__(self, samples: list[Batch]) -> Batch:
        fillers = dict(self.fillers)
        batch: Batch = {}
        for name in samples[0]:
            rows = [np.asarray(sample[name]) for sample in samples]
            if rows[0].ndim == 0:
                batch[name] = np.stack(rows)
                continue
            longest = max(len(row) for row in rows)
            batch[name] = np.full((len(rows), longest, *rows[0].shape[1:]), fillers.get(name, 0), rows[0].dtype)
            for place, row in enumerate(rows):
                batch[name][place, : len(row)] = row
        return batch


def _window(ids: list[int], size: int, end: int) -> Batch:
    """A sample of a language model: ``size`` tokens, the next one of each, and weights of 0 behind the last of ``ids``."""
    stream = _padded(ids, size + 1, end)
    weights = (np.arange(1, size + 1) < len(ids)).astype(np.float32)
    return {"tokens": stream[:-1], "targets": stream[1:], "weights": weights}


def _padded(ids: list[int], length: int, filler: int) -> Any:
    values = np.full(length, filler, np.int64)
    values[: len(ids)] = ids
    return values
