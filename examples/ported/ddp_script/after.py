"""Two spirals are told apart: torchrun --nproc-per-node=2 after.py, or python after.py"""

import math
from functools import partial

import torch
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import Dataset

from unisono import CheckpointOptions, PlanOptions, Trainer, TrainOptions

BATCH, EPOCHS, LR = 64, 4, 0.05


class Spirals(Dataset):
    """Points of two spirals, and which spiral each is of."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(2, (count,), generator=generator)
        radius = torch.rand(count, generator=generator)
        angle = 5 * radius + math.pi * self.labels
        points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        self.points = points + 0.02 * torch.randn(count, 2, generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.points[index], self.labels[index]


def build_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(2, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 2)
    )


def main():
    model = build_model()
    train = Spirals(512, seed=1)
    epoch = len(train) // BATCH
    with Trainer(
        model,
        train,
        PlanOptions(global_batch=BATCH, precision="fp32"),
        objective=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=1e-4),
        schedule=partial(MultiStepLR, milestones=[2 * epoch, 3 * epoch], gamma=0.1),
        options=TrainOptions(epochs=EPOCHS, eval_every_steps=epoch, num_eval_samples=0),
        checkpoint=CheckpointOptions(every_steps=epoch),
        eval_data=Spirals(128, seed=2),
        metrics=["accuracy"],
    ) as run:
        run.fit()


if __name__ == "__main__":
    main()
