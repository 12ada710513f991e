"""Labels of documents: the values of a field, by name and number."""

from __future__ import annotations

import json
from base64 import b64encode
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from unisono.errors import DataError
from unisono.quality.documents import Documents
from unisono.quality.duplicates.sketch_folder import Sketches
from unisono.quality.field_values import read_values
from unisono.quality.progress import SILENT, Progress
from unisono.quality.row_keys import class_of
from unisono.sanitize import quoted

MAX_LABELS: Final = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Labels:
    """Labels of documents.

    Attributes:
        field: The field that has them.
        names: The different labels in the order in which they occur.
        of: Number in ``names`` of each document's label, -1 of one that cannot be read, int64 [documents].
    """

    field: str
    names: tuple[str, ...]
    of: NDArray[np.int64]

    def name(self, document: int) -> str:
        """The label of a document."""
        return self.names[self.of[document]]

    def counts(self) -> dict[str, int]:
        """Documents of each label, the most common one first."""
        counts = Counter(self.of[self.of >= 0].tolist())
        return {self.names[number]: count for number, count in counts.most_common()}


def label_like(name: str, value: Any) -> Any:
    """The label ``name`` as a value of the type of ``value``, a label of the same file.

    Raises:
        DataError: It is no value of that type.
    """
    if isinstance(value, bytes):
        return name.encode()
    try:
        if isinstance(value, bool):
            return {"0": False, "1": True}[name]
        if isinstance(value, dict):  # bytes as JSONL has them
            return {"base64": b64encode(name.encode()).decode()}
        return type(value)(name)
    except (ValueError, KeyError) as error:
        raise DataError(
            given=f"the label {quoted(name)} for a row whose label is {value}, a number",
            rule="labels of one file are of one type",
            consequence="the label was not changed, and nothing was written",
            nearest="a mark with another label, or a file whose labels are all texts",
        ) from error


def read_labels(
    documents: Documents,
    field: str,
    sketches: Sketches,
    *,
    least: int = 1,
    stage: str = "reading labels",
    progress: Progress = SILENT,
) -> Labels:
    """Read the label of each document; one without is left out of ``sketches`` as unreadable.

    Args:
        documents: The data set.
        field: The field of the labels.
        sketches: Of all documents.
        least: Different labels that there must be.
        stage: What this is called where progress is shown.
        progress: Receives the bytes that are read.

    Raises:
        DataError: A file is text; a row has no label, or one that is neither text nor an integer, and unreadable documents are an
            error; there are too few or too many different labels.
    """
    of, names = read_values(documents, field, sketches, class_of, stage=stage, progress=progress)
    if len(of) and not least <= len(names) <= MAX_LABELS:
        raise DataError(
            given=f"field {quoted(field)} with {len(names):,} different values in {len(of):,} rows",
            rule=f"labels are {least} to {MAX_LABELS:,} values, each of several rows",
            consequence="nothing was written",
            nearest="the field of the labels or classes; the field of a user or a source is a group",
        )
    return Labels(field=field, names=tuple(names), of=of)


def data_set_digest(documents: Documents, sketches: Sketches, labels: Labels) -> str:
    """Identifies the documents, their order and files, and their labels. Times of change and the folder do not matter."""
    files, _ = sketches.places()
    counts = np.bincount(files, minlength=len(documents.files))
    about = [[file.name for file in documents.files], counts.tolist(), labels.field, labels.names]
    digest = xxhash.xxh3_128(json.dumps(about).encode())
    for array in (sketches.digests(), labels.of):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
