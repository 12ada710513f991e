"""Idioms of MindSpore 2.10; after.py has the same under the same names."""

import glob

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import amp, nn, ops
from mindspore.communication import get_group_size, get_rank, init
from mindspore.mindrecord import FileWriter
from mindspore.train import (
    CheckpointConfig,
    LossMonitor,
    Model,
    ModelCheckpoint,
    TimeMonitor,
)
from shared_samples import (
    BIAS,
    DOWN,
    INPUTS,
    TARGETS,
    UP,
    WEIGHT,
    parts,
)

# what needs several processes: msrun
TOGETHER = ("data_parallel",)


def given():
    def net():
        return nn.Dense(3, 1, ms.Tensor(WEIGHT), ms.Tensor(BIAS))

    def batches():
        return [(ms.Tensor(x), ms.Tensor(y)) for x, y in parts(4)]

    def loss_fn():
        mse = nn.MSELoss()
        return lambda outputs, targets: (
            0.5 * mse(outputs, targets)
        )

    def rows():
        """rows.mindrecord of 32 samples."""
        writer = FileWriter("rows.mindrecord", overwrite=True)
        writer.add_schema(
            {
                "inputs": {"type": "float32", "shape": [3]},
                "label": {"type": "int32"},
            }
        )
        writer.write_raw_data(
            [
                {"inputs": x, "label": int(y[0])}
                for x, y in zip(INPUTS, TARGETS, strict=True)
            ]
        )
        writer.commit()
        return "rows.mindrecord"

    return {
        "net": net,
        "deep_net": lambda: Blocks,
        "batches": batches,
        "loss_fn": loss_fn,
        "data": lambda: ds.NumpySlicesDataset(
            (INPUTS, TARGETS),
            ["inputs", "targets"],
            shuffle=False,
        ),
        "HalfSquare": lambda: HalfSquare,
        "rows": rows,
    }


class HalfSquare(nn.LossBase):
    def construct(self, outputs, targets):
        return self.get_loss(0.5 * ops.square(outputs - targets))


class Block(nn.Cell):
    def __init__(self):
        super().__init__()
        down = 0.1 * np.tile(DOWN, (3, 1))
        self.up = nn.Dense(3, 8, ms.Tensor(UP), has_bias=False)
        self.down = nn.Dense(
            8, 3, ms.Tensor(down), has_bias=False
        )

    def construct(self, x):
        return x + self.down(ops.relu(self.up(x)))


