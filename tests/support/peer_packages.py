"""Packages of an environment of ``tests/peers/venvs.sh`` that the tests' own interpreter imports."""

from __future__ import annotations

import subprocess


def folder_of_packages(python: str) -> str:
    """The folder from which an interpreter imports installed packages, for PYTHONPATH."""
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
