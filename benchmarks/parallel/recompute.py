"""What recompute trades: bytes kept between the passes and the peak of a step, for time. One process. Prints JSON.

    python -m benchmarks.parallel.recompute [--blocks 16] [--set KEY=VALUE]

The same run with ``plan.recompute`` none, selective and full. Bytes are those of tensors (see ``allocations``) above what lives
between two steps: ``kept`` when the backward pass begins, ``peak`` anywhere in a step, gradients included. Times are taken
without the profiler, step by step in turns. Losses must be equal bit for bit.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from benchmarks.paired import ratio, spread
from benchmarks.parallel.allocations import Allocations
from benchmarks.parallel.sides import SIZE, by_trainer
from benchmarks.step_time import WARMUP_STEPS

from unisono.dist import JobSpec, World

KINDS = ("none", "selective", "full")


def kept_and_peak(settings: list[str], folder: Path) -> dict[str, int]:
    """Bytes of the third step: by then the optimizer has its state."""
    with Allocations() as seen:
        original = torch.autograd.backward

        def marked(*args: Any, **kwargs: Any) -> None:
            seen.mark("backward")
            original(*args, **kwargs)

        with by_trainer(settings, folder, World(JobSpec()), 3) as (_, run):
            next(run)
            next(run)
            torch.autograd.backward = marked
            try:
                seen.mark("step")
                next(run)
                seen.mark("end")
            finally:
                torch.autograd.backward = original
    phases = seen.phases()
    (before, first), (kept, second) = phases["step"], phases["backward"]
    return {"kept_bytes": kept - before, "peak_bytes": max(first, second) - before}


def times(settings: list[str], folder: Path, blocks: int) -> dict[str, Any]:
    """Seconds of a step, all kinds in turns in one process; the leader changes."""
    taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
    losses: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with ExitStack() as stack:
        steps = blocks + WARMUP_STEPS
        runs = {
            kind: stack.enter_context(
                by_trainer([*settings, f"plan.recompute={kind}"], folder / kind, World(JobSpec()), steps)
            )[1]
            for kind in KINDS
        }
        for number in range(-WARMUP_STEPS, blocks):
            shift = number % len(KINDS)
            for kind in KINDS[shift:] + KINDS[:shift]:
                begin_s = time.perf_counter()
                losses[kind].append(float(next(runs[kind]).stats[0]))
                if number >= 0:
                    taken[kind].append(time.perf_counter() - begin_s)
    for kind in KINDS:
        if losses[kind] != losses["none"]:
            raise ValueError(f"recompute {kind} has other losses: {losses[kind]} against {losses['none']}")
    return {kind: {"step_s": spread(taken[kind]), "over_none": ratio(taken[kind], taken["none"])} for kind in KINDS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=16, help="steps of each kind")
    parser.add_argument("--set", action="append", default=[], help="a setting of the run, as for unisono train")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = [*SIZE, *arguments.set]
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as scratch:
        folder = Path(scratch)
        # the main thread's trainer takes the signals of the process, so there it could be one only
        with ThreadPoolExecutor(1) as thread:
            timed = thread.submit(times, settings, folder / "timed", arguments.blocks).result()
        rows: dict[str, Any] = {}
        for kind in KINDS:
            found = kept_and_peak([*settings, f"plan.recompute={kind}"], folder / "counted" / kind)
            rows[kind] = {**found, **timed[kind]}
            for name in ("kept_bytes", "peak_bytes"):
                rows[kind][f"{name}_over_none"] = round(found[name] / rows["none"][name], 4)
    print(json.dumps({"kinds": rows, "settings": settings, "blocks": arguments.blocks}, indent=1))


if __name__ == "__main__":
    main()
