"""Documents that cannot be read: an error, or left out, with a warning and a record of each."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from unisono.errors import DataError
from unisono.quality.cleaning.steps import UNREADABLE
from unisono.quality.document_places import DocumentPlaces
from unisono.quality.documents import Documents
from unisono.quality.duplicates.sketch_folder import Sketches
from unisono.quality.job_folder import DROPPED_FILE
from unisono.storage.json_lines import write_json_lines

_LOG: Final = logging.getLogger("unisono")


def unreadable_documents(documents: Documents, sketches: Sketches, *, drops: bool) -> dict[int, str]:
    """Why documents cannot be read, by their number, in order; a warning says how many are left out.

    Args:
        documents: The data set.
        sketches: Of all documents.
        drops: Whether such documents are left out, or an error.

    Raises:
        DataError: There are some, and they are not left out.
    """
    faults = sketches.faults()
    if not faults:
        return faults
    number, fault = next(iter(faults.items()))
    files, rows = sketches.places()
    place = documents.place_text(int(files[number]), int(rows[number]))
    if not drops:
        raise DataError(
            given=f"{place}: {fault}; {len(faults):,} such documents in all",
            rule="documents can be read",
            consequence="nothing was written",
            nearest="without these; --on-error skip leaves them out",
        )
    _LOG.warning("%d documents that cannot be read are left out, the first is %s: %s", len(faults), place, fault)
    return faults


def unreadable_record(places: DocumentPlaces, document: int, fault: str) -> dict[str, Any]:
    """The line of ``dropped.jsonl`` of a document that cannot be read."""
    return {**places.place(document), "reason": UNREADABLE, "fault": fault}


def write_unreadable(folder: Path, places: DocumentPlaces, faults: Mapping[int, str]) -> None:
    """Write ``dropped.jsonl`` if documents were left out, with a line of each."""
    if faults:
        records = (unreadable_record(places, document, fault) for document, fault in faults.items())
        write_json_lines(folder / DROPPED_FILE, records)
