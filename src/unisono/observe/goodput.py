"""Where the wall time of a run went, over all its attempts: the goodput ledger.

Every second from the first start to the last event belongs to one category:

useful       steps that were made once, and their waits for data and other ranks
repeated     steps that an earlier attempt had made before, and that count now
lost         steps that were rolled back, and what a crashed attempt did after its last step
waiting      no process of the run was there, between two attempts
starting     from the start of an attempt to its first step: imports, the model, restoring a checkpoint
checkpoint   training stood still for a checkpoint
evaluation   evaluations
other        callbacks, the body of the loop, ends of profiles, export, sample, and what no event explains

Ranks of one attempt share its time: the ledger is their mean. Times are those of the events (``t``, with ``m`` inside an
attempt), and where the launcher recorded them (``launch.json``) the start and end of an attempt's processes. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from unisono.observe.events import Event, number
from unisono.observe.history import Floats, RankHistory, of_one_run, read_history
from unisono.storage.ownership import read_own_json
from unisono.storage.run_folder import EVENTS_FOLDER, LAUNCH_FILE

CATEGORIES: Final = ("useful", "repeated", "lost", "waiting", "starting", "checkpoint", "evaluation", "other")
_MAX_TIME_S: Final = 1e12
_NO_STATE: Final = 1 << 60  # above all steps
_ROW_FIELDS: Final = ("t", "m", "time/window_s", "time/ckpt_stall_frac", "time/eval_frac", "time/other_frac")
_TAIL_OF_KIND: Final = {"eval": "evaluation", "checkpoint_saved": "checkpoint", "checkpoint_failed": "checkpoint"}
_SIGNS_OF_LIFE: Final = frozenset({"system", "step"})  # which end no work


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptTime:
    """One attempt in the ledger.

    Attributes:
        attempt: Its number, from 1.
        began_at_s: Seconds since 1970.
        wall_s: Seconds to its end.
        seconds: Seconds of each of ``CATEGORIES`` but waiting; they add up to ``wall_s``.
        first_step: First step that it made, from 1; None if it made none.
        last_step: Last step that it made.
        lost_steps: Number of its steps that were rolled back.
        repeated_steps: Number of its steps that had been made before.
        end: How it ended: the reason of its ``run_end``, or ``no end`` for a process that was killed or still works.
    """

    attempt: int
    began_at_s: float
    wall_s: float
    seconds: Mapping[str, float]
    first_step: int | None
    last_step: int | None
    lost_steps: int
    repeated_steps: int
    end: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """The ledger of a run.

    Attributes:
        wall_s: Seconds from the first start to the end.
        seconds: Seconds of each of ``CATEGORIES``; they add up to ``wall_s``.
        attempts: The attempts, in order.
    """

    wall_s: float
    seconds: Mapping[str, float]
    attempts: Sequence[AttemptTime]

    @property
    def goodput_frac(self) -> float:
        """Share of the wall time in steps that count, from 0 to 1: useful and repeated ones."""
        return (self.seconds["useful"] + self.seconds["repeated"]) / self.wall_s

    def to_json(self) -> dict[str, Any]:
        """The same as JSON types."""
        return {
            "wall_s": self.wall_s,
            "goodput_frac": self.goodput_frac,
            "seconds": dict(self.seconds),
            "attempts": [
                {
                    "attempt": each.attempt,
                    "began_at_s": each.began_at_s,
                    "wall_s": each.wall_s,
                    "seconds": dict(each.seconds),
                    "first_step": each.first_step,
                    "last_step": each.last_step,
                    "lost_steps": each.lost_steps,
                    "repeated_steps": each.repeated_steps,
                    "end": each.end,
                }
                for each in self.attempts
            ],
        }


def read_goodput(run_dir: Path) -> Goodput | None:
    """The ledger of the run in ``run_dir``; None where no event has a time.

    Raises ConfigError for a file of events that cannot be opened, or is no regular file.
    """
    ledger = GoodputLedger()
    for history in of_one_run(map(read_history, sorted((run_dir / EVENTS_FOLDER).glob("rank*.jsonl")))):
        ledger.add(history)
    return ledger.result(launch_spans(run_dir))


def launch_spans(run_dir: Path) -> list[tuple[float, float | None]]:
    """(start, end) of the attempts of the last launch, in seconds since 1970, the end None while it goes on.

    Empty without a ``launch.json``, and with one that another user can have written or an earlier release wrote.
    """
    try:
        record = read_own_json(run_dir / LAUNCH_FILE)
    except (OSError, ValueError):
        return []
    if not isinstance(record, dict):
        return []
    record = cast("dict[str, Any]", record)
    listed = record.get("attempts")
    ended = [
        cast("dict[str, Any]", each)
        for each in cast("list[Any]", listed if isinstance(listed, list) else [])
        if isinstance(each, dict)
    ]
    spans = [(_time(each.get("began_at_s")), _time(each.get("ended_at_s"))) for each in ended]
    if record.get("attempt") not in [each.get("attempt") for each in ended]:
        spans.append((_time(record.get("began_at_s")), None))
    return [(began, end) for began, end in spans if began is not None]


class GoodputLedger:
    """Collects the histories of a run's ranks, which it does not keep. Add rank 0 first, then the others in any order."""

    def __init__(self) -> None:
        self._parts: dict[int, list[_Part]] = {}  # by attempt
        self._ranks: list[list[_Part]] = []
        self._lineage: list[_Lineage] = []
        self._is_async = False

    def add(self, history: RankHistory) -> None:
        """Add one rank."""
        start = next((event for event in history.all_events if event["kind"] == "run_start"), {})
        plan: Any = start.get("plan")
        sync: Any = plan.get("sync") if isinstance(plan, dict) else None
        self._is_async |= isinstance(sync, dict) and cast("dict[str, Any]", sync).get("kind") == "dist_async"
        rows = _rows_of(history)
        events = _events_of(history)
        lineage = _lineage_of(rows, events)
        limits = _limits_of([*lineage, *self._lineage])
        parts = [
            part
            for attempt, mine in _by_attempt(rows, events)
            if (part := _part_of(attempt, mine, events.get(attempt, []), *limits[attempt])) is not None
        ]
        if not self._lineage:
            self._lineage = lineage
        self._ranks.append(parts)
        for part in parts:
            self._parts.setdefault(part.attempt, []).append(part)

    def result(self, launches: Sequence[tuple[float, float | None]] = ()) -> Goodput | None:
        """The ledger; ``launches`` are the attempts of a launcher (``launch_spans``). None where no event has a time."""
        every = [part for parts in self._parts.values() for part in parts]
        if not every:
            return None
        first_s, last_s = min(part.first_s for part in every), max(part.last_s for part in every)
        if self._is_async:  # each worker counts its own attempts
            ledgers = [
                _sequence([(part, [part]) for part in parts], first_s, last_s, ()) for parts in self._ranks if parts
            ]
            attempts = ledgers[0][1]
            seconds = _mean([each[0] for each in ledgers])
        else:
            first_s = min([first_s, *(began for began, _ in launches)])
            last_s = max([last_s, *(end for _, end in launches if end is not None)])
            ordered = [(self._parts[attempt][0], self._parts[attempt]) for attempt in sorted(self._parts)]
            seconds, attempts = _sequence(ordered, first_s, last_s, launches)
        wall_s = last_s - first_s
        return Goodput(wall_s=wall_s, seconds=seconds, attempts=attempts) if wall_s > 0 else None


