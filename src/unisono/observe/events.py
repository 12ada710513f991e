"""The events of a run: one append-only JSONL file per rank. Console, trackers and report are views of it.

A line is one JSON object ``{"kind", "t", "m", "rank", "run", "attempt", ...}``: ``t`` is wall-clock time in seconds
since 1970, ``m`` a monotonic clock in seconds (comparable within one boot of one machine), ``attempt`` counts the
processes that worked on this run, from 1. ``step`` in an event counts finished optimizer updates.

Non-finite numbers are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"`` (as in protobuf's JSON mapping);
``number`` converts them back. ``run_start`` has the version of all events in ``schema`` (1 where it has none). New kinds and new
fields raise no version: readers pass over what they do not know, and do without what older files lack. Secrets are redacted
before an event is written or passed to listeners. There is no rotation, buffering or locking between processes: one process
writes one file. No torch.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeGuard, cast

import msgspec

from unisono.errors import ConfigError
from unisono.sanitize import is_secret, redact, shorten
from unisono.storage.directory import make_folder
from unisono.storage.files import FILE_MODE, open_regular
from unisono.storage.folder_lock import FolderLock
from unisono.storage.limits import MAX_EVENT_BYTES, decode_json
from unisono.storage.run_folder import EVENTS_FOLDER

Event = dict[str, Any]
Listener = Callable[[Event], None]

EVENT_SCHEMA: Final = (
    1  # raised when a kind or a field that exists gets another meaning, which older readers would misread
)
SERIES: Final = ("step", "eval", "log")  # kinds whose numbers trackers and report show
# kinds whose events belong to one step; a later attempt that makes the step again replaces them
NUMBERED: Final = (
    *(*SERIES, "log_text", "log_image"),
    *("histograms", "skipped_step", "gradient_stats", "tap", "nonfinite"),
)
MAX_COUNT: Final = 1 << 53  # of steps and attempts: any float64 below is exact
_MAX_ATTEMPT: Final = 1_000_000  # no run starts so often: a higher number is of a damaged line
ENVELOPE: Final = frozenset({"kind", "t", "m", "rank", "run", "attempt"})
_FILE_NAME: Final = re.compile(r"rank([0-9]{5,9})\.jsonl")
_NON_FINITE: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
# read at once: a block, its lines and the decoded events stay in the processor's cache
_BLOCK_BYTES: Final = 1 << 18
_decode_fast: Final = msgspec.json.Decoder().decode


def events_path(run_dir: Path, rank: int) -> Path:
    """Path of the events file of ``rank`` inside ``run_dir``, such as ``events/rank00003.jsonl``."""
    return run_dir / EVENTS_FOLDER / f"rank{rank:05d}.jsonl"


def rank_of(path: Path) -> int | None:
    """The rank of an events file, by its name; None if that is no name of one."""
    found = _FILE_NAME.fullmatch(path.name)
    return None if found is None else int(found[1])


def other_run(names: Iterable[str], own: Iterable[str]) -> str:
    """Says that events of the run with ``names`` are none of the run with the names ``own``."""
    theirs, ours = (shorten(", ".join(sorted(each))) for each in (names, own))
    return f"its events are of the run {theirs}, the others of {ours}"


class EventLog:
    """Writes one rank's events and passes each to the listeners, in order, on the emitting thread.

    Each event is one ``write()`` of one line to an append-only descriptor, so a killed process loses at most the line it was
    writing. A full disk or a failing listener does not raise into the caller. A listener that raises is detached and reported
    by a ``sink_failed`` event. Lines that could not be written are counted, and an ``events_lost`` event reports them once
    writing works again. Thread-safe.

    Args:
        path: Events file of this rank; see ``events_path``.
        rank: Rank that writes, a field of every event.
        run_id: Name of the run, the field ``run`` of every event.
        attempt: Number of this process among those that worked on the run, from 1; see ``next_attempt``.
        lock: The writer's exclusive use of the folder, given up by ``close``.
        wall_clock: Seconds since 1970.
        monotonic_clock: Seconds since an arbitrary start.

    Raises:
        ConfigError: The file cannot be opened for appending as a regular file.
    """

    def __init__(
        self,
        path: Path,
        *,
        rank: int,
        run_id: str,
        attempt: int,
        lock: FolderLock | None = None,
        wall_clock: Callable[[], float] = time.time,
        monotonic_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self.rank = rank
        self.run_id = run_id
        self.attempt = attempt
        self._wall_clock = wall_clock
        self._monotonic_clock = monotonic_clock
        self._lock = threading.RLock()  # re-entrant: a listener may emit
        self._listeners: list[tuple[str, Listener]] = []
        self._plain_names: set[str] = set()
        self._lost_lines = 0
        self._folder_lock = lock
        self._fd, self._line_open = _open_for_append(path)

    def emit(self, kind: str, **fields: Any) -> None:
        """Record one event.

        Args:
            fields: Numbers, strings, booleans, None, paths, and lists or mappings of these.

        Raises:
            TypeError: A field has another type, such as a tensor, whose reading would synchronise with the device; or a field
                has the name of an envelope field.
        """
        if not ENVELOPE.isdisjoint(fields):
            taken = sorted(ENVELOPE.intersection(fields))
            raise TypeError(f"event {kind!r}: {', '.join(taken)} belong to every event and cannot be given as fields")
        with self._lock:
            event: Event = {
                "kind": kind,
                "t": round(self._wall_clock(), 6),
                "m": round(self._monotonic_clock(), 6),
                "rank": self.rank,
                "run": self.run_id,
                "attempt": self.attempt,
            }
            for name, value in fields.items():
                # a number under a known name cannot be a secret: the common case costs one set look-up
                if name in self._plain_names and type(value) in (float, int):
                    event[name] = value
                    continue
                if not is_secret(name):
                    self._plain_names.add(name)
                event[name] = redact(_plain(value, f"{kind}.{name}"), name)
            self._write(event)
            for entry in tuple(self._listeners):
                self._deliver(entry, event)

    def subscribe(self, listener: Listener, name: str | None = None) -> None:
        """Pass every later event to ``listener``; its first exception detaches it."""
        with self._lock:
            self._listeners.append((name or _name_of(listener), listener))

    def close(self) -> None:
        """Close the file. Later events still reach the listeners, but not the disk. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
            if self._folder_lock is not None:
                self._folder_lock.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _deliver(self, entry: tuple[str, Listener], event: Event) -> None:
        name, listener = entry
        if entry not in self._listeners:  # detached while this event was on its way
            return
        try:
            listener(event)
        except Exception as error:
            self._listeners.remove(entry)
            self.emit("sink_failed", sink=name, error=f"{type(error).__name__}: {error}", during=event["kind"])

    def _write(self, event: Event) -> None:
        if self._fd < 0:
            return
        if self._lost_lines:
            # written alone, before the event that found the disk usable again
            lost = {name: event[name] for name in ENVELOPE} | {"kind": "events_lost", "lines": self._lost_lines}
            if self._append(encode(lost)) is not None:
                self._lost_lines += 1
                return
            self._lost_lines = 0
        error = self._append(encode(event))
        if error is not None:
            self._lost_lines = 1
            for entry in tuple(self._listeners):
                failed = {name: event[name] for name in ENVELOPE} | {"kind": "sink_failed"}
                self._deliver(entry, {**failed, "sink": "events", "error": error, "during": event["kind"]})

    def _append(self, line: bytes) -> str | None:
        """Write a line; return an error text or None. A truncated line is ended by a newline before the next one."""
        data = (b"\n" if self._line_open else b"") + line + b"\n"
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        if written == len(data):
            self._line_open = False
            return None
        self._line_open = True
        return f"OSError: only {written} of {len(data)} bytes could be written to {self.path}"


