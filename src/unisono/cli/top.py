"""``unisono top``: where the ranks of a run stand, while it goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from unisono.cli.common import ExpandedPath, FiniteRange, common_options, print_result
from unisono.sanitize import printable

if TYPE_CHECKING:
    from rich.table import Table

    from unisono.observe.rank_status import RankStatus

_COLUMNS: Final = ("rank", "step", "loss", "step time", "data", "comm", "memory", "CPUs", "last event")
_DEVICE_COLUMNS: Final = ("util", "power", "clock", "temp", "memory", "ECC err", "throttled")
_HOST_COLUMNS: Final = ("CPU", "I/O wait", "memory", "disk read", "written", "net sent", "received")
_LINK_COLUMNS: Final = ("axis", "rate", "measured", "used", "up to step")
_MAX_CELL: Final = 16  # characters; lines have 80
_MAX_HOST: Final = 15
_MAX_REASON: Final = 20


@dataclass(frozen=True, slots=True)
class _Cells:
    """A table as text: its head, and its rows of as many cells."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@click.command("top")
@click.argument("run_dir", type=ExpandedPath(file_okay=False))
@click.option("--every-s", default=2.0, type=FiniteRange(min=0.1), help="Seconds between looks.")
@click.option("--once", is_flag=True, help="Look once and end.")
@common_options
@click.pass_context
def command(context: click.Context, run_dir: str, every_s: float, once: bool, as_json: bool) -> None:
    """Show the ranks of the run in RUN_DIR, from their events, until it ends or Ctrl-C.

    Below them: the devices and the hosts, where the run samples them (observe.monitor_every_s), and the communication along
    each axis of the plan, with the share of the rate that unisono doctor --bench measured.
    It reads files alone: it can be started and ended at any time, on any host that sees the folder.
    """
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    from unisono.errors import ConfigError, DataError
    from unisono.observe.rank_status import statuses_and_notes

    if (once or as_json) and context.get_parameter_source("every_s") is click.core.ParameterSource.COMMANDLINE:
        raise ConfigError(
            given=f"--every-s with {'--once' if once else '--json'}",
            rule=f"it is the time between two looks, and {'--once' if once else '--json'} looks once",
            consequence="it would have no effect, so nothing was shown",
            nearest="one of them",
        )
    statuses, notes = statuses_and_notes(Path(run_dir))
    if not statuses:
        raise DataError(
            given=f"{run_dir} has no events of a rank",
            rule="ranks write their events into the folder of the run (events/rank00000.jsonl …)",
            consequence="there is nothing to show",
            nearest="give the folder of a run (run.dir), or start one: unisono train",
        )
    if once or as_json:
        lines = [line for table in _tables(statuses, time.time()) for line in ("", *_as_lines(table))][1:]
        lines += map(printable, notes)
        facts = [_facts(status) for status in statuses]
        print_result(as_json, {"run_dir": run_dir, "ranks": facts, "notes": notes}, lines)
        return
    with Live(console=Console(), refresh_per_second=4, screen=False) as live:
        while True:
            told = [Text(printable(note)) for note in notes]
            live.update(Group(*map(_drawn, _tables(statuses, time.time())), *told))
            if all(status.ended for status in statuses):
                return
            time.sleep(every_s)
            seen, notes = statuses_and_notes(Path(run_dir))
            statuses = seen or statuses


def _as_lines(table: _Cells) -> list[str]:
    columns = zip(table.head, *table.rows, strict=True)
    return ["  ".join(cells).rstrip() for cells in zip(*map(_padded, columns), strict=True)]


def _padded(column: Sequence[str]) -> list[str]:
    width = max(map(len, column))
    return [text.ljust(width) for text in column]


def _drawn(table: _Cells) -> Table:
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, header_style="dim")
    for name in table.head:
        drawn.add_column(name, justify="right")
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    return drawn


def _tables(statuses: Sequence[RankStatus], now_s: float) -> list[_Cells]:
    """The ranks; their devices and their hosts, where the monitor has figures of them; their communication."""
    tables = [_Cells(_COLUMNS, [_row(status, now_s) for status in statuses])]
    for first, columns, rows_of in (
        ("rank", _DEVICE_COLUMNS, _device_rows),
        ("host", _HOST_COLUMNS, _host_rows),
        ("rank", _LINK_COLUMNS, _link_rows),
    ):
        rows = [(key, cells) for status in statuses for key, cells in rows_of(status) if any(cells)]
        shown = [place for place in range(len(columns)) if any(cells[place] for _, cells in rows)]
        if rows:
            head = [first, *(columns[place] for place in shown)]
            tables.append(_Cells(head, [[key, *(cells[place] for place in shown)] for key, cells in rows]))
    return tables


