"""Puts quantized layers in the place of a model's: which layers, and what stays as it is.

Linear layers and convolutions are replaced as modules. The experts of a mixture are parameters of one module; each of its three
stacks of matrices counts as a layer here. Their activations are never rounded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from unisono.errors import ConfigError, nearest_name
from unisono.models.gpt import GPT
from unisono.models.layer_patterns import matching_layers
from unisono.models.moe import EXPERT_MATRICES, Experts
from unisono.models.quantize_options import OUTER_LAYERS, QuantizeOptions
from unisono.models.quantized import (
    AwareConv2d,
    AwareLinear,
    QuantizedConv2d,
    QuantizedLinear,
    QuantizedWeight,
    Stored,
    form_of,
    torch_product,
)
from unisono.models.quantized_torchao import check_torchao, torchao_product
from unisono.models.weight_reads import reader_of

_LINEAR = (nn.Linear, AwareLinear)
_CONVOLUTIONS = (nn.Conv2d, AwareConv2d)


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The layers of a model that a scheme acts on.

    Attributes:
        weights: The weight [O, I], [O, C, Y, X] or [E, O, I] of each chosen layer, by the layer's name.
        kept: Why a layer with a matrix is not chosen, by name.
    """

    weights: Mapping[str, Tensor]
    kept: Mapping[str, str]


def select_layers(model: nn.Module, options: QuantizeOptions, *, convolutions: bool) -> Selection:
    """Choose the layers of ``model``.

    Args:
        model: The model, in floating point or with layers that are trained with rounded numbers.
        options: The scheme and what it skips.
        convolutions: False keeps convolutions whatever the scheme: what reads the files knows of linear layers alone.

    Raises:
        ConfigError: A pattern matches no layer, no layer is left, experts are kept beside other layers, or the group size does
            not divide the inputs of a layer.
    """
    layers = dict(_layers(model))
    weights: dict[str, Tensor] = {}
    kept: dict[str, str] = {}
    places = Counter(id(tensor) for tensor in model.state_dict(keep_vars=True).values())
    for name, (module, weight) in layers.items():
        pattern = next((pattern for pattern in options.skip if matching_layers([name], [pattern])), None)
        if places[id(weight)] > 1:
            kept[name] = "shared with another layer"
        elif isinstance(model, GPT) and name == "head":
            kept[name] = "output layer, whose loss is computed in parts"
        elif pattern is not None:
            kept[name] = f"quantize.skip {pattern!r}"
        elif reason := _not_covered(module, options.scheme, convolutions):
            kept[name] = reason
        elif reader := reader_of(model, name):
            kept[name] = f"its weight is read by {reader}"
        else:
            weights[name] = weight
    _check_patterns(options.skip, list(layers))
    kept_experts = [name for name in kept if isinstance(layers[name][0], Experts)]
    if kept_experts:
        raise ConfigError(
            given=f"quantize.scheme {options.scheme!r} for {type(model).__name__}, whose {kept_experts[0]} would be kept: "
            f"{kept[kept_experts[0]]}",
            rule="transformers loads a mixture of experts whose experts are quantized as the other layers are",
            consequence="nothing could load the export",
            nearest="quantize.scheme int8 or int4, and no pattern for experts in quantize.skip",
        )
    if not weights:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(kept.items())[:3])
        raise ConfigError(
            given=f"quantize.scheme {options.scheme!r} for {type(model).__name__}, of which no layer is left"
            + (f" ({reasons})" if reasons else ""),
            rule="it acts on linear layers, on convolutions (int8, int8_static) and on experts (int8, int4)",
            consequence="nothing would change",
            nearest="another scheme, or fewer patterns in quantize.skip",
        )
    if options.scheme == "int4":
        _check_groups(weights, options.group_size)
    return Selection(weights=weights, kept=kept)


def _not_covered(module: nn.Module, scheme: str, convolutions: bool) -> str:
    """Why a scheme does not act on a layer; empty where it does."""
    if isinstance(module, Experts):
        return "" if scheme in ("int8", "int4") else f"experts, which {scheme} does not cover"
    if not isinstance(module, _CONVOLUTIONS):
        return ""
    if not convolutions:
        return "convolutions, which are not in the format of the export"
    if scheme not in ("int8", "int8_static"):
        return f"convolutions, which {scheme} does not cover"
    padding = "zeros" if isinstance(module, AwareConv2d) else module.padding_mode
    return "" if padding == "zeros" else f"convolutions with padding_mode {padding!r}"