def _open_for_append(path: Path) -> tuple[int, bool]:
    """Return an append descriptor of a regular file, and whether its last line lacks a newline."""
    nofollow = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # non-blocking: opening a FIFO must not hang
    try:
        make_folder(path.parent, may_be_link=False)
        try:
            return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | nofollow, FILE_MODE), False
        except FileExistsError:
            fd = os.open(path, os.O_RDWR | os.O_APPEND | nofollow)
    except OSError as error:
        raise _unusable(path, f"{error.strerror or error}") from error
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise _unusable(path, "it is not a regular file")
        return fd, facts.st_size > 0 and os.pread(fd, 1, facts.st_size - 1) != b"\n"
    except BaseException:
        os.close(fd)
        raise


def _unusable(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        given=f"events file {path} cannot be opened for appending: {reason}",
        rule="each rank appends its events to a regular file inside the run folder",
        consequence="nothing was started",
        nearest=f"give a run folder you can write, or check with: ls -ld {path.parent} {path}",
    )


def encode(event: Mapping[str, Any]) -> bytes:
    """Encode an event as one JSON line without the newline; non-finite numbers become strings."""
    try:
        text = json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(event), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")  # lone surrogates of undecodable file names


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_finite(item) for item in cast("list[Any]", value)]
    return value


