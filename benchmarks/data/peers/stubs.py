"""An empty torchvision: PyPI's does not load beside torch's CPU wheel, and streaming imports it for data sets not used here."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType


def without_torchvision() -> None:
    """Call before ``import streaming``."""
    names: dict[str, dict[str, object]] = {
        "torchvision": {},
        "torchvision.datasets": {"VisionDataset": object},
        "torchvision.transforms": {},
        "torchvision.transforms.functional": {"to_tensor": None},
    }
    for name, contents in names.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(contents)
        sys.modules[name] = module
