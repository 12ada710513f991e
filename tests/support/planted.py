"""Documents with planted near-duplicates: texts of random words, and copies of them with some words replaced."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

_WORD = re.compile("[0-9a-z_\u00c0-\u07ff]+|[\u0800-\u1fff\u2080-\u2fff\u3040-\U0010ffff]")


def words_of(text: str) -> list[str]:
    """The words of a text as ``unisono.quality.duplicates.shingles`` describes them, by a regular expression."""
    words: list[str] = []
    for word in _WORD.findall(text.lower()):
        raw = word.encode("utf-8", "surrogatepass")
        words += [raw[at : at + 64] for at in range(0, len(raw), 64)]
    return words


def shingles_of(text: str, ngram: int = 5) -> set[tuple[bytes, ...]]:
    words = words_of(text)
    if not words:
        return set()
    return {tuple(words[at : at + ngram]) for at in range(max(1, len(words) - ngram + 1))}


def jaccard(first: str, second: str, ngram: int = 5) -> float:
    """Jaccard similarity of two texts, computed from their shingles themselves."""
    a, b = shingles_of(first, ngram), shingles_of(second, ngram)
    return len(a & b) / len(a | b) if a | b else 0.0


def documents(count: int, rng: np.random.Generator, *, words: tuple[int, int] = (60, 200)) -> list[str]:
    """Texts of words of a vocabulary of 5,000 with the frequencies of Zipf's law."""
    weights = 1 / np.arange(1, 5001)
    lengths = rng.integers(*words, count)
    drawn = rng.choice(5000, size=int(lengths.sum()), p=weights / weights.sum())
    return [" ".join(f"w{word}" for word in part) for part in np.split(drawn, np.cumsum(lengths)[:-1])]


def edited(text: str, num_edits: int, rng: np.random.Generator) -> str:
    """The text with some words replaced by new ones, at places drawn at random."""
    words = text.split()
    for place in rng.choice(len(words), size=num_edits, replace=False):
        words[place] = f"new{rng.integers(1 << 30)}"
    return " ".join(words)


def pairs_above(texts: Sequence[str], near: float, ngram: int = 5) -> set[tuple[int, int]]:
    """All pairs with a similarity of ``near`` and more, by comparing every two documents that share any shingle."""
    sets = [shingles_of(text, ngram) for text in texts]
    holders: dict[tuple[bytes, ...], list[int]] = {}
    found: set[tuple[int, int]] = set()
    for number, shingles in enumerate(sets):
        shared: dict[int, int] = {}
        for shingle in shingles:
            for other in holders.setdefault(shingle, []):
                shared[other] = shared.get(other, 0) + 1
            holders[shingle].append(number)
        found |= {
            (other, number)
            for other, common in shared.items()
            if common >= near * (len(shingles) + len(sets[other]) - common)
        }
    return found
