"""Text in one form: what changes, what stays, and time in proportion to the text."""

from __future__ import annotations

import sys
import unicodedata
from itertools import groupby
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from unisono.errors import ExtraError
from unisono.quality.cleaning import normalization
from unisono.quality.cleaning.normalization import normalize_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\r\nb\rc\u2028d", "a\nb\nc\nd"),
        ("e\u0301", "\u00e9"),
        ("a\xa0b\u3000c", "a b c"),
        ("a\x00b\u200bc\ufeffd\xade", "abcde"),
        ("    x = 1  \n\ty\t \n", "    x = 1\n\ty"),
        ("a\n\n\n\nb\n", "a\n\nb"),
        ("\n \n  a", "  a"),
        ("a\ud800b", "ab"),
        ("‘a’—b…", "‘a’—b…"),
        ("نمی\u200cخواهم 👩\u200d👩", "نمی\u200cخواهم 👩\u200d👩"),
        ("", ""),
    ],
)
def test_forms(text: str, expected: str) -> None:
    assert normalize_text(text) == expected


@given(st.text(st.one_of(st.characters(), st.sampled_from("\n\r \t\u0301\u0316\u200b\xa0\x85")), max_size=60))
@example("e" + "\u0301\u0316" * 40)
@example("\u200b\n \u200b\n\n\u2028")
@example("\u0f40" + "\u0f73" * 40)
@example("\u0958" + "\u0301" * 30)
def test_once_is_enough(text: str) -> None:
    once = normalize_text(text)
    assert normalize_text(once) == once
    assert unicodedata.is_normalized("NFC", once)
    assert "\n\n\n" not in once


def test_many_marks_take_no_quadratic_time() -> None:
    """A million marks in the wrong order would be sorted by insertion: this test would not end."""
    assert len(normalize_text("e" + "\u0301\u0316" * 500_000)) <= 31
    assert normalize_text(" " * 1_000_000 + "a") == " " * 1_000_000 + "a"


@pytest.mark.parametrize("mark", ["\u0301", "\u0344", "\u0f73", "\u0f75", "\u0f81", "\u0f73\u0301"])
def test_few_marks_are_sorted(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of characters that become marks only when they are decomposed."""
    longest: list[int] = []
    normalize = unicodedata.normalize

    def counted(form: str, text: str) -> str:
        classes = (unicodedata.combining(part) for character in text for part in normalize("NFD", character))
        longest.append(max(sum(1 for _ in run) for is_mark, run in groupby(classes, bool) if is_mark))
        return normalize(form, text)

    monkeypatch.setattr(normalization, "unicodedata", SimpleNamespace(**{**vars(unicodedata), "normalize": counted}))
    once = normalize_text(f"a{mark * 1_000}b")
    assert 30 <= max(longest) <= 60
    assert len(once) <= 32
    assert once[0] == normalize("NFC", f"a{mark}")[0]
    assert once.endswith("b")


def test_wrongly_decoded_text_is_mended() -> None:
    pytest.importorskip("ftfy")
    broken = "schöne Grüße, naïve café".encode().decode("latin-1")
    assert normalize_text(broken, repairs_encoding=True) == "schöne Grüße, naïve café"
    assert normalize_text(broken) != "schöne Grüße, naïve café"


def test_mending_needs_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    normalization._fix_encoding.cache_clear()
    monkeypatch.setitem(sys.modules, "ftfy", None)
    with pytest.raises(ExtraError, match=r"pip install 'unisono\[quality\]'"):
        normalize_text("a", repairs_encoding=True)
