"""Parameters that the forward pass reads only to convert them to the dtype of its products.

FSDP2 can then convert the shards before it gathers them: half the bytes are sent, and no copy in 32 bits is held, with the same
bits in every product. Which parameters these are is seen in a forward pass on fake tensors, so it holds for any model. Embeddings
and weights of routers, which are read in 32 bits, are not among them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree  # has no public name; torch 2.13 tested
from torch.utils._python_dispatch import TorchDispatchMode

from unisono.models.moe import balanced_routing
from unisono.parallel.device import COMPUTE_DTYPES, autocast
from unisono.plan.plan import Plan
from unisono.plan.trace import without_values


def parameters_to_cast(model: nn.Module, plan: Plan, first: Callable[[], Mapping[str, Tensor]]) -> frozenset[str]:
    """Names of the parameters that the forward pass only converts to the dtype of ``plan.precision.compute``.

    None where ranks gather no parameters, or in 32 bits; nor with fp8 layers or dtype rules, which convert in their own way.
    ``first`` returns the inputs of any micro-batch. Raises what the model raises on tensors without values.
    """
    precision = plan.precision
    if not plan.uses_fsdp or precision.compute not in ("bf16", "fp16") or precision.dtype_rules:
        return frozenset()
    fake, fakes, moved = without_values(model, first())
    named = {name: moved.get(name, parameter) for name, parameter in model.named_parameters()}
    reads = _Reads(named, COMPUTE_DTYPES[precision.compute])
    with balanced_routing(model), fake, torch.no_grad(), reads, autocast(precision.compute, plan.mesh.device):
        functional_call(model, moved, (), fakes)
    return frozenset(reads.converted - reads.read)


class _Reads(TorchDispatchMode):
    """Which parameters operations convert to ``dtype``, and which they read in any other way."""

    def __init__(self, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._names = {_storage(parameter): name for name, parameter in parameters.items()}
        self._alive: list[Tensor] = []  # so that no address is used again
        self.converted: set[str] = set()
        self.read: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        names = {self._names[place] for place in map(_storage, tensors) if place in self._names}
        outputs = [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor)]
        if not (names and outputs):  # of shapes, dtypes and devices the values are not read
            return result
        if func.is_view:  # other rows or another order of the same values
            self._alive += outputs
            self._names |= {_storage(output): name for output in outputs for name in names}
        elif func.overloadpacket is torch.ops.aten._to_copy and outputs[0].dtype == self._dtype:
            self.converted |= names
        else:
            self.read |= names
        return result


def _storage(tensor: Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    return storage._cdata
