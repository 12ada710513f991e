"""LeNet on any number of devices, Adam with a falling rate: a loop of its own.

python after.py FOLDER
unisono launch -n 2 -- python after.py FOLDER
"""

import os
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from unisono import GuardedOptimizer, Loader, from_map_style, initialize
from unisono.dist import job_from_environ, join_world
from unisono.parallel import find_device

CLASSES, BATCH, EPOCHS = 4, 32, 4


def pictures(count, seed):
    """A bright square in one of four corners, in noise."""
    rng = np.random.RandomState(seed)
    labels = rng.randint(CLASSES, size=count)
    images = rng.normal(0, 1, (count, 1, 28, 28))
    for image, label in zip(images, labels, strict=True):
        top, left = 14 * (label // 2), 14 * (label % 2)
        image[0, top : top + 14, left : left + 14] += 1.0
    return from_map_style(list(zip(images.astype(np.float32), labels, strict=True)))


def build():
    return nn.Sequential(
        nn.Conv2d(1, 6, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 84),
        nn.ReLU(),
        nn.Linear(84, CLASSES),
    )


def main(folder):
    job = job_from_environ(os.environ)
    device = find_device("auto", job.local_rank)
    net = initialize(build(), [{"match": "*", "kind": "msra_prelu", "slope": 0.0}], seed=0)
    if (folder / "start.npz").exists():  # the weights that before.py started from, in the order of its layers
        given = np.load(folder / "start.npz")
        net.load_state_dict(
            {name: torch.from_numpy(given[key]) for name, key in zip(net.state_dict(), given, strict=True)}
        )
    net.to(device)
    adam = torch.optim.Adam(net.parameters(), lr=5e-4, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(adam, step_size=6, gamma=0.5)
    train = pictures(160, seed=0)
    with closing(join_world(job, device_type=device.type, timeout_s=300)) as world:
        optimizer = GuardedOptimizer(net, adam, world)
        place = {"rank": world.rank, "world_size": world.world_size}
        with Loader(train, seed=0, global_batch=BATCH, shuffle=False, device=device, **place) as loader:
            for batch in loader.iterate(0, EPOCHS * len(train) // BATCH):
                rows = batch.micro_batches[0]
                loss = cross_entropy(net(rows["inputs"]), rows["targets"], reduction="sum")
                optimizer.backward(loss, len(rows["targets"]), last=True)
                done = optimizer.step()
                schedule.step()
                if world.rank == 0:
                    print(f"step {batch.step + 1} loss {done.loss:.7g}", flush=True)
        optimizer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
