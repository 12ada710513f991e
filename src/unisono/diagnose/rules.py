"""All rules of a diagnosis, and the entry point that runs them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from typing import Any, Final

import numpy as np

from unisono.diagnose import (
    ending_rules,
    link_rules,
    memory_rules,
    profile_rules,
    server_rules,
    tap_rules,
    time_rules,
    training_rules,
    utilization_rules,
)
from unisono.diagnose.finding import Finding, Rule
from unisono.diagnose.plugged_findings import checked_finding, make_read_only
from unisono.diagnose.run_facts import RunFacts

RULE_GROUP: Final = "unisono.rules"
RULES: Final[Sequence[Rule]] = (
    ending_rules.missing_rank,
    ending_rules.mismatched_collectives,
    ending_rules.failed_attempt,
    training_rules.silent_corruption,
    time_rules.data_bound,
    time_rules.copy_bound,
    time_rules.exposed_communication,
    link_rules.slow_link,
    server_rules.server_bound,
    time_rules.pipeline_bubble,
    time_rules.stragglers,
    time_rules.own_slowdown,
    time_rules.garbage_collection,
    time_rules.save_stall,
    memory_rules.near_out_of_memory,
    memory_rules.fragmentation,
    memory_rules.memory_creep,
    training_rules.non_finite_steps,
    training_rules.loss_spikes,
    training_rules.exploding_gradients,
    training_rules.dead_layers,
    training_rules.overfitting,
    training_rules.underfitting,
    training_rules.non_finite_evaluations,
    tap_rules.dead_units,
    tap_rules.update_ratio,
    server_rules.stale_updates,
    profile_rules.loader_waits,
    profile_rules.exposed_gradient_sums,
    profile_rules.launch_bound,
    profile_rules.synchronisations,
    profile_rules.wasted_recompute,
    profile_rules.recompiles,
    profile_rules.odd_sizes,
    profile_rules.unfused_operators,
)
_LOG: Final = logging.getLogger("unisono.diagnose")


def diagnose(facts: RunFacts) -> list[Finding]:
    """All findings of all rules: the critical ones first, of them those without a cost (a failed attempt); then by cost."""
    with np.errstate(over="ignore", invalid="ignore"):  # figures of a damaged file may be of any size
        findings = [finding for rule in (*RULES, *_plugged_rules()) for finding in rule(facts)]
        findings += list(utilization_rules.low_use(facts, findings))
    return sorted(findings, key=_urgency)


def _urgency(finding: Finding) -> tuple[bool, bool, float, str]:
    return finding.severity != "critical", finding.cost_frac > 0, -finding.cost_frac, finding.id


def _plugged_rules() -> Iterator[Rule]:
    """Rules of other packages; one that cannot be imported, or fails, is left out with a warning."""
    for entry in entry_points(group=RULE_GROUP):
        package = entry.dist.name if entry.dist is not None else entry.value

        def guarded(facts: RunFacts, entry: Any = entry, package: str = package) -> list[Finding]:
            try:
                rule = entry.load()
                make_read_only(facts)  # for the rules after it, and the report
                return [checked_finding(finding, facts) for finding in rule(facts)]
            except (Exception, SystemExit) as error:
                _LOG.warning("rule %s of %s was left out: %s: %s", entry.name, package, type(error).__name__, error)
                return []

        yield guarded