def _plain(value: Any, where: str) -> Any:
    """Convert ``value`` to JSON types. Accepts numpy scalars and arrays, which are already on the host."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return float(value) if isinstance(value, float) else int(value)
    if isinstance(value, os.PathLike):
        return os.fspath(cast("os.PathLike[str]", value))
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value)
        return {str(key): _plain(item, f"{where}.{key}") for key, item in entries.items()}
    if isinstance(value, list | tuple | set | frozenset | range):
        items = cast("Iterable[Any]", value)
        ordered = sorted(items, key=str) if isinstance(value, set | frozenset) else items
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(ordered)]
    if type(value).__module__ == "numpy":
        return _plain(value.tolist(), where)
    raise TypeError(
        f"event field {where} is a {type(value).__module__}.{type(value).__qualname__}; events take numbers, strings, "
        "booleans, None, paths, lists and mappings: turn it into one of these at your logging cadence"
    )


def _name_of(listener: Listener) -> str:
    name = getattr(listener, "name", None) or getattr(listener, "__qualname__", None)
    return str(name or type(listener).__qualname__)


def as_mapping(value: Any) -> Mapping[str, Any]:
    """The value of an event or of another file if it is a mapping, else an empty one."""
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def number(value: Any) -> float | None:
    """Convert a number, or a string that encodes NaN or an infinity, to float; None for any other value."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        return value
    if isinstance(value, int):
        try:
            return float(value)
        except OverflowError:  # as in JSON, where 1e999 is an infinity
            return math.inf if value > 0 else -math.inf
    return _NON_FINITE.get(value) if isinstance(value, str) else None


def bounded_number(value: Any, limit: float) -> float:
    """``value`` if it is a number from 0 to below ``limit``, else 0."""
    found = number(value)
    return found if found is not None and 0 <= found < limit else 0.0


def event_step(event: Mapping[str, Any]) -> int | None:
    """The step of an event; None where it is no count."""
    step = event.get("step")
    return step if is_count(step) else None


