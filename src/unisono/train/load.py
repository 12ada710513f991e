"""Loads a trained model from its run's folder, for evaluation, generation and export."""

from __future__ import annotations

import logging
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from unisono.checkpoint import CheckpointReader, find_latest, open_checkpoint, verify
from unisono.data.tokens.tokenizer import Tokenizer
from unisono.dist import World
from unisono.errors import CheckpointError, PlanError
from unisono.models.quantized_model import stored_layers
from unisono.models.quantized_torchao import computed_by_torchao, torchao_row
from unisono.parallel.deferred_init import deferred_init
from unisono.storage.limits import MAX_UNCOUNTED_LAYERS
from unisono.storage.run_folder import CHECKPOINTS_FOLDER, RUN_FILE
from unisono.train.build import build_model
from unisono.train.config import RunConfig
from unisono.train.whole_model import saved_names, tensor_reader


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
    config = _without_weights(config)
    if isinstance(config.components.model, str) and not config.model.pretrained:  # the others are not of the folder
        tensor_reader(empty_model(config, tokenizer), snapshot)  # wrong sizes are found before they take memory
    model = build_model(config, tokenizer)
    if config.quantize.backend == "torchao":
        layers, device = stored_layers(model), torch.device("cpu")
        if computed_by_torchao(layers, device)[1]:
            logging.getLogger("unisono").warning("%s", torchao_row(layers, device))
    read = tensor_reader(model, snapshot)
    saved = saved_names(model)
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if saved[name] == name:  # the other names of a tied parameter are the same memory
                read(name, tensor.detach())
    return model.eval()


def empty_model(config: RunConfig, tokenizer: Tokenizer | None) -> nn.Module:
    """The model on the meta device, to be read a tensor at a time; with values if its construction reads them."""
    build = partial(build_model, _without_weights(config), tokenizer)
    try:
        return deferred_init(build).model
    except PlanError:
        return build()


def _without_weights(config: RunConfig) -> RunConfig:
    """The configuration without the weights that the run began with: the checkpoint has those that came of them."""
    return replace(config, model=replace(config.model, weights=""))


def open_run_checkpoint(config: RunConfig, world: World, checkpoint: str | None) -> CheckpointReader:
    """The newest good checkpoint of a run, or the one named. Raises CheckpointError when there is none."""
    root = Path(config.run.dir) / CHECKPOINTS_FOLDER
    path = Path(checkpoint) if checkpoint else find_latest(root, world, quarantine=False)
    if path is None:
        raise CheckpointError(
            given=f"run folder {config.run.dir!r}",
            rule=f"a trained model is in a committed checkpoint under {root}",
            consequence="there is no model to load",
            nearest="train first: unisono train --set " + shlex.quote(f"run.dir={config.run.dir}"),
        )
    if checkpoint and (problems := verify(path)):
        raise CheckpointError(*problems)
    snapshot = open_checkpoint(path)
    layers, tensors = config.model.num_layers, len(snapshot.names())
    if layers > max(MAX_UNCOUNTED_LAYERS, tensors):  # a block takes memory and time also without values
        raise CheckpointError(
            given=f"run folder {config.run.dir!r}, whose {RUN_FILE} has model.num_layers {layers} for {tensors} saved tensors",
            rule="the weights of every block are in the checkpoint",
            consequence="nothing was loaded",
            nearest=f"the {RUN_FILE} that the run was started with",
        )
    return snapshot
