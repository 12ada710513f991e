"""Generic machinery of the typed run configuration; it knows no option class.

Declare with ``option``, read with ``load``, and look at the outcome with ``render_origins``, ``diff``, ``explain``,
``schema`` and ``starter``. Every ``options`` module imports this package for ``option``; the rest loads on first use.
"""

from typing import TYPE_CHECKING

from unisono.config.fields import option as option
from unisono.lazy import lazily

if TYPE_CHECKING:
    from unisono.config.guide import explain as explain
    from unisono.config.guide import starter as starter
    from unisono.config.json_schema import schema as schema
    from unisono.config.resolved import Difference as Difference
    from unisono.config.resolved import Resolved as Resolved
    from unisono.config.resolved import diff as diff
    from unisono.config.resolved import render_origins as render_origins
    from unisono.config.walk import load as load

_HOMES = {
    "Difference": "resolved",
    "Resolved": "resolved",
    "diff": "resolved",
    "explain": "guide",
    "load": "walk",
    "render_origins": "resolved",
    "schema": "json_schema",
    "starter": "guide",
}

__getattr__, __dir__ = lazily(__name__, _HOMES)
