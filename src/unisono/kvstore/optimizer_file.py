"""Optimizer state of a store in one safetensors file: the tensors as ``state_dict`` names them, and the optimizer's kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from unisono.errors import CheckpointError, ConfigError
from unisono.storage.files import require_regular, write_atomically

OPTIMIZER = "optim/"
_KIND = "unisono_optimizer"


def write_optimizer_file(file: Path, kind: str, state: Mapping[str, Tensor]) -> None:
    """Write the optimizer's tensors of ``state`` atomically. Raises ConfigError where ``file`` cannot be written."""
    tensors = {name: tensor.contiguous().cpu() for name, tensor in state.items() if name.startswith(OPTIMIZER)}
    try:
        write_atomically(file, save(tensors, {_KIND: kind}))
    except OSError as error:
        raise ConfigError(
            given=f"{file} cannot be written ({error.strerror})",
            rule="optimizer states are saved in a file of a folder that exists",
            consequence="nothing was saved",
            nearest="a path in a folder that this user may write to",
        ) from error


def read_optimizer_file(file: Path, kind: str) -> dict[str, Tensor]:
    """The tensors of a file of ``write_optimizer_file``. Raises CheckpointError for any other file, and for another kind of
    optimizer than ``kind``."""
    try:
        require_regular(file)
        with safe_open(file, "pt") as opened:
            saved = (opened.metadata() or {}).get(_KIND)
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise _unusable(f"{file} cannot be read ({error})", "a file of save_optimizer_states", "its path") from error
    if saved is None:
        raise _unusable(f"{file}, which names no optimizer", "a file of save_optimizer_states", "its path")
    if saved != kind:
        rule = f"this store's optimizer is {kind!r}"
        raise _unusable(f"{file} with the state of {saved!r}", rule, f"set_optimizer({saved!r}, ...) before")
    return tensors


def _unusable(given: str, rule: str, nearest: str) -> CheckpointError:
    return CheckpointError(given=given, rule=rule, consequence="nothing was loaded", nearest=nearest)
