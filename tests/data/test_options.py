"""Options and preparation work without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import unisono.data


@pytest.mark.parametrize("module", ["unisono.data", "unisono.data.options", "unisono.data.tokens.tokenized_cache"])
def test_no_torch_is_imported(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_is_there() -> None:
    assert {"DataOptions", "Loader", "TokenWindows", "prepare_corpus"} <= set(dir(unisono.data))
    for name in dir(unisono.data):
        assert getattr(unisono.data, name).__module__.startswith("unisono.data.")
    with pytest.raises(AttributeError, match=r"unisono\.data attribute nothing"):
        _ = unisono.data.nothing
