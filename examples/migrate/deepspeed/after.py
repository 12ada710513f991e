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

given = common.given
# one process joins a job once
ALONE = ("checkpoint",)
# several processes
TOGETHER = ("zero",)
# half a unit in the last place of bf16: each rank rounds the sum of other samples
TOLERANCE = {"bf16": 2e-3}


def _weights(net):
    return [net.weight, net.bias]


# --- The engine ---


def initialize(net, data, objective):
    """`initialize`, `engine.backward`, `engine.step`

    `train_batch_size` is `global_batch`. DeepSpeed clips at norm 1 unless `gradient_clipping` is 0; with an optimizer
    of torch a `Trainer` clips only where `clip_norm` says so. The number of processes is not in the settings, so it
    can change between two attempts.
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


def accumulation(net, data, objective):
    """The three batch sizes

    Two numbers are given, `gradient_accumulation_steps` follows from them and from the number of ranks. A batch need
    not be a multiple of anything.
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


# --- Memory and precision ---


def zero(deep_net, data, objective):
    """`zero_optimization`

    The stages have the same numbers; any optimizer of torch can be sharded. `dp_shard` is the number of ranks that
    share one copy, 0 is all of them, and fewer than all is what MiCS and `zero_hpz_partition_size` do. Predict time
    and memory before with [`unisono plan`](plans.md).
    """
    with Trainer(
        deep_net,
        DataLoader(data, batch_size=16),
        PlanOptions(
            global_batch=16, precision="fp32", dp_shard=2, zero=1
        ),
        objective=objective,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        options=TrainOptions(epochs=1),
        run_dir="run",
    ) as run:
        losses = [step.loss for step in run]
    return losses


def bf16(net, data, objective):
    """`bf16`, `torch_autocast`, `fp16`

    Mixed precision: parameters and sums stay fp32. `fp16` has a dynamic loss scale; its first value is
    `TrainOptions(loss_scale=…)`, and `hysteresis` and `min_loss_scale` have no counterpart: the scale falls at each
    overflow, to 1 at the least.
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


# --- State ---


def checkpoint(net, data, objective):
    """`save_checkpoint`, `load_checkpoint`

    Saved by all ranks and resumed without a call, also on another number of ranks or under another plan: nothing is
    converted, and `zero_to_fp32.py` is `unisono checkpoint export`.
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
