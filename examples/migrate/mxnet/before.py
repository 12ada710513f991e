"""Idioms of MXNet 1.9.1; after.py has the same under the same names."""

import math

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.contrib import amp
from shared_samples import (
    BIAS,
    INPUTS,
    TARGETS,
    WEIGHT,
    parts,
    picture,
    png,
)

# MXNet's compression between devices that are both the CPU sometimes ends the process
FRAGILE = ("kvstore_compression",)


def given():
    def net():
        made = gluon.nn.Dense(1, in_units=3)
        made.initialize()
        made.weight.set_data(mx.nd.array(WEIGHT))
        made.bias.set_data(mx.nd.array(BIAS))
        return made

    def batches():
        return [
            (mx.nd.array(x), mx.nd.array(y)) for x, y in parts(4)
        ]

    def photos():
        """photos.rec and photos.idx of four pictures."""
        writer = mx.recordio.MXIndexedRecordIO(
            "photos.idx", "photos.rec", "w"
        )
        for number in range(4):
            header = mx.recordio.IRHeader(
                0, number % 2, number, 0
            )
            writer.write_idx(
                number,
                mx.recordio.pack(header, png(picture(number))),
            )
        writer.close()
        return "photos.rec"

    return {
        "net": net,
        "batches": batches,
        "photos": photos,
        "loss_fn": gluon.loss.L2Loss,
    }


def _weights(net):
    return [net.weight.data(), net.bias.data()]


def kvstore_compression():
    kv = mx.kv.create("device")
    kv.set_gradient_compression(
        {"type": "2bit", "threshold": 0.5}
    )
    kv.init("w", mx.nd.zeros(4))
    first = mx.nd.array([0.625, -0.5, 0.375, 0], mx.cpu(0))
    second = mx.nd.zeros(4, mx.cpu(1))
    kv.push("w", [first, second])
    out = mx.nd.zeros(4)
    kv.pull("w", out=out)
    return out


def kvstore_sum():
    kv = mx.kv.create("local")
    kv.init(3, mx.nd.zeros(2))
    kv.push(3, [mx.nd.ones(2), 4 * mx.nd.ones(2)])
    out = mx.nd.empty(2)
    kv.pull(3, out=out)
    return out


def kvstore_optimizer():
    kv = mx.kv.create("local")
    kv.init("weight", mx.nd.array(WEIGHT))
    sgd = mx.optimizer.SGD(learning_rate=0.1, momentum=0.9)
    kv.set_optimizer(sgd)
    out = mx.nd.zeros((1, 3))
    for _ in range(3):
        kv.push("weight", mx.nd.ones((1, 3)))
        kv.pull("weight", out=out)
    return out


def kvstore_updater():
    def update(key, total, stored):
        stored -= 0.5 * total

    kv = mx.kv.create("local")
    kv.init("w", mx.nd.ones(2))
    kv._set_updater(update)
    kv.push("w", mx.nd.array([1, 2]))
    out = mx.nd.empty(2)
    kv.pull("w", out=out)
    return out


def kvstore_rows():
    table = mx.nd.array([[0, 0], [1, 1], [2, 2], [3, 3]])
    kv = mx.kv.create("local")
    kv.init("table", table.tostype("row_sparse"))
    out = mx.nd.sparse.zeros("row_sparse", (4, 2))
    ids = mx.nd.array([3, 1], dtype="int64")
    kv.row_sparse_pull("table", out=out, row_ids=ids)
    return [out.indices.asnumpy(), out.data.asnumpy()]


def trainer_step(net, batches, loss_fn):
    trainer = gluon.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 0.1}
    )
    for inputs, targets in batches:
        with autograd.record():
            loss = loss_fn(net(inputs), targets)
        loss.backward()
        trainer.step(len(inputs))
    return _weights(net)


def trainer_clipping(net, batches, loss_fn):
    trainer = gluon.Trainer(
        net.collect_params(),
        "sgd",
        {"learning_rate": 0.1},
        update_on_kvstore=False,
    )
    for inputs, targets in batches:
        with autograd.record():
            loss = loss_fn(net(inputs), targets)
        loss.backward()
        trainer.allreduce_grads()
        grads = [p.grad() for p in trainer._params]
        # the gradients are sums, so the bound is too
        gluon.utils.clip_global_norm(grads, 0.1 * len(inputs))
        trainer.update(len(inputs))
    return _weights(net)


