"""Labels that are likely wrong, by models that did not train on the samples.

Where the probability of each class is known, by confident learning (Northcutt, Jiang and Chuang 2021, "Confident Learning:
Estimating Uncertainty in Dataset Labels"). Where only losses are known, by how far a sample's loss is above those of its class
(the modified z-score of Iglewicz and Hoaglin 1993).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MIN_SAMPLES: Final = 5  # of a class that is suggested: a threshold is a mean (cleanlab prunes no class below 5 either)
Z_SCORE: Final = 3.5  # from which on a loss is an outlier (Iglewicz and Hoaglin)
_NORMAL: Final = 0.6745  # median absolute deviation of a normal distribution, in standard deviations
_BATCH: Final = 1 << 16  # rows at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspects:
    """Samples whose label is likely wrong, the most suspicious first.

    Attributes:
        row: Their rows in the arrays that were given, int64 [suspects].
        suggested: Number of the class that they likely have, int64 [suspects]; -1 where that is not known.
        score: Normalised margin, from -1 to 1, smaller = more suspicious; or z-score of the loss, larger = more suspicious,
            float64 [suspects].
    """

    row: NDArray[np.int64]
    suggested: NDArray[np.int64]
    score: NDArray[np.float64]


def confident_suspects(labels: NDArray[np.int64], probabilities: NDArray[np.float32]) -> Suspects:
    """Find label errors by confident learning.

    The threshold of a class is the mean probability of it over the samples that have its label. A class of fewer than
    ``MIN_SAMPLES`` has no threshold, as a mean of so few says little, so it is suggested to no sample; its own samples can be
    suspects. A sample counts as one of the most probable class among those whose threshold it reaches. It is a suspect if that
    is another class than its label, so off the diagonal of the confident joint. Suspects are ranked by the normalised margin:
    the probability of the label less the largest of another class.

    Args:
        labels: Number of each sample's class, int64 [samples].
        probabilities: Of each class, from a model that did not train on the sample, float32 [samples, classes].
    """
    own = probabilities[np.arange(len(labels)), labels].astype(np.float64)
    counts = np.bincount(labels, minlength=probabilities.shape[1])
    sums = np.bincount(labels, own, minlength=probabilities.shape[1])
    thresholds = np.where(counts >= MIN_SAMPLES, sums / np.maximum(counts, 1), np.inf)
    rows: list[NDArray[Any]] = []
    suggested: list[NDArray[Any]] = []
    margins: list[NDArray[Any]] = []
    for begin in range(0, len(labels), _BATCH):
        batch, of_batch = probabilities[begin : begin + _BATCH].astype(np.float64), labels[begin : begin + _BATCH]
        reached = np.where(batch >= thresholds, batch, -1.0)
        classes = np.argmax(reached, axis=1)
        at = np.flatnonzero((reached.max(axis=1) >= 0) & (classes != of_batch))
        others = batch[at]
        others[np.arange(len(at)), of_batch[at]] = -1.0
        rows.append(begin + at)
        suggested.append(classes[at])
        margins.append(own[begin + at] - others.max(axis=1, initial=-1.0))
    row, margin = _joined(rows, np.int64), _joined(margins, np.float64)
    order = np.argsort(margin, kind="stable")
    return Suspects(row=row[order], suggested=_joined(suggested, np.int64)[order], score=margin[order])


def loss_suspects(labels: NDArray[np.int64], losses: NDArray[np.float64]) -> Suspects:
    """Find samples whose loss is an outlier among those of its class.

    Args:
        labels: Number of each sample's class, int64 [samples]; all the same to compare all samples with each other.
        losses: From a model that did not train on the sample, float64 [samples]; those that are not finite do not count.
    """
    scores = np.full(len(labels), -np.inf)
    order = np.flatnonzero(np.isfinite(losses))
    order = order[np.argsort(labels[order], kind="stable")]
    bounds = np.flatnonzero(labels[order][1:] != labels[order][:-1]) + 1
    for members in np.split(order, bounds):
        if len(members):
            above = losses[members] - np.median(losses[members])
            spread = float(np.median(np.abs(above)))
            scores[members] = _NORMAL * above / spread if spread else 0.0
    rows = np.flatnonzero(scores > Z_SCORE)
    rows = rows[np.argsort(-scores[rows], kind="stable")]
    return Suspects(row=rows, suggested=np.full(len(rows), -1), score=scores[rows])


def _joined(parts: list[NDArray[Any]], kind: type) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, kind)