def _layers(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, Tensor]]]:
    """Each layer that can be quantized: its name, its module and its weight."""
    for name, module in model.named_modules():
        if type(module) in (*_LINEAR, *_CONVOLUTIONS):
            yield name, (module, cast(Tensor, module.weight))
        elif isinstance(module, Experts):
            for matrix in EXPERT_MATRICES:
                if isinstance(weight := getattr(module, matrix), Tensor):
                    yield f"{name}.{matrix}", (module, weight)


def _check_patterns(patterns: Sequence[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if pattern not in OUTER_LAYERS and not matching_layers(names, [pattern]):
            raise ConfigError(
                given=f"quantize.skip {pattern!r}",
                rule="a pattern matches the name of a layer: "
                + ", ".join(names[:6])
                + (", …" if len(names) > 6 else ""),
                consequence="it would keep nothing",
                nearest=nearest_name(pattern, names),
            )


def _check_groups(weights: Mapping[str, Tensor], group_size: int) -> None:
    inputs = {name: weight[0].numel() if weight.dim() != 3 else weight.shape[-1] for name, weight in weights.items()}
    uneven = [name for name, width in inputs.items() if width % group_size]
    if not uneven:
        return
    common = math.gcd(*inputs.values())
    fitting = [size for size in range(8, common + 1, 8) if common % size == 0]
    near = min(fitting, key=lambda size: abs(size - group_size), default=0)
    raise ConfigError(
        given=f"quantize.group_size {group_size} with {inputs[uneven[0]]} inputs of {uneven[0]}"
        + (f", and {len(uneven) - 1} more such layers" if len(uneven) > 1 else ""),
        rule="a row of a weight is divided into groups of this size",
        consequence="the last group would be shorter",
        nearest=f"quantize.group_size={near}" if near else f"quantize.skip with {uneven[0]!r}",
    )


def make_aware(model: nn.Module, options: QuantizeOptions, *, convolutions: bool) -> None:
    """Let the chosen layers compute with rounded numbers, in place. Raises ConfigError; arguments of ``select_layers``."""
    form = form_of(options.scheme, options.group_size)
    for name in select_layers(model, options, convolutions=convolutions).weights:
        parent, leaf = _place(model, name)
        layer = getattr(parent, leaf)
        if isinstance(parent, Experts):
            parent.rounded[leaf] = form
        else:
            new = AwareConv2d(layer, form) if isinstance(layer, nn.Conv2d) else AwareLinear(layer, form)
            setattr(parent, leaf, new.train(layer.training))


def make_stored(model: nn.Module, options: QuantizeOptions, *, convolutions: bool) -> dict[str, Stored]:
    """Put layers with stored weights, which are zeros, in the place of the chosen ones; returns them by name.

    Raises ConfigError, also for a back end that is not installed or that would compute no layer; arguments of ``select_layers``.
    """
    selection = select_layers(model, options, convolutions=convolutions)
    if options.backend == "torchao":
        check_torchao(weight.dim() for weight in selection.weights.values())
    return {name: store_layer(model, name, options) for name in selection.weights}


def store_layer(model: nn.Module, name: str, options: QuantizeOptions) -> Stored:
    """Put a layer with a stored weight, which is zeros, in the place of the layer ``name``, and return it."""
    form = form_of(options.scheme, options.group_size)
    parent, leaf = _place(model, name)
    layer = getattr(parent, leaf)
    if isinstance(parent, Experts):
        new = QuantizedWeight(layer, form)
        delattr(parent, leaf)  # a parameter's place takes no module
        parent.rounded.pop(leaf, None)
    else:
        product = torchao_product if options.backend == "torchao" else torch_product
        convolution = isinstance(layer, _CONVOLUTIONS)
        new = QuantizedConv2d(layer, form) if convolution else QuantizedLinear(layer, form, product)
    setattr(parent, leaf, new)
    return new.train(layer.training if isinstance(layer, nn.Module) else parent.training)


def stored_layers(model: nn.Module) -> dict[str, Stored]:
    """The layers of a model with stored weights, by name."""
    kinds = (QuantizedLinear, QuantizedConv2d, QuantizedWeight)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf
