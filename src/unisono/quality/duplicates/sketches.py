"""Sketches of documents: what is kept of each to find its duplicates.

The arrays of a chunk of documents:

    digests    uint64 [documents, 2]     BLAKE2b-128 of the text in UTF-8
    bands      uint64 [bands, documents] keys of the bands of the MinHash signature
    shingles   uint32 [shingles]         low halves of the shingles' hashes: sorted, each once, document after document
    offsets    int64  [documents + 1]    where each document begins in them

Signatures are rensa's R-MinHash of the shingles' hashes. Documents that share a band's key are candidates (locality-sensitive
hashing, Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, 3.4); their similarity is then computed from the shingles.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unisono.errors import missing_extra
from unisono.quality.duplicates.shingles import shingle_hashes
from unisono.quality.options import DuplicateOptions

CANDIDATE_PROBABILITY: Final = 0.995  # of a pair whose similarity is the threshold
MAX_SHINGLES: Final = (
    1 << 16
)  # of a document; of more the smallest hashes, by which Jaccard's standard error is below 0.2 %
SHINGLES_VERSION: Final = 1  # version of ``shingle_hashes``: raised whenever the hashes of any document are others
THUMBNAILS_VERSION: Final = 2  # of ``check_image``: raised whenever the thumbnail of any image is another
_FACTOR: Final = np.uint64(0xA0761D6478BD642F)


def bands_and_rows(near: float, num_perm: int) -> tuple[int, int]:
    """Bands of a signature, and values per band: the most with which a pair at the threshold becomes a candidate surely enough.

    With ``b`` bands of ``r`` values this probability is 1 - (1 - near^r)^b. More values per band are fewer false candidates.
    """
    fitting = [
        rows for rows in range(1, num_perm + 1) if 1 - (1 - near**rows) ** (num_perm // rows) >= CANDIDATE_PROBABILITY
    ]
    rows = max(fitting, default=1)
    return num_perm // rows, rows


def sketch_version(options: DuplicateOptions, content: str) -> str:
    """Name and version of the signatures' algorithm and of the shingles, or that of thumbnails: sketches of different versions
    cannot be compared. Empty without signatures and thumbnails.

    Raises:
        ExtraError: rensa is not installed.
    """
    if content == "images":
        return f"thumbnails {THUMBNAILS_VERSION}"
    if not (options.enabled and options.near):
        return ""
    _rensa()
    return f"rensa {version('rensa')} R-MinHash, shingles {SHINGLES_VERSION}"


def sketch_documents(texts: Sequence[bytes], options: DuplicateOptions) -> dict[str, NDArray[Any]]:
    """The arrays of documents in UTF-8, in which lone surrogates may stand; only digests where no near-duplicates are sought.

    Raises:
        ExtraError: Near-duplicates are looked for, and rensa is not installed.
    """
    digests = b"".join(hashlib.blake2b(text, digest_size=16).digest() for text in texts)
    arrays: dict[str, NDArray[Any]] = {"digests": np.frombuffer(digests, "<u8").reshape(-1, 2)}
    if options.enabled and options.near:
        hashes, offsets = shingle_hashes([text.decode("utf-8", "surrogatepass") for text in texts], options.ngram)
        arrays["bands"] = _band_keys(
            _signatures(hashes, offsets, options), *bands_and_rows(options.near, options.num_perm)
        )
        arrays["shingles"], arrays["offsets"] = _sets(hashes, offsets)
    return arrays


def _signatures(
    hashes: NDArray[np.uint64], offsets: NDArray[np.int64], options: DuplicateOptions
) -> NDArray[np.uint32]:
    """MinHash signatures, uint32 [documents, num_perm]."""
    matrix = _rensa().RMinHash.digest_matrix_from_flat_token_hashes(
        hashes, offsets.astype(np.uint64), options.num_perm, options.seed
    )
    return np.array(matrix.to_rows(), np.uint32).reshape(len(offsets) - 1, options.num_perm)


def _band_keys(signatures: NDArray[np.uint32], bands: int, rows: int) -> NDArray[np.uint64]:
    """A key of each band of each signature, uint64 [bands, documents]."""
    values = signatures[:, : bands * rows].reshape(-1, bands, rows)
    keys = np.zeros((len(values), bands), np.uint64)
    for row in range(rows):
        keys = (keys ^ values[:, :, row]) * _FACTOR
        keys ^= keys >> np.uint64(32)
    return np.ascontiguousarray(keys.T)


def _sets(hashes: NDArray[np.uint64], offsets: NDArray[np.int64]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """The set of each document's 32-bit hashes, sorted, and where each begins."""
    document = np.repeat(np.arange(len(offsets) - 1, dtype=np.uint64), np.diff(offsets))
    pairs = np.sort((document << np.uint64(32)) | (hashes & np.uint64(0xFFFFFFFF)))
    pairs = pairs[np.concatenate((np.ones(len(pairs[:1]), np.bool_), pairs[1:] != pairs[:-1]))]
    begins = np.searchsorted(pairs, np.arange(len(offsets), dtype=np.uint64) << np.uint64(32))
    place = np.arange(len(pairs)) - np.repeat(begins[:-1], np.diff(begins))
    kept = place < MAX_SHINGLES
    lengths = np.minimum(np.diff(begins), MAX_SHINGLES)
    return pairs[kept].astype(np.uint32), np.concatenate(([0], np.cumsum(lengths)))


def _rensa() -> Any:
    try:
        return importlib.import_module("rensa")
    except ImportError as error:
        raise missing_extra("quality", "rensa", "the search for near-duplicates") from error
