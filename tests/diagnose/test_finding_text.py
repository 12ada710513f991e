"""The words of findings."""

from __future__ import annotations

import math
from typing import Any

import pytest

from unisono.diagnose import Finding
from unisono.diagnose.finding_text import confidence_word, finding_title, gain_text


def finding(**fields: Any) -> Finding:
    given = {"id": "X01", "title": "rank 1 is slow", "severity": "warning", "cost_frac": 0.1, "confidence": 0.9}
    return Finding(**{**given, "evidence": (), "advice": "", **fields})


@pytest.mark.parametrize(
    ("confidence", "word"),
    [
        (1.0, ""),
        (0.8, ""),
        (0.79, "likely"),
        (0.6, "likely"),
        (0.59, "possible"),
        (0.0, "possible"),
        (math.nan, "possible"),
    ],
)
def test_how_sure_a_rule_is(confidence: float, word: str) -> None:
    assert confidence_word(finding(confidence=confidence)) == word


@pytest.mark.parametrize(("gain", "text"), [(0.0, ""), (0.234, "would save 23% of a step"), (-0.1, ""), (math.nan, "")])
def test_what_settings_would_save(gain: float, text: str) -> None:
    assert gain_text(finding(expected_gain=gain)) == text


def test_ranks_are_named_once() -> None:
    assert finding_title(finding()) == finding_title(finding(ranks=(1,))) == "rank 1 is slow"
    assert finding_title(finding(title="memory is full", ranks=(0, 3))) == "memory is full, ranks 0, 3"
