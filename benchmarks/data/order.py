"""How well loaders mix, whether they resume exactly on other numbers of ranks, and whether they notice damage. Prints JSON.

    python -m benchmarks.data.order [--parts mixing,resume,damage] [--only WORD,WORD] [--cache DIR]

``mixing``: 20,000 samples in 20 shards, distinct shards in a batch of 64, mean over an epoch; a full shuffle gives 19.2.
``resume``: 37 of 156 steps on 2 x 4 ranks, the rest on 8, 4, 16, 12, 3 and 6: samples that came twice, and never.
``damage``: one payload bit flipped, or the file's last 30 kB cut; what reading it says.
No times are taken.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.data.contest import Problems, ask_all

SHARDS, BATCH = 20, 64
MIXED = {
    "unisono global": "",
    "unisono block 256": "",
    "torch randperm": "",
    "grain": "grain",
    "streaming": "streaming",
    "streaming block 4000": "streaming",
    "litdata": "litdata",
    "litdata chunk": "litdata",
    "webdataset buffer 1000": "loaders",
    "webdataset buffer 5000": "loaders",
    "mindspore": "mindspore",
}
RESUMED = {"unisono": "", "streaming relaxed": "streaming", "litdata item": "litdata", "litdata chunk": "litdata"}
FORMATS = {
    "unisono RecordIO": "",
    "mxnet RecordIO": "mxnet",
    "mindspore MindRecord": "mindspore",
    "streaming MDS": "streaming",
    "streaming MDS, hashes": "streaming",
    "litdata": "litdata",
    "webdataset": "loaders",
    "arrayrecord": "grain",
    "lmdb": "records",
    "arrow IPC": "records",
}


def mixing(arguments: argparse.Namespace) -> dict[str, Any]:
    """Mean number of distinct shards in a batch, by loader."""
    settings = {"part": "mixing", "samples": 1000 * SHARDS, "shards": SHARDS, "batch": BATCH}
    answers, not_run = _asked("benchmarks.data.peers.order", MIXED, settings, arguments)
    found: dict[str, Any] = {}
    for name, order in answers.items():
        batches = [order[first : first + BATCH] for first in range(0, len(order) // BATCH * BATCH, BATCH)]
        shards = [len({number * SHARDS // settings["samples"] for number in batch}) for batch in batches]
        found[name] = {
            "shards_per_batch": round(statistics.mean(shards), 2),
            "samples": len(order),
            "repeated": len(order) - len(set(order)),
        }
    return {"contestants": found, "not_run": not_run}


def resume(arguments: argparse.Namespace) -> dict[str, Any]:
    """Repeated and lost samples, by loader and world size."""
    settings = {"part": "resume", "samples": 156 * BATCH, "shards": SHARDS, "worlds": [8, 4, 16, 12, 3, 6]}
    answers, not_run = _asked("benchmarks.data.peers.order", RESUMED, settings, arguments)
    return {"contestants": answers, "not_run": not_run}


def damage(arguments: argparse.Namespace) -> dict[str, Any]:
    """Outcome by format, for each damage and for none."""
    found: dict[str, Any] = {}
    for kind in ("", "bit", "cut"):
        answers, crashed = _asked("benchmarks.data.peers.damage", FORMATS, {"damage": kind}, arguments)
        for name, row in answers.items():
            found.setdefault(name, {})[kind or "none"] = {"verdict": verdict(row), **row}
        for name, why in crashed.items():
            found.setdefault(name, {})[kind or "none"] = {"verdict": "process ended", "error": why}
    return {"contestants": found}


def verdict(row: dict[str, Any]) -> str:
    """In one word or two."""
    seen = [
        *(["found by verify"] if row.get("findings of verify") else []),
        *(["error when read"] if "error" in row else []),
    ]
    if row["wrong"]:
        seen.insert(0, "silent wrong data")
    elif row["missing"] and "error" not in row:
        seen.append("silent loss")
    return ", ".join(seen) or "whole"


def _asked(
    module: str, homes: dict[str, str], settings: dict[str, Any], arguments: argparse.Namespace
) -> tuple[dict[str, Any], Problems]:
    words = [word for word in arguments.only.split(",") if word]
    jobs = {
        name: (home, module, {"kind": name, **settings})
        for name, home in homes.items()
        if not words or any(word in name for word in words)
    }
    return ask_all(jobs, arguments.cache)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default="mixing,resume,damage")
    parser.add_argument("--only", default="", help="contestants whose names have one of these words")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/unisono-bench").expanduser())
    arguments = parser.parse_args()
    every = {"mixing": mixing, "resume": resume, "damage": damage}
    print(json.dumps({name: every[name](arguments) for name in arguments.parts.split(",")}, indent=1))


if __name__ == "__main__":
    main()
