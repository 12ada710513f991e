"""The language of text, found by py3langid's model, which the package brings: nothing is downloaded.

py3langid (Barbaresi) is naive Bayes over sequences of bytes, after langid.py (Lui and Baldwin 2012).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from typing import Any, Final

from unisono.errors import ConfigError, missing_extra
from unisono.quality.options import FilterOptions
from unisono.sanitize import listed, quoted

LANGUAGE_LIMITS: Final = ("languages", "min_language_prob")
MAX_CODE: Final = 3  # characters
_READ: Final = 4000  # characters of a document, which is enough: the model reads two megabytes a second
_DIGITS: Final = 4  # of a probability: the last bits depend on the processor


def failed_language(text: str, options: FilterOptions) -> tuple[str, str, float]:
    """(limit that the language of text fails, or empty; code of the language; its probability)."""
    language, score = find_language(text)
    if language not in options.languages:
        return "languages", language, score
    return "min_language_prob" if score < options.min_language_prob else "", language, score


def find_language(text: str) -> tuple[str, float]:
    """(ISO 639 code, probability) of the language of the first 4,000 characters.

    Raises:
        ExtraError: py3langid is not installed.
    """
    language, score = _identifier().classify(text[:_READ])
    return language, round(score, _DIGITS)


def language_version(options: FilterOptions) -> str:
    """Name and version of the model that finds languages; empty if none are looked for.

    Raises:
        ConfigError: A code is not that of a language the model knows.
        ExtraError: py3langid is not installed.
    """
    if not (options.enabled and options.languages):
        return ""
    known: Sequence[str] = sorted(_identifier().labels)
    unknown = [code for code in options.languages if code not in known]
    if unknown:
        raise ConfigError(
            given=f"filter.languages with {listed(map(quoted, unknown))}",
            rule="languages are the ISO 639 codes that the model knows, as 'en', or 'zxx' for no language",
            consequence="nothing was written",
            nearest=_nearest(unknown, known),
        )
    return f"py3langid {version('py3langid')}"


def _nearest(codes: Sequence[str], known: Sequence[str]) -> str:
    """The codes without country or capitals, as 'zh' for 'zh-CN'; a code of two letters is near too many others to guess more."""
    bases = {code: code.lower().replace("_", "-").partition("-")[0] for code in codes}
    if all(base in known for base in bases.values()):
        return ", ".join(f"{base!r} for {quoted(code)}" for code, base in bases.items())
    return "one of: " + listed(known, 2000)


@cache
def _identifier() -> Any:
    try:
        langid = importlib.import_module("py3langid.langid")
    except ImportError as error:
        raise missing_extra("quality", "py3langid", "the filter by language") from error
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
