"""What is kept on a module about its parameters that are not simply whole and equal along ``tp``.

A cut layer's parameter is a plain tensor that holds this rank's block. Where that block lies, and with which ranks a gradient
still has to be summed, is noted on the layer itself: the notes go where the layer goes (into a pipeline's stage, under FSDP2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

_BLOCKS, _SUMMED, _TRAVELS = "_unisono_blocks", "_unisono_summed", "_unisono_travels"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallelBlock:
    """Along ``dim`` this rank holds ``runs`` (offset, length) of the whole, which has ``size`` there, one run behind the other.

    ``replica`` counts the ranks before this one along ``tp`` that hold the same block.
    """

    dim: int
    size: int
    runs: tuple[tuple[int, int], ...]
    replica: int = 0


def note_block(module: nn.Module, name: str, block: TensorParallelBlock) -> None:
    """``module``'s own parameter ``name`` is ``block`` of the whole."""
    module.__dict__.setdefault(_BLOCKS, {})[name] = block


def note_replicated_grad(module: nn.Module, name: str, group: ProcessGroup) -> None:
    """The gradient of ``module``'s own parameter ``name`` is the sum of those on the ranks of ``group``."""
    module.__dict__.setdefault(_SUMMED, {})[name] = group


def note_grad_reduce_dtype(module: nn.Module, name: str, dtype: torch.dtype) -> None:
    """The gradient of ``module``'s own parameter ``name`` is summed over data ranks in ``dtype``."""
    module.__dict__.setdefault(_TRAVELS, {})[name] = dtype


def grad_reduce_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """In what gradients travel where that is not their own dtype, by parameter name."""
    return _noted(model, _TRAVELS)


def grad_reduce_dtypes_of(module: nn.Module) -> dict[str, torch.dtype]:
    """The same of a module's own parameters."""
    return module.__dict__.get(_TRAVELS, {})


def blocks(model: nn.Module) -> dict[str, TensorParallelBlock]:
    """The blocks of ``model``, by parameter name; a parameter with several names has all of them."""
    return _noted(model, _BLOCKS)


def replicated_grad_groups(model: nn.Module) -> list[tuple[ProcessGroup, Sequence[str]]]:
    """Groups of ranks, and the parameters of ``model`` whose gradients are summed over them."""
    groups: dict[ProcessGroup, list[str]] = {}
    for name, group in _noted(model, _SUMMED).items():
        groups.setdefault(group, []).append(name)
    return list(groups.items())


def _noted(model: nn.Module, kind: str) -> dict[str, Any]:
    return {
        f"{path}.{name}" if path else name: note
        for path, module in model.named_modules()
        for name, note in module.__dict__.get(kind, {}).items()
    }
