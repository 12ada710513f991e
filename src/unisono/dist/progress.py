"""What this process is doing while no step ends, and how often it has got on with it: what the watchdog reads. No torch."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """Work of the training thread that is no step.

    Attributes:
        name: What it is, such as ``an evaluation``.
        began_s: Monotonic time at which it began, in seconds.
        is_silent: Whether it, or one that it is a part of, may take minutes without a sign of progress.
    """

    name: str
    began_s: float
    is_silent: bool


_activities: list[Activity] = []
_num_activities = 0
# of threads that count at the same time one may be lost: whether the number grows is all that is read
_num_heartbeats = 0


def note_progress() -> None:
    """Count a heartbeat: a sample was read, a batch evaluated, a block written. From any thread."""
    global _num_heartbeats
    _num_heartbeats += 1


def num_heartbeats() -> int:
    """Heartbeats so far."""
    return _num_heartbeats


def num_activities() -> int:
    """Activities that have begun so far."""
    return _num_activities


def current_activity() -> Activity | None:
    """The innermost activity of the training thread; None if there is none."""
    try:
        return _activities[-1]
    except IndexError:  # the watchdog's thread asks, and it has just ended
        return None


@contextmanager
def at_work(name: str, *, silent: bool = False) -> Generator[None]:
    """Inside, the process is at ``name``. The training thread enters it.

    Args:
        name: What it is, such as ``an evaluation``.
        silent: It may take minutes without a sign of progress, such as a compilation or a save.
    """
    global _num_activities
    outer = current_activity()
    activity = Activity(
        name=name, began_s=time.monotonic(), is_silent=silent or (outer is not None and outer.is_silent)
    )
    _num_activities += 1
    _activities.append(activity)
    note_progress()
    try:
        yield
    finally:
        _activities.remove(activity)
        note_progress()
