"""What the idioms of before.py become; functions of one name return the same numbers."""

import math
from functools import partial
from pathlib import Path

import given as common
import torch
from safetensors.torch import load_file, save_file
from shared_samples import INPUTS, WEIGHT, picture, png
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from unisono import (
    GuardedOptimizer,
    Loader,
    LoaderOptions,
    LoopCheckpoints,
    ObserveOptions,
    PlanOptions,
    Trainer,
    TrainOptions,
    autocast,
    create_kvstore,
    initialize,
)
from unisono.data import mapped
from unisono.data.image import (
    Augment,
    CenterCrop,
    ImageTransform,
    image_records,
)
from unisono.data.recordio import (
    ImageHeader,
    RecordFile,
    RecordWriter,
    pack_header,
    unpack_header,
)
from unisono.observe.events import events_path, read_events
from unisono.train import Metric

# torch.compile takes its time
SLOW = ("hybridize",)
# half a unit in the last place of bf16: each rank rounds the sum of other samples
TOLERANCE = {"amp_training": 2e-3}
# one process
ALONE = (
    "kvstore_sum",
    "kvstore_optimizer",
    "kvstore_updater",
    "kvstore_rows",
    "record_file",
    "image_record_iter",
    "image_record_dataset",
    "parameters",
    "export",
    "monitor",
)
# several
TOGETHER = ("kvstore_compression",)


def given():
    def photos():
        with RecordWriter("photos.rec", overwrite=True) as writer:
            for number in range(4):
                header = ImageHeader(label=number % 2)
                image = png(picture(number))
                writer.write(pack_header(header, image))
        return "photos.rec"

    return {**common.given(), "photos": photos}


def _weights(net):
    return [net.weight, net.bias]


# --- Key-value store ---


def kvstore_sum():
    """`create`, `init`, `push`, `pull`

    A push of a list is the sum over its devices, and with `dist_sync` over the workers too. Calls return at once;
    `wait()` returns the value or raises the error, where MXNet raises it at the next read of an array.
    """
    store = create_kvstore("local")
    store.init(3, torch.zeros(2))
    store.push(3, [torch.ones(2), 4 * torch.ones(2)])
    out = store.pull(3).wait()
    store.close()
    return out


def kvstore_optimizer():
    """`set_optimizer`

    By name and constants, not as an object: servers execute nothing that is sent to them. `kvstore='dist_sync'` and
    `dist_async` take the same call. Only matrices decay with `weight_decay`; MXNet's `wd` is for all unless `wd_mult`
    is 0.
    """
    store = create_kvstore("local")
    store.init("weight", torch.from_numpy(WEIGHT))
    store.set_optimizer(
        "sgd", lr=0.1, momentum=0.9, weight_decay=0.0
    )
    for _ in range(3):
        store.push("weight", torch.ones(1, 3))
        out = store.pull("weight").wait()
    store.close()
    return out


def kvstore_updater():
    """`_set_updater`

    For `local`, `device` and `dist_sync`. The tensor is changed in place.
    """

    def update(key, total, stored):
        stored.sub_(total, alpha=0.5)

    store = create_kvstore("local")
    store.init("w", torch.ones(2))
    store.set_updater(update)
    store.push("w", torch.tensor([1.0, 2.0]))
    out = store.pull("w").wait()
    store.close()
    return out


def kvstore_rows():
    """`row_sparse_pull`

    The store keeps a dense tensor; a push of `(ids, rows)` and a pull of rows send these rows alone. There is no
    sparse storage type.
    """
    table = torch.arange(4.0)[:, None].expand(4, 2).contiguous()
    store = create_kvstore("local")
    store.init("table", table)
    rows = store.row_sparse_pull(
        "table", torch.tensor([3, 1])
    ).wait()
    store.close()
    return [rows.ids, rows.values]


