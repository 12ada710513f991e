"""Near-duplicates removed from one folder of photos by unisono and by imagededup's perceptual hashes.

    python -m benchmarks.quality.images [--rounds 7] [--photos 2000] [--cache DIR]

Each contestant is a whole command with one process for the work. Start-up counts. Copies are planted: re-encoded with less
quality, at half the size, brighter, and parts with sides of 0.7 to 0.95 of the photo's. unisono runs as it is by default, which
does not look for parts, and with ``--crops``; imagededup with PHash and its default distance of 10.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.data.photos import photos
from benchmarks.quality.commands import Outcome, of_script, of_unisono, side_by_side
from PIL import Image

COPIES = 20  # one of so many photos has copies
SIDES = (0.7, 0.95)


def write_photos(folder: Path, count: int, cache: Path) -> dict[str, list[tuple[str, str]]]:
    """Write JPEGs, and copies of some; returns the pairs by kind. Copies come after all originals."""
    folder.mkdir()
    home = photos(cache, count)
    content, offsets = (home / "photos.bin").read_bytes(), np.load(home / "offsets.npy").tolist()
    draw = np.random.default_rng(1)
    planted: dict[str, list[tuple[str, str]]] = {}
    for number, (begin, end) in enumerate(pairwise(offsets)):
        original = f"a{number:05d}.jpg"
        (folder / original).write_bytes(content[begin:end])
        if number % COPIES:
            continue
        image = Image.open(BytesIO(content[begin:end]))
        width, height = (round(size * draw.uniform(*SIDES)) for size in image.size)
        left, top = int(draw.integers(image.width - width + 1)), int(draw.integers(image.height - height + 1))
        copies = {
            "re-encoded": image,
            "half the size": image.resize((image.width // 2, image.height // 2)),
            "brighter": image.point(lambda value: min(255, round(value * 1.2) + 8)),
            "part": image.crop((left, top, left + width, top + height)),
        }
        for kind, copy in copies.items():
            name = f"b{number:05d}-{kind.split()[0]}.jpg"
            copy.save(folder / name, quality=60)
            planted.setdefault(kind, []).append((original, name))
    return planted


def contest(rounds: int, count: int, cache: Path) -> dict[str, Any]:
    commands = {
        "unisono": of_unisono,
        "unisono --crops": _with_crops,
        "imagededup": of_script("imagededup", "benchmarks.quality.imagededup_alone", cache),
    }
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "photos"
        planted = write_photos(source, count, cache)
        total = count + sum(map(len, planted.values()))
        return side_by_side(commands, source, Path(folder), planted, rounds=rounds, count=total)


def _with_crops(source: Path, out: Path) -> Outcome:
    return of_unisono(source, out, "--crops")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--photos", type=int, default=2000)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/unisono-bench").expanduser())
    arguments = parser.parse_args()
    print(json.dumps({"together": contest(arguments.rounds, arguments.photos, arguments.cache)}))


if __name__ == "__main__":
    main()
