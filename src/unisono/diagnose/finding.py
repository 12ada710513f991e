"""The finding of a diagnosis, and the type of rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from unisono.diagnose.run_facts import RunFacts

Severity = Literal["warning", "critical"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One cause that makes a run slow, wrong or fragile.

    Attributes:
        id: Code of the rule, such as ``DATA01``.
        title: The cause in a few words.
        severity: ``warning`` or ``critical``, by the thresholds of the rule.
        cost_frac: Share of the time of a step that the cause costs, from 0 to 1; 0 where it costs no time.
        confidence: How sure the rule is that this is the cause, from 0 to 1.
        ranks: The ranks that cause it, ascending; empty where all ranks are alike.
        evidence: The figures that it follows from, a sentence fragment each.
        advice: What to do.
        patch: Options to change, by dotted name; empty where none helps by itself.
        expected_gain: Share of the time of a step that the patch saves, from 0 to 1; 0 where that is not predicted.
    """

    id: str
    title: str
    severity: Severity
    cost_frac: float
    confidence: float
    ranks: tuple[int, ...] = ()
    evidence: tuple[str, ...]
    advice: str
    patch: Mapping[str, Any] = field(default_factory=dict[str, Any])
    expected_gain: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The finding as JSON types."""
        return {**asdict(self), "ranks": list(self.ranks), "evidence": list(self.evidence), "patch": dict(self.patch)}


# A rule yields its findings of a run, in any order, and none for a healthy run. Another package adds rules by entry points of the
# group ``unisono.rules``.
Rule = Callable[[RunFacts], Iterable[Finding]]
