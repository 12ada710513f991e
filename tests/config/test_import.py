"""Options modules are imported by every ``--help``: declaring must load nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

import unisono.config

SCRIPT = """
import sys
import unisono.config
from unisono.config import option
heavy = {"torch", "numpy", "msgspec", "tomli_w", "tomllib", "hashlib", "json", "unisono.config.loading"} & set(sys.modules)
print(sorted(heavy))
from unisono.config import load_config, schema
print(sorted({"torch", "numpy"} & set(sys.modules)))
"""


def test_declaring_loads_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "[]"]


def test_every_public_name_is_there():
    for name in (
        "Difference",
        "Resolved",
        "diff",
        "explain",
        "load_config",
        "option",
        "render_origins",
        "schema",
        "starter",
    ):
        assert getattr(unisono.config, name).__name__ == name
    with pytest.raises(AttributeError, match=r"^No unisono\.config attribute lode$"):
        unisono.config.lode  # noqa: B018
