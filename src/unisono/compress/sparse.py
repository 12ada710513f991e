"""Sparse weights: some are 0, shapes are unchanged. Weights are compared within a row, the weights of one output."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from unisono.compress.scores import Criterion, weight_scores
from unisono.errors import ConfigError
from unisono.models.layer_patterns import OUTER_LAYERS, matching_layers
from unisono.models.moe import EXPERT_MATRICES, Experts
from unisono.sanitize import listed
from unisono.train.trained import TrainedRun

Pattern = Literal["unstructured", "2:4"]
_SHOWN: Final = 200  # characters of names in a line


@dataclass(frozen=True, kw_only=True, slots=True)
class Sparsity:
    """Which weights become 0.

    Attributes:
        fraction: Fraction of the weights of a row.
        pattern: "2:4" takes two of each four in a row.
        criterion: How they are compared.
        samples: Training samples that it reads.
        skip: Name patterns of layers that stay.
    """

    fraction: float
    pattern: Pattern
    criterion: Criterion
    samples: int
    skip: tuple[str, ...]


def layer_names(model: nn.Module) -> dict[str, list[str]]:
    """The layers whose weights can be sparse, and the parameters of each.

    Without tables of embeddings, the layers next to inputs and outputs (``OUTER_LAYERS``), and weights that are computed from
    other parameters. A weight that layers share is of the first.
    """
    named = {name for name, _ in model.named_parameters()}
    tables = _embedding_names(model)
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        weights: list[str] = []
        if isinstance(module, nn.Linear | nn.Conv2d):
            weights = [f"{name}.weight"] if name else ["weight"]
        elif isinstance(module, Experts):
            weights = [f"{name}.{matrix}" for matrix in EXPERT_MATRICES]
        weights = [weight for weight in weights if weight in named and weight not in tables]
        if weights and not matching_layers([name], OUTER_LAYERS):
            found[name] = weights
    return found


def _embedding_names(model: nn.Module) -> set[str]:
    """The parameters that are tables of embeddings, or one tensor with such a table."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return {name for name, parameter in model.named_parameters() if id(parameter) in tables}


def _select_weights(model: nn.Module, sparsity: Sparsity) -> tuple[list[str], dict[str, list[str]]]:
    """The weights that become sparse, and the matrices that stay dense by the reason."""
    layers = layer_names(model)
    skipped = set(matching_layers(layers, sparsity.skip))
    owners = {weight: layer for layer, weights in layers.items() for weight in weights}
    tables = _embedding_names(model)
    chosen: list[str] = []
    dense: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        layer = owners.get(name)
        reason = ""
        if name in tables:
            reason = "a table of embeddings"
        elif matching_layers([name.rpartition(".")[0]], OUTER_LAYERS):
            reason = "next to inputs or outputs"
        elif layer is None:
            reason = "not the weight of a linear layer, convolution or experts"
        elif layer in skipped:
            reason = "--skip"
        elif sparsity.pattern == "2:4" and (parameter.shape[-1] % 4 or parameter.dim() == 4):
            reason = "its rows do not fit 2:4"
        if not reason:
            chosen.append(name)
        elif parameter.dim() > 1:
            dense.setdefault(reason, []).append(name)
    return chosen, dense


def sparse_copy(run: TrainedRun, model: nn.Module, sparsity: Sparsity) -> tuple[nn.Module, dict[str, Any], list[str]]:
    """A copy of the model with weights of 0, what was done as JSON types, and lines about it.

    Args:
        run: The run, whose training samples are read.
        model: The model, which is left as it is.
        sparsity: Which weights become 0.

    Raises:
        ConfigError: No layer is left, or a score is not finite.
    """
    chosen, dense = _select_weights(model, sparsity)
    if not chosen:
        layers = list(layer_names(model))
        raise ConfigError(
            given=f"--sparsity for {type(model).__name__}"
            + (f" without {', '.join(sparsity.skip)}" if "--skip" in dense else ""),
            rule="linear layers, convolutions and experts can be sparse, but for those next to inputs and outputs; 2:4 needs "
            "rows of a multiple of 4 weights, and no convolutions",
            consequence="nothing was pruned",
            nearest=f"--pattern unstructured, or another --skip; layers are {', '.join(layers[:6]) or 'none'}",
        )
    scores = weight_scores(run, model, chosen, sparsity.criterion, sparsity.samples)
    made = copy.deepcopy(model)
    parameters = dict(made.named_parameters())
    zeros = total = 0
    by_magnitude: list[str] = []
    with torch.no_grad():
        for name, score, is_reached in scores:
            weight = parameters[name]
            if not is_reached:
                by_magnitude.append(name)
            weight.mul_(_kept(score, sparsity))
            zeros, total = zeros + int((weight == 0).sum()), total + weight.numel()
    before, after = _zipped_bytes(model), _zipped_bytes(made)
    record = {
        "pattern": sparsity.pattern,
        "zero_weights": zeros,
        "sparse_weights": total,
        "kept_dense": dense,
        "by_magnitude": by_magnitude,
        "zip_bytes": [before, after],
        "note": "the file keeps its size, and zeros make no pass faster by themselves",
    }
    lines = [
        f"{zeros} of the {total} weights of {len(chosen)} matrices are 0 ({sparsity.pattern}); the file keeps its size, a zip of "
        f"it takes {after / 2**20:.2f} MiB in place of {before / 2**20:.2f} MiB",
        "zeros make no pass faster by themselves: the passes below multiply by them"
        + (
            ", and 2:4 is read by sparse tensor cores of GPUs alone, with kernels for it"
            if sparsity.pattern == "2:4"
            else ""
        ),
        *(f"dense, {reason}: {listed(names, _SHOWN)}" for reason, names in dense.items()),
    ]
    if by_magnitude:
        lines.append(f"by magnitude, as no training sample reached them: {listed(by_magnitude, _SHOWN)}")
    return made, record, lines


def _kept(scores: Tensor, sparsity: Sparsity) -> Tensor:
    """1 at weights that stay, 0 at others, of the shape of ``scores``; of equal scores the last stay."""
    if sparsity.pattern == "2:4":
        rows, removed = scores.reshape(-1, 4), 2
    else:
        inputs = scores.shape[-1] if scores.dim() < 4 else scores[0].numel()
        rows = scores.reshape(-1, inputs)
        removed = int(sparsity.fraction * inputs + 0.5)
    lowest = rows.argsort(dim=1, stable=True)[:, :removed]
    return torch.ones_like(rows).scatter_(1, lowest, 0).reshape(scores.shape)


def _zipped_bytes(model: nn.Module) -> int:
    """Bytes of the tensors after deflate, which zip files use."""
    tensors: Sequence[Tensor] = list(model.state_dict().values())
    zipped, size = zlib.compressobj(), 0
    for tensor in tensors:
        raw: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        size += len(zipped.compress(raw))
    return size + len(zipped.flush())