def kvstore_compression(world):
    """`set_gradient_compression`

    The codes are MXNet's, bit for bit, and so is the residual. Kinds that send nothing refuse a codec, as MXNet's
    `local` does; on one device a `Trainer` or `Module` of MXNet ignores it. There are [more
    codecs](compression.md#codecs); a `Trainer` takes `PlanOptions(compression="2bit:0.5")`.
    """
    store = create_kvstore("dist_sync", world)
    store.set_compression("2bit:0.5")
    store.init("w", torch.zeros(4))
    first = torch.tensor([0.625, -0.5, 0.375, 0.0])
    second = torch.zeros(4)
    store.push("w", first if store.rank == 0 else second)
    out = store.pull("w").wait()
    store.close()
    return out


# --- Gluon ---


def trainer_step(net, loader, loss_fn, world):
    """`Trainer.step(batch_size)`

    `step` of MXNet divides the sum of the gradients by the number that it is given. Here each backward pass says how
    many samples it has, and the step divides by those of all ranks. The gradients are zero after it.
    """
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = GuardedOptimizer(net, sgd, world)
    for rows in loader:
        loss = loss_fn(net(rows["inputs"]), rows["targets"])
        trainer.backward(loss, len(rows["inputs"]))
        trainer.step()
    return _weights(net)


def trainer_clipping(net, loader, loss_fn, world):
    """`allreduce_grads`, `clip_global_norm`, `update`

    The norm is that of the mean gradient over all ranks, so the bound does not contain the batch size. For other work
    between the two calls there are [the parts beneath](own-loop.md).
    """
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = GuardedOptimizer(net, sgd, world, clip_norm=0.1)
    for rows in loader:
        loss = loss_fn(net(rows["inputs"]), rows["targets"])
        trainer.backward(loss, len(rows["inputs"]))
        trainer.step()
    return _weights(net)


def accumulation(net, loader, loss_fn, world):
    """Accumulation with `grad_req="add"`

    Backward passes add up until `step`. A `Trainer` needs no code for it: `PlanOptions(global_batch=64,
    micro_batch=16)`.
    """
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = GuardedOptimizer(net, sgd, world)
    for rows in loader:
        loss = loss_fn(net(rows["inputs"]), rows["targets"])
        trainer.backward(loss, len(rows["inputs"]))
    trainer.step()
    return _weights(net)


def several_devices(net, data, loss_fn, world):
    """`split_and_load`, kvstore `device`

    One process for each device: `unisono launch -n 2 -- python train.py`. The loader gives each rank its share of a
    batch of 16, and the result is that of one device.
    """
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = GuardedOptimizer(net, sgd, world)
    loader = Loader(
        data,
        seed=0,
        global_batch=16,
        shuffle=False,
        rank=world.rank,
        world_size=world.world_size,
    )
    for rows in loader:
        loss = loss_fn(net(rows["inputs"]), rows["targets"])
        trainer.backward(loss, len(rows["inputs"]))
        trainer.step()
    return _weights(net)


def scheduler(net, loader, loss_fn, world):
    """`lr_scheduler`

    A scheduler of torch, called after each step. With momentum results differ while the rate changes: MXNet
    multiplies the rate into the momentum buffer. `MultiFactorScheduler` is `MultiStepLR`, `PolyScheduler` and
    `CosineScheduler` are `ScheduleOptions(kind="polynomial")` and `"cosine"` of a `Trainer`, with `warmup_steps`.
    """
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = StepLR(sgd, step_size=2, gamma=0.5)
    trainer = GuardedOptimizer(net, sgd, world)
    for rows in loader:
        loss = loss_fn(net(rows["inputs"]), rows["targets"])
        trainer.backward(loss, len(rows["inputs"]))
        trainer.step()
        schedule.step()
    return _weights(net)


def initializer():
    """Initializers

    The same distributions and constants; the random numbers are others. All kinds are in [Initial
    values](guide.md#initial-values); `mx.init.Mixed` is the list of patterns.
    """
    net = nn.Linear(32, 64)
    initialize(
        net,
        [{"match": "*", "kind": "xavier", "magnitude": 2.24}],
        seed=0,
    )
    bound = math.sqrt(2.24 / 48)
    largest = float(net.weight.abs().max())
    return [
        0.95 * bound < largest <= bound,
        float(net.bias.abs().max()),
    ]