# --- one rank ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Lineage:
    """Step numbers of an attempt, from the first rank that was read; files of other ranks may lack them."""

    attempt: int
    state_step: int | None  # number of steps of the state that it began with
    reached: int  # last step that it made, 0 without one


@dataclass(frozen=True, slots=True)
class _Timed:
    """An event with its time in seconds since 1970."""

    at_s: float
    event: Event


@dataclass(kw_only=True, slots=True)
class _Part:
    """One attempt of one rank, times in seconds since 1970. ``read_s`` is that of its last reading of steps."""

    attempt: int
    first_s: float
    last_s: float
    loop_s: float | None = None
    read_s: float | None = None
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    tail: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    first_step: int | None = None
    last_step: int | None = None
    lost_steps: int = 0
    repeated_steps: int = 0
    end: str = "no end"
    has_ended_well: bool = False


def _rows_of(history: RankHistory) -> dict[str, Floats]:
    """All steps of a rank, also those that were made again, in the order in which they were made."""
    rows: dict[str, Floats] = {
        "step": history.steps.astype(np.float64),
        "attempt": history.attempts.astype(np.float64),
        **{name: history.columns[name] for name in _ROW_FIELDS},
    }
    if len(history.replaced.get("step", ())):
        rows = {name: np.concatenate([history.replaced[name], values]) for name, values in rows.items()}
    rows["at"] = np.where(np.isfinite(rows["m"]), rows["m"], rows["t"])
    order = np.lexsort((rows["at"], rows["attempt"]))
    return rows if (np.diff(order) == 1).all() else {name: row[order] for name, row in rows.items()}


