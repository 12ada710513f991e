"""Sparse weights: some are 0, shapes are unchanged. Weights are compared within a row, the weights of one output."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unisono.compress.scores import Criterion, weight_scores
from unisono.compress.smaller import matching
from unisono.errors import ConfigError
from unisono.models.moe import Experts
from unisono.train.trained import TrainedRun

Pattern = Literal["unstructured", "2:4"]
_HEADS = frozenset({"head", "lm_head", "classifier", "score", "cls", "embed_out", "fc_out"})


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
    """The layers whose weights can be sparse, and the parameters of each: all matrices but embeddings and output heads."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        parts = name.split(".")
        if _HEADS & {parts[0], parts[-1]}:
            continue
        if isinstance(module, nn.Linear | nn.Conv2d) and id(module.weight) not in tables:
            found[name] = [f"{name}.weight"]
        elif isinstance(module, Experts):
            found[name] = [f"{name}.{kind}" for kind in ("gate", "up", "down")]
    return found


def sparse_copy(run: TrainedRun, model: nn.Module, sparsity: Sparsity) -> tuple[nn.Module, dict[str, Any], list[str]]:
    """A copy of the model with weights of 0, what was done as JSON types, and lines about it.

    Args:
        run: The run, whose training samples are read.
        model: The model, which is left as it is.
        sparsity: Which weights become 0.

    Raises:
        ConfigError: No layer is left, or a score is not finite.
    """
    layers = layer_names(model)
    skipped = set(matching(list(layers), sparsity.skip))
    chosen = [weight for layer, weights in layers.items() if layer not in skipped for weight in weights]
    kept: list[str] = []
    if sparsity.pattern == "2:4":
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        kept = [name for name in chosen if shapes[name][-1] % 4 or len(shapes[name]) == 4]
        chosen = [name for name in chosen if name not in kept]
    if not chosen:
        raise ConfigError(
            given=f"--sparsity for {type(model).__name__}"
            + (f" without {', '.join(sparsity.skip)}" if skipped else ""),
            rule="linear layers, convolutions and experts can be sparse, but for output heads; 2:4 needs rows of a multiple of 4 "
            "weights, and no convolutions",
            consequence="nothing was pruned",
            nearest=f"--pattern unstructured, or another --skip; layers are {', '.join(list(layers)[:6]) or 'none'}",
        )
    scores = weight_scores(run, model, chosen, sparsity.criterion, sparsity.samples)
    made = copy.deepcopy(model)
    parameters = dict(made.named_parameters())
    zeros = total = 0
    with torch.no_grad():
        for name, score in scores:
            weight = parameters[name]
            weight.mul_(_kept(score, sparsity))
            zeros, total = zeros + int((weight == 0).sum()), total + weight.numel()
    before, after = _zipped_bytes(model), _zipped_bytes(made)
    record = {
        "pattern": sparsity.pattern,
        "zero_weights": zeros,
        "sparse_weights": total,
        "kept_dense": kept,
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
        *([f"dense, because their rows do not fit 2:4: {', '.join(kept)}"] if kept else []),
    ]
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
