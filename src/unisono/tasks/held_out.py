"""Which samples of the training data are held out: one of several folds, drawn at random, by class, or by a column.

The folds are the same in every run: they depend on the data and the settings alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np
import xxhash
from numpy.typing import NDArray

from unisono.data.options import EVAL_GROUP, EVAL_RANDOM, DataOptions
from unisono.errors import DataError
from unisono.tasks.options import TaskOptions
from unisono.tasks.sources import addresses, first_sample, read_columns
from unisono.tasks.targets import check_columns, text_of

_SPLIT_SEED = 0


def held_out_ids(data: DataOptions, task: TaskOptions, size: int) -> NDArray[np.int64]:
    """Numbers of the samples that are held out, ascending: fold ``data.eval_fold`` of those that ``data.eval_split`` names.

    Random folds have ``data.eval_frac`` of the samples each. Stratified and grouped data are divided into
    round(1 / ``data.eval_frac``) folds.

    Args:
        data: The options.
        task: A resolved task; its target has the classes.
        size: Number of samples of ``data.train``.

    Raises:
        DataError: The fold is empty, or nothing is left to train on, or a column is missing.
    """
    if size < 2:
        raise DataError(
            given=f"training data of {size} sample and no data.eval",
            rule="a share of the samples is held out, at least one, and at least one is trained on",
            consequence="there is nothing to train or to evaluate on",
            nearest="more data, or data.eval=ADDRESS",
        )
    if data.eval_split == EVAL_RANDOM:
        return random_fold(size, data.eval_frac, data.eval_fold)
    is_grouped = data.eval_split.startswith(EVAL_GROUP)
    column = data.eval_split.removeprefix(EVAL_GROUP) if is_grouped else task.target
    check_columns(first_sample(data, task), [column], f"training data {' '.join(addresses(data.train))}")
    keys = _hashes((text_of(row.values[column]) for row in read_columns(data, (column,), task)), size)
    num_folds = round(1.0 / data.eval_frac)
    fold_of = (group_folds if is_grouped else stratified_folds)(keys, num_folds)
    found = np.flatnonzero(fold_of == data.eval_fold)
    if not 0 < len(found) < size:
        raise DataError(
            given=f"fold {data.eval_fold} of {num_folds} by data.eval_split={data.eval_split}: {len(found)} of {size} samples",
            rule="a fold has one sample or more, and at least one is trained on"
            + (f"; samples with one value of {column!r} are in one fold" if is_grouped else ""),
            consequence="there is nothing to train or to evaluate on",
            nearest="fewer folds, by a larger data.eval_frac or --folds; or more data",
        )
    return found


def random_fold(size: int, eval_frac: float, fold: int) -> NDArray[np.int64]:
    """Fold ``fold`` of ``size`` samples in a random order, each ``eval_frac`` of them long; ascending numbers.

    Raises:
        DataError: A fold has less than one sample. The first has at least one.
    """
    if fold and eval_frac * size < 1 - 1e-9:
        raise DataError(
            given=f"data.eval_fold={fold} with data.eval_frac={eval_frac:g} of {size} samples",
            rule="a fold has one sample or more",
            consequence="there is nothing to evaluate on",
            nearest="more data, or a larger data.eval_frac",
        )
    first, end = round(fold * eval_frac * size), round((fold + 1) * eval_frac * size)
    if not fold:
        end = min(max(1, end), size - 1)
    return np.sort(np.random.default_rng(_SPLIT_SEED).permutation(size)[first:end])


def stratified_folds(keys: NDArray[np.uint64], num_folds: int) -> NDArray[np.int64]:
    """The fold of each sample, so that the numbers of samples of a class in two folds differ by one at most, as do those of all.

    Args:
        keys: [samples] equal for samples of one class.
        num_folds: Number of folds.

    Source:
        Stratified k-fold cross-validation, as scikit-learn's ``StratifiedKFold`` with ``shuffle``.
    """
    shuffled = np.random.default_rng(_SPLIT_SEED).permutation(len(keys))
    by_class = shuffled[np.argsort(keys[shuffled], kind="stable")]
    folds = np.empty(len(keys), np.int64)
    folds[by_class] = np.arange(len(keys)) % num_folds
    return folds


def group_folds(keys: NDArray[np.uint64], num_folds: int) -> NDArray[np.int64]:
    """The fold of each sample, so that a group is in one fold, and folds have about as many samples.

    The largest groups are placed first, each into the smallest fold; groups of one size in a random order.

    Args:
        keys: [samples] equal for samples of one group.
        num_folds: Number of folds.

    Source:
        Group k-fold cross-validation, as scikit-learn's ``GroupKFold``.
    """
    order = np.argsort(keys, kind="stable")
    changes = np.flatnonzero(keys[order][1:] != keys[order][:-1]) + 1
    sizes = np.diff(np.concatenate([[0], changes, [len(keys)]]))
    draws = np.random.default_rng(_SPLIT_SEED).permutation(len(sizes))
    fold_of_group = np.empty(len(sizes), np.int64)
    folds = [(0, fold) for fold in range(num_folds)]  # a heap: samples so far, and the number of the fold
    for group in np.lexsort((draws, -sizes)).tolist():
        num_samples, fold = folds[0]
        fold_of_group[group] = fold
        heapq.heapreplace(folds, (num_samples + int(sizes[group]), fold))
    found = np.empty(len(keys), np.int64)
    found[order] = np.repeat(fold_of_group, sizes)
    return found


def _hashes(texts: Iterable[str], size: int) -> NDArray[np.uint64]:
    return np.fromiter((xxhash.xxh3_64_intdigest(text.encode()) for text in texts), np.uint64, size)
