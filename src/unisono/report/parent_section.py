"""The section about the run that this one comes from: which settings and what of the environment differ.

A run comes from another if it resumed from a checkpoint in the other's folder, or if its first start took settings from the
other's ``config.toml``: as the overlay of a diagnosis does, or any file whose ``base`` that is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, cast

from unisono.compare.differences import Difference, differences, environment_of, settings_of
from unisono.errors import ConfigError
from unisono.observe.events import Event, decode_event, event_lines, events_path, open_events
from unisono.observe.history import RankHistory
from unisono.report.section import Section, Table
from unisono.sanitize import printable
from unisono.storage.ownership import untrusted_reason
from unisono.storage.run_folder import CHECKPOINTS_FOLDER, RUN_FILE

_MAX_LINES: Final = 1000  # of the parent's events that are read: a run writes its start among the first
_MAX_ROWS: Final = 200


def parent_section(history: RankHistory, run_dir: Path) -> Section | None:
    """The section; None for a run that comes from no other, or whose parent is gone or may be another user's."""
    start = next((event for event in reversed(history.all_events) if event["kind"] == "run_start"), None)
    # another user's run does not choose which files are read
    if start is None or untrusted_reason(events_path(run_dir, 0)):
        return None
    for folder, how in _parents(history, run_dir):
        if (parent := _start_of(folder)) is not None:
            settings = differences(settings_of(parent, folder), settings_of(start, run_dir))
            environment = differences(environment_of(parent), environment_of(start))
            tables = [
                _table(title, found) for title, found in (("setting", settings), ("environment", environment)) if found
            ]
            same = [name for name, found in (("settings", settings), ("environment", environment)) if not found]
            note = f"This run {how} {printable(str(folder))}." + (
                f" The {' and '.join(same)} did not change." if same else ""
            )
            return Section(title="Differences from the parent run", note=note, tables=tables)
    return None


def _table(title: str, found: list[Difference]) -> Table:
    rows = [
        [each.key, "none" if each.a is None else each.a, "none" if each.b is None else each.b]
        for each in found[:_MAX_ROWS]
    ]
    return Table(head=(title, "parent", "this run"), rows=rows, left_out=max(0, len(found) - _MAX_ROWS))


def _parents(history: RankHistory, run_dir: Path) -> Iterator[tuple[Path, str]]:
    """Folders that this run may come from, and how, the surest first."""
    own = run_dir.resolve()
    for event in history.all_events:
        path = Path(str(event.get("path") or ""))
        if event["kind"] == "resumed" and path.parent.name == CHECKPOINTS_FOLDER:
            given = path.parent.parent
            # written relative to the folder in which the run was started: the other run is mostly beside this one
            candidates = [given] if given.is_absolute() else [Path.cwd() / given, own.parent / given.name]
            yield from ((folder, "resumed from a checkpoint of") for folder in candidates if _is_other(folder, own))
    first = next((event for event in history.all_events if event["kind"] == "run_start"), {})
    origins: Any = first.get("origins")
    found = cast("Mapping[str, Any]", origins).values() if isinstance(origins, Mapping) else ()
    for origin in dict.fromkeys(str(value) for value in found):
        path = Path(origin.rpartition(":")[0] or origin)
        if path.name == RUN_FILE:
            folder = path.parent if path.is_absolute() else Path.cwd() / path.parent
            if _is_other(folder, own):
                yield folder, "took its settings from"


def _is_other(folder: Path, own: Path) -> bool:
    try:
        return folder.resolve() != own
    except (OSError, ValueError, RuntimeError):
        return False


def _start_of(folder: Path) -> Event | None:
    """What the first start of a run wrote; None where nothing can be read, or another user can have written it."""
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