def is_count(value: Any) -> TypeGuard[int]:
    """Whether a value of an event is a number of a step or an attempt."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_COUNT


@dataclass(frozen=True, kw_only=True, slots=True)
class EventHistory:
    """Content of one events file.

    Attributes:
        path: The file.
        events: Its readable events, in file order.
        damaged_lines: Numbers of unreadable lines, from 1.
        torn_tail: Whether the last line is one of them and has no newline, because its process was killed.
    """

    path: Path
    events: tuple[Event, ...]
    damaged_lines: tuple[int, ...] = ()
    torn_tail: bool = False

    def notes(self) -> tuple[str, ...]:
        """One sentence for each kind of damage in the file."""
        return damage_notes(self.path, self.damaged_lines, torn_tail=self.torn_tail)


def damage_notes(path: Path, damaged_lines: Sequence[int], *, torn_tail: bool) -> tuple[str, ...]:
    """One sentence for each kind of damage in the file at ``path``."""
    sentences: list[str] = []
    inner = damaged_lines[:-1] if torn_tail else damaged_lines
    if inner:
        lines = ", ".join(map(str, inner[:5])) + (", ..." if len(inner) > 5 else "")
        sentences.append(f"{path.name}: left out {len(inner)} incomplete line(s) ({lines}): a write was cut short")
    if torn_tail:
        sentences.append(f"{path.name}: left out the last line, which is incomplete: its process was killed")
    return tuple(sentences)


def schema_notes(path: Path, events: Iterable[Event]) -> tuple[str, ...]:
    """A sentence for a file at ``path`` with events of a version that this release does not know."""
    newest = max((int(schema) for event in events if is_count(schema := event.get("schema"))), default=EVENT_SCHEMA)
    if newest <= EVENT_SCHEMA:
        return ()
    return (
        f"{path.name}: events of version {newest}, which a later release wrote; this one knows version {EVENT_SCHEMA}, and may "
        "misread them",
    )


def read_events(path: Path) -> EventHistory:
    """Read one rank's file at ``path``. Lines truncated by a kill or a full disk are left out and counted.

    Raises:
        FileNotFoundError: There is no such file.
        ConfigError: It cannot be read, or is no regular file: a pipe would wait, and a device may have no end.
    """
    events: list[Event] = []
    damaged: list[int] = []
    num_lines, is_complete = 0, True
    with open_events(path) as file:
        for lines, has_end in event_lines(file):
            for place, line in enumerate(lines, num_lines + 1):
                event = decode_event(line)
                if event is None:
                    damaged.append(place)
                else:
                    events.append(event)
            num_lines, is_complete = num_lines + len(lines), has_end
    torn_tail = bool(damaged) and damaged[-1] == num_lines and not is_complete
    return EventHistory(path=path, events=tuple(events), damaged_lines=tuple(damaged), torn_tail=torn_tail)


def open_events(path: Path) -> BinaryIO:
    """Open one rank's file to read. Raises as ``read_events`` does."""
    try:
        return open_regular(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(
            given=f"events file {path} cannot be read: {error.strerror or error}",
            rule="each rank's events are a regular file in the run folder",
            consequence="no event of it was read",
            nearest=f"see what it is with: ls -l {path}",
        ) from error


def event_lines(file: BinaryIO) -> Iterator[tuple[list[bytes], bool]]:
    """The lines of a file without their newlines, many at a time, and whether the last of them ended with a newline.

    A line that is longer than any event is yielded as an empty one.
    """
    rest = bytearray()  # the beginning of a line
    while block := file.read(_BLOCK_BYTES):
        lines = block.split(b"\n")
        if rest and len(lines) > 1:
            lines[0] = bytes(rest) + lines[0] if len(rest) + len(lines[0]) <= MAX_EVENT_BYTES else b""
            rest.clear()
        rest += lines.pop()
        del rest[MAX_EVENT_BYTES + 1 :]
        if lines:
            yield lines, True
    if rest:
        yield [bytes(rest) if len(rest) <= MAX_EVENT_BYTES else b""], False


def decode_event(line: bytes) -> Event | None:
    """The event of a line; None if the line is no event."""
    try:
        event = decode_json(line, _decode, max_bytes=MAX_EVENT_BYTES)
    except ValueError:
        return None
    return cast(Event, event) if isinstance(event, dict) and isinstance(event.get("kind"), str) else None


def _decode(text: bytes) -> Any:
    """As ``json.loads``, several times as fast. Falls back to it for what msgspec refuses, such as a bare NaN."""
    try:
        return _decode_fast(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return json.loads(text)


def next_attempt(path: Path) -> int:
    """Attempt number of a process that continues the file at ``path``: one more than the last, or 1 without a file.

    Reads the end of the file only, so the cost does not grow with the run. Passes over events whose number cannot be right.
    """
    try:
        file = open_events(path)
    except FileNotFoundError:
        return 1
    with file:
        end = file.seek(0, os.SEEK_END)
        reach = 1 << 16
        while True:
            start = max(0, end - reach)
            file.seek(start)
            lines = file.read(end - start).split(b"\n")
            for line in reversed(lines if start == 0 else lines[1:]):
                attempt = (decode_event(line) or {}).get("attempt")
                if is_count(attempt) and 0 < attempt <= _MAX_ATTEMPT:
                    return attempt + 1
            if start == 0:
                return 1
            reach *= 4


class RewindFilter:
    """Detects the steps of earlier attempts that the current attempt repeats. Pass it the events in file order."""

    def __init__(self) -> None:
        self._attempt: int | None = None
        self._resumed_step: int | None = None  # -1: started over
        self._numbered = False

    def see(self, event: Mapping[str, Any]) -> int | None:
        """Return the first repeated step if this event moves the run back, else None.

        A ``resumed`` event with ``step`` = k (the state has k updates) repeats k + 1 and later, a ``started_over`` event all. In
        an attempt without one, the first event of a kind in ``NUMBERED`` repeats its own step and later.
        """
        attempt = event.get("attempt")
        if attempt != self._attempt:
            self._attempt, self._resumed_step, self._numbered = attempt, None, False
        step = event.get("step")
        if not isinstance(step, int):
            return None
        if event["kind"] in ("resumed", "started_over"):
            self._resumed_step = step if event["kind"] == "resumed" else -1
            return self._resumed_step + 1
        # after a resumed event only a step matters: an evaluation of the loaded state repeats no update
        if self._numbered or event["kind"] not in (NUMBERED if self._resumed_step is None else ("step",)):
            return None
        self._numbered = True
        # values that the script logged after resuming can precede the first step event, which is written at the next reading
        return step if self._resumed_step is None or step <= self._resumed_step else None
