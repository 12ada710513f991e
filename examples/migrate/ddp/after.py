"""What the idioms of before.py become; functions of one name return the same numbers."""

import os
from functools import partial

import given as common
import torch
from torch.utils.data import DataLoader

from unisono import (
    CheckpointOptions,
    GuardedOptimizer,
    LoopCheckpoints,
    LossScaler,
    PlanOptions,
    Trainer,
    TrainOptions,
    autocast,
)
from unisono.dist import job_from_environ, join_world

given = common.given
# several processes
TOGETHER = ("compression", "sharded")
# half a unit in the last place of bf16 and fp16: each rank rounds the sum of other samples
TOLERANCE = {"mixed_precision": 2e-3, "compression": 2.5e-4}


def _weights(net):
    return [net.weight, net.bias]


# --- Processes and the loop ---


def start():
    """`init_process_group`

    Under `python` there is one rank, under `torchrun`, `unisono launch`, SLURM or MPI all of the job. A `Trainer`
    joins them by itself.
    """
    job = job_from_environ(os.environ)
    world = join_world(job, device_type="cpu", timeout_s=60)
    rank, size = world.rank, world.world_size
    first = rank == 0
    world.close()
    return first


def loop(net, data, objective):
    """`DistributedDataParallel`, `DistributedSampler`, `set_epoch`

    The order of the samples is a function of the step, so neither sampler nor `set_epoch` is needed. `global_batch`
    is the batch of all processes. Without the `DataLoader`, samples are shuffled by the run's seed: `Trainer(net,
    data, …)`.
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


def accumulation(net, loader, loss_fn, world):
    """`no_sync`, accumulation

    Each `backward` adds to the step, `step` sends. Nothing is divided by the number of passes: each has its weight.
    With `last=True` the gradients are sent while the last pass runs. A `Trainer` needs `global_batch` and
    `micro_batch` alone.
    """
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = GuardedOptimizer(net, sgd, world)
    for rows in loader:
        loss = loss_fn(net(rows["inputs"]), rows["targets"])
        optimizer.backward(loss, len(rows["inputs"]))
    optimizer.step()
    return _weights(net)


def clipping(net, loader, loss_fn, world):
    """`clip_grad_norm_`

    After the sum over ranks and before the step, on the device. A `Trainer` has `clip_norm=0.1`.
    """
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = GuardedOptimizer(net, sgd, world, clip_norm=0.1)
    for rows in loader:
        loss = loss_fn(net(rows["inputs"]), rows["targets"])
        optimizer.backward(loss, len(rows["inputs"]))
        optimizer.step()
    return _weights(net)


def mean_over_ranks(net, loader, loss_fn, world):
    """`all_reduce` of the loss

    The step returns the loss over all ranks.
    """
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = GuardedOptimizer(net, sgd, world)
    losses = []
    for rows in loader:
        loss = loss_fn(net(rows["inputs"]), rows["targets"])
        optimizer.backward(loss, len(rows["inputs"]))
        done = optimizer.step()
        losses.append(done.loss)
    return losses


# --- Precision ---


def grad_scaler(net, loader, loss_fn, world):
    """`GradScaler`, `unscale_`

    The same rule, without `unscale_`: clipping sees the true norm. A skipped step is skipped on all ranks, and
    `done.skipped` says so. A `Trainer` has `PlanOptions(precision="fp16")`.
    """
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = LossScaler(
        torch.device("cpu"), init_scale=2.0**16, growth_interval=2
    )
    optimizer = GuardedOptimizer(
        net, sgd, world, clip_norm=0.5, scaler=scaler
    )
    scales = []
    for number, rows in enumerate(loader):
        targets = rows["targets"]
        if number == 1:  # an overflow
            targets = targets * float("inf")
        loss = loss_fn(net(rows["inputs"]), targets)
        optimizer.backward(loss, len(targets))
        optimizer.step()
        scales.append(float(scaler.value))
    return [scales, _weights(net)]


def mixed_precision(net, loader, loss_fn, world):
    """`autocast`

    A `Trainer` has `PlanOptions(precision="bf16")`.
    """
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = GuardedOptimizer(net, sgd, world)
    for rows in loader:
        with autocast("bf16", "cpu"):
            outputs = net(rows["inputs"])
        loss = loss_fn(outputs.float(), rows["targets"])
        optimizer.backward(loss, len(outputs))
        optimizer.step()
    return _weights(net)


# --- State, memory, traffic ---


def checkpoint(net, loader, loss_fn, world):
    """`torch.save`, `torch.load`

    A checkpoint commits as a whole, is verified when it is read, and has the random generators of each rank. The
    loader goes on at the step. A `Trainer` saves and resumes by itself.
    """
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer = GuardedOptimizer(net, sgd, world)
    parts = {"optimizer": optimizer}
    every = CheckpointOptions(every_steps=2)

    def train(steps):
        with LoopCheckpoints(
            "checkpoints", parts, world, options=every
        ) as saved:
            for batch in loader.iterate(saved.resume(), steps):
                for rows in batch.micro_batches:
                    outputs = net(rows["inputs"])
                    loss = loss_fn(outputs, rows["targets"])
                    optimizer.backward(loss, len(outputs))
                optimizer.step()
                saved.after_step(batch.step + 1)

    train(2)
    # another process goes on with the third batch
    train(4)
    return _weights(net)


def sharded(deep_net, data, objective):
    """`fully_shard`

    ZeRO 3 of each block. The model is given as a function, and each rank builds its shards only. `zero=1` and
    `zero=2` shard less, `tp`, `pp` and `cp` split the model ([Plans](plans.md)).
    """
    with Trainer(
        deep_net,
        DataLoader(data, batch_size=16),
        PlanOptions(
            global_batch=16, precision="fp32", dp_shard=2
        ),
        objective=objective,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        options=TrainOptions(epochs=1),
        run_dir="run",
    ) as run:
        losses = [step.loss for step in run]
    return losses


def compression(net, data, objective):
    """Communication hooks

    `bf16`, `int8`, `powersgd:2` and [others](compression.md) too, with error feedback that checkpoints keep.
    """
    trainer = Trainer(
        net,
        DataLoader(data, batch_size=16),
        PlanOptions(
            global_batch=16, precision="fp32", compression="fp16"
        ),
        objective=objective,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        options=TrainOptions(epochs=1),
        run_dir="run",
    )
    trainer.fit()
    return _weights(net)
