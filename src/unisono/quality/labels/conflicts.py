"""Label conflicts: documents that are the same or near each other, with different labels.

A star of near-duplicates does not show them all: a document may be near one of its own label, which the star keeps, and also near
one of another label, with which it is then never compared. So here

- documents of the same text are compared as one, which has all of their labels; several labels are a conflict;
- each text is compared with every candidate before it that has another label, whatever else it is near;
- a text of several labels is compared with all candidates;
- texts of one label are never compared with each other, and those of each label have room of their own in the buckets: many
  copies with the same label hide no conflict.

Images go the same way: those of the same file count as one, and each is compared with all before it that have another label.

A group joins all documents that are in conflict with each other, also over several others between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from unisono.quality.documents import Content
from unisono.quality.duplicates.clusters import find_root, union
from unisono.quality.duplicates.comparison import threshold_of
from unisono.quality.duplicates.near_duplicates import MAX_COMPARED, Buckets, candidates, exact_duplicates, jaccard
from unisono.quality.duplicates.near_images import similar_images
from unisono.quality.duplicates.sketch_folder import Sketches
from unisono.quality.options import DuplicateOptions
from unisono.quality.progress import SILENT, Progress

_SEVERAL: Final = -1  # group of texts that have several labels
# a document, those before it that are similar enough to it, and whether it had too many candidates
_Similar = Iterator[tuple[int, list[tuple[int, float]], bool]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConflictGroup:
    """Documents in conflict.

    Attributes:
        documents: Their numbers, ascending.
        similarity: Of each to the most similar one with another label: 1 of the same text.
        counts: Documents of each label, by its number; the most common first, of several the one that occurs first.
    """

    documents: tuple[int, ...]
    similarity: tuple[float, ...]
    counts: dict[int, int]

    @property
    def majority(self) -> int | None:
        """The label that most documents have; None if two have the same number of them."""
        most, *others = self.counts.items()
        return most[0] if most[1] > others[0][1] else None

    def suggested(self, label: int) -> int:
        """The most common of the other labels."""
        return next(other for other in self.counts if other != label)


def find_conflicts(
    content: Content,
    sketches: Sketches,
    options: DuplicateOptions,
    labels: NDArray[np.int64],
    progress: Progress = SILENT,
) -> tuple[list[ConflictGroup], int]:
    """Find documents that are the same or near each other and have different labels.

    Args:
        content: What documents are.
        sketches: Of all documents.
        options: From which similarity on documents are near each other.
        labels: Number of each document's label, int64 [documents].
        progress: Receives how many documents are compared.

    Returns:
        The groups, by their first document; and how many texts or images were not compared with all of their candidates of
        other labels, as there were too many.
    """
    exact = exact_duplicates(sketches)
    text_of = np.arange(len(sketches))
    text_of[exact.document] = exact.of
    has_several = np.zeros(len(sketches), np.bool_)  # of the first document of each text
    has_several[exact.of[labels[exact.document] != labels[exact.of]]] = True
    best = has_several.astype(np.float64)  # largest similarity to a document of another label
    parent = np.arange(len(sketches))
    num_capped = 0
    if threshold_of(content, options):
        find = _similar_images if content == "images" else _similar_texts
        for document, pairs, is_capped in find(sketches, options, exact.document, labels, has_several, progress):
            for other, similarity in pairs:
                union(parent, document, other)
                best[[document, other]] = np.maximum(best[[document, other]], similarity)
            num_capped += is_capped
    members: dict[int, list[int]] = {}
    for document in np.flatnonzero(best[text_of] > 0).tolist():
        members.setdefault(find_root(parent, int(text_of[document])), []).append(document)
    groups = [
        ConflictGroup(
            documents=tuple(documents),
            similarity=tuple(best[text_of[documents]].tolist()),
            counts=dict(Counter(labels[documents].tolist()).most_common()),
        )
        for documents in members.values()
    ]
    return groups, num_capped


def _similar_texts(
    sketches: Sketches,
    options: DuplicateOptions,
    excluded: NDArray[np.int64],
    labels: NDArray[np.int64],
    has_several: NDArray[np.bool_],
    progress: Progress,
) -> _Similar:
    buckets = Buckets()
    for text, shared in candidates(sketches, excluded, progress):
        group = _SEVERAL if has_several[text] else int(labels[text])
        others, is_full = buckets.sharing(shared, without=None if has_several[text] else group)
        shingles = sketches.shingles(text)
        pairs = [(other, jaccard(shingles, sketches.shingles(other), options.near)) for other in others[:MAX_COMPARED]]
        buckets.add(text, shared, group)
        yield text, [pair for pair in pairs if pair[1] >= options.near], is_full or len(others) > MAX_COMPARED


def _similar_images(
    sketches: Sketches,
    options: DuplicateOptions,
    excluded: NDArray[np.int64],
    labels: NDArray[np.int64],
    has_several: NDArray[np.bool_],
    progress: Progress,
) -> _Similar:
    def is_compared(image: int, others: NDArray[np.int64]) -> NDArray[np.bool_]:
        return has_several[image] | has_several[others] | (labels[others] != labels[image])

    return similar_images(sketches, options, excluded, is_compared, progress)
