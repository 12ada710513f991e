"""Where documents are, and how they look: file and row, texts and pictures, for reports and lines of JSON."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unisono.data.image import contact_sheet
from unisono.data.image.decoding import Pixels, decode
from unisono.data.image.orientation import orientation_of, oriented
from unisono.errors import DataError
from unisono.quality.documents import Documents
from unisono.quality.duplicates.near_duplicates import Duplicates
from unisono.storage.json_lines import write_json_lines

_EXAMPLES: Final = 50
_EXCERPT: Final = 1000  # characters
_CELL_PX: Final = 160  # of an image on a page
_QUALITY: Final = 80  # of an image by itself
_COLUMNS: Final = 6


def _decoded(data: str | bytes) -> Pixels:
    """The pixels of an image, as small as it is shown; one grey pixel if it cannot be read."""
    from PIL import Image

    try:
        encoded = data if isinstance(data, bytes) else b""
        stored = decode(encoded, min_size=(_CELL_PX, _CELL_PX))
        image = Image.fromarray(np.ascontiguousarray(oriented(stored, orientation_of(encoded))))
    except DataError:
        return np.full((1, 1, 3), 128, np.uint8)
    image.thumbnail((_CELL_PX, _CELL_PX))
    return np.asarray(image)


def _jpeg(data: str | bytes) -> str:
    """The image as it is shown, as JPEG in a ``data:`` address."""
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(_decoded(data)).save(out, "JPEG", quality=_QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()


@dataclass(frozen=True, slots=True)
class Example:
    """A pair of documents that are not the same text.

    Attributes:
        similarity: Jaccard similarity of their shingles.
        place: Where the duplicate is.
        text: How it begins.
        of_place: Where the document is that it is a copy of.
        of_text: How that one begins.
    """

    similarity: float
    place: str
    text: str
    of_place: str
    of_text: str


class DocumentPlaces:
    """Says where documents are, and shows them.

    Args:
        documents: The data set.
        files: Number of each document's file, int64 [documents].
        rows: Its row there, int64 [documents].
        show: What becomes of a text before it is shown.
    """

    def __init__(
        self,
        documents: Documents,
        files: NDArray[np.int64],
        rows: NDArray[np.int64],
        show: Callable[[str], str] = str,
    ) -> None:
        self._show = show
        self._documents = documents
        self._files = files
        self._rows = rows

    def write(self, path: Path, duplicates: Duplicates) -> None:
        """Write a line of JSON for each duplicate."""
        write_json_lines(path, self.records(duplicates))

    def records(self, duplicates: Duplicates) -> Iterator[dict[str, Any]]:
        """Places of each duplicate and of the document it is a copy of, their similarity, and whether they are the same."""
        fields = (duplicates.document, duplicates.of, duplicates.similarity, duplicates.exact)
        for document, of, similarity, exact in zip(*(field.tolist() for field in fields), strict=True):
            yield {
                **self.place(document),
                "duplicate_of": self.place(of),
                "similarity": round(similarity, 4),
                "exact": exact,
            }

    def examples(self, duplicates: Duplicates) -> list[Example]:
        """The first near-duplicates with their texts."""
        shown = duplicates.select(np.flatnonzero(~duplicates.exact)[:_EXAMPLES])
        documents, of = shown.document.tolist(), shown.of.tolist()
        texts = self.texts([*documents, *of])
        return [
            Example(similarity, *texts[document], *texts[other])
            for document, other, similarity in zip(documents, of, shown.similarity.tolist(), strict=True)
        ]

    def texts(self, documents: Sequence[int]) -> dict[int, tuple[str, str]]:
        """Where each document is, in words, and how its text begins, as it was read; of an image its size."""
        places = {self._at(document) for document in documents}
        shown = {place: self._shown(content) for place, content in self._documents.contents(places)}
        return {document: (self.place_text(document), shown[self._at(document)]) for document in documents}

    def _shown(self, content: str | bytes) -> str:
        return self._show(content)[:_EXCERPT] if isinstance(content, str) else f"{len(content):,} bytes"

    def picture(self, documents: Sequence[int], captions: Sequence[str]) -> str:
        """Images side by side as a PNG in a ``data:`` address; empty without any."""
        places = [self._at(document) for document in documents]
        pixels = {place: _decoded(content) for place, content in self._documents.contents(places)}
        if not places:
            return ""
        cells = [pixels.get(place, _decoded(b"")) for place in places]
        sheet = contact_sheet(cells, captions, columns=_COLUMNS, cell_px=_CELL_PX)
        return "data:image/png;base64," + base64.b64encode(sheet).decode()

    def pictures(self, documents: Iterable[int]) -> dict[int, str]:
        """Each image by itself, its longer side of at most 160 pixels, as JPEG in a ``data:`` address."""
        documents_at = {self._at(document): document for document in documents}
        return {documents_at[place]: _jpeg(content) for place, content in self._documents.contents(documents_at)}

    def _at(self, document: int) -> tuple[int, int]:
        return int(self._files[document]), int(self._rows[document])

    def place_text(self, document: int) -> str:
        """Where a document is, in words."""
        return self._documents.place_text(*self._at(document))

    def place(self, document: int) -> dict[str, Any]:
        """File and row of a document."""
        file, row = self._at(document)
        return {"file": self._documents.files[file].name, "row": row}
