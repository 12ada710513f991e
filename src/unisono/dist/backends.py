"""Back ends of ``torch.distributed``: which one carries the collectives of a device, and those that other packages register.

An entry point of the group ``unisono.dist_backends``, named like its back end, is a function without arguments that makes
``torch.distributed`` know that name, as ``torch.distributed.Backend.register_backend`` does. It is called in each rank that
uses the back end, before the ranks connect. A package that registers its back end when torch is imported, as torch_npu does
with HCCL, needs none.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import Final

import torch.distributed as dist

from unisono.device.torch_adapters import adapter_for
from unisono.errors import LaunchError, nearest_name

BACKEND_GROUP: Final = "unisono.dist_backends"
AUTO: Final = "auto"  # the back end that the adapter of the device names

# names of torch that carry nothing
_NO_BACKENDS: Final = ("undefined", "fake")
# torch's own, whose errors are known
_BUILT_IN: Final = ("gloo", "nccl", "xccl")
# how torch, and process groups of other packages, say that an operation is none of theirs
_UNSUPPORTED: Final = (
    "does not support",
    "not support",
    "not implemented",
    "No backend type associated with device type",
)


def collective_backend(device_type: str, chosen: str = AUTO) -> str:
    """The name of the back end for tensors of ``device_type``, which ``torch.distributed`` knows on return.

    Args:
        device_type: Device type of the tensors.
        chosen: A name, in lower case; ``auto`` is the one that the adapter of the device names.

    Raises:
        LaunchError: Nothing registers that name, the function that should fails, or the back end is not for this device.
    """
    name = _own_backend(device_type) if chosen == AUTO else chosen
    entries = {entry.name: entry for entry in entry_points(group=BACKEND_GROUP)}
    if name in entries:
        _register(entries[name])
    known = [each for each in dist.Backend.backend_list if each not in _NO_BACKENDS]
    if name not in known:
        raise LaunchError(
            given=f"collective back end {name!r}",
            rule=f"torch.distributed knows it ({', '.join(known)}), or an installed entry point of the group {BACKEND_GROUP!r} "
            f"registers it ({', '.join(sorted(entries)) or 'none is installed'})",
            consequence="the ranks could not exchange anything, so nothing was started",
            nearest=nearest_name(name, [*known, *entries]) or f"launch.collective_backend={AUTO}",
        )
    devices = dist.Backend.backend_capability.get(name, [device_type])
    if device_type not in devices:
        raise LaunchError(
            given=f"collective back end {name!r} for tensors on {device_type}",
            rule=f"it exchanges tensors on {', '.join(devices)}",
            consequence="the ranks could not exchange gradients, so nothing was started",
            nearest=f"launch.collective_backend={AUTO}, or a device it is for",
        )
    return name


def _own_backend(device_type: str) -> str:
    try:
        return adapter_for(device_type).collective_backend()
    except (ValueError, RuntimeError) as error:  # torch has no default for this type, or no such type
        raise LaunchError(
            given=f"collective back end {AUTO!r} for tensors on {device_type}: {error}",
            rule="the adapter of the device, or the package that brings the device, names its back end",
            consequence="the ranks could not exchange anything, so nothing was started",
            nearest="launch.collective_backend with the name of a back end for it, or plan.device=cpu",
        ) from error


def _register(entry: EntryPoint) -> None:
    """Call the function of ``entry``. Raises LaunchError where it cannot be imported, fails, or registers another name."""
    package = entry.dist.name if entry.dist is not None else "an unnamed package"
    problem = ""
    try:
        if entry.name not in dist.Backend.backend_list:
            entry.load()()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if not problem and entry.name not in dist.Backend.backend_list:
        problem = f"after the call torch.distributed knows no back end {entry.name!r}"
    if problem:
        raise LaunchError(
            given=f"collective back end {entry.name!r}, entry point {entry.value!r} of {package}: {problem}",
            rule="an entry point of the group 'unisono.dist_backends' is a function that registers the back end of its name",
            consequence="the ranks could not exchange anything, so nothing was started",
            nearest=f"update or reinstall {package}, or launch.collective_backend={AUTO}",
        )


@contextmanager
def explain_creation(name: str, device_type: str) -> Generator[None]:
    """Turn an error of a foreign back end that creates its process group into a LaunchError; those of torch's own pass."""
    try:
        yield
    except Exception as error:
        if name in _BUILT_IN:
            raise
        raise LaunchError(
            given=f"collective back end {name!r} for tensors on {device_type} made no process group: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            rule="a back end connects the ranks of a job when it creates its process group",
            consequence="the ranks could not exchange anything, so nothing was started",
            nearest=f"see the documentation of the package that registers {name!r}, or launch.collective_backend={AUTO}",
        ) from error


def lacks_operation(names: Iterable[str], error: Exception) -> str:
    """The first of the back ends ``names`` that is not torch's own, if ``error`` says that it lacks an operation; else empty."""
    is_missing = isinstance(error, NotImplementedError) or any(word in str(error) for word in _UNSUPPORTED)
    return next((name for name in names if name not in _BUILT_IN), "") if is_missing else ""
