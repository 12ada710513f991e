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
    PlanOptions,
    Trainer,
    TrainOptions,
)
from unisono.dist import job_from_environ, join_world

given = common.given
# several processes
TOGETHER = ("compression",)
# half a unit in the last place of fp16: each rank rounds the sum of other samples
TOLERANCE = {"compression": 2.5e-4}


def _weights(net):
    return [net.weight, net.bias]


# --- Processes and the loop ---


def start():
    """`init`, `rank`, `size`

    A `Trainer` joins the ranks by itself. `horovodrun -np 2 python train.py` becomes `unisono launch -n 2 -- python
    train.py`; [Launching](launching.md) has hosts files, MPI and SLURM.
    """
    job = job_from_environ(os.environ)
    world = join_world(job, device_type="cpu", timeout_s=60)
    rank, size = world.rank, world.world_size
    first = rank == 0
    world.close()
    return first


def loop(net, data, objective):
    """`DistributedOptimizer`, `broadcast_parameters`

    Rank 0's parameters go to all ranks when the run begins, and the optimizer's state comes from a checkpoint on all
    of them. `global_batch` is the batch of all processes.
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
    """`backward_passes_per_step`

    Each `backward` adds to the step, `step` sends. Nothing is divided by the number of passes.
    """
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = GuardedOptimizer(net, sgd, world)
    for rows in loader:
        loss = loss_fn(net(rows["inputs"]), rows["targets"])
        optimizer.backward(loss, len(rows["inputs"]))
    optimizer.step()
    return _weights(net)


def clipping(net, loader, loss_fn, world):
    """`synchronize`, `skip_synchronize`

    Clipping lies between the sum and the step by itself.
    """
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = GuardedOptimizer(net, sgd, world, clip_norm=0.1)
    for rows in loader:
        loss = loss_fn(net(rows["inputs"]), rows["targets"])
        optimizer.backward(loss, len(rows["inputs"]))
        optimizer.step()
    return _weights(net)


def mean_over_ranks(net, loader, loss_fn, world):
    """`allreduce` of a metric

    The step returns the loss over all ranks. A `Trainer` has [metrics](guide.md#a-training-script), which are sums
    over all ranks.
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


# --- Traffic and faults ---


def compression(net, data, objective):
    """`Compression.fp16`

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


def checkpoint(net, loader, loss_fn, world):
    """`elastic.run`, `TorchState`

    The state is on disk, not in memory: `unisono launch` restarts the ranks after a failure, and the loop goes on at
    the last checkpoint, with the same samples. The number of ranks can change between two starts. Workers that come
    and go while the job runs are those of [`--elastic`](launching.md#leaving-and-joining), with parameter servers.
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
