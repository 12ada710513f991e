"""The section about the run that this one comes from: which settings and what of the environment differ.

And what the settings gained that it took from the other's diagnosis.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from unisono.compare.differences import Difference, differences, environment_of, settings_of
from unisono.compare.parent import first_start, gain_over_parent, parents_of
from unisono.diagnose.finding import Finding
from unisono.diagnose.run_facts import RunFacts
from unisono.observe.events import events_path
from unisono.observe.history import RankHistory
from unisono.report.section import Section, Table
from unisono.sanitize import printable
from unisono.storage.ownership import untrusted_reason

_MAX_ROWS: Final = 200


def parent_section(history: RankHistory, run_dir: Path, facts: RunFacts, findings: Sequence[Finding]) -> Section | None:
    """The section; None for a run that comes from no other, or whose parent is gone or may be another user's."""
    start = next((event for event in reversed(history.all_events) if event["kind"] == "run_start"), None)
    # another user's run does not choose which files are read
    if start is None or untrusted_reason(events_path(run_dir, 0)):
        return None
    for folder, how in parents_of(history.all_events, run_dir):
        if (parent := first_start(folder)) is not None:
            settings = differences(settings_of(parent, folder), settings_of(start, run_dir))
            environment = differences(environment_of(parent), environment_of(start))
            tables = [
                _table(title, found) for title, found in (("setting", settings), ("environment", environment)) if found
            ]
            same = [name for name, found in (("settings", settings), ("environment", environment)) if not found]
            note = f"This run {how} {printable(str(folder))}." + (
                f" The {' and '.join(same)} did not change." if same else ""
            )
            if (gain := gain_over_parent(run_dir, facts, findings)) is not None:
                text = str(gain)
                note += f" {text[0].upper()}{text[1:]}."
            return Section(title="Differences from the parent run", note=note, tables=tables)
    return None


def _table(title: str, found: list[Difference]) -> Table:
    rows = [
        [each.key, "none" if each.a is None else each.a, "none" if each.b is None else each.b]
        for each in found[:_MAX_ROWS]
    ]
    return Table(head=(title, "parent", "this run"), rows=rows, left_out=max(0, len(found) - _MAX_ROWS))
