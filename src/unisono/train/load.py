"""Loads a trained model from its run's folder, for evaluation, generation and export."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from unisono.checkpoint import CheckpointReader, find_latest, open_checkpoint, verify
from unisono.data.tokens.tokenizer import Tokenizer
from unisono.dist import World
from unisono.errors import CheckpointError, PlanError
from unisono.parallel.deferred_init import deferred_init
from unisono.parallel.sharding import GlobalParameterSpec
from unisono.train.build import build_model
from unisono.train.config import RunConfig


def load_model(
    config: RunConfig, tokenizer: Tokenizer | None, world: World, checkpoint: str | None
) -> tuple[nn.Module, int]:
    """Load a run's trained model, with the averaged weights if the run kept them.

    Args:
        config: Configuration of the run; ``run.dir`` is its folder.
        tokenizer: Tokenizer that gives the size of the vocabulary; None for the user's own data.
        world: Ranks that agree on the newest checkpoint; all of them call this.
        checkpoint: Path of a checkpoint; None or empty means the newest good one in the run's folder.

    Returns:
        The unsharded model on the CPU in evaluation mode, and the step of its checkpoint.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, or it holds another model.
    """
    snapshot = open_run_checkpoint(config, world, checkpoint)
    return read_model(config, tokenizer, snapshot), snapshot.step


def read_model(config: RunConfig, tokenizer: Tokenizer | None, snapshot: CheckpointReader) -> nn.Module:
    """The whole model as it was saved, on the CPU. Raises CheckpointError when the checkpoint holds another model."""
    model = build_model(config, tokenizer)
    read = tensor_reader(model, snapshot)
    saved_names = _saved_names(model)
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if saved_names[name] == name:  # the other names of a tied parameter are the same memory
                read(name, tensor.detach())
    return model.eval()


def empty_model(config: RunConfig, tokenizer: Tokenizer | None) -> nn.Module:
    """The model on the meta device, to be read a tensor at a time; with values if its construction reads them."""
    build = partial(build_model, config, tokenizer)
    try:
        return deferred_init(build).model
    except PlanError:
        return build()


def open_run_checkpoint(config: RunConfig, world: World, checkpoint: str | None) -> CheckpointReader:
    """The newest good checkpoint of a run, or the one named. Raises CheckpointError when there is none."""
    root = Path(config.run.dir) / "checkpoints"
    path = Path(checkpoint) if checkpoint else find_latest(root, world)
    if path is None:
        raise CheckpointError(
            given=f"run folder {config.run.dir!r}",
            rule=f"a trained model is in a committed checkpoint under {root}",
            consequence="there is no model to load",
            nearest="train first: unisono train --set " + shlex.quote(f"run.dir={config.run.dir}"),
        )
    if checkpoint and (problems := verify(path)):
        raise CheckpointError(*problems)
    return open_checkpoint(path)


def tensor_reader(model: nn.Module, snapshot: CheckpointReader) -> Callable[[str, Tensor], None]:
    """``read(name, out)`` copies the saved tensor ``name`` of the model into ``out``, averaged if the run kept averages.

    ``model`` may be on the meta device. Raises CheckpointError if the checkpoint holds another model.
    """
    names, saved_names = set(snapshot.names()), _saved_names(model)
    targets = {f"model/{saved_names[name]}": t for name, t in model.state_dict(keep_vars=True).items()}
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
        name = saved_names[name]
        saved = f"ema/{name}" if f"ema/{name}" in names else f"model/{name}"
        if (snapshot.spec(saved).dtype, out.dtype) == (torch.bfloat16, torch.float32):
            out.copy_(snapshot.tensor(saved))  # by precision.dtype_rules; every bf16 number is one of fp32
        else:
            snapshot.read_into(saved, out)

    return read


def _saved_names(model: nn.Module) -> dict[str, str]:
    """The name in a checkpoint of each tensor of ``model``: a parameter with several names is saved under its first one."""
    first_names = GlobalParameterSpec.from_model(model).first_names
    return {name: first_names.get(name, name) for name in model.state_dict(keep_vars=True)}
