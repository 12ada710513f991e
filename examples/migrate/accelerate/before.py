"""Idioms of Accelerate 1.15; after.py has the same under the same names. They run in two processes."""

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from nets import dense
from shared_samples import INPUTS, TARGETS
from torch.utils.data import DataLoader, TensorDataset


def given():
    AcceleratorState._reset_state()
    data = TensorDataset(
        torch.from_numpy(INPUTS), torch.from_numpy(TARGETS)
    )
    return {
        "net": dense,
        "data": lambda: data,
        "loss_fn": lambda: (
            lambda outputs, targets: (
                0.5 * (outputs - targets).square().mean()
            )
        ),
    }


def _weights(net):
    return [net.weight, net.bias]


def prepare(net, data, loss_fn):
    accelerator = Accelerator(cpu=True)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=8)
    model, optimizer, loader = accelerator.prepare(
        net, sgd, loader
    )
    for epoch in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
    return _weights(net)


def accumulate(net, data, loss_fn):
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=4
    )
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=8)
    model, optimizer, loader = accelerator.prepare(
        net, sgd, loader
    )
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = loss_fn(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return _weights(net)


def clipping(net, data, loss_fn):
    accelerator = Accelerator(cpu=True)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=8)
    model, optimizer, loader = accelerator.prepare(
        net, sgd, loader
    )
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(loss_fn(model(inputs), targets))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return _weights(net)


def mixed_precision(net, data, loss_fn):
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=8)
    model, optimizer, loader = accelerator.prepare(
        net, sgd, loader
    )
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(loss_fn(model(inputs), targets))
        optimizer.step()
    return _weights(net)


def gather_for_metrics(net, data, loss_fn):
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(data, batch_size=24)
    model, loader = accelerator.prepare(net, loader)
    hits = total = 0
    for inputs, targets in loader:
        with torch.no_grad():
            right = (model(inputs) > 0) == (targets > 0.5)
        right = accelerator.gather_for_metrics(right)
        hits += int(right.sum())
        total += len(right)
    accuracy = hits / total
    return accuracy


def save_state(net, data, loss_fn):
    accelerator = Accelerator(cpu=True)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data, batch_size=8)
    model, optimizer, loader = accelerator.prepare(
        net, sgd, loader
    )
    for step, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        accelerator.backward(loss_fn(model(inputs), targets))
        optimizer.step()
        if step == 1:
            accelerator.save_state("checkpoint")

    # another process goes on with the third batch
    accelerator.load_state("checkpoint")
    rest = accelerator.skip_first_batches(loader, 2)
    for inputs, targets in rest:
        optimizer.zero_grad()
        accelerator.backward(loss_fn(model(inputs), targets))
        optimizer.step()
    return _weights(net)
