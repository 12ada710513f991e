"""Extracts the numbers, texts, pictures, histograms and settings of a run that trackers show, from its events. No torch."""

from __future__ import annotations

import json
import math
import re
import secrets
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

from unisono.errors import ConfigError
from unisono.observe.events import ENVELOPE, SERIES, Event, as_mapping, event_step, number
from unisono.storage.files import create_file, open_regular, os_reason
from unisono.storage.limits import MAX_CONFIG_BYTES
from unisono.storage.run_folder import RUN_FILE

TRACKED: Final = (*SERIES, "system", "links", "tap")  # kinds whose numbers trackers show
_NOT_SERIES: Final = ENVELOPE | {"step", "steps_total", "epochs_total", "eta_s"}
END_SAMPLE: Final = "end_of_run/sample"  # the text that a language model has generated at the end of its run
_ID_FILE: Final = "tracker_id"
_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,80}")
_MAX_PAYLOAD_BYTES: Final = 1 << 26


def event_metrics(event: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of ``event`` (of a kind in ``TRACKED``): its numeric fields without envelope, step and ETA.

    Of a ``links`` event those whose names begin with ``comm/``: its other numbers are totals, not figures of a step. Of a
    ``tap`` event ``tap/<module or parameter>/<figure>``.
    """
    if event.get("kind") == "links":
        event = {name: value for name, value in event.items() if name.startswith("comm/")}
    elif event.get("kind") == "tap":
        event = {**event, **_tap_figures(event)}
    series = ((name, number(value)) for name, value in event.items() if name not in _NOT_SERIES)
    return {name: value for name, value in series if value is not None}


def _tap_figures(event: Mapping[str, Any]) -> dict[str, Any]:
    if event.get("skipped"):
        return {}
    found: dict[str, Any] = {}
    for path, figures in as_mapping(event.get("modules")).items():
        output, gradient = (as_mapping(as_mapping(figures).get(name)) for name in ("output", "gradient"))
        found[f"tap/{path}/output_norm"], found[f"tap/{path}/dead_frac"] = output.get("norm"), output.get("dead_frac")
        found[f"tap/{path}/gradient_norm"] = gradient.get("norm")
    for name, figures in as_mapping(event.get("parameters")).items():
        values = as_mapping(figures)
        found[f"tap/{name}/norm"], found[f"tap/{name}/update_frac"] = values.get("norm"), values.get("update_frac")
        found[f"tap/{name}/gradient_norm"] = as_mapping(values.get("gradient")).get("norm")
    return found


def event_text(event: Mapping[str, Any], run_dir: Path) -> tuple[str, str] | None:
    """Name and content of the text that ``event`` shows: one that the user logged, or the sample at the end of a run."""
    if event["kind"] == "sample":
        return END_SAMPLE, f"{event.get('prompt', '')}{event.get('text', '')}"
    if event["kind"] != "log_text":
        return None
    return event["name"], payload(event, run_dir).decode("utf-8", "replace")


def payload(event: Mapping[str, Any], run_dir: Path) -> bytes:
    """Content of the file in the run folder that a ``log_text`` or ``log_image`` event names. Raises OSError."""
    with open_regular(run_dir / event["path"]) as file:
        return file.read(_MAX_PAYLOAD_BYTES)


def histogram_bins(histogram: Mapping[str, Any]) -> tuple[list[float], list[int]]:
    """Edges [n + 1] and counts [n] of one tensor of a ``histograms`` event; both empty where no value is finite.

    Values of either sign are counted by their power of two; zeros, and magnitudes below all powers, are the bin in the middle.
    """
    first, negative, positive = histogram["exponent"], histogram["negative"], histogram["positive"]
    powers = [2.0 ** (first + i) for i in range(len(positive) + 1)]
    edges = [-power for power in reversed(powers)] + powers
    counts = [*reversed(negative), histogram["zeros"], *positive]
    while counts and not counts[-1]:
        counts.pop()
        edges.pop()
    skip = next((i for i, count in enumerate(counts) if count), len(counts))
    return (edges[skip:], counts[skip:]) if counts else ([], [])


def run_settings(run_dir: Path) -> dict[str, bool | int | float | str]:
    """The settings of the run's ``config.toml`` by dotted name, lists as JSON; empty where there is no such file yet."""
    try:
        with open_regular(run_dir / RUN_FILE) as file:
            config = tomllib.loads(file.read(MAX_CONFIG_BYTES).decode("utf-8", "replace"))
    except (OSError, tomllib.TOMLDecodeError, RecursionError):
        return {}
    return dict(_flat(config, ""))


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, bool | int | float | str]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(cast("dict[str, Any]", value), f"{prefix}{name}.")
        elif isinstance(value, bool | int | float | str):
            yield f"{prefix}{name}", value
        else:
            yield f"{prefix}{name}", json.dumps(value, default=str)


