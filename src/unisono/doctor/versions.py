"""Versions that do not fit each other."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, version
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.version import Version

from unisono.doctor.check import Check, judged

# packages with compiled parts that fit one release of torch
_COMPANIONS: Final = ("torchvision", "torchaudio")
# the oldest driver of each CUDA release (NVIDIA's compatibility table, minor versions are compatible)
_DRIVERS: Final = {"11": "450.80", "12": "525.60", "13": "580.65"}


def check_versions() -> Iterator[Check]:
    """VER01 to VER03."""
    import torch

    cuda: str | None = torch.version.cuda
    built = f"CUDA {cuda}" if cuda else f"ROCm {torch.version.hip}" if torch.version.hip else "the CPU"
    yield judged(
        "VER01", "Python and torch", f"Python {platform.python_version()}, torch {torch.__version__} for {built}"
    )
    yield _companions(torch.__version__)
    if cuda:
        yield _driver(cuda)


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


def _driver(cuda: str) -> Check:
    title = "driver of the devices"
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        driver = str(nvml.nvmlSystemGetDriverVersion())
    except Exception as error:  # each binding and driver has errors of its own
        return judged("VER03", title, f"not known: {type(error).__name__}: {error}", warning="pip install nvidia-ml-py")
    oldest = _DRIVERS.get(cuda.partition(".")[0], "0")
    is_old = Version(driver) < Version(oldest)
    cure = f"CUDA {cuda} wants a driver of {oldest} or later: a newer driver, or a torch built for an older CUDA"
    return judged("VER03", title, f"{driver} for CUDA {cuda}", failure=cure if is_old else "")
