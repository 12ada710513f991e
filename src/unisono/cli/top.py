"""``unisono top``: where the ranks of a run stand, while it goes on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unisono.cli.common import every_verb, print_result
from unisono.sanitize import printable

if TYPE_CHECKING:
    from rich.table import Table

    from unisono.observe.rank_status import RankStatus

_COLUMNS = ("rank", "step", "loss", "step time", "data", "comm", "memory", "CPUs", "device", "seen")


@click.command("top")
@click.argument("run_dir", type=click.Path(file_okay=False))
@click.option("--every-s", default=2.0, type=click.FloatRange(min=0.1), help="Seconds between looks.")
@click.option("--once", is_flag=True, help="Look once and end.")
@every_verb
@click.pass_context
def command(context: click.Context, run_dir: str, every_s: float, once: bool, as_json: bool) -> None:
    """Show the ranks of the run in RUN_DIR, from their events, until it ends or Ctrl-C.

    It reads files alone: it can be started and ended at any time, on any host that sees the folder.
    """
    from rich.console import Console
    from rich.live import Live

    from unisono.errors import ConfigError, DataError
    from unisono.observe.rank_status import rank_statuses

    if (once or as_json) and context.get_parameter_source("every_s") is click.core.ParameterSource.COMMANDLINE:
        raise ConfigError(
            given=f"--every-s with {'--once' if once else '--json'}",
            rule=f"it is the time between two looks, and {'--once' if once else '--json'} looks once",
            consequence="it would have no effect, so nothing was shown",
            nearest="one of them",
        )
    statuses = rank_statuses(Path(run_dir))
    if not statuses:
        raise DataError(
            given=f"{run_dir} has no events of a rank",
            rule="ranks write their events into the folder of the run (events/rank00000.jsonl …)",
            consequence="there is nothing to show",
            nearest="give the folder of a run (run.dir), or start one: unisono train",
        )
    if once or as_json:
        rows = [_row(status, time.time()) for status in statuses]
        lines = ["  ".join(cells) for cells in zip(*map(_padded, zip(_COLUMNS, *rows, strict=True)), strict=True)]
        print_result(as_json, {"run_dir": run_dir, "ranks": [_facts(status) for status in statuses]}, lines)
        return
    with Live(console=Console(), refresh_per_second=4, screen=False) as live:
        while True:
            live.update(_table(statuses))
            if all(status.ended for status in statuses):
                return
            time.sleep(every_s)
            statuses = rank_statuses(Path(run_dir)) or statuses


def _padded(column: Sequence[str]) -> list[str]:
    width = max(map(len, column))
    return [text.ljust(width) for text in column]


def _table(statuses: Sequence[RankStatus]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="dim")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    now_s = time.time()
    for status in statuses:
        table.add_row(*map(Text, _row(status, now_s)))
    return table


def _row(status: RankStatus, now_s: float) -> list[str]:
    """The cells of ``_COLUMNS``."""
    from unisono.observe.events import number
    from unisono.observe.formatting import percent
    from unisono.observe.run_summary import duration, format_gib, short_time

    def value(fields: Any, name: str) -> float | None:
        return number(fields.get(name))

    step, system = status.step, status.system
    used, limit = value(step, "mem/now_bytes"), value(step, "mem/limit_bytes")
    device = value(system, "sys/device_util_frac")
    cells = (
        str(status.rank),
        str(step.get("step", "")),
        "" if (loss := value(step, "train/loss")) is None else f"{loss:.4g}",
        "" if (seconds := value(step, "perf/step_s")) is None else short_time(seconds),
        "" if (share := value(step, "time/data_wait_frac")) is None else percent(share),
        "" if (share := value(step, "time/comm_exposed_frac")) is None else percent(share),
        "" if used is None else format_gib(used) + (f" of {format_gib(limit)}" if limit else ""),
        "" if (cpus := value(system, "sys/process_cpus")) is None else f"{cpus:.1f}",
        "" if device is None else percent(device),
        status.ended or f"{duration(max(0.0, now_s - status.at_s))} ago",
    )
    return [printable(cell) for cell in cells]


def _facts(status: RankStatus) -> dict[str, Any]:
    return {
        "rank": status.rank,
        "at_s": status.at_s,
        "ended": status.ended,
        "step": dict(status.step),
        "system": dict(status.system),
    }
