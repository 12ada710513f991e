"""An earlier commit of unisono against this checkout: start-up, steps, loader, push and pull. Prints JSON.

    python -m benchmarks.earlier_commit --before FOLDER [--rounds 9] [--only step]

FOLDER is a checkout of the earlier commit with a ``.venv`` of its own. Each measurement is a process of one checkout and then
the same of the other, in reversed order every other round; the median of the paired ratios is reported. Settings use the option
keys of the first release, which every later commit reads. A step's time is the median interval between ``step`` events of rank 0.
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
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.paired import ratio

ROOT = Path(__file__).resolve().parents[1]
WARM_UP_STEPS = 10
STEPS = 40
START = {
    "--help": ["-m", "unisono", "--help"],
    "import unisono": ["-c", "import unisono"],
    "import the Trainer": ["-c", "from unisono import Trainer"],
}
TRAIN: Mapping[str, Any] = {
    "run.dir": "run",
    "plan.device": "cpu",
    "plan.precision": "fp32",
    "train.steps": STEPS,
    "train.eval_every": 0,
    "checkpoint.every_steps": 0,
    "observe.console": "plain",
    "launch.threads": 1,
}
STEP: Mapping[str, Mapping[str, Any]] = {
    "1 process": {},
    "2 processes": {"launch.processes": 2},
    "2 processes, dp_shard=2": {"launch.processes": 2, "plan.dp_shard": 2},
}
PUSH_PULL = ["--kind", "dist_sync,dist_sync_shm,dist_async", "--size", "10MB,resnet50", "--rounds", "3"]
LOADER = """
import sys, time
import numpy as np
from unisono.data import Loader, LoaderOptions, as_dataset
class Samples:
    def __len__(self):
        return 1_000_000
    def __getitem__(self, index):
        return {"x": np.zeros(32, np.float32)}
option = "num_workers" if hasattr(LoaderOptions(), "num_workers") else "workers"
options = LoaderOptions(**{option: int(sys.argv[1]), "worker_kind": "thread"})
steps = Loader(as_dataset(Samples()), seed=1, global_batch=64, options=options).iterate(0, 10**9)
for _ in range(200):
    next(steps)
begin = time.perf_counter()
for _ in range(10_000):
    next(steps)
print((time.perf_counter() - begin) / 10_000)
"""

Seconds = Mapping[str, float]


def run(checkout: Path, arguments: list[str], folder: Path) -> str:
    """The output of the checkout's Python with ``arguments``. Raises CalledProcessError."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(checkout / ".venv/bin/python"), *arguments]
    return subprocess.run(command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True, check=True).stdout


def start(checkout: Path, folder: Path) -> Seconds:
    """Wall time of whole processes."""
    seconds: dict[str, float] = {}
    for name, arguments in START.items():
        begin = time.perf_counter()
        run(checkout, arguments, folder)
        seconds[name] = time.perf_counter() - begin
    return seconds


def step(checkout: Path, folder: Path) -> Seconds:
    """Time of a step of the demo's model, by plan."""
    seconds: dict[str, float] = {}
    for number, (name, settings) in enumerate(STEP.items()):
        run_dir = folder / f"run{number}"
        options = [f"--set={key}={value}" for key, value in {**TRAIN, **settings, "run.dir": run_dir}.items()]
        run(checkout, ["-m", "unisono", "train", *options], folder)
        lines = (run_dir / "events" / "rank00000.jsonl").read_text().splitlines()
        times = [event["m"] for event in map(json.loads, lines) if event["kind"] == "step"][WARM_UP_STEPS:]
        seconds[name] = statistics.median(end - begin for begin, end in pairwise(times))
    return seconds


def loader(checkout: Path, folder: Path) -> Seconds:
    """Time of a batch of 64 small samples, by the number of worker threads."""
    return {f"{workers} workers": float(run(checkout, ["-c", LOADER, str(workers)], folder)) for workers in (0, 1)}


def push_pull(checkout: Path, folder: Path) -> Seconds:
    """Time of a push and pull by two workers, by store and size."""
    answer = json.loads(run(checkout, ["-m", "unisono", "kvstore", "bench", *PUSH_PULL, "--json"], folder))
    return {f"{row['kind']}, {row['size']}": row["median_s"] for row in answer["rows"] if row["kind"] != "all_reduce"}


MEASUREMENTS: Mapping[str, Callable[[Path, Path], Seconds]] = {
    "start": start,
    "step": step,
    "loader": loader,
    "push and pull": push_pull,
}


def compare(measure: Callable[[Path, Path], Seconds], before: Path, rounds: int) -> dict[str, Any]:
    """By figure, the ratio of this checkout's time to that of ``before``; one more round comes first and is not counted."""
    times: dict[Path, list[Seconds]] = {ROOT: [], before: []}
    for number in range(rounds + 1):
        for checkout in (ROOT, before) if number % 2 else (before, ROOT):
            with tempfile.TemporaryDirectory() as folder:
                seconds = measure(checkout, Path(folder))
            if number:
                times[checkout].append(seconds)
        print(f"{measure.__name__}: round {number} of {rounds}", file=sys.stderr)
    return {
        name: ratio([row[name] for row in times[ROOT]], [row[name] for row in times[before]]) for name in times[ROOT][0]
    }


def main() -> None:
    """Print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=list(MEASUREMENTS), help="one of the measurements")
    arguments = parser.parse_args()
    before: Path = arguments.before.resolve()
    commit = ["git", "rev-parse", "--short=12", "HEAD"]
    result: dict[str, Any] = {
        "before": subprocess.run(commit, cwd=before, stdout=subprocess.PIPE, text=True, check=True).stdout.strip(),
        "rounds": arguments.rounds,
        "times": {
            name: compare(measure, before, arguments.rounds)
            for name, measure in MEASUREMENTS.items()
            if arguments.only in (None, name)
        },
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