def _row(status: RankStatus, now_s: float) -> list[str]:
    """The cells of ``_COLUMNS``."""
    from unisono.observe.events import number
    from unisono.observe.formatting import percent
    from unisono.observe.run_summary import duration, short_time

    step = status.step
    cells = (
        str(status.rank),
        str(step.get("step", ""))[:_MAX_CELL],
        "" if (loss := number(step.get("train/loss"))) is None else f"{loss:.4g}",
        _shown(step, "perf/step_s", short_time),
        _shown(step, "time/data_wait_frac", percent),
        _shown(step, "time/comm_exposed_frac", percent),
        _of(step, "mem/now_bytes", "mem/limit_bytes", 2**30, "GiB"),
        _shown(status.system, "sys/process_cpus", "{:.1f}".format),
        status.ended[:_MAX_CELL] or f"{duration(max(0.0, now_s - status.at_s))} ago",
    )
    return [printable(cell) for cell in cells]


def _device_rows(status: RankStatus) -> Iterator[tuple[str, list[str]]]:
    """The rank, and the cells of ``_DEVICE_COLUMNS``; empty where a figure is not known."""
    from unisono.observe.formatting import percent

    system = status.system
    told = system.get("sys/device_slowdowns")
    reasons = told.replace(" slowdown", "") if isinstance(told, str) else ""
    reasons = reasons if len(reasons) <= _MAX_REASON else f"{reasons[: _MAX_REASON - 1]}…"
    cells = [
        _shown(system, "sys/device_util_frac", percent),
        _of(system, "sys/device_power_w", "sys/device_power_limit_w", 1, "W"),
        _of(system, "sys/device_clock_hz", "", 1e9, "GHz"),
        _shown(system, "sys/device_temperature_c", "{:.0f} °C".format),
        _of(system, "sys/device_memory_bytes", "", 2**30, "GiB"),
        _shown(system, "sys/device_uncorrected_errors", "{:.0f}".format),
        (reasons or "yes") if _number(system, "sys/device_throttled") else "",
    ]
    yield str(status.rank), [printable(cell) for cell in cells]


def _host_rows(status: RankStatus) -> Iterator[tuple[str, list[str]]]:
    """The host, or else the rank that samples it, and the cells of ``_HOST_COLUMNS``; empty where a figure is not known."""
    from unisono.observe.formatting import percent

    system = status.system
    host = system.get("host")
    cells = [
        *(_shown(system, f"sys/{name}_frac", percent) for name in ("cpu", "iowait", "memory")),
        *(
            _shown(system, f"sys/{name}_bytes_per_s", _rate)
            for name in ("disk_read", "disk_written", "network_sent", "network_received")
        ),
    ]
    yield printable(host)[:_MAX_HOST] if isinstance(host, str) and host else f"of rank {status.rank}", cells


def _link_rows(status: RankStatus) -> Iterator[tuple[str, list[str]]]:
    """For each axis that communicates, the rank and the cells of ``_LINK_COLUMNS``; empty where no rate was measured."""
    if not status.links:
        return
    from unisono.observe.events import event_step
    from unisono.observe.formatting import percent
    from unisono.observe.link_events import read_axes, uses_by_axis

    step = event_step(status.links)
    for axis, use in uses_by_axis(read_axes([dict(status.links)])).items():
        cells = [axis, _rate(use.wire_bytes / use.main.wall_s), "", "", "" if step is None else str(step)[:_MAX_CELL]]
        if use.expected_s:
            cells[2:4] = _rate(use.wire_bytes / use.expected_s), percent(use.used_frac)
        yield str(status.rank), cells


def _rate(bytes_per_s: float) -> str:
    from unisono.observe.run_summary import short_number

    return f"{short_number(bytes_per_s)}B/s"


def _number(event: Mapping[str, Any], name: str) -> float | None:
    """A finite number of an event, which anybody may have written; None for anything else."""
    from unisono.observe.events import number

    value = number(event.get(name))
    return value if value is not None and math.isfinite(value) else None


def _shown(event: Mapping[str, Any], name: str, text: Callable[[float], str]) -> str:
    value = _number(event, name)
    return "" if value is None else text(value)[:_MAX_CELL]


def _of(event: Mapping[str, Any], name: str, limit_name: str, unit_size: float, unit: str) -> str:
    """A figure and what it can be, such as ``1.2/4 GiB``: lines have 80 columns."""
    value, limit = _number(event, name), _number(event, limit_name)
    if value is None:
        return ""
    most = f"/{limit / unit_size:.3g}" if limit else ""
    return f"{value / unit_size:.3g}{most} {unit}"


def _facts(status: RankStatus) -> dict[str, Any]:
    return {
        "rank": status.rank,
        "at_s": status.at_s,
        "ended": status.ended,
        "step": dict(status.step),
        "system": dict(status.system),
        "links": dict(status.links),
    }
