"""The steps of a recipe that look at one document at a time: normalize, filter, mask, decontaminate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from unisono.quality.cleaning.benchmarks import shares_ngram
from unisono.quality.cleaning.image_checks import CHECKS_FORMAT, UNREADABLE
from unisono.quality.cleaning.image_checks import LIMITS as IMAGE_LIMITS
from unisono.quality.cleaning.languages import LANGUAGE_LIMITS, MAX_CODE, failed_language
from unisono.quality.cleaning.measures import CHARS, LANGUAGE_PROB, MEASURES, NEW_CHARS, row_of_measures
from unisono.quality.cleaning.normalization import normalized
from unisono.quality.cleaning.personal_data import mask_personal_data
from unisono.quality.cleaning.text_quality import LIMITS, check_text
from unisono.quality.options import MASK_KINDS, CleanRecipe

KEPT: Final = ""
CONTAMINATED: Final = "decontaminate"
MISNAMED: Final = f"images.{CHECKS_FORMAT}"
REASONS: Final = (
    *(KEPT, UNREADABLE),
    *(f"filter.{name}" for name in (*LIMITS, *LANGUAGE_LIMITS)),
    CONTAMINATED,
    *(f"images.{name}" for name in IMAGE_LIMITS),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CleanedDocuments:
    """Documents after the steps.

    Attributes:
        texts: Their texts in UTF-8; of a dropped document the text it was dropped with.
        reasons: Numbers in ``REASONS`` of the steps that dropped them, uint8 [documents]; 0 of those that are kept.
        values: What the limit that dropped them was compared with; 0 of all others, float64 [documents].
        languages: Codes of their languages, bytes [documents]; empty where none was looked for.
        masked: How many pieces of personal data of each of ``MASK_KINDS`` were replaced in them, int64 [documents, kinds].
        measures: Of ``measures.MEASURES``, float64 [documents, measures]; NaN of what was not measured.
    """

    texts: list[bytes]
    reasons: NDArray[np.uint8]
    values: NDArray[np.float64]
    languages: NDArray[np.bytes_]
    masked: NDArray[np.int64]
    measures: NDArray[np.float64]


def clean_documents(
    texts: Sequence[bytes | None], recipe: CleanRecipe, benchmark_hashes: NDArray[np.uint64]
) -> CleanedDocuments:
    """Take the steps of a recipe.

    Args:
        texts: Documents in UTF-8, in which lone surrogates may stand; None of one that cannot be read.
        recipe: The steps; near-duplicates are not its concern.
        benchmark_hashes: Sorted hashes of the benchmarks' n-grams.

    Raises:
        ExtraError: The recipe repairs encodings or has languages, and the package for it is not installed.
    """
    cleaned: list[bytes] = []
    reasons = np.zeros(len(texts), np.uint8)
    values = np.zeros(len(texts))
    languages = np.zeros(len(texts), f"S{MAX_CODE}")
    masked = np.zeros((len(texts), len(MASK_KINDS)), np.int64)
    measures = np.full((len(texts), len(MEASURES["text"])), np.nan, np.float64)
    for number, raw in enumerate(texts):
        if raw is None:
            reasons[number] = REASONS.index(UNREADABLE)
            cleaned.append(b"")
            continue
        before = raw.decode("utf-8", "surrogatepass")
        text = normalized(before, recipe.normalize)
        measured: dict[str, float] = {CHARS: len(before)}
        failed = ""
        if recipe.filter.enabled:
            checked = check_text(text, recipe.filter)
            failed, values[number] = checked.failed, checked.value
            measured |= checked.measured
            if not failed and recipe.filter.languages:
                failed, languages[number], score = failed_language(text, recipe.filter)
                values[number] = score if failed else 0.0
                if failed != "languages":
                    measured[LANGUAGE_PROB] = score
        if failed:
            reasons[number] = REASONS.index(f"filter.{failed}")
        elif recipe.mask.kinds:
            text, counts = mask_personal_data(text, recipe.mask.kinds)
            masked[number] = [counts.get(kind, 0) for kind in MASK_KINDS]
        cleaned.append(raw if text == before else text.encode("utf-8", "surrogatepass"))
        measures[number] = row_of_measures({**measured, NEW_CHARS: len(text)}, "text")
    if len(benchmark_hashes):
        new_texts = [text.decode("utf-8", "surrogatepass") for text in cleaned]
        is_quoting = shares_ngram(new_texts, recipe.decontaminate.ngram, benchmark_hashes)
        reasons[is_quoting & (reasons == 0)] = REASONS.index(CONTAMINATED)
    return CleanedDocuments(
        texts=cleaned, reasons=reasons, values=values, languages=languages, masked=masked, measures=measures
    )
