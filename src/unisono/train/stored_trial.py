"""A trial of a model that is to be trained with rounded numbers: whether its code can do with stored layers."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING

import torch
from torch import nn

from unisono.data.dataset import collated
from unisono.data.loading.loader import eval_batches
from unisono.errors import ConfigError
from unisono.models.quantized import AwareConv2d, AwareLinear, store
from unisono.models.quantized_model import store_layer
from unisono.models.weight_reads import refuse_reads
from unisono.tasks.model_names import MODELS
from unisono.train.callbacks import restored
from unisono.train.config import AUTO, RunConfig
from unisono.train.step import input_selector

if TYPE_CHECKING:
    from unisono.train.build import RunData


def checked_model(model: nn.Module, config: RunConfig, data: RunData) -> nn.Module:
    """The model; refused if it is the user's own and its code reads the weight of a rounded layer, which is not rounded there.

    A copy of the model with stored layers makes a pass over the first held-out sample, on the CPU.

    Args:
        model: The model that will be trained, on the CPU.
        config: Configuration of the run.
        data: Its data.

    Raises:
        ConfigError: The code reads such a weight.
    """
    is_own = not config.model.pretrained and config.components.model not in (AUTO, *MODELS)
    if not (is_own and config.quantize.aware):
        return model
    held_out = data.held_out if data.collate_fn is None else collated(data.held_out, data.collate_fn)
    consequence = "the weight would not be rounded where it is read so; nothing was started"
    try:
        with torch.no_grad(), restored(model):
            trial = copy.deepcopy(model).eval()
            for name, layer in list(trial.named_modules()):
                if isinstance(layer, AwareLinear | AwareConv2d):
                    store(store_layer(trial, name, config.quantize), layer.weight)
            batch = input_selector(trial)(next(eval_batches(held_out, 1, 0, 1, 1)))
            with refuse_reads(trial, consequence=consequence, skip="quantize.skip with"):
                trial(**batch)
    except ConfigError:
        raise
    except Exception as error:  # such as of code for one device alone; what fails in training too is told there
        logging.getLogger("unisono").debug("no trial with stored layers: %s", error)
    return model