def _events_of(history: RankHistory) -> dict[int, list[Event]]:
    events: dict[int, list[Event]] = {}
    for event in history.all_events:
        attempt = event.get("attempt")
        if isinstance(attempt, int) and not isinstance(attempt, bool) and 0 <= attempt < 1 << 53:
            events.setdefault(attempt, []).append(event)
    return events


def _lineage_of(rows: Mapping[str, Floats], events: Mapping[int, Sequence[Event]]) -> list[_Lineage]:
    found: list[_Lineage] = []
    for attempt, mine in _by_attempt(rows, events):
        steps = mine["step"]
        resumed = [_step(event) for event in events.get(attempt, []) if event["kind"] == "resumed"]
        states = [step for step in resumed if step is not None]
        state = min(states) if states else int(steps.min()) - 1 if len(steps) else None
        found.append(_Lineage(attempt, state, int(steps.max()) if len(steps) else 0))
    return found


def _by_attempt(
    rows: Mapping[str, Floats], events: Mapping[int, Sequence[Event]]
) -> Iterator[tuple[int, dict[str, Floats]]]:
    """The rows of each attempt that has rows or events, ascending. Rows are in order of their attempts."""
    numbers = sorted({*events, *np.unique(rows["attempt"]).astype(np.int64).tolist()})
    bounds = [np.searchsorted(rows["attempt"], numbers, side=side).tolist() for side in ("left", "right")]
    for attempt, first, end in zip(numbers, *bounds, strict=True):
        yield attempt, {name: row[first:end] for name, row in rows.items()}


def _limits_of(lineage: Sequence[_Lineage]) -> dict[int, tuple[int, int]]:
    """Of each attempt the lowest state that a later one began with, and the last step that an earlier one reached."""
    ordered = sorted(lineage, key=lambda each: each.attempt)
    reached, lowest, before, after = 0, _NO_STATE, dict[int, int](), dict[int, int]()
    for attempt, each in groupby(ordered, key=lambda each: each.attempt):
        before[attempt] = reached
        reached = max(reached, *(one.reached for one in each))
    for attempt, each in groupby(reversed(ordered), key=lambda each: each.attempt):
        after[attempt] = lowest
        lowest = min([lowest, *(one.state_step for one in each if one.state_step is not None)])
    return {attempt: (after[attempt], before[attempt]) for attempt in before}


def _part_of(
    attempt: int, mine: Mapping[str, Floats], events: Sequence[Event], lowest_later: int, reached: int
) -> _Part | None:
    """The spans of a rank's work in an attempt; None if nothing in it has a time.

    ``mine`` are its rows, ``lowest_later`` the lowest state that a later attempt began with, ``reached`` the last step that an
    earlier one has made.
    """
    offset_s = _offset_s(mine, events)
    at_s = np.where(np.isfinite(mine["m"]), mine["m"] + offset_s, mine["t"])
    timed = [_Timed(at, event) for event in events if (at := _at(event, offset_s)) is not None]
    times = [*at_s[np.isfinite(at_s) & (np.abs(at_s) < _MAX_TIME_S)].tolist(), *(each.at_s for each in timed)]
    if not times:
        return None
    part = _Part(attempt=attempt, first_s=min(times), last_s=max(times))
    if len(mine["step"]):
        steps = mine["step"]
        is_lost = steps > lowest_later
        is_lost |= steps >= np.minimum.accumulate(np.append(steps[1:], np.inf)[::-1])[::-1]
        before = np.maximum.accumulate(np.append(float(reached), steps[:-1]))
        is_repeated = ~is_lost & (steps <= before)
        part.first_step, part.last_step = int(steps.min()), int(steps.max())
        part.lost_steps, part.repeated_steps = int(is_lost.sum()), int(is_repeated.sum())
        _add_windows(part, mine, at_s, is_lost, is_repeated)
    _add_tail(part, timed)
    return part


