"""Predicted step times of layouts on two processes of this host, against the same layouts really run. Prints JSON.

    python -m benchmarks.planner.measured_layouts [--limit N] [--steps N] [--set KEY=VALUE]

Each layout is a plan of the demo's GPT: an axis that the two ranks share, a micro-batch, and what is recomputed. It is run by the
trainer in two processes that ``unisono launch`` starts. It is predicted from times of its ranks in two others, which are started
alike and know nothing of each other, and from what was measured of the link. Both go through the layouts in turns: a part of them
is predicted, then run, then the next part.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from benchmarks.workload import run_config

RANKS = 2
SIZE = ("model.dim=256", "model.num_heads=8", "model.num_kv_heads=4", "model.num_layers=4", "model.tied=false")
AXES: Mapping[str, Sequence[str]] = {
    "dp_replicate": (),
    "dp_shard": ("plan.dp_shard=2",),
    "dp_shard, zero 1": ("plan.dp_shard=2", "plan.zero=1"),
    "tp": ("plan.tp=2",),
    "tp, sequence": ("plan.tp=2", "plan.sequence_parallel=true"),
    "cp": ("plan.cp=2",),
    "pp, 1f1b": ("plan.pp=2", "plan.schedule=1f1b"),
    "pp, gpipe": ("plan.pp=2", "plan.schedule=gpipe"),
    "pp, interleaved": ("plan.pp=2", "plan.schedule=interleaved"),
    "pp, zbv": ("plan.pp=2", "plan.schedule=zbv"),
}
RECOMPUTE = ("none", "selective", "full")
MICRO_BATCHES = (1, 2)
GLOBAL_BATCH = 8
PART = 6  # layouts that are predicted, then run


def layouts() -> list[dict[str, Any]]:
    """All layouts, by axis, micro-batch and recompute, in an order in which neighbours differ."""
    found = [
        {"axis": axis, "micro_batch": micro, "recompute": recompute}
        for axis, micro, recompute in product(AXES, MICRO_BATCHES, RECOMPUTE)
    ]
    order = np.random.default_rng(0).permutation(len(found))
    return [found[i] for i in order]


def settings_of(layout: Mapping[str, Any], changes: Sequence[str]) -> list[str]:
    """The settings of its run."""
    return [
        *SIZE,
        f"plan.global_batch={GLOBAL_BATCH}",
        f"plan.micro_batch={layout['micro_batch']}",
        f"plan.recompute={layout['recompute']}",
        *AXES[layout["axis"]],
        *changes,
    ]


def trainer(settings: Sequence[str], folder: Path, world: Any) -> Any:
    """The trainer of a run with these settings."""
    from unisono import CheckpointOptions, ObserveOptions, Trainer
    from unisono.data.options import LoaderOptions
    from unisono.train.build import build_data, build_model
    from unisono.train.objectives import next_token

    config = run_config([*settings, "train.steps=1000", "train.eval_every_steps=0"])
    data = build_data(config)
    return Trainer(
        lambda: build_model(config, data.tokenizer),
        data.train,
        config.plan,
        objective=next_token,
        optimizer=config.optim,
        options=config.train,
        checkpoint=CheckpointOptions(every_steps=0),
        observe=ObserveOptions(console="off", trackers=(), report=False),
        loader=LoaderOptions(num_workers=0),
        run_dir=folder,
        world=world,
    )


def measure(part: Sequence[Mapping[str, Any]], changes: Sequence[str], steps: int) -> Iterator[float]:
    """Median seconds of a step of each layout, as a rank of a real job."""
    from unisono.dist import job_from_environ, join_world

    world = join_world(job_from_environ(os.environ), device_type="cpu", timeout_s=300)
    try:
        for layout in part:
            with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
                shared = Path(world.broadcast_json(folder))
                try:
                    with trainer(settings_of(layout, changes), shared, world) as run:
                        yield statistics.median(_step_seconds(run, steps))
                        raise _EnoughError
                except _EnoughError:
                    world.barrier()
    finally:
        world.close()


class _EnoughError(Exception):
    """Leaves a run without its last checkpoint."""


def _step_seconds(run: Any, steps: int) -> list[float]:
    taken, seconds = iter(run), list[float]()
    for _ in range(steps + 3):
        begin = time.perf_counter()
        next(taken)
        seconds.append(time.perf_counter() - begin)
    return seconds[3:]


def time_alone(part: Sequence[Mapping[str, Any]], changes: Sequence[str], rank: int) -> Iterator[dict[str, Any]]:
    """Times of ``rank`` in each layout, where it is alone."""
    from unisono.dist import JobSpec, World

    for layout in part:
        with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
            begin = time.perf_counter()
            (timing,) = trainer(settings_of(layout, changes), Path(folder), World.alone(JobSpec())).time_ranks(
                RANKS, [rank]
            )
        yield {"timing": msgspec.to_builtins(timing), "took_s": time.perf_counter() - begin}


def predict(layout: Mapping[str, Any], changes: Sequence[str], answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the prediction of a layout says, from times of its ranks."""
    from unisono.data.options import default_cache_dir
    from unisono.dist import JobSpec
    from unisono.measure.calibration import CALIBRATION_FILE, read_calibration
    from unisono.planner.timed_plan import predict_step
    from unisono.train.rank_timing import RankTiming
    from unisono.train.setup import resolve_plan

    plan = resolve_plan(run_config(settings_of(layout, changes)).plan, JobSpec(world_size=RANKS))[1]
    timings = [msgspec.convert(answer["timing"], RankTiming, strict=False) for answer in answers]
    predicted = predict_step(plan, timings, read_calibration(default_cache_dir(os.environ) / CALIBRATION_FILE))
    return {
        "step_s": predicted.step_s,
        "work_s": predicted.work_s,
        "communication_s": sum(predicted.communication_s.values()),
        "bubble_s": predicted.bubble_s,
        "straggler_s": predicted.straggler_s,
        "took_s": max(answer["took_s"] for answer in answers),
    }


