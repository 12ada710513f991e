"""Text for classification: augmented word by word, then encoded to a fixed length.

Implements three of the four operations of EDA (Wei & Zou 2019): synonyms, swaps and deletions, without random insertion. A word
is a run of letters, digits and underscores, with single apostrophes or hyphens inside (``don't``, ``well-known``). The text
between words is unchanged. In scripts without spaces a "word" is a whole phrase: use no augmentation there.

All randomness comes from the given generator. A loader keys it by sample and occurrence, independent of rank and resume.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from unisono.data.dataset import Batch
from unisono.data.tokens.tokenizer import Tokenizer
from unisono.errors import DataError, Problem
from unisono.storage.limits import MAX_JSON_BYTES, read_json, read_limited

_WORD = re.compile(r"\w+(?:['’-]\w+)*")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextAugment:
    """Random edits of a text of n words: ``augment(text, rng)`` replaces, then swaps, then deletes words.

    A text without words is unchanged.

    Attributes:
        replace: Rate of synonyms: max(1, ⌊replace · n⌋) words, or fewer, are replaced by one from ``synonyms``. 0
            replaces none.
        swap: Rate of swaps: max(1, ⌊swap · n⌋) times two words are exchanged. 0 swaps none.
        delete: Probability that a word is deleted, with the text before it; at least one word remains.
        synonyms: Synonyms by word, both as ``load_synonyms`` returns them. Words are looked up in lower case, and a
            capital first letter is kept. Words without an entry are not replaced.
        stopwords: Words in lower case that are not replaced.

    Raises:
        DataError: A rate is outside [0, 1], or a setting would have no effect.

    Source:
        EDA: Wei and Zou 2019, arXiv:1901.11196, without random insertion.
    """

    replace: float = 0.0
    swap: float = 0.0
    delete: float = 0.0
    synonyms: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    stopwords: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        rates = {"replace": self.replace, "swap": self.swap, "delete": self.delete}
        problems = [_bad_rate(name, rate) for name, rate in rates.items() if not 0 <= rate <= 1]
        if not problems and not any(rates.values()):
            problems.append(
                Problem(
                    given="a TextAugment with replace, swap and delete of 0",
                    rule="an augmentation changes something",
                    consequence="every text would stay as it is",
                    nearest="rates of 0.1, or no augmentation",
                )
            )
        if bool(self.synonyms) != (self.replace != 0) or (self.stopwords and not self.synonyms):
            problems.append(
                Problem(
                    given=f"replace = {self.replace} with {len(self.synonyms)} words that have synonyms and "
                    f"{len(self.stopwords)} stopwords",
                    rule="replace, synonyms and, optionally, stopwords act together",
                    consequence="the settings would have no effect",
                    nearest='synonyms=load_synonyms("synonyms.tsv") and replace=0.1, or none of them',
                )
            )
        if problems:
            raise DataError(*problems)

    def __call__(self, text: str, rng: np.random.Generator) -> str:
        """The augmented text, which is empty only if ``text`` is."""
        matches = list(_WORD.finditer(text))
        if not matches:
            return text
        words = [match.group() for match in matches]
        ends = [match.end() for match in matches]
        before = [text[end : match.start()] for end, match in zip([0, *ends[:-1]], matches, strict=True)]
        if self.replace:
            self._put_synonyms(words, rng)
        if self.swap and len(words) > 1:
            for _ in range(_times(self.swap, len(words))):
                one, other = rng.choice(len(words), 2, replace=False)
                words[one], words[other] = words[other], words[one]
        remaining = range(len(words))
        if self.delete:
            survives = rng.random(len(words)) >= self.delete
            remaining = np.flatnonzero(survives).tolist() or [int(rng.integers(len(words)))]
        first, *others = remaining
        return before[0] + words[first] + "".join(before[i] + words[i] for i in others) + text[ends[-1] :]

    def _put_synonyms(self, words: list[str], rng: np.random.Generator) -> None:
        keys = [word.lower() for word in words]
        eligible = [i for i, key in enumerate(keys) if self.synonyms.get(key) and key not in self.stopwords]
        chosen = rng.permutation(len(eligible))[: _times(self.replace, len(words))]
        for i in (eligible[place] for place in chosen.tolist()):
            synonyms = self.synonyms[keys[i]]
            synonym = synonyms[int(rng.integers(len(synonyms)))]
            words[i] = synonym[:1].upper() + synonym[1:] if words[i][:1].isupper() else synonym


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTransform:
    """A loader's transform for texts: ``text``, uint8 [bytes] of UTF-8, becomes ``tokens`` and ``attention_mask``.

    ``tokens`` int64 [length]: the text's first ``length`` token ids, padded with the end-of-document id. ``attention_mask``
    int64 [length]: 1 at ids of the text, 0 at padding. Other entries of the sample are unchanged.

    Attributes:
        tokenizer: Encodes the text.
        length: Tokens of every sample, at least 1.
        augment: Random edits of the text before it is encoded. By default none.

    Raises:
        DataError: ``length`` is below 1, or a sample has no text.
    """

    tokenizer: Tokenizer
    length: int
    augment: TextAugment | None = None

    def __post_init__(self) -> None:
        if self.length < 1:
            raise DataError(
                given=f"a TextTransform of length {self.length}",
                rule="a text is encoded to at least one token",
                consequence="no sample could be made",
                nearest="length 128",
            )

    def __call__(self, sample: Batch, rng: np.random.Generator) -> Batch:
        text = _text_of(sample)
        if self.augment is not None:
            text = self.augment(text, rng)
        ids = self.tokenizer.encode([text])[0].ids[: self.length]
        tokens = np.full(self.length, self.tokenizer.end_of_document, np.int64)
        tokens[: ids.size] = ids
        rest = {name: value for name, value in sample.items() if name != "text"}
        return {**rest, "tokens": tokens, "attention_mask": (np.arange(self.length) < ids.size).astype(np.int64)}


def load_synonyms(path: Path | str) -> dict[str, list[str]]:
    """Load a lexicon of synonyms for ``TextAugment`` from a file in UTF-8.

    Words are lower-cased and repeated entries merged. A word is removed from its own synonyms, and a word left without
    synonyms is removed.

    Args:
        path: ``.json``: an object of lists, ``{"big": ["large", "huge"]}``. ``.tsv``: one line per word, the word and
            its synonyms separated by tabs; empty lines are skipped.

    Returns:
        Synonyms by lower-case word, in the order of the file.

    Raises:
        DataError: The file cannot be read, has another suffix or is invalid; the error names the file, and for ``.tsv``
            the line.
    """
    path = Path(path)
    try:
        if path.suffix == ".json":
            words: dict[str, list[str]] = read_json(path, msgspec.json.Decoder(dict[str, list[str]]).decode)
            rows = list(words.items())
        elif path.suffix == ".tsv":
            text = read_limited(path, MAX_JSON_BYTES).decode()  # as large as the same words in JSON may be
            rows = [_row(path, number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        else:
            raise _no_lexicon(f"{path}: a lexicon with the suffix {path.suffix!r}")
    except OSError as error:
        raise _no_lexicon(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise _no_lexicon(f"{path}: {error}") from error
    lexicon: dict[str, list[str]] = {}
    for word, synonyms in rows:
        merged = lexicon.setdefault(word.lower(), [])
        merged += [new for new in dict.fromkeys(synonyms) if new.lower() != word.lower() and new not in merged]
    return {word: synonyms for word, synonyms in lexicon.items() if synonyms}


def _row(path: Path, number: int, line: str) -> tuple[str, list[str]]:
    word, *synonyms = (part.strip() for part in line.split("\t"))
    if not (word and synonyms and all(synonyms)):
        raise _no_lexicon(f"{path}: line {number} is {line[:60]!r}")
    return word, synonyms


def _times(rate: float, words: int) -> int:
    return max(1, int(rate * words))


def _text_of(sample: Batch) -> str:
    array: NDArray[Any] | None = sample.get("text")
    if array is None or array.dtype != np.uint8 or array.ndim != 1:
        given = f"a sample with {', '.join(f'{name} {a.dtype}{list(a.shape)}' for name, a in sample.items())}"
        raise _no_text(given)
    try:
        return array.tobytes().decode()
    except UnicodeDecodeError as error:
        raise _no_text(f"a text of {array.size} bytes of which byte {error.start} is not UTF-8") from error


def _no_text(given: str) -> DataError:
    return DataError(
        given=given,
        rule="a sample has its text under 'text' as uint8 [bytes] of UTF-8",
        consequence="it cannot be encoded",
        nearest='"text": np.frombuffer(text.encode(), np.uint8)',
    )


def _bad_rate(name: str, rate: float) -> Problem:
    return Problem(
        given=f"{name} = {rate}",
        rule="rates are between 0 and 1",
        consequence="no text can be augmented",
        nearest=f"{name} = 0.1, the value recommended by Wei & Zou",
    )


def _no_lexicon(given: str) -> DataError:
    return DataError(
        given=given,
        rule="a lexicon is .json ({word: [synonym, …]}) or .tsv (word, tab, synonym, tab, …), in UTF-8",
        consequence="no word has a synonym",
        nearest="repair that place; a word without synonyms needs no line",
    )
