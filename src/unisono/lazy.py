"""Names of a package that are imported when they are first used (PEP 562), so that looking at options imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of ``package``. ``homes`` says which of its modules each name lives in, and behind a colon
    what it is called there, if not the same. AttributeError for other names.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, attribute = homes[name].partition(":")
        return getattr(import_module(f"{package}.{module}"), attribute or name)

    return get, lambda: sorted({*homes, *getattr(sys.modules[package], "__all__", ())})
