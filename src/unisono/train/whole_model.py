"""The whole model of a run whose ranks may have parts of it: its tensors in a checkpoint, and its export."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unisono.checkpoint import CheckpointReader, open_checkpoint, verify
from unisono.errors import CheckpointError
from unisono.interop.huggingface import export
from unisono.parallel.sharding import GlobalParameterSpec
from unisono.train.distill_options import PROJECTIONS


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy of the model without values, on the meta device; tied tensors stay tied. It takes no memory of tensors."""
    return empty_copy(model, torch.device("meta"))


def empty_copy(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy of the model on ``device``, whose values are not set; tied tensors stay tied."""
    tensors: dict[int, Tensor] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device=device)
        tensors[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        tensors[id(buffer)] = torch.empty_like(buffer, device=device)
    memo: dict[int, Any] = dict(tensors)
    return copy.deepcopy(model, memo)


def full_copy(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy of the model and its values on ``device``."""
    return copy.deepcopy(model).to(device)


def export_model(
    model: nn.Module, folder: Path, *, checkpoint: Path | None, max_length: int, tokenizer: Path | None
) -> Path:
    """Write the whole model in the Hugging Face layout (``interop.export``), from ``checkpoint`` or with its own values.

    Args:
        model: The unsharded model; with a checkpoint it may be on the meta device.
        max_length: Sequence length of the training, in tokens.
        tokenizer: Hugging Face tokenizer.json, or its folder.

    Raises:
        CheckpointError: The checkpoint is damaged or of another model, or the folder cannot be written.
    """
    read = None
    if checkpoint is not None:
        if problems := verify(checkpoint):
            raise CheckpointError(*problems)
        read = tensor_reader(model, open_checkpoint(checkpoint))
    return export(model, folder, max_length=max_length, end_of_document=None, tokenizer=tokenizer, read=read)


def tensor_reader(model: nn.Module, snapshot: CheckpointReader) -> Callable[[str, Tensor], None]:
    """``read(name, out)`` copies the saved tensor ``name`` of the model into ``out``, averaged if the run kept averages.

    ``model`` may be on the meta device. Raises CheckpointError if the checkpoint holds another model.
    """
    # the layers that project features for a teacher are of use in training alone
    names = {name for name in snapshot.names() if f"/{PROJECTIONS}." not in name}
    first_names = saved_names(model)
    targets = {f"model/{first_names[name]}": t for name, t in model.state_dict(keep_vars=True).items()}
    wrong = [
        f"{name.removeprefix('model/')} is missing or of another shape"
        for name, t in targets.items()
        if name not in names or tuple(snapshot.spec(name).shape) != tuple(t.shape)
    ]
    wrong += [
        f"{name.removeprefix('model/')} is in the checkpoint only"
        for name in sorted(names)
        if name.startswith("model/") and name not in targets
    ]
    if wrong:
        raise CheckpointError(
            given=f"the checkpoint {snapshot.path} for {type(model).__name__}: {wrong[0]}"
            + (f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""),
            rule="the model has the names and shapes of the one that was saved",
            consequence="nothing was loaded",
            nearest="the configuration in the run's own folder, or for the run of a script its own --model",
        )

    def read(name: str, out: Tensor) -> None:
        name = first_names[name]
        saved = f"ema/{name}" if f"ema/{name}" in names else f"model/{name}"
        if (snapshot.spec(saved).dtype, out.dtype) == (torch.bfloat16, torch.float32):
            out.copy_(snapshot.tensor(saved))  # by precision.dtype_rules; every bf16 number is one of fp32
        else:
            snapshot.read_into(saved, out)

    return read


def saved_names(model: nn.Module) -> dict[str, str]:
    """The name in a checkpoint of each tensor of ``model``: a parameter with several names is saved under its first one."""
    first_names = GlobalParameterSpec.from_model(model).first_names
    return {name: first_names.get(name, name) for name in model.state_dict(keep_vars=True)}
