"""ResNet on RecordIO images with augmentation, on two workers that exchange gradients, or on two workers and a parameter server.

python images_on_workers.py FOLDER dist_sync
python images_on_workers.py FOLDER dist_async
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image


def unisono(*arguments: object) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "unisono", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def draw_images(folder: Path, count: int) -> None:
    """Bars of three directions on noise: a folder for each."""
    random = np.random.default_rng(0)
    for number in range(count):
        name = ("level", "upright", "slanted")[number % 3]
        pixels = random.integers(0, 100, (28, 28, 3), dtype=np.uint8)
        rows, columns = np.mgrid[0:28, 0:28]
        along = {"level": rows, "upright": columns, "slanted": rows + columns}[name]
        pixels[(along + random.integers(12)) % 12 < 4] += 150
        (folder / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / name / f"{number}.png")


def main(folder: str, sync: str) -> None:
    root = Path(folder)
    if not (root / "images.rec").exists():
        draw_images(root / "images", 300)
        unisono("data", "pack", root / "images", root / "images.rec")
    settings = {
        "task.kind": "image",
        "data.train": root / "images.rec",
        "components.model": "resnet14",
        "image.size": 20,
        "data.eval_frac": 0.2,
        "image.flip": 0,  # a slanted bar would slant the other way
        "image.rotate_degrees": 5,
        "image.erase": 0.1,
        "plan.sync": sync,
        "plan.global_batch": 24,
        "optim.kind": "sgd",
        "optim.lr": 0.05,
        "train.epochs": 6,
        "launch.num_processes": 2,
        "run.dir": root / sync,
    }
    if sync == "dist_async":
        settings |= {"launch.num_servers": 1, "plan.staleness": 4}
    unisono("train", *(f"--set={name}={value}" for name, value in settings.items()))
    found = json.loads(unisono("eval", root / sync, "--json"))["evaluation"]
    print(f"{sync}: accuracy {found['accuracy']:.3f} of held-out images")
    assert found["accuracy"] > 0.85, found


if __name__ == "__main__":
    main(*sys.argv[1:])
