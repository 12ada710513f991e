"""What the idioms of before.py become; functions of one name return the same numbers."""

from functools import partial

import given as common
import torch
from torch.utils.data import DataLoader

from unisono import (
    CheckpointOptions,
    PlanOptions,
    Trainer,
    TrainOptions,
)
from unisono.train import Metric

given = common.given
# half a unit in the last place of bf16: each rank rounds the sum of other samples
# one process joins a job once
ALONE = ("save_state",)
TOLERANCE = {"mixed_precision": 2e-3}


def _weights(net):
    return [net.weight, net.bias]


# --- The loop ---


def prepare(net, data, objective):
    """`Accelerator`, `prepare`, `backward`

    Nothing is wrapped; the loop is the trainer's, or `for step in run:`. `global_batch` is the batch of all
    processes, where `batch_size` of Accelerate is that of one. A program that keeps its loop takes [the parts
    alone](own-loop.md).
    """
    trainer = Trainer(
        net,
        DataLoader(data, batch_size=16),
        PlanOptions(global_batch=16, precision="fp32"),
        objective=objective,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        options=TrainOptions(epochs=2),
        run_dir="run",
    )
    trainer.fit()
    return _weights(net)


def accumulate(net, data, objective):
    """`accumulate`

    Losses are divided by the weight of the whole step, also where micro-batches have different numbers of tokens. A
    scheduler is called once for each step.
    """
    trainer = Trainer(
        net,
        DataLoader(data, batch_size=64),
        PlanOptions(
            global_batch=64, micro_batch=8, precision="fp32"
        ),
        objective=objective,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        options=TrainOptions(epochs=1),
        run_dir="run",
    )
    trainer.fit()
    return _weights(net)


def clipping(net, data, objective):
    """`clip_grad_norm_`

    Once for each step, after the sum over ranks.
    """
    trainer = Trainer(
        net,
        DataLoader(data, batch_size=16),
        PlanOptions(global_batch=16, precision="fp32"),
        objective=objective,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        clip_norm=0.1,
        options=TrainOptions(epochs=1),
        run_dir="run",
    )
    trainer.fit()
    return _weights(net)


# --- Settings ---


def mixed_precision(net, data, objective):
    """`mixed_precision`, the configuration file

    Settings are arguments, or a TOML file that `unisono train run.toml` reads ([Guide](guide.md)); there is no file
    in the user's home that changes a run. `fp16` has a dynamic loss scale, `fp8` is for linear layers.
    """
    trainer = Trainer(
        net,
        DataLoader(data, batch_size=16),
        PlanOptions(global_batch=16, precision="bf16"),
        objective=objective,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        options=TrainOptions(epochs=1),
        run_dir="run",
    )
    trainer.fit()
    return _weights(net)


# --- Metrics and state ---


def gather_for_metrics(net, data, objective):
    """`gather_for_metrics`

    A metric is a sum over samples and a division. Sums are added over ranks, each sample counts once, and no outputs
    are sent. `accuracy` and [others](guide.md#models-of-transformers-and-losses-of-torch) go by name; this one counts
    signs.
    """

    def hits(outputs, batch, loss_sum, weight):
        right = (outputs > 0) == (batch["targets"] > 0.5)
        return torch.stack([right.sum(), weight]).double()

    metric = Metric(
        size=2, sums=hits, value=lambda total: total[0] / total[1]
    )
    with Trainer(
        net,
        data,
        PlanOptions(precision="fp32"),
        objective=objective,
        metrics={"accuracy": metric},
        run_dir="run",
    ) as run:
        accuracy = run.evaluate(data)["accuracy"]
    return accuracy


def save_state(net, data, objective):
    """`save_state`, `load_state`, `skip_first_batches`

    Saved and resumed without a call: the second trainer continues the folder of the first with the third batch,
    without reading the batches before it.
    """

    def train(steps):
        Trainer(
            net,
            DataLoader(data, batch_size=16),
            PlanOptions(global_batch=16, precision="fp32"),
            objective=objective,
            optimizer=partial(
                torch.optim.SGD, lr=0.1, momentum=0.9
            ),
            options=TrainOptions(steps=steps),
            checkpoint=CheckpointOptions(every_steps=2),
            run_dir="run",
        ).fit()

    train(2)
    # another process goes on with the third batch
    train(4)
    return _weights(net)
