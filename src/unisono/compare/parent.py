"""The run that another one comes from, and what the settings that it took from a diagnosis have gained.

A run comes from another if it resumed from a checkpoint in the other's folder, or if its first start took settings from the
other's ``config.toml``: as the overlay of a diagnosis does, or any file whose ``base`` that is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

from unisono.diagnose.figures import has_enough_readings, plan_group, step_s
from unisono.diagnose.finding import Finding
from unisono.diagnose.rules import diagnose
from unisono.diagnose.run_facts import RunFacts, read_run
from unisono.errors import ConfigError, UnisonoError
from unisono.observe.events import Event, as_mapping, decode_event, event_lines, events_path, open_events
from unisono.plan.plan import option_of
from unisono.sanitize import printable
from unisono.storage.ownership import untrusted_reason
from unisono.storage.run_folder import CHECKPOINTS_FOLDER, RUN_FILE

_MAX_LINES: Final = 1000  # of the parent's events that are read: a run writes its start among the first


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """What changed settings of the parent's diagnosis have gained.

    Attributes:
        parent: Folder of the parent run.
        gone: Rules whose settings this run has, and that find nothing in it.
        stays: Rules whose settings it has, and that find something still.
        before_s: Mean time of a step of the parent.
        after_s: The same of this run.
        expected_frac: Share of the parent's time that its findings expected to save.
    """

    parent: Path
    gone: tuple[str, ...]
    stays: tuple[str, ...]
    before_s: float
    after_s: float
    expected_frac: float

    @property
    def gain_frac(self) -> float:
        """Share of the parent's time of a step that is saved; negative where a step takes longer."""
        return 1 - self.after_s / self.before_s

    def __str__(self) -> str:
        found = [
            f"{', '.join(rules)} {word}" for rules, word in ((self.gone, "gone"), (self.stays, "still found")) if rules
        ]
        change = f"{abs(self.gain_frac):.0%} {'less' if self.gain_frac >= 0 else 'more'} time"
        expected = f" ({self.expected_frac:.0%} less was expected)" if self.expected_frac else ""
        return (
            f"since {printable(str(self.parent))}, whose diagnosis it follows: {'; '.join(found)}; a step takes "
            f"{1e3 * self.after_s:.3g} ms, {1e3 * self.before_s:.3g} ms there: {change}{expected}"
        )


def parents_of(events: Iterable[Event], run_dir: Path) -> Iterator[tuple[Path, str]]:
    """Folders that the run with these events of rank 0 may come from, and how, the surest first."""
    own, events = run_dir.resolve(), tuple(events)
    for event in events:
        path = Path(str(event.get("path") or ""))
        if event["kind"] == "resumed" and path.parent.name == CHECKPOINTS_FOLDER:
            given = path.parent.parent
            # written relative to the folder in which the run was started: the other run is mostly beside this one
            candidates = [given] if given.is_absolute() else [Path.cwd() / given, own.parent / given.name]
            yield from ((folder, "resumed from a checkpoint of") for folder in candidates if _is_other(folder, own))
    first = next((event for event in events if event["kind"] == "run_start"), {})
    origins = [str(value) for value in as_mapping(first.get("origins")).values()]
    for path in dict.fromkeys(Path(origin.rpartition(":")[0] or origin) for origin in origins):
        if path.name == RUN_FILE:
            folder = path.parent if path.is_absolute() else Path.cwd() / path.parent
            if _is_other(folder, own):
                yield folder, "took its settings from"


def _is_other(folder: Path, own: Path) -> bool:
    try:
        return folder.resolve() != own
    except (OSError, ValueError, RuntimeError):
        return False


def first_start(folder: Path) -> Event | None:
    """The ``run_start`` event of a run's first start; None where it cannot be read, or another user can have written it."""
    path = events_path(folder, 0)
    try:
        if untrusted_reason(path):  # another user's run does not choose which files are read
            return None
        with open_events(path) as file:
            lines = chain.from_iterable(lines for lines, _ in event_lines(file))
            events = map(decode_event, islice(lines, _MAX_LINES))
            return next((event for event in events if event is not None and event["kind"] == "run_start"), None)
    except (OSError, ValueError, ConfigError):
        return None


def gain_over_parent(run_dir: Path, facts: RunFacts, findings: Sequence[Finding]) -> Gain | None:
    """What the settings that a run took from the diagnosis of its parent have gained.

    None for a run without a parent, or that took no settings of its findings, or where one of both has too few readings.

    Args:
        facts: Of the run in ``run_dir``.
        findings: The findings about them.
    """
    start = first_start(run_dir)
    for folder, _ in parents_of([start] if start is not None else [], run_dir):
        if first_start(folder) is None:  # it is gone, or another user can have written it
            continue
        try:
            before = read_run(folder)
            old, new = _effective_settings(before), _effective_settings(facts)
            followed = [finding for finding in diagnose(before) if _is_followed(finding, old, new)]
        except UnisonoError:
            continue
        if not followed or not has_enough_readings(before) or not has_enough_readings(facts):
            continue
        found, rest = {finding.id for finding in findings}, 1.0
        for finding in followed:
            rest *= 1 - finding.expected_gain
        ids = [finding.id for finding in followed]
        return Gain(
            parent=folder,
            gone=tuple(code for code in ids if code not in found),
            stays=tuple(code for code in ids if code in found),
            before_s=step_s(before),
            after_s=step_s(facts),
            expected_frac=1 - rest,
        )
    return None


def _is_followed(finding: Finding, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a run changed what a finding about its parent says."""
    patch = finding.patch
    return bool(patch) and all(now.get(name) == value != before.get(name) for name, value in patch.items())


def _effective_settings(facts: RunFacts) -> dict[str, Any]:
    """The settings of a run by dotted name; those of the plan as the plan has them, as a strategy file may give them."""
    plan = {
        f"plan.{option}": value
        for group in facts.plan
        for name, value in plan_group(facts, group).items()
        if (option := option_of(f"{group}.{name}"))
    }
    return {**facts.settings, **plan}
