"""What the idioms of before.py become; functions of one name return the same numbers."""

import json
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import given as common
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from shared_samples import INPUTS, TARGETS
from torch import nn
from torch.utils.data import DataLoader

from unisono import (
    CheckpointOptions,
    GuardedOptimizer,
    Loader,
    LossScaler,
    ObserveOptions,
    PlanOptions,
    ScheduleOptions,
    Trainer,
    TrainOptions,
    from_map_style,
)
from unisono.data.mindrecord import MindRecordWriter
from unisono.data.sources import open_source
from unisono.optim import build_schedule
from unisono.parallel import find_device

# torch.compile takes its time, and so does a search
SLOW = ("jit", "auto_parallel")
# one process
ALONE = (
    "context",
    "auto_parallel",
    "schedule",
    "checkpoint",
    "mind_dataset",
)
# several
TOGETHER = ("parallel_optimizer", "shard", "layout", "pipeline")


def given():
    def rows():
        schema = {
            "inputs": {"type": "float32", "shape": [3]},
            "label": {"type": "int32"},
        }
        with MindRecordWriter(
            "rows.mindrecord", schema, overwrite=True
        ) as writer:
            for x, y in zip(INPUTS, TARGETS, strict=True):
                writer.write({"inputs": x, "label": int(y[0])})
        return "rows.mindrecord"

    return {
        **common.given(),
        "rows": rows,
        "job": lambda: Path(common.__file__).with_name("job.py"),
    }


def _weights(net):
    return [net.weight, net.bias]


def _losses(net, data, plan):
    """The losses of training ``net`` as ``plan`` says."""
    with Trainer(
        net,
        DataLoader(data, batch_size=16),
        plan,
        objective=common.objective,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        options=TrainOptions(epochs=1),
        run_dir="run",
    ) as run:
        return [step.loss for step in run]


# --- Steps ---


def context(net, batches, loss_fn):
    """`set_context`, `set_device`

    There is no global context. The device is a value, and code runs eagerly unless it is [compiled](#msjit).
    """
    device = find_device("cpu", 0)
    torch.manual_seed(0)
    inputs, targets = batches[0]
    net.to(device)
    loss = loss_fn(net(inputs), targets) / len(inputs)
    return loss


def value_and_grad(net, loader, loss_fn, world):
    """`value_and_grad`

    The loss is a sum with its weight, so that neither micro-batches nor ranks change the result.
    """
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    step = GuardedOptimizer(net, sgd, world)
    losses = []
    for rows in loader:
        loss = loss_fn(net(rows["inputs"]), rows["targets"])
        step.backward(loss, len(rows["inputs"]))
        losses.append(step.step().loss)
    return [losses, _weights(net)]


def train_one_step_cell(net, data, objective):
    """`WithLossCell`, `TrainOneStepCell`

    A `Trainer` is an iterator of steps. Reading `step.loss` waits for the device.
    """
    with Trainer(
        net,
        DataLoader(data, batch_size=16),
        PlanOptions(global_batch=16, precision="fp32"),
        objective=objective,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        options=TrainOptions(epochs=1),
        run_dir="run",
    ) as run:
        losses = [step.loss for step in run]
    return [losses, _weights(net)]


def clipping(net, loader, loss_fn, world):
    """`clip_by_global_norm`

    The norm is that of the gradient of all ranks. A `Trainer` has `clip_norm=0.1`.
    """
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    step = GuardedOptimizer(net, sgd, world, clip_norm=0.1)
    for rows in loader:
        loss = loss_fn(net(rows["inputs"]), rows["targets"])
        step.backward(loss, len(rows["inputs"]))
        step.step()
    return _weights(net)


def accumulation(net, data, objective):
    """Gradient accumulation

    It follows from two numbers. In a loop of your own, several calls of `backward` come before one `step`.
    """
    Trainer(
        net,
        DataLoader(data, batch_size=64),
        PlanOptions(
            global_batch=64, micro_batch=16, precision="fp32"
        ),
        objective=objective,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        options=TrainOptions(steps=1),
        run_dir="run",
    ).fit()
    return _weights(net)


def parameter_groups(net, data, objective):
    """Groups of parameters

    `optimizer=` takes patterns of names. With `OptimOptions(groups=…)` groups have factors of the rate and decays of
    their own.
    """
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    Trainer(
        net,
        DataLoader(data, batch_size=16),
        PlanOptions(global_batch=16, precision="fp32"),
        objective=objective,
        optimizer={
            "weight": partial(sgd, weight_decay=0.1),
            "bias": partial(sgd, lr=0.05),
        },
        options=TrainOptions(epochs=1),
        run_dir="run",
    ).fit()
    return _weights(net)


