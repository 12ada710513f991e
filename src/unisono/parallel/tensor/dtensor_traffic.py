"""Bytes of the collectives that DTensor issues.

No function of ours stands between DTensor and its collectives. A dispatch mode sees them, but also every other operation, and
each costs some microseconds more: ``unisono.train.comm_stats`` counts one step in a hundred so. Tested with torch 2.13.0,
whose DTensor issues the functional collectives below.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from unisono.parallel.traffic import Traffic

_SUMS: Final = ("_c10d_functional::all_reduce",)
_SCATTERED_SUMS: Final = ("_c10d_functional::reduce_scatter_tensor",)
_PARTS: Final = (
    *("_c10d_functional::all_gather_into_tensor", "_c10d_functional::all_to_all_single"),
    "_dtensor::shard_dim_alltoall",
)


class DTensorCollectives(TorchDispatchMode):
    """Inside, ``traffic`` has what DTensor exchanges over ``group``, the one of all placements."""

    def __init__(self, traffic: Traffic, group: ProcessGroup) -> None:
        super().__init__()
        self._traffic, self._group = traffic, group

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor's operations on local tensors come here next
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in _SUMS:
            self._traffic.count_all_reduce(self._group, args[0].nbytes)
        elif name in _SCATTERED_SUMS:
            self._traffic.count_reduce_scatter(self._group, args[0].nbytes)
        elif name in _PARTS:
            tensors = [each for each in pytree.tree_leaves((args, result)) if isinstance(each, Tensor)]
            self._traffic.count_all_gather(self._group, max(each.nbytes for each in tensors))
        return result
