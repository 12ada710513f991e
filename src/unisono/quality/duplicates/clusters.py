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
    group_of: NDArray[np.int64] | None,
    progress: Progress = SILENT,
) -> tuple[NDArray[np.int64], int]:
    """Join documents into clusters; also over several others: the first and the last of a chain are in one cluster.

    Args:
        content: What documents are.
        sketches: Of all documents.
        options: From which similarity on two documents belong together.
        group_of: Number of each document's group, int64 [documents]; documents of one group belong together, where it is not
            negative. None: there are none.
        progress: Receives how many documents are compared.

    Returns:
        The first document of each document's cluster, int64 [documents]; and how many documents were not compared with all
        of their candidates, as there were too many.
    """
    parent = np.arange(len(sketches))
    exact = exact_duplicates(sketches)
    parent[exact.document] = exact.of
    num_capped = 0
    near = options.near
    if content == "images":
        num_capped = _union_images(parent, sketches, options, exact.document, progress)
    elif near:
        buckets = Buckets()
        for document, shared in candidates(sketches, exact.document, progress):
            others, is_capped = buckets.sharing(shared)
            shingles, num_compared = sketches.shingles(document), 0
            for other in others:
                if find_root(parent, other) == find_root(parent, document):
                    continue
                if num_compared == MAX_COMPARED:
                    is_capped = True
                    break
                num_compared += 1
                if jaccard(shingles, sketches.shingles(other), near) >= near:
                    union(parent, document, other)
            buckets.add(document, shared)
            num_capped += is_capped
    if group_of is not None:
        first_of_group: dict[int, int] = {}
        for document in np.flatnonzero(group_of >= 0).tolist():
            union(parent, document, first_of_group.setdefault(int(group_of[document]), document))
    while True:  # each document points at one before it
        ahead = parent[parent]
        if np.array_equal(ahead, parent):
            return parent, num_capped
        parent = ahead


def _union_images(
    parent: NDArray[np.int64],
    sketches: Sketches,
    options: DuplicateOptions,
    excluded: NDArray[np.int64],
    progress: Progress,
) -> int:
    """Join images that are near each other; returns how many had too many candidates."""
    num_capped = 0
    if options.image_near:
        for image, pairs, is_capped in similar_images(sketches, options, excluded, progress=progress):
            for other, _ in pairs:
                union(parent, image, other)
            num_capped += is_capped
    return num_capped


def find_root(parent: NDArray[np.int64], document: int) -> int:
    """The first document of a document's cluster; ``parent`` has one before it in the cluster, or itself, for each document."""
    while (before := int(parent[document])) != document:
        parent[document] = parent[before]  # halves the path (Tarjan and van Leeuwen 1984)
        document = before
    return document


def union(parent: NDArray[np.int64], document: int, other: int) -> None:
    """Make one cluster of those of two documents."""
    low, high = sorted((find_root(parent, document), find_root(parent, other)))
    parent[high] = low
