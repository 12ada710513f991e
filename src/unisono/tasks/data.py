"""Data of a task: makes training and held-out data of the sources of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.data.combined import balancing_weights, bucketed, concatenated, mapped, mixture, subset, weighted
from unisono.data.dataset import Batch, Dataset
from unisono.data.loading.sample_cache import cached
from unisono.data.options import EVAL_RANDOM, DataOptions
from unisono.data.sample_weights import read_sample_weights
from unisono.data.text.masking import MaskTokens
from unisono.data.tokens.packing import PackedWindows
from unisono.data.tokens.shards import TokenSet
from unisono.data.tokens.tokenizer import Tokenizer
from unisono.data.tokens.windows import TokenWindows
from unisono.errors import ConfigError, DataError
from unisono.storage.ownership import make_own_folder
from unisono.tasks.encoders import input_columns, padding_of, predictor_transform
from unisono.tasks.held_out import held_out_ids
from unisono.tasks.inputs import (
    EncodeLine,
    EncodeText,
    PlaceTargets,
    Transform,
    image_mixing,
)
from unisono.tasks.options import ImageOptions, TaskOptions, TextOptions
from unisono.tasks.sources import (
    INPUT_NAMES,
    TARGETS,
    addresses,
    cache_folder,
    check_same_targets,
    first_of,
    first_sample,
    open_addresses,
    sample_files,
    sample_rows,
    scan,
    token_shards,
)
from unisono.tasks.targets import check_columns


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutRows:
    """Numbers ``ids`` of held-out samples, int64, among the ``total`` ones of ``data.eval``, or of ``data.train`` without it."""

    ids: NDArray[np.int64]
    total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskData:
    """Training and held-out data of a task, and what the loader does with training samples.

    Attributes:
        train: Samples before ``transform``; the held-out ones where only these were asked for.
        held_out: Samples as the model sees them.
        transform: ``(sample, rng) -> sample`` of training samples, or None.
        pair_transform: Mixup or CutMix, or None.
        collate_fn: Stacks samples of different lengths, or None.
        held_out_rows: Which samples of its files the held-out ones are; None of windows of tokens, which are none of them.
    """

    train: Dataset
    held_out: Dataset
    transform: Transform | None = None
    pair_transform: Callable[..., Any] | None = None
    collate_fn: Callable[[list[Any]], Batch] | None = None
    held_out_rows: HeldOutRows | None = None


def language_data(
    task: TaskOptions,
    data: DataOptions,
    *,
    tokens: tuple[TokenSet, TokenSet] | None,
    tokenizer: Tokenizer,
    places_targets: bool,
    mask: int,
    vocab_size: int,
    held_out_only: bool = False,
) -> TaskData:
    """Data of a language model, or with ``task.kind`` masked_language_model of a masked one.

    Args:
        task: The task.
        data: Addresses, lengths and packing.
        tokens: Training and held-out tokens of a corpus; None reads ``data.train``.
        tokenizer: Encodes texts.
        places_targets: The model gives the logits of all tokens, not of the hidden ones only.
        mask: Id that hides a token.
        vocab_size: Number of ids, with ``mask``.
        held_out_only: Do not open ``data.train`` where there is ``data.eval``.
    """
    masked = task.kind == "masked_language_model"
    if held_out_only and data.eval:
        data = replace(
            data,
            train=data.eval,
            weights=(),
            kept_rows=(data.eval_kept_rows, data.eval_kept_rows) if data.eval_kept_rows else "",
        )
    if tokens is None:
        shards = token_shards(data.train, data)
        if shards is None:
            return _lines(
                task,
                data,
                tokenizer,
                places_targets=places_targets,
                mask=mask,
                vocab_size=vocab_size,
                held_out_only=held_out_only,
            )
        train, held_out = _shard_windows(task, data, shards, tokenizer)
    else:
        train, held_out = _windows(data, tokens[0], masked=masked), held_out_windows(data, tokens[1], masked=masked)
    if not masked:
        return TaskData(train=train, held_out=held_out)
    hide: Transform = MaskTokens(
        mask_id=mask, vocab_size=vocab_size, rate=task.mask_frac, special=(tokenizer.end_of_document,)
    )
    hide = PlaceTargets(before=hide) if places_targets else hide
    return TaskData(train=train, held_out=mapped(held_out, hide), transform=hide)


def _shard_windows(
    task: TaskOptions, data: DataOptions, shards: TokenSet, tokenizer: Tokenizer
) -> tuple[Dataset, Dataset]:
    """Training and held-out windows of the token shards at ``data.train``; raises for settings that they do not have."""
    masked = task.kind == "masked_language_model"
    unread = {"task.inputs": task.inputs, "data.cache_gib": data.cache_gib, "data.bucket_batches": data.bucket_batches}
    unread |= {"data.eval_fold": data.eval_fold, "data.sample_weights": data.sample_weights}
    unread["data.kept_rows"] = data.kept_rows
    if data.eval_split != EVAL_RANDOM:
        unread["data.eval_split"] = data.eval_split
    for name in (name for name, value in unread.items() if value):
        raise ConfigError(
            given=f"{name} {unread[name]!r} with token shards",
            rule="windows of token shards have no columns, are of one length, are mapped from their files, and the last of them "
            "are held out",
            consequence="it would change nothing",
            nearest=f"leave {name} out",
        )
    if masked or shards.vocab_size > tokenizer.vocab_size:
        check_same_vocabulary(shards, tokenizer)
    given = token_shards(data.eval, data) if data.eval else None
    if data.eval and given is None:
        raise DataError(
            given=f"data.eval={data.eval!r} with token shards as data.train",
            rule="training and held-out data are of one kind",
            consequence="there is nothing to evaluate on",
            nearest="token shards as data.eval, or data.eval left out: a share of the shards is held out",
        )
    if data.weights:
        if given is None:
            raise _no_eval_of_mixture()
        parts = [token_shards(address, data) for address in addresses(data.train)]
        windows = [_windows(data, part, masked=masked) for part in parts if part is not None]
        return mixture(windows, data.weights), held_out_windows(data, given, masked=masked)
    train, held_out = _windows(data, shards, masked=masked), held_out_windows(data, given or shards, masked=masked)
    return _split_windows(train, held_out, data.eval_frac) if given is None else (train, held_out)


def _windows(data: DataOptions, tokens: TokenSet, *, masked: bool) -> Dataset:
    boundaries = "ignore" if masked else data.boundaries
    if data.packing == "best_fit":
        return PackedWindows(tokens, seq_len=data.seq_len, boundaries=boundaries, name="train")
    stride = 1 if data.packing == "sliding" else data.seq_len
    return TokenWindows(tokens, seq_len=data.seq_len, stride=stride, boundaries=boundaries, name="train")


def held_out_windows(data: DataOptions, tokens: TokenSet, *, masked: bool) -> Dataset:
    """Always read as a stream, so that runs of either packing are measured alike."""
    return TokenWindows(
        tokens,
        seq_len=data.seq_len,
        boundaries="ignore" if masked else data.boundaries,
        target_bytes=not masked and all(shard.token_bytes is not None for shard in tokens.shards),
        name="held-out",
    )


def _lines(
    task: TaskOptions,
    data: DataOptions,
    tokenizer: Tokenizer,
    *,
    places_targets: bool,
    mask: int,
    vocab_size: int,
    held_out_only: bool,
) -> TaskData:
    """A sample for each text of a column."""
    first = first_sample(data, task)
    nearest = " of a column of texts, or task.kind=table to predict a column from the others"
    column = task.inputs[0] if task.inputs else first_of(INPUT_NAMES[task.kind], first, "task.inputs", nearest)
    check_columns(first, [column], f"training data {' '.join(addresses(data.train))}")
    fixed = not data.bucket_batches
    encode: Transform = EncodeLine(tokenizer=tokenizer, length=data.seq_len, fixed=fixed)
    if task.kind == "masked_language_model":
        marks, _ = tokenizer.encode_marked([""], data.seq_len)
        encode = MaskTokens(
            mask_id=mask,
            vocab_size=vocab_size,
            rate=task.mask_frac,
            special=tuple(sorted({*marks, tokenizer.end_of_document})),
            before=EncodeText(tokenizer=tokenizer, length=data.seq_len, fixed=fixed),
        )
        encode = PlaceTargets(before=encode) if places_targets else encode
    parts, held_out, held_out_rows = _parts(data, {"text": column}, task, held_out_only)
    weights = [] if held_out_only else _training_weights(data, parts, held_out_rows.ids)
    held_out = mapped(held_out, encode)
    return TaskData(
        train=_combined(parts, data, weights, lengths_of="text") if parts else held_out,
        held_out=held_out,
        transform=encode,
        collate_fn=padding_of(data, tokenizer, task),
        held_out_rows=held_out_rows,
    )


def predictor_data(
    task: TaskOptions,
    data: DataOptions,
    image: ImageOptions,
    text: TextOptions,
    *,
    tokenizer: Tokenizer | None,
    buckets: int,
    held_out_only: bool = False,
) -> TaskData:
    """Data of a resolved task that predicts classes or numbers.

    Args:
        task: Result of ``resolve_task``.
        data: Addresses, cache and lengths.
        image: Decoding and augmentation of images.
        text: Augmentation of texts.
        tokenizer: Encodes texts; None for images and tables.
        buckets: See ``EncodeRow``.
        held_out_only: Do not open ``data.train`` where there is ``data.eval``.
    """
    columns = input_columns(task) | {TARGETS: task.target}
    parts, held_out, held_out_rows = _parts(data, columns, task, held_out_only)
    weights = [] if held_out_only else _training_weights(data, parts, held_out_rows.ids)
    pair = image_mixing(image, len(task.classes)) if task.kind == "image" and task.has_classes else None
    make_transform = partial(predictor_transform, task, data, image, text, tokenizer=tokenizer, buckets=buckets)
    encode = make_transform(training=True)
    held_out = mapped(held_out, make_transform(training=False))
    lengths_of = columns.keys() & {"text", "words"}
    options: dict[str, Any] = {"balance": task.balance, "lengths_of": min(lengths_of) if lengths_of else ""}
    return TaskData(
        train=_combined(parts, data, weights, **options) if parts else held_out,
        held_out=held_out,
        transform=encode,
        pair_transform=pair,
        collate_fn=padding_of(data, tokenizer, task) if tokenizer is not None else None,
        held_out_rows=held_out_rows,
    )


def _parts(
    data: DataOptions, columns: dict[str, str], task: TaskOptions, held_out_only: bool
) -> tuple[list[Dataset], Dataset, HeldOutRows]:
    """The sources of the training data, held-out data, and which samples these are.

    Held-out data are ``data.eval``, or a share of the training data (``held_out_ids``). With ``held_out_only`` and ``data.eval``
    there are no sources.
    """
    if data.eval:
        parts = [] if held_out_only else _training_parts(data, columns, task)
        held_out = open_addresses(data.eval, columns, data, task, data.eval_kept_rows)
        ids, total = sample_rows(data.eval, data, data.eval_kept_rows, len(held_out))
        return parts, held_out, HeldOutRows(ids=ids, total=total)
    if data.weights:
        raise _no_eval_of_mixture()
    train = open_addresses(data.train, columns, data, task, data.train_kept_rows)
    ids = held_out_ids(data, task, len(train))
    kept = np.setdiff1d(np.arange(len(train)), ids)
    rows, total = sample_rows(data.train, data, data.train_kept_rows, len(train))
    return [subset(train, kept)], subset(train, ids), HeldOutRows(ids=rows[ids], total=total)


def _training_parts(data: DataOptions, columns: dict[str, str], task: TaskOptions) -> list[Dataset]:
    """The sources of the training data beside ``data.eval``: several in a mixture."""
    given = addresses(data.train) if data.weights else [data.train]
    parts = [open_addresses(address, columns, data, task, data.train_kept_rows) for address in given]
    check_same_targets(data, task)
    return parts


def _training_weights(
    data: DataOptions, parts: list[Dataset], held_out: NDArray[np.int64]
) -> list[NDArray[np.float64]]:
    """The weights of ``data.sample_weights`` for the samples of each part, without those held out; empty without.

    Weights are of all rows of the files, also of those that ``data.kept_rows`` leaves out.
    """
    if not data.sample_weights:
        return []
    given = addresses(data.train) if data.weights else [data.train]
    sizes = [len(part) for part in parts]
    if not data.eval:
        sizes[0] += len(held_out)
    rows = [sample_rows(address, data, data.train_kept_rows, size) for address, size in zip(given, sizes, strict=True)]
    files, totals = [sample_files(address, data) for address in given], [total for _, total in rows]
    weights = read_sample_weights(data.sample_weights, files, totals)
    if not data.eval:
        return [weights[0][np.setdiff1d(rows[0][0], held_out)]]
    return [of_part[samples] for of_part, (samples, _) in zip(weights, rows, strict=True)]


def _combined(
    parts: list[Dataset],
    data: DataOptions,
    weights: list[NDArray[np.float64]],
    *,
    lengths_of: str = "",
    balance: bool = False,
) -> Dataset:
    """The parts as one data set, in the order that the options ask for: cached, a mixture, balanced, or by length.

    Args:
        parts: Sources of the training data.
        data: Shares, cache and groups by length.
        weights: Of the samples of each part; empty: all alike.
        lengths_of: Entry by whose length texts are grouped.
        balance: Whether classes get weights, of which all are read equally often.
    """
    parts = [_cached(part, data, len(parts)) for part in parts]
    if balance:
        weights = [balancing_weights([int(sample[TARGETS]) for sample in scan(part)]) for part in parts]
    if weights:
        # in a mixture each source is weighted by itself, and has its share
        if len(parts) > 1:
            weights = [share * part / part.sum() for share, part in zip(data.weights, weights, strict=True)]
        train = weighted(concatenated(parts) if len(parts) > 1 else parts[0], np.concatenate(weights))
    else:
        train = mixture(parts, data.weights) if len(parts) > 1 else parts[0]
    if data.bucket_batches:
        return bucketed(
            train,
            [len(np.asarray(sample[lengths_of])) for sample in scan(train)],
            window_batches=data.bucket_batches,
        )
    return train


def _split_windows(train: Dataset, held_out: Dataset, eval_frac: float) -> tuple[Dataset, Dataset]:
    """The last windows are held out: neighbours of a window would tell of it."""
    cut = len(held_out) - max(1, round(eval_frac * len(held_out)))
    if cut < 1:
        raise _no_window(len(held_out))
    # windows of another packing or stride are as many as they are, so the same share of them is cut off
    share = max(1, int(len(train) * cut / len(held_out)))
    return subset(train, np.arange(share)), subset(held_out, np.arange(cut, len(held_out)))


def _cached(dataset: Dataset, data: DataOptions, shares: int) -> Dataset:
    if not data.cache_gib:
        return dataset
    folder = cache_folder(data) / "samples"
    make_own_folder(folder, option="data.cache_dir")
    return cached(dataset, budget_bytes=int(data.cache_gib * 2**30 / shares), folder=folder)


def check_same_vocabulary(shards: TokenSet, tokenizer: Tokenizer) -> None:
    """Raise DataError for token shards of another number of ids than the tokenizer has."""
    if shards.vocab_size != tokenizer.vocab_size:
        raise DataError(
            given=f"token shards of {shards.vocab_size} ids with the tokenizer {tokenizer.name!r} of {tokenizer.vocab_size}",
            rule="data.tokenizer is the tokenizer that made the shards",
            consequence="ids would stand for other text",
            nearest="data.tokenizer=FILE as given to 'unisono data pack'",
        )


def _no_eval_of_mixture() -> ConfigError:
    return ConfigError(
        given="data.weights without data.eval",
        rule="the held-out data of a mixture are given: it is open which of the sources they should be like",
        consequence="there is nothing to evaluate on",
        nearest="data.eval=ADDRESS",
    )


def _no_window(count: int) -> DataError:
    return DataError(
        given=f"token shards of {count} window and no data.eval",
        rule="the last windows are held out, at least one, and at least one is trained on",
        consequence="there is nothing to train or to evaluate on",
        nearest="more tokens, a smaller data.seq_len, or data.eval=SHARDS",
    )
