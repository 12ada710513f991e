"""LAMB and LARS: optimizers that scale each layer's step by the norm of its weight.

Both are ordinary ``torch.optim.Optimizer`` objects for any loop, also with ``GradScaler``. They use torch's fused Adam and SGD
kernels if available, and apply the layer-wise rate around them. Norms are those of the whole tensor, in float32 (float64 for
float64); state has the gradient's dtype. A group with ``adapt=False`` has no layer-wise rate.

LAMB's phi is the identity, as in the authors' code. There is no AMSGrad, and closures do not see scaled gradients.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.optim import kernels
from unisono.optim.skippable import make_skippable
from unisono.optim.state import ADAM_STATE, MOMENTUM_STATE, create_state

# Scratch memory of one update. On a CPU it fits in the cache between the passes (a third less time than all tensors at
# once); on an accelerator it is large, so that few kernels are launched.
_CPU_BUCKET_BYTES = 1 << 20
_DEVICE_BUCKET_BYTES = 1 << 28

Params = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
Group = Mapping[str, Any]
# (shards of parameters, norms [n] of tensors of their shapes) -> norms [n] of the global tensors
GlobalNorms = Callable[[Sequence[nn.Parameter], Tensor], Tensor]


class _LayerwiseOptimizer(Optimizer):
    """The part that LAMB and LARS share; ``_update`` updates parameters of one group, device and dtype."""

    _momentum_kernel: bool

    def __init__(self, params: Params, defaults: dict[str, Any], global_norms: GlobalNorms | None) -> None:
        super().__init__(params, defaults)
        self._global_norms = global_norms
        self._step_supports_amp_scaling = True  # read by GradScaler
        make_skippable(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in every torch optimizer; chooses the kernel of the group, and creates its state."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["fused"] = kernels.fused_supported(group["params"], momentum_kernel=self._momentum_kernel)
        for parameter in group["params"]:
            create_state(self, group, parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; see ``skippable`` for ``found_inf`` and ``grad_scale``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for bucket in _buckets(group["params"], together=self._global_norms is not None):
                self._update(group, bucket)
        return loss

    @abstractmethod
    def _update(self, group: Group, params: list[nn.Parameter]) -> None:
        """Update ``params``, which have one device and dtype and gradients."""

    def _attribute(self, name: str, device: torch.device) -> Tensor | None:
        value: Tensor | None = getattr(self, name, None)
        return None if value is None else value.to(device, non_blocking=True)


class Lamb(_LayerwiseOptimizer):
    """The LAMB optimizer: Adam with a layer-wise rate.

    ``r = mean_hat / (sqrt(square_hat) + eps)``, ``u = r + weight_decay * w``, ``w -= lr * |w| / |u| * u``. The ratio is 1 if
    either norm is 0 or the group has ``adapt=False``. Weight decay is decoupled and part of the adapted update.

    Args:
        params: Parameters, or groups: dicts with ``params`` that may override the arguments up to ``adapt``.
        lr: Learning rate.
        betas: Decay of the running means of the gradient and of its square.
        eps: Added to the root of the second moment.
        weight_decay: Multiple of the weight that is added to Adam's direction, before the layer-wise ratio.
        adapt: Use the layer-wise ratio; a group may override it.
        global_norms: If parameters are shards: maps them and their norms [n] to the norms [n] of the global parameters.

    Source:
        You et al. 2020 (arXiv:1904.00962), algorithm 2.
    """

    _momentum_kernel = False

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adapt: bool = True,
        global_norms: GlobalNorms | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": adapt}
        super().__init__(params, defaults | {"state": ADAM_STATE}, global_norms)

    def _update(self, group: Group, params: list[nn.Parameter]) -> None:
        found_inf = self._attribute("found_inf", params[0].device)
        states = [create_state(self, group, p) for p in params]
        updates = kernels.adam_directions(
            _grads(params),
            states,
            betas=group["betas"],
            eps=group["eps"],
            fused=group["fused"],
            grad_scale=self._attribute("grad_scale", params[0].device),
            found_inf=found_inf,
        )
        if group["weight_decay"]:
            kernels.add_(updates, params, alpha=group["weight_decay"])
        rates = torch.full((len(params),), -group["lr"], dtype=_reduction_dtype(params), device=params[0].device)
        if group["adapt"]:
            weight_norms, update_norms = _norms(params, updates, self._global_norms)
            rates *= torch.where((weight_norms > 0) & (update_norms > 0), weight_norms / update_norms, 1.0)
        if found_inf is not None:
            # a skipped update is weight_decay * w + 0.0; times -0.0 it is a zero that, added to w, keeps even w = -0.0
            rates = torch.where(found_inf != 0, -0.0, rates)
        kernels.add_scaled_(params, updates, rates.unbind())


class Lars(_LayerwiseOptimizer):
    """The LARS optimizer: SGD with momentum and a layer-wise rate.

    ``v = momentum * v + lr * local * (g + weight_decay * w)``, ``w -= v`` with
    ``local = trust_coefficient * |w| / (|g| + weight_decay * |w|)``; local is 1 if ``|w|`` or ``|g|`` is 0 or the group has
    ``adapt=False``. The learning rate is inside the momentum, so a change of it affects new gradients only.

    Args:
        params: Parameters, or groups: dicts with ``params`` that may override the arguments up to ``adapt``.
        lr: Learning rate.
        momentum: Decay of the momentum buffer; 0 keeps no buffer.
        weight_decay: Multiple of the weight that is added to the gradient.
        trust_coefficient: Size of a step relative to the norm of the weight, at ``lr = 1`` without momentum.
        adapt: Use the layer-wise rate; a group may override it.
        global_norms: If parameters are shards: maps them and their norms [n] to the norms [n] of the global parameters.

    Source:
        You et al. 2017 (arXiv:1708.03888), algorithm 1.
    """

    _momentum_kernel = True

    def __init__(
        self,
        params: Params,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        adapt: bool = True,
        global_norms: GlobalNorms | None = None,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "adapt": adapt}
        state = MOMENTUM_STATE if momentum else ()
        super().__init__(params, defaults | {"trust_coefficient": trust_coefficient, "state": state}, global_norms)

    def _update(self, group: Group, params: list[nn.Parameter]) -> None:
        device, decay, grads = params[0].device, group["weight_decay"], _grads(params)
        grad_scale = self._attribute("grad_scale", device)
        rates = torch.full((len(params),), group["lr"], dtype=_reduction_dtype(params), device=device)
        if group["adapt"]:
            weight_norms, grad_norms = _norms(params, grads, self._global_norms)
            if grad_scale is not None:
                grad_norms = grad_norms / grad_scale
            local = group["trust_coefficient"] * weight_norms / (grad_norms + decay * weight_norms)
            rates *= torch.where((weight_norms > 0) & (grad_norms > 0), local, 1.0)
        updates = kernels.scaled(grads, (rates if grad_scale is None else rates / grad_scale).unbind())
        if decay:
            kernels.add_scaled_(updates, params, (decay * rates).unbind())
        states = [create_state(self, group, p) for p in params]
        kernels.momentum_step(
            params,
            updates,
            [state["momentum_buffer"] for state in states] if group["momentum"] else None,
            momentum=group["momentum"],
            fused=group["fused"],
            found_inf=self._attribute("found_inf", device),
        )


def _buckets(params: list[nn.Parameter], *, together: bool) -> Iterator[list[nn.Parameter]]:
    """Split the parameters with a gradient, in order, into buckets of one device and dtype and of bounded size.

    With ``together`` the size is unbounded, so that all ranks have the same buckets for shards of any size.
    """
    bucket: list[nn.Parameter] = []
    size_bytes = 0
    for p in params:
        if p.grad is None:
            continue
        limit_bytes = _CPU_BUCKET_BYTES if p.device.type == "cpu" else _DEVICE_BUCKET_BYTES
        same = bucket and (bucket[0].device, bucket[0].dtype) == (p.device, p.dtype)
        if bucket and (not same or (size_bytes + p.nbytes > limit_bytes and not together)):
            yield bucket
            bucket, size_bytes = [], 0
        bucket.append(p)
        size_bytes += p.nbytes
    if bucket:
        yield bucket


def _grads(params: list[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


def _norms(
    params: list[nn.Parameter], updates: list[Tensor], global_norms: GlobalNorms | None
) -> tuple[Tensor, Tensor]:
    """Norms of the parameters and of their updates or gradients, [len(params)] each."""
    dtype = _reduction_dtype(params)
    both = torch.stack([*kernels.norms(params, dtype), *kernels.norms(updates, dtype)])
    weights, others = (both if global_norms is None else global_norms([*params, *params], both)).chunk(2)
    return weights, others


def _reduction_dtype(tensors: list[Tensor] | list[nn.Parameter]) -> torch.dtype:
    return torch.promote_types(tensors[0].dtype, torch.float32)
