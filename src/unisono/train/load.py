"""A trained model back from its run's folder, for evaluation, generation and export."""

from __future__ import annotations

import shlex
from pathlib import Path

import torch
from torch import nn

from unisono.data.tokenizer import Tokenizer
from unisono.dist import World
from unisono.errors import CheckpointError, Problem
from unisono.train.build import build_model
from unisono.train.checkpoint import find_latest, open_checkpoint, verify
from unisono.train.config import RunConfig


def load_model(
    config: RunConfig, tokenizer: Tokenizer | None, world: World, checkpoint: str | None
) -> tuple[nn.Module, int]:
    """(model, step) from the newest good checkpoint, or the one named; the averaged weights where the run kept them.

    Raises CheckpointError when there is none or it holds another model.
    """
    root = Path(config.run.dir) / "checkpoints"
    path = Path(checkpoint) if checkpoint else find_latest(root, world)
    if path is None:
        raise CheckpointError(
            Problem(
                given=f"run folder {config.run.dir!r}",
                rule=f"a trained model is in a committed checkpoint under {root}",
                consequence="there is no model to load",
                nearest="train first: unisono train --set " + shlex.quote(f"run.dir={config.run.dir}"),
            )
        )
    if checkpoint and (problems := verify(path)):
        raise CheckpointError(*problems)
    snapshot = open_checkpoint(path)
    model = build_model(config, tokenizer)
    names = set(snapshot.names())
    targets = {f"model/{name}": tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    wrong = [
        name for name, t in targets.items() if name not in names or tuple(snapshot.spec(name).shape) != tuple(t.shape)
    ]
    if wrong:
        raise CheckpointError(
            Problem(
                given=f"the checkpoint {path} for {type(model).__name__}: {wrong[0].removeprefix('model/')} is missing "
                "or of another shape" + (f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""),
                rule="the configuration describes the model that was saved",
                consequence="nothing was loaded",
                nearest="use the configuration in the run's own folder",
            )
        )
    with torch.no_grad():
        for name, tensor in targets.items():
            averaged = name.replace("model/", "ema/", 1)
            snapshot.read_into(averaged if averaged in names else name, tensor.detach())
    return model.eval(), snapshot.step
