"""Documents whose label is likely wrong, by the losses of a cross-validation over the same rows."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from unisono.data.sample_losses import LOSSES_FILE, LossesOf, SampleLosses, files_with_samples
from unisono.errors import DataError
from unisono.quality.documents import Documents
from unisono.quality.labels.confident_learning import confident_suspects, loss_suspects
from unisono.quality.labels.values import Labels
from unisono.sanitize import quoted

_TYPICAL: Final = 3  # documents of each label


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelSuspects:
    """Documents whose label is likely wrong, the most suspicious first.

    Attributes:
        ranked_by: ``probabilities``, ``losses``, or empty without either.
        evaluated: Documents that have a loss.
        document: Their numbers, int64 [suspects].
        suggested: Number of the label that they likely have, int64 [suspects]; -1 where only losses are known.
        score: Of ``confident_learning``: normalised margin, or z-score of the loss, float64 [suspects].
        own: Probability of their label; NaN where only losses are known, float64 [suspects].
        other: Probability of the suggested label; likewise.
        loss: Their losses, float64 [suspects].
        fold: The parts that were held out with them, int64 [suspects].
        mean_loss: Of all documents that have one; NaN without any.
        chance_loss: That of a model that gives each label its share of these documents, which is the entropy of the shares; None
            where only losses are known.
        typical: Of each label the documents whose label models that did not train on them are surest of.
    """

    ranked_by: str
    evaluated: int
    document: NDArray[np.int64]
    suggested: NDArray[np.int64]
    score: NDArray[np.float64]
    own: NDArray[np.float64]
    other: NDArray[np.float64]
    loss: NDArray[np.float64]
    fold: NDArray[np.int64]
    mean_loss: float
    chance_loss: float | None
    typical: Mapping[int, Sequence[int]]

    def __len__(self) -> int:
        return len(self.document)


_NO_NUMBERS: Final = np.zeros(0, np.int64)
_NO_VALUES: Final = np.zeros(0)
NO_SUSPECTS: Final = LabelSuspects(
    ranked_by="",
    evaluated=0,
    document=_NO_NUMBERS,
    suggested=_NO_NUMBERS,
    score=_NO_VALUES,
    own=_NO_VALUES,
    other=_NO_VALUES,
    loss=_NO_VALUES,
    fold=_NO_NUMBERS,
    mean_loss=math.nan,
    chance_loss=None,
    typical={},
)


def find_losses_file(path: Path) -> Path:
    """The file of losses in a folder of a cross-validation, or ``path`` itself. Raises DataError if it is not there."""
    found = path / LOSSES_FILE if path.is_dir() else path
    if not found.is_file():
        raise DataError(
            given=f"--losses {path}, where there is no {LOSSES_FILE}",
            rule="losses are those of a cross-validation with --sample-losses",
            consequence="nothing was written",
            nearest=f"unisono tune folds CONFIG --sample-losses --out {path}",
        )
    return found


def find_suspects(
    losses: SampleLosses, documents: Documents, files: NDArray[np.int64], labels: Labels
) -> LabelSuspects:
    """Rank documents whose label is likely wrong; see ``confident_learning``.

    Args:
        losses: Of the rows of the same files, or of the same images, in any order of the files.
        documents: The data set.
        files: Number of each document's file, int64 [documents].
        labels: Of the documents.

    Raises:
        DataError: The losses are of other files, of files before they changed, or of other labels.
    """
    about = losses.about
    document = _documents_of(about, documents, files)[losses.sample]
    if (is_without := labels.of[document] < 0).any():  # a label that was left out as unreadable
        document, losses = document[~is_without], _part_of(losses, ~is_without)
    if about.target and about.target != labels.field:
        raise _other_data(f"losses of a model that predicts {quoted(about.target)}, for labels {quoted(labels.field)}")
    if not about.classes:
        ranked = loss_suspects(labels.of[document], losses.loss)
        own = other = np.full(len(ranked.row), np.nan)
        typical: dict[int, list[int]] = {}
        suggested = ranked.suggested
    else:
        label_of = np.full(len(about.classes), -1)  # number of the label of each class
        label_of[losses.target] = labels.of[document]
        if (label_of[losses.target] != labels.of[document]).any():
            raise _other_data(f"losses of labels other than those in {quoted(labels.field)}")
        ranked = confident_suspects(losses.target, losses.probabilities)
        own = losses.probabilities[ranked.row, losses.target[ranked.row]].astype(np.float64)
        other = losses.probabilities[ranked.row, ranked.suggested].astype(np.float64)
        suggested = label_of[ranked.suggested]
        typical = _typical(losses, document, labels.of[document])
    return LabelSuspects(
        ranked_by="probabilities" if about.classes else "losses",
        evaluated=len(losses.sample),
        document=document[ranked.row],
        suggested=suggested,
        score=ranked.score,
        own=own,
        other=other,
        loss=losses.loss[ranked.row],
        fold=losses.fold[ranked.row],
        mean_loss=float(losses.loss.mean()) if len(losses.loss) else math.nan,
        chance_loss=_entropy(losses.target) if about.classes else None,
        typical=typical,
    )


def _entropy(classes: NDArray[np.int64]) -> float:
    """The entropy of the shares of classes, in nats; 0 without samples."""
    shares = np.unique(classes, return_counts=True)[1] / max(len(classes), 1)
    return float(-np.sum(shares * np.log(shares)))


def _part_of(losses: SampleLosses, which: NDArray[np.bool_]) -> SampleLosses:
    return replace(
        losses,
        sample=losses.sample[which],
        loss=losses.loss[which],
        fold=losses.fold[which],
        target=losses.target[which],
        probabilities=losses.probabilities[which],
    )


def _documents_of(about: LossesOf, documents: Documents, files: NDArray[np.int64]) -> NDArray[np.int64]:
    """The document of each sample, int64 [samples]. Raises DataError if the files are not the same."""
    counts = np.bincount(files, minlength=len(documents.files))
    paths = [os.path.abspath(file.path) for file in documents.files]
    given = {path: (file.size, file.mtime_ns) for path, file in zip(paths, documents.files, strict=True)}
    of_samples = files_with_samples(about)
    wanted = {file.path: (file.size, file.mtime_ns) for file in of_samples}
    if other := sorted(given.keys() ^ wanted.keys()):
        raise _other_data(f"losses of {len(wanted)} files, and labels of {len(given)}; only one of both has {other[0]}")
    if changed := sorted(path for path in given if given[path] != wanted[path]):
        raise _other_data(f"losses of {changed[0]}, which has changed since")
    if int(counts.sum()) != about.num_samples:
        raise _other_data(f"losses of a data set of {about.num_samples:,} samples, for {int(counts.sum()):,} rows")
    begins = np.cumsum(counts) - counts
    numbers = {path: number for number, path in enumerate(paths)}
    order = [numbers[file.path] for file in of_samples]
    return np.concatenate([begins[number] + np.arange(counts[number]) for number in order])


def _typical(losses: SampleLosses, document: NDArray[np.int64], labels: NDArray[np.int64]) -> dict[int, list[int]]:
    own = losses.probabilities[np.arange(len(losses.target)), losses.target]
    found: dict[int, list[int]] = {}
    for row in np.lexsort((-own, labels)).tolist():
        of_label = found.setdefault(int(labels[row]), [])
        if len(of_label) < _TYPICAL:
            of_label.append(int(document[row]))
    return found


def _other_data(given: str) -> DataError:
    return DataError(
        given=given,
        rule="losses and labels are of the same rows, which have not changed meanwhile",
        consequence="nothing was written",
        nearest="the files of data.train of the cross-validation; or that again: unisono tune folds CONFIG --sample-losses",
    )
