"""Random augmentation parameters of one image: its crop, and the parameters of the pixel operations. Changes no pixels.

The parameters are drawn on the host from a generator keyed by sample. They always take the same number of values from it, so one
setting does not change what another draws. ``batch_augment`` applies them to one image or to a batch on a device, with the same
result.

Sources: the sampling rules are those of torchvision's RandomResizedCrop (Szegedy et al. 2014, arXiv:1409.4842), ColorJitter
and RandomErasing (Zhong et al. 2017, arXiv:1708.04896).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import permutations
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from unisono.data.image.decoding import Color
from unisono.data.image.tiles import Box
from unisono.errors import ConfigError, Problem
from unisono.storage.limits import MAX_PIXELS

AugmentParams = NDArray[np.float32]  # [len(DRAWN)]

PARAM_NAMES: Final = (
    "flip",  # 0 or 1
    "flip_vertical",
    "brightness",  # factors, 1 for no change
    "contrast",
    "saturation",
    "hue",  # added, in turns of the colour wheel
    "order",  # of these four: an index into ORDERS
    "angle",  # degrees, counter-clockwise
    "erase_top",  # a box as fractions of height and width
    "erase_left",
    "erase_height",  # 0 for none
    "erase_width",
)
JITTER_FACTORS: Final = ("brightness", "contrast", "saturation", "hue")
JITTER_ORDERS: Final = tuple(permutations(range(4)))

_TRIES: Final = 10
_CROP, _FLIPS, _JITTER, _ORDER, _ANGLE, _ERASE = 0, 40, 42, 46, 47, 48  # where in the uniforms each one's begin
_UNIFORMS: Final = _ERASE + 1 + 4 * _TRIES


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomResizedCrop:
    """A box of random area and aspect ratio; after ten that do not fit, the largest centred box.

    Attributes:
        scale: (least, most) area of the box as a share of the image's area.
        ratio: (least, most) width / height of the box, drawn uniformly in its logarithm.

    Source:
        Szegedy et al. 2014, arXiv:1409.4842, with the sampling rules of torchvision's RandomResizedCrop.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class CenterCrop:
    """The largest centred box of the output's aspect ratio, times ``share``.

    Attributes:
        share: Side of the box as a share of the largest one, above 0 and at most 1: 224 of a short side of 256 is
            0.875.
    """

    share: float = 0.875


