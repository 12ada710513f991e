"""Idioms of Horovod 0.28, checked against its source and not run.

after.py has the same under the same names.
"""

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, DistributedSampler


def start():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    first = rank == 0
    return first


def loop(net, data, loss_fn):
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(sgd, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        sgd, named_parameters=net.named_parameters()
    )
    sampler = DistributedSampler(
        data, hvd.size(), hvd.rank(), shuffle=False
    )
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_fn(net(inputs), targets).backward()
            optimizer.step()
    return [net.weight, net.bias]


def accumulation(net, loader, loss_fn):
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        sgd,
        named_parameters=net.named_parameters(),
        backward_passes_per_step=4,
    )
    optimizer.zero_grad()
    for inputs, targets in loader:
        (loss_fn(net(inputs), targets) / 4).backward()
    optimizer.step()
    return [net.weight, net.bias]


def clipping(net, loader, loss_fn):
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        sgd, named_parameters=net.named_parameters()
    )
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss_fn(net(inputs), targets).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
    return [net.weight, net.bias]


def compression(net, loader, loss_fn):
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        sgd,
        named_parameters=net.named_parameters(),
        compression=hvd.Compression.fp16,
    )
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss_fn(net(inputs), targets).backward()
        optimizer.step()
    return [net.weight, net.bias]


def adasum(net):
    """`Adasum`

    No counterpart. It lets many workers keep the learning rate of one. Scale the rate instead, with a warm-up
    (`ScheduleOptions(warmup_steps=…)`), or use LAMB or LARS (`OptimOptions(kind="lamb")`), which adapt the step of
    each layer.
    """
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        sgd,
        named_parameters=net.named_parameters(),
        op=hvd.Adasum,
    )
    return optimizer


def mean_over_ranks(net, loader, loss_fn, optimizer):
    losses = []
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = loss_fn(net(inputs), targets)
        loss.backward()
        optimizer.step()
        mean = hvd.allreduce(loss.detach(), name="loss")
        losses.append(float(mean))
    return losses


def checkpoint(net, loader, loss_fn, optimizer):
    @hvd.elastic.run
    def train(state):
        for state.batch in range(state.batch, 4):
            inputs, targets = loader[state.batch]
            optimizer.zero_grad()
            loss_fn(net(inputs), targets).backward()
            optimizer.step()
            state.commit()

    state = hvd.elastic.TorchState(
        model=net, optimizer=optimizer, batch=0
    )
    train(state)
    return [net.weight, net.bias]
