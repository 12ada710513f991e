"""Layers with weights of 8 or 4 bits: stored, or rounded while they are trained.

Numbers are integers times a scale, without an offset. Weights have a scale per row (8 bits, largest absolute value / 127) or per
group of a row (4 bits, / 7.5: all 16 integers are used, and the largest positive number is cut by half a step), activations one
per token (``dynamic``) or one per layer from calibration (``static``), / 127.5. Two weights of 4 bits share a byte, the
first in its lower half, with 8 added. The same numbers and the same layout of words are those of the package compressed-tensors.

Where activations are integers too, products are summed in integers, exactly.
Shape letters: O outputs, I inputs of a layer, G groups of a row, N rows of activations, E experts.

Source: Jacob et al. 2018 (integer products, training with rounded numbers), Bengio et al. 2013 (the straight-through estimator).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.models.layers import matmul_dtype

Activations = Literal["float", "dynamic", "static"]
# the largest number in steps of the grid. Of a row's weights it is on the grid, so that no small change moves it by a step
WEIGHT_STEPS: Final = {8: 127.0, 4: 7.5}
ACTIVATION_STEPS: Final = 127.5  # that of other programs which read the exports
_EXACT_SUMMANDS: Final = 1024  # products of two int8 numbers whose sum float32 holds exactly: 1024 · 2^14 = 2^24


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How a layer's numbers are stored and computed.

    Attributes:
        bits: Bits of a weight, 8 or 4.
        group_size: Weights of a row that share a scale; 0 = the whole row.
        activations: float = not rounded; dynamic = int8 with a scale per token; static = int8 with the layer's scale.
    """

    bits: int
    group_size: int
    activations: Activations

    @property
    def scale_dtype(self) -> torch.dtype:
        """A group's scale has 16 bits, as it is a good part of the bytes; a row's has 32."""
        return torch.bfloat16 if self.group_size else torch.float32


def form_of(scheme: str, group_size: int) -> Form:
    """The form of a scheme of ``QuantizeOptions``."""
    activations: dict[str, Activations] = {"int8_dynamic": "dynamic", "int8_static": "static"}
    four = scheme == "int4"
    return Form(
        bits=4 if four else 8, group_size=group_size if four else 0, activations=activations.get(scheme, "float")
    )


# --- numbers ---------------------------------------------------------------------------------------------------------


def scale_of(largest: Tensor, steps: float) -> Tensor:
    """The scale for numbers up to ``largest`` in size, of any shape, which is that many steps; 1 where all are 0."""
    scale = largest.float() / steps
    return torch.where(scale > 0, scale, 1.0)


def to_integers(x: Tensor, scale: Tensor, bits: int) -> Tensor:
    """x / scale, rounded to integers of ``bits`` bits, as floating-point numbers."""
    limit = 2 ** (bits - 1)
    return (x / scale).round().clamp(-limit, limit - 1)


def weight_scale(weight: Tensor, form: Form) -> Tensor:
    """The scales of a weight [..., I]: [..., G] in the dtype in which they are stored."""
    largest = _grouped(weight.float(), form).abs().amax(-1)
    scale = scale_of(largest, WEIGHT_STEPS[form.bits]).to(form.scale_dtype)
    return torch.where(scale > 0, scale, 1.0)  # a subnormal one may have become 0


def weight_integers(weight: Tensor, scale: Tensor, form: Form) -> Tensor:
    """The integers int8 [..., I] of a weight [..., I] with scales [..., G]."""
    groups = _grouped(weight.float(), form)  # [..., G, I / G]
    return to_integers(groups, scale[..., None].float(), form.bits).to(torch.int8).flatten(-2)


def from_integers(integers: Tensor, scale: Tensor, form: Form) -> Tensor:
    """The weight in float32 [..., I] of integers [..., I] and scales [..., G]."""
    return (_grouped(integers.float(), form) * scale[..., None].float()).flatten(-2)


def _grouped(weight: Tensor, form: Form) -> Tensor:
    return weight.unflatten(-1, (-1, form.group_size or weight.shape[-1]))


def pack(integers: Tensor, form: Form) -> Tensor:
    """Integers int8 [..., I] as they are stored: int8 [..., I], or two to a byte uint8 [..., I / 2]."""
    if form.bits == 8:
        return integers
    pairs = (integers + 8).to(torch.uint8).unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def unpack(packed: Tensor, form: Form) -> Tensor:
    """The integers int8 [..., I] of ``pack``."""
    if form.bits == 8:
        return packed
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).to(torch.int8) - 8


