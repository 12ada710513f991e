"""Optimizer steps that a flag on the device skips.

Two attributes of the optimizer control a step, as in torch's fused optimizers and its ``GradScaler``:

* ``found_inf``, a 1-element tensor: any value but 0 (also NaN) leaves parameters, moments and step counts unchanged bit for bit.
* ``grad_scale``, a 1-element tensor: gradients are divided by it. The values of ``.grad`` after the step are undefined.

torch 2.13 supports this only for fused optimizers, only if ``found_inf`` is 0-dim (else Adam raises) and exactly 1.0 (with 2.0
or NaN the step is taken), and not in the first step of SGD with momentum (the buffer stays uninitialised). Its fused CPU
kernels also pair parameter and gradient elements by memory position, so a channels-last weight with a contiguous gradient is
updated wrongly without an error. ``make_skippable`` corrects all of this with torch's step hooks, for any optimizer.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.errors import ConfigError, Problem
from unisono.optim import kernels

O = TypeVar("O", bound=Optimizer)  # noqa: E741


def make_skippable(optimizer: O) -> O:
    """Make the optimizer's ``step`` obey its attributes ``found_inf`` and ``grad_scale``, and return the optimizer.

    ``found_inf`` is a 1-element tensor; any value but 0 skips the step. ``grad_scale`` is a 1-element tensor that divides the
    gradients. Call this once per optimizer. torch's kernel skips fused parameter groups. Without a fused kernel, parameters
    and state are copied before a step with ``found_inf`` and selected after it, which costs the memory of the copy. State
    that a skipped step created is deleted, which reads the flag on the host in that step; ``build_optimizer`` creates all
    state in advance. Gradients of a closure see neither attribute.

    Raises:
        ConfigError: In a step with ``found_inf``: the state has a value that is no tensor.
    """
    hooks = _SkipHooks()
    optimizer.register_step_pre_hook(hooks.before)
    optimizer.register_step_post_hook(hooks.after)
    return optimizer


class _SkipHooks:
    """Step hooks that prepare a step and restore the attributes, gradients and skipped state after it."""

    def __init__(self) -> None:
        self._attributes: dict[str, Tensor] = {}
        self._grads: list[tuple[nn.Parameter, Tensor]] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._stateless: list[nn.Parameter] = []

    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        attributes = {name: getattr(optimizer, name, None) for name in ("found_inf", "grad_scale")}
        self._attributes = {name: value for name, value in attributes.items() if value is not None}
        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._grads = _match_layouts(params)
        found_inf, grad_scale = self._attributes.get("found_inf"), self._attributes.get("grad_scale")
        if found_inf is not None:
            self._stateless = [p for p in params if not optimizer.state.get(p)]
        if all(group.get("fused") for group in optimizer.param_groups):
            if found_inf is not None:
                setattr(optimizer, "found_inf", found_inf.reshape(()).ne(0).float())  # noqa: B010
            if grad_scale is not None:
                setattr(optimizer, "grad_scale", grad_scale.reshape(()).float())  # noqa: B010
            return
        for name in self._attributes:
            setattr(optimizer, name, None)
        if grad_scale is not None and params:
            kernels.divide_([cast(Tensor, p.grad) for p in params], grad_scale.reshape(()).to(params[0].device))
        if found_inf is not None:
            mutable = [t for p in params for t in (p.detach(), *_state(optimizer, p))]
            self._copies = [(tensor, tensor.clone()) for tensor in mutable]

    def after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if "found_inf" in self._attributes:
            skip = self._attributes["found_inf"].reshape(()).ne(0)
            for now, earlier in self._copies:
                now.copy_(torch.where(skip.to(now.device), earlier, now))
            created = [p for p in self._stateless if optimizer.state.get(p)]
            if created and bool(skip):
                for parameter in created:
                    del optimizer.state[parameter]
        for name, value in self._attributes.items():
            setattr(optimizer, name, value)
        for parameter, grad in self._grads:
            parameter.grad = grad
        self._attributes, self._grads, self._copies, self._stateless = {}, [], [], []


def _state(optimizer: Optimizer, parameter: nn.Parameter) -> list[Tensor]:
    """The tensors of a parameter's state, empty before they are created."""
    tensors: list[Tensor] = []
    for name, value in optimizer.state.get(parameter, {}).items():
        if not isinstance(value, Tensor):
            raise ConfigError(non_tensor_state(optimizer, name, value))
        tensors.append(value)
    return tensors


def non_tensor_state(optimizer: Optimizer, name: str, value: object) -> Problem:
    """The problem of an optimizer whose state has a value that is no tensor."""
    kind = type(optimizer).__name__
    return Problem(
        given=f"optimizer {kind} keeps its state {name!r} as {type(value).__name__}",
        rule="all state is tensors, so that a step can be skipped on the device and the state be saved without pickle",
        consequence="a skipped step would change it",
        nearest="one of torch's SGD, Adam, AdamW, RMSprop, Adagrad, NAdam, RAdam, or unisono.optim.build_optimizer",
    )


def _match_layouts(params: list[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
    """Give each parameter a gradient with the parameter's strides; return the replaced gradients."""
    replaced: list[tuple[nn.Parameter, Tensor]] = []
    for parameter in params:
        grad = cast(Tensor, parameter.grad)
        if grad.stride() != parameter.stride() and _used_strides(grad) != _used_strides(parameter):
            replaced.append((parameter, grad))
            parameter.grad = torch.empty_like(parameter, dtype=grad.dtype).copy_(grad)
    return replaced


def _used_strides(tensor: Tensor) -> list[int]:
    """Strides of the dims of more than one element; the others have no meaning."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]
