"""Where cut layers meet the rest of a model: what a module is given, and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def map_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """``module`` gets ``change(x)`` in place of its first argument."""

    def hook(
        _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, kwargs | {name: change(kwargs[name])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def map_output(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """``module`` returns ``change(y)`` in place of its output, or of the first one of several."""

    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    module.register_forward_hook(hook)