def parameters(net):
    """`save_parameters`, `load_parameters`

    `unisono checkpoint import` reads a `.params` file ([Weights](from-mxnet-mindspore.md#weights)).
    """
    save_file(net.state_dict(), "net.safetensors")
    fresh = nn.Linear(3, 1)
    fresh.load_state_dict(load_file("net.safetensors"))
    return _weights(fresh)


def trainer_states(net, loader, loss_fn, world):
    """`save_states`, `load_states`

    One checkpoint has the network, the optimizer, the position in the data and the random generators, of all ranks.
    It is written in the background, commits as a whole and is verified when it is read. MXNet leaves the position to
    the program.
    """
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    trainer = GuardedOptimizer(net, sgd, world)

    def train(steps):
        with LoopCheckpoints(
            "checkpoints", {"trainer": trainer}, world
        ) as saved:
            for batch in loader.iterate(saved.resume(), steps):
                for rows in batch.micro_batches:
                    outputs = net(rows["inputs"])
                    loss = loss_fn(outputs, rows["targets"])
                    trainer.backward(loss, len(outputs))
                trainer.step()
            saved.save(steps)

    train(2)
    # another process goes on with the third batch
    train(4)
    return _weights(net)


def hybridize(net, data, objective):
    """`hybridize`, `static_alloc`

    `compile="regional"` compiles each distinct block once. There is no `static_alloc`: memory is planned by torch's
    allocator. In a loop of your own, `torch.compile(net)` goes before `GuardedOptimizer`.
    """
    sgd = partial(torch.optim.SGD, lr=0.1)
    trainer = Trainer(
        net,
        DataLoader(data, batch_size=16),
        PlanOptions(
            global_batch=16, precision="fp32", compile="model"
        ),
        objective=objective,
        optimizer=sgd,
        options=TrainOptions(epochs=1),
        run_dir="run",
    )
    trainer.fit()
    return _weights(net)


def export(net):
    """`export`, `SymbolBlock.imports`

    torch's own exporter writes graph and weights. `run.export(folder)` of a `Trainer` writes the weights as
    safetensors.
    """
    inputs = torch.from_numpy(INPUTS)
    program = torch.export.export(net, (inputs,))
    torch.export.save(program, "net.pt2")

    loaded = torch.export.load("net.pt2").module()
    outputs = loaded(inputs)
    return outputs


# --- Data ---


def record_file():
    """`MXIndexedRecordIO`, `pack`, `unpack`

    The bytes are those that MXNet writes; a checksum of each record lies beside them. `unisono data pack` is im2rec.
    """
    with RecordWriter("photos.rec") as writer:
        for number in range(4):
            header = ImageHeader(label=number % 2, id=number)
            image = png(picture(number))
            writer.write(pack_header(header, image))

    record = RecordFile("photos.rec").read(3)
    header, image = unpack_header(record)
    return [float(header.label), list(image)]


def image_record_iter(photos):
    """`ImageRecordIter`

    Means and deviations are of values from 0 to 1. `CenterCrop(share=0.5)` is the middle half of each side. The
    loader decodes in as many workers as help; `part_index` and `num_parts` are `rank` and `world_size`.
    """
    augment = Augment(
        size=(8, 8),
        crop=CenterCrop(share=0.5),
        mean=(127.5 / 255,) * 3,
        std=(64 / 255,) * 3,
    )
    loader = Loader(
        image_records(["photos.rec"]),
        seed=0,
        global_batch=4,
        shuffle=False,
        transform=ImageTransform(augment=augment),
    )
    batch = next(iter(loader))
    images, labels = batch["image"], batch["targets"]
    loader.close()
    return [images, labels]