def accumulation(net, batches, loss_fn):
    trainer = gluon.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 0.1}
    )
    for p in net.collect_params().values():
        p.grad_req = "add"
    for inputs, targets in batches:
        with autograd.record():
            loss = loss_fn(net(inputs), targets)
        loss.backward()
    trainer.step(4 * 16)
    for p in net.collect_params().values():
        p.zero_grad()
    return _weights(net)


def accumulation_without_add(net, batches, loss_fn):
    """Accumulation without `grad_req="add"`

    This idiom is in print and never worked: `grad_req` is `write` by default, so each backward pass overwrites the
    gradient of the one before. The step below is that of the last 16 samples, divided by 64. Use the form above.
    """
    trainer = gluon.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 0.1}
    )
    for inputs, targets in batches:
        with autograd.record():
            loss = loss_fn(net(inputs), targets)
        loss.backward()
    trainer.step(4 * 16)
    return _weights(net)


def several_devices(net, batches, loss_fn):
    devices = [mx.cpu(0), mx.cpu(1)]
    net.collect_params().reset_ctx(devices)
    trainer = gluon.Trainer(
        net.collect_params(),
        "sgd",
        {"learning_rate": 0.1},
        kvstore="device",
    )
    for inputs, targets in batches:
        xs = gluon.utils.split_and_load(inputs, devices)
        ys = gluon.utils.split_and_load(targets, devices)
        with autograd.record():
            losses = [
                loss_fn(net(x), y)
                for x, y in zip(xs, ys, strict=True)
            ]
        autograd.backward(losses)
        trainer.step(len(inputs))
    return [p.data(devices[0]) for p in (net.weight, net.bias)]


def scheduler(net, batches, loss_fn):
    schedule = mx.lr_scheduler.FactorScheduler(
        step=2, factor=0.5, base_lr=0.1
    )
    trainer = gluon.Trainer(
        net.collect_params(), "sgd", {"lr_scheduler": schedule}
    )
    for inputs, targets in batches:
        with autograd.record():
            loss = loss_fn(net(inputs), targets)
        loss.backward()
        trainer.step(len(inputs))
    return _weights(net)


def initializer():
    net = gluon.nn.Dense(64, in_units=32)
    net.initialize(mx.init.Xavier(magnitude=2.24))
    bound = math.sqrt(2.24 / 48)
    values = net.weight.data().asnumpy()
    return [
        bool(0.95 * bound < np.abs(values).max() <= bound),
        float(np.abs(net.bias.data().asnumpy()).max()),
    ]


def parameters(net):
    net.save_parameters("net.params")
    fresh = gluon.nn.Dense(1, in_units=3)
    fresh.load_parameters("net.params")
    return _weights(fresh)


def trainer_states(net, batches, loss_fn):
    momentum = {"learning_rate": 0.1, "momentum": 0.9}
    trainer = gluon.Trainer(net.collect_params(), "sgd", momentum)
    for step, (inputs, targets) in enumerate(batches):
        with autograd.record():
            loss = loss_fn(net(inputs), targets)
        loss.backward()
        trainer.step(len(inputs))
        if step == 1:
            net.save_parameters("net.params")
            trainer.save_states("trainer.states")

    # another process goes on with the third batch
    net.load_parameters("net.params")
    trainer = gluon.Trainer(net.collect_params(), "sgd", momentum)
    trainer.load_states("trainer.states")
    for inputs, targets in batches[2:]:
        with autograd.record():
            loss = loss_fn(net(inputs), targets)
        loss.backward()
        trainer.step(len(inputs))
    return _weights(net)


def export():
    net = gluon.nn.Dense(1, in_units=3)
    net.initialize()
    net.weight.set_data(mx.nd.array(WEIGHT))
    net.bias.set_data(mx.nd.array(BIAS))
    net.hybridize()
    net(mx.nd.array(INPUTS))
    net.export("net", epoch=0)

    loaded = gluon.SymbolBlock.imports(
        "net-symbol.json", ["data"], "net-0000.params"
    )
    outputs = loaded(mx.nd.array(INPUTS))
    return outputs


def hybridize(net, batches, loss_fn):
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = gluon.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 0.1}
    )
    for inputs, targets in batches:
        with autograd.record():
            loss = loss_fn(net(inputs), targets)
        loss.backward()
        trainer.step(len(inputs))
    return _weights(net)


