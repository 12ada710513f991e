"""What the snippets of all libraries are given: weights, samples and pictures, the same numbers everywhere."""

import struct
import zlib

import numpy as np

WEIGHT = np.array([[0.1, -0.2, 0.3]], np.float32)
BIAS = np.array([0.05], np.float32)
_random = np.random.RandomState(0)
INPUTS = _random.normal(size=(64, 3)).astype(np.float32)
TARGETS = (INPUTS.sum(axis=1, keepdims=True) > 0).astype(
    np.float32
)
# two layers with a function in between
UP = _random.normal(size=(8, 3)).astype(np.float32)
DOWN = _random.normal(size=(1, 8)).astype(np.float32)


def parts(count):
    """``INPUTS`` and ``TARGETS`` in ``count`` equal parts."""
    pairs = zip(
        np.split(INPUTS, count),
        np.split(TARGETS, count),
        strict=True,
    )
    return [
        (inputs.copy(), targets.copy())
        for inputs, targets in pairs
    ]


def picture(number):
    """A picture [16, 16, 3] of uint8."""
    return (
        np.random.RandomState(number)
        .randint(0, 256, (16, 16, 3))
        .astype(np.uint8)
    )


def png(pixels):
    """The bytes of a PNG of ``pixels`` [height, width, 3]; no library that draws is needed."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [
        (b"IHDR", size),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data))
        + kind
        + data
        + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