def _add_windows(
    part: _Part, rows: Mapping[str, Floats], at_s: Floats, is_lost: NDArray[np.bool_], is_repeated: NDArray[np.bool_]
) -> None:
    """Divide the time of the steps, up to the last reading."""
    readings = np.flatnonzero(np.isfinite(rows["time/other_frac"]) & np.isfinite(at_s) & (np.abs(at_s) < _MAX_TIME_S))
    if not len(readings):
        return
    ends_s = np.maximum.accumulate(at_s[readings])
    begins_s = np.append(part.first_s, ends_s[:-1])
    window_s = rows["time/window_s"][readings]
    # events of an earlier release have no windows: a reading begins where the one before ended. A window ends a moment before
    # its event is written, so it may be longer than the time between two events
    window_s = np.where(np.isfinite(window_s), np.clip(window_s, 0.0, _MAX_TIME_S), ends_s - begins_s)
    shares = np.stack(
        [_share(rows[f"time/{name}_frac"][readings]) for name in ("ckpt_stall", "eval", "other")]
    )  # [3, readings]
    shares /= np.maximum(1.0, shares.sum(axis=0))
    step_s = window_s * (1.0 - shares.sum(axis=0))
    firsts = np.append(0, readings[:-1] + 1)
    counts = np.diff(np.append(firsts, readings[-1] + 1)).astype(np.float64)  # steps of each reading
    lost, repeated = (
        np.add.reduceat(flags[: readings[-1] + 1].astype(np.float64), firsts) / counts
        for flags in (is_lost, is_repeated)
    )
    gaps_s = ends_s - window_s - begins_s
    part.loop_s, part.read_s = float(part.first_s + gaps_s[0]), float(ends_s[-1])
    part.seconds = {
        "useful": float((step_s * (1.0 - lost - repeated)).sum()),
        "repeated": float((step_s * repeated).sum()),
        "lost": float((step_s * lost).sum()),
        "checkpoint": float((window_s * shares[0]).sum()),
        "evaluation": float((window_s * shares[1]).sum()),
        "other": float((window_s * shares[2]).sum() + max(0.0, gaps_s[1:].sum())),
    }


def _add_tail(part: _Part, events: Sequence[_Timed]) -> None:
    """The work after the last reading, each event ending a piece of it, and the end of the attempt."""
    begin_s = part.first_s if part.read_s is None else part.read_s
    default = "starting" if part.read_s is None else "other"
    for each in sorted(events, key=lambda event: event.at_s):
        event = each.event
        if event["kind"] == "run_end":
            failed = event.get("reason") in ("failed", "error") or "error" in event
            part.has_ended_well = not failed
            part.end = str(event.get("error") or "failed") if failed else str(event.get("reason") or "finished")
            if failed:
                return  # the time before an error belongs to the step that failed, and what follows is its aftermath
            default = "other"
        if each.at_s <= begin_s or event["kind"] in _SIGNS_OF_LIFE:
            continue
        part.tail.append((each.at_s, _TAIL_OF_KIND.get(event["kind"], default)))


# --- all ranks ---------------------------------------------------------------------------------------------------------


