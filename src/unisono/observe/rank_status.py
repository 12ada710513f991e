"""The present state of each rank of a run, read from the end of its events file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from unisono.observe.events import Event, decode_event, number, open_events
from unisono.storage.run_folder import EVENTS_FOLDER

_BLOCK_BYTES: Final = 1 << 16
_MAX_BLOCKS: Final = 4  # of the end of a file: ``links`` events are a hundred steps apart
# what a line has to have once the newest step and sample are known: the others need not be decoded
_LINKS, _RUN_START = b'"links"', b'"run_start"'


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """The newest events of one rank.

    Attributes:
        rank: The rank.
        at_s: Wall-clock time of its newest event, in seconds since 1970.
        step: Its newest ``step`` event with a reading; empty where there is none at the end of the file.
        system: Its newest ``system`` event; empty where there is none.
        links: Its newest ``links`` event; empty where there is none at the end of the file.
        ended: Reason of the end, such as ``finished`` or ``failed``; empty while the run goes on.
    """

    rank: int
    at_s: float
    step: Mapping[str, Any]
    system: Mapping[str, Any]
    links: Mapping[str, Any]
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
    for line in _lines_from_the_end(path):
        has_rest = {"step", "system"} <= newest.keys()
        if has_rest and _LINKS not in line and _RUN_START not in line:
            continue
        event = decode_event(line)
        if event is None:
            continue
        last = last or event
        kind = str(event["kind"])
        if "run_end" not in newest and event.get("attempt") == last.get("attempt"):
            goes_on |= kind in ("run_start", "step")
        if kind != "step" or "time/window_s" in event:
            newest.setdefault(kind, event)
        if kind == "run_start" or {"step", "system", "links"} <= newest.keys():
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
        links=newest.get("links", nothing),
        ended="" if goes_on else str(end.get("reason", "")),
    )


def _lines_from_the_end(path: Path) -> Iterator[bytes]:
    """The lines in the last part of a file, the newest first; blocks are read when their lines are asked for."""
    try:
        file = open_events(path)
    except FileNotFoundError:
        return
    with file:
        begin, rest = file.seek(0, os.SEEK_END), b""  # of a line that begins in the block before
        for _ in range(_MAX_BLOCKS):
            end, begin = begin, max(0, begin - _BLOCK_BYTES)
            file.seek(begin)
            rest, *lines = (file.read(end - begin) + rest).split(b"\n")
            yield from reversed(lines)
            if not begin:
                yield rest
                return
