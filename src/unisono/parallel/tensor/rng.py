"""Random numbers between the layers of a pair: each rank of ``tp`` draws its own.

The ranks of ``tp`` share one stream of random numbers, since what they all compute must drop alike. Between the layers that a
pair cuts they hold different heads or hidden units: drawn from that stream, head n of every rank would drop the same places. So
from the first cut layer on a rank draws from a stream of its own (as in Megatron-LM, Shoeybi et al. 2019), whose seed follows
from where the common one is and from the rank. At the last layer the common one goes on, one number further where anything
was drawn, so that the next pair's streams are others. Nothing of it must be saved: recompute and a resumed run, which put the
common stream back to where it was, draw the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from unisono.parallel.hooks import wrap_forward


class TensorParallelRNG:
    """The streams of one module, whose forward pass holds pairs. ``index`` is this rank's place along tp."""

    def __init__(self, module: nn.Module, index: int) -> None:
        self._index = index
        self._open: set[nn.Module] = set()  # last layers that are still to come
        self._generator = torch.default_generator
        self._common: Tensor | None = None
        self._began = b""
        self._wrap(module)

    def add_pair(self, first: list[nn.Module], last: nn.Module) -> None:
        """A pair inside the module: layers cut by columns, and the one by rows."""

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
            finally:  # recompute stops as soon as it has what it needs
                self._open.clear()
                self._end()

        wrap_forward(module, restoring)

    def _begin(self, device: torch.device) -> None:
        if self._common is not None:
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
    """The one that a device's dropout draws from."""
    if device.type == "cpu":
        return torch.default_generator
    of_device: Any = torch.get_device_module(device)
    return of_device.default_generators[device.index]


def _bytes(state: Tensor) -> bytes:
    return state.numpy().tobytes()
