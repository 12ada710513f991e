"""Values of a field of all documents, such as a class or a group, by number."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.quality.documents import Documents
from unisono.quality.duplicates.sketch_folder import Sketches
from unisono.quality.progress import SILENT, Progress
from unisono.quality.row_keys import Key


def read_values(
    documents: Documents,
    field: str,
    sketches: Sketches,
    key: Key,
    *,
    stage: str,
    progress: Progress = SILENT,
) -> tuple[NDArray[np.int64], list[Any]]:
    """Read the value of each document that can be read; one without is left out of ``sketches`` as unreadable.

    Args:
        documents: The data set.
        field: The field.
        sketches: Of all documents.
        key: What two values that are the same have in common; None of an absent one.
        stage: What this is called where progress is shown.
        progress: Receives the bytes that are read.

    Returns:
        The number of each document's value, -1 of one that cannot be read, int64 [documents]; and the keys in the order in
        which they occur.

    Raises:
        DataError: A file has no such field; or a row has none, and unreadable documents are an error.
    """
    numbers: dict[Hashable, int] = {}
    faults: dict[int, str] = {}
    progress.begin(stage, documents.total_bytes, "bytes")
    of_documents = documents.keys(field, key, faults, progress.advance)
    keys = zip(of_documents, (sketches.reasons() == 0).tolist(), strict=True)
    found = np.fromiter(
        (numbers.setdefault(of, len(numbers)) if is_read and of is not None else -1 for of, is_read in keys),
        np.int64,
        len(sketches),
    )
    next(of_documents, None)  # to the end of the last file
    sketches.leave_out(faults)
    return found, list(numbers)
