"""What a loader costs by itself: per batch, until the first one, in memory, and what tuning gains. Prints JSON.

    python -m benchmarks.data.loader [--rounds 7] [--parts overhead,first,memory,tuning] [--cache DIR]

``overhead``: microseconds per batch of 64 of a data set that does nothing, in this thread and with two workers. ``first``:
milliseconds from making the loader to its first batch in a fresh process, imports done. ``memory``: what 8 workers add after
one pass over a list of 10^6 Python objects. ``tuning``: samples per second in the first and the last three seconds when nothing
is set, for samples that wait for a millisecond and samples that compute in Python.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.contestants import Contestant
from benchmarks.data.contest import Problems, ask_all, contest

MODULE = "benchmarks.data.peers.loader"
OVERHEAD = {
    "unisono, whole batches, 0": ("unisono 0", "rows"),
    "unisono, items, 0": ("unisono 0", "items"),
    "unisono, items, 2 threads": ("unisono thread 2", "items"),
    "unisono, items, 2 processes": ("unisono process 2", "items"),
    "torch, items, 0": ("torch 0", "items"),
    "torch, items, 2 processes": ("torch 2", "items"),
}
FIRST = ("unisono 0", "unisono thread 2", "unisono process 2", "torch 0", "torch 2")
MEMORY = ("unisono thread 8", "unisono process 8", "torch 8")
TUNED = ("waiting", "python")


def overhead(arguments: argparse.Namespace) -> dict[str, Any]:
    contestants = [
        Contestant(name=name, module=MODULE, settings={"part": "overhead", "kind": kind, "what": what})
        for name, (kind, what) in OVERHEAD.items()
    ]
    outcome = contest(
        contestants, "torch, items, 0", rounds=arguments.rounds, steps=arguments.steps, cache=arguments.cache
    )
    for row in outcome["contestants"].values():
        del row["values"]
        row["us_per_batch"] = round(1e6 * row["block_s"] / arguments.steps, 1)
    return outcome


def _medians(part: str, kinds: tuple[str, ...], arguments: argparse.Namespace, **more: Any) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {}
    not_run: Problems = {}
    for _ in range(arguments.rounds):
        jobs = {kind: ("", MODULE, {"part": part, "kind": kind, **more}) for kind in kinds}
        answers, missing = ask_all(jobs, arguments.cache)
        not_run |= missing
        for kind, answer in answers.items():
            found.setdefault(kind, []).append(answer)
    medians = {
        kind: {key: round(statistics.median(each[key] for each in rows), 1) for key in rows[0]}
        for kind, rows in found.items()
    }
    return {"contestants": medians, "not_run": not_run}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=500, help="batches per block of overhead")
    parser.add_argument("--tuning-s", type=float, default=40.0)
    parser.add_argument("--parts", default="overhead,first,memory,tuning")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/unisono-bench").expanduser())
    arguments = parser.parse_args()
    every = {
        "overhead": lambda: overhead(arguments),
        "first": lambda: _medians("first", FIRST, arguments),
        "memory": lambda: _medians("memory", MEMORY, arguments),
        "tuning": lambda: _medians("tuning", TUNED, arguments, seconds=arguments.tuning_s),
    }
    result = {name: every[name]() for name in arguments.parts.split(",")}
    print(json.dumps(result | {"rounds": arguments.rounds}, indent=1))


if __name__ == "__main__":
    main()
