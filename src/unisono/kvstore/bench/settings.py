"""The settings of a measurement: kinds, codecs, and sizes or the parameter tables of known models.

The models are ResNet-50 (He et al. 2015, arXiv:1512.03385) and BERT-base (Devlin et al. 2018, arXiv:1810.04805).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from unisono.errors import ConfigError, Problem, nearest_name

if TYPE_CHECKING:
    from torch import nn

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
    if size in _KEY_SETS:
        return _KEY_SETS[size]()
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", size)
    unit = _UNITS.get(match[2].upper()) if match else None
    nbytes = float(match[1]) * unit if match and unit else 0.0
    if not ITEM_BYTES <= nbytes <= _MOST_BYTES:
        raise ConfigError(
            given=f"size {size!r}",
            rule=f"it is 4B to 8GiB, or one of {', '.join(_KEY_SETS)}",
            consequence="nothing was measured",
            nearest=nearest_name(size, [*_KEY_SETS, "1KB", "10MB", "100MB"]),
        )
    return {"value": (int(nbytes) // ITEM_BYTES,)}


def nbytes_of(shapes: Shapes) -> int:
    """Bytes of all keys."""
    return sum(math.prod(shape) for shape in shapes.values()) * ITEM_BYTES


@cache
def _resnet50() -> Shapes:
    """25.6 million elements in 161 keys, the smallest of 64 elements."""
    from unisono.models import ResNet, ResNetOptions  # imports torch

    return _parameter_shapes(lambda: ResNet(ResNetOptions()))


@cache
def _bert_base() -> Shapes:
    """109.5 million elements in 199 keys, the largest of 94 MB: the encoder with the paper's pooler, without a head."""
    from unisono.models import BERT, BertOptions

    shapes = _parameter_shapes(lambda: BERT(BertOptions(vocab_size=30522)))
    encoder = {key: shape for key, shape in shapes.items() if not key.startswith("head.")}
    return encoder | {"pooler.weight": (768, 768), "pooler.bias": (768,)}


def _parameter_shapes(build: Callable[[], nn.Module]) -> Shapes:
    import torch

    with torch.device("meta"):
        return {key: tuple(parameter.shape) for key, parameter in build().named_parameters()}


_KEY_SETS = {"resnet50": _resnet50, "bert-base": _bert_base}


def split_repeated(texts: Sequence[str]) -> tuple[str, ...]:
    """Values of options that were repeated or comma-separated, distinct and in order."""
    return tuple(dict.fromkeys(part.strip() for text in texts for part in text.split(",") if part.strip()))
