"""Rules of attempts that failed or stand still. A hang costs all of the time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from unisono.diagnose.finding import Finding
from unisono.diagnose.run_facts import RunFacts

_RULES: Final = {
    "hang": ("HANG01", "a rank does not come to where the others wait"),
    "collective_mismatch": ("HANG02", "ranks issued different collectives"),
}
_WHERE: Final = "all stacks and last collectives are in logs/stacks-rank-*.json of the run"
_ADVICE: Final = {
    "hang": f"look at the place named above: a branch, a read or a lock that one rank alone waits in; {_WHERE}",
    "collective_mismatch": f"look at the code before that collective: a branch or a shape that depends on the rank; {_WHERE}",
}


def failed_attempt(facts: RunFacts) -> Iterator[Finding]:
    """HANG01, HANG02 and EXIT01: a rank that others wait for, mismatched collectives, and any other end of the last attempt."""
    ending = facts.ending
    if ending is None:
        return
    code, title = _RULES.get(ending.kind, ("EXIT01", f"the last attempt failed: {ending.words or ending.kind}"))
    yield Finding(
        id=code,
        title=title,
        severity="critical",
        cost_frac=1.0 if ending.kind in _RULES else 0.0,
        confidence=0.9,
        ranks=ending.ranks,
        evidence=(ending.sentence, *ending.evidence),
        advice=_ADVICE.get(ending.kind) or ending.advice or "repair the cause above, then start the same command again",
    )
