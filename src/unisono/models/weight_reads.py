"""Layers whose weight is read other than by their own forward pass: a quantized layer cannot stand in their place."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn

from unisono.errors import ConfigError
from unisono.models.quantized import QuantizedConv2d, QuantizedLinear


def reader_of(model: nn.Module, name: str) -> str:
    """The type of the module of torch that reads the weight of the layer ``name`` itself; empty where none is known to."""
    path, _, leaf = name.rpartition(".")
    parent = model.get_submodule(path)
    # it and nn.TransformerEncoder hand both weights to one fused operation in evaluation, for batch_first alone
    is_fused = isinstance(parent, nn.TransformerEncoderLayer) and parent.self_attn.batch_first
    return type(parent).__name__ if is_fused and leaf in ("linear1", "linear2") else ""


@contextmanager
def refuse_reads(model: nn.Module, *, consequence: str, skip: str) -> Generator[None]:
    """For passes of a model with stored layers: what reads the weight of one of them is told which layer to keep.

    Args:
        model: The model.
        consequence: What the read prevents.
        skip: The option that keeps a layer.

    Raises:
        ConfigError: A pass reads an attribute that a stored layer does not have.
    """
    try:
        yield
    except AttributeError as error:
        layer = error.obj
        if not isinstance(layer, QuantizedLinear | QuantizedConv2d):
            raise
        name = next(name for name, module in model.named_modules() if module is layer)
        raise ConfigError(
            given=f"the layer {name} of {type(model).__name__}, whose {error.name} is read other than by its own forward pass",
            rule="a quantized layer has integers and scales, which its own forward pass alone reads",
            consequence=consequence,
            nearest=f"{skip} {name!r}, or code that calls the layer",
        ) from error
