"""Versions that do not fit each other."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.version import Version

from unisono.device.health import nvidia_driver_version
from unisono.doctor.check import Check, judged

# packages with compiled parts that fit one release of torch
_COMPANIONS: Final = ("torchvision", "torchaudio")
# the oldest driver of each CUDA release: minor versions are compatible
# (https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html, table 1)
_DRIVERS: Final = {"11": "450.80", "12": "525.60", "13": "580.65"}
# CUDA releases that torch 2.12 and later are built for, the newest stable one first
# (pytorch's .github/scripts/generate_binary_build_matrix.py: 12.6, 13.0, and 13.2 as an experiment)
_WHEELS: Final = (("13", "cu130"), ("12", "cu126"))
_DRIVER_FILE: Final = Path("/proc/driver/nvidia/version")


def check_versions() -> Iterator[Check]:
    """VER01 to VER03."""
    import torch

    from unisono.device.torch_adapters import cuda_release, toolkit

    cuda = cuda_release()
    yield judged(
        "VER01", "Python and torch", f"Python {platform.python_version()}, torch {torch.__version__} for {toolkit()}"
    )
    yield _companions(torch.__version__)
    if driver := driver_version():
        yield _driver(cuda, driver)
    elif cuda:
        yield judged(
            "VER03", "driver of the devices", "not known", warning="pip install nvidia-ml-py, or the driver itself"
        )


def _companions(torch_version: str) -> Check:
    wrong: list[str] = []
    for name in _COMPANIONS:
        try:
            required = [Requirement(text) for text in distribution(name).requires or ()]
        except PackageNotFoundError:
            continue
        release = Version(torch_version).public
        wrong += [
            f"{name} {version(name)} wants {one}"
            for one in required
            if one.name == "torch" and one.marker is None and not one.specifier.contains(release, prereleases=True)
        ]
    cure = f"pip install --upgrade {' '.join(text.split()[0] for text in wrong)}, of the index that torch came from"
    return judged(
        "VER02",
        "packages built for torch",
        "; ".join(wrong) or "none is of another release",
        failure=cure if wrong else "",
    )


def _driver(cuda: str | None, driver: str) -> Check:
    title, command = "driver of the devices", install_command(driver)
    cure = (
        f"{command}, or a newer driver"
        if command
        else f"a driver of {_DRIVERS['12']} or later: no torch is built for older ones"
    )
    if not cuda:
        return judged("VER03", title, f"{driver}, and a torch without CUDA", warning=cure)
    oldest = _DRIVERS.get(cuda.partition(".")[0], "0")
    is_old = Version(driver) < Version(oldest)
    evidence = f"{driver} for CUDA {cuda}"
    return judged(
        "VER03",
        title,
        f"{evidence}, which wants {oldest} or later" if is_old else evidence,
        failure=cure if is_old else "",
    )


def driver_version() -> str:
    """Version of the NVIDIA driver of this host; empty if there is none, or it does not say."""
    try:
        found = re.search(
            r"Kernel Module(?: for \S+)?\s+([0-9]+(?:\.[0-9]+)+)", _DRIVER_FILE.read_text(errors="replace")
        )
    except OSError:
        found = None
    if found is not None:
        return found.group(1)
    return nvidia_driver_version()


def install_command(driver: str) -> str:
    """The command that installs a torch which an NVIDIA driver of that version can run; empty if none is built for it."""
    for major, wheel in _WHEELS:
        if Version(driver) >= Version(_DRIVERS[major]):
            return f"pip install --upgrade torch --index-url https://download.pytorch.org/whl/{wheel}"
    return ""
