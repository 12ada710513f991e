"""Random numbers of tensor-parallel regions: between column-wise and row-wise layers, each rank of ``tp`` draws its own.

The ranks of ``tp`` share one random stream, so that replicated activations get the same dropout. Inside a region they hold
different heads or hidden units; from the shared stream, head n of every rank would drop the same elements. So from the first
column-wise layer on, a rank draws from its own stream (as in Megatron-LM, Shoeybi et al. 2019), seeded by the state of the shared
stream and the rank. At the row-wise layer the shared stream continues. It is advanced by one number if the region drew any,
so that the next region's streams differ. No state is saved: recompute and a resumed run restore the shared stream, and the
others follow from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode  # has no public name; torch 2.13 tested

from unisono.parallel.hooks import wrap_forward


class TensorParallelRNG:
    """The rank's own stream in the regions inside one module. ``index`` is the rank along ``tp``."""

    def __init__(self, module: nn.Module, index: int) -> None:
        self._index = index
        self._open: set[nn.Module] = set()  # row-wise layers that have not run yet
        self._generator = torch.default_generator
        self._common: Tensor | None = None
        self._began = b""
        self._wrap(module)

    def add_pair(self, first: list[nn.Module], last: nn.Module) -> None:
        """Add a region inside the module: its column-wise layers ``first``, and its row-wise layer ``last``."""

        def begin(_module: nn.Module, _args: Any, output: Tensor) -> None:
            if last.training:
                self._begin(output.device)
                self._open.add(last)

        def end(_module: nn.Module, _args: Any) -> None:
            self._open.discard(last)
            if not self._open:
                self._end()

        for layer in first:
            layer.register_forward_hook(begin)
        last.register_forward_pre_hook(end)

    def _wrap(self, module: nn.Module) -> None:
        def restoring(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            finally:  # recompute stops as soon as it has all activations
                self._open.clear()
                self._end()

        wrap_forward(module, restoring)

    def _begin(self, device: torch.device) -> None:
        # a step traced with fake tensors draws nothing
        if self._common is not None or active_fake_mode() is not None:
            return
        self._generator = _generator(device)
        self._common = self._generator.get_state()
        digest = hashlib.blake2b(_bytes(self._common), key=b"%d" % self._index, digest_size=8).digest()
        self._generator.manual_seed(int.from_bytes(digest) >> 1)
        self._began = _bytes(self._generator.get_state())

    def _end(self) -> None:
        if self._common is None:
            return
        drew = _bytes(self._generator.get_state()) != self._began
        self._generator.set_state(self._common)
        self._common = None
        if drew:
            torch.rand((), device=self._generator.device, generator=self._generator)


def _generator(device: torch.device) -> torch.Generator:
    """The generator that dropout on ``device`` uses."""
    if device.type == "cpu":
        return torch.default_generator
    of_device: Any = torch.get_device_module(device)
    return of_device.default_generators[device.index]


def _bytes(state: Tensor) -> bytes:
    return state.numpy().tobytes()
