"""Measure whether compression pays on this machine and link.

It usually does not: of more than 200 realistic data-centre setups it sped up 6 (Agarwal et al. 2022, arXiv:2103.00543).
The rule: encode + decode + sending the code takes at least a tenth less time than sending the gradients, because one
measurement is not more exact than that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from unisono.device.torch_adapters import adapter_of
from unisono.dist import World
from unisono.errors import ConfigError
from unisono.kvstore.compression.codec import Codec
from unisono.kvstore.compression.error_feedback import ErrorFeedback
from unisono.kvstore.compression.registry import find_codec
from unisono.kvstore.compression.sums import PowerSGD

# by all reports these do not change convergence; coarser codecs are the user's decision
CANDIDATES = ("bf16", "int8")

_LEAST_GAIN = 0.1
_SAMPLE_ELEMENTS = 2**20
_REPEATS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecSpeed:
    """A codec's cost on float32 gradients on this device."""

    name: str
    # gradient bytes over code bytes
    ratio: float
    # seconds for a byte of gradient, error feedback included
    encode_s_per_byte: float
    decode_s_per_byte: float
    # codes are added by the all-reduce, else gathered
    summable: bool


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """A codec to compress gradients with, or none.

    Attributes:
        codec: Its name; None if gradients should be sent uncompressed.
        reason: The measured times, in words.
    """

    codec: str | None
    reason: str


def choose_codec(speeds: Sequence[CodecSpeed], link_s: float, ranks: int) -> CodecChoice:
    """The codec that sums a byte of gradient fastest, or none.

    ``link_s``: seconds of a plain all-reduce over ``ranks`` workers per byte of gradient. A ring all-reduce sends a
    byte 2(n-1)/n times and an all-gather n-1 times, so gathered codes take ``n/2 * link_s / ratio`` and are decoded n
    times.
    """
    if not speeds or ranks < 2:
        return CodecChoice(
            None, f"no compression: {ranks} worker{'s' * (ranks != 1)}, {len(speeds)} codecs to choose from"
        )
    seconds = {speed.name: _seconds(speed, link_s, ranks) for speed in speeds}
    best = min(seconds, key=lambda name: seconds[name])
    pays = seconds[best] < (1 - _LEAST_GAIN) * link_s
    numbers = (
        f"{seconds[best] * 2**30:.3g} s for a GiB of gradients with {best}, {link_s * 2**30:.3g} s without, "
        f"over {ranks} workers at {1e-9 / link_s:.3g} GB/s"
    )
    return CodecChoice(best, f"{best}: {numbers}") if pays else CodecChoice(None, f"no compression: {numbers}")


def _seconds(speed: CodecSpeed, link_s: float, ranks: int) -> float:
    if speed.summable:
        return speed.encode_s_per_byte + speed.decode_s_per_byte + link_s / speed.ratio
    return speed.encode_s_per_byte + ranks * speed.decode_s_per_byte + ranks / 2 * link_s / speed.ratio


def auto_codec(
    world: World,
    device: torch.device,
    *,
    candidates: Sequence[str] = CANDIDATES,
    group: ProcessGroup | None = None,
    link_bytes_per_s: float | None = None,
) -> CodecChoice:
    """Measure codecs and the link on all ranks, and return rank 0's choice on each.

    A collective, of well under a second on a link of 1 GB/s.

    Args:
        world: The ranks, all of which call this.
        device: Device of the gradients, on which the codecs are measured.
        candidates: Names of the codecs to choose from, as ``find_codec`` takes them.
        group: The ranks over which gradients are summed; None for all of ``world``.
        link_bytes_per_s: Gradient bytes per second that an all-reduce over ``group`` sums; None: it is measured.

    Returns:
        The codec that sums gradients fastest, if it takes at least a tenth less time than none, and the reason.

    Raises:
        ConfigError: A candidate is unknown, or cannot be measured alone (PowerSGD).
        CommError: A rank is lost.
    """
    codecs = [_measurable(name) for name in candidates]
    ranks = dist.get_world_size(group) if group is not None else world.world_size
    if ranks < 2:
        return choose_codec([], math.inf, ranks)
    if link_bytes_per_s is None:
        link_s = _link_s(world, device, group)
    else:
        link_s = 1 / link_bytes_per_s
    choice = choose_codec([measure_codec(codec, device) for codec in codecs], link_s, ranks)
    codec, reason = world.broadcast_json([choice.codec, choice.reason])
    return CodecChoice(codec, reason)


def _measurable(name: str) -> Codec:
    codec = find_codec(name)
    if isinstance(codec, PowerSGD):
        raise ConfigError(
            given=f"{name!r} among the codecs to choose from",
            rule="auto compares codecs of any tensor; PowerSGD's cost depends on the shapes of all matrices",
            consequence="nothing was measured",
            nearest=f"compression = {name!r} without auto",
        )
    return codec


def measure_codec(codec: Codec, device: torch.device) -> CodecSpeed:
    """Measure on a million normal numbers; the fastest of three runs."""
    value = torch.randn(_SAMPLE_ELEMENTS, device=device)
    code, feedback = codec.encode(value), ErrorFeedback({"sample": value})

    def encode() -> None:
        feedback.encode(codec, "sample", value)
        feedback.commit(True)

    return CodecSpeed(
        name=codec.name,
        ratio=value.nbytes / code.numel(),
        encode_s_per_byte=_quickest(encode, device) / value.nbytes,
        decode_s_per_byte=_quickest(lambda: codec.decode(code, value.numel(), value.dtype, trusted=True), device)
        / value.nbytes,
        summable=codec.summable is not None,
    )


def _link_s(world: World, device: torch.device, group: ProcessGroup | None) -> float:
    value = torch.zeros(_SAMPLE_ELEMENTS, device=device)
    with world.explain_errors("measuring all-reduce", value.nbytes):
        return _quickest(lambda: dist.all_reduce(value, group=group or world.group), device) / value.nbytes


def _quickest(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest run, after one warm-up."""
    seconds: list[float] = []
    for _ in range(1 + _REPEATS):
        _wait_for(device)
        start = time.monotonic()
        work()
        _wait_for(device)
        seconds.append(time.monotonic() - start)
    return min(seconds[1:])


def _wait_for(device: torch.device) -> None:
    adapter, index = adapter_of(device)
    adapter.synchronize(index)
