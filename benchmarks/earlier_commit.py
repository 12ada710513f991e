"""An earlier commit of unisono against this checkout: start-up, steps, loader, records, push and pull. Prints JSON.

    python -m benchmarks.earlier_commit --before FOLDER [--rounds 9] [--slices 240] [--only step]

FOLDER is a checkout of the earlier commit with a ``.venv`` of its own. Start-up and push and pull are measured process by
process: one of a checkout, then the same of the other, in reversed order every other round. Steps, batches and records are
measured in slices of time: the processes of both checkouts live on, those of one run while the kernel stops those of the other,
and a slice's figure is the median interval between steps inside it. They are started several times, in either order: two
processes of equal code can differ by some percent, which lasts as long as they do, by where their memory lies. The median of
the paired ratios is reported. Settings use the option keys of the first release, which every later commit reads.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from benchmarks.paired import ratio

ROOT = Path(__file__).resolve().parents[1]
START = {
    "--help": ["-m", "unisono", "--help"],
    "import unisono": ["-c", "import unisono"],
    "import the Trainer": ["-c", "from unisono import Trainer"],
}
TRAIN: Mapping[str, Any] = {
    "plan.device": "cpu",
    "plan.precision": "fp32",
    "train.steps": 1_000_000,
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
SAMPLES = """
import sys, time
from pathlib import Path
import numpy as np
from unisono.data import Loader, LoaderOptions, as_dataset
class Samples:
    def __len__(self):
        return 1_000_000
    def __getitem__(self, index):
        return {"x": np.zeros(32, np.float32)}
dataset = as_dataset(Samples())
"""
TOKENS = """
import sys, time
from pathlib import Path
import numpy as np
from unisono.data import Loader, LoaderOptions, TokenWindows, TokenWriter, open_tokens
with TokenWriter(Path("."), "part", vocab_size=256, end_of_document=255) as writer:
    for document in range(2000):
        writer.add(np.arange(5000) % 255, np.ones(5000))
dataset = TokenWindows(open_tokens(writer.paths), seq_len=1024)
"""
RECORDIO = """
import time
import numpy as np
from unisono.data.recordio import RecordFile, RecordWriter
with RecordWriter("a.rec") as writer:
    for _ in range(20_000):
        writer.write(bytes(1000))
def read():
    file = RecordFile("a.rec")
    for number in numbers:
        file.read(number)
"""
MINDRECORD = """
import time
import numpy as np
from unisono.data.mindrecord import MindRecordFile, MindRecordWriter
with MindRecordWriter("a.mindrecord", {"n": "int64", "data": "bytes"}) as writer:
    for number in range(20_000):
        writer.write({"n": number, "data": bytes(1000)})
def read():
    file = MindRecordFile("a.mindrecord")
    for number in numbers:
        file.read(number)
"""
PASSES = """
numbers = np.random.default_rng(0).permutation(20_000).tolist()
with open("times", "w", buffering=1) as times:
    while True:
        read()
        times.write(f"{time.monotonic()}\\n")
"""
RECORDS = {
    "20,000 RecordIO records of 1,000 bytes, opened and read in random order": RECORDIO,
    "20,000 MindRecord rows of 1,000 bytes, opened and read in random order": MINDRECORD,
}
LOOP = """
option = "num_workers" if hasattr(LoaderOptions(), "num_workers") else "workers"
options = LoaderOptions(**{option: int(sys.argv[1]), "worker_kind": "thread"})
with open("times", "w", buffering=1) as times:
    for number, _ in enumerate(Loader(dataset, seed=1, global_batch=int(sys.argv[2]), options=options).iterate(0, 10**9)):
        if number % int(sys.argv[3]) == 0:
            times.write(f"{time.monotonic()}\\n")
"""
# script, workers, samples in a batch, batches in a measured interval
LOADER: Mapping[str, tuple[str, int, int, int]] = {
    "64 samples of 128 bytes, 0 workers": (SAMPLES, 0, 64, 200),
    "64 samples of 128 bytes, 1 worker": (SAMPLES, 1, 64, 200),
    "16 token windows of 1,024 with masks, 0 workers": (TOKENS, 0, 16, 20),
    "16 token windows of 1,024 with masks, 1 worker": (TOKENS, 1, 16, 20),
}

Seconds = Mapping[str, float]
Ratios = dict[str, Any]


def python(checkout: Path, arguments: Sequence[str]) -> list[str]:
    """The command of the checkout's Python."""
    return [str(checkout / ".venv/bin/python"), *arguments]


def environ() -> dict[str, str]:
    """The environment of a checkout's process, whose package is the one of its own ``.venv``."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


# --- process by process ----------------------------------------------------------------------------------------------


def run(checkout: Path, arguments: list[str], folder: Path) -> str:
    """The output of the checkout's Python with ``arguments``. Raises CalledProcessError."""
    command = python(checkout, arguments)
    return subprocess.run(command, cwd=folder, env=environ(), stdout=subprocess.PIPE, text=True, check=True).stdout


def start(checkout: Path, folder: Path) -> Seconds:
    """Wall time of whole processes."""
    seconds: dict[str, float] = {}
    for name, arguments in START.items():
        begin = time.perf_counter()
        run(checkout, arguments, folder)
        seconds[name] = time.perf_counter() - begin
    return seconds


def push_pull(checkout: Path, folder: Path) -> Seconds:
    """Time of a push and pull by two workers, by store and size."""
    answer = json.loads(run(checkout, ["-m", "unisono", "kvstore", "bench", *PUSH_PULL, "--json"], folder))
    return {f"{row['kind']}, {row['size']}": row["median_s"] for row in answer["rows"] if row["kind"] != "all_reduce"}


def by_process(measure: Callable[[Path, Path], Seconds], before: Path, rounds: int) -> Ratios:
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


