"""Images end to end: records, tiles, augmentation, mixup and a bad image in a run that is stopped and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import nn

from unisono import LoaderOptions, OptimOptions, PlanOptions, Trainer, TrainOptions
from unisono.data.combined import mapped
from unisono.data.image import (
    Augment,
    CenterCrop,
    ImageTransform,
    Mixup,
    RandomResizedCrop,
    encode_jpeg,
    image_records,
    tile_grid,
)
from unisono.data.recordio import ImageHeader, RecordWriter, pack_header
from unisono.train.metrics import find_metric
from unisono.train.objectives import cross_entropy

NUMBERS = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}


def pack(path: Path, *, count: int, seed: int, broken: tuple[int, ...] = ()) -> Path:
    """Noise around red (class 0) or blue (class 1)."""
    rng = np.random.default_rng(seed)
    with RecordWriter(path) as writer:
        for number in range(count):
            pixels = rng.integers(0, 120, (48, 64, 3)).astype(np.uint8)
            pixels[..., 0 if number % 2 == 0 else 2] += 100
            jpeg = encode_jpeg(pixels)
            tiles = tile_grid(jpeg)
            assert tiles is not None
            stored = jpeg[:100] if number in broken else jpeg
            column = np.empty(0, np.uint16) if number in broken else tiles.to_column()
            writer.write(pack_header(ImageHeader(label=number % 2, id=number), stored), side={"tiles": column})
    return path


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 5, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(8, 2)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(image))


def run(folder: Path, train: Path, held_out: Path, *, stop_after: int = 40, **loader: Any) -> dict[str, Any]:
    augment = Augment(size=(32, 32), crop=RandomResizedCrop(), flip=0.5, **NUMBERS)
    fixed = ImageTransform(augment=Augment(size=(32, 32), crop=CenterCrop(), **NUMBERS))
    with Trainer(
        Net(),
        image_records([train]),
        PlanOptions(device="cpu", global_batch=16, micro_batch=8, precision="fp32"),
        objective=cross_entropy,
        optimizer=OptimOptions(lr=1e-2),
        options=TrainOptions(steps=40, eval_every_steps=0),
        run_dir=folder,
        eval_data=mapped(image_records([held_out]), fixed),
        metrics={"accuracy": find_metric("accuracy")},
        transform=ImageTransform(augment=augment),
        pair_transform=Mixup(classes=2),
        loader=LoaderOptions(max_bad_sample_frac=0.1, **loader),
    ) as trainer:
        losses = []
        for step in trainer:
            losses.append(step.stats[0].item())
            if step.index == stop_after:
                trainer.save(wait=True)
                break
        accuracy = trainer.evaluate()["accuracy"] if len(losses) and stop_after == 40 else None
        digest = tiny.digest(trainer)
    return {"losses": losses, "digest": digest, "accuracy": accuracy}


def test_a_run_on_images_learns_and_resumes_exactly_with_other_workers(tmp_path: Path) -> None:
    train = pack(tmp_path / "train.rec", count=60, seed=0, broken=(7,))
    held_out = pack(tmp_path / "held-out.rec", count=20, seed=1)
    whole = run(tmp_path / "whole", train, held_out, num_workers=2, worker_kind="thread")
    assert whole["accuracy"] == pytest.approx(1.0)
    first = run(tmp_path / "parts", train, held_out, stop_after=17, num_workers=0)
    second = run(tmp_path / "parts", train, held_out, num_workers=2, worker_kind="process")
    assert first["losses"] + second["losses"] == whole["losses"]
    assert second["digest"] == whole["digest"]
    skipped = [e for e in tiny.events(tmp_path / "whole") if e["kind"] == "data_skipped"]
    assert {sample for event in skipped for sample in event["samples"]} == {7}
