"""Measures of documents, and their distributions over a data set: lengths, and what limits are compared with.

Bins are fixed, so that documents are counted as they come: of equal width, or of equal width on a logarithmic scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from unisono.quality.cleaning.text_quality import MEASURES as TEXT_MEASURES
from unisono.quality.documents import Content
from unisono.quality.options import CleanRecipe

CHARS: Final = "chars"  # of a text as it was read
NEW_CHARS: Final = "new_chars"  # of the same text after all steps
PIXELS: Final = "pixels"
LANGUAGE_PROB: Final = "language_prob"
_OF_LIMITS: Final[Mapping[Content, tuple[str, ...]]] = {  # in the order in which limits are tried
    "text": (*TEXT_MEASURES, LANGUAGE_PROB),
    "images": ("side_px", "contrast", "blur"),
}
MEASURES: Final[Mapping[Content, tuple[str, ...]]] = {
    "text": (CHARS, NEW_CHARS, *_OF_LIMITS["text"]),
    "images": (PIXELS, *_OF_LIMITS["images"]),
}
_LENGTHS: Final[Mapping[Content, tuple[str, str]]] = {"text": (CHARS, NEW_CHARS), "images": (PIXELS, PIXELS)}


def _log_bins(decades: int, per_decade: int) -> NDArray[np.float64]:
    """Edges from 1 to the power of ten, rounded to four digits."""
    powers = np.arange(decades * per_decade + 1) / per_decade
    return np.array([float(f"{edge:.4g}") for edge in 10.0**powers])


_SHARES: Final = np.round(np.linspace(0.0, 1.0, 41), 3)
_EDGES: Final[Mapping[str, NDArray[np.float64]]] = {
    CHARS: _log_bins(9, 8),
    NEW_CHARS: _log_bins(9, 8),
    PIXELS: _log_bins(9, 8),
    "words": _log_bins(7, 8),
    "mean_word_chars": _log_bins(2, 20),
    "side_px": _log_bins(5, 8),
    "contrast": np.linspace(0.0, 128.0, 65),
}
LOGARITHMIC: Final = (CHARS, NEW_CHARS, PIXELS, "words", "mean_word_chars", "side_px")


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """A histogram of a measure.

    Attributes:
        measure: What is measured, such as ``words``; ``chars`` and ``pixels`` are lengths.
        of: Which documents: all that could be ``read``, those that are ``kept``, or those that were ``tried``, as they pass
            all limits before this one.
        documents: Number of these documents.
        limits: The limits of the measure that are on, such as ``min_words``.
        edges: Of the bins, ascending, without empty bins at both ends. A bin has its lower edge, the last one both.
        counts: Documents in each bin.
        below: Documents below the first bin there could be.
        above: Documents above the last one.
    """

    measure: str
    of: Literal["read", "kept", "tried"]
    documents: int
    limits: dict[str, float]
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    below: int
    above: int


class _Histogram:
    """Counts of a measure, added up part by part."""

    def __init__(self, measure: str) -> None:
        self.edges = _EDGES.get(measure, _SHARES)
        self.counts = np.zeros(len(self.edges) - 1, np.int64)
        self.below = self.above = 0

    def add(self, values: NDArray[np.float64]) -> None:
        """Count more values; NaN are none."""
        values = values[~np.isnan(values)]
        self.counts += np.histogram(values, self.edges)[0]
        self.below += int(np.sum(values < self.edges[0]))
        self.above += int(np.sum(values > self.edges[-1]))


def row_of_measures(measured: Mapping[str, float], content: Content) -> list[float]:
    """The values of a document in the order of ``MEASURES``; NaN of what was not measured."""
    return [measured.get(name, np.nan) for name in MEASURES[content]]


def distributions_of(
    content: Content, parts: Iterable[tuple[int, NDArray[np.float64]]], is_kept: NDArray[np.bool_], recipe: CleanRecipe
) -> tuple[Distribution, ...]:
    """The distributions of the lengths, before and after, and of each measure that has a limit.

    Args:
        content: What documents are.
        parts: The measures of consecutive documents, float64 [documents, measures], and the number of the first one.
        is_kept: Of each document, bool [documents].
        recipe: The limits.
    """
    before, after = _LENGTHS[content]
    limits = {name: found for name in _OF_LIMITS[content] if (found := _limits_of(name, content, recipe))}
    names: Sequence[tuple[str, Literal["read", "kept", "tried"]]] = [
        (before, "read"),
        (after, "kept"),
        *((name, "tried") for name in limits),
    ]
    histograms = [_Histogram(name) for name, _ in names]
    for begin, values in parts:
        kept = is_kept[begin : begin + len(values)]
        for (name, of), histogram in zip(names, histograms, strict=True):
            column = values[:, MEASURES[content].index(name)]
            histogram.add(column[kept] if of == "kept" else column)
    return tuple(
        _distribution(name, of, limits.get(name, {}), histogram)
        for (name, of), histogram in zip(names, histograms, strict=True)
    )


def _limits_of(measure: str, content: Content, recipe: CleanRecipe) -> dict[str, float]:
    """The limits of a measure that are on."""
    options = recipe.filter if content == "text" else recipe.images
    if not options.enabled or (measure == LANGUAGE_PROB and not recipe.filter.languages):
        return {}
    limits = {f"{end}_{measure}": float(getattr(options, f"{end}_{measure}", 0)) for end in ("min", "max")}
    return {name: limit for name, limit in limits.items() if limit}


def _distribution(
    measure: str, of: Literal["read", "kept", "tried"], limits: dict[str, float], histogram: _Histogram
) -> Distribution:
    filled = np.flatnonzero(histogram.counts)
    begin, end = (int(filled[0]), int(filled[-1]) + 1) if len(filled) else (0, 0)
    return Distribution(
        measure=measure,
        of=of,
        documents=int(histogram.counts.sum()) + histogram.below + histogram.above,
        limits=limits,
        edges=tuple(histogram.edges[begin : end + 1].tolist()) if end else (),
        counts=tuple(histogram.counts[begin:end].tolist()),
        below=histogram.below,
        above=histogram.above,
    )