def integer_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x int8 [N, I] times weight int8 [O, I] → exact sums int32 [N, O]."""
    if _fits_int_mm(x, weight) and int_mm_is_exact(x.device):
        return _int_mm(x, weight)
    sums = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.int32, device=x.device)
    for begin in range(0, x.shape[1], _EXACT_SUMMANDS):
        part = slice(begin, begin + _EXACT_SUMMANDS)
        sums += F.linear(x[:, part].float(), weight[:, part].float()).to(torch.int32)
    return sums


def _fits_int_mm(x: Tensor, weight: Tensor) -> bool:
    if x.device.type == "cpu":
        return x.numel() > 0
    return x.shape[0] > 16 and not (weight.shape[0] % 8 or weight.shape[1] % 8)  # what kernels of accelerators take


def _int_mm(x: Tensor, weight: Tensor) -> Tensor:
    return torch._int_mm(x, weight.t())  # pyright: ignore[reportPrivateUsage]  # has no public name; torch 2.13 tested


@cache
def int_mm_is_exact(device: torch.device) -> bool:
    """Whether torch's integer product works on the device; kernels of processors without VNNI may cut sums of two products."""
    x = torch.full((32, 64), -128, dtype=torch.int8, device=device)
    x[1::2] = 127
    try:
        product = _int_mm(x, x)
    except RuntimeError:  # the device has no such kernel
        return False
    return bool((product == x.float() @ x.float().t()).all())


class _Rounded(torch.autograd.Function):
    """Numbers on their grid; the gradient passes as if they were not rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, form: Form | None) -> Tensor:
        ctx.dtype = x.dtype
        if form is None:  # activations
            scale = scale_of(x.float().abs().amax(-1, keepdim=True), ACTIVATION_STEPS)
            return to_integers(x.float(), scale, 8) * scale
        rows = x.flatten(1) if x.dim() == 4 else x
        scale = weight_scale(rows, form)
        return from_integers(weight_integers(rows, scale, form), scale, form).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].to(ctx.dtype), None


def rounded_weight(weight: Tensor, form: Form) -> Tensor:
    """A weight [..., I], or of a convolution [O, C, Y, X], in float32 on its grid, with the gradient of the weight itself."""
    return cast(Tensor, _Rounded.apply(weight, form))


def _rounded_tokens(x: Tensor) -> Tensor:
    return cast(Tensor, _Rounded.apply(x, None))


# --- layers ----------------------------------------------------------------------------------------------------------


class AwareLinear(nn.Module):
    """An ``nn.Linear`` that computes with rounded numbers and trains the weight behind them; names and shapes are its own."""

    def __init__(self, layer: nn.Linear, form: Form) -> None:
        super().__init__()
        self.in_features, self.out_features, self.form = layer.in_features, layer.out_features, form
        self.weight = layer.weight
        self.bias = cast("nn.Parameter | None", layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] → [..., O]; outside of training exactly what the stored layer computes."""
        if self.form.activations == "float":
            return _linear(x, rounded_weight(self.weight, self.form), self.bias)
        if self.training:
            return _linear(_rounded_tokens(x), rounded_weight(self.weight, self.form), self.bias, matmul_dtype(x))
        scale = weight_scale(self.weight, self.form)
        return _integer_linear(x, None, weight_integers(self.weight, scale, self.form), scale, self.bias)


class AwareConv2d(nn.Module):
    """An ``nn.Conv2d`` that computes with a rounded weight and trains the weight behind it; names and shapes are its own."""

    def __init__(self, layer: nn.Conv2d, form: Form) -> None:
        super().__init__()
        self.form, self.how = form, _conv_settings(layer)
        self.weight = layer.weight
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, Y, X] → [B, O, Y', X']."""
        return _conv(x, rounded_weight(self.weight, self.form), self.bias, self.how)


class QuantizedLinear(nn.Module):
    """A linear layer with a stored weight of 8 or 4 bits, for evaluation."""

    weight_packed: Tensor  # as ``pack`` returns it
    weight_scale: Tensor  # [O, G]
    input_scale: Tensor  # [1]; of static activations alone

    def __init__(self, layer: nn.Linear | AwareLinear, form: Form, product: Product | None = None) -> None:
        """A layer of the same sizes, with its bias and without values of the weight; ``product`` is what computes it."""
        super().__init__()
        self.in_features, self.out_features, self.form = layer.in_features, layer.out_features, form
        self.product = product or torch_product
        _register(self, layer.weight, form)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] → [..., O]."""
        return self.product(self, x)


# computes [..., O] of a layer and its input [..., I]
Product = Callable[[QuantizedLinear, Tensor], Tensor]


def torch_product(layer: QuantizedLinear, x: Tensor) -> Tensor:
    """The product with operations of torch alone; [..., I] → [..., O]."""
    form, integers = layer.form, unpack(layer.weight_packed, layer.form)
    if form.activations == "float":
        return _linear(x, from_integers(integers, layer.weight_scale, form), layer.bias)
    scale = layer.input_scale if form.activations == "static" else None
    return _integer_linear(x, scale, integers, layer.weight_scale, layer.bias)


