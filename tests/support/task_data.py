"""Small raw data of each task, learned in a few steps."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

SMALL = ("--set=model.num_layers=1", "--set=model.dim=32", "--set=model.num_heads=2")


def write_images(folder: Path, *, per_class: int = 12) -> Path:
    """A folder with a folder of PNGs for each of two classes, which differ in colour."""
    rng = np.random.default_rng(0)
    for number, name in enumerate(("blue", "red")):
        (folder / name).mkdir(parents=True)
        for at in range(per_class):
            pixels = rng.integers(0, 120, (20, 24, 3), dtype=np.uint8)
            pixels[..., 2 - 2 * number] += 100
            Image.fromarray(pixels).save(folder / name / f"{at}.png")
    return folder


def write_reviews(path: Path) -> Path:
    """Lines with ``text`` and its ``label``, which a single word tells."""
    words = (("bad", "neg"), ("fine", "pos"))
    return _write(path, ({"text": f"it was {words[i % 2][0]} {i}", "label": words[i % 2][1]} for i in range(120)))


def write_tagged(path: Path) -> Path:
    """Lines with ``words`` and a tag of each."""
    tags = {"Bob": "PER", "Rome": "LOC", "runs": "O", "to": "O"}
    rng = np.random.default_rng(0)
    rows = ([str(word) for word in rng.choice(list(tags), 4)] for _ in range(120))
    return _write(path, ({"words": " ".join(row), "tags": " ".join(tags[word] for word in row)} for row in rows))


def write_table(path: Path) -> Path:
    """Rows with numbers ``x`` and ``y``, the category ``kind``, and the targets ``price`` and ``dear``."""
    rng = np.random.default_rng(0)
    rows = ((float(rng.normal(5, 2)), float(rng.normal()), str(rng.choice(["flat", "house"]))) for _ in range(200))
    return _write(
        path,
        (
            {"x": x, "y": y, "kind": kind, "price": 1000 * x + 500 * (kind == "flat"), "dear": "yes" if x > 5 else "no"}
            for x, y, kind in rows
        ),
    )


def write_lines(path: Path) -> Path:
    """Lines with a ``text`` each."""
    return _write(path, ({"text": f"the cat sat on the mat number {i % 7}"} for i in range(80)))


def _write(path: Path, rows: Iterable[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
