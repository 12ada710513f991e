"""The settings of a measurement: kinds, codecs, and sizes or the parameter tables of known models.

The tables are computed from how the models are built: ResNet-50 (He et al. 2015, arXiv:1512.03385) with torchvision's
names for its parts, and BERT-base (Devlin et al. 2018, arXiv:1810.04805) with its pooler.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from unisono.errors import ConfigError, Problem, nearest_name

# in the order of the table; "all_reduce" is torch's, of one flat tensor; "_shm" is with memory that processes of a host share
KINDS = ("all_reduce", "local", "dist_sync", "dist_sync_shm", "dist_local", "dist_async", "dist_async_shm")
CODED_KINDS = ("dist_sync", "dist_async")
ITEM_BYTES = 4  # everything is float32

Shapes = Mapping[str, tuple[int, ...]]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_MOST_BYTES = 8 * 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchSettings:
    """``rounds`` of push and pull are timed for every kind, codec and size; values are float32.

    ``sizes`` are single keys such as ``"100MB"``, or ``"resnet50"`` and ``"bert-base"``. ``codecs`` as ``find_codec``
    takes them, and ``"none"``; they apply to the kinds of ``CODED_KINDS``. ``tls``: a folder of certificates for
    ``dist_async``. Raises ConfigError with all problems.
    """

    kinds: tuple[str, ...] = ("dist_sync", "dist_sync_shm", "dist_async", "dist_async_shm")
    sizes: tuple[str, ...] = ("1KB", "1MB", "10MB", "100MB")
    codecs: tuple[str, ...] = ("none",)
    servers: int = 1
    rounds: int = 5
    tls: str = ""

    def __post_init__(self) -> None:
        rule = f"kinds are {', '.join(KINDS)}"
        problems = [
            _problem(f"kind {kind!r}", rule, nearest_name(kind, KINDS)) for kind in self.kinds if kind not in KINDS
        ]
        for size in self.sizes:
            try:
                shapes_of(size)
            except ConfigError as error:
                problems += error.problems
        coded = [codec for codec in self.codecs if codec != "none"]
        problems += _unknown(coded)
        if coded and not set(self.kinds) & set(CODED_KINDS):
            given = f"codecs {', '.join(self.codecs)} for {', '.join(self.kinds)}, where they would have no effect"
            rule = f"codecs are for {' and '.join(CODED_KINDS)}"
            problems.append(_problem(given, rule, "--kind dist_async, or no --codec"))
        if self.tls and "dist_async" not in self.kinds:
            given = f"TLS for {', '.join(self.kinds)}, where it would have no effect"
            problems.append(_problem(given, "TLS is for the servers of 'dist_async'", "--kind dist_async, or no --tls"))
        if "dist_async" in self.kinds:
            rule = "PowerSGD needs the sums of all workers' factors, and servers add workers one by one"
            problems += [
                _problem(f"codec {codec!r} for dist_async", rule, "--kind dist_sync")
                for codec in self.codecs
                if codec.startswith("powersgd")
            ]
        if problems:
            raise ConfigError(*problems)


def _problem(given: str, rule: str, nearest: str) -> Problem:
    return Problem(given=given, rule=rule, consequence="nothing was measured", nearest=nearest)


def _unknown(codecs: Sequence[str]) -> Iterator[Problem]:
    if codecs:
        from unisono.kvstore.compression import find_codec  # imports torch

        for codec in codecs:
            try:
                find_codec(codec)
            except ConfigError as error:
                yield from error.problems


def shapes_of(size: str) -> Shapes:
    """Shapes by key. Raises ConfigError for a size that is not known and not up to 8 GiB."""
    if size in KEY_SETS:
        return KEY_SETS[size]()
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", size)
    unit = _UNITS.get(match[2].upper()) if match else None
    nbytes = float(match[1]) * unit if match and unit else 0.0
    if not ITEM_BYTES <= nbytes <= _MOST_BYTES:
        raise ConfigError(
            given=f"size {size!r}",
            rule=f"it is 4B to 8GiB, or one of {', '.join(KEY_SETS)}",
            consequence="nothing was measured",
            nearest=nearest_name(size, [*KEY_SETS, "1KB", "10MB", "100MB"]),
        )
    return {"value": (int(nbytes) // ITEM_BYTES,)}


def nbytes_of(shapes: Shapes) -> int:
    """Bytes of all keys."""
    return sum(math.prod(shape) for shape in shapes.values()) * ITEM_BYTES


def resnet50() -> Shapes:
    """25.6 million elements in 161 keys, the smallest of 64 elements."""
    shapes: dict[str, tuple[int, ...]] = dict(_convolution("stem", 64, 3, 7))
    channels = 64
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        for block in range(blocks):
            name, out = f"layer{stage}.{block}", 4 * width
            parts = [("1", width, channels, 1), ("2", width, width, 3), ("3", out, width, 1)]
            if block == 0:
                parts.append(("down", out, channels, 1))
            for part, into, of, side in parts:
                shapes |= _convolution(f"{name}.{part}", into, of, side)
            channels = out
    return shapes | {"fc.weight": (1000, channels), "fc.bias": (1000,)}


def bert_base() -> Shapes:
    """109.5 million elements in 199 keys, the largest of 94 MB."""
    dim, hidden = 768, 3072
    shapes: dict[str, tuple[int, ...]] = {"words": (30522, dim), "positions": (512, dim), "types": (2, dim)}
    shapes |= _norm("embeddings.norm", dim)
    for layer in range(12):
        for part in ("query", "key", "value", "out"):
            shapes |= _linear(f"{layer}.{part}", dim, dim)
        shapes |= _norm(f"{layer}.attention.norm", dim)
        shapes |= {**_linear(f"{layer}.up", hidden, dim), **_linear(f"{layer}.down", dim, hidden)}
        shapes |= _norm(f"{layer}.norm", dim)
    return shapes | dict(_linear("pooler", dim, dim))


KEY_SETS = {"resnet50": resnet50, "bert-base": bert_base}


def _convolution(name: str, into: int, of: int, side: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.conv", (into, of, side, side)
    yield from _norm(f"{name}.norm", into).items()


def _norm(name: str, dim: int) -> Shapes:
    return {f"{name}.weight": (dim,), f"{name}.bias": (dim,)}


def _linear(name: str, into: int, of: int) -> Shapes:
    return {f"{name}.weight": (into, of), f"{name}.bias": (into,)}


def split_repeated(texts: Sequence[str]) -> tuple[str, ...]:
    """Values of options that were repeated or comma-separated, distinct and in order."""
    return tuple(dict.fromkeys(part.strip() for text in texts for part in text.split(",") if part.strip()))
