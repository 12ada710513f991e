"""How a finding is put into words, on the terminal and in the report."""

from __future__ import annotations

from typing import Final

from unisono.diagnose.figures import named_ranks
from unisono.diagnose.finding import Finding

_SURE: Final = 0.8
_LIKELY: Final = 0.6


def confidence_word(finding: Finding) -> str:
    """``likely`` or ``possible``, as the rule's confidence is below 0.8 or below 0.6; empty where it is higher."""
    if finding.confidence >= _SURE:
        return ""
    return "likely" if finding.confidence >= _LIKELY else "possible"


def finding_title(finding: Finding) -> str:
    """The title, and the ranks where it does not name them."""
    ranks = named_ranks(finding.ranks) if finding.ranks else ""
    return f"{finding.title}, {ranks}" if ranks not in finding.title else finding.title


def gain_text(finding: Finding) -> str:
    """What the settings of the finding are expected to save; empty where that is not predicted."""
    return f"would save {finding.expected_gain:.0%} of a step" if finding.expected_gain > 0 else ""
