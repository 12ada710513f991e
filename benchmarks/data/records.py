"""Reading records by every format, and opening a file of ten million. Prints JSON.

    python -m benchmarks.data.records [--rounds 7] [--only WORD,WORD] [--parts read,open] [--cache DIR]

``read``: plain readers and the formats of loaders; each contestant, a process, reads the same payloads (random lengths around
2 KB or 110 KB, in the page cache) in order or in a new random order. The floor is ``limit``: one slice of a mapped file per
record. What a loader cannot do at random is not listed there. ``open``: milliseconds to open a RecordIO file of 10^7 records and
read the one in the middle, in a fresh process after the imports, and a second time in that process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.contestants import Contestant
from benchmarks.data.contest import ask_all, chosen, contest

from unisono.data.recordio.maintenance import reindex

SIZES = {"2 KB": {"bytes": 2048, "count": 10_000}, "110 KB": {"bytes": 110_000, "count": 1500}}
PLAIN = {
    "limit": "",
    "limit crc": "",
    "unisono": "",
    "unisono always": "",
    "unisono never": "",
    "unisono batch": "",
    "lmdb": "records",
    "arrow": "records",
    "mxnet": "mxnet",
}
VIEWS = {"unisono views": "", "lmdb views": "records", "arrow views": "records"}
LOADERS = {
    "mindspore FileReader": "mindspore",
    "mindspore MindDataset": "mindspore",
    "arrayrecord": "grain",
    "arrayrecord batch": "grain",
    "mds": "streaming",
    "litdata": "litdata",
    "webdataset": "loaders",
}
NOT_AT_RANDOM, ONLY_AT_RANDOM = ("mindspore FileReader", "webdataset"), ("unisono batch", "arrayrecord batch")
MANY = 10_000_000


def read(arguments: argparse.Namespace) -> dict[str, Any]:
    """The contests, by size and order."""
    tables: dict[str, Any] = {}
    for size, settings in SIZES.items():
        for mode in ("sequential", "random"):
            left_out = NOT_AT_RANDOM if mode == "random" else ONLY_AT_RANDOM
            copies = {name: home for name, home in (PLAIN | LOADERS).items() if name not in left_out}
            for what, homes, baseline in (("copies", copies, "limit"), ("views", VIEWS, "unisono views")):
                contestants = [
                    Contestant(
                        name=name,
                        module="benchmarks.data.peers.records" if name in LOADERS else "benchmarks.peers.records",
                        environment=home,
                        settings={"kind": name, "mode": mode, **settings},
                    )
                    for name, home in homes.items()
                ]
                outcome = contest(
                    chosen(contestants, arguments.only),
                    baseline,
                    rounds=arguments.rounds,
                    steps=1,
                    cache=arguments.cache,
                )
                rows = outcome["contestants"]
                right = rows[baseline]["values"] if baseline in rows else None
                for row in rows.values():
                    values = row.pop("values")
                    if right is not None:  # nothing to compare with where --only leaves the baseline out
                        row["same_records"] = values == right
                    row["records_per_s"] = round(settings["count"] / row["block_s"])
                    row["mb_per_s"] = round(settings["bytes"] * settings["count"] / row["block_s"] / 1e6)
                tables[f"{size}, {mode}, {what}"] = outcome
    return tables


def many(path: Path, count: int) -> None:
    """A RecordIO file of ``count`` records of 8 bytes, each its number, and both indexes, without a loop over records."""
    block = np.empty((count, 4), "<u4")
    block[:, 0], block[:, 1] = 0xCED7230A, 8  # dmlc-core's magic word, the length
    block[:, 2:] = np.arange(count, dtype="<u8").view("<u4").reshape(-1, 2)
    block.tofile(path)
    with path.with_suffix(".idx").open("w") as file:
        for first in range(0, count, 1 << 20):
            file.write("".join(f"{i}\t{16 * i}\n" for i in range(first, min(first + (1 << 20), count))))
    reindex(path)


def opened(arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians over fresh processes."""
    homes = {"unisono": "", "mxnet": "mxnet"}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in homes}
    not_run: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        path = Path(folder) / "many.rec"
        many(path, arguments.many)
        for _ in range(arguments.rounds):
            jobs = {
                name: (
                    home,
                    "benchmarks.data.peers.open_records",
                    {"kind": name, "path": str(path), "count": arguments.many},
                )
                for name, home in homes.items()
            }
            answers, not_run = ask_all(jobs, arguments.cache)
            for name, answer in answers.items():
                found[name].append(answer)
    medians = {
        name: {key: round(statistics.median(each[key] for each in answers), 3) for key in answers[0]}
        for name, answers in found.items()
        if answers
    }
    return {"records": arguments.many, "contestants": medians, "not_run": not_run}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="contestants whose names have one of these words")
    parser.add_argument("--parts", default="read,open")
    parser.add_argument("--many", type=int, default=MANY, help="records of the file that is opened")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/unisono-bench").expanduser())
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    result: dict[str, Any] = {"rounds": arguments.rounds}
    if "read" in parts:
        result["tables"] = read(arguments)
    if "open" in parts:
        result["open"] = opened(arguments)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