def worker(arguments: argparse.Namespace) -> None:
    """As a process of the benchmark: print one line of JSON for each layout of the part."""
    part = layouts()[arguments.first : arguments.last]
    rank = int(os.environ["RANK"])
    answers: Iterator[Any] = (
        measure(part, arguments.set, arguments.steps)
        if arguments.worker == "measure"
        else time_alone(part, arguments.set, rank)
    )
    with open(f"{arguments.out}-{rank}", "w") as file:
        for answer in answers:
            print(json.dumps(answer), file=file, flush=True)


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Errors of the predictions, and how good their choice is."""
    measured, predicted = (np.array([row[name] for row in rows]) for name in ("measured_s", "predicted_s"))
    ranks = [np.argsort(np.argsort(values)) for values in (measured, predicted)]
    return {
        "step_time": accuracy(rows),
        "rank_correlation": float(np.corrcoef(ranks[0], ranks[1])[0, 1]),
        "chosen_over_best": float(measured[predicted.argmin()] / measured.min()),
        "slowest_over_best": float(measured.max() / measured.min()),
    }


def accuracy(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Predicted over measured times of ``rows``: the median error, the share within the stated interval, and the range."""
    from unisono.planner.timed_plan import SPREAD

    ratios = [row["predicted_s"] / row["measured_s"] for row in rows]
    return {
        "median": statistics.median(abs(ratio - 1) for ratio in ratios),
        "covered": sum(1 / (1 + SPREAD) <= ratio <= 1 + SPREAD for ratio in ratios) / len(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "layouts": len(ratios),
    }


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit", type=int, default=len(layouts()))
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--worker", choices=["measure", "time"])
    parser.add_argument("--out")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return 0
    with tempfile.TemporaryDirectory(prefix="unisono-bench-cache-") as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        command = [sys.executable, "-m", "unisono", "doctor", "--bench", "--processes", str(RANKS), "--json"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        rows = list(_rows(arguments))
    axes = {axis: accuracy(of_axis) for axis in AXES if (of_axis := [row for row in rows if row["axis"] == axis])}
    print(json.dumps({"summary": summary(rows), "axes": axes, "rows": rows}))
    return 0


def _rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    wanted = layouts()[: arguments.limit]
    for first in range(0, len(wanted), PART):
        last = min(first + PART, len(wanted))
        given = [f"--first={first}", f"--last={last}", f"--steps={arguments.steps}"]
        given += [f"--set={change}" for change in arguments.set]
        timed, measured = (_by_ranks([*given, f"--worker={kind}"]) for kind in ("time", "measure"))
        for layout, *answers in zip(wanted[first:last], *timed, *measured, strict=True):
            parts = predict(layout, arguments.set, answers[:RANKS])
            row = {**layout, "predicted_s": parts["step_s"], "measured_s": max(answers[RANKS:]), "parts": parts}
            print(json.dumps(row), file=sys.stderr, flush=True)
            yield row


def _by_ranks(given: Sequence[str]) -> list[list[Any]]:
    """What each rank of a job of workers answers."""
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        out = Path(folder) / "answers"
        launch = ["unisono", "launch", "-n", str(RANKS), "--dir", f"{folder}/job", "--max-restarts", "0", "--"]
        worker = [sys.executable, "-m", "benchmarks.planner.measured_layouts", *given, f"--out={out}"]
        subprocess.run([sys.executable, "-m", *launch, *worker], stdout=subprocess.DEVNULL, check=True)
        return [[json.loads(line) for line in Path(f"{out}-{rank}").read_text().splitlines()] for rank in range(RANKS)]


if __name__ == "__main__":
    sys.exit(main())