def schedule():
    """Learning rates

    A schedule is a function of the step; a `Trainer` takes the options, a scheduler of torch, or a function of your
    own.
    """
    cosine = ScheduleOptions(kind="cosine", final_lr_frac=0.1)
    rate = build_schedule(cosine, total_steps=20, lr=0.1)
    rates = [rate(step) for step in range(20)]
    return rates


def jit(net, data, objective):
    """`ms.jit`

    `compile="regional"` compiles each distinct block once. There is no graph mode to write for: what cannot be
    compiled runs eagerly.
    """
    with Trainer(
        net,
        DataLoader(data, batch_size=16),
        PlanOptions(
            global_batch=16, precision="fp32", compile="model"
        ),
        objective=objective,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        options=TrainOptions(epochs=1),
        run_dir="run",
    ) as run:
        losses = [step.loss for step in run]
    return [losses, _weights(net)]


# --- Loss scale and precision ---


def loss_scaler(net, loader, loss_fn, world):
    """`DynamicLossScaler`

    The rule is the same: half after an overflow, twice after `growth_interval` clean steps. The step is skipped on
    the device, without a wait, and on all ranks if one overflows.
    """
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = LossScaler(
        torch.device("cpu"), init_scale=2.0**16, growth_interval=2
    )
    step = GuardedOptimizer(net, sgd, world, scaler=scaler)
    scales = []
    for number, rows in enumerate(loader):
        targets = rows["targets"]
        if number == 1:  # an overflow
            targets = targets * float("inf")
        loss = loss_fn(net(rows["inputs"]), targets)
        step.backward(loss, len(targets))
        step.step()
        scales.append(float(scaler.value))
    return [scales, _weights(net)]


def build_train_network(net, loader, loss_fn, world):
    """`amp.build_train_network`, `FixedLossScaleManager`

    MindSpore's optimizer must be told the scale too; here nothing else is. Levels `O1` to `O3` are
    `PlanOptions(precision="fp16")` or `"bf16"` of a `Trainer`, or [`autocast`](own-loop.md): weights stay fp32, as
    with `O1`.
    """
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = LossScaler(
        torch.device("cpu"), init_scale=128.0, dynamic=False
    )
    step = GuardedOptimizer(net, sgd, world, scaler=scaler)
    for rows in loader:
        loss = loss_fn(net(rows["inputs"]), rows["targets"])
        step.backward(loss, len(rows["inputs"]))
        step.step()
    return _weights(net)


# --- Model ---


def model_train(net, data, objective):
    """`Model.train`, `LossMonitor`, `TimeMonitor`, `CheckpointConfig`

    The console shows loss and time. Started again, the same program resumes from its newest checkpoint. Callbacks of
    your own are the body of `for step in run:`, or [`callbacks`](guide.md#observers), which only read.
    """
    Trainer(
        net,
        DataLoader(data, batch_size=16),
        PlanOptions(global_batch=16, precision="fp32"),
        objective=objective,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        options=TrainOptions(epochs=2),
        checkpoint=CheckpointOptions(every_steps=4, keep_last=1),
        run_dir="run",
    ).fit()
    kept = list(Path("run/checkpoints").glob("step-*"))
    return [_weights(net), len(kept)]


def model_eval(net, data, objective):
    """`Model.eval`

    The mean over all samples of all ranks, where MindSpore's is one of batches. Built-in metrics go by name
    ([list](guide.md#models-of-transformers-and-losses-of-torch)): `metrics=["accuracy", "f1"]`.
    """
    with Trainer(
        net,
        data,
        PlanOptions(precision="fp32"),
        objective=objective,
        run_dir="run",
    ) as run:
        value = run.evaluate(data)["loss"]
    return value


def checkpoint(net):
    """`save_checkpoint`, `load_checkpoint`, `load_param_into_net`

    `strict=True`, torch's default, raises where names are missing. `unisono checkpoint import` reads a `.ckpt`
    ([Weights](from-mxnet-mindspore.md#weights)); a run has its whole state in `run/checkpoints`.
    """
    save_file(net.state_dict(), "net.safetensors")
    fresh = nn.Linear(3, 1)
    fresh.load_state_dict(load_file("net.safetensors"))
    return _weights(fresh)


def profiler(net, data, objective):
    """`Profiler`

    [`unisono profile`](profile.md) shows and judges the traces of all ranks, also of a run that is under way.
    """
    Trainer(
        net,
        DataLoader(data, batch_size=16),
        PlanOptions(global_batch=16, precision="fp32"),
        objective=objective,
        options=TrainOptions(epochs=1),
        observe=ObserveOptions(profile_steps="2:4"),
        run_dir="run",
    ).fit()
    folder = Path("run/profile/step-00000002")
    return (folder / "trace.json.gz").exists()


