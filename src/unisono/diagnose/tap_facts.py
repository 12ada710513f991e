"""Reads ``tap`` events for diagnosis rules. Their content is not trusted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from unisono.observe.events import Event, as_mapping, event_step, number


@dataclass(frozen=True, kw_only=True, slots=True)
class Tap:
    """The figures of one tapped step that counts.

    Attributes:
        step: Number of the step, from 1.
        dead_fracs: Share of the channels of each module's output that are zero in the whole batch, by module.
        update_fracs: Norm of the update over norm of the weights of each matrix, by parameter, where both are above 0.
    """

    step: int
    dead_fracs: Mapping[str, float] = field(default_factory=dict[str, float])
    update_fracs: Mapping[str, float] = field(default_factory=dict[str, float])


def read_taps(events: Iterable[Event]) -> tuple[Tap, ...]:
    """The tapped steps, ascending; a step's figures may be in several events."""
    dead: dict[int, dict[str, float]] = {}
    updates: dict[int, dict[str, float]] = {}
    for event in events:
        step = event_step(event)
        if event["kind"] != "tap" or step is None or event.get("skipped") is not False:
            continue
        of_step, of_updates = dead.setdefault(step, {}), updates.setdefault(step, {})
        for path, figures in _mappings(event.get("modules")):
            share = number(as_mapping(figures.get("output")).get("dead_frac"))
            if share is not None and 0 <= share <= 1:
                of_step[path] = share
        for name, figures in _mappings(event.get("parameters")):
            share, shape = number(figures.get("update_frac")), figures.get("shape")
            is_matrix = isinstance(shape, list) and len(cast("list[Any]", shape)) > 1
            if share is not None and is_matrix and math.isfinite(share) and share > 0:
                of_updates[name] = share
    return tuple(Tap(step=step, dead_fracs=dead[step], update_fracs=updates[step]) for step in sorted(dead))


def _mappings(value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, item in as_mapping(value).items():
        yield name, as_mapping(item)
