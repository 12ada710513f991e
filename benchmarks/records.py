"""Reading records: RecordIO by unisono beside MXNet's reader, LMDB, Arrow IPC, and the bare mapped file. Prints JSON.

    python -m benchmarks.records [--rounds 9] [--cache DIR]

Every contestant is a process with a file of the same payloads (random lengths around 2 KB or 110 KB), in the page cache; a block
is one pass over all records, in order or in a new random order. A round is one block of each; ratios are taken within a
round. ``limit`` is a slice of a mapped file per record, offsets in a list: the least Python can do for a copy. ``limit crc``
adds zlib's checksum. Zero-copy views are compared with views.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.rivals import Contestant, race

SIZES = {"2 KB": {"bytes": 2048, "count": 40_000}, "110 KB": {"bytes": 110_000, "count": 1500}}
COPIES = ("limit", "limit crc", "unisono", "unisono always", "unisono never", "unisono batch", "lmdb", "arrow", "mxnet")
VIEWS = ("unisono views", "lmdb views", "arrow views")
ENVIRONMENTS = {"lmdb": "records", "arrow": "records", "mxnet": "mxnet"}


def contestant(kind: str, mode: str, size: dict[str, int]) -> Contestant:
    """One process reading one kind of file."""
    return Contestant(
        name=kind,
        module="benchmarks.peers.records",
        environment=ENVIRONMENTS.get(kind.split()[0], ""),
        settings={"kind": kind, "mode": mode, **size},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/unisono-bench").expanduser())
    arguments = parser.parse_args()
    arguments.steps = 1
    result: dict[str, Any] = {}
    for size, settings in SIZES.items():
        for mode in ("sequential", "random"):
            kinds = [kind for kind in COPIES if (kind, mode) != ("unisono batch", "sequential")]
            for what, names, base in (("copies", kinds, "limit"), ("views", VIEWS, "unisono views")):
                outcome = race([contestant(kind, mode, settings) for kind in names], base, arguments, Path())
                rows = outcome["contestants"]
                for row in rows.values():
                    row["records_per_s"] = round(settings["count"] / row["step_s"])
                    row["mb_per_s"] = round(settings["bytes"] * settings["count"] / row["step_s"] / 1e6)
                    assert row.pop("largest_relative_loss_difference") == 0, "not the same records"
                result[f"{size}, {mode}, {what}"] = outcome
    print(json.dumps({"tables": result, "rounds": arguments.rounds}, indent=1))


if __name__ == "__main__":
    main()
