"""Clusters of documents that belong together: with the same text, near each other, or with the same value of a field."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unisono.quality.documents import Content
from unisono.quality.duplicates.near_duplicates import MAX_COMPARED, Buckets, candidates, exact_duplicates, jaccard
from unisono.quality.duplicates.near_images import similar_images
from unisono.quality.duplicates.sketch_folder import Sketches
from unisono.quality.options import DuplicateOptions
from unisono.quality.progress import SILENT, Progress


def find_clusters(
    content: Content,
    sketches: Sketches,
    options: DuplicateOptions,
    values: NDArray[np.int64] | None,
    progress: Progress = SILENT,
) -> tuple[NDArray[np.int64], int]:
    """Join documents into clusters; also over several others: the first and the last of a chain are in one cluster.

    Args:
        content: What documents are.
        sketches: Of all documents.
        options: From which similarity on two documents belong together.
        values: Number of each document's value, int64 [documents]; documents of one value belong together, where it is not
            negative. None: there are none.
        progress: Is told how many documents are compared.

    Returns:
        The first document of each document's cluster, int64 [documents]; and how many documents were not compared with all
        of their candidates, as there were too many.
    """
    first = np.arange(len(sketches))
    exact = exact_duplicates(sketches)
    first[exact.document] = exact.of
    crowded = 0
    near = options.near
    if content == "images":
        crowded = _join_images(first, sketches, options, exact.document, progress)
    elif near:
        buckets = Buckets()
        for document, shared in candidates(sketches, exact.document, progress):
            others, is_crowded = buckets.sharing(shared)
            shingles = sketches.shingles(document)
            for other in others[:MAX_COMPARED]:
                is_joined = find_root(first, other) == find_root(first, document)
                if not is_joined and jaccard(shingles, sketches.shingles(other), near) >= near:
                    join(first, document, other)
            buckets.add(document, shared)
            crowded += is_crowded or len(others) > MAX_COMPARED
    if values is not None:
        first_of_value: dict[int, int] = {}
        for document in np.flatnonzero(values >= 0).tolist():
            join(first, document, first_of_value.setdefault(int(values[document]), document))
    while True:  # each document points at one before it
        ahead = first[first]
        if np.array_equal(ahead, first):
            return first, crowded
        first = ahead


def _join_images(
    first: NDArray[np.int64],
    sketches: Sketches,
    options: DuplicateOptions,
    excluded: NDArray[np.int64],
    progress: Progress,
) -> int:
    """Join images that are near each other; returns how many had too many candidates."""
    crowded = 0
    if options.image_near:
        for image, pairs, is_crowded in similar_images(sketches, options, excluded, progress=progress):
            for other, _ in pairs:
                join(first, image, other)
            crowded += is_crowded
    return crowded


def find_root(first: NDArray[np.int64], document: int) -> int:
    """The first document of a document's cluster; ``first`` has one before it in the cluster, or itself, for each document."""
    while (before := int(first[document])) != document:
        first[document] = first[before]  # halves the path (Tarjan and van Leeuwen 1984)
        document = before
    return document


def join(first: NDArray[np.int64], document: int, other: int) -> None:
    """Make one cluster of those of two documents."""
    low, high = sorted((find_root(first, document), find_root(first, other)))
    first[high] = low