def _sequence(
    attempts: Sequence[tuple[_Part, Sequence[_Part]]],
    first_s: float,
    last_s: float,
    launches: Sequence[tuple[float, float | None]],
) -> tuple[dict[str, float], list[AttemptTime]]:
    """The ledger of attempts that follow each other, from ``first_s`` to ``last_s``; of each the part of one rank, and all."""
    spans = [_span(parts, launches) for _, parts in attempts]
    total: dict[str, float] = dict.fromkeys(CATEGORIES, 0.0)
    listed: list[AttemptTime] = []
    now_s = first_s
    for place, ((shown, parts), (began_s, ended_s)) in enumerate(zip(attempts, spans, strict=True)):
        begin_s = min(max(began_s, now_s), last_s)
        end_s = min(max(ended_s, begin_s), last_s)
        is_last = place == len(attempts) - 1
        if is_last and not any(began > end_s for began, _ in launches) and launches:
            end_s = last_s
        total["waiting"] += begin_s - now_s
        seconds = _mean([_filled(part, begin_s, end_s, is_last=is_last) for part in parts])
        for name, value in seconds.items():
            total[name] += value
        now_s = end_s
        steps = [step for part in parts for step in (part.first_step, part.last_step) if step is not None]
        listed.append(
            AttemptTime(
                attempt=shown.attempt,
                began_at_s=begin_s,
                wall_s=end_s - begin_s,
                seconds={name: value for name, value in seconds.items() if name != "waiting"},
                first_step=min(steps, default=None),
                last_step=max(steps, default=None),
                lost_steps=max(part.lost_steps for part in parts),
                repeated_steps=max(part.repeated_steps for part in parts),
                end=shown.end,
            )
        )
    total["waiting"] += last_s - now_s
    return total, listed


def _span(parts: Iterable[_Part], launches: Sequence[tuple[float, float | None]]) -> tuple[float, float]:
    """Start and end of an attempt: of its processes where a launcher knows them, else of its events."""
    parts = list(parts)
    first_s, last_s = min(part.first_s for part in parts), max(part.last_s for part in parts)
    for began_s, ended_s in launches:
        if began_s <= first_s and (ended_s is None or first_s <= ended_s):
            return began_s, last_s if ended_s is None else max(last_s, ended_s)
    return first_s, last_s


def _filled(part: _Part, begin_s: float, end_s: float, *, is_last: bool) -> dict[str, float]:
    """Seconds of each category of a rank in an attempt from ``begin_s`` to ``end_s``; they add up to it."""
    seconds: dict[str, float] = {**dict.fromkeys(CATEGORIES, 0.0), **part.seconds}
    loop_s, now_s = part.loop_s, part.read_s
    if loop_s is None or now_s is None:
        now_s = begin_s
    else:
        seconds["starting"] += max(0.0, loop_s - begin_s)
    for at_s, category in part.tail:
        seconds[category] += max(0.0, min(at_s, end_s) - now_s)
        now_s = max(now_s, min(at_s, end_s))
    rest = "other" if part.has_ended_well or (is_last and part.read_s is not None) else "lost"
    if part.read_s is None and not part.has_ended_well:
        rest = "starting"
    seconds[rest] += max(0.0, end_s - now_s)
    wall_s, found_s = end_s - begin_s, sum(seconds.values())
    if found_s > 0:  # more than the attempt's time where clocks went back or attempts overlap
        return {name: value * wall_s / found_s for name, value in seconds.items()}
    return seconds


def _mean(ledgers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(each[name] for each in ledgers) / len(ledgers) for name in CATEGORIES}


def _offset_s(rows: Mapping[str, Floats], events: Sequence[Event]) -> float:
    """Seconds to add to the monotonic clock of an attempt for seconds since 1970; robust against a clock that was set."""
    pairs = [(_time(event.get("t")), _time(event.get("m"))) for event in events]
    found = [t - m for t, m in pairs if t is not None and m is not None]
    with np.errstate(invalid="ignore", over="ignore"):  # times of a damaged file may be of any size
        of_rows = rows["t"] - rows["m"]
        differences = np.concatenate([of_rows, np.array(found, np.float64)])
        differences = differences[np.isfinite(differences)]
        offset_s = float(np.median(differences)) if len(differences) else 0.0
    return offset_s if math.isfinite(offset_s) else 0.0


def _at(event: Event, offset_s: float) -> float | None:
    monotonic_s = _time(event.get("m"))
    return _time(event.get("t")) if monotonic_s is None else _time(monotonic_s + offset_s)


def _time(value: Any) -> float | None:
    found = number(value)
    return found if found is not None and abs(found) < _MAX_TIME_S else None


def _step(event: Event) -> int | None:
    step = event.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 1 << 53 else None


def _share(values: Floats) -> Floats:
    return np.clip(np.where(np.isfinite(values), values, 0.0), 0.0, 1.0)
