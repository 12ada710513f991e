"""Chunks of documents: cleaned, sketched, and kept as one safetensors file.

Besides the arrays of ``sketches``:

    reasons       uint8   [documents]    number in ``cleaning.steps.REASONS`` of the step that dropped it; 0: kept
    values        float64 [documents]    what the limit that dropped it was compared with
    languages     uint8   [documents, 3] code of its language in ASCII; zeros where none was looked for
    changed       int64   [changed]      documents whose text is another now, by their place in the chunk
    texts         uint8   [bytes]        their texts in UTF-8, one after another
    text_offsets  int64   [changed + 1]  where each begins
    masked        int64   [documents, kinds] pieces of personal data that were replaced, of each of ``options.MASK_KINDS``
    measures      float64 [documents, measures] ``measures.MEASURES``; NaN of what was not measured

Those of images have ``thumbnails``, uint8 [images, 64, 64], and neither signatures nor texts. The file's metadata has ``faults``:
why images cannot be read, by their place in the chunk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from unisono.quality.cleaning.image_checks import check_image
from unisono.quality.cleaning.languages import MAX_CODE
from unisono.quality.cleaning.measures import row_of_measures
from unisono.quality.cleaning.steps import REASONS, UNREADABLE, clean_documents
from unisono.quality.duplicates.sketches import sketch_documents
from unisono.quality.options import MASK_KINDS, CleanRecipe


def encode_request(contents: Sequence[bytes | None], suffixes: Sequence[str] | None) -> bytes:
    """A request for the chunk of some documents, for another process: MessagePack of the arguments.

    Args:
        contents: Texts or images; None of one that cannot be read.
        suffixes: Of the images' files, as ``make_image_chunk`` takes them; None of texts.
    """
    return msgspec.msgpack.encode((contents, suffixes))


def answer_request(request: bytes, recipe: CleanRecipe, benchmark_hashes: NDArray[np.uint64]) -> bytes:
    """The chunk file of a request. Raises ExtraError as ``make_chunk`` and ``make_image_chunk``."""
    contents, suffixes = msgspec.msgpack.decode(request, type=tuple[list[bytes | None], list[str] | None])
    if suffixes is not None:
        return make_image_chunk(contents, suffixes, recipe)
    return make_chunk(contents, recipe, benchmark_hashes)


def make_chunk(texts: Sequence[bytes | None], recipe: CleanRecipe, benchmark_hashes: NDArray[np.uint64]) -> bytes:
    """The chunk file of documents in UTF-8, in which lone surrogates may stand.

    Args:
        texts: The documents; None of one that cannot be read.
        recipe: The steps that they go through.
        benchmark_hashes: Sorted hashes of the benchmarks' n-grams; empty if there are none.

    Raises:
        ExtraError: A package that a step needs is not installed.
    """
    cleaned = clean_documents(texts, recipe, benchmark_hashes)
    is_kept = cleaned.reasons == 0
    changed = [number for number, text in enumerate(cleaned.texts) if is_kept[number] and text is not texts[number]]
    new_texts = [cleaned.texts[number] for number in changed]
    # a dropped document is compared with none
    kept_texts = [text if kept else b"" for text, kept in zip(cleaned.texts, is_kept, strict=True)]
    arrays = sketch_documents(kept_texts, recipe.dedup) | {
        "reasons": cleaned.reasons,
        "values": cleaned.values,
        "languages": cleaned.languages.view(np.uint8).reshape(-1, MAX_CODE),
        "changed": np.array(changed, np.int64),
        "texts": np.frombuffer(b"".join(new_texts), np.uint8),
        "text_offsets": np.cumsum([0, *map(len, new_texts)], dtype=np.int64),
        "masked": cleaned.masked,
        "measures": cleaned.measures,
    }
    return save(arrays)


def make_image_chunk(images: Sequence[bytes | None], suffixes: Sequence[str], recipe: CleanRecipe) -> bytes:
    """The chunk file of encoded images.

    Args:
        images: The images; None of one that cannot be read.
        suffixes: Of their files' names, in small letters; empty of rows of tables.
        recipe: The limits that they have to pass.

    Raises:
        ExtraError: A package that reads their formats is not installed.
    """
    checked = [check_image(image or b"", suffix, recipe.images) for image, suffix in zip(images, suffixes, strict=True)]
    names = [of.failed if of.failed in ("", UNREADABLE) else f"images.{of.failed}" for of in checked]
    measures = [row_of_measures(of.measured, "images") for of in checked]
    digests = b"".join(hashlib.blake2b(image or b"", digest_size=16).digest() for image in images)
    arrays: dict[str, NDArray[Any]] = {
        "digests": np.frombuffer(digests, "<u8").reshape(-1, 2),
        "thumbnails": np.stack([of.thumbnail for of in checked]),
        "reasons": np.array([REASONS.index(name) for name in names], np.uint8),
        "values": np.array([of.value for of in checked]),
        "languages": np.zeros((len(images), MAX_CODE), np.uint8),
        "changed": np.zeros(0, np.int64),
        "texts": np.zeros(0, np.uint8),
        "text_offsets": np.zeros(1, np.int64),
        "masked": np.zeros((len(images), len(MASK_KINDS)), np.int64),
        "measures": np.array(measures, np.float64),
    }
    faults = {number: of.fault for number, of in enumerate(checked) if of.fault and images[number] is not None}
    return save(arrays, {"faults": json.dumps(faults)})
