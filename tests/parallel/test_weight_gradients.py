"""Gradients of weights, computed later: the same numbers, the same hooks, nothing left behind."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unisono.parallel.pipeline.weight_gradients import WeightGradients


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False))


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_later_is_the_same(precision: torch.dtype | None, recompute: bool) -> None:
    plain, later = network(), network()
    store = WeightGradients([later])
    x = torch.randn(2, 4, 5)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    calls: list[tuple[int, bool]] = []
    for number, weight in enumerate(later.parameters()):
        weight.register_post_accumulate_grad_hook(lambda p, number=number: calls.append((number, p.grad is not None)))

    def loss(model: nn.Module, given: Tensor) -> Tensor:
        cast = torch.autocast("cpu", dtype=precision) if precision else contextlib.nullcontext()
        with cast:
            out = checkpoint(model, given, use_reentrant=False) if recompute else model(given)
        return out.float().square().sum()

    loss(plain, inputs[0]).backward()
    value = loss(later, inputs[1])
    with store.collect() as owed:
        value.backward()
    assert torch.equal(inputs[1].grad, inputs[0].grad)
    assert [each is None for each in gradients(later)] == [True, False, True]
    assert len(owed) == 2
    store.accumulate(owed)
    assert owed == []
    for mine, theirs in zip(gradients(later), gradients(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    assert sorted(calls[:3]) == [(0, False), (1, True), (2, False)]  # autograd runs the hooks for no gradient too
    assert sorted(calls[3:]) == [(0, True), (2, True)]

    loss(later, inputs[1]).backward()  # where nobody collects it is an ordinary layer
    for mine, theirs in zip(gradients(later), gradients(plain), strict=True):
        torch.testing.assert_close(mine, 2 * theirs, rtol=1e-6, atol=1e-7)


def test_nothing_is_left_behind() -> None:
    model = network()
    store = WeightGradients([model])
    gc.collect()
    gc.disable()
    counts: list[int] = []
    for _ in range(3):
        value = model(torch.randn(4, 5)).sum()
        with store.collect() as owed:
            value.backward()
        store.accumulate(owed)
        del value
        counts.append(sum(type(each) is Tensor for each in gc.get_objects()))
    gc.enable()
    assert counts[1] == counts[2]


def test_frozen_weights_and_layers_with_more_to_do_are_left_alone() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    model = nn.Sequential(Scaled(5, 5), nn.Linear(5, 5))
    model[1].weight.requires_grad_(False)
    store = WeightGradients([model])
    value = model(torch.randn(4, 5)).sum()
    with store.collect() as owed:
        value.backward()
    assert owed == []
    assert [p.grad is None for p in model.parameters()] == [False, False, True, False]
