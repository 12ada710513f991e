"""LeNet of Gluon on two devices, Adam with a falling rate.

python before.py FOLDER
"""

import sys
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, lr_scheduler
from mxnet.gluon import nn

CLASSES, BATCH, EPOCHS = 4, 32, 4


def pictures(count, seed):
    """A bright square in one of four corners, in noise."""
    rng = np.random.RandomState(seed)
    labels = rng.randint(CLASSES, size=count)
    images = rng.normal(0, 1, (count, 1, 28, 28))
    for image, label in zip(images, labels, strict=True):
        top, left = 14 * (label // 2), 14 * (label % 2)
        image[0, top : top + 14, left : left + 14] += 1.0
    return images.astype(np.float32), labels.astype(np.float32)


def build():
    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(6, kernel_size=5, activation="relu", in_channels=1),
        nn.MaxPool2D(pool_size=2, strides=2),
        nn.Conv2D(16, kernel_size=5, activation="relu", in_channels=6),
        nn.MaxPool2D(pool_size=2, strides=2),
        nn.Flatten(),
        nn.Dense(84, activation="relu", in_units=256),
        nn.Dense(CLASSES, in_units=84),
    )
    return net


def main(folder):
    devices = [mx.cpu(0), mx.cpu(1)]
    mx.random.seed(0)
    net = build()
    net.initialize(mx.init.MSRAPrelu(slope=0.0), ctx=devices)
    net.hybridize()
    weights = [parameter.data(devices[0]).asnumpy() for parameter in net.collect_params().values()]
    np.savez(folder / "start.npz", *weights)
    schedule = lr_scheduler.FactorScheduler(step=6, factor=0.5, base_lr=5e-4)
    trainer = gluon.Trainer(
        net.collect_params(),
        "adam",
        {"learning_rate": 5e-4, "lr_scheduler": schedule, "wd": 1e-3},
        kvstore="device",
    )
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
    train = gluon.data.DataLoader(
        gluon.data.ArrayDataset(*pictures(160, seed=0)), batch_size=BATCH, shuffle=False, last_batch="discard"
    )

    step = 0
    for _ in range(EPOCHS):
        for data, label in train:
            data_parts = gluon.utils.split_and_load(data, devices)
            label_parts = gluon.utils.split_and_load(label, devices)
            with autograd.record():
                losses = [loss_function(net(x), y) for x, y in zip(data_parts, label_parts, strict=True)]
            autograd.backward(losses)
            trainer.step(len(data))
            step += 1
            loss = sum(part.sum().asscalar() for part in losses) / len(data)
            print(f"step {step} loss {loss:.7g}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
