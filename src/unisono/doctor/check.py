"""What one check of a host says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warning", "failure"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """The result of one check.

    Attributes:
        code: Code of the check, such as ``HOST01``.
        title: What is checked.
        status: ``ok``, ``warning`` (slow or fragile) or ``failure`` (a run will not work).
        evidence: What was seen.
        cure: What to do; empty if the status is ``ok``.
    """

    code: str
    title: str
    status: Status
    evidence: str
    cure: str = ""

    def to_json(self) -> dict[str, Any]:
        """The check as JSON types."""
        return asdict(self)


def judged(code: str, title: str, evidence: str, *, warning: str = "", failure: str = "") -> Check:
    """A check whose cure is ``failure``, else ``warning``; with neither the status is ``ok``."""
    status: Status = "failure" if failure else "warning" if warning else "ok"
    return Check(code=code, title=title, status=status, evidence=evidence, cure=failure or warning)
