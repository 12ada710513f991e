"""Idioms of DeepSpeed; after.py has the same under the same names. They run in two processes."""

import deepspeed
import torch
import torch.distributed as dist
from nets import deep, dense
from shared_samples import INPUTS, TARGETS
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    TensorDataset,
)


def given():
    if not dist.is_initialized():
        # an operator that would be compiled first
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
            False
        )
        deepspeed.init_distributed("gloo")
    data = TensorDataset(
        torch.from_numpy(INPUTS), torch.from_numpy(TARGETS)
    )

    def loader():
        return DataLoader(
            data,
            batch_size=8,
            sampler=DistributedSampler(data, shuffle=False),
        )

    return {
        "net": dense,
        "deep_net": lambda: deep,
        "data": lambda: data,
        "loader": loader,
        "loss_fn": lambda: (
            lambda outputs, targets: (
                0.5 * (outputs - targets).square().mean()
            )
        ),
    }


def _weights(net):
    return [net.weight, net.bias]


def initialize(net, loader, loss_fn):
    config = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 0.1,
    }
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=net, optimizer=sgd, config=config
    )
    for inputs, targets in loader:
        loss = loss_fn(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
    return _weights(net)


def accumulation(net, loader, loss_fn):
    config = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 0.0,
        "gradient_accumulation_steps": 4,
    }
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=net, optimizer=sgd, config=config
    )
    for inputs, targets in loader:
        loss = loss_fn(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
    return _weights(net)


def zero(deep_net, loader, loss_fn):
    config = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    net = deep_net()
    sgd = torch.optim.SGD(net.parameters(), lr=0.01)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=net, optimizer=sgd, config=config
    )
    losses = []
    for inputs, targets in loader:
        loss = loss_fn(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        losses.append(float(loss) / 2)
    return losses


def checkpoint(net, loader, loss_fn):
    config = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 0.0,
    }
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=net, optimizer=sgd, config=config
    )
    for step, (inputs, targets) in enumerate(loader):
        loss = loss_fn(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        if step == 1:
            engine.save_checkpoint("checkpoints", tag="step2")

    # another process goes on with the third batch
    engine.load_checkpoint("checkpoints", tag="step2")
    for step, (inputs, targets) in enumerate(loader):
        if step < 2:
            continue
        loss = loss_fn(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
    return _weights(net)


def bf16(net, loader, loss_fn):
    config = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 0.0,
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    }
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=net, optimizer=sgd, config=config
    )
    for inputs, targets in loader:
        loss = loss_fn(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
    return _weights(net)
