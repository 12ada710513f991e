"""The history of one rank, read from its events file: steps as columns, all other events as they are.

A million steps are read in seconds and some hundred MiB, which as dicts would take some GiB.
"""

from __future__ import annotations

import itertools
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec.structs import astuple
from numpy.typing import NDArray

from unisono.observe.events import (
    MAX_COUNT,
    NUMBERED,
    Event,
    RewindFilter,
    damage_notes,
    decode_event,
    event_lines,
    event_step,
    is_count,
    number,
    open_events,
    other_run,
    rank_of,
    schema_notes,
)
from unisono.observe.meters import ALL_PHASES, COMM_PHASES

# numbers of a step event that a history keeps
STEP_FIELDS: Final = (
    *("t", "m", "steps_total"),
    *("train/loss", "train/lr", "train/grad_norm", "train/tokens_total", "train/skipped_steps"),
    *("perf/step_s", "perf/tokens_per_s", "perf/tokens_per_s_device", "perf/mfu", "perf/matmul_ceiling_frac"),
    *("time/window_s", *(f"time/{phase}_frac" for phase in ALL_PHASES)),
    *(f"time/{phase}_frac" for phase in COMM_PHASES),
    "time/gc_frac",
    *("time/loader_read_s", "time/loader_transform_s", "time/loader_collate_s"),
    *("mem/now_bytes", "mem/peak_bytes", "mem/limit_bytes", "mem/peak_reserved_bytes", "mem/alloc_retries"),
)
WARM_UP_READINGS: Final = (
    2  # the first readings of an attempt, which allocate and initialise: no figure of speed has them
)
# of these NaN is a value; other fields are in the last step of each reading alone
_IN_EVERY_STEP: Final = ("train/loss", "train/grad_norm")
_HISTOGRAMS_PREFIX: Final = b'{"kind":"histograms",'  # large, and only trackers show them
_KEYS: Final = {f"field{place}": name for place, name in enumerate(STEP_FIELDS)}
_Count = Annotated[int, msgspec.Meta(ge=0, lt=MAX_COUNT)]
_HEAD: Final = (("kind", Literal["step"]), ("step", _Count), ("attempt", _Count, 1), ("unit", str | None, None))
_Step: Any = msgspec.defstruct(
    "_Step",
    [
        *_HEAD,
        *((key, float | str | None, float("nan")) for key in _KEYS),
    ],
    rename=_KEYS,
    gc=False,
)
_decode_step: Final = msgspec.json.Decoder(_Step).decode
_MAX_DIGITS: Final = sys.int_info.default_max_str_digits  # of an integer that Python reads from a text
_pack: Final = struct.Struct(f"{len(_KEYS)}d").pack

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankHistory:
    """The events of one rank, over all attempts.

    Attributes:
        path: The file.
        all_events: Every event but steps, in file order.
        events: The same without those of steps that a later attempt repeated.
        steps: Number of each step, from 1, without repeated ones [steps].
        attempts: Attempt that made it [steps].
        columns: ``STEP_FIELDS`` of these steps, NaN where a step has no such number [steps].
        unit: What throughput counts: tokens, samples or images.
        attempt_s: Seconds from the first to the last event of each attempt.
        replaced: ``step``, ``attempt`` and ``STEP_FIELDS`` of the steps that were repeated [repeated steps].
        notes: What could not be read, a sentence each.
    """

    path: Path
    all_events: tuple[Event, ...] = ()
    events: tuple[Event, ...] = ()
    steps: Counts
    attempts: Counts
    columns: Mapping[str, Floats]
    unit: str = "tokens"
    attempt_s: Mapping[int, float]
    replaced: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    notes: tuple[str, ...] = ()

    @property
    def rank(self) -> int | None:
        """The rank, by the name of the file; None if that is no name of an events file."""
        return rank_of(self.path)

    @property
    def is_empty(self) -> bool:
        """Whether there is no event."""
        return not self.attempt_s

    def points(self, field: str) -> tuple[Counts, Floats]:
        """Number and value of the steps that have a ``field`` [points]; NaN where a loss or norm is no number."""
        values = self.columns[field]
        has = ~np.isnan(values)
        if field in _IN_EVERY_STEP and has.any():
            has[:] = True
        return (self.steps, values) if has.all() else (self.steps[has], values[has])


