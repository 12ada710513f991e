"""A convolution net of one's own reads digits of 28 x 28 pixels, on several workers.

python digits.py FOLDER
unisono launch -n 2 -- python digits.py FOLDER
torchrun --nproc-per-node=2 digits.py FOLDER
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import nn

from unisono import OptimOptions, PlanOptions, Trainer, TrainOptions

# which of seven segments are lit: top, upper left, upper right, middle, lower left, lower right, bottom
SEGMENTS = (
    "1110111",
    "0010010",
    "1011101",
    "1011011",
    "0111010",
    "1101011",
    "1101111",
    "1010010",
    "1111111",
    "1111011",
)
BARS = ((0, 2, 0, 10), (0, 9, 0, 2), (0, 9, 8, 10), (8, 10, 0, 10), (8, 18, 0, 2), (8, 18, 8, 10), (16, 18, 0, 10))


class Digits(torch.utils.data.Dataset):
    """Digits of seven segments at random places, on noise: images [1, 28, 28] and classes."""

    def __init__(self, count: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.labels = random.integers(0, 10, count)
        self.images = random.normal(0, 0.3, (count, 1, 28, 28)).astype(np.float32)
        for image, label in zip(self.images, self.labels, strict=True):
            top, left = random.integers(1, 9), random.integers(1, 16)
            for lit, (a, b, c, d) in zip(SEGMENTS[label], BARS, strict=True):
                image[0, top + a : top + b, left + c : left + d] += float(lit)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(self.images[index]), torch.tensor(self.labels[index])


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def main(folder: str) -> None:
    with Trainer(
        build_model,
        Digits(2048, seed=1),
        PlanOptions(global_batch=64, precision="fp32"),
        objective=nn.CrossEntropyLoss(),
        optimizer=OptimOptions(kind="adamw", lr=3e-3),
        options=TrainOptions(epochs=6, eval_every_steps=32, num_eval_samples=0),
        eval_data=Digits(512, seed=2),
        metrics=["accuracy"],
        run_dir=folder,
    ) as run:
        accuracy = run.fit().evaluation["accuracy"]
        print(f"accuracy {accuracy:.3f} of held-out digits")
        assert accuracy > 0.9, accuracy


if __name__ == "__main__":
    main(*sys.argv[1:])
