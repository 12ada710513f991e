"""Activations that wait in the host's memory for the backward pass (Rhu et al. 2016, vDNN; Rajbhandari et al. 2021).

What a block's forward pass saves is copied to pinned memory and back when its backward pass asks for it. Parameters are saved for
the backward pass too; they stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from unisono.parallel.hooks import wrap_forward


def offload_activations(blocks: Sequence[nn.Module], *, pinned: bool) -> None:
    """Keep what the forward passes of ``blocks`` save on the host, in place; ``pinned`` memory is copied without a wait."""
    for block in blocks:
        _offload(block, pinned=pinned)


def _offload(block: nn.Module, *, pinned: bool) -> None:
    def offloading(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # a transposed weight is another tensor on the same memory; a sharded block's weights are there from now on
        stays = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
        host: Any = save_on_cpu(pin_memory=pinned)

        def pack(tensor: Tensor) -> Any:
            return tensor if tensor.untyped_storage().data_ptr() in stays else host.pack_hook(tensor)

        def unpack(packed: Any) -> Tensor:
            return packed if isinstance(packed, Tensor) else host.unpack_hook(packed)

        with saved_tensors_hooks(pack, unpack):
            return forward(*args, **kwargs)

    wrap_forward(block, offloading)
