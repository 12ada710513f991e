"""The error of a job over a data set that refuses its input before it writes anything."""

from __future__ import annotations

from unisono.errors import DataError


def refused(given: str, rule: str, nearest: str) -> DataError:
    """The error: what was given, the rule that it breaks, and the nearest thing that works. Nothing was written."""
    return DataError(given=given, rule=rule, consequence="nothing was written", nearest=nearest)
