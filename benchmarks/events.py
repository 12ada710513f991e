"""Events written per second, and what one step event costs the training thread with each view attached. Prints JSON.

    python benchmarks/events.py [--events 5000] [--dir FOLDER]

CPU time of the emitting thread is given as well as wall time: on a busy machine only the first is worth comparing.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unisono.observe.console import Console
from unisono.observe.events import EventLog, read_events
from unisono.observe.meters import PHASES, StepTimers
from unisono.observe.sinks.trackers import Trackers

STEP: dict[str, Any] = {
    "steps_total": 100_000,
    "train/loss": 3.2109375,
    "train/lr": 2.9e-4,
    "train/grad_norm": 0.8123,
    "train/tokens_total": 983_040.0,
    "train/skipped_steps": 0,
    "perf/step_s": 0.1993,
    "perf/tokens_per_s": 41_234.5,
    "perf/tokens_per_s_device": 20_617.25,
    "perf/tflops_device": 0.0412,
    "perf/matmul_ceiling_frac": 0.3841,
    **{f"time/{phase}_frac": 0.123456789 for phase in (*PHASES, "other")},
    "mem/peak_bytes": 1_073_741_824,
    "mem/limit_bytes": 17_179_869_184,
    "eta_s": 11_520.5,
}


def per_event(log: EventLog, events: int, repeats: int = 5) -> dict[str, float]:
    """Median over ``repeats`` of wall and CPU microseconds per event."""
    wall: list[float] = []
    cpu: list[float] = []
    for _ in range(repeats):
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        for step in range(events):
            log.emit("step", step=step, **STEP)
        wall.append((time.perf_counter() - begin) / events * 1e6)
        cpu.append((time.thread_time() - begin_cpu) / events * 1e6)
    return {
        "wall_us": round(statistics.median(wall), 2),
        "cpu_us": round(statistics.median(cpu), 2),
        "events_per_s": round(1e6 / statistics.median(wall)),
        "events_per_cpu_s": round(1e6 / statistics.median(cpu)),
    }


def phase_ns(count: int = 200_000, repeats: int = 5) -> float:
    """CPU nanoseconds of entering and leaving one timer phase, loop overhead taken off; the median of ``repeats``."""
    timers = StepTimers()

    def timed(body: Callable[[], None]) -> float:
        begin = time.thread_time()
        body()
        return time.thread_time() - begin

    def empty() -> None:
        for _ in range(count):
            pass

    def phases() -> None:
        for _ in range(count):
            with timers.phase("forward"):
                pass

    return round(statistics.median((timed(phases) - timed(empty)) / count * 1e9 for _ in range(repeats)), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=5000, help="events per repeat")
    parser.add_argument(
        "--dir", type=Path, default=None, help="folder on the disk to measure (default: a temporary one)"
    )
    args = parser.parse_args()
    views: dict[str, list[str]] = {"file alone": [], "csv": ["csv"]}
    if importlib.util.find_spec("tensorboard") is not None:
        views["tensorboard"] = ["tensorboard"]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        for name, trackers in views.items():
            run_dir = Path(folder) / name.replace(" ", "-")
            with (
                EventLog(run_dir / "e.jsonl", rank=0, run_id="bench", attempt=1) as log,
                Trackers(log, trackers, run_dir),
            ):
                results[name] = per_event(log, args.events if name != "tensorboard" else args.events // 5)
        with EventLog(Path(folder) / "console.jsonl", rank=0, run_id="bench", attempt=1) as log:
            log.subscribe(Console(stream=io.StringIO()), "console")
            results["plain console"] = per_event(log, args.events)
        path = Path(folder) / "file-alone" / "e.jsonl"
        begin = time.thread_time()
        count = len(read_events(path).events)
        results["reading back"] = {"events_per_cpu_s": round(count / (time.thread_time() - begin))}
        line_bytes = path.stat().st_size / count
    print(
        json.dumps(
            {
                "benchmark": "events",
                "results": results,
                "event_bytes": round(line_bytes),
                "fields_per_event": len(STEP) + 7,
                "timer_phase_cpu_ns": phase_ns(),
                "events_per_repeat": args.events,
                "python": sys.version.split()[0],
                "machine": platform.machine(),
                "cpus": os.cpu_count(),
                "load_average": round(os.getloadavg()[0], 1),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
