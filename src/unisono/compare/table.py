"""A comparison as text: a table of figures, and what differs beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from unisono.compare.comparison import STEP_MEDIAN, Comparison, Row
from unisono.compare.differences import Difference
from unisono.compare.run_figures import RunFigures
from unisono.observe.formatting import percent, run_verdict
from unisono.observe.run_summary import duration, format_gib, short_number, short_time
from unisono.sanitize import printable

_SMALL: Final = 0.005  # phases that take less of the time in all runs are not shown
_SHOWN_DIFFERENCES: Final = 40
_LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def table(comparisons: Sequence[Comparison], *, is_full: bool = False) -> Iterator[str]:
    """The runs, their figures, and their differences, all from the first. ``is_full``: also minor figures."""
    runs = [comparisons[0].a, *(each.b for each in comparisons)]
    letters = [_letter(place) for place in range(len(runs))]
    for letter, run in zip(letters, runs, strict=True):
        yield f"{letter}  {printable(str(run.run_dir))}: {run_verdict(run.summary)}"
    yield ""
    names = [
        name
        for name in dict.fromkeys(row.name for each in comparisons for row in each.rows)
        if is_full or _is_shown(name, runs)
    ]
    head = ["", "A"]
    for letter in letters[1:]:
        head += [letter, f"{letter}/A", "95 % interval"]
    rows = [head, *(_cells(name, [each.row(name) for each in comparisons]) for name in names)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(head))]
    for row in rows:
        first, *others = (
            text.ljust(width) if place == 0 else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join([first, *others]).rstrip()
    for letter, each in zip(letters[1:], comparisons, strict=True):
        yield from _other_differences(letter, each)


def _letter(place: int) -> str:
    return _LETTERS[place] if place < len(_LETTERS) else f"run {place + 1}"


def _is_shown(name: str, runs: Sequence[RunFigures]) -> bool:
    """Whether the short table has a figure: phases in seconds where they take 0.5 % of the time in any run, few shares."""
    if name.startswith("time/") and name.endswith("_s"):
        return any(run.values.get(f"{name.removesuffix('_s')}_frac", 0.0) >= _SMALL for run in runs)
    if name.startswith("time/"):
        return name in ("time/ckpt_stall_frac", "time/eval_frac") and any(
            run.values.get(name, 0) >= _SMALL for run in runs
        )
    if name == STEP_MEDIAN:
        return False
    if name.startswith("goodput/"):
        return name in ("goodput/wall_s", "goodput/goodput_frac")
    if name in ("train/skipped_steps", "run/ranks"):
        return len({run.values.get(name, 0.0) for run in runs}) > 1
    return True


def _cells(name: str, rows: Sequence[Row | None]) -> list[str]:
    first = next((row for row in rows if row is not None), None)
    at = f" ({first.at})" if first is not None and first.at else ""
    cells = [printable(name) + at, _value(name, None if first is None else first.a)]
    for row in rows:
        if row is None:
            cells += ["", "", ""]
            continue
        cells += [_value(name, row.b), _change(row), _interval(row)]
    return cells


def _is_difference(row: Row) -> bool:
    """Whether the table shows the difference: for losses, metrics and shares, whose ratio says little."""
    return row.name.startswith(("train/", "eval/")) or (
        row.name.endswith("_frac") and row.name != "perf/matmul_ceiling_frac"
    )


def _change(row: Row) -> str:
    if _is_difference(row):
        if row.delta is None:
            return ""
        is_share = row.name.endswith("_frac")
        return f"{100 * row.delta:+.1f} points" if is_share else f"{row.delta:+.4g}"
    return "" if row.ratio is None or not math.isfinite(row.ratio) else f"{row.ratio:.3f}"


def _interval(row: Row) -> str:
    if row.interval is None:
        return ""
    low, high = row.interval
    return f"{low:+.4g} to {high:+.4g}" if _is_difference(row) else f"{low:.3f} to {high:.3f}"


def _value(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if name.startswith("goodput/") and name.endswith("_s"):
        return duration(value)
    if name.endswith("_per_s") or "_per_s_" in name:
        return short_number(value)
    if name.endswith("_s"):
        return short_time(value)
    if name.endswith("_bytes"):
        return format_gib(value)
    if name in ("perf/mfu", "perf/matmul_ceiling_frac"):
        return f"{100 * value:.3g}%"
    if name.endswith("_frac"):
        return percent(value)
    return f"{value:.5g}"


def _other_differences(letter: str, comparison: Comparison) -> Iterator[str]:
    """Losses, settings and environment of run ``letter`` that differ from those of A."""
    yield ""
    if comparison.common_steps:
        first = comparison.first_loss_difference
        same = f"differ from step {first} on" if first is not None else "are the same bits"
        yield f"A and {letter}: losses of the {comparison.common_steps} steps that both have {same}"
    for title, listed in (("settings", comparison.settings), ("environment", comparison.environment)):
        if listed:
            yield f"A and {letter} differ in {title}"
            yield from (f"  {_difference(each)}" for each in listed[:_SHOWN_DIFFERENCES])
        else:
            yield f"A and {letter} do not differ in {title}"
        if len(listed) > _SHOWN_DIFFERENCES:
            yield f"  {len(listed) - _SHOWN_DIFFERENCES} more, with --json"
    yield from (printable(note) for note in comparison.notes)


def _difference(each: Difference) -> str:
    return f"{each.key}: {'none' if each.a is None else each.a} -> {'none' if each.b is None else each.b}"