@dataclass(frozen=True, kw_only=True, slots=True)
class Jitter:
    """Random changes of colour, applied in random order.

    A factor is drawn from [max(0, 1 - x), 1 + x]; x = 0 changes nothing.

    Attributes:
        brightness: The x of the factor of all values.
        contrast: The x of the factor of the distance from the image's mean grey.
        saturation: The x of the factor of the distance from each pixel's grey.
        hue: The shift of the hue is drawn from [-x, x] turns of the colour wheel; at most 0.5.

    Source:
        torchvision's ColorJitter.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0


_NO_JITTER: Final = Jitter()


@dataclass(frozen=True, kw_only=True, slots=True)
class Erase:
    """Sets a random box of the output to 0 after normalising: the mean colour, or black without normalising.

    Attributes:
        probability: Probability that an image gets a box.
        scale: (least, most) area of the box as a share of the output's area.
        ratio: (least, most) height / width of the box, drawn uniformly in its logarithm.

    Source:
        Random erasing: Zhong et al. 2017, arXiv:1708.04896.
    """

    probability: float = 0.25
    scale: tuple[float, float] = (0.02, 0.33)
    ratio: tuple[float, float] = (0.3, 3.3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Augment:
    """Augmentation of an image, in this order: crop, resize, flips, rotation, jitter, normalise, erase.

    Attributes:
        size: (height, width) of the output in pixels.
        crop: Box of the image that is resized to ``size``. By default ``RandomResizedCrop()``.
        flip: Probability of a left-right flip.
        flip_vertical: Probability of an upside-down flip.
        rotate: Angle in degrees, drawn from [-x, x], at most 180; corners become black.
        jitter: Random changes of colour. By default none.
        erase: Random box set to 0. By default none.
        mean: Per channel, subtracted from values scaled to 0 to 1. None, with ``std`` None, keeps uint8.
        std: Per channel, above 0; values are divided by it.
        color: "rgb" decodes to 3 channels, "gray" to 1.
        resize: "torch": bilinear with antialiasing. "opencv": bilinear without, which is 1.4 times as fast; needs the
            package opencv-python-headless.
        max_pixels: Pixels of the largest image that is decoded; larger ones raise DataError.

    Raises:
        ConfigError: A value is out of range, ``mean`` and ``std`` do not fit the channels, or a grey image has a
            saturation or hue jitter.
    """

    size: tuple[int, int] = (224, 224)
    crop: RandomResizedCrop | CenterCrop = field(default_factory=RandomResizedCrop)
    flip: float = 0.0
    flip_vertical: float = 0.0
    rotate: float = 0.0
    jitter: Jitter | None = None
    erase: Erase | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    color: Color = "rgb"
    resize: Literal["torch", "opencv"] = "torch"
    max_pixels: int = MAX_PIXELS

    def __post_init__(self) -> None:
        channels = 3 if self.color == "rgb" else 1
        jitter, erase, crop = self.jitter or Jitter(), self.erase or Erase(), self.crop
        ranges = [("erase.scale", erase.scale, 1.0), ("erase.ratio", erase.ratio, math.inf)]
        shares = {"flip": self.flip, "flip_vertical": self.flip_vertical, "erase.probability": erase.probability}
        if isinstance(crop, RandomResizedCrop):
            ranges += [("crop.scale", crop.scale, 1.0), ("crop.ratio", crop.ratio, math.inf)]
        else:
            shares["crop.share"] = crop.share
        spreads = [(name, getattr(jitter, name), 0.5 if name == "hue" else math.inf) for name in JITTER_FACTORS]
        grey_colors = self.color == "gray" and bool(jitter.saturation or jitter.hue)
        lengths = [None if values is None else len(values) for values in (self.mean, self.std)]
        checks: list[tuple[bool, str, object, str]] = [  # valid, name, value, rule
            *((0 <= value <= 1, name, value, "0 <= p <= 1") for name, value in shares.items()),
            *(
                (0 < low <= high <= top, name, (low, high), f"0 < low <= high <= {top:g}")
                for name, (low, high), top in ranges
            ),
            *((0 <= value <= top, f"jitter.{name}", value, f"0 <= x <= {top}") for name, value, top in spreads),
            (min(self.size) >= 1, "size", self.size, "(height, width), each at least 1 pixel"),
            (shares.get("crop.share") != 0, "crop.share", shares.get("crop.share"), "0 < share <= 1"),
            (0 <= self.rotate <= 180, "rotate", self.rotate, "0 <= degrees <= 180"),
            (not grey_colors, "jitter", jitter, "a grey image has no saturation and no hue to change"),
            (
                lengths in ([channels, channels], [None, None]),
                "mean, std",
                (self.mean, self.std),
                f"both with {channels} values, or neither",
            ),
            (min(self.std or (1,)) > 0, "std", self.std, "above 0"),
        ]
        problems = [_unfit(name, value, rule) for valid, name, value, rule in checks if not valid]
        if problems:
            raise ConfigError(*problems)


def draw_params(augment: Augment, height: int, width: int, rng: np.random.Generator) -> tuple[Box, AugmentParams]:
    """Draw the crop (top, left, height, width) of an image, and the other parameters [12], named by ``PARAM_NAMES``."""
    uniforms: list[float] = rng.random(_UNIFORMS).tolist()
    if isinstance(augment.crop, RandomResizedCrop):
        box = _random_box(augment.crop, height, width, uniforms[_CROP:_FLIPS])
    else:
        box = _center_box(augment.crop, height, width, augment.size)
    jitter = augment.jitter or _NO_JITTER
    spans = (jitter.brightness, jitter.contrast, jitter.saturation)
    factors = [_between(max(0.0, 1 - x), 1 + x, u) for x, u in zip(spans, uniforms[_JITTER:], strict=False)]
    drawn = np.array(
        (
            uniforms[_FLIPS] < augment.flip,
            uniforms[_FLIPS + 1] < augment.flip_vertical,
            *factors,
            _between(-jitter.hue, jitter.hue, uniforms[_JITTER + 3]),
            int(uniforms[_ORDER] * len(JITTER_ORDERS)),
            _between(-augment.rotate, augment.rotate, uniforms[_ANGLE]),
            *(_erase_box(augment.erase, augment.size, uniforms[_ERASE:]) if augment.erase else (0, 0, 0, 0)),
        ),
        np.float32,
    )
    return box, drawn


def _random_box(crop: RandomResizedCrop, height: int, width: int, uniforms: list[float]) -> Box:
    low, high = math.log(crop.ratio[0]), math.log(crop.ratio[1])
    for at in range(0, 4 * _TRIES, 4):
        area = height * width * _between(*crop.scale, uniforms[at])
        ratio = math.exp(_between(low, high, uniforms[at + 1]))
        wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            return int(uniforms[at + 2] * (height - tall + 1)), int(uniforms[at + 3] * (width - wide + 1)), tall, wide
    wide = max(1, min(width, round(height * crop.ratio[1])))
    tall = max(1, min(height, round(width / crop.ratio[0])))
    return (height - tall) // 2, (width - wide) // 2, tall, wide


def _center_box(crop: CenterCrop, height: int, width: int, size: tuple[int, int]) -> Box:
    fit = crop.share * min(height / size[0], width / size[1])
    tall, wide = max(1, round(size[0] * fit)), max(1, round(size[1] * fit))
    return (height - tall) // 2, (width - wide) // 2, tall, wide


def _erase_box(erase: Erase, size: tuple[int, int], uniforms: list[float]) -> tuple[float, float, float, float]:
    """(top, left, height, width) as fractions of the output, rounded to whole pixels."""
    height, width = size
    if uniforms[0] >= erase.probability:
        return 0, 0, 0, 0
    low, high = math.log(erase.ratio[0]), math.log(erase.ratio[1])
    for at in range(1, 1 + 4 * _TRIES, 4):
        area = height * width * _between(*erase.scale, uniforms[at])
        ratio = math.exp(_between(low, high, uniforms[at + 1]))
        tall, wide = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < tall < height and 0 < wide < width:
            top, left = int(uniforms[at + 2] * (height - tall + 1)), int(uniforms[at + 3] * (width - wide + 1))
            return top / height, left / width, tall / height, wide / width
    return 0, 0, 0, 0


def _between(low: float, high: float, uniform: float) -> float:
    return low + (high - low) * uniform


def _unfit(name: str, value: object, rule: str) -> Problem:
    return Problem(
        given=f"{name} = {value}",
        rule=rule,
        consequence="no image can be augmented so",
        nearest=f"leave {name.split('.')[0].split(',')[0]} out for the default",
    )
