"""Starts processes on this host and answers for them. Imports no torch; ``launch`` itself is loaded when first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.launch.options import LaunchOptions
from unisono.lazy import lazily

if TYPE_CHECKING:
    from unisono.launch.local import launch

__all__ = ["LaunchOptions", "launch"]

__getattr__, __dir__ = lazily(__name__, {"launch": "local"})
