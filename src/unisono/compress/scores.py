"""How much a model depends on its units, blocks and weights, by one of three criteria.

magnitude    the norm of the weights; for no data
activation   weights times the norm of what they are multiplied with on training samples (Sun et al. 2023, arXiv:2306.11695;
             An et al. 2024, arXiv:2312.11983); of a block 1 - cosine of its input and output (Men et al. 2024, arXiv:2403.03853)
taylor       the first-order change of the loss, |Σ activation · gradient| over each micro-batch (Molchanov et al. 2019,
             arXiv:1906.10771)

The activation enters through the layer that reads it, so Σ activation · gradient is Σ weight · gradient over that layer's
columns, for heads, hidden units, channels and experts alike.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.compress.units import Units
from unisono.errors import ConfigError
from unisono.models.moe import Experts
from unisono.train.named_losses import sum_losses
from unisono.train.trained import TrainedRun

Criterion = Literal["magnitude", "activation", "taylor"]


def unit_scores(
    run: TrainedRun, model: nn.Module, units: Sequence[Units], criterion: Criterion, samples: int
) -> list[Tensor]:
    """The scores [rows, columns] of the units, in float64 on the CPU. A row that no sample reached is scored by magnitude.

    Args:
        run: The run, whose training samples are read.
        model: The model, which is left as it is.
        units: Its units.
        criterion: How they are scored.
        samples: Training samples to read, at least; not for ``magnitude``.

    Raises:
        ConfigError: A score is not finite.
    """
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    norms = [_unit_norms(tensors, unit) for unit in units]
    found: list[Tensor] = []
    if criterion == "magnitude":
        found = norms
    elif criterion == "activation":
        inputs = input_norms(run, model, [unit.read.name for unit in units], samples)
        for unit in units:
            weights = unit.read.reduced(tensors[unit.read.name].double().square())
            found.append(unit.per_unit(weights * inputs[unit.read.name].square()).sqrt().cpu())
    else:
        found = [torch.zeros(unit.rows, unit.columns, dtype=torch.float64) for unit in units]
        for changes in _changes(run, model, samples):
            for unit, total in zip(units, found, strict=True):
                total += unit.per_unit(unit.read.reduced(changes[unit.read.name].double())).abs().cpu()
    # no sample reached a row of zeros, such as an expert
    reached = [
        torch.where((score == 0).all(1, keepdim=True), norm, score) for score, norm in zip(found, norms, strict=True)
    ]
    return [_finite(score, unit.block) for score, unit in zip(reached, units, strict=True)]


def _unit_norms(tensors: Mapping[str, Tensor], unit: Units) -> Tensor:
    """The norm of each unit's weights [rows, columns]."""
    squares = [
        unit.per_unit(owned.reduced(tensors[owned.name].double().square())) for owned in unit.owned if owned.learned
    ]
    return torch.stack(squares).sum(0).sqrt().cpu()


def block_scores(
    run: TrainedRun, model: nn.Module, blocks: Sequence[str], criterion: Criterion, samples: int
) -> list[float]:
    """The scores of whole blocks; arguments and errors as for ``unit_scores``, ``blocks`` are their names."""
    if criterion == "magnitude":
        norms = [
            torch.stack([tensor.detach().double().square().sum() for tensor in model.get_submodule(block).parameters()])
            for block in blocks
        ]
        scores = [float(norm.sum().sqrt()) for norm in norms]
    elif criterion == "activation":
        scores = _distances(run, model, blocks, samples)
    else:
        scores = [0.0] * len(blocks)
        for changes in _changes(run, model, samples):
            for number, block in enumerate(blocks):
                inside = [change.double().sum() for name, change in changes.items() if name.startswith(f"{block}.")]
                scores[number] += float(torch.stack(inside).sum().abs())
    for block, score in zip(blocks, scores, strict=True):
        _finite(torch.tensor(score), block)
    return scores


def weight_scores(
    run: TrainedRun, model: nn.Module, names: Sequence[str], criterion: Criterion, samples: int
) -> Iterator[tuple[str, Tensor]]:
    """The score of each weight, as (name, scores of the weight's shape); arguments and errors as for ``unit_scores``.

    The name of a weight is that of its parameter, of a linear layer [O, I], a convolution [O, I, Y, X] or experts [E, O, I].
    """
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    totals: Mapping[str, Tensor] = {}
    if criterion == "activation":
        totals = input_norms(run, model, names, samples)
    elif criterion == "taylor":
        totals = {name: torch.zeros_like(tensors[name]) for name in names}
        for changes in _changes(run, model, samples):
            for name in names:
                totals[name].add_(changes[name].abs())
    for name in names:
        weight = tensors[name]
        if criterion == "taylor":
            score = totals[name]
        elif criterion == "magnitude":
            score = weight.abs()
        else:
            norm = totals[name].to(weight.dtype)  # [I], of experts [E, I]
            norm = norm[:, None] if norm.dim() == 2 else norm.reshape(-1, *(1,) * (weight.dim() - 2))
            score = weight.abs() * norm
        yield name, _finite(score, name)


