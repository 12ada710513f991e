"""Patterns of module names, which a strategy file of a stranger may have."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest

from unisono.errors import PlanError
from unisono.plan.rules import match_modules


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("**." * 30 + "x", "a." * 200 + "b"),
        ("**.a." * 30 + "x", "a." * 200 + "b"),
        ("*a" * 100 + "b", "a" * 500),
        ("**.*a*a*a*a*a.**.*a*a*a*b", ("a" * 60 + ".") * 20 + "c"),
    ],
)
def test_patterns_do_not_go_back_without_end(pattern: str, name: str) -> None:
    begin = time.process_time()
    assert match_modules(pattern, [name]) == []
    assert time.process_time() - begin < 5


def test_patterns_match_as_before() -> None:
    """Against the regular expression that goes back through everything, on patterns and names of few letters."""
    draw = np.random.default_rng(0)
    wildcards = {"**.": r"(?:[^.]+\.)*", "*": r"[^.]+"}

    def part(letters: str) -> str:
        return "".join(draw.choice(list(letters), int(draw.integers(1, 4))))

    matched = 0
    for _ in range(5000):
        parts = [
            re.sub(r"\*+", "*", part("ab*")) if draw.random() < 0.6 else "**" for _ in range(int(draw.integers(0, 4)))
        ]
        pattern = ".".join([*parts, re.sub(r"\*+", "*", part("ab*"))])
        name = ".".join(part("ab") for _ in range(int(draw.integers(1, 6))))
        slow = "".join(wildcards.get(token, re.escape(token)) for token in re.split(r"(\*\*\.|\*)", pattern))
        assert bool(match_modules(pattern, [name])) == bool(re.fullmatch(slow, name)), (pattern, name)
        matched += bool(re.fullmatch(slow, name))
    assert matched > 100


def test_a_pattern_without_end() -> None:
    with pytest.raises(PlanError, match=r"a pattern of 4,000 characters, (\*a){20}…") as caught:
        match_modules("*a" * 2000, ["a"])
    assert "a pattern of module names has at most 1,000" in str(caught.value)