def read_history(path: Path) -> RankHistory:
    """Read one rank's file at ``path``, or the history of no events where there is none.

    Raises:
        ConfigError: It cannot be read, or is no regular file.
    """
    history = _History()
    try:
        file = open_events(path)
    except FileNotFoundError:
        return history.finish(path)
    with file:
        for lines, has_end in event_lines(file):
            history.add(lines, has_end=has_end)
    return history.finish(path)


def of_one_run(histories: Iterable[RankHistory]) -> Iterator[RankHistory]:
    """The histories of the files in a folder, the lowest rank first, without the events of files that do not belong to its run.

    Of such a file a note is left. A file belongs to the run if it has a name of the run that the lowest rank's file has too: a
    folder that was renamed between two starts has events of several names.
    """
    own: frozenset[str] = frozenset()
    for history in histories:
        if history.rank is None:
            yield _left_out(history, "its name is not that of a rank's file, such as rank00003.jsonl")
            continue
        names = frozenset(
            name
            for event in history.all_events
            if event["kind"] == "run_start" and isinstance(name := event.get("run"), str)
        )
        own = own or names
        yield _left_out(history, other_run(names, own)) if names and own.isdisjoint(names) else history


def _left_out(history: RankHistory, reason: str) -> RankHistory:
    return replace(_History().finish(history.path), notes=(f"{history.path.name}: left out, as {reason}",))


def _decode_steps(lines: Sequence[bytes]) -> tuple[list[Any], bool]:
    """The step of each line, and whether all are steps; None for another line, or for a step with values of other types."""
    steps: list[Any] = []
    are_all = True
    # The decoder skips fields that a step does not have without a look at their encoding or at the length of an integer.
    if not _is_utf8(b"\n".join(lines)) or max(map(len, lines)) > _MAX_DIGITS:
        lines = [line if _is_utf8(line) and len(line) <= _MAX_DIGITS else b"" for line in lines]
    decoded = map(_decode_step, lines)
    while True:
        try:
            for step in decoded:
                steps.append(step)  # list.extend does not document what it keeps when the iterator raises
            return steps, are_all
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            steps.append(None)
            are_all = False


def _is_utf8(text: bytes) -> bool:
    if text.isascii():
        return True
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


