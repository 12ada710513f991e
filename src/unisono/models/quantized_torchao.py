"""Products of quantized linear layers by the package torchao, whose tensor classes get the integers and scales that we store.

The rounded weights are the same, bit for bit; products differ by the rounding of floating-point numbers, and activations that lie
in the middle between two integers may be rounded to the other one. The tensors are made for each pass: the layer's buffers, which
files hold, stay the only copy.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from unisono.errors import ConfigError
from unisono.models.layers import matmul_dtype
from unisono.models.quantized import (
    QuantizedConv2d,
    QuantizedLinear,
    QuantizedWeight,
    Stored,
    int_mm_is_exact,
    torch_product,
    unpack,
)

_OLDEST: Final = (0, 17)  # the first whose tensors take a given scale of activations and no other arguments than these


def check_torchao(dimensions: Iterable[int]) -> None:
    """Raise ConfigError if torchao is missing or too old, or if none of weights with so many dimensions is a linear layer's."""
    try:
        installed = version("torchao")
    except PackageNotFoundError:
        raise _cannot("whose package torchao is not installed", "pip install torchao") from None
    numbers = tuple(int(number) for number in re.findall(r"\d+", installed)[:2])
    if numbers < _OLDEST:
        raise _cannot(f"with torchao {installed}", "pip install --upgrade torchao")
    if 2 not in dimensions:
        raise _cannot("for a model without a linear layer that is quantized", "leave quantize.backend out")


def _cannot(why: str, nearest: str) -> ConfigError:
    return ConfigError(
        given=f"quantize.backend 'torchao', {why}",
        rule=f"torchao, {'.'.join(map(str, _OLDEST))} or newer, multiplies in quantized linear layers",
        consequence="nothing was computed",
        nearest=f"{nearest}; or quantize.backend=torch, which computes the same model (of a folder: the environment's "
        "UNISONO__QUANTIZE__BACKEND=torch)",
    )


def torchao_product(layer: QuantizedLinear, x: Tensor) -> Tensor:
    """The product by torchao, or by torch where torchao does not take the layer; [..., I] → [..., O]."""
    if kept_from_torchao(layer, x.device) or not x.numel():  # it rounds no empty input
        return torch_product(layer, x)
    dtype = matmul_dtype(x)
    # scales of activations are found in float32, as without torchao
    computed = dtype if layer.form.activations == "float" else torch.float32
    with torch.autocast(x.device.type, enabled=False):
        rows = x.flatten(0, -2).to(computed)
        bias = None if layer.bias is None else layer.bias.to(computed)
        y = F.linear(rows, torchao_weight(layer, computed), bias)
    return y.unflatten(0, x.shape[:-1]).to(dtype)


def torchao_weight(layer: QuantizedLinear, dtype: torch.dtype) -> Tensor:
    """The weight [O, I] as a tensor of torchao, of values in ``dtype``, with the rounding of the input where the form has it."""
    torchao = _torchao()
    form, packed, scale = layer.form, layer.weight_packed, layer.weight_scale
    if form.bits == 4:
        return torchao.IntxUnpackedToInt8Tensor(
            qdata=unpack(packed, form),
            scale=scale,
            zero_point=torch.zeros_like(scale, dtype=torch.int8),
            target_dtype=torch.int4,  # pyright: ignore[reportAttributeAccessIssue]  # torch makes it by its name
            block_size=(1, form.group_size),
            dtype=dtype,
            activation_quantization=None,
        )
    rounding: dict[str, Any] = {}
    if form.activations != "float":
        from torchao.quantization.quantize_.workflows import (  # pyright: ignore[reportMissingImports]
            QuantizeTensorToInt8Kwargs,
        )

        granularity = torchao.PerRow() if form.activations == "dynamic" else torchao.PerTensor()
        rounding["act_quant_kwargs"] = QuantizeTensorToInt8Kwargs(granularity=granularity)
    if form.activations == "static":
        rounding["act_quant_scale"] = layer.input_scale[None]  # [1, 1]
    return torchao.Int8Tensor(packed, scale, [1, packed.shape[1]], dtype, **rounding)


@cache
def _torchao() -> Any:
    """``torchao.quantization``, imported without its notes on kernels of other devices."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    import torchao.quantization  # pyright: ignore[reportMissingImports]

    return torchao.quantization


def kept_from_torchao(layer: Stored, device: torch.device) -> str:
    """Why torchao does not compute a layer on a device; empty where it does."""
    if isinstance(layer, QuantizedConv2d):
        return "convolutions"
    if isinstance(layer, QuantizedWeight):
        return "experts"
    if layer.form.activations != "float" and not int_mm_is_exact(device):
        return "integer products, whose sums this processor's kernel cuts"
    return ""


def computed_by_torchao(layers: Mapping[str, Stored], device: torch.device) -> tuple[int, dict[str, int]]:
    """How many of ``layers`` torchao computes on a device, and how many it does not, by reason."""
    kept: dict[str, int] = {}
    for layer in layers.values():
        if reason := kept_from_torchao(layer, device):
            kept[reason] = kept.get(reason, 0) + 1
    return len(layers) - sum(kept.values()), kept


def torchao_row(layers: Mapping[str, Stored], device: torch.device) -> str:
    """A line about which of ``layers`` torchao computes."""
    computed, kept = computed_by_torchao(layers, device)
    others = "".join(f"; torch computes {count}: {reason}" for reason, count in kept.items())
    return f"torchao computes {computed} of {len(layers)} quantized layers{others}"
