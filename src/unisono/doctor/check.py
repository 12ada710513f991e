"""What one check of a host says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from unisono.sanitize import redact_text

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
    """A check whose cure is ``failure``, else ``warning``; with neither the status is ``ok``. Credentials are
    taken out of its texts: variables and errors of others have them."""
    status: Status = "failure" if failure else "warning" if warning else "ok"
    cure = failure or warning
    return Check(code=code, title=title, status=status, evidence=redact_text(evidence), cure=redact_text(cure))