class _History:
    """Collects the lines of a file."""

    def __init__(self) -> None:
        self._events: list[tuple[int, Event]] = []
        # arrays grow in place: a second copy of a million steps would take some hundred MiB
        self._line_numbers, self._steps, self._attempts = array("q"), array("q"), array("q")
        self._columns = [array("d") for _ in STEP_FIELDS]
        self._unit = "tokens"
        self._num_lines = 0
        self._has_end = True  # whether the last line ended with a newline
        self._damaged: list[int] = []
        self._rewinds: list[tuple[int, int]] = []  # (line number, first step that this and later lines repeat)
        self._filter = RewindFilter()
        self._settled_attempt: Any = None  # its first step was seen: later ones repeat no step of an earlier attempt

    def add(self, lines: Sequence[bytes], *, has_end: bool) -> None:
        """Add the next lines. ``has_end``: whether the last of them ended with a newline."""
        steps, are_all = _decode_steps(lines)
        line_numbers: Sequence[int] = range(self._num_lines + 1, self._num_lines + 1 + len(lines))
        if not are_all or [step.attempt for step in steps].count(self._settled_attempt) < len(steps):
            steps, line_numbers = self._add_mixed(line_numbers, lines, steps)
        self._num_lines += len(lines)
        self._has_end = has_end
        if steps:
            self._add_steps(line_numbers, steps)

    def _add_mixed(
        self, all_line_numbers: Iterable[int], lines: Iterable[bytes], decoded: Iterable[Any]
    ) -> tuple[list[Any], list[int]]:
        """Add the lines that are no steps; returns the steps and their line numbers."""
        steps: list[Any] = []
        line_numbers: list[int] = []
        for line_number, line, step in zip(all_line_numbers, lines, decoded, strict=True):
            step = self._add_event(line_number, line) if step is None else step
            if step is None:
                continue
            if step.attempt != self._settled_attempt:
                self._note_rewind(line_number, {"kind": "step", "attempt": step.attempt, "step": step.step})
                self._settled_attempt = step.attempt
            steps.append(step)
            line_numbers.append(line_number)
        return steps, line_numbers

    def _add_event(self, line_number: int, line: bytes) -> Any:
        """Add a line that the step decoder refused; returns the step if it is one with values of other types."""
        if line.startswith(_HISTOGRAMS_PREFIX) and line.endswith(b"}"):
            return None
        event = decode_event(line)
        if event is None:
            self._damaged.append(line_number)
            return None
        if event["kind"] == "step":
            step, attempt = event.get("step"), event.get("attempt", 1)
            if not (is_count(step) and is_count(attempt)):
                return None
            values = {key: event.get(name) for key, name in _KEYS.items()}
            unit = event.get("unit")
            values["unit"] = unit if isinstance(unit, str) else None
            return _Step(kind="step", step=int(step), attempt=int(attempt), **values)
        if event.get("attempt") != self._settled_attempt:
            self._settled_attempt = None
        self._note_rewind(line_number, event)
        self._events.append((line_number, event))
        return None

    def _note_rewind(self, line_number: int, event: Event) -> None:
        first = self._filter.see(event)
        if first is not None:
            self._rewinds.append((line_number, first))

    def _add_steps(self, line_numbers: Sequence[int], steps: Sequence[Any]) -> None:
        """Append steps to the columns."""
        rows = [astuple(step)[len(_HEAD) :] for step in steps]
        try:
            packed = b"".join(itertools.starmap(_pack, rows))
        except struct.error:  # a text or None
            packed = b"".join(_pack(*map(_number, row)) for row in rows)
        self._line_numbers.extend(line_numbers)
        self._steps.extend([step.step for step in steps])
        self._attempts.extend([step.attempt for step in steps])
        values = np.frombuffer(packed).reshape(len(steps), len(_KEYS))
        for column, numbers in zip(self._columns, values.T, strict=True):
            column.frombytes(numbers.tobytes())
        self._unit = next((step.unit for step in reversed(steps) if step.unit), self._unit)

    def finish(self, path: Path) -> RankHistory:
        """The history of all lines."""
        line_numbers, steps, attempts = (
            np.array(numbers) for numbers in (self._line_numbers, self._steps, self._attempts)
        )
        attempt_s = self._attempt_s(attempts, np.array(self._columns[STEP_FIELDS.index("m")]))
        keep = steps < self._first_repeated(line_numbers)
        rows = slice(None) if keep.all() else keep
        columns: dict[str, Floats] = {}
        replaced = {"step": steps[~keep].astype(np.float64), "attempt": attempts[~keep].astype(np.float64)}
        for name in STEP_FIELDS:
            values = np.frombuffer(self._columns.pop(0))
            columns[name], replaced[name] = values[rows], values[~keep]
        limits = self._first_repeated(
            np.array([line_number for line_number, _ in self._events], dtype=np.int64)
        ).tolist()
        torn_tail = bool(self._damaged) and self._damaged[-1] == self._num_lines and not self._has_end
        return RankHistory(
            path=path,
            all_events=tuple(event for _, event in self._events),
            events=tuple(
                event for (_, event), limit in zip(self._events, limits, strict=True) if not _is_repeated(event, limit)
            ),
            steps=steps[rows],
            attempts=attempts[rows],
            columns=columns,
            unit=self._unit,
            attempt_s=attempt_s,
            replaced=replaced,
            notes=(
                *damage_notes(path, self._damaged, torn_tail=torn_tail),
                *schema_notes(path, (event for _, event in self._events if event["kind"] == "run_start")),
            ),
        )

    def _first_repeated(self, line_numbers: Counts) -> Counts:
        """For each line the first step that a later line repeats; a number above all steps if none does."""
        rewinds = np.array([line_number for line_number, _ in self._rewinds], dtype=np.int64)
        firsts = np.array(
            [*(max(-MAX_COUNT, min(first, MAX_COUNT)) for _, first in self._rewinds), MAX_COUNT], dtype=np.int64
        )
        lowest_later = np.minimum.accumulate(firsts[::-1])[::-1]
        return lowest_later[np.searchsorted(rewinds, line_numbers, side="right")]

    def _attempt_s(self, attempts: Counts, at_s: Floats) -> dict[int, float]:
        spans: dict[int, list[float]] = {}
        order = np.argsort(attempts, kind="stable")
        if len(order):
            begins = np.flatnonzero(np.diff(attempts[order], prepend=-1))
            for attempt, first_s, last_s in zip(
                attempts[order][begins].tolist(),
                np.fmin.reduceat(at_s[order], begins).tolist(),
                np.fmax.reduceat(at_s[order], begins).tolist(),
                strict=True,
            ):
                spans[attempt] = [] if np.isnan(first_s) else [first_s, last_s]
        for _, event in self._events:
            attempt, at = event.get("attempt"), number(event.get("m"))
            if isinstance(attempt, int) and at is not None:
                spans.setdefault(attempt, []).append(at)
        return {attempt: max(times) - min(times) for attempt, times in spans.items() if times}


