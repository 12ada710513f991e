"""What the monitor saw during a run: its ``system`` events as arrays, and what they say about a rank that is slow.

Events may be of anybody: values of other types, of no finite number or out of range are not known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from unisono.observe.events import Event, event_step, number
from unisono.observe.history import Floats

MIN_SAMPLES: Final = 3  # fewer say nothing
SATURATED_FRAC: Final = 0.9  # of a host's processors, for more processes to help no more
# figures of a sample, and the largest value that each can have
_FIGURES: Final = {
    "process_cpus": 1e6,
    "core_wait_frac": 1.0,
    "cpu_frac": 1.0,
    "iowait_frac": 1.0,
    "disk_read_bytes_per_s": 1e15,
    "device_throttled": 1.0,
    "device_clock_hz": 1e12,
    "device_max_clock_hz": 1e12,
}
_DIFFERENCE: Final = 0.1  # of two shares of the samples, for them to count as different
_CORE_WAIT: Final = 0.05  # the same of the time without a core
_LOWER: Final = 0.95  # a clock that is less than this of another is lower
_MAX_TEXT: Final = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorSamples:
    """Samples of one rank, in the order of its events.

    Attributes:
        steps: Last finished step of each sample [samples].
        figures: Values by name, without ``sys/``; ``clock_frac`` is the clock over the highest. NaN where not known [samples].
        slowdowns: Why the device was slowed down; empty where it was not, or nothing is known [samples].
    """

    steps: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    figures: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    slowdowns: tuple[str, ...] = ()

    def between(self, first: int, last: int) -> MonitorSamples:
        """The samples of the steps from ``first`` to ``last``."""
        keep = (self.steps >= first) & (self.steps <= last)
        return MonitorSamples(
            steps=self.steps[keep],
            figures={name: values[keep] for name, values in self.figures.items()},
            slowdowns=tuple(text for text, is_kept in zip(self.slowdowns, keep, strict=True) if is_kept),
        )

    def mean(self, name: str) -> float | None:
        """Mean of a figure; None where fewer than ``MIN_SAMPLES`` samples have it."""
        values = self.figures.get(name, np.zeros(0))
        known = values[~np.isnan(values)]
        return float(known.mean()) if len(known) >= MIN_SAMPLES else None


@dataclass(frozen=True, slots=True)
class HostCause:
    """What a host or device does to a slow rank: as evidence, and what to do about it; both empty where nothing is seen."""

    evidence: tuple[str, ...] = ()
    advice: str = ""


def read_monitor(events: Iterable[Event], first_step: int) -> MonitorSamples:
    """The samples in the events of one rank, from ``first_step`` on."""
    samples = [
        (step, event)
        for event in events
        if event["kind"] == "system" and (step := event_step(event)) is not None and step >= first_step
    ]
    figures = {
        name: np.array([_known(event.get(f"sys/{name}"), largest) for _, event in samples], dtype=np.float64)
        for name, largest in _FIGURES.items()
    }
    clock_hz, max_clock_hz = figures.pop("device_clock_hz"), figures.pop("device_max_clock_hz")
    has_clock = max_clock_hz > 0
    figures["clock_frac"] = np.where(has_clock, clock_hz / np.where(has_clock, max_clock_hz, 1.0), np.nan)
    return MonitorSamples(
        steps=np.array([step for step, _ in samples], dtype=np.int64),
        figures=figures,
        slowdowns=tuple(_text(event.get("sys/device_slowdowns")) for _, event in samples),
    )


def host_cause(slow: MonitorSamples, usual: Sequence[MonitorSamples], cpu_frac: float | None, than: str) -> HostCause:
    """What is different in the samples of a slow rank.

    Args:
        slow: Its samples.
        usual: Samples that they are compared with: of other ranks, or of the same rank when it was fast.
        cpu_frac: Share of the processors of its host that are busy; None where not known.
        than: Whose ``usual`` are, in words, such as ``of the other ranks``.
    """

    def of_usual(name: str) -> float | None:
        means = sorted(mean for samples in usual if (mean := samples.mean(name)) is not None)
        return means[(len(means) - 1) // 2] if means else None

    evidence: list[str] = []
    advice: list[str] = []
    throttled, before = slow.mean("device_throttled"), of_usual("device_throttled")
    if throttled is not None and throttled >= _DIFFERENCE + (before or 0.0):
        reasons = _most_common(slow.slowdowns)
        evidence.append(
            f"its device is throttled in {throttled:.0%} of the samples"
            + (f" ({reasons})" if reasons else "")
            + ("" if before is None else f", that {than} in {before:.0%}")
        )
        advice.append("look at the cooling and the power of that device (unisono doctor shows its state)")
    clock, before = slow.mean("clock_frac"), of_usual("clock_frac")
    if clock is not None and before is not None and clock < _LOWER * before:
        evidence.append(f"the clock of its device is {clock:.0%} of the highest, that {than} {before:.0%}")
        advice = advice or ["look at why the clock of that device is low (unisono doctor shows its state)"]
    if cores := _taken_cores(slow, of_usual("core_wait_frac"), of_usual("process_cpus"), cpu_frac, than):
        evidence.append(cores)
        advice.append("end what else runs on that host, or give the rank cores of its own")
    return HostCause(tuple(evidence), "; ".join(advice))


def _taken_cores(
    slow: MonitorSamples, usual_wait: float | None, usual_cpus: float | None, cpu_frac: float | None, than: str
) -> str:
    """What says that other threads or processes use the cores of the slow rank; empty where nothing does."""
    waits, cpus = slow.mean("core_wait_frac"), slow.mean("process_cpus")
    busy = "" if cpu_frac is None else f"; the processors of its host are busy for {cpu_frac:.0%} of the time"
    if waits is not None:
        if waits < _CORE_WAIT + (usual_wait or 0.0):
            return ""
        compared = "" if usual_wait is None else f", that {than} for {usual_wait:.0%}"
        return (
            f"its training thread waits for a core for {waits:.0%} of the time{compared}: other threads or processes take "
            f"its cores{busy}"
        )
    if cpus is None or usual_cpus is None or cpu_frac is None or cpu_frac < SATURATED_FRAC or cpus > 0.9 * usual_cpus:
        return ""
    return f"its process keeps {cpus:.2g} CPUs busy, that {than} {usual_cpus:.2g}: other processes take its cores{busy}"


def _most_common(texts: Sequence[str]) -> str:
    """The text that most samples have, of those that have one."""
    found = Counter(text for text in texts if text).most_common(1)
    return found[0][0] if found else ""


def _known(value: object, largest: float) -> float:
    found = number(value)
    return found if found is not None and 0.0 <= found <= largest else np.nan


def _text(value: object) -> str:
    return value[:_MAX_TEXT] if isinstance(value, str) else ""
