"""Data sets whose labels are looked at: their documents, and the field that has the labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from unisono.errors import ConfigError, DataError
from unisono.quality.documents import (
    Documents,
    find_documents,
    has_image_records,
    text_field,
)
from unisono.sanitize import quoted
from unisono.tasks.sources import TARGETS


def find_labelled_documents(
    paths: Sequence[Path], label: str | None, *, column: str | None, whole_rows: bool
) -> tuple[Documents, str]:
    """The documents, and the field of their labels.

    Args:
        paths: Tables, image records, folders of these, or folders of images.
        label: The field; None where there is only one.
        column: Field of the text or image; see ``find_documents``.
        whole_rows: Whether a document is its row without the label.

    Raises:
        ConfigError: No field is named, and a document is a row of a table.
        DataError: A path is not there, or its documents are no texts, images or rows with such a label.
    """
    documents = find_documents(paths, column=column)
    field = _field_of_labels(documents, label)
    if whole_rows:
        _require_tables(documents)
        return replace(documents, excluded_column=field, content="text"), field
    if documents.content == "text" and column is None:
        _require_text(documents, field)
    return documents, field


def _field_of_labels(documents: Documents, label: str | None) -> str:
    """The field of the labels, which only tables have several of.

    Raises:
        ConfigError: None is named, and a document is a row of a table.
        DataError: An image record is to have another label than that of its header.
    """
    records = [file for file in documents.files if has_image_records(file)]
    if records and label is not None and label != TARGETS:
        raise DataError(
            given=f"{records[0].path}, image records, with the label {quoted(label)}",
            rule=f"the label of an image record is the class in its header, whose field is {TARGETS!r}",
            consequence="nothing was read",
            nearest="without --label",
        )
    if label is not None:
        return label
    if len(records) == len(documents.files) or all(file.corpus_entry for file in documents.files):
        return TARGETS
    raise ConfigError(
        given=f"{documents.files[0].path} without --label",
        rule="the label of a row is one of its fields; of an image record that of its header, and of other files their folder",
        consequence="nothing was read",
        nearest="--label with the field of the labels",
    )


def _require_tables(documents: Documents) -> None:
    """Raise DataError if a document is a file."""
    if whole := next((file for file in documents.files if file.corpus_entry), None):
        raise DataError(
            given=f"--whole-rows for {whole.path}, a file that is one document",
            rule="tables have rows",
            consequence="nothing was read",
            nearest="without --whole-rows",
        )


def _require_text(documents: Documents, label: str) -> None:
    """Raise DataError where the only string of a row, which would be the text, is the label."""
    for file in documents.files:
        if file.corpus_entry is None and text_field(file) == label:
            raise DataError(
                given=f"{file.path}, whose only text is the label {quoted(label)}",
                rule="documents are compared by their text",
                consequence="nothing was written",
                nearest="--whole-rows, which compares rows without their labels; or --column NAME",
            )
