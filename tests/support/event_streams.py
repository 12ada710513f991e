"""Events of runs that never ran, with exactly known times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unisono.diagnose import Finding, diagnose, read_run
from unisono.observe.events import encode, events_path
from unisono.observe.meters import ALL_PHASES

Times = Callable[[int, int], Mapping[str, float]]  # (rank, step) -> seconds of phases

SETTINGS = {"loader.num_workers": -1, "checkpoint.every_steps": 50, "checkpoint.asynchronous": True}


def write_events(
    run_dir: Path,
    times: Times,
    *,
    ranks: int = 2,
    steps: int = 40,
    every: int = 1,
    settings: Mapping[str, Any] = SETTINGS,
    plan: Mapping[str, Any] | None = None,
    extra: Callable[[int, int], list[dict[str, Any]]] = lambda rank, step: [],
    fields: Mapping[str, Any] | None = None,
    fields_of: Callable[[int, int], Mapping[str, Any]] = lambda rank, step: {},
    windows: bool = True,
    began_s: float = 0.0,
    start: Mapping[str, Any] | None = None,
    start_of: Callable[[int], Mapping[str, Any]] = lambda rank: {},
) -> Path:
    """Write the events of ``ranks`` ranks, read ``every`` steps. ``extra``: events before that of a step. ``fields`` are added to
    each step, and ``fields_of(rank, step)``. ``windows=False`` leaves out ``time/window_s``, as earlier releases did.
    ``start`` and ``start_of(rank)``: more fields of ``run_start``."""
    for rank in range(ranks):
        path = events_path(run_dir, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        envelope = {"t": began_s, "rank": rank, "run": "run", "attempt": 1}
        lines = [
            {
                "kind": "run_start",
                "m": 0.0,
                **envelope,
                "config": dict(settings),
                "plan": plan or {"sync": {"kind": "dist_sync"}},
                **(start or {}),
                **start_of(rank),
            }
        ]
        now_s, window = 0.0, dict.fromkeys(ALL_PHASES, 0.0)
        for step in range(1, steps + 1):
            for phase, seconds in times(rank, step).items():
                window[phase] = window.get(phase, 0.0) + seconds
                if phase.startswith("comm_exposed_"):  # a part of comm_exposed
                    window["comm_exposed"] += seconds
                now_s += seconds
            lines += [{"m": now_s, **envelope, "step": step, **event} for event in extra(rank, step)]
            measured: dict[str, Any] = {}
            if step % every == 0:
                wall_s = sum(window[phase] for phase in ALL_PHASES)
                measured = {f"time/{phase}_frac": seconds / wall_s for phase, seconds in window.items()}
                measured |= {"time/window_s": wall_s} if windows else {}
                window = dict.fromkeys(window, 0.0)
            lines.append(
                {
                    "kind": "step",
                    "m": now_s,
                    **envelope,
                    "step": step,
                    **(fields or {}),
                    **fields_of(rank, step),
                    **measured,
                }
            )
        path.write_bytes(b"".join(encode(line) + b"\n" for line in lines))
    return run_dir


COMPUTE = {"forward": 0.02, "backward": 0.04, "optimizer": 0.01, "other": 0.005}


def findings(folder: Path, times: Any, **options: Any) -> list[Finding]:
    return diagnose(read_run(write_events(folder, times, **options)))


def only(folder: Path, times: Any, **options: Any) -> Finding:
    found = findings(folder, times, **options)
    assert len(found) == 1, [finding.id for finding in found]
    return found[0]


def together(work: Mapping[int, Mapping[str, float]], exchange_s: float = 0.0) -> Any:
    """Times of ranks that step together: those that are done early wait for the last one."""
    slowest = max(sum(phases.values()) for phases in work.values())

    def times(rank: int, step: int) -> Mapping[str, float]:
        return {**work[rank], "comm_exposed": slowest - sum(work[rank].values()) + exchange_s}

    return times


def series(**columns: Any) -> Any:
    """Fields of the steps of a healthy run, with these values by step."""
    return lambda rank, step: {f"train/{name}": values[step - 1] for name, values in columns.items()}
