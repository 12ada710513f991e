"""Programs, and what the system permits, that some tests need. CI names those that are there in UNISONO_TESTS_EXPECT, and no test
may skip for want of one."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def missing(*names: str) -> list[str]:
    """Which of these programs are not installed. Fails where one of them is expected."""
    path = f"{os.environ['PATH']}{os.pathsep}/usr/sbin"
    absent = [name for name in names if shutil.which(name, path=path) is None]
    if broken := sorted(set(absent) & _expected()):
        pytest.fail(f"UNISONO_TESTS_EXPECT promises {', '.join(broken)}, and there is none", pytrace=False)
    return absent


def skip_without(name: str, reason: str) -> NoReturn:
    """Skips the test, which needs what ``name`` stands for. Fails where that is expected."""
    if name in _expected():
        pytest.fail(f"UNISONO_TESTS_EXPECT promises {name}: {reason}", pytrace=False)
    pytest.skip(reason)


def _expected() -> set[str]:
    return set(os.environ.get("UNISONO_TESTS_EXPECT", "").split())


def peer(variable: str) -> str:
    """The interpreter that the environment variable names; skips the test where it names none."""
    if not os.environ.get(variable):
        pytest.skip(f"set {variable} to an interpreter with the package: nothing was compared")
    return os.environ[variable]
