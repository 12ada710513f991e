"""The files that the cases read, the same in every run: a small corpus, pictures, rows, and a plugin with a model of its own."""

from __future__ import annotations

import base64
import json
import random
import struct
import zlib
from pathlib import Path

# found through entry points, so that it depends on no name inside unisono
_PLUGIN = """
import torch
from torch import nn


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 5),
        )

    def forward(self, inputs):
        return self.layers(inputs)


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(192, 96)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(96, 96), nn.Tanh()) for _ in range(4))
        self.leave = nn.Linear(96, 5)

    def forward(self, inputs):
        hidden = self.enter(inputs.flatten(1))
        for block in self.blocks:
            hidden = block(hidden)
        return self.leave(hidden)


def convolutions(config):
    return Convolutions()


def perceptron(config):
    return Perceptron()


def pictures(config):
    draw = torch.Generator().manual_seed(5)
    images = torch.randn(61, 3, 8, 8, generator=draw)
    labels = torch.randint(0, 5, (61,), generator=draw).tolist()
    samples = list(zip(images, labels))
    return samples[:48], samples[48:]


def noise(sample, rng):
    images = sample["inputs"]
    return {**sample, "inputs": (images + rng.normal(size=images.shape)).astype("float32")}
"""
_WORDS = "def return for in while class self import from None True x y z foo bar baz 1 2 3 ( ) : , = +"
_ENTRY_POINTS = """[unisono.models]
convolutions = equality_plugin:convolutions
perceptron = equality_plugin:perceptron
[unisono.datasets]
pictures = equality_plugin:pictures
[unisono.transforms]
noise = equality_plugin:noise
"""


def write(folder: Path) -> None:
    """Makes ``folder``."""
    draw = random.Random(0)
    words = _WORDS.split()
    (folder / "corpus").mkdir(parents=True)
    for number in range(40):
        lines = [" ".join(draw.choice(words) for _ in range(draw.randint(3, 12))) for _ in range(40)]
        (folder / f"corpus/f{number:02}.py").write_text("\n".join(lines))
    for number in range(12):
        path = folder / f"pictures/class{number % 3}/{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(40 + number, 36, draw))
    with (folder / "rows.jsonl").open("w") as file:
        for number in range(50):
            row = {"label": number % 7, "score": number / 8, "text": " ".join(draw.choices(words, k=number % 9))}
            file.write(json.dumps(row) + "\n")
    with (folder / "payloads.jsonl").open("w") as file:
        for number in range(30):
            data = zlib.compress(bytes(draw.randbytes(number * 11)))
            file.write(json.dumps({"label": number, "data": {"base64": base64.b64encode(data).decode()}}) + "\n")
    info = folder / "plugin/equality_plugin-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: equality-plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)
    (folder / "plugin/equality_plugin.py").write_text(_PLUGIN)


def png(width: int, height: int, draw: random.Random) -> bytes:
    """An RGB picture of noise and slopes."""
    rows = b"".join(
        b"\0" + bytes((3 * x + 5 * y + draw.randrange(30) + 80 * c) % 256 for x in range(width) for c in range(3))
        for y in range(height)
    )

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 6)) + chunk(b"IEND", b"")