def image_record_dataset(photos):
    """`ImageRecordDataset`, `DataLoader`

    A `Loader` shuffles, shares batches among ranks and resumes; `transform` gets each sample and a random generator
    of its own. A list or a data set of torch may take the place of the records.
    """
    augment = Augment(
        size=(16, 16),
        crop=CenterCrop(share=1.0),
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
    )
    loader = Loader(
        mapped(
            image_records(["photos.rec"]),
            ImageTransform(augment=augment),
        ),
        seed=0,
        global_batch=2,
        shuffle=False,
        options=LoaderOptions(num_workers=0),
    )
    for batch in loader:
        images, labels = batch["image"], batch["targets"]
    return [images, labels]


# --- Training and watching ---


def metric(net, data, objective):
    """`mx.metric`

    Sums over all samples of all ranks, then one division. `accuracy`, `top5`, `f1`, `perplexity` and
    [others](guide.md#models-of-transformers-and-losses-of-torch) go by name; this one counts signs.
    """

    def hits(outputs, batch, loss_sum, weight):
        right = (outputs > 0) == (batch["targets"] > 0.5)
        return torch.stack([right.sum(), weight]).double()

    accuracy = Metric(
        size=2, sums=hits, value=lambda total: total[0] / total[1]
    )
    with Trainer(
        net,
        data,
        PlanOptions(precision="fp32"),
        objective=objective,
        metrics={"accuracy": accuracy},
        run_dir="run",
    ) as run:
        value = run.evaluate(data)["accuracy"]
    return value


def module_fit(net, data, objective):
    """`Module.fit`, `Estimator.fit`

    The loop is the trainer's. `num_epoch` is `epochs`; `epoch_end_callback=do_checkpoint(…)` is not needed, a run is
    saved and resumes by itself; `eval_data` and `metrics` are arguments; `Speedometer` is the console.
    """
    sgd = partial(torch.optim.SGD, lr=0.1)
    trainer = Trainer(
        net,
        DataLoader(data, batch_size=16),
        PlanOptions(global_batch=16, precision="fp32"),
        objective=objective,
        # MXNet's Module decays weights, not biases
        optimizer={
            "weight": partial(sgd, weight_decay=0.01),
            "*": sgd,
        },
        options=TrainOptions(epochs=2),
        run_dir="run",
    )
    trainer.fit()
    return _weights(net)


def monitor(net, data, objective):
    """`Monitor`

    A tap writes an event with norm, extremes, zeros and non-finite values of outputs, gradients and parameters, over
    the whole batch on all ranks. MXNet's statistic is the norm divided by the root of the size.
    """
    net = nn.Sequential(net)
    Trainer(
        net,
        DataLoader(data, batch_size=64),
        PlanOptions(global_batch=64, precision="fp32"),
        objective=objective,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        options=TrainOptions(steps=1),
        observe=ObserveOptions(taps=("0@1",)),
        run_dir="run",
    ).fit()
    events = read_events(events_path(Path("run"), 0)).events
    [tap] = [e for e in events if e["kind"] == "tap"]
    output = tap["modules"]["0"]["output"]
    return output["norm"] / math.sqrt(output["numel"])


def profiler(net, data, objective):
    """`mx.profiler`

    Traces of all ranks in one file, by steps; [`unisono profile`](profile.md) shows and judges them, also of a run
    that is under way.
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


def amp_training(net, loader, loss_fn, world):
    """`amp.init`, `init_trainer`, `scale_loss`

    Nothing is patched: `autocast` is a context, and a `Trainer` takes `PlanOptions(precision="bf16")`. bf16 needs no
    loss scale. For fp16 pass `scaler=LossScaler(device)` to the optimizer; its scale doubles after 2000 clean steps
    and halves on overflow, as MXNet's, and an overflow costs one step, where MXNet's new scale takes effect one step
    late.
    """
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = GuardedOptimizer(net, sgd, world)
    losses = []
    for rows in loader:
        with autocast("bf16", "cpu"):
            outputs = net(rows["inputs"])
        loss = loss_fn(outputs, rows["targets"])
        trainer.backward(loss, len(outputs))
        losses.append(trainer.step().loss)
    return losses
