"""Programs that some tests need. CI names those that are there in UNISONO_TESTS_EXPECT, and no test may skip for want of one."""

from __future__ import annotations

import os
import shutil

import pytest


def missing(*names: str) -> list[str]:
    """Which of these programs are not installed. Fails where one of them is expected."""
    path = f"{os.environ['PATH']}{os.pathsep}/usr/sbin"
    absent = [name for name in names if shutil.which(name, path=path) is None]
    if broken := sorted(set(absent) & set(os.environ.get("UNISONO_TESTS_EXPECT", "").split())):
        pytest.fail(f"UNISONO_TESTS_EXPECT promises {', '.join(broken)}, and there is none", pytrace=False)
    return absent