class QuantizedConv2d(nn.Module):
    """A convolution with a stored weight of 8 bits, for evaluation. Its static activations are integers in float32."""

    weight_packed: Tensor  # int8 [O, C, Y, X]
    weight_scale: Tensor  # [O, 1]
    input_scale: Tensor  # [1]; of static activations alone

    def __init__(self, layer: nn.Conv2d | AwareConv2d, form: Form) -> None:
        """A layer of the same sizes, with its bias and without values of the weight."""
        super().__init__()
        self.form = form
        self.how = layer.how if isinstance(layer, AwareConv2d) else _conv_settings(layer)
        _register(self, layer.weight, form)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, Y, X] → [B, O, Y', X']."""
        if self.form.activations == "float":
            rows = from_integers(self.weight_packed.flatten(1), self.weight_scale, self.form)
            return _conv(x, rows.view(self.weight_packed.shape), self.bias, self.how)
        with torch.autocast(x.device.type, enabled=False):
            integers = to_integers(x.float(), self.input_scale, 8)
            y = F.conv2d(integers, self.weight_packed.float(), None, **self.how)
            y = y * (self.input_scale * self.weight_scale)[..., None]  # [O, 1, 1]
            y = y if self.bias is None else y + self.bias.float()[:, None, None]
        return y.to(matmul_dtype(x))


class QuantizedWeight(nn.Module):
    """The stored weight of a module that computes with it itself, such as the experts of a mixture."""

    weight_packed: Tensor
    weight_scale: Tensor

    def __init__(self, weight: Tensor, form: Form) -> None:
        """A weight [..., I] of the same sizes, without values."""
        super().__init__()
        self.form = form
        _register(self, weight, form)

    def forward(self) -> Tensor:
        """The weight in float32."""
        return from_integers(unpack(self.weight_packed, self.form), self.weight_scale, self.form)


Stored = QuantizedLinear | QuantizedConv2d | QuantizedWeight


def _register(module: nn.Module, weight: Tensor, form: Form) -> None:
    """Add the buffers of a stored weight of this shape, which are zeros."""
    *outer, columns = weight.shape if weight.dim() != 4 else (weight.shape[0], weight[0].numel())
    shape = (*outer, columns // 2) if form.bits == 4 else tuple(weight.shape)
    groups = columns // form.group_size if form.group_size else 1
    packed = torch.zeros(shape, dtype=torch.uint8 if form.bits == 4 else torch.int8, device=weight.device)
    module.register_buffer("weight_packed", packed)
    scale = torch.zeros((*outer, groups), dtype=form.scale_dtype, device=weight.device)
    module.register_buffer("weight_scale", scale)
    if form.activations == "static":
        module.register_buffer("input_scale", torch.zeros(1, device=weight.device))


@torch.no_grad()
def store(module: Stored, weight: Tensor, input_scale: Tensor | None = None) -> None:
    """Fill a stored weight with the values of ``weight``; ``input_scale`` [1] is that of static activations."""
    rows = weight.flatten(1) if weight.dim() == 4 else weight
    scale = weight_scale(rows, module.form)
    module.weight_scale.copy_(scale)
    module.weight_packed.copy_(
        pack(weight_integers(rows, scale, module.form), module.form).view(module.weight_packed.shape)
    )
    if input_scale is not None:
        assert not isinstance(module, QuantizedWeight)  # experts have no rounded activations
        module.input_scale.copy_(input_scale)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    dtype = dtype or matmul_dtype(x)
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def _integer_linear(
    x: Tensor, input_scale: Tensor | None, integers: Tensor, scale: Tensor, bias: Tensor | None
) -> Tensor:
    """x [..., I] rounded, times integers [O, I] with a scale per row [O, 1]; None is a scale for each row of x."""
    with torch.autocast(x.device.type, enabled=False):
        rows = x.flatten(0, -2).float()
        if input_scale is None:
            input_scale = scale_of(rows.abs().amax(-1, keepdim=True), ACTIVATION_STEPS)  # [N, 1]
        y = integer_matmul(to_integers(rows, input_scale, 8).to(torch.int8), integers).float()
        y = y * input_scale * scale.t()
        y = y if bias is None else y + bias.float()
    return y.unflatten(0, x.shape[:-1]).to(matmul_dtype(x))


def _conv_settings(layer: nn.Conv2d) -> dict[str, Any]:
    return {name: getattr(layer, name) for name in ("stride", "padding", "dilation", "groups")}


def _conv(x: Tensor, weight: Tensor, bias: Tensor | None, how: dict[str, Any]) -> Tensor:
    dtype = matmul_dtype(x)
    return F.conv2d(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), **how)
