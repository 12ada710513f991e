"""Changes to the input, the forward pass and the output of a module. Only ``wrap_forward`` replaces a forward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from unisono.models.loss import LazyLogits


def map_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Pass ``change(x)`` to ``module`` instead of its first argument ``x``."""

    def hook(
        _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, kwargs | {name: change(kwargs[name])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def map_output(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Let ``module`` return ``change(y)`` instead of its output ``y``, or of the first output of several."""

    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    module.register_forward_hook(hook)


def wrap_forward(module: nn.Module, wrapper: Callable[..., Any]) -> None:
    """Let ``module`` compute ``wrapper(forward, *args, **kwargs)``, where ``forward`` is its forward pass so far."""
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return wrapper(inner, *args, **kwargs)

    module.forward = forward


def replace_in_logits(model: nn.Module, field: str, by_layer: Mapping[Any, Any]) -> None:
    """Set ``field`` of the ``LazyLogits`` that ``model`` returns to the value of its layer in ``by_layer``.

    Args:
        model: The model, which gets a forward hook.
        field: Name of a field of ``LazyLogits``.
        by_layer: Values by the layer whose weight the logits may have; logits of another weight stay as they are.
    """

    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, LazyLogits):
            for layer, value in by_layer.items():
                if output.weight is layer.weight:
                    return output._replace(**{field: value})
        return output

    if by_layer:
        model.register_forward_hook(hook)
