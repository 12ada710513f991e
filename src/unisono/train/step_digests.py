"""Digests of the tensors that a step computes on this rank, in the order of computation.

Inside of the context each module without children adds the digest of its output, of each call, and later that of the gradient of
this output; each parameter adds that of its own gradient, before it is summed over micro-batches and ranks. Parameters that FSDP2
shards have none. Hooks do not act inside of compiled code: there only parameters are traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from unisono.train.taps import first_floating
from unisono.train.tensor_digest import tensor_digest


class StepDigests:
    """Collects the digests of one step; only ``values`` waits for the device.

    Attributes:
        names: (phase, name) of each entry; hooks add the phases ``forward`` and ``backward``.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, with_modules: bool) -> None:
        self.names: list[tuple[str, str]] = []
        self._digests: list[Tensor] = []
        self._model, self._device, self._with_modules = model, device, with_modules
        self._stack = ExitStack()

    @torch.no_grad()
    def add(self, phase: str, name: str, tensor: Tensor) -> None:
        """Add the digest of ``tensor``."""
        self.add_digests(phase, {name: tensor_digest(tensor)})

    def add_digests(self, phase: str, digests: Mapping[str, Tensor]) -> None:
        """Add digests by name."""
        self.names += [(phase, name) for name in digests]
        self._digests += digests.values()

    def values(self) -> list[int]:
        """The digests on the host. Waits for the device."""
        return torch.stack([digest.to(self._device) for digest in self._digests]).tolist()

    def __enter__(self) -> StepDigests:
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                self._stack.callback(parameter.register_hook(self._observer(f"gradient of {name}")).remove)
        for path, module in self._model.named_modules() if self._with_modules else ():
            if next(module.children(), None) is None:
                self._stack.callback(module.register_forward_hook(self._output_observer(path)).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _observer(self, name: str) -> Callable[[Tensor | None], None]:
        def observe(gradient: Tensor | None) -> None:
            if gradient is not None:  # a pipeline may compute gradients of inputs and of parameters in two passes
                self.add("backward", name, gradient)

        return observe

    def _output_observer(self, path: str) -> Callable[..., None]:
        def observe(_module: nn.Module, _args: Any, output: Any) -> None:
            tensor = first_floating(output)
            if tensor is None:
                return
            self.add("forward", f"output of {path}", tensor)
            if tensor.requires_grad:
                tensor.register_hook(self._observer(f"gradient of the output of {path}"))

        return observe
