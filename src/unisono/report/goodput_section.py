"""The section about the wall time of all attempts: a time line of the attempts and the ledger."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from unisono.observe.goodput import CATEGORIES, AttemptTime, Goodput
from unisono.observe.run_summary import duration
from unisono.report.bars import stacked_bars
from unisono.report.section import Section, Table
from unisono.sanitize import printable

_MAX_ATTEMPTS: Final = 40
_BEFORE: Final = "before"  # room up to the start of an attempt
_COLOURS: Final = {
    "useful": "#2da44e",
    "repeated": "#4c9be8",
    "lost": "#cf222e",
    "waiting": "#8c959f",
    "starting": "#d4a72c",
    "checkpoint": "#bc4c00",
    "evaluation": "#8250df",
    "other": "#afb8c1",
}
_MEANINGS: Final = {
    "useful": "steps that were made once",
    "repeated": "steps that count, and that an earlier attempt had made before",
    "lost": "steps that were rolled back, and what a crashed attempt did after its last one",
    "waiting": "no process of the run was there",
    "starting": "from the start of an attempt to its first step",
    "checkpoint": "training stood still for a checkpoint",
    "evaluation": "evaluations",
    "other": "callbacks, the body of the loop, ends of profiles, export, sample, what no event explains",
}


def goodput_section(goodput: Goodput) -> Section:
    """The section."""
    attempts = goodput.attempts[-_MAX_ATTEMPTS:]
    units = (("h", 3600.0), ("min", 60.0), ("s", 1.0))
    unit, unit_s = next((each for each in units if goodput.wall_s >= 3 * each[1]), units[-1])
    began_at_s = goodput.attempts[0].began_at_s
    series = {_BEFORE: [(each.began_at_s - began_at_s) / unit_s for each in attempts]}
    series |= {
        name: [each.seconds[name] / unit_s for each in attempts]
        for name in ("starting", *CATEGORIES)  # which comes first
        if name != "waiting"
    }
    chart = stacked_bars(
        "goodput",
        [f"attempt {each.attempt}" for each in attempts],
        series,
        x_title=f"{unit} since the start",
        unit=unit,
        colours=_COLOURS,
        hidden=_BEFORE,
    )
    rows = [
        [name, duration(goodput.seconds[name]), f"{goodput.seconds[name] / goodput.wall_s:.1%}", _MEANINGS[name]]
        for name in CATEGORIES
    ]
    tables = [Table(head=("time", "took", "of all", "what it is"), rows=rows)]
    if len(goodput.attempts) > 1:
        head = ("attempt", "began (UTC)", "took", "steps", "made again", "rolled back", "end")
        left_out = len(goodput.attempts) - len(attempts)
        tables.append(Table(head=head, rows=[_attempt_row(each) for each in attempts], left_out=left_out))
    note = (
        f"{goodput.goodput_frac:.1%} of {duration(goodput.wall_s)} went into steps that count, from the first start to the end, "
        "the mean over ranks. Within an attempt the bars are added up by kind, not in the order in which they happened."
    )
    return Section(title="Goodput", note=note, charts=[chart], tables=tables)


def _attempt_row(each: AttemptTime) -> list[str]:
    try:
        began = datetime.fromtimestamp(each.began_at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        began = "?"
    return [
        str(each.attempt),
        began,
        duration(each.wall_s),
        "none" if each.first_step is None else f"{each.first_step} to {each.last_step}",
        str(each.repeated_steps),
        str(each.lost_steps),
        printable(each.end),
    ]