def record_file():
    writer = mx.recordio.MXIndexedRecordIO(
        "photos.idx", "photos.rec", "w"
    )
    for number in range(4):
        header = mx.recordio.IRHeader(0, number % 2, number, 0)
        image = png(picture(number))
        writer.write_idx(number, mx.recordio.pack(header, image))
    writer.close()

    reader = mx.recordio.MXIndexedRecordIO(
        "photos.idx", "photos.rec", "r"
    )
    header, image = mx.recordio.unpack(reader.read_idx(3))
    return [float(header.label), list(image)]


def image_record_iter(photos):
    iterator = mx.io.ImageRecordIter(
        path_imgrec="photos.rec",
        data_shape=(3, 8, 8),
        batch_size=4,
        shuffle=False,
        rand_crop=False,
        mean_r=127.5,
        mean_g=127.5,
        mean_b=127.5,
        std_r=64,
        std_g=64,
        std_b=64,
    )
    batch = next(iterator)
    images, labels = batch.data[0], batch.label[0]
    return [images, labels]


def image_record_dataset(photos):
    data = gluon.data.vision.ImageRecordDataset("photos.rec")
    to_tensor = gluon.data.vision.transforms.ToTensor()
    loader = gluon.data.DataLoader(
        data.transform_first(to_tensor),
        batch_size=2,
        shuffle=False,
        num_workers=0,
    )
    for images, labels in loader:
        pass
    return [images, labels]


def metric(net, batches):
    accuracy = mx.metric.Accuracy()
    for inputs, targets in batches:
        positive = net(inputs)
        scores = mx.nd.concat(-positive, positive, dim=1)
        accuracy.update([targets], [scores])
    _, value = accuracy.get()
    return value


def module_fit():
    data = mx.io.NDArrayIter(
        INPUTS, TARGETS, batch_size=16, label_name="targets"
    )
    output = mx.sym.LinearRegressionOutput(
        mx.sym.FullyConnected(
            mx.sym.var("data"), num_hidden=1, name="dense"
        ),
        mx.sym.var("targets"),
    )
    module = mx.mod.Module(output, label_names=["targets"])
    module.fit(
        data,
        num_epoch=2,
        optimizer="sgd",
        optimizer_params={"learning_rate": 0.1, "wd": 0.01},
        arg_params={
            "dense_weight": mx.nd.array(WEIGHT),
            "dense_bias": mx.nd.array(BIAS),
        },
        eval_metric="mse",
    )
    parameters, _ = module.get_params()
    return [
        parameters["dense_weight"],
        parameters["dense_bias"],
    ]


def monitor():
    output = mx.sym.LinearRegressionOutput(
        mx.sym.FullyConnected(
            mx.sym.var("data"), num_hidden=1, name="dense"
        ),
        mx.sym.var("targets"),
    )
    module = mx.mod.Module(output, label_names=["targets"])
    data = mx.io.NDArrayIter(
        INPUTS, TARGETS, batch_size=64, label_name="targets"
    )
    module.bind(data.provide_data, data.provide_label)
    module.init_params(
        arg_params={
            "dense_weight": mx.nd.array(WEIGHT),
            "dense_bias": mx.nd.array(BIAS),
        }
    )
    watch = mx.mon.Monitor(interval=1, pattern="dense_output")
    module.install_monitor(watch)
    watch.tic()
    module.forward(next(data))
    [(_, _, norm)] = watch.toc()
    return float(norm)


def profiler(net, batches, loss_fn):
    mx.profiler.set_config(
        profile_all=True, filename="profile.json"
    )
    mx.profiler.set_state("run")
    for inputs, targets in batches:
        with autograd.record():
            loss = loss_fn(net(inputs), targets)
        loss.backward()
    mx.nd.waitall()
    mx.profiler.set_state("stop")
    mx.profiler.dump()
    with open("profile.json") as file:
        return '"traceEvents"' in file.read()


# the rest patches operators of this process: amp.init comes last


def amp_training(net, batches, loss_fn):
    amp.init(target_dtype="bfloat16")
    trainer = gluon.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 0.1}
    )
    amp.init_trainer(trainer)
    losses = []
    for inputs, targets in batches:
        with autograd.record():
            loss = loss_fn(net(inputs), targets)
            with amp.scale_loss(loss, trainer) as scaled:
                autograd.backward(scaled)
        trainer.step(len(inputs))
        losses.append(float(loss.mean().asscalar()))
    return losses
