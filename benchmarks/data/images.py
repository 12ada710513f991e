"""Images per second to training batches, unisono and every loader that could be installed. Prints JSON.

    python -m benchmarks.data.images [--rounds 7] [--steps 31] [--only WORD,WORD] [--photos 2000] [--cache DIR]

2,000 JPEGs of 500 x 375 to RandomResizedCrop(224), flip, normalised float32 [64, 3, 224, 224], two workers each (threads or
processes, as the loader has them), files in the page cache. A block is an epoch. What is compared does the same: mean area,
aspect ratio and flips of the crops, and mean and spread of the output, are measured on each contestant's batches; ``unlike``
names what is not within tolerance of what the rule of RandomResizedCrop gives, or of the contestants' median.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.contestants import Contestant
from benchmarks.data.contest import chosen, contest
from benchmarks.data.photos import expected, photos, ramps

BATCH = 64
WAYS = [f"{way} {by}" for way in ("untouched", "tiles", "packed", "cached") for by in ("torch", "opencv")]
KINDS = {
    **{f"unisono {way}": "loaders" for way in [*WAYS, "tiles torch batch", "tiles opencv batch"]},
    "grain simplejpeg": "grain",
    "torch pillow": "loaders",
    "torch simplejpeg": "loaders",
    "webdataset simplejpeg": "loaders",
    "streaming simplejpeg": "streaming",
    "litdata simplejpeg": "litdata",
    "spdl simplejpeg": "loaders",
    "mxnet ImageRecordIter": "mxnet",
    "mxnet gluon": "mxnet",
    "mindspore MindDataset": "mindspore",
    "ffcv jpg": "ffcv",
}
BASELINE = "grain simplejpeg"  # the fastest rival
# of 640 crops: 4 standard errors, and the rounding of decoders
TOLERANCE = {"area": 0.05, "log_ratio": 0.04, "flip": 0.08}
PIXEL_TOLERANCE = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=31, help="batches per block")
    parser.add_argument("--photos", type=int, default=2000)
    parser.add_argument("--only", default="", help="contestants whose names have one of these words")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/unisono-bench").expanduser())
    arguments = parser.parse_args()
    settings = {
        "photos": str(photos(arguments.cache, arguments.photos)),
        "ramps": str(ramps(arguments.cache, 640)),
    }
    contestants = [
        Contestant(
            name=name, module="benchmarks.data.peers.images", environment=home, settings={"kind": name, **settings}
        )
        for name, home in KINDS.items()
    ]
    outcome = contest(
        chosen(contestants, arguments.only),
        BASELINE,
        rounds=arguments.rounds,
        steps=arguments.steps,
        cache=arguments.cache,
    )
    rule = expected()
    rows = outcome["contestants"]
    typical = typical_pixels(rows)
    for row in rows.values():
        del row["values"]
        row["images_per_s"] = round(arguments.steps * BATCH / row["block_s"])
        row["cpu_ms_per_image"] = round(1e3 * row["block_cpu_s"] / (arguments.steps * BATCH), 3)
        row["unlike"] = unlike(row, rule, typical)
    result = {
        **outcome,
        "expected_crops": rule,
        "expected_pixels": typical,
        "rounds": arguments.rounds,
        "steps": arguments.steps,
    }
    print(json.dumps(result, indent=1))


def typical_pixels(rows: dict[str, Any]) -> dict[str, float]:
    """Medians over the contestants."""
    middle = len(rows) // 2
    return {name: sorted(row["pixels"][name] for row in rows.values())[middle] for name in ("mean", "std") if rows}


def unlike(row: dict[str, Any], rule: dict[str, float], typical: dict[str, float]) -> list[str]:
    """What of a contestant's batches is not as it should be."""
    found = [name for name, most in TOLERANCE.items() if abs(row["crops"][name] - rule[name]) > most]
    return found + [name for name, value in typical.items() if abs(row["pixels"][name] - value) > PIXEL_TOLERANCE]


if __name__ == "__main__":
    main()