# --- Several devices ---


def data_parallel(net, data, objective):
    """`set_auto_parallel_context(parallel_mode="data_parallel")`, `msrun`

    `unisono launch -n 2 -- python train.py` starts the processes. The trainer joins them, and each takes its share of
    a batch of 8. Gradients are divided by the weight of the batch, so there is no `gradients_mean`.
    """
    Trainer(
        net,
        DataLoader(data, batch_size=16),
        PlanOptions(global_batch=16, precision="fp32"),
        objective=objective,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        options=TrainOptions(epochs=1),
        run_dir="run",
    ).fit()
    return _weights(net)


def parallel_optimizer(deep_net, data):
    """`enable_parallel_optimizer`

    ZeRO: stage 1 shards the optimizer's state, 2 gradients too, 3 parameters too. `optimizer_weight_shard_size` is
    `dp_shard`. A plan that shards takes a function that builds the model.
    """
    plan = PlanOptions(
        global_batch=16, precision="fp32", dp_shard=2, zero=1
    )
    return _losses(deep_net, data, plan)


def shard(deep_net, data):
    """`semi_auto_parallel`, `shard`

    Pairs of linear layers are found in the blocks and split over `tp` ranks. Rules of your own name them, in a
    [strategy file](plans.md).
    """
    plan = PlanOptions(global_batch=16, precision="fp32", tp=2)
    return _losses(deep_net, data, plan)


def layout(deep_net, data):
    """`Layout`

    A [strategy file](plans.md) has the placement of each parameter, by the axes of the mesh.
    """
    placements = [
        {
            "module": "blocks.*",
            "parameter": "up.weight",
            "dims": ["tp", None],
        },
        {
            "module": "blocks.*",
            "parameter": "down.weight",
            "dims": [None, "tp"],
        },
    ]
    plan = {
        "mesh": {"tp": 2},
        "tensor_parallel": {"placements": placements},
    }
    Path("plan.json").write_text(json.dumps(plan))
    plan = PlanOptions(
        global_batch=16, precision="fp32", file="plan.json"
    )
    return _losses(deep_net, data, plan)


def auto_parallel(deep_net, data, job):
    """`auto_parallel`

    `unisono plan auto` times ranks under each plan that fits into memory, and writes the settings of the fastest over
    a configuration; `job` is such a file, with the net and the data. `--processes N` searches for N ranks, on links that
    `unisono plan calibrate` has measured. `unisono train --plan auto` does both: it searches, and then trains
    ([Plans](plans.md)).
    """
    search = [sys.executable, "-m", "unisono", "plan", "auto"]
    subprocess.run(
        [*search, job, "--apply", "fast.toml"], check=True
    )
    fastest = tomllib.loads(Path("fast.toml").read_text())
    plan = PlanOptions(
        global_batch=16,
        precision="fp32",
        **fastest.get("plan", {}),
    )
    return _losses(deep_net, data, plan)


def pipeline(deep_net, data):
    """`pipeline_stages`

    The blocks are cut into stages of about equal work. `schedule` is `1f1b`, `gpipe`, `interleaved` or `zbv`;
    `PipelineCell`'s number of micro-batches follows from the two batches.
    """
    plan = PlanOptions(
        global_batch=16, micro_batch=4, precision="fp32", pp=2
    )
    return _losses(deep_net, data, plan)


def recompute(deep_net, data):
    """`recompute`

    `full` recomputes each block, `selective` what is cheap to compute. The gradients are the same bits.
    """
    plan = PlanOptions(
        global_batch=16, precision="fp32", recompute="full"
    )
    return _losses(deep_net, data, plan)


# --- Data ---


def generator_dataset():
    """`GeneratorDataset` with `num_shards`

    A list or a data set of torch is data. Each step is shared among the ranks, so the samples of a step do not depend
    on their number; MindSpore gives each process a fixed share of the data set.
    """
    squares = from_map_style(
        [{"x": float(x), "y": float(x**2)} for x in range(16)]
    )
    shards = []
    for rank in range(2):
        loader = Loader(
            squares,
            seed=0,
            global_batch=8,
            rank=rank,
            world_size=2,
        )
        shards.append([rows["y"] for rows in loader])
        loader.close()
    return sorted(
        np.concatenate(
            [part for shard in shards for part in shard]
        ).tolist()
    )


def mind_dataset(rows):
    """`MindDataset`

    The file is read as it is, in pages, without MindSpore. `columns` names the entries of a sample.
    """
    data = open_source(
        "rows.mindrecord",
        columns={"inputs": "inputs", "targets": "label"},
    )
    loader = Loader(data, seed=0, global_batch=16, shuffle=False)
    first = next(iter(loader))
    loader.close()
    return [first["inputs"], first["targets"]]