def tracker_id(run_dir: Path, run_id: str) -> str:
    """The id that trackers outside of the run folder know this run by: its name and eight random digits.

    The name alone is that of other runs in other folders. The id is kept in the run folder, so that it stays over restarts.

    Raises:
        ConfigError: Something that is no readable file has its place.
    """
    path = run_dir / _ID_FILE
    try:
        with open_regular(path) as file:
            known = file.read(200).decode("ascii", "replace").strip()
        if _ID.fullmatch(known):
            return known
        path.unlink()  # cut short by a full disk
    except FileNotFoundError:
        pass
    except OSError as error:
        raise _no_id(path, os_reason(error)) from error
    made = f"{re.sub(r'[^A-Za-z0-9_-]', '-', run_id)[:64]}-{secrets.token_hex(4)}"
    try:
        create_file(path, f"{made}\n".encode())
    except FileExistsError as error:
        raise _no_id(path, "a link that leads nowhere") from error
    return made


def _no_id(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        given=f"{path} cannot be read: {reason}",
        rule="it is a file with the id that trackers know the run by",
        consequence="nothing was started",
        nearest=f"move {path} away: another id is made, and the trackers begin a run of their own",
    )


class FirstValues:
    """Keeps from a tracker, which cannot take values back, what it has: the steps of a name only rise, and first values stay.

    ``last_steps`` has the last step that the tracker has of each name.
    """

    def __init__(self, last_steps: Mapping[str, int]) -> None:
        self.last_steps = dict(last_steps)

    def is_new(self, name: str, step: int) -> bool:
        """Whether the tracker has no value of ``name`` at this step or a later one; it is then taken to have this one."""
        if step <= self.last_steps.get(name, -1):
            return False
        self.last_steps[name] = step
        return True


class TrackedEvents:
    """Turns the events of a run into those that a tracker gets.

    All ``system`` events of a step become one, with their means. A ``links`` or ``tap`` event keeps its metrics, and is left
    out where it has none. All other events stay as they are.

    A sample belongs to the last finished step. Those of a step are given when the next one is read, so that a tracker gets them
    in the order of steps; those of an attempt that makes no step are given to none. A ``links`` or ``tap`` event comes before
    the ``step`` event of its step, and is given after it.
    """

    def __init__(self) -> None:
        self._held: dict[
            int, tuple[Event, dict[str, list[float]]]
        ] = {}  # envelope of its newest sample, values by name
        self._early: list[Event] = []  # whose step is not read yet
        self._last_given = self._last_step = -1
        self._has_steps = False

    def see(self, event: Event) -> list[Event]:
        """The events that a tracker gets now."""
        kind = event["kind"]
        if kind == "system":
            self._hold(event)
            return []
        if kind in ("links", "tap"):
            return self._see_early(event)
        if kind in ("resumed", "started_over"):
            self._held, self._early, self._last_given, self._last_step = {}, [], -1, -1
        elif kind == "step":
            self._has_steps, self._last_step = True, event["step"]
            return [*self._give(event["step"]), event, *self._give_early(event["step"])]
        elif kind == "run_end":
            return [*self.rest(), event]
        return [event]

    def rest(self) -> list[Event]:
        """What is left at the end."""
        return [*self._give_early(math.inf), *self._give(math.inf)] if self._has_steps else []

    def _see_early(self, event: Event) -> list[Event]:
        metrics, step = event_metrics(event), event_step(event)
        if not metrics or step is None:
            return []
        self._early.append({**_envelope(event), **metrics})
        return self._give_early(self._last_step)

    def _give_early(self, up_to_step: float) -> list[Event]:
        given = [event for event in self._early if event["step"] <= up_to_step]
        self._early = [event for event in self._early if event["step"] > up_to_step]
        return given

    def _hold(self, event: Event) -> None:
        step = event_step(event)
        if step is None or step <= self._last_given:
            return
        _, values = self._held.get(step, (event, {}))
        for name, value in event_metrics(event).items():
            if math.isfinite(value):
                values.setdefault(name, []).append(value)
        self._held[step] = _envelope(event), values

    def _give(self, before_step: float) -> list[Event]:
        steps = sorted(step for step in self._held if step < before_step)
        held = [self._held.pop(step) for step in steps]
        self._last_given = max([self._last_given, *steps])
        return [event | {name: sum(each) / len(each) for name, each in values.items()} for event, values in held]


def _envelope(event: Event) -> Event:
    """The fields of ``event`` that every event of a step has."""
    return {name: event[name] for name in (*ENVELOPE, "step") if name in event}
