"""The present state of each rank of a run, read from the end of its events file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from unisono.observe.events import Event, decode_event, number, open_events, other_run, rank_of
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
        run: Name of the run in its newest event; empty where it has none.
    """

    rank: int
    at_s: float
    step: Mapping[str, Any]
    system: Mapping[str, Any]
    links: Mapping[str, Any]
    ended: str
    run: str = ""


def rank_statuses(run_dir: Path) -> list[RankStatus]:
    """All ranks that have events, as ``statuses_and_notes`` has them. Raises as it does."""
    return statuses_and_notes(run_dir)[0]


def statuses_and_notes(run_dir: Path) -> tuple[list[RankStatus], list[str]]:
    """All ranks that have events, ascending, and a note of each file that is left out, as its events are of another run.

    Files that vanish or hold no event meanwhile are left out without a note.

    Raises:
        ConfigError: A file of events is no regular file, or cannot be read.
    """
    statuses: list[RankStatus] = []
    notes: list[str] = []
    first_path, own = run_dir, ""  # the lowest rank's file that has a name of the run, and its newest name
    for path in sorted((run_dir / EVENTS_FOLDER).glob("rank*.jsonl")):
        rank = rank_of(path)
        status = None if rank is None else _status(path, rank)
        if status is None:
            continue
        if status.run and not own:
            first_path, own = path, status.run
        if status.run not in ("", own):
            # a folder that was renamed between two starts: beginnings are read where ends differ, not at every look
            names, own_names = {status.run, _first_run(path)} - {""}, {own, _first_run(first_path)} - {""}
            if names.isdisjoint(own_names):
                notes.append(f"{path.name}: left out, as {other_run(names, own_names)}")
                continue
        statuses.append(status)
    return statuses, notes


def _first_run(path: Path) -> str:
    """Name of the run in the first event of a file; empty where it has none."""
    try:
        with open_events(path) as file:
            event = decode_event(file.readline(_BLOCK_BYTES)) or {}
    except FileNotFoundError:
        return ""
    return _run_of(event)


def _run_of(event: Mapping[str, Any]) -> str:
    return name if isinstance(name := event.get("run"), str) else ""


def _status(path: Path, rank: int) -> RankStatus | None:
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
    if not last:
        return None
    end, nothing = newest.get("run_end", {}), dict[str, Any]()
    return RankStatus(
        rank=rank,
        at_s=number(last.get("t")) or 0.0,
        step=newest.get("step", nothing),
        system=newest.get("system", nothing),
        links=newest.get("links", nothing),
        ended="" if goes_on else str(end.get("reason", "")),
        run=_run_of(last),
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
