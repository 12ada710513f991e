"""A report and a diagnosis of runs whose events have values of other types, lines that are cut short, or no file of a rank."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from unisono.diagnose import diagnose, read_run
from unisono.observe.events import Event, encode, events_path
from unisono.observe.history import STEP_FIELDS
from unisono.observe.rank_status import rank_statuses
from unisono.report import write_report

KINDS = (
    *(
        "eval",
        "log",
        "skipped_step",
        "gradient_stats",
        "resumed",
        "run_start",
        "run_end",
        "sample",
        "compiled",
        "links",
    ),
    *(
        "system",
        "warning",
        "notice",
        "checkpoint_saved",
        "checkpoint_failed",
        "data_skipped",
        "rules_inferred",
        "preempt",
    ),
)
FIELDS = (
    *(
        "host",
        "sys/process_cpus",
        "sys/cpu_frac",
        "sys/device_throttled",
        "sys/device_slowdowns",
        "sys/device_clock_hz",
    ),
    *(
        "loss",
        "eval/loss",
        "text",
        "links",
        "axes",
        "layers",
        "samples",
        "data",
        "parameters",
        "plan_text",
        "held_bytes",
        "packing",
    ),
    *(
        "config",
        "origins",
        "plan",
        "environment",
        "rules",
        "left",
        "placed",
        "message",
        "error",
        "reason",
        "prompt",
        "path",
    ),
)


def value(draw: random.Random, depth: int = 0) -> Any:
    """A value of any type, finite or not."""
    scalars = (0, 3, -5, 0.25, 1e308, -1e308, math.nan, math.inf, 10**30, 10**400, True, None, "NaN", "text \x00 <b>")
    kind = draw.randrange(8) if depth < 3 else 0
    if kind == 6:
        return [value(draw, depth + 1) for _ in range(3)]
    if kind == 7:
        return {draw.choice(FIELDS): value(draw, depth + 1) for _ in range(3)}
    return draw.choice(scalars)


def damage(event: Event, draw: random.Random, share: float) -> Event:
    """The event with values of other types, or without some."""
    changed = {name: value(draw) if draw.random() < share else kept for name, kept in event.items() if name != "kind"}
    gone = {name for name in ("t", "rank", "attempt", "step") if draw.random() < share / 4}
    return {"kind": event["kind"], **{name: kept for name, kept in changed.items() if name not in gone}}


def lines_of(rank: int, draw: random.Random, share: float) -> bytes:
    """The file of a rank, whose last line is cut short."""
    envelope = {"t": 1.8e9, "m": 0.0, "rank": rank, "run": "run", "attempt": 1}
    events: list[Event] = [{"kind": "run_start", **envelope, "config": {"a": 1}, "plan": {"mesh": {"pp": 2}}}]
    for step in range(1, draw.choice((3, 70, 120))):
        numbers = {name: draw.random() for name in STEP_FIELDS[3:]}
        events.append({"kind": "step", **envelope, "m": float(step), "step": step, **numbers, "time/window_s": 1.0})
        if draw.random() < 0.3:
            fields = {name: value(draw) for name in draw.sample(FIELDS, 6)}
            events.append({"kind": draw.choice(KINDS), **envelope, "step": step, **fields})
    lines = [encode(damage(event, draw, share)) for event in events]
    torn = [line[: draw.randrange(len(line))] if draw.random() < 0.02 else line for line in lines[1:]]
    return b"\n".join([encode(events[0]), *torn])[: -draw.randrange(1, 40)]


@pytest.mark.parametrize("share", [0.0, 0.03, 0.3])
@pytest.mark.parametrize("seed", range(8))
def test_readers_of_a_damaged_run(tmp_path: Path, seed: int, share: float) -> None:
    draw = random.Random(f"{seed} {share}")
    for rank in (0, 1, 3):
        path = events_path(tmp_path, rank)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(lines_of(rank, draw, share))
    page = write_report(tmp_path).read_text()
    assert "incomplete" in page
    facts = read_run(tmp_path)
    assert all(finding.to_json()["id"] in page for finding in diagnose(facts))
    assert any("incomplete" in note for note in facts.notes)
    rank_statuses(tmp_path)
