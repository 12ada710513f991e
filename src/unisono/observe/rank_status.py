"""The present state of each rank of a run, read from the end of its events file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from unisono.observe.events import Event, decode_event, number, open_events
from unisono.storage.run_folder import EVENTS_FOLDER

_TAIL_BYTES: Final = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """The newest events of one rank.

    Attributes:
        rank: The rank.
        at_s: Wall-clock time of its newest event, in seconds since 1970.
        step: Its newest ``step`` event with a reading; empty where there is none at the end of the file.
        system: Its newest ``system`` event; empty where there is none.
        ended: Reason of the end, such as ``finished`` or ``failed``; empty while the run goes on.
    """

    rank: int
    at_s: float
    step: Mapping[str, Any]
    system: Mapping[str, Any]
    ended: str


def rank_statuses(run_dir: Path) -> list[RankStatus]:
    """All ranks that have events, ascending. Files that vanish or hold no event meanwhile are left out.

    Raises:
        ConfigError: A file of events is no regular file, or cannot be read.
    """
    found = (_status(path) for path in sorted((run_dir / EVENTS_FOLDER).glob("rank*.jsonl")))
    return [status for status in found if status is not None]


def _status(path: Path) -> RankStatus | None:
    newest: dict[str, Event] = {}
    last: Event = {}
    goes_on = False  # after its newest end
    for event in _from_the_end(path):
        last = last or event
        kind = str(event["kind"])
        if "run_end" not in newest and event.get("attempt") == last.get("attempt"):
            goes_on |= kind in ("run_start", "step")
        if kind != "step" or "time/window_s" in event:
            newest.setdefault(kind, event)
        if kind == "run_start" or {"step", "system"} <= newest.keys():
            break
    rank = last.get("rank")
    if not isinstance(rank, int):
        return None
    end, nothing = newest.get("run_end", {}), dict[str, Any]()
    return RankStatus(
        rank=rank,
        at_s=number(last.get("t")) or 0.0,
        step=newest.get("step", nothing),
        system=newest.get("system", nothing),
        ended="" if goes_on else str(end.get("reason", "")),
    )


def _from_the_end(path: Path) -> Iterator[Event]:
    """The events in the last part of a file, the newest first; each is decoded when it is asked for."""
    try:
        file = open_events(path)
    except FileNotFoundError:
        return
    with file:
        start = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
        file.seek(start)
        lines = file.read(_TAIL_BYTES).split(b"\n")
    for line in reversed(lines[1:] if start else lines):
        event = decode_event(line)
        if event is not None:
            yield event
