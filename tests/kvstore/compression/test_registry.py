"""Codecs by name: what is accepted, and the answer to what is not."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from unisono.errors import ConfigError
from unisono.kvstore.compression import PowerSGD, find_codec, registry
from unisono.kvstore.compression.quantize import OneBit, TwoBit
from unisono.kvstore.compression.topk import TopK


def test_arguments() -> None:
    assert find_codec("2bit") == TwoBit("2bit", 0.5)
    assert find_codec("2bit:0.25") == TwoBit("2bit:0.25", 0.25)
    assert find_codec("2bit:rms*1.5") == TwoBit("2bit:rms*1.5", 1.5, relative=True)
    assert find_codec("1bit") == OneBit("1bit")
    assert find_codec("1bit-mxnet:-0.5") == OneBit("1bit-mxnet:-0.5", -0.5)
    assert find_codec("topk:0.125") == TopK("topk:0.125", 0.125)
    assert find_codec("powersgd:4") == PowerSGD("powersgd:4", 4)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("2bits", ["compression = '2bits'", "did you mean '2bit'?", "gradients would be sent uncompressed"]),
        ("zip", ["fp16, bf16, int8, 2bit, 1bit, 1bit-mxnet, topk, powersgd", "one of: "]),
        ("", ["compression = ''"]),
        ("2bit:0", ["compression = '2bit:0'", "the threshold is above 0", "2bit:rms*1.5"]),
        ("2bit:-1", ["the threshold is above 0"]),
        ("2bit:inf", ["the threshold is above 0"]),
        ("2bit:nan", ["the threshold is above 0"]),
        ("2bit:rms*0", ["the threshold is above 0"]),
        ("2bit:rms", ["the threshold is above 0"]),
        ("1bit:0.5", ["compression = '1bit:0.5'", "1bit takes no argument"]),
        ("int8:4", ["int8 takes no argument"]),
        ("int8:", ["int8 takes no argument"]),
        ("1bit-mxnet:much", ["the threshold is a number"]),
        ("topk:0.2", ["above 0 and at most 0.125", "int8 to send all elements"]),
        ("topk:0", ["above 0 and at most 0.125"]),
        ("powersgd:0", ["whole number from 1 to 9999"]),
        ("powersgd:1.5", ["whole number from 1 to 9999"]),
    ],
)
def test_refusals(text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        find_codec(text)
    for part in parts:
        assert part in str(caught.value)


def test_a_plugin_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint(name="mine", value="no_such_module_here:make", group=registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    with pytest.raises(ConfigError) as caught:
        find_codec("mine:7")
    text = str(caught.value)
    assert "codec 'mine' of 'an unnamed package' could not be made: No module named 'no_such_module_here'" in text
    assert "no_such_module_here:make returns a codec for the argument '7'" in text
    with pytest.raises(ConfigError, match="did you mean 'mine'"):
        find_codec("mien")


def test_a_tensor_too_long_to_count() -> None:
    with pytest.raises(ConfigError, match="at most 4294967295 elements"):
        find_codec("2bit").encoded_bytes(2**32)
