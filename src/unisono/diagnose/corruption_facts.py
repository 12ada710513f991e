"""Reads the ``corruption`` events of a run, which ``unisono.train.verify`` writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

from unisono.observe.events import MAX_COUNT, Event, event_step

_MAX_RANKS: Final = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class CorruptionFact:
    """A ``corruption`` event.

    Attributes:
        step: Number of the step, from 1, in which it was found.
        source: ``memory``, ``compute`` or ``replica``.
        ranks: The ranks whose values are wrong; all that hold a copy where they cannot be told apart.
        hosts: Their hosts.
        tensor: The first wrong tensor.
        is_certain: Whether the ranks are known.
        evidence: What it follows from.
    """

    step: int
    source: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    tensor: str
    is_certain: bool
    evidence: str


def read_corruptions(events: Iterable[Event]) -> tuple[CorruptionFact, ...]:
    """The corruptions in ``events``, of all attempts; half-written ones are left out."""
    return tuple(_corruptions(events))


def _corruptions(events: Iterable[Event]) -> Iterator[CorruptionFact]:
    for event in events:
        step, source = event_step(event), event.get("source")
        if event["kind"] != "corruption" or step is None or source not in ("memory", "compute", "replica"):
            continue
        ranks = [rank for rank in _list(event.get("ranks")) if isinstance(rank, int) and 0 <= rank < MAX_COUNT]
        yield CorruptionFact(
            step=step,
            source=source,
            ranks=tuple(sorted(set(ranks))),
            hosts=tuple(dict.fromkeys(_text(host) for host in _list(event.get("hosts")) if host)),
            tensor=_text(event.get("tensor")),
            is_certain=event.get("certain") is True,
            evidence=_text(event.get("evidence")),
        )


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value)[:_MAX_RANKS] if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value[:500] if isinstance(value, str) else ""
