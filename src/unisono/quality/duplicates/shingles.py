"""Shingles of documents: the word n-grams by which documents are compared (Broder 1997), as hashes, without a loop over words.

A word is a run of at most 64 bytes of ASCII letters, digits, ``_``, and characters from U+00C0 to U+07FF (Latin, Greek, Cyrillic,
Hebrew, Arabic and others), in lower case. Each character from U+0800 on is a word by itself, as most scripts there have no
spaces; general punctuation (U+2000 to U+207F) and that of CJK (U+3000 to U+303F) separates words as that of ASCII does. A shingle
is ``ngram`` consecutive words; a document of fewer words is one shingle, and one without words has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

WORD_BYTES: Final = 64
_BLOCK_BYTES: Final = 1 << 20  # hashed at once; more than a word has
_BASE: Final = 0x9E3779B97F4A7C15  # odd, so it has an inverse mod 2^64
_STEP: Final = np.uint64(0xD6E8FEB86659FD93)

Hashes = NDArray[np.uint64]
_Flags = NDArray[np.bool_]


def shingle_hashes(texts: Sequence[str], ngram: int) -> tuple[Hashes, NDArray[np.int64]]:
    """Hash the shingles of documents. A document of more than 1 MiB is taken block by block, with the same result.

    Args:
        texts: The documents.
        ngram: Words per shingle.

    Returns:
        The hashes of all documents one after another, in the order of the text, repeated ones repeated, uint64 [shingles];
        and where each document begins in them, int64 [documents + 1].
    """
    hashes: list[Hashes] = []
    lengths = np.zeros(len(texts) + 1, np.int64)
    for numbers, raws in _batches(texts):
        if len(raws[0]) > _BLOCK_BYTES:
            of_batch = _large_document_hashes(raws[0], ngram)
            counts = np.array([len(of_batch)])
        else:
            of_batch, counts = _batch_hashes(raws, ngram)
        hashes.append(of_batch)
        lengths[np.array(numbers) + 1] = counts
    return np.concatenate(hashes) if hashes else np.zeros(0, np.uint64), np.cumsum(lengths)


def words_at(text: str, begin: int, count: int) -> list[str]:
    """Words of a document in lower case, ``count`` of them from number ``begin`` on: those of shingle ``begin``."""
    words: list[str] = []
    first = 0  # number of the block's first word
    for data, starts, stops in _word_blocks(_in_lower_case(text)):
        here = slice(max(begin - first, 0), max(begin + count - first, 0))
        for start, stop in zip(starts[here].tolist(), stops[here].tolist(), strict=True):
            words.append(data[start:stop].tobytes().decode(errors="replace"))
        first += len(starts)
        if first >= begin + count:
            break
    return words


def _in_lower_case(text: str) -> bytes:
    return text.lower().encode("utf-8", "surrogatepass")


def _batches(texts: Sequence[str]) -> Iterator[tuple[list[int], list[bytes]]]:
    """Documents and their numbers, about ``_BLOCK_BYTES`` at a time; a larger document is alone. Empty ones are left out."""
    numbers: list[int] = []
    raws: list[bytes] = []
    size = 0
    for number, text in enumerate(texts):
        raw = _in_lower_case(text)
        if raws and size + len(raw) > _BLOCK_BYTES:
            yield numbers, raws
            numbers, raws, size = [], [], 0
        if raw:
            numbers.append(number)
            raws.append(raw)
            size += len(raw) + 1
    if raws:
        yield numbers, raws


def _batch_hashes(raws: Sequence[bytes], ngram: int) -> tuple[Hashes, NDArray[np.int64]]:
    """The hashes of the shingles of all documents, and the number of shingles of each."""
    data = np.frombuffer(b"\n".join((*raws, b"")), np.uint8)  # a separator after each document
    starts, stops = _words(data)
    last = np.searchsorted(starts, np.cumsum([len(raw) + 1 for raw in raws]))
    return _ngram_hashes(_word_hashes(data, starts, stops), last, ngram)


def _large_document_hashes(raw: bytes, ngram: int) -> Hashes:
    """The hashes of the shingles of one document."""
    hashes: list[Hashes] = []
    words = np.zeros(0, np.uint64)
    for data, starts, stops in _word_blocks(raw):
        words = np.concatenate((words, _word_hashes(data, starts, stops)))
        if len(words) >= ngram:
            hashes.append(_ngram_hashes(words, np.array([len(words)]), ngram)[0])
            words = words[len(words) - ngram + 1 :]  # shingles go on across the cut
    if not hashes:
        hashes.append(_ngram_hashes(words, np.array([len(words)]), ngram)[0])
    return np.concatenate(hashes)


def _word_blocks(raw: bytes) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.intp], NDArray[np.intp]]]:
    """Blocks of a document, each with a separator behind it, and where their words begin and end. No word is cut."""
    at = 0
    while at < len(raw):
        end = min(at + _BLOCK_BYTES, len(raw))
        while end < len(raw) and raw[end] & 0xC0 == 0x80:  # within a character
            end -= 1
        data = np.frombuffer(raw[at:end] + b"\n", np.uint8)
        starts, stops = _words(data)
        if end < len(raw) and len(stops) and stops[-1] == end - at:  # the word may go on
            end = at + int(starts[-1])
            starts, stops = starts[:-1], stops[:-1]
        yield data, starts, stops
        at = end


def _ngram_hashes(words: Hashes, last: NDArray[np.intp], ngram: int) -> tuple[Hashes, NDArray[np.int64]]:
    """The hashes of the shingles of documents, and the number of shingles of each.

    Args:
        words: Hashes of the words of all documents, uint64 [words].
        last: Number of the word behind the last one of each document.
        ngram: Words per shingle.
    """
    first = np.concatenate(([0], last[:-1]))
    counts = np.where(last > first, np.maximum(last - first - ngram + 1, 1), 0)
    begin = np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    end = np.repeat(last, counts)
    hashes = np.zeros(len(begin), np.uint64)
    for word in range(ngram):
        at = begin + word
        # only a document of fewer than ``ngram`` words has places beyond its end
        hashes = hashes * _STEP + np.where(at < end, words[np.minimum(at, len(words) - 1)], np.uint64(0))
    return _mixed(hashes), counts


def _words(data: NDArray[np.uint8]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Where the words of UTF-8 text in lower case begin and end; the text ends with a separator."""
    is_word = _WORD_BYTE[data]
    begins = is_word & ~_before(is_word)
    if data.max() >= 0x80:
        wide = data >= 0xE0  # first bytes of characters of three bytes or four
        in_wide = wide | _before(wide) | _before(wide, 2) | _before(data >= 0xF0, 3)
        after = np.concatenate((data[1:], data[:1]))
        separates = (data == 0xE2) & ((after == 0x80) | (after == 0x81)) | (data == 0xE3) & (after == 0x80)
        latin_signs = data == 0xC2  # U+0080 to U+00BF
        is_word &= ~(separates | _before(separates) | _before(separates, 2) | latin_signs | _before(latin_signs))
        begins = is_word & (~_before(is_word) | wide | (_before(in_wide) & ~in_wide))
    ends = is_word & np.concatenate(((~is_word | begins)[1:], [True]))
    starts, stops = np.flatnonzero(begins), np.flatnonzero(ends) + 1
    if np.any(stops - starts > WORD_BYTES):
        parts = -(-(stops - starts) // WORD_BYTES)
        part = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
        starts = np.repeat(starts, parts) + WORD_BYTES * part
        stops = np.minimum(starts + WORD_BYTES, np.repeat(stops, parts))
    return starts, stops


def _word_hashes(data: NDArray[np.uint8], starts: NDArray[np.intp], stops: NDArray[np.intp]) -> Hashes:
    """A hash of each word: the polynomial of its bytes mod 2^64, as a difference of prefix sums, mixed.

    Such polynomials collide for certain strings of 2^11 bytes (Pachocki and Radoszewski 2013), which words are too short for.
    """
    powers, inverses = _powers(1 << (len(data) - 1).bit_length())
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(_BYTE_VALUE[data] * powers[: len(data)], dtype=np.uint64)))
    return _mixed((sums[stops] - sums[starts]) * inverses[starts])


@cache
def _powers(count: int) -> tuple[Hashes, Hashes]:
    """The powers 0 to ``count`` - 1 of the base and of its inverse, mod 2^64."""

    def powers_of(base: int) -> Hashes:
        factors = np.full(count, base, np.uint64)
        factors[0] = 1
        return np.cumprod(factors, dtype=np.uint64)

    return powers_of(_BASE), powers_of(pow(_BASE, -1, 1 << 64))


def _mixed(values: Hashes) -> Hashes:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014): every bit of the result depends on every bit of the value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _before(flags: _Flags, distance: int = 1) -> _Flags:
    """The flag of the byte ``distance`` before."""
    return np.concatenate((np.zeros(distance, np.bool_), flags[:-distance]))


def _word_bytes() -> _Flags:
    table = np.zeros(256, np.bool_)
    table[np.frombuffer(b"0123456789abcdefghijklmnopqrstuvwxyz_", np.uint8)] = True
    table[0x80:] = True
    return table


_WORD_BYTE: Final = _word_bytes()
_BYTE_VALUE: Final = _mixed(np.arange(1, 257, dtype=np.uint64) * np.uint64(_BASE))
