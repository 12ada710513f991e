"""Apply drawn augmentation parameters, with the same code to one image on the host and to a batch on a device.

Colours are float32 from 0 to 1 and rounded at most once, at the end; torchvision rounds uint8 images after every operation. Host
and device agree to 1e-5 before rounding, and so to one level of 255 after it.

Sources: the colour operations are those of torchvision's ColorJitter; grey is ITU-R BT.601 luma.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, cast

import torch
import torch.nn.functional as F

from unisono.data.image.augmentation import JITTER_FACTORS, JITTER_ORDERS, PARAM_NAMES, Augment, Jitter
from unisono.errors import DataError

_LUMA: Final = (0.2989, 0.587, 0.114)


def augment_on_device(
    images: torch.Tensor, draws: torch.Tensor, augment: Augment, device: torch.device | str | None = None
) -> torch.Tensor:
    """Flip, rotate, jitter, normalise and erase a batch of images, each with its own drawn parameters.

    Args:
        images: uint8 [N, H, W, C], cropped and resized.
        draws: float32 [N, 12], the parameters that ``ImageTransform`` drew (``image_draws``). They stay on the host, so
            nothing waits for the device.
        augment: The augmentation that the parameters were drawn for.
        device: Device of the work and of the result. By default that of ``images``.

    Returns:
        float32 [N, C, H, W] if ``augment`` normalises, else uint8 [N, H, W, C].

    Raises:
        DataError: ``images`` has another dtype or number of dims, or ``draws`` another shape.
    """
    if images.dtype != torch.uint8 or images.ndim != 4 or draws.shape != (len(images), len(PARAM_NAMES)):
        raise DataError(
            given=f"images of {images.dtype} {list(images.shape)} and draws of {list(draws.shape)}",
            rule=f"uint8 [N, H, W, C], and draws [N, {len(PARAM_NAMES)}]",
            consequence="no pixel was changed",
            nearest='what ImageTransform(…, pixels_on="device") gives, stacked; it may have been augmented before',
        )
    images = images.to(device or images.device, non_blocking=True)
    drawn = _BatchParams(draws, images.device)
    images = _flipped(images, drawn, augment)
    if not augment.rotate and augment.jitter is None and augment.mean is None:
        return images if augment.erase is None else _erased(images, drawn, rows=1)
    x = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format).div_(255)
    if augment.rotate:
        x = _rotated(x, drawn.column("angle"))
    if augment.jitter is not None:
        x = _jittered(x, drawn, augment.jitter)
    if augment.mean is None or augment.std is None:
        x = x.mul_(255).round_().to(torch.uint8).permute(0, 2, 3, 1).contiguous()
        return x if augment.erase is None else _erased(x, drawn, rows=1)
    mean, std = (torch.tensor(values, device=x.device)[:, None, None] for values in (augment.mean, augment.std))
    x = x.sub_(mean).div_(std)
    return x if augment.erase is None else _erased(x, drawn, rows=2)


class _BatchParams:
    """Columns of the parameters: tensors on the device, or numbers on the host."""

    def __init__(self, draws: torch.Tensor, device: torch.device) -> None:
        self._draws = draws
        self._device = device

    def column(self, name: str) -> torch.Tensor:
        """[N, 1, 1, 1] on the device."""
        values = self._draws[:, PARAM_NAMES.index(name)].reshape(-1, 1, 1, 1)
        return values.to(self._device, non_blocking=True)

    def numbers(self, name: str) -> list[float]:
        return cast("list[float]", self._draws[:, PARAM_NAMES.index(name)].tolist())


def _flipped(images: torch.Tensor, drawn: _BatchParams, augment: Augment) -> torch.Tensor:
    for name, probability, dim in (("flip", augment.flip, 2), ("flip_vertical", augment.flip_vertical, 1)):
        numbers = drawn.numbers(name) if probability else []
        if not any(numbers):
            continue
        if all(numbers):
            images = images.flip(dim)
        else:
            images = torch.where(drawn.column(name) > 0, images.flip(dim), images)
    return images


def _rotated(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Rotate about the centre, bilinear; the corners become black."""
    height, width = x.shape[2:]
    turn = angle.reshape(-1).deg2rad()
    cos, sin, none = turn.cos(), turn.sin(), torch.zeros_like(turn)
    # From output to input coordinates, both from -1 to 1: [N, 2, 3]
    theta = torch.stack([cos, -sin * (height / width), none, sin * (width / height), cos, none], 1).reshape(-1, 2, 3)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _jittered(x: torch.Tensor, drawn: _BatchParams, jitter: Jitter) -> torch.Tensor:
    orders = [JITTER_ORDERS[int(number)] for number in drawn.numbers("order")]
    used = [bool(getattr(jitter, name)) for name in JITTER_FACTORS]
    factors = [drawn.column(name) for name in JITTER_FACTORS]
    for turn in range(len(JITTER_FACTORS)):
        for number, operation in enumerate(_OPERATIONS):
            rows = [row for row, order in enumerate(orders) if order[turn] == number] if used[number] else []
            if len(rows) == len(orders):
                x = operation(x, factors[number])
            elif rows:
                index = torch.tensor(rows, device="cpu").to(x.device, non_blocking=True)
                x.index_copy_(0, index, operation(x.index_select(0, index), factors[number].index_select(0, index)))
    return x


def _brightness(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return (x * factor).clamp_(0, 1)


def _contrast(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return _blend(x, _gray(x).mean(dim=(1, 2, 3), keepdim=True), factor)


def _saturation(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return _blend(x, _gray(x), factor)


def _hue(x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Shift the hue in HSV (Smith 1978); saturation and value are unchanged."""
    red, green, blue = x.unbind(1)
    high, low = x.amax(1), x.amin(1)
    span = high - low
    safe = torch.where(span > 0, span, 1)
    hue = torch.where(
        high == red,
        (green - blue) / safe,
        torch.where(high == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    hue = hue + 6 * shift[:, 0]  # [n, H, W] in sixths of a turn
    # A channel's part of the span depends on its distance from the hue: n = 5, 3, 1 for red, green, blue
    offsets = torch.tensor((5.0, 3.0, 1.0), device=x.device)[:, None, None]
    away = (hue[:, None] + offsets).remainder(6)
    return high[:, None] - span[:, None] * torch.minimum(away, 4 - away).clamp_(0, 1)


def _gray(x: torch.Tensor) -> torch.Tensor:
    if x.shape[1] == 1:
        return x
    red, green, blue = (x[:, channel : channel + 1] for channel in range(3))
    return red * _LUMA[0] + green * _LUMA[1] + blue * _LUMA[2]


def _blend(x: torch.Tensor, other: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return (x * factor + other * (1 - factor)).clamp_(0, 1)


_OPERATIONS: Final[Sequence[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = (
    _brightness,
    _contrast,
    _saturation,
    _hue,
)


def _erased(x: torch.Tensor, drawn: _BatchParams, *, rows: int) -> torch.Tensor:
    """Set the drawn boxes to 0; ``rows`` is the dim of the rows, the next dim that of the columns."""
    if not any(drawn.numbers("erase_height")):
        return x
    inside = torch.ones((), dtype=torch.bool, device=x.device)
    for low_name, size_name, dim in (("erase_top", "erase_height", rows), ("erase_left", "erase_width", rows + 1)):
        shape = [1, 1, 1, 1]
        shape[dim] = length = x.shape[dim]
        places = torch.arange(length, device=x.device).reshape(shape)
        low = (drawn.column(low_name) * length).round()
        inside = inside & (places >= low) & (places < low + (drawn.column(size_name) * length).round())
    return x.masked_fill(inside, 0)
