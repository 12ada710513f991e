"""Near-duplicates among documents of either kind: texts by their shingles, images by their thumbnails."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unisono.quality.documents import Content
from unisono.quality.duplicates.near_duplicates import Duplicates, duplicates_of, near_duplicates
from unisono.quality.duplicates.near_images import near_images
from unisono.quality.duplicates.sketch_folder import Sketches
from unisono.quality.options import DuplicateOptions
from unisono.quality.progress import SILENT, Progress


def threshold_of(content: Content, options: DuplicateOptions) -> float:
    """The similarity from which on two documents are near each other; 0: only exact copies are the same."""
    return options.image_near if content == "images" else options.near


def near_documents(
    content: Content,
    sketches: Sketches,
    options: DuplicateOptions,
    excluded: NDArray[np.int64],
    split_of: NDArray[np.int64] | None = None,
    progress: Progress = SILENT,
) -> tuple[Duplicates, int]:
    """Documents near one before them; arguments and result are those of ``near_duplicates``."""
    if not threshold_of(content, options):
        return duplicates_of([]), 0
    if content == "images":
        return near_images(sketches, options, excluded, split_of, progress)
    return near_duplicates(sketches, options.near, excluded, split_of, progress)