# --- in slices of time -----------------------------------------------------------------------------------------------

SLICE_S, WARM_UP_S = 0.5, 4.0
# how often the processes of both checkouts are started, each order as often
STARTS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Arguments for Python, and the function that reads the times of its steps (time.monotonic) in its folder."""

    arguments: Sequence[str]
    times: Callable[[Path], list[float]]


class Alternating:
    """A program that runs in slices of time: its processes, of all ranks, are stopped in between. Ends with the block."""

    def __init__(self, checkout: Path, program: Program, folder: Path) -> None:
        self.folder, self._times = folder, program.times
        command = python(checkout, program.arguments)
        log = (folder / "log").open("w")
        self._process = subprocess.Popen(command, cwd=folder, env=environ(), stdout=log, stderr=log)
        self.slices: list[tuple[float, float]] = []
        # the first slice is as long as it takes until steps are steady
        while not self.times() and self._process.poll() is None:
            time.sleep(0.2)
        time.sleep(WARM_UP_S)
        self._signal(signal.SIGSTOP)
        if self._process.poll() is not None:
            raise RuntimeError(
                f"{command} ended with {self._process.returncode}: {(folder / 'log').read_text()[-2000:]}"
            )

    def times(self) -> list[float]:
        """Times of its steps so far."""
        return self._times(self.folder)

    def run_slice(self) -> None:
        """Let it run for a slice of time."""
        begin = time.monotonic()
        self._signal(signal.SIGCONT)
        time.sleep(SLICE_S)
        self._signal(signal.SIGSTOP)
        self.slices.append((begin, time.monotonic()))

    def step_s(self) -> list[float | None]:
        """The median interval between steps of each slice; None for a slice without two steps."""
        times = self.times()
        inside = [[at for at in times if begin <= at <= end] for begin, end in self.slices]
        intervals = [[later - earlier for earlier, later in pairwise(steps)] for steps in inside]
        return [statistics.median(of_slice) if of_slice else None for of_slice in intervals]

    def _signal(self, number: int) -> None:
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            for process in [root, *root.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    def __enter__(self) -> Alternating:
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()


def in_slices(name: str, program: Program, before: Path, slices: int) -> Any:
    """The ratio of this checkout's time of a step to that of ``before``, over pairs of neighbouring slices.

    ``slices`` of each checkout, after each start as many.
    """
    pairs: list[tuple[float, float]] = []
    for number_of_start in range(STARTS):
        checkouts = (ROOT, before) if number_of_start % 2 else (before, ROOT)
        with ExitStack() as stack:
            alternating: dict[Path, Alternating] = {}
            for checkout in checkouts:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                alternating[checkout] = stack.enter_context(Alternating(checkout, program, folder))
            for number in range(slices // STARTS):
                for one in list(alternating.values())[:: 1 if number % 2 else -1]:
                    one.run_slice()
            times = zip(alternating[ROOT].step_s(), alternating[before].step_s(), strict=True)
            pairs += [(now, then) for now, then in times if now is not None and then is not None]
    print(f"{name}: {slices} slices", file=sys.stderr)
    return ratio([now for now, _ in pairs], [then for _, then in pairs])


def _event_times(folder: Path) -> list[float]:
    """When rank 0 emitted its ``step`` events."""
    path = folder / "run" / "events" / "rank00000.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event["m"] for event in events if event["kind"] == "step"]


def _written_times(folder: Path) -> list[float]:
    path = folder / "times"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [float(line) for line in lines if line.endswith("\n")]


def step(before: Path, slices: int) -> Ratios:
    """Time of a step of the demo's model, by plan."""
    programs = {
        name: Program(
            arguments=[
                *("-m", "unisono", "train"),
                *(f"--set={key}={value}" for key, value in {**TRAIN, **settings, "run.dir": "run"}.items()),
            ],
            times=_event_times,
        )
        for name, settings in STEP.items()
    }
    return {name: in_slices(name, program, before, slices) for name, program in programs.items()}


def loader(before: Path, slices: int) -> Ratios:
    """Time of batches, by data set and number of worker threads."""
    programs = {
        name: Program(arguments=["-c", script + LOOP, *map(str, numbers)], times=_written_times)
        for name, (script, *numbers) in LOADER.items()
    }
    return {name: in_slices(name, program, before, slices) for name, program in programs.items()}


def records(before: Path, slices: int) -> Ratios:
    """Time of opening a file and reading all of its records, by format."""
    programs = {
        name: Program(arguments=["-c", script + PASSES], times=_written_times) for name, script in RECORDS.items()
    }
    return {name: in_slices(name, program, before, slices) for name, program in programs.items()}


def main() -> None:
    """Print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=9, help="of processes")
    parser.add_argument("--slices", type=int, default=240, help="of each checkout")
    parser.add_argument(
        "--only", choices=("start", "step", "loader", "records", "push and pull"), help="one of the measurements"
    )
    arguments = parser.parse_args()
    before: Path = arguments.before.resolve()
    measurements: Mapping[str, Callable[[], Ratios]] = {
        "start": lambda: by_process(start, before, 3 * arguments.rounds),
        "step": lambda: step(before, arguments.slices),
        "loader": lambda: loader(before, arguments.slices),
        "records": lambda: records(before, arguments.slices),
        "push and pull": lambda: by_process(push_pull, before, arguments.rounds),
    }
    commit = ["git", "rev-parse", "--short=12", "HEAD"]
    result: dict[str, Any] = {
        "before": subprocess.run(commit, cwd=before, stdout=subprocess.PIPE, text=True, check=True).stdout.strip(),
        "rounds": arguments.rounds,
        "times": {name: measure() for name, measure in measurements.items() if arguments.only in (None, name)},
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
