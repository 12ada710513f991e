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
ALONE = ("resume",)
# half a unit in the last place of bf16: each rank rounds the sum of other samples
TOLERANCE = {"precision": 2e-3}


def _weights(net):
    return [net.weight, net.bias]


# --- Training ---


def fit(net, data, objective):
    """`LightningModule`, `Trainer(devices, strategy)`

    The model is a plain `nn.Module`: `training_step` becomes the objective, `configure_optimizers` the optimizer and
    the schedule. `devices` is the number of processes that [`unisono launch -n`](launching.md) starts. `ddp` is what
    several processes do; `fsdp` is `dp_shard=0`.
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


def accumulation(net, data, objective):
    """`accumulate_grad_batches`, `gradient_clip_val`

    The two batches say how often gradients are added up.
    """
    trainer = Trainer(
        net,
        DataLoader(data, batch_size=32),
        PlanOptions(
            global_batch=32, micro_batch=16, precision="fp32"
        ),
        objective=objective,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        clip_norm=0.1,
        options=TrainOptions(epochs=1),
        run_dir="run",
    )
    trainer.fit()
    return _weights(net)


def precision(net, data, objective):
    """`precision`

    `bf16`, `fp16` (with a loss scale) and `fp8` are mixed: parameters stay fp32. There is no counterpart of
    `bf16-true` and `64-true`: convert the model before, `net.bfloat16()`, and train it in a loop of your own.
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


# --- Callbacks and checkpoints ---


def callbacks(net, data, objective):
    """`EarlyStopping`, `ModelCheckpoint`

    Settings of the run. `run.best` is the checkpoint with the lowest held-out loss. `LearningRateMonitor` and
    `TQDMProgressBar` are always on; callbacks of your own are the body of `for step in run:`, or
    [observers](guide.md#observers).
    """
    with Trainer(
        net,
        DataLoader(data, batch_size=16),
        PlanOptions(global_batch=16, precision="fp32"),
        objective=objective,
        # too large: the loss grows
        optimizer=partial(torch.optim.SGD, lr=3.0),
        options=TrainOptions(
            epochs=8,
            eval_every_steps=4,
            num_eval_samples=0,
            early_stop_patience=2,
        ),
        checkpoint=CheckpointOptions(keep_best=1),
        eval_data=data,
        run_dir="run",
    ) as run:
        losses = {}
        for step in run:
            if step.index % 4 == 0:
                losses[step.index] = run.evaluate()["loss"]
        epochs, value = run.state.step // 4, min(losses.values())
    return [epochs, value]


def resume(net, data, objective):
    """`ckpt_path`

    The same folder goes on: `resume="auto"` is the default, and another checkpoint is `resume=path`.
    """

    def train(epochs):
        Trainer(
            net,
            DataLoader(data, batch_size=16),
            PlanOptions(global_batch=16, precision="fp32"),
            objective=objective,
            optimizer=partial(
                torch.optim.SGD, lr=0.1, momentum=0.9
            ),
            options=TrainOptions(epochs=epochs),
            run_dir="run",
        ).fit()

    train(1)
    # another process trains two epochs more
    train(3)
    return _weights(net)
