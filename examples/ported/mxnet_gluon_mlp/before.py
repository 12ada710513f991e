"""Image records, a perceptron of Gluon, SGD with momentum.

python pack.py FOLDER
python before.py FOLDER
"""

import sys
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

CLASSES, SIZE, BATCH, EPOCHS = 5, 16, 32, 4


def build():
    net = nn.HybridSequential()
    net.add(
        nn.Dense(64, activation="relu", in_units=3 * SIZE * SIZE),
        nn.Dense(32, activation="tanh", in_units=64),
        nn.Dense(CLASSES, in_units=32),
    )
    return net


def records(folder):
    return mx.io.ImageRecordIter(
        path_imgrec=str(folder / "train.rec"),
        data_shape=(3, SIZE, SIZE),
        batch_size=BATCH,
        mean_r=120,
        mean_g=128,
        mean_b=136,
        std_r=60,
        std_g=64,
        std_b=68,
        preprocess_threads=1,
        verbose=False,
    )


def main(folder):
    context = mx.cpu()
    mx.random.seed(0)
    net = build()
    net.initialize(mx.init.Xavier(magnitude=2.24), ctx=context)
    net.hybridize()
    np.savez(folder / "start.npz", *(parameter.data().asnumpy() for parameter in net.collect_params().values()))
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.02, "momentum": 0.9, "wd": 0.1})

    step, train = 0, records(folder)
    for _ in range(EPOCHS):
        train.reset()
        for batch in train:
            data = batch.data[0].as_in_context(context)
            label = batch.label[0].as_in_context(context)
            with autograd.record():
                loss = loss_function(net(data), label)
            loss.backward()
            trainer.step(BATCH)
            step += 1
            print(f"step {step} loss {loss.mean().asscalar():.7g}")

    accuracy = mx.metric.Accuracy()
    train.reset()
    for batch in train:
        accuracy.update(batch.label, [net(batch.data[0].as_in_context(context))])
    print(f"accuracy {accuracy.get()[1]:.4f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
