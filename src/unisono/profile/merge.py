"""One trace of all ranks, on the clock of rank 0, for Perfetto (https://ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final, cast

import msgspec

from unisono.errors import DataError
from unisono.observe.events import is_count
from unisono.profile.rank_profile import MERGED_FILE, RankProfile
from unisono.profile.trace_file import event_objects, open_trace
from unisono.storage.files import new_file

MAX_MERGED_EVENTS: Final = 2_000_000  # more than Perfetto shows at ease
_PIDS: Final = 1_000  # of one rank
_IDS: Final = 1 << 40
_COMPRESSION: Final = 3
_decode: Final = msgspec.json.Decoder(dict[str, Any]).decode
_encode: Final = msgspec.json.Encoder().encode


def merge_traces(folder: Path, profiles: Sequence[RankProfile]) -> tuple[int, ...]:
    """Write ``trace.json.gz`` of the traces in ``folder``, a process for each rank; returns the ranks that are in it.

    Ranks are added in order until there are ``MAX_MERGED_EVENTS``. Those without a trace, and those whose trace cannot be read,
    are left out.
    """
    chosen: list[RankProfile] = []
    events = 0
    for profile in sorted(profiles, key=lambda profile: profile.rank):
        path = folder / profile.trace_file
        if profile.trace_file and path.parent == folder and path.is_file():
            events += profile.num_events
            if events > MAX_MERGED_EVENTS and chosen:
                break
            chosen.append(profile)
    if not chosen:
        return ()
    base_ns = chosen[0].clock.base_ns
    merged: list[int] = []
    with new_file(folder / MERGED_FILE) as raw:
        file: IO[bytes] = cast("IO[bytes]", gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=_COMPRESSION, mtime=0))
        with file:
            file.write(b'{"displayTimeUnit": "ms", "baseTimeNanoseconds": %d, "traceEvents": [\n' % base_ns)
            first = True
            for profile in chosen:
                try:
                    for event in _events(folder / profile.trace_file, profile, base_ns):
                        file.write((b"" if first else b",\n") + _encode(event))
                        first = False
                except (OSError, EOFError, ValueError, OverflowError, DataError):
                    continue
                merged.append(profile.rank)
            file.write(b"\n]}\n")
    return tuple(merged)


def _events(path: Path, profile: RankProfile, base_ns: int) -> Iterator[dict[str, Any]]:
    """The events of a rank under pids, ids and times of the merged trace."""
    rank, clock = profile.rank, profile.clock
    shift_us = (clock.base_ns - base_ns) / 1e3 - clock.offset_s * 1e6
    pids: dict[Any, int] = {}
    with open_trace(path) as file:
        for text in event_objects(file):
            try:
                event = _decode(text)
            except (msgspec.DecodeError, RecursionError):
                continue
            pid = event.get("pid", 0)
            if (
                "ph" not in event
                or not isinstance(pid, int | str)
                or event.get("name") in ("process_name", "process_sort_index", "process_labels")
            ):
                continue
            if pid not in pids:
                pids[pid] = _PIDS * (rank + 1) + len(pids)
                yield from _process(pids[pid], rank, _process_name(pid, len(pids) - 1))
            event["pid"] = pids[pid]
            if isinstance(event.get("ts"), float) or is_count(event.get("ts")):
                event["ts"] = round(event["ts"] + shift_us, 3)
            if isinstance(event.get("id"), int):
                event["id"] += _IDS * rank
            yield event


def _process_name(pid: Any, number: int) -> str:
    """Name of a process of a rank: empty for host threads, a device (whose pid is its index), or the profiler's own marks."""
    if isinstance(pid, str):
        return pid.lower()
    return "" if number == 0 or pid > 64 else f"device {pid}"


def _process(pid: int, rank: int, name: str) -> Iterator[dict[str, Any]]:
    title = f"rank {rank} {name}".rstrip()
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": title}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
