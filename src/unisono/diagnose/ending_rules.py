"""Rules of attempts that failed or stand still. A hang costs all of the time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from unisono.diagnose.finding import Finding
from unisono.diagnose.run_facts import RunFacts

_WHERE: Final = "all stacks and last collectives are in logs/stacks-rank-*.json of the run"


def missing_rank(facts: RunFacts) -> Iterator[Finding]:
    """HANG01: a rank does not enter the collective in which others wait, or no step ends."""
    ending = facts.ending
    if ending is not None and ending.kind == "hang":
        yield Finding(
            id="HANG01",
            title="a rank does not enter the collective in which the others wait",
            severity="critical",
            cost_frac=1.0,
            confidence=0.9,
            ranks=ending.ranks,
            evidence=(ending.sentence, *ending.evidence),
            advice=f"look at the place named above: a branch, a read or a lock that one rank alone waits in; {_WHERE}",
        )


def mismatched_collectives(facts: RunFacts) -> Iterator[Finding]:
    """HANG02: ranks issued different collectives, or one skipped one."""
    ending = facts.ending
    if ending is not None and ending.kind == "collective_mismatch":
        yield Finding(
            id="HANG02",
            title="ranks issued different collectives",
            severity="critical",
            cost_frac=1.0,
            confidence=0.95,
            ranks=ending.ranks,
            evidence=(ending.sentence, *ending.evidence),
            advice=f"look at the code before that collective: a branch or a shape that depends on the rank; {_WHERE}",
        )


def failed_attempt(facts: RunFacts) -> Iterator[Finding]:
    """EXIT01: the last attempt failed of another cause: the one that the launcher recorded, else the error of a rank."""
    ending = facts.ending
    kinds_of_other_rules = {"hang", "collective_mismatch"}
    if any(rank.corruptions for rank in facts.ranks):
        kinds_of_other_rules.add("corruption")  # SDC01
    if ending is not None and ending.kind not in kinds_of_other_rules:
        yield Finding(
            id="EXIT01",
            title=f"the last attempt failed: {ending.words or ending.kind}",
            severity="critical",
            cost_frac=0.0,
            confidence=0.9,
            ranks=ending.ranks,
            evidence=(ending.sentence, *ending.evidence),
            advice=ending.advice or "repair the cause above, then start the same command again",
            patch=ending.patch,
        )
