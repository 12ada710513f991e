"""Hashes of shingles agree with the shingles themselves, which a regular expression finds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import words_of

from unisono.quality.duplicates import shingles
from unisono.quality.duplicates.shingles import shingle_hashes, words_at

TEXTS = st.lists(st.text(st.sampled_from("aZ9_ .\n-é\xa0¿ßЖع中日\u2014\u3002\u0e01😀\ud800"), max_size=40), max_size=8)


def expected(text: str, ngram: int) -> list[tuple[bytes, ...]]:
    words = words_of(text)
    return [tuple(words[at : at + ngram]) for at in range(max(1, len(words) - ngram + 1))] if words else []


def check(texts: list[str], ngram: int) -> None:
    hashes, offsets = shingle_hashes(texts, ngram)
    tuples = [shingle for text in texts for shingle in expected(text, ngram)]
    assert offsets.tolist() == np.cumsum([0, *(len(expected(text, ngram)) for text in texts)]).tolist()
    assert len(hashes) == len(tuples)
    pairs = set(zip(tuples, hashes.tolist(), strict=True))
    assert len(pairs) == len(set(tuples)) == len({value for _, value in pairs})


@given(TEXTS, st.integers(1, 4))
def test_equal_shingles_and_only_these_have_equal_hashes(texts: list[str], ngram: int) -> None:
    check(texts, ngram)


def test_case_punctuation_and_spaces_make_no_difference() -> None:
    first, second = "The quick — brown\tFOX, jumps!", "the quick brown fox\u3000jumps"
    hashes, offsets = shingle_hashes([first, second], 5)
    assert offsets.tolist() == [0, 1, 2]
    assert hashes[0] == hashes[1]


def test_long_words_are_cut() -> None:
    check(["a" * 64, "a" * 65, "a" * 200, "b" + "a" * 200, "é" * 100], 1)


def test_words_of_thue_and_morse_do_not_collide() -> None:
    """Polynomials mod 2^64 have one value for such a string and its complement, of 2^11 bytes and more."""
    string = "a"
    for _ in range(12):
        string += string.translate(str.maketrans("ab", "ba"))
    (first, second), _ = shingle_hashes([string[:64], string[:64].translate(str.maketrans("ab", "ba"))], 1)
    assert first != second
    whole, offsets = shingle_hashes([string, string.translate(str.maketrans("ab", "ba"))], len(string) // 64)
    assert offsets.tolist() == [0, 1, 2]
    assert whole[0] != whole[1]


def test_hashes_do_not_depend_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"text {number} " + "word " * number for number in range(50)]
    whole, offsets = shingle_hashes(texts, 3)
    monkeypatch.setattr(shingles, "_BLOCK_BYTES", 300)
    parts, same = shingle_hashes(texts, 3)
    np.testing.assert_array_equal(whole, parts)
    np.testing.assert_array_equal(offsets, same)


LARGE = [
    " ".join(f"word{number}" for number in range(300)),
    "short",
    "中日😀\u3002é a-b " * 60,
    "a" * 777 + " b " + "é" * 400,
    "\u2014" * 500 + "one" + " " * 700 + "two",
    " " * 900,
]


@pytest.mark.parametrize("block", [99, 100, 101, 102, 103, 256])
@pytest.mark.parametrize("ngram", [1, 3, 13])
def test_a_document_larger_than_a_block_has_all_shingles(
    block: int, ngram: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shingles, "_BLOCK_BYTES", block)
    check(LARGE, ngram)


def test_words_of_a_shingle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shingles, "_BLOCK_BYTES", 100)
    for text in LARGE:
        words = [word.decode(errors="replace") for word in words_of(text)]
        assert words_at(text, 0, len(words)) == words
        assert [words_at(text, begin, 5) for begin in range(0, len(words), 9)] == [
            words[begin : begin + 5] for begin in range(0, len(words), 9)
        ]


def test_no_documents() -> None:
    hashes, offsets = shingle_hashes([], 5)
    assert len(hashes) == 0
    assert offsets.tolist() == [0]
    hashes, offsets = shingle_hashes(["", "…", "!"], 5)
    assert len(hashes) == 0
    assert offsets.tolist() == [0, 0, 0, 0]
