"""Image records, a perceptron, SGD with momentum.

python pack.py FOLDER
python after.py FOLDER
"""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from unisono import PlanOptions, Trainer, TrainOptions, initialize
from unisono.data import mapped
from unisono.data.image import Augment, CenterCrop, ImageTransform, image_records
from unisono.train import METRICS, cross_entropy

CLASSES, SIZE, BATCH, EPOCHS = 5, 16, 32, 4


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Flatten(),
            nn.Linear(3 * SIZE * SIZE, 64),
            nn.ReLU(),
            nn.Linear(64, 32),
            nn.Tanh(),
            nn.Linear(32, CLASSES),
        )

    def forward(self, image):
        return super().forward(image)


def records(folder):
    mean, std = (120 / 255, 128 / 255, 136 / 255), (60 / 255, 64 / 255, 68 / 255)
    augment = Augment(size=(SIZE, SIZE), crop=CenterCrop(share=1.0), mean=mean, std=std)
    return mapped(image_records([folder / "train.rec"]), ImageTransform(augment=augment))


def main(folder):
    net = initialize(Net(), [{"match": "*", "kind": "xavier", "magnitude": 2.24}], seed=0)
    if (folder / "start.npz").exists():  # the weights that before.py started from, in the order of its layers
        given = np.load(folder / "start.npz")
        net.load_state_dict(
            {name: torch.from_numpy(given[key]) for name, key in zip(net.state_dict(), given, strict=True)}
        )
    train = records(folder)
    with Trainer(
        net,
        DataLoader(train, batch_size=BATCH),  # in order, as before
        PlanOptions(global_batch=BATCH, precision="fp32"),
        objective=cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=0.1),
        options=TrainOptions(epochs=EPOCHS, num_eval_samples=0),
        eval_data=train,
        metrics={"accuracy": METRICS["accuracy"]},
        run_dir=folder / "run",
    ) as run:
        for step in run:
            if run.world.rank == 0:
                print(f"step {step.index} loss {step.loss:.7g}", flush=True)
        accuracy = run.evaluate(train)["accuracy"]
        if run.world.rank == 0:
            print(f"accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
