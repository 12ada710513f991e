"""Quantized layers in the format of the package compressed-tensors, which transformers loads with.

Where activations are floating-point numbers, weights are ``weight_packed`` int32, eight or four to a word from the lowest bits up
with 8 or 128 added, with ``weight_shape``. Where they are integers too, it is ``weight`` int8. Beside it are ``weight_scale``
and, for calibrated activations, ``input_scale``. The field ``quantization_config`` of ``config.json`` tells the scheme.

Source: compressed-tensors 0.20, formats pack-quantized and int-quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.interop.exported_tensor import ExportedTensor
from unisono.models.quantized import Form, QuantizedWeight
from unisono.models.quantized_model import stored_layers

_PACKED: Final = ".weight_packed"


def compressed_tensors(model: nn.Module, entries: Sequence[ExportedTensor]) -> Iterator[ExportedTensor]:
    """The entries with those of stored weights in this format."""
    layers = stored_layers(model)
    # experts load only as floating-point numbers, in the scale's dtype
    has_experts = any(isinstance(layer, QuantizedWeight) for layer in layers.values())
    for entry in entries:
        layer = layers.get(entry.name.removesuffix(_PACKED)) if entry.name.endswith(_PACKED) else None
        if layer is None and has_experts and entry.name.endswith(".weight_scale"):
            yield ExportedTensor(entry.key, entry.name, partial(_float32, transform=entry.transform))
        elif layer is None:
            yield entry
        elif layer.form.activations != "float":
            yield ExportedTensor(f"{entry.key.removesuffix(_PACKED)}.weight", entry.name, entry.transform)
        else:
            words = partial(_words, transform=entry.transform, bits=layer.form.bits)
            yield ExportedTensor(entry.key, entry.name, words)
            key = f"{entry.key.removesuffix(_PACKED)}.weight_shape"
            yield ExportedTensor(key, entry.name, partial(_shape, transform=entry.transform, bits=layer.form.bits))


def _float32(scale: Tensor, transform: Callable[[Tensor], Tensor]) -> Tensor:
    return transform(scale).float()


def _words(packed: Tensor, transform: Callable[[Tensor], Tensor], bits: int) -> Tensor:
    """Weights as ``models.quantized`` packs them → words of 32 bits, in the same order."""
    rows = transform(packed).contiguous()
    if bits == 8:
        rows = rows.view(torch.uint8) ^ 128  # adds 128 to each
        rows = F.pad(rows, (0, -rows.shape[1] % 4))
    return rows.view(torch.int32)


def _shape(packed: Tensor, transform: Callable[[Tensor], Tensor], bits: int) -> Tensor:
    """The shape [O, I] of a weight."""
    rows, columns = transform(packed).shape
    return torch.tensor([rows, columns * 8 // bits], device="cpu")


def quantization_config(model: nn.Module, entries: Sequence[ExportedTensor], tied: Sequence[str]) -> dict[str, Any]:
    """The field ``quantization_config`` of a model with stored weights, as a dict with this key; else an empty one.

    Args:
        model: The model.
        entries: Its tensors in the export.
        tied: Linear layers of the loaded model that have no tensor in the export.
    """
    forms = {layer.form for layer in stored_layers(model).values()}
    if not forms:
        return {}
    (form,) = forms  # a scheme is that of the whole model
    kept = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    ignored = [entry.key.removesuffix(".weight") for entry in entries if entry.name in kept]
    group = {"targets": ["Linear"], "weights": _weights(form), "input_activations": _activations(form)}
    content = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if form.activations == "float" else "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"output_activations": None}},
        "ignore": [*ignored, *tied],
    }
    return {"quantization_config": content}


def _weights(form: Form) -> dict[str, Any]:
    grouped = {"strategy": "group", "group_size": form.group_size} if form.group_size else {"strategy": "channel"}
    return {"num_bits": form.bits, "type": "int", "symmetric": True, "dynamic": False, **grouped}


def _activations(form: Form) -> dict[str, Any] | None:
    if form.activations == "float":
        return None
    dynamic = form.activations == "dynamic"
    how = {"strategy": "token" if dynamic else "tensor", "dynamic": dynamic}
    return {"num_bits": 8, "type": "int", "symmetric": True, **how}