class Blocks(nn.Cell):
    def __init__(self):
        super().__init__()
        self.blocks = nn.CellList([Block(), Block()])

    def construct(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return ops.reduce_sum(inputs, 1).expand_dims(1)


def _weights(net):
    return [net.weight, net.bias]


def _losses(net, batches, HalfSquare):
    """The losses of training; in one process none of the settings above acts."""
    ms.reset_auto_parallel_context()
    sgd = nn.SGD(net.trainable_params(), learning_rate=0.01)
    step = nn.TrainOneStepCell(
        nn.WithLossCell(net, HalfSquare()), sgd
    )
    return [step(inputs, targets) for inputs, targets in batches]


def context(net, batches, loss_fn):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    ms.set_device("CPU")
    ms.set_seed(0)
    inputs, targets = batches[0]
    loss = loss_fn(net(inputs), targets)
    return loss


def value_and_grad(net, batches, loss_fn):
    sgd = nn.SGD(net.trainable_params(), learning_rate=0.1)

    def forward(inputs, targets):
        return loss_fn(net(inputs), targets)

    step = ms.value_and_grad(forward, None, sgd.parameters)
    losses = []
    for inputs, targets in batches:
        loss, gradients = step(inputs, targets)
        sgd(gradients)
        losses.append(loss)
    return [losses, _weights(net)]


def train_one_step_cell(net, batches, HalfSquare):
    sgd = nn.SGD(net.trainable_params(), learning_rate=0.1)
    with_loss = nn.WithLossCell(net, HalfSquare())
    step = nn.TrainOneStepCell(with_loss, sgd)
    step.set_train()
    losses = []
    for inputs, targets in batches:
        losses.append(step(inputs, targets))
    return [losses, _weights(net)]


def clipping(net, batches, loss_fn):
    sgd = nn.SGD(net.trainable_params(), learning_rate=0.1)

    def forward(inputs, targets):
        return loss_fn(net(inputs), targets)

    step = ms.value_and_grad(forward, None, sgd.parameters)
    for inputs, targets in batches:
        loss, gradients = step(inputs, targets)
        sgd(ops.clip_by_global_norm(gradients, 0.1))
    return _weights(net)


def accumulation(net, batches, loss_fn):
    sgd = nn.SGD(net.trainable_params(), learning_rate=0.1)
    add = ops.MultitypeFuncGraph("add")

    @add.register("Tensor", "Tensor")
    def add_one(total, gradient):
        return ops.assign_add(total, gradient / 4)

    def forward(inputs, targets):
        return loss_fn(net(inputs), targets)

    totals = sgd.parameters.clone(prefix="total", init="zeros")
    step = ms.value_and_grad(forward, None, sgd.parameters)
    for inputs, targets in batches:
        loss, gradients = step(inputs, targets)
        ops.HyperMap()(add, totals, gradients)
    sgd(tuple(totals))
    for total in totals:
        total.set_data(ops.zeros_like(total))
    return _weights(net)


def model_train(net, data, HalfSquare):
    sgd = nn.SGD(net.trainable_params(), learning_rate=0.1)
    batches = data.batch(16)
    model = Model(net, HalfSquare(), sgd)
    saved = ModelCheckpoint(
        "net",
        directory="checkpoints",
        config=CheckpointConfig(
            save_checkpoint_steps=4, keep_checkpoint_max=1
        ),
    )
    model.train(
        2,
        batches,
        callbacks=[LossMonitor(4), TimeMonitor(), saved],
        dataset_sink_mode=False,
    )
    kept = glob.glob("checkpoints/*.ckpt")
    return [_weights(net), len(kept)]


def model_eval(net, data, HalfSquare):
    model = Model(net, HalfSquare(), metrics={"loss"})
    result = model.eval(data.batch(16), dataset_sink_mode=False)
    value = result["loss"]
    return value


def schedule():
    rates = nn.cosine_decay_lr(
        min_lr=0.01,
        max_lr=0.1,
        total_step=20,
        step_per_epoch=1,
        decay_epoch=20,
    )
    return rates


def parameter_groups(net, batches, loss_fn):
    sgd = nn.Momentum(
        [
            {"params": [net.weight], "weight_decay": 0.1},
            {"params": [net.bias], "lr": 0.05},
        ],
        learning_rate=0.1,
        momentum=0.9,
    )

    def forward(inputs, targets):
        return loss_fn(net(inputs), targets)

    step = ms.value_and_grad(forward, None, sgd.parameters)
    for inputs, targets in batches:
        loss, gradients = step(inputs, targets)
        sgd(gradients)
    return _weights(net)


def checkpoint(net):
    ms.save_checkpoint(net, "net.ckpt")
    fresh = nn.Dense(3, 1)
    values = ms.load_checkpoint("net.ckpt")
    missing, _ = ms.load_param_into_net(fresh, values)
    assert not missing
    return _weights(fresh)


def loss_scaler(net, batches, loss_fn):
    sgd = nn.SGD(net.trainable_params(), learning_rate=0.1)
    scaler = amp.DynamicLossScaler(
        scale_value=2**16, scale_factor=2, scale_window=2
    )

    def forward(inputs, targets):
        return scaler.scale(loss_fn(net(inputs), targets))

    step = ms.value_and_grad(forward, None, sgd.parameters)
    scales = []
    for number, (inputs, targets) in enumerate(batches):
        if number == 1:  # an overflow
            targets = targets * float("inf")
        loss, gradients = step(inputs, targets)
        finite = amp.all_finite(gradients)
        if finite:
            sgd(scaler.unscale(gradients))
        scaler.adjust(finite)
        scales.append(float(scaler.scale_value.asnumpy()))
    return [scales, _weights(net)]


def build_train_network(net, batches, HalfSquare):
    sgd = nn.SGD(
        net.trainable_params(),
        learning_rate=0.1,
        loss_scale=128.0,
    )
    manager = amp.FixedLossScaleManager(
        128.0, drop_overflow_update=False
    )
    step = amp.build_train_network(
        net,
        sgd,
        HalfSquare(),
        level="O0",
        loss_scale_manager=manager,
    )
    for inputs, targets in batches:
        step(inputs, targets)
    return _weights(net)


def jit(net, batches, loss_fn):
    sgd = nn.SGD(net.trainable_params(), learning_rate=0.1)

    def forward(inputs, targets):
        return loss_fn(net(inputs), targets)

    gradients_of = ms.value_and_grad(
        forward, None, sgd.parameters
    )

    @ms.jit
    def step(inputs, targets):
        loss, gradients = gradients_of(inputs, targets)
        sgd(gradients)
        return loss

    losses = [
        step(inputs, targets) for inputs, targets in batches
    ]
    return [losses, _weights(net)]


def recompute(deep_net, batches, HalfSquare):
    net = deep_net()
    for block in net.blocks:
        block.recompute()
    return _losses(net, batches, HalfSquare)


def data_parallel(net, HalfSquare):
    init()
    ms.set_auto_parallel_context(
        parallel_mode="data_parallel", gradients_mean=True
    )
    share = ds.NumpySlicesDataset(
        (INPUTS, TARGETS),
        ["inputs", "targets"],
        shuffle=False,
        num_shards=get_group_size(),
        shard_id=get_rank(),
    )
    sgd = nn.SGD(net.trainable_params(), learning_rate=0.1)
    model = Model(net, HalfSquare(), sgd)
    model.train(1, share.batch(8), dataset_sink_mode=False)
    return _weights(net)


def parallel_optimizer(deep_net, batches, HalfSquare):
    ms.set_auto_parallel_context(
        parallel_mode="data_parallel",
        enable_parallel_optimizer=True,
    )
    return _losses(deep_net(), batches, HalfSquare)


def shard(deep_net, batches, HalfSquare):
    ms.set_auto_parallel_context(
        parallel_mode="semi_auto_parallel"
    )
    net = deep_net()
    for block in net.blocks:
        block.up.matmul.shard(((1, 1), (2, 1)))
        block.down.matmul.shard(((1, 2), (1, 2)))
    return _losses(net, batches, HalfSquare)


def layout(deep_net, batches, HalfSquare):
    layout = ms.Layout((1, 2), ("dp", "tp"))
    net = deep_net()
    for block in net.blocks:
        block.up.matmul.shard(
            (layout("dp", "None"), layout("tp", "None"))
        )
        block.down.matmul.shard(
            (layout("dp", "tp"), layout("None", "tp"))
        )
    return _losses(net, batches, HalfSquare)


def auto_parallel(deep_net, batches, HalfSquare):
    ms.set_auto_parallel_context(
        parallel_mode="auto_parallel",
        search_mode="recursive_programming",
    )
    return _losses(deep_net(), batches, HalfSquare)


def pipeline(deep_net, batches, HalfSquare):
    ms.set_auto_parallel_context(
        parallel_mode="semi_auto_parallel", pipeline_stages=1
    )
    net = deep_net()
    for stage, block in enumerate(net.blocks):
        block.pipeline_stage = stage
    return _losses(net, batches, HalfSquare)


def generator_dataset():
    class Squares:
        def __getitem__(self, index):
            return np.float32(index), np.float32(index**2)

        def __len__(self):
            return 16

    shards = []
    for rank in range(2):
        shard = ds.GeneratorDataset(
            Squares(),
            ["x", "y"],
            shuffle=False,
            num_shards=2,
            shard_id=rank,
        )
        shards.append(
            [
                row["y"]
                for row in shard.batch(4).create_dict_iterator(
                    output_numpy=True
                )
            ]
        )
    return sorted(
        np.concatenate(
            [part for shard in shards for part in shard]
        ).tolist()
    )


def mind_dataset(rows):
    data = ds.MindDataset(
        "rows.mindrecord",
        columns_list=["inputs", "label"],
        shuffle=False,
    )
    batches = data.batch(16).create_dict_iterator(
        output_numpy=True
    )
    first = next(batches)
    return [first["inputs"], first["label"]]


def profiler(net, batches, loss_fn):
    profile = ms.profiler.Profiler(output_path="profile")
    for inputs, targets in batches:
        loss_fn(net(inputs), targets)
    profile.analyse()
    return bool(glob.glob("profile/**/*", recursive=True))
