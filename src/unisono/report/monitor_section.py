"""The section about the load of processes, devices and hosts over the run, from the samples of the monitor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from unisono.observe.events import Event, number
from unisono.observe.formatting import percent
from unisono.observe.history import Floats, RankHistory
from unisono.report.bars import MAX_ROWS, plain
from unisono.report.charts import curve_layout
from unisono.report.section import Section, Table
from unisono.sanitize import printable

_POINTS: Final = 200  # of a curve
_LINES: Final = 8  # of a chart
_LARGEST: Final = 1e18
_LAST_S: Final = 1e11  # of wall-clock times
_GAP: Final = 10.0  # times the usual distance of two points, from which no line is drawn between them
_MAX_NAME: Final = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chart:
    """A chart of one figure or two.

    Attributes:
        name: Part of its id.
        title: What it shows.
        unit: Of its axis.
        scale: What values are multiplied with for it.
        figures: Names of ``system`` events, without ``sys/``, and a word for each where there are two.
        of_host: Whether the figure is of the host, which one rank of it samples.
        from_value: It is left out if no value is above this, in the unit of the event.
    """

    name: str
    title: str
    unit: str
    scale: float = 1.0
    figures: tuple[tuple[str, str], ...]
    of_host: bool = False
    from_value: float = -1.0


_CHARTS: Final = (
    _Chart(name="cpus", title="CPUs that the process keeps busy", unit="CPUs", figures=(("process_cpus", ""),)),
    _Chart(
        name="core_wait",
        title="Training thread without a core",
        unit="%",
        scale=100,
        figures=(("core_wait_frac", ""),),
        from_value=0.01,
    ),
    _Chart(name="device", title="Device in use", unit="%", scale=100, figures=(("device_util_frac", ""),)),
    _Chart(name="power", title="Power of the device", unit="W", figures=(("device_power_w", ""),)),
    _Chart(name="clock", title="Clock of the device", unit="GHz", scale=1e-9, figures=(("device_clock_hz", ""),)),
    _Chart(
        name="throttled",
        title="Device throttled",
        unit="%",
        scale=100,
        figures=(("device_throttled", ""),),
        from_value=0.0,
    ),
    _Chart(
        name="device_memory",
        title="Memory of the device that processes hold",
        unit="GiB",
        scale=2.0**-30,
        figures=(("device_memory_bytes", ""),),
    ),
    _Chart(name="host", title="Busy processors", unit="%", scale=100, figures=(("cpu_frac", ""),), of_host=True),
    _Chart(
        name="disk",
        title="Disks",
        unit="MB/s",
        scale=1e-6,
        figures=(("disk_read_bytes_per_s", "read"), ("disk_written_bytes_per_s", "written")),
        of_host=True,
    ),
    _Chart(
        name="network",
        title="Network",
        unit="MB/s",
        scale=1e-6,
        figures=(("network_sent_bytes_per_s", "sent"), ("network_received_bytes_per_s", "received")),
        of_host=True,
    ),
)
_FIELDS: Final = tuple(name for chart in _CHARTS for name, _ in chart.figures)


@dataclass(frozen=True, kw_only=True, slots=True)
class _RankSamples:
    """The samples of one rank, many of them averaged.

    Attributes:
        host: Name of the host of the newest sample; empty if not known.
        at_s: Wall-clock times in seconds since 1970, ascending [points].
        values: Figures, NaN where not known [points].
        throttled_frac: Share of the samples in which the device was throttled.
        slowdowns: The most common reason for that.
        num_errors: Uncorrected errors of the device's memory at the last sample.
    """

    host: str
    at_s: Floats
    values: dict[str, Floats]
    throttled_frac: float
    slowdowns: str
    num_errors: float


@dataclass(slots=True)
class MonitorCurves:
    """The samples of all ranks, of all attempts, collected while histories are read one by one."""

    ranks: dict[int, _RankSamples] = field(default_factory=dict[int, _RankSamples])

    def add(self, history: RankHistory) -> None:
        """Take the samples of a rank."""
        samples = [
            (at_s, event)
            for event in history.all_events
            if event["kind"] == "system" and (at_s := number(event.get("t"))) is not None and 0 < at_s < _LAST_S
        ]
        if history.rank is None or not samples:
            return
        samples.sort(key=lambda sample: sample[0])
        events = [event for _, event in samples]
        columns = {name: _column(events, name) for name in _FIELDS}
        throttled = columns["device_throttled"]
        told = Counter(
            _text(event.get("sys/device_slowdowns")) for event in events if event.get("sys/device_slowdowns")
        )
        errors = _column(events, "device_uncorrected_errors")
        errors = errors[~np.isnan(errors)]
        self.ranks[history.rank] = _RankSamples(
            host=_text(events[-1].get("host")),
            at_s=_averaged(np.array([at_s for at_s, _ in samples])),
            values={name: _averaged(values) for name, values in columns.items() if not np.isnan(values).all()},
            throttled_frac=float(np.nanmean(throttled)) if not np.isnan(throttled).all() else 0.0,
            slowdowns=told.most_common(1)[0][0] if told else "",
            num_errors=float(errors[-1]) if len(errors) else 0.0,
        )


def monitor_section(curves: MonitorCurves) -> Section | None:
    """The section; None where there is no sample."""
    if not curves.ranks:
        return None
    began_s = min(float(samples.at_s[0]) for samples in curves.ranks.values())
    took_s = max(float(samples.at_s[-1]) for samples in curves.ranks.values()) - began_s
    units = (("h", 3600.0), ("min", 60.0), ("s", 1.0))
    unit, unit_s = next((each for each in units if took_s >= 3 * each[1]), units[-1])
    charts: list[dict[str, Any]] = []
    has_left_out = False
    for chart in _CHARTS:
        lines = [
            (name, samples.at_s, samples.values[figure])
            for rank, samples in sorted(curves.ranks.items())
            for figure, word in chart.figures
            if figure in samples.values
            for name in [f"{_owner(rank, samples, chart)} {word}".strip()]
        ]
        if not any(np.nanmax(values) > chart.from_value for _, _, values in lines):
            continue
        chosen = _extremes(lines)
        has_left_out |= len(chosen) < len(lines)
        data = [
            _line(name, (at_s - began_s) / unit_s, values * chart.scale, with_name=len(chosen) > 1)
            for name, at_s, values in chosen
        ]
        layout = curve_layout(chart.title, chart.unit, height=260)
        layout["xaxis"] = {"title": {"text": f"{unit} since the first sample"}, "zeroline": False}
        layout["yaxis"] |= {"rangemode": "tozero"}
        charts.append({"id": f"monitor_{chart.name}", "data": data, "layout": layout})
    note = (
        "Samples of all attempts, each the mean since the one before; those of devices are of a moment. Figures of a host "
        "contain other processes on it."
    )
    if has_left_out:
        note += f" Of more than {_LINES} curves those with the lowest and the highest mean are drawn."
    tables = [table] if (table := _troubles(curves)) is not None else []
    if not charts and not tables:
        return None
    return Section(title="Load of processes, devices and hosts", note=note, charts=charts, tables=tables, in_grid=True)


def _troubles(curves: MonitorCurves) -> Table | None:
    """The ranks whose devices were throttled, or have errors of memory."""
    rows = [
        [
            f"rank {rank}",
            samples.host,
            percent(samples.throttled_frac),
            samples.slowdowns,
            f"{samples.num_errors:.0f}",
        ]
        for rank, samples in sorted(curves.ranks.items())
        if samples.throttled_frac > 0 or samples.num_errors > 0
    ]
    if not rows:
        return None
    head = ("device of", "host", "samples in which it was throttled", "mostly because of", "uncorrected memory errors")
    return Table(head=head, rows=rows[:MAX_ROWS], left_out=max(0, len(rows) - MAX_ROWS))


def _owner(rank: int, samples: _RankSamples, chart: _Chart) -> str:
    if not chart.of_host:
        return f"rank {rank}"
    return samples.host or f"host of rank {rank}"


def _extremes(lines: Sequence[tuple[str, Floats, Floats]]) -> list[tuple[str, Floats, Floats]]:
    """The curves that a chart has room for: of many those with the lowest and the highest mean."""
    if len(lines) <= _LINES:
        return list(lines)
    order = np.argsort([np.nanmean(values) for _, _, values in lines], kind="stable").tolist()
    return [lines[place] for place in sorted([*order[: _LINES // 2], *order[-_LINES // 2 :]])]


def _line(name: str, at: Floats, values: Floats, *, with_name: bool) -> dict[str, Any]:
    is_known = ~np.isnan(values)
    at, values = at[is_known], values[is_known]
    distances = np.diff(at)
    gaps = np.flatnonzero(distances > _GAP * np.median(distances)) + 1 if len(at) > 2 else np.zeros(0, np.int64)
    at, values = np.insert(at, gaps, at[gaps - 1]), np.insert(values, gaps, np.nan)
    return {
        "type": "scatter",
        "mode": "lines" if len(at) > 2 else "lines+markers",
        "name": plain(name),
        "showlegend": with_name,
        "x": [float(f"{each:.5g}") for each in at.tolist()],
        "y": [None if np.isnan(each) else float(f"{each:.4g}") for each in values.tolist()],
    }


def _averaged(values: Floats) -> Floats:
    """At most ``_POINTS`` means of neighbours; NaN where none of them is known."""
    if len(values) <= _POINTS:
        return values
    parts = np.array_split(values, _POINTS)
    return np.array([np.nan if np.isnan(part).all() else np.nanmean(part) for part in parts])


def _column(events: Sequence[Event], name: str) -> Floats:
    found = [number(event.get(f"sys/{name}")) for event in events]
    return np.array([np.nan if each is None or not 0 <= each < _LARGEST else each for each in found], dtype=np.float64)


def _text(value: object) -> str:
    return printable(value[:_MAX_NAME]) if isinstance(value, str) else ""
