"""The history of one rank, read from its events file: steps as columns, all other events as they are.

A million steps are read in seconds and some hundred MiB, which as dicts would take some GiB.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from unisono.observe.events import (
    NUMBERED,
    Event,
    RewindFilter,
    damage_notes,
    decode_event,
    event_lines,
    number,
    open_events,
)
from unisono.observe.meters import COMM_AXES, PHASES
from unisono.storage.limits import MAX_EVENT_BYTES

# numbers of a step event that a history keeps
STEP_FIELDS: Final = (
    *("t", "m", "steps_total"),
    *("train/loss", "train/lr", "train/grad_norm", "train/tokens_total", "train/skipped_steps"),
    *("perf/step_s", "perf/tokens_per_s", "perf/tokens_per_s_device", "perf/mfu", "perf/matmul_ceiling_frac"),
    *("time/window_s", *(f"time/{phase}_frac" for phase in (*PHASES, "other"))),
    *(f"time/comm_exposed_{axis}_frac" for axis in COMM_AXES),
    "time/gc_frac",
    *("mem/now_bytes", "mem/peak_bytes", "mem/limit_bytes", "mem/peak_reserved_bytes", "mem/alloc_retries"),
)
# of these NaN is a value; other fields are in the last step of each reading alone
_IN_EVERY_STEP: Final = ("train/loss", "train/grad_norm")
_BATCH_LINES: Final = 4096
_STEP_PREFIX: Final = b'{"kind":"step",'
_HISTOGRAMS_PREFIX: Final = b'{"kind":"histograms",'  # large, and only trackers show them
_FILE_NAME: Final = re.compile(r"rank([0-9]{5,9})\.jsonl")
_MAX_COUNT: Final = 1 << 53  # of steps and attempts
_KEYS: Final = {f"field{place}": name for place, name in enumerate(STEP_FIELDS)}
_Step: Any = msgspec.defstruct(
    "_Step",
    [
        ("kind", Literal["step"]),
        ("step", int),
        ("attempt", int, 1),
        ("unit", str | None, None),
        *((key, float | str | None, None) for key in _KEYS),
    ],
    rename=_KEYS,
    gc=False,
)
_decode_step: Final = msgspec.json.Decoder(_Step).decode
_values: Final = attrgetter(*_KEYS)

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
        found = _FILE_NAME.fullmatch(self.path.name)
        return None if found is None else int(found[1])

    @property
    def is_empty(self) -> bool:
        """Whether there is no event."""
        return not self.attempt_s

    def points(self, field: str) -> list[tuple[int, float]]:
        """(step, value) of the steps that have a ``field``; NaN where a loss or norm is no number."""
        values = self.columns[field]
        has = ~np.isnan(values)
        if field in _IN_EVERY_STEP and has.any():
            has[:] = True
        return list(zip(self.steps[has].tolist(), values[has].tolist(), strict=True))


def read_history(path: Path) -> RankHistory:
    """Read one rank's file at ``path``, or the history of no events where there is none.

    Raises:
        ConfigError: It cannot be read, or is no regular file.
    """
    history = _History()
    damaged: list[int] = []
    last_line, is_complete = 0, True
    try:
        file = open_events(path)
    except FileNotFoundError:
        return history.finish(path, ())
    with file:
        lines = enumerate(event_lines(file), start=1)
        while batch := list(islice(lines, _BATCH_LINES)):
            for last_line, line in batch:
                if not history.add(last_line, line):
                    damaged.append(last_line)
            is_complete = batch[-1][1].endswith(b"\n")
            history.flush()
    torn_tail = bool(damaged) and damaged[-1] == last_line and not is_complete
    return history.finish(path, damage_notes(path, damaged, torn_tail=torn_tail))


class _History:
    """Collects the lines of a file."""

    def __init__(self) -> None:
        self._events: list[tuple[int, Event]] = []
        self._batch: list[Any] = []
        self._batch_lines: list[int] = []
        self._counts: list[Counts] = []  # lines, steps and attempts [3, steps] of a batch
        self._values: list[Floats] = []  # [fields, steps] of a batch
        self._unit = "tokens"
        self._rewinds: list[tuple[int, int]] = []  # (line, first step that it and later lines repeat)
        self._filter = RewindFilter()
        self._settled_attempt: Any = None  # further steps of this attempt go back to none

    def add(self, number_of_line: int, line: bytes) -> bool:
        """Add one line; whether it is an event."""
        if line.startswith(_STEP_PREFIX) and len(line) <= MAX_EVENT_BYTES:
            try:
                step = _decode_step(line)
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):  # a value of another type, or no JSON
                step = None
            if step is not None:
                return self._add_step(number_of_line, step)
        if line.startswith(_HISTOGRAMS_PREFIX) and line.endswith(b"}\n"):
            return True
        event = decode_event(line)
        if event is None:
            return False
        if event["kind"] == "step":
            values = {key: number(event.get(name)) for key, name in _KEYS.items()}
            step, attempt = event.get("step"), event.get("attempt", 1)
            if isinstance(step, int) and isinstance(attempt, int):
                self._add_step(number_of_line, _Step(kind="step", step=step, attempt=attempt, **values))
            return True
        if event.get("attempt") != self._settled_attempt:
            self._settled_attempt = None
        self._note_rewind(number_of_line, event)
        self._events.append((number_of_line, event))
        return True

    def _add_step(self, number_of_line: int, step: Any) -> bool:
        if not (0 <= step.step < _MAX_COUNT and 0 <= step.attempt < _MAX_COUNT):
            return True
        if step.attempt != self._settled_attempt:
            self._note_rewind(number_of_line, {"kind": "step", "attempt": step.attempt, "step": step.step})
            self._settled_attempt = step.attempt
        self._batch.append(step)
        self._batch_lines.append(number_of_line)
        self._unit = step.unit or self._unit
        return True

    def _note_rewind(self, number_of_line: int, event: Event) -> None:
        first = self._filter.see(event)
        if first is not None:
            self._rewinds.append((number_of_line, first))

    def flush(self) -> None:
        """Turn the steps so far into columns."""
        if not self._batch:
            return
        rows = list(map(_values, self._batch))
        try:
            values = np.array(rows, dtype=np.float64)
        except ValueError:  # a text that is no number
            values = np.array([[_number(value) for value in row] for row in rows], dtype=np.float64)
        steps, attempts = [step.step for step in self._batch], [step.attempt for step in self._batch]
        self._counts.append(np.array([self._batch_lines, steps, attempts], dtype=np.int64))
        self._values.append(values.T.copy())
        self._batch, self._batch_lines = [], []

    def finish(self, path: Path, notes: Sequence[str]) -> RankHistory:
        """The history of all lines."""
        lines, steps, attempts = np.concatenate([np.zeros((3, 0), np.int64), *self._counts], axis=1)
        values = np.concatenate([np.zeros((len(STEP_FIELDS), 0)), *self._values], axis=1)
        self._values.clear()
        attempt_s = self._attempt_s(attempts, values[STEP_FIELDS.index("m")])
        keep = steps < self._first_repeated(lines)
        columns = {name: row if keep.all() else row[keep] for name, row in zip(STEP_FIELDS, values, strict=True)}
        replaced = {"step": steps[~keep].astype(np.float64), "attempt": attempts[~keep].astype(np.float64)}
        replaced |= {name: row[~keep] for name, row in zip(STEP_FIELDS, values, strict=True)}
        limits = self._first_repeated(np.array([line for line, _ in self._events], dtype=np.int64)).tolist()
        return RankHistory(
            path=path,
            all_events=tuple(event for _, event in self._events),
            events=tuple(
                event for (_, event), limit in zip(self._events, limits, strict=True) if not _is_repeated(event, limit)
            ),
            steps=steps[keep],
            attempts=attempts[keep],
            columns=columns,
            unit=self._unit,
            attempt_s=attempt_s,
            replaced=replaced,
            notes=tuple(notes),
        )

    def _first_repeated(self, lines: Counts) -> Counts:
        """For each of ``lines`` the first step that a later line went back to; a number above all steps if none did."""
        places = np.array([line for line, _ in self._rewinds], dtype=np.int64)
        firsts = np.array([*(max(0, min(first, _MAX_COUNT)) for _, first in self._rewinds), _MAX_COUNT], dtype=np.int64)
        lowest_later = np.minimum.accumulate(firsts[::-1])[::-1]
        return lowest_later[np.searchsorted(places, lines, side="right")]

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


def _is_repeated(event: Event, first_repeated: int) -> bool:
    step = event.get("step")
    return event["kind"] in NUMBERED and isinstance(step, int) and step >= first_repeated


def _number(value: float | str | None) -> float:
    found = number(value)
    return np.nan if found is None else found
