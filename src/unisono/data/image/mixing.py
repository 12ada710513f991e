"""Pair transforms: mixup (Zhang et al. 2017, arXiv:1710.09412) and CutMix (Yun et al. 2019, arXiv:1905.04899).

``(first, second, rng) -> (first', second')``: a batch keeps its size. The loader pairs samples by global position. Both samples
have an ``image`` of the same shape and dtype, [C, H, W] float32 or [H, W, C] uint8, and ``targets``: a class number, or
[classes] float32 if mixed before. Other entries are unchanged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.data.dataset import Batch
from unisono.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixup:
    """A pair transform that blends λ of one image and 1 - λ of the other; λ is from Beta(alpha, alpha).

    Labels become float32 [classes], blended alike.

    Attributes:
        classes: Number of classes.
        alpha: Parameter of the Beta distribution, above 0; small values leave most pairs nearly unmixed.

    Raises:
        ConfigError: ``classes`` is below 1, or ``alpha`` is not above 0.
        DataError: The images of a pair differ in shape or dtype, or a label is not one of the classes.

    Source:
        Zhang et al. 2017, arXiv:1710.09412.
    """

    classes: int
    alpha: float = 0.2

    def __post_init__(self) -> None:
        _check(self.classes, self.alpha)

    def __call__(self, first: Batch, second: Batch, rng: np.random.Generator) -> tuple[Batch, Batch]:
        share = np.float32(rng.beta(self.alpha, self.alpha))
        a, b = _images(first, second)
        return _mixed(first, second, _blend(a, b, share), _blend(b, a, share), share, self.classes)


@dataclass(frozen=True, kw_only=True, slots=True)
class CutMix:
    """A pair transform that exchanges a box of 1 - λ of the area; λ is from Beta(alpha, alpha).

    Labels become float32 [classes], mixed by the share of exchanged pixels; a box at the border is cut off there.

    Attributes:
        classes: Number of classes.
        alpha: Parameter of the Beta distribution, above 0; with 1 every λ is equally likely.

    Raises:
        ConfigError: ``classes`` is below 1, or ``alpha`` is not above 0.
        DataError: The images of a pair differ in shape or dtype, or a label is not one of the classes.

    Source:
        Yun et al. 2019, arXiv:1905.04899.
    """

    classes: int
    alpha: float = 1.0

    def __post_init__(self) -> None:
        _check(self.classes, self.alpha)

    def __call__(self, first: Batch, second: Batch, rng: np.random.Generator) -> tuple[Batch, Batch]:
        a, b = _images(first, second)
        height, width = a.shape[:2] if a.dtype == np.uint8 else a.shape[1:]
        side = math.sqrt(1 - rng.beta(self.alpha, self.alpha))
        middle, center = int(rng.random() * height), int(rng.random() * width)
        tall, wide = height * side / 2, width * side / 2
        rows = slice(max(0, round(middle - tall)), min(height, round(middle + tall)))
        columns = slice(max(0, round(center - wide)), min(width, round(center + wide)))
        inside = (rows, columns) if a.dtype == np.uint8 else (slice(None), rows, columns)
        share = np.float32(1 - (rows.stop - rows.start) * (columns.stop - columns.start) / (height * width))
        a_new, b_new = a.copy(), b.copy()
        a_new[inside], b_new[inside] = b[inside], a[inside]
        return _mixed(first, second, a_new, b_new, share, self.classes)


def _images(first: Batch, second: Batch) -> tuple[NDArray[Any], NDArray[Any]]:
    a, b = first["image"], second["image"]
    if (a.shape, a.dtype) != (b.shape, b.dtype) or a.ndim != 3 or str(a.dtype) not in ("uint8", "float32"):
        raise DataError(
            given=f"a pair of images of {a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}",
            rule="both are uint8 [H, W, C] or both float32 [C, H, W], of one size",
            consequence="they cannot be mixed",
            nearest="mix after the ImageTransform, which makes them so",
        )
    return a, b


def _blend(a: NDArray[Any], b: NDArray[Any], share: np.float32) -> NDArray[Any]:
    mixed = a * share + b * (1 - share)
    return mixed if a.dtype == np.float32 else np.rint(mixed).astype(np.uint8)


def _mixed(
    first: Batch, second: Batch, a: NDArray[Any], b: NDArray[Any], share: np.float32, classes: int
) -> tuple[Batch, Batch]:
    mine, other = _soft(first["targets"], classes), _soft(second["targets"], classes)
    return (
        {**first, "image": a, "targets": mine * share + other * (1 - share)},
        {**second, "image": b, "targets": other * share + mine * (1 - share)},
    )


def _soft(label: NDArray[Any], classes: int) -> NDArray[np.float32]:
    """The label as shares of all classes, [classes]. Raises DataError."""
    if label.shape == (classes,) and label.dtype == np.float32:
        return label
    if label.shape != () or label.dtype.kind not in "iu" or not 0 <= int(label) < classes:
        shown = label if label.ndim == 0 else f"{label.dtype}{list(label.shape)}"
        raise DataError(
            given=f"a label of {shown} among {classes} classes",
            rule=f"a label is an integer from 0 to {classes - 1}, or float32 [{classes}]",
            consequence="there is no share of it to mix",
            nearest="classes= the number of classes",
        )
    soft = np.zeros(classes, np.float32)
    soft[int(label)] = 1
    return soft


def _check(classes: int, alpha: float) -> None:
    if classes < 1 or not alpha > 0:
        raise ConfigError(
            given=f"{classes} classes, alpha = {alpha}",
            rule="at least 1 class, and alpha above 0",
            consequence="no pair can be mixed",
            nearest="alpha = 0.2 for mixup, 1.0 for CutMix",
        )
