"""Why a layout is not the one that a search chooses. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from unisono.observe.run_summary import format_gib
from unisono.planner.simulate import Prediction

_SAME = 1e-6  # part of a step time


def why_not(best: Prediction, other: Prediction, limit_bytes: float) -> str:
    """In a few words: how much more memory or time ``other`` takes, and the part in which most of it is."""
    if other.needed_bytes > limit_bytes:
        counted = {name: size for name, size in other.memory.items() if name != "allocator"}
        over = format_gib(other.needed_bytes - limit_bytes)
        return f"does not fit: {format_gib(other.needed_bytes)}, {over} too much, mostly {_largest(counted)}"
    if other.step_s <= best.step_s * (1 + _SAME):
        return "as fast, and not simpler"
    grown = {name: seconds - best.parts_s[name] for name, seconds in other.parts_s.items()}
    return f"{other.step_s / best.step_s - 1:+.1%}, mostly {_largest(grown)}"


def _largest(parts: Mapping[str, float]) -> str:
    return max(parts, key=lambda name: parts[name]).replace("_", " ")
