"""Codecs by name, such as ``"2bit:0.5"``: built in, or an installed entry point of the group ``unisono.codecs``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

import torch

from unisono.errors import ConfigError, Problem, nearest_name
from unisono.kvstore.compression.codec import Codec
from unisono.kvstore.compression.contract import contract_violations
from unisono.kvstore.compression.quantize import Cast, Int8, OneBit, TwoBit
from unisono.kvstore.compression.sums import PowerSGD
from unisono.kvstore.compression.topk import TopK

ENTRY_POINT_GROUP = "unisono.codecs"

# a share above this sends more bytes than int8 does
_MAX_SHARE = 1 / 8

# the warning for 1 or 2 bits with an optimizer that divides by a second moment
COARSE_CODEC_WITH_ADAM = (
    "1-bit and 2-bit gradients with Adam, AdamW or LAMB: error feedback keeps the sum of gradients right, but the second moment "
    "is made of squares of what was sent, and is wrong by orders of magnitude (Tang et al. 2021, arXiv:2102.02888). "
    "Use sgd or lars, or int8, bf16 or fp16."
)


def find_codec(text: str) -> Codec | PowerSGD:
    """The codec of this name and argument, such as ``"int8"``, ``"2bit:rms*1.5"``, ``"topk:0.01"``, ``"powersgd:2"``.

    An entry point is called with the text after the colon ("" if there is none), and its codec is checked against
    ``contract``. Raises ConfigError.
    """
    name, _, argument = text.partition(":")
    if name in _BUILT_IN:
        return _BUILT_IN[name](text, argument)
    plugins = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    if name in plugins:
        return _plugged(plugins[name], text, argument)
    raise ConfigError(
        given=f"compression = {text!r}",
        rule=f"it is built in ({', '.join(_BUILT_IN)}) or an installed entry point of the group {ENTRY_POINT_GROUP!r}",
        consequence="gradients would be sent uncompressed, so nothing was started",
        nearest=nearest_name(name, [*_BUILT_IN, *plugins]),
    )


def no_traffic_to_compress(text: str, where: str) -> ConfigError:
    return ConfigError(
        given=f"compression {text!r} {where}",
        rule="compression is for tensors sent between the workers of 'dist_sync', 'dist_async' and 'dist_local'",
        consequence="it would act on nothing",
        nearest="compression 'none'",
    )


def codec_is_fixed(text: str | None) -> ConfigError:
    return ConfigError(
        given=f"compression {text or 'none'!r} after the first push",
        rule="residuals belong to their codec, so it stays from the first push on",
        consequence="compression was not changed",
        nearest="set_compression before the first push, or a new store from this one's values",
    )


def _two_bit(text: str, argument: str) -> TwoBit:
    factor = re.fullmatch(r"rms\*(.+)", argument)
    threshold = _number(factor[1] if factor else argument or "0.5")
    if not 1e-30 <= threshold <= 1e30:
        raise _wrong(text, "the threshold is above 0", "2bit:0.5, or 2bit:rms*1.5 for one relative to the gradient")
    return TwoBit(text, threshold, relative=factor is not None)


def _one_bit_mxnet(text: str, argument: str) -> OneBit:
    threshold = _number(argument or "0.5")
    if not math.isfinite(threshold):
        raise _wrong(text, "the threshold is a number", "1bit-mxnet:0.5")
    return OneBit(text, threshold)


def _top_k(text: str, argument: str) -> TopK:
    share = _number(argument or "0.01")
    if not 0 < share <= _MAX_SHARE:
        raise _wrong(
            text, f"the share kept is above 0 and at most {_MAX_SHARE}", "topk:0.01, or int8 to send all elements"
        )
    return TopK(text, share)


def _power_sgd(text: str, argument: str) -> PowerSGD:
    rank = argument or "2"
    if not re.fullmatch(r"[1-9][0-9]{0,3}", rank):
        raise _wrong(text, "the rank is a whole number from 1 to 9999", "powersgd:2")
    return PowerSGD(text, int(rank))


def _plain(codec: Codec) -> Callable[[str, str], Codec]:
    def build(text: str, argument: str) -> Codec:
        if text != codec.name:
            raise _wrong(text, f"{codec.name} takes no argument", codec.name)
        return codec

    return build


_BUILT_IN: dict[str, Callable[[str, str], Codec | PowerSGD]] = {
    "fp16": _plain(Cast("fp16", torch.float16)),
    "bf16": _plain(Cast("bf16", torch.bfloat16)),
    "int8": _plain(Int8()),
    "2bit": _two_bit,
    "1bit": _plain(OneBit("1bit")),
    "1bit-mxnet": _one_bit_mxnet,
    "topk": _top_k,
    "powersgd": _power_sgd,
}


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _wrong(text: str, rule: str, nearest: str) -> ConfigError:
    return ConfigError(
        given=f"compression = {text!r}",
        rule=rule,
        consequence="there is no such codec, and nothing was started",
        nearest=nearest,
    )


def _plugged(entry: EntryPoint, text: str, argument: str) -> Codec:
    package = entry.dist.name if entry.dist else "an unnamed package"
    try:
        codec: Codec = entry.load()(argument)
    except Exception as error:  # a plug-in may raise anything; the answer must name the package it came from
        raise ConfigError(
            given=f"codec {entry.name!r} of {package!r} could not be made: {error}",
            rule=f"{entry.value} returns a codec for the argument {argument!r}",
            consequence="nothing was started",
            nearest="update that package, or use a built-in codec",
        ) from error
    rules = contract_violations(codec)
    if not rules and codec.name != text:
        rules = [f"has the name it was found by, {text!r}, not {codec.name!r}"]
    if rules:
        raise ConfigError(
            *(
                Problem(
                    given=f"codec {entry.name!r} of {package!r}, which breaks the contract",
                    rule=f"a codec {rule}",
                    consequence="nothing was started",
                    nearest="update that package, or use a built-in codec",
                )
                for rule in rules
            )
        )
    return codec
