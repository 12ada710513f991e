"""What a loader costs by itself. Settings: kind and part.

``overhead`` is a worker behind the gate: a step is one batch of 64 of a data set that does nothing. The other parts print one
line of JSON: ``first`` milliseconds from making the loader to its first batch, after the imports; ``memory`` bytes
(proportional set size of this process and its children) before the loader and after one pass with 8 workers over 10^6 Python
objects; ``tuning`` samples per second at the start and at the end while unisono looks for a setting, from one worker on.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.data.peers.pixels import single_threaded

BATCH = 64


class Items:
    """Sample i is i, one at a time."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        return index


class Rows:
    """Sample i is i, a batch at a time: a unisono Dataset."""

    fingerprint = "rows"

    def __len__(self) -> int:
        return 1_000_000

    def read(self, indices: Any) -> dict[str, Any]:
        return {"inputs": indices}


class Objects:
    """A million small Python objects in a list, as lists of file names and labels are kept."""

    def __init__(self) -> None:
        self.rows = [(f"photos/{number:08d}.jpg", number % 1000) for number in range(1_000_000)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> int:
        name, label = self.rows[index]
        return len(name) + label


class Slow:
    """A sample waits for a millisecond, as for a disk, or computes for some tenths of one in Python."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        if self.what == "waiting":
            time.sleep(0.001)
            return index
        total = 0
        for number in range(8000):
            total += number
        return total


def batches(kind: str, data: Any, *, batch: int = BATCH) -> Iterator[Any]:
    """Without end; ``kind`` is "unisono thread 2", "unisono process 2", "torch 2"; 0 is this thread."""
    name, *how, count = kind.split()
    if name == "torch":
        from torch.utils.data import DataLoader

        workers = int(count)
        loader = DataLoader(data, batch_size=batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
        return chain.from_iterable(repeat(loader))
    from unisono.data import Loader, LoaderOptions, as_dataset

    options = LoaderOptions(num_workers=int(count), worker_kind="process" if how[-1:] == ["process"] else "thread")
    return Loader(as_dataset(data), seed=1, global_batch=batch, options=options).iterate(0, 10**9)


def _imports() -> None:
    for name in ("torch.utils.data", "unisono.data.loading.loader"):
        importlib.import_module(name)


def first(kind: str) -> dict[str, float]:
    _imports()
    begin = time.perf_counter()
    stream = batches(kind, Items())
    next(stream)
    return {"first_ms": 1e3 * (time.perf_counter() - begin)}


def memory(kind: str) -> dict[str, int]:
    _imports()
    data = Objects()
    before = _bytes_used()
    stream = batches(kind, data, batch=1000)
    for _ in range(len(data) // 1000):
        next(stream)
    return {"before_bytes": before, "after_bytes": _bytes_used()}


def _bytes_used() -> int:
    """Proportional set size of this process and all below it."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    family = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    total = 0
    for number in family:
        try:
            lines = Path(f"/proc/{number}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def tuning(kind: str, seconds: float) -> dict[str, Any]:
    """Rates of the first and of the last three seconds; what the tuner settled on is seen from the threads and processes."""
    os.environ["XDG_CACHE_HOME"] = os.getcwd()  # nothing remembered
    from unisono.data import Loader, LoaderOptions, as_dataset

    loader = Loader(as_dataset(Slow(kind)), seed=1, global_batch=BATCH, options=LoaderOptions())
    begin = time.perf_counter()
    at: list[float] = []
    for _ in loader.iterate(0, 10**9):
        at.append(time.perf_counter() - begin)
        if at[-1] > seconds:
            break
    times = np.array(at)
    early, late = times[times < 3], times[times > seconds - 3]
    rates = [BATCH * (len(some) - 1) / (some[-1] - some[0]) for some in (early, late)]
    return {"first_3_s": round(rates[0]), "last_3_s": round(rates[1]), "threads": threading.active_count() - 1}


def overhead(kind: str, what: str) -> None:
    from benchmarks.peers.gate import Gate

    gate = Gate()
    single_threaded()
    stream = batches(kind, Rows() if what == "rows" else Items())
    next(stream)
    gate.open()
    while True:
        next(stream)
        gate.step_done(lambda: 0.0)


def main() -> None:
    settings = json.loads(sys.argv[1])
    part, kind = settings["part"], settings["kind"]
    if part == "overhead":
        overhead(kind, settings["what"])
    found = {"first": first, "memory": memory}[part](kind) if part != "tuning" else tuning(kind, settings["seconds"])
    print(json.dumps(found), flush=True)
    os._exit(0)  # workers of any kind end with us; their tidy end is not measured


if __name__ == "__main__":
    # under its own name, so that worker processes can import the data sets
    from benchmarks.data.peers import loader as itself

    itself.main()
