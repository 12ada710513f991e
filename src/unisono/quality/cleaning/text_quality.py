"""Rules by which text is kept or dropped: length, words, symbols, repetition.

After Gopher (Rae et al. 2021, appendix A.1.1).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Final

from unisono.quality.cleaning.languages import LANGUAGE_LIMITS
from unisono.quality.options import FilterOptions

LIMITS: Final = tuple(field.name for field in fields(FilterOptions) if field.name not in ("enabled", *LANGUAGE_LIMITS))
MEASURES: Final = tuple(dict.fromkeys(name.partition("_")[2] for name in LIMITS))  # ``words`` of ``min_words``
_SYMBOL: Final = re.compile("#|\\.\\.\\.|…")
_BULLETS: Final = ("-", "*", "•", "‣", "◦", "·")
_ELLIPSES: Final = ("...", "…")
# Characters of scripts without spaces, each a word with its marks: Thai, Lao, Tibetan, Burmese, Khmer, kana, Bopomofo, Chinese.
_UNSPACED: Final = (
    r"\u0e01-\u0e30\u0e32\u0e33\u0e40-\u0e46\u0e81-\u0eb0\u0eb2\u0eb3\u0ebd-\u0ec6\u0edc-\u0edf\u0f40-\u0f6c\u1000-\u102a\u103f"
    r"\u1780-\u17b3\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u312f\u31f0-\u31ff\u3400-\u9fff\uf900-\ufaff"
    r"\uff66-\uff9f\U00020000-\U0003ffff"
)
_MARKS: Final = (
    r"\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u0eb1\u0eb4-\u0ebc\u0ec8-\u0ece"
    r"\u0f71-\u0fbc\u102b-\u103e\u17b4-\u17d3\u3099\u309a"
)
_PUNCTUATION: Final = (  # which separates words in texts with such characters
    r"\u0f0b-\u0f14\u104a\u104b\u17d4-\u17da\u3001-\u3003\u3008-\u3020\u30fb"
    r"\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65"
)
_IS_UNSPACED: Final = re.compile(f"[{_UNSPACED}]")
_WORD: Final = re.compile(r"\S+")
_UNSPACED_WORD: Final = re.compile(rf"[{_UNSPACED}][{_MARKS}]*|[^\s{_UNSPACED}{_PUNCTUATION}]+")
_HUGE: Final = 1 << 20  # characters
_MAX_WORDS_COUNTED: Final = 200_000  # of one document, for what is counted over words


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedText:
    """A text after the limits.

    Attributes:
        failed: The first limit that it fails; empty if it passes all.
        value: What that limit was compared with.
        measured: What it and the limits before it were compared with, such as ``words`` of ``min_words`` and ``max_words``.
    """

    failed: str = ""
    value: float = 0.0
    measured: dict[str, float]


def check_text(text: str, options: FilterOptions) -> CheckedText:
    """Try the limits in the order of ``FilterOptions``, those that cost little first, until text fails one."""
    measured: dict[str, float] = {}
    for measure, value in _measures(text, options):
        measured[measure] = value
        least: float = getattr(options, f"min_{measure}", 0)
        most: float = getattr(options, f"max_{measure}", 0)
        if least and value < least:
            return CheckedText(failed=f"min_{measure}", value=value, measured=measured)
        if most and value > most:
            return CheckedText(failed=f"max_{measure}", value=value, measured=measured)
    return CheckedText(measured=measured)


def _measures(text: str, options: FilterOptions) -> Iterator[tuple[str, float]]:
    """(one of ``MEASURES``, value), without those that would be of no use: all others need at least one word.

    The mean length of words is not measured where most words are characters of scripts without spaces.
    """
    pattern = _UNSPACED_WORD if _IS_UNSPACED.search(text) else _WORD
    # a list of the words of a huge text takes many times its memory
    num_words = sum(1 for _ in pattern.finditer(text)) if len(text) > _HUGE else -1
    words = [] if num_words > options.max_words > 0 else pattern.findall(text)
    num_words = max(num_words, len(words))
    yield "words", num_words
    if not words:
        return
    spaced = [word for word in words if not _IS_UNSPACED.match(word)]
    if 2 * len(spaced) >= len(words):
        yield "mean_word_chars", sum(map(len, spaced)) / len(spaced)
    yield "symbol_ratio", len(_SYMBOL.findall(text)) / len(words)
    lines = [line for line in map(str.strip, text.split("\n")) if line]
    yield "bullet_line_frac", sum(line.startswith(_BULLETS) for line in lines) / len(lines)
    yield "ellipsis_line_frac", sum(line.endswith(_ELLIPSES) for line in lines) / len(lines)
    yield "alphabetic_word_frac", sum(map(_has_letter, words)) / len(words)
    yield "duplicate_line_frac", 1 - len(set(lines)) / len(lines)
    counted = words[:_MAX_WORDS_COUNTED]
    if options.max_top_bigram_frac:
        yield "top_bigram_frac", _top_pair(counted)
    if options.max_duplicate_5gram_frac:
        yield "duplicate_5gram_frac", _in_repeated(counted, 5)


def _has_letter(word: str) -> bool:
    return word.isalpha() or any(map(str.isalpha, word))


def _top_pair(words: Sequence[str]) -> float:
    """Share of characters covered by the repeated word pair that covers the most, 0 if no pair occurs twice."""
    covered = (count * sum(map(len, pair)) for pair, count in Counter(pairwise(words)).items() if count > 1)
    return min(1.0, max(covered, default=0) / sum(map(len, words)))


def _in_repeated(words: Sequence[str], size: int) -> float:
    """Share of characters in a sequence of ``size`` words that occurred before; each character counts once."""
    seen: set[tuple[str, ...]] = set()
    repeated = end = 0
    for at, ngram in enumerate(zip(*(words[begin:] for begin in range(size)), strict=False)):
        if ngram in seen:
            repeated += sum(map(len, words[max(at, end) : at + size]))
            end = at + size
        seen.add(ngram)
    return repeated / sum(map(len, words))
