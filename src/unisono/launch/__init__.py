"""Starts processes on this host and answers for them. Imports no torch; ``launch`` itself is loaded when first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unisono.launch.options import LaunchOptions

if TYPE_CHECKING:
    from unisono.launch.local import launch

__all__ = ["LaunchOptions", "launch"]


def __getattr__(name: str) -> Any:
    if name == "launch":
        from unisono.launch.local import launch

        return launch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
