"""Residual networks of bottleneck blocks for images (He et al. 2015, such as ResNet-50).

A block that halves the image does so in its 3x3 convolution ("v1.5"); a stride in the first 1x1 would discard three quarters
of the positions. Its last norm starts at 0, so that a new block is the identity (Goyal et al. 2017). All blocks are in one flat
list, because recompute, sharding and pipelines act on repeated blocks. Shape letters: B batch, C channels, Y height, X width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from unisono.errors import ConfigError, Problem

EXPANSION = 4  # output channels of a block per channel of its 3x3 convolution


@dataclass(frozen=True, kw_only=True, slots=True)
class ResNetOptions:
    """Sizes of a ResNet; the defaults are those of ResNet-50.

    Args:
        classes: Number of classes.
        channels: Channels of the image.
        depths: Blocks of each stage.
        widths: Channels of the 3x3 convolutions of each stage.
        norm: "batch" depends on the other samples of a micro-batch, "group" (Wu and He 2018) does not.
        groups: Groups of channels of a group norm.
        inner_width: Channels inside the blocks of the first stage, those of others are in proportion; 0 = ``widths[0]``, as in
            the paper.
        stem: "image" reduces height and width to a quarter before the first block; "small" keeps them, for images of about
            32 pixels.

    Raises:
        ConfigError: A stage has no depth or no width, or ``groups`` does not divide the widths.
    """

    classes: int = 1000
    channels: int = 3
    depths: tuple[int, ...] = (3, 4, 6, 3)
    widths: tuple[int, ...] = (64, 128, 256, 512)
    norm: Literal["batch", "group"] = "batch"
    groups: int = 32
    inner_width: int = 0
    stem: Literal["image", "small"] = "image"

    def __post_init__(self) -> None:
        problems: list[Problem] = []
        if len(self.depths) != len(self.widths) or not self.depths or min(self.depths + self.widths) < 1:
            problems.append(
                Problem(
                    given=f"depths {self.depths} with widths {self.widths}",
                    rule="every stage has a depth and a width, both at least 1",
                    consequence="the network cannot be built",
                    nearest="depths=(3, 4, 6, 3), widths=(64, 128, 256, 512)",
                )
            )
        sizes = [size for width in self.widths for size in (width, self.inner(width))]
        uneven = [size for size in sizes if self.norm == "group" and size % self.groups]
        if uneven:
            near = max(n for n in range(1, self.groups + 1) if not any(size % n for size in sizes))
            problems.append(
                Problem(
                    given=f"groups {self.groups} with widths {self.widths}",
                    rule="a group norm's groups have equally many channels",
                    consequence=f"{uneven[0]} channels cannot be normalised",
                    nearest=f"groups={near}",
                )
            )
        if problems:
            raise ConfigError(*problems)

    def inner(self, width: int) -> int:
        """Channels inside a block of a stage of ``width``."""
        return max(1, round(width * (self.inner_width or self.widths[0]) / self.widths[0]))

    def make_norm(self, channels: int) -> nn.Module:
        """A norm over ``channels`` channels."""
        return nn.BatchNorm2d(channels) if self.norm == "batch" else nn.GroupNorm(self.groups, channels)


class Bottleneck(nn.Module):
    """Residual block of 1x1, 3x3 and 1x1 convolutions; if channels or size change, a 1x1 convolution projects x."""

    def __init__(self, options: ResNetOptions, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out, inner = width * EXPANSION, options.inner(width)
        self.conv1 = nn.Conv2d(channels, inner, 1, bias=False)
        self.norm1 = options.make_norm(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False)
        self.norm2 = options.make_norm(inner)
        self.conv3 = nn.Conv2d(inner, out, 1, bias=False)
        self.norm3 = options.make_norm(out)
        self.shortcut = None
        if stride != 1 or channels != out:
            self.shortcut = nn.Conv2d(channels, out, 1, stride, bias=False)
            self.shortcut_norm = options.make_norm(out)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, Y, X] → [B, 4 · width, Y / stride, X / stride]."""
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        if self.shortcut is not None:
            x = self.shortcut_norm(self.shortcut(x))
        return F.relu(x + y)


class ResNet(nn.Module):
    """Residual network for image classification; ``forward`` returns logits.

    Convolutions are initialised from N(0, 2 / (out channels · kernel area)) (He et al. 2015, fan out), the head from
    N(0, 0.01²), norms with 1 (0 at the end of a block), biases with 0.

    Source:
        He et al. 2015, with the stride in the 3x3 convolution.
    """

    def __init__(self, options: ResNetOptions) -> None:
        super().__init__()
        self.options = options
        first = options.widths[0]
        kernel, stride = (7, 2) if options.stem == "image" else (3, 1)
        self.stem = nn.Conv2d(options.channels, first, kernel, stride, padding=kernel // 2, bias=False)
        self.stem_norm = options.make_norm(first)
        blocks: list[Bottleneck] = []
        channels = first
        for stage, (depth, width) in enumerate(zip(options.depths, options.widths, strict=True)):
            for number in range(depth):
                blocks.append(Bottleneck(options, channels, width, 2 if stage > 0 and number == 0 else 1))
                channels = width * EXPANSION
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, options.classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights from torch's current generator, in the order of ``named_parameters``."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 4:
                nn.init.kaiming_normal_(parameter, mode="fan_out", nonlinearity="relu")
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.01)
            else:
                nn.init.constant_(parameter, float(name.endswith(("norm.weight", "norm1.weight", "norm2.weight"))))

    def forward(self, image: Tensor) -> Tensor:
        """image [B, channels, Y, X] → logits [B, classes]."""
        x = F.relu(self.stem_norm(self.stem(image)))
        if self.options.stem == "image":
            x = F.max_pool2d(x, 3, 2, padding=1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))
