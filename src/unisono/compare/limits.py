"""Limits that a comparison must keep, for CI: of a ratio or of a difference, from above or from below."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from unisono.compare.comparison import Comparison
from unisono.errors import ConfigError, Problem, nearest_name

Kind = Literal["max-ratio", "min-ratio", "max-delta", "min-delta"]
KINDS: Final[tuple[Kind, ...]] = ("max-ratio", "min-ratio", "max-delta", "min-delta")


@dataclass(frozen=True, slots=True)
class Limit:
    """``max-ratio perf/step_s=1.05``: the figure ``name`` of a run is at most 1.05 times that of the first."""

    kind: Kind
    name: str
    value: float

    def __str__(self) -> str:
        return f"--{self.kind} {self.name}={self.value:g}"


@dataclass(frozen=True, slots=True)
class Broken:
    """A limit that a run does not keep.

    Attributes:
        limit: The limit.
        run_dir: Folder of the run.
        found: Its ratio or difference; None where it cannot be judged.
        why: The same in words.
    """

    limit: Limit
    run_dir: str
    found: float | None
    why: str


def read_limits(kind: Kind, texts: Iterable[str]) -> list[Limit]:
    """The limits of ``NAME=NUMBER`` texts. Raises ConfigError."""
    limits: list[Limit] = []
    problems: list[Problem] = []
    for text in texts:
        name, _, written = text.partition("=")
        try:
            value = float(written)
        except ValueError:
            value = math.nan
        if name and math.isfinite(value):
            limits.append(Limit(kind, name.strip(), value))
            continue
        problems.append(
            Problem(
                given=f"--{kind} {text}",
                rule="a limit is the name of a figure and a number",
                consequence="nothing was compared",
                nearest=f"--{kind} perf/step_s={1.05 if kind.endswith('ratio') else 0.01}",
            )
        )
    if problems:
        raise ConfigError(*problems)
    return limits


def broken_limits(limits: Sequence[Limit], comparisons: Sequence[Comparison]) -> list[Broken]:
    """The limits that a run does not keep. A figure that one of two runs lacks, or that is no number, breaks its limit.

    Raises ConfigError for a name that no run has.
    """
    known = {row.name for comparison in comparisons for row in comparison.rows}
    problems = [
        Problem(
            given=str(limit),
            rule="a limit is of a figure that the runs have",
            consequence="the limit cannot be judged, so the comparison has no result",
            nearest=nearest_name(limit.name, known),
        )
        for limit in limits
        if limit.name not in known
    ]
    if problems:
        raise ConfigError(*problems)
    found = (_broken(limit, comparison) for comparison in comparisons for limit in limits)
    return [broken for broken in found if broken is not None]


def _broken(limit: Limit, comparison: Comparison) -> Broken | None:
    row = comparison.row(limit.name)
    run_dir = str(comparison.b.run_dir)
    is_ratio = limit.kind.endswith("ratio")
    found = None if row is None else row.ratio if is_ratio else row.delta
    if row is None or found is None or not math.isfinite(found):
        values = "" if row is None else f" ({_shown(row.a)} and {_shown(row.b)})"
        return Broken(limit, run_dir, None, f"{limit.name} has no {'ratio' if is_ratio else 'difference'}{values}")
    if found <= limit.value if limit.kind.startswith("max") else found >= limit.value:
        return None
    is_of_interval = is_ratio != (row.name == "train/loss")
    times, apart = f"is {found:.4g} times that", f"differs by {found:+.4g} from that"
    why = f"{limit.name} {times if is_ratio else apart} of {comparison.a.run_dir}"
    if row.interval is not None and is_of_interval:
        low, high = row.interval
        unsure = ", which includes the limit" if low <= limit.value <= high else ""
        why += f" (95 % interval {low:.4g} to {high:.4g}{unsure})"
    return Broken(limit, run_dir, found, why)


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