@torch.no_grad()
def input_norms(run: TrainedRun, model: nn.Module, names: Sequence[str], samples: int) -> dict[str, Tensor]:
    """The norm, over training samples, of each input of the layers of the weights ``names``: [I], of experts [E, I].

    Arguments as for ``weight_scores``. Of a layer whose forward pass is not called, such as the output projection of torch's
    ``nn.MultiheadAttention``, all are 1: its weights are compared by magnitude.
    """
    totals: dict[str, Tensor] = {}

    def add(name: str, square: Tensor) -> None:
        totals[name] = totals[name] + square if name in totals else square

    def hook(name: str) -> Any:
        def before(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            square = inputs[0].detach().double().square()
            channel = 1 if isinstance(layer, nn.Conv2d) else square.dim() - 1
            add(name, square.sum([dim for dim in range(square.dim()) if dim != channel]))

        return before

    handles: list[Any] = []
    replaced: list[Experts] = []
    try:
        for name in names:
            owner = name.rpartition(".")[0]
            layer = model.get_submodule(owner)
            if not isinstance(layer, Experts):
                handles.append(layer.register_forward_pre_hook(hook(name)))
            elif layer not in replaced:
                replaced.append(layer)
                _watch_experts(layer, owner, add)
        for batch in run.training_batches(samples):
            run.forward_backward(model).evaluate([batch], lambda *_: None)
    finally:
        for handle in handles:
            handle.remove()
        for layer in replaced:
            del layer.hidden
    for name in names:
        if name not in totals:
            weight = model.get_parameter(name)
            totals[name] = torch.ones(weight.shape[1], dtype=torch.float64, device=weight.device)
    return {name: totals[name].sqrt() for name in names}


def _watch_experts(layer: Experts, owner: str, add: Any) -> None:
    """Add the squares of what the experts of a layer are given and of their hidden units, for each expert."""
    compute = layer.hidden

    def hidden(rows: Tensor, counts: Tensor, /) -> Tensor:
        units = compute(rows, counts)
        for values, kinds in ((rows, ("gate", "up")), (units, ("down",))):
            parts = values.detach().double().square().split(counts.tolist())
            square = torch.stack([part.sum(0) for part in parts])  # [E, I]
            for kind in kinds:
                add(f"{owner}.{kind}", square)
        return units

    layer.hidden = hidden


def _changes(run: TrainedRun, model: nn.Module, samples: int) -> Iterator[dict[str, Tensor]]:
    """weight · gradient of the mean loss of a micro-batch, by parameter; 0 for one that has no gradient."""
    model = copy.deepcopy(model).eval().requires_grad_(True)  # experts count their load in the backward pass
    passes = run.forward_backward(model)

    def backward(_number: int, outputs: Any, batch: Any) -> None:
        losses, weight = run.objective(outputs, batch)
        (sum_losses(losses) / weight.clamp(min=1e-12)).backward()

    for batch in run.training_batches(samples):
        model.zero_grad(set_to_none=True)
        with torch.enable_grad():
            passes.evaluate([batch], backward)
        yield {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.detach() * parameter.grad
            for name, parameter in model.named_parameters()
        }


@torch.no_grad()
def _distances(run: TrainedRun, model: nn.Module, blocks: Sequence[str], samples: int) -> list[float]:
    """1 - the mean cosine of input and output of each block."""
    sums, counts = dict.fromkeys(blocks, 0.0), dict.fromkeys(blocks, 0)

    def hook(block: str) -> Any:
        def after(_layer: nn.Module, inputs: tuple[Tensor, ...], outputs: Any) -> None:
            output = outputs if isinstance(outputs, Tensor) else outputs[0]
            cosines = F.cosine_similarity(inputs[0].double(), output.double(), dim=-1)
            sums[block] += float(cosines.sum())
            counts[block] += cosines.numel()

        return after

    handles = [model.get_submodule(block).register_forward_hook(hook(block)) for block in blocks]
    try:
        for batch in run.training_batches(samples):
            run.forward_backward(model).evaluate([batch], lambda *_: None)
    finally:
        for handle in handles:
            handle.remove()
    return [1 - sums[block] / counts[block] for block in blocks]


@contextmanager
def without_block(model: nn.Module, block: str) -> Generator[None]:
    """Inside, the block passes its input on."""

    def after(_layer: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> Any:
        return inputs[0] if isinstance(outputs, Tensor) else (inputs[0], *outputs[1:])

    handle = model.get_submodule(block).register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()


def _finite(scores: Tensor, name: str) -> Tensor:
    if not bool(scores.isfinite().all()):
        raise ConfigError(
            given=f"scores of {name} that are not finite",
            rule="weights, activations and gradients are finite numbers",
            consequence="nothing was pruned",
            nearest="an earlier checkpoint (--checkpoint), or --criterion magnitude where the weights are finite",
        )
    return scores