@dataclass(frozen=True, kw_only=True, slots=True)
class Readings:
    """Readings of the timers that judge the speed of a run; each is written with the last of its steps.

    Attributes:
        rows: Where that step is in the history [readings].
        num_steps: Number of steps of the reading [readings].
        wall_s: Seconds of them [readings].
    """

    rows: Counts
    num_steps: Counts
    wall_s: Floats

    def where(self, chosen: NDArray[np.bool_]) -> Readings:
        """Those that are chosen [readings]."""
        return Readings(rows=self.rows[chosen], num_steps=self.num_steps[chosen], wall_s=self.wall_s[chosen])


def steady_readings(history: RankHistory) -> Readings:
    """The readings of all attempts, without the first of each and without those of steps that compiled or were profiled."""
    columns = history.columns
    rows = np.flatnonzero(np.isfinite(columns["time/other_frac"]))
    attempts = history.attempts[rows]
    is_first = np.append(True, attempts[1:] != attempts[:-1])[: len(rows)]
    begins = np.searchsorted(history.attempts, attempts)  # attempts follow each other
    num_steps = np.where(is_first, rows - begins + 1, np.diff(rows, prepend=0))
    place = np.arange(len(rows)) - np.maximum.accumulate(np.where(is_first, np.arange(len(rows)), 0))
    wall_s = columns["time/window_s"][rows]
    since_last_s = np.where(is_first, np.nan, np.diff(columns["m"][rows], prepend=np.nan))
    wall_s = np.where(np.isnan(wall_s), since_last_s, wall_s)  # older events have no length
    keep = (place >= WARM_UP_READINGS) & (num_steps > 0) & (wall_s > 0) & np.isfinite(wall_s)
    found = Readings(rows=rows, num_steps=num_steps, wall_s=wall_s).where(keep)
    first_steps = history.steps[found.rows - found.num_steps + 1]
    return found.where(undisturbed(history.all_events, attempts[keep], first_steps, history.steps[found.rows]))


def undisturbed(
    events: Iterable[Event], attempts: Counts, first_steps: Counts, last_steps: Counts
) -> NDArray[np.bool_]:
    """Which readings, by their attempt, first and last step, have no step that compiled or was profiled [readings]."""
    spans: dict[Any, list[tuple[int, int]]] = {}
    for event in events:
        is_profile = event["kind"] in ("profile", "profile_begin")
        last = event_step(event if event["kind"] != "profile_begin" else {"step": event.get("last_step")})
        if last is None or (event["kind"] != "compiled" and not is_profile):
            continue
        first = last
        if is_profile:
            # the step before the first one warms the profiler up, and what its stop takes is of the step after the last one
            first = min(last, event_step({"step": event.get("first_step")}) or last) - 1
            last += 1
        attempt = event.get("attempt", 1)
        if is_count(attempt):
            spans.setdefault(int(attempt), []).append((first, last))
    keep = np.ones(len(attempts), bool)
    order = np.argsort(attempts, kind="stable")
    ordered = attempts[order]
    for attempt, of_attempt in spans.items():
        begin, end = np.searchsorted(ordered, [attempt, attempt + 1])
        chosen = order[begin:end]
        begins, ends = (np.sort(np.array(steps, dtype=np.int64)) for steps in zip(*of_attempt, strict=True))
        # spans that have begun by the last step of a reading, without those that ended before its first
        overlaps = np.searchsorted(begins, last_steps[chosen], side="right")
        keep[chosen] = overlaps <= np.searchsorted(ends, first_steps[chosen], side="left")
    return keep


def _is_repeated(event: Event, first_repeated: int) -> bool:
    step = event.get("step")
    return event["kind"] in NUMBERED and isinstance(step, int) and max(step, -MAX_COUNT) >= first_repeated


def _number(value: Any) -> float:
    found = number(value)
    return np.nan if found is None else found
