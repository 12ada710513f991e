"""Idioms of a script for DistributedDataParallel; after.py has the same under the same names. They run in two processes."""

import torch
import torch.distributed as dist
from nets import deep, dense
from shared_samples import INPUTS, TARGETS
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    TensorDataset,
)


def given():
    data = TensorDataset(
        torch.from_numpy(INPUTS), torch.from_numpy(TARGETS)
    )

    def loader():
        return DataLoader(
            data,
            batch_size=8,
            sampler=DistributedSampler(data, shuffle=False),
        )

    # only for what needs ranks: the snippet `start` is the first to join
    # them, as torch can join the same ones once
    def joined(make):
        def made():
            if not dist.is_initialized():
                dist.init_process_group("gloo")
            return make()

        return made

    return {
        "net": joined(dense),
        "deep_net": joined(lambda: deep),
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


def start():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    first = rank == 0
    return first


def loop(net, data, loss_fn):
    model = DDP(net)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            sgd.zero_grad()
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            sgd.step()
    return _weights(net)


def accumulation(net, loader, loss_fn):
    model = DDP(net)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    sgd.zero_grad()
    for number, (inputs, targets) in enumerate(loader):
        if number < 3:
            with model.no_sync():
                loss = loss_fn(model(inputs), targets) / 4
                loss.backward()
        else:
            loss = loss_fn(model(inputs), targets) / 4
            loss.backward()
    sgd.step()
    return _weights(net)


def clipping(net, loader, loss_fn):
    model = DDP(net)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    for inputs, targets in loader:
        sgd.zero_grad()
        loss_fn(model(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        sgd.step()
    return _weights(net)


def grad_scaler(net, loader, loss_fn):
    model = DDP(net)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**16, growth_interval=2
    )
    scales = []
    for number, (inputs, targets) in enumerate(loader):
        if number == 1:  # an overflow
            targets = targets * float("inf")
        sgd.zero_grad()
        loss = loss_fn(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(sgd)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(sgd)
        scaler.update()
        scales.append(scaler.get_scale())
    return [scales, _weights(net)]


def mixed_precision(net, loader, loss_fn):
    model = DDP(net)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    for inputs, targets in loader:
        sgd.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(inputs)
        loss = loss_fn(outputs.float(), targets)
        loss.backward()
        sgd.step()
    return _weights(net)


def mean_over_ranks(net, loader, loss_fn):
    model = DDP(net)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for inputs, targets in loader:
        sgd.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        sgd.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return losses


def checkpoint(net, loader, loss_fn):
    model = DDP(net)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step, (inputs, targets) in enumerate(loader):
        sgd.zero_grad()
        loss_fn(model(inputs), targets).backward()
        sgd.step()
        if step == 1 and dist.get_rank() == 0:
            state = {
                "net": net.state_dict(),
                "sgd": sgd.state_dict(),
            }
            torch.save(state, "checkpoint.pt")
    dist.barrier()

    # another process goes on with the third batch
    state = torch.load("checkpoint.pt", weights_only=True)
    net.load_state_dict(state["net"])
    sgd.load_state_dict(state["sgd"])
    for step, (inputs, targets) in enumerate(loader):
        if step < 2:
            continue
        sgd.zero_grad()
        loss_fn(model(inputs), targets).backward()
        sgd.step()
    return _weights(net)


def compression(net, loader, loss_fn):
    model = DDP(net)
    model.register_comm_hook(
        None, default_hooks.fp16_compress_hook
    )
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    for inputs, targets in loader:
        sgd.zero_grad()
        loss_fn(model(inputs), targets).backward()
        sgd.step()
    return _weights(net)


def sharded(deep_net, loader, loss_fn):
    model = deep_net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for inputs, targets in loader:
        sgd.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        sgd.step()
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        losses.append(float(loss) / dist.get_world_size())
    return losses
