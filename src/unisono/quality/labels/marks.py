"""Marks of labels that somebody has looked at, as the page of ``unisono data labels`` saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import msgspec

from unisono.errors import DataError
from unisono.storage.limits import read_json

VERSION: Final = 1

Action = Literal["keep", "change", "drop"]


class MarkedData(msgspec.Struct, frozen=True, kw_only=True):
    """The data set that marks are of, and how its documents were read.

    Attributes:
        data_set_digest: Digest of the documents and their labels.
        label: Field of the labels.
        text_column: Field of the text; None to find it.
        whole_rows: Whether a document is its row without the label.
        skips_unreadable: Whether documents that cannot be read, or have no label, were left out.
    """

    data_set_digest: str
    label: str
    text_column: str | None
    whole_rows: bool
    skips_unreadable: bool = False


class Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A decision about one document.

    Attributes:
        file: Name of its file.
        row: Its row there, from 0.
        label: Its label, as it was.
        action: ``keep``: the label is right; ``change`` it; or ``drop`` the document.
        to: The new label; only of a change.
    """

    file: str
    row: int
    label: str
    action: Action
    to: str | None = None


class Marks(MarkedData, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of marks.

    Attributes:
        version: Of the format.
        marks: At most one of each document.
    """

    version: int
    marks: list[Mark]


def read_marks(path: Path) -> Marks:
    """Read a file of marks.

    Raises:
        DataError: It is not there, is damaged or of another version, or has two marks of one document.
    """
    try:
        found = msgspec.convert(read_json(path), Marks)  # msgspec's own decoder takes no lone surrogates
    except (OSError, ValueError) as error:
        raise _refused(f"{path}: {error}") from error
    if found.version != VERSION:
        raise _refused(f"{path}, of version {found.version}")
    marked: set[tuple[str, int]] = set()
    for mark in found.marks:
        if (mark.file, mark.row) in marked:
            raise _refused(f"{path}, with two marks of {mark.file}, row {mark.row}")
        if (mark.action == "change") != (mark.to is not None):
            raise _refused(f"{path}, whose mark of {mark.file}, row {mark.row}, is {mark.action} to {mark.to}")
        marked.add((mark.file, mark.row))
    return found


def _refused(given: str) -> DataError:
    return DataError(
        given=given,
        rule=f"marks are JSON of version {VERSION}, as the page of unisono data labels saves it, with one mark of a document",
        consequence="nothing was written",
        nearest="open OUT/report.html in a browser, mark documents and save the marks again",
    )
