"""One contract for all codecs, a plug-in's included: shapes, sizes, what is kept, and codes that no encoder made."""

from __future__ import annotations

import dataclasses
from importlib.metadata import EntryPoint

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unisono.errors import CommError, ConfigError
from unisono.kvstore.compression import Codec, PowerSGD, find_codec, registry
from unisono.kvstore.compression.codec import as_bytes, can_compress_values, check_length, from_bytes
from unisono.kvstore.compression.contract import contract_violations

NAMES = ["2bit:0.5", "2bit:rms*1.5", "1bit", "1bit-mxnet:0.5", "topk:0.01", "int8", "fp16", "bf16", "mine:3"]
SIZES = [0, 1, 15, 16, 17, 1000, 65537]


@dataclasses.dataclass(frozen=True)
class Whole:
    """What a user's package may offer: values as they are, in float32."""

    name: str
    summable: None = None

    def encoded_bytes(self, numel: int) -> int:
        return 4 * numel

    def encode(self, value: Tensor, seed: int = 0) -> Tensor:
        return as_bytes(value.float())

    def decode(self, code: Tensor, numel: int, dtype: torch.dtype, *, trusted: bool = False) -> Tensor:
        check_length(self, code, numel)
        return from_bytes(code, torch.float32).to(dtype)


def make_whole(argument: str) -> Whole:
    if argument != "3":
        raise ValueError(f"{argument!r} is not 3")
    return Whole(f"mine:{argument}")


@pytest.fixture(autouse=True)
def _plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint(name="mine", value=f"{__name__}:make_whole", group=registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda _: make_whole)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == "unisono.codecs" else [])


def codec_of(name: str) -> Codec:
    codec = find_codec(name)
    assert not isinstance(codec, PowerSGD)
    return codec


def values(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_round_trip(name: str, numel: int, dtype: torch.dtype) -> None:
    codec, value = codec_of(name), values(numel, dtype)
    assert codec.name == name
    code = codec.encode(value, seed=1)
    assert code.dtype == torch.uint8
    assert code.shape == (codec.encoded_bytes(numel),)
    decoded = codec.decode(code, numel, dtype)
    assert decoded.shape == (numel,)
    assert decoded.dtype == dtype
    assert torch.equal(decoded, codec.decode(code, numel, dtype, trusted=True))
    assert torch.equal(code, codec.encode(value, seed=1))
    # from the middle of something that arrived, at an odd byte
    arrived = torch.cat([torch.zeros(3, dtype=torch.uint8), code])
    assert torch.equal(decoded, codec.decode(arrived[3:], numel, dtype))


@pytest.mark.parametrize("name", NAMES)
def test_the_contract_that_plugins_are_held_to(name: str) -> None:
    assert contract_violations(codec_of(name)) == []


class Faulty:
    """``Whole`` with one fault."""

    def __init__(self, fault: str) -> None:
        self._whole, self._fault, self._calls = Whole("mine:3"), fault, 0
        self.name = "theirs" if fault == "name" else "mine:3"
        self.summable = torch.float16 if fault == "summable" else None

    def encoded_bytes(self, numel: int) -> int:
        return self._whole.encoded_bytes(numel)

    def encode(self, value: Tensor, seed: int = 0) -> Tensor:
        self._calls += 1
        match self._fault:
            case "length":
                return self._whole.encode(value)[:-1]
            case "seed":
                value = value + self._calls
            case "in place":
                value.mul_(0.5)
            case "hides":
                value = value.nan_to_num(0.0, 0.0, 0.0)
            case "overflows":
                value = value * 1e38
            case "gaps" if not value.is_contiguous():
                value = value + 1
            case "raises":
                raise ZeroDivisionError("oh")
            case _:
                pass
        return self._whole.encode(value)

    def decode(self, code: Tensor, numel: int, dtype: torch.dtype, *, trusted: bool = False) -> Tensor:
        match self._fault:
            case "dtype":
                dtype = torch.float32
            case "trusted" if trusted:
                return self._whole.decode(code, numel, dtype) * 2
            case "any length":
                padded = torch.cat([code.view(torch.uint8).reshape(-1), torch.zeros(4 * numel, dtype=torch.uint8)])
                code = padded[: 4 * numel]
            case "odd byte":
                return code.view(torch.float32).to(dtype)
            case _:
                pass
        return self._whole.decode(code, numel, dtype)


FAULTS = {
    "length": "encodes n elements as uint8 of shape [encoded_bytes(n)]",
    "seed": "gives the same values and seed the same code",
    "in place": "leaves the tensor as it is",
    "hides": "never hides what is not finite",
    "overflows": "gives finite values a code that decodes to finite ones",
    "gaps": "gives a tensor with gaps in memory the code of the same values without",
    "raises": "not ZeroDivisionError: oh",
    "dtype": "decodes to a tensor [n] of the dtype it is asked for",
    "trusted": "decodes trusted codes as others",
    "any length": "raises CommError for a code of another length",
    "odd byte": "encodes and decodes without an error",
    "summable": "has one element of the dtype it is summable in for each element",
    "name": "has the name it was found by, 'mine:3', not 'theirs'",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_plugin_that_breaks_the_contract_is_refused(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EntryPoint, "load", lambda _: lambda argument: Faulty(fault))
    with pytest.raises(ConfigError) as caught:
        find_codec("mine:3")
    assert FAULTS[fault] in str(caught.value)
    assert "codec 'mine' of 'an unnamed package', which breaks the contract" in str(caught.value)


RELATIVE = {"2bit:rms*1.5", "1bit", "topk:0.01", "int8", "fp16", "bf16"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_codes_for_values_follow_the_size_of_a_difference(name: str, scale: float) -> None:
    """Coding again and again what is left out brings most of it through, however small or large it is."""
    codec, left = codec_of(name), values(2000) * scale
    assert can_compress_values(codec) == (name in RELATIVE)
    if not can_compress_values(codec):
        return
    before = left.norm()
    for turn in range(80):
        left = left - codec.decode(codec.encode(left, seed=turn), 2000, torch.float32)
    assert left.norm() < 0.2 * before


def test_a_plugin_may_say_that_its_codes_are_for_values() -> None:
    @dataclasses.dataclass(frozen=True)
    class Exact(Whole):
        relative: bool = True

    assert can_compress_values(Exact("mine"))
    assert not can_compress_values(Exact("mine", relative=False))
    assert not can_compress_values(Whole("mine"))


# bytes for 0, 1, 17, 1000 and 65537 elements
BYTES = {
    "2bit:0.5": [8, 12, 16, 260, 16396],
    "2bit:rms*1.5": [8, 12, 16, 260, 16396],
    "1bit": [8, 12, 12, 136, 8204],
    "1bit-mxnet:0.5": [8, 12, 12, 136, 8204],
    "topk:0.01": [0, 10, 10, 64, 3944],
    "int8": [0, 5, 21, 1004, 65797],
    "fp16": [0, 2, 34, 2000, 131074],
    "bf16": [0, 2, 34, 2000, 131074],
    "mine:3": [0, 4, 68, 4000, 262148],
}


@pytest.mark.parametrize("name", NAMES)
def test_sizes(name: str) -> None:
    assert [codec_of(name).encoded_bytes(numel) for numel in (0, 1, 17, 1000, 65537)] == BYTES[name]


@pytest.mark.parametrize("name", NAMES)
def test_not_contiguous(name: str) -> None:
    codec, value = codec_of(name), values(2000)[::2]
    assert not value.is_contiguous()
    assert torch.equal(codec.encode(value), codec.encode(value.contiguous()))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "1bit-mxnet:0.5"])
def test_zeros_stay_zeros(name: str) -> None:
    codec = codec_of(name)
    assert not codec.decode(codec.encode(torch.zeros(1025)), 1025, torch.float32).any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("numel", [1, 1025, 100_000])
def test_what_is_not_finite_is_never_hidden(name: str, bad: float, numel: int) -> None:
    codec, value = codec_of(name), values(numel)
    value[numel // 2] = bad
    assert not codec.decode(codec.encode(value), numel, torch.float32).isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_large_and_tiny_values(name: str) -> None:
    """Nothing finite becomes NaN, whatever its scale; float16 alone may overflow."""
    codec = codec_of(name)
    for scale in (1e-42, 1e-38, 1e4, 1e15):
        if scale == 1e15 and name == "fp16":
            continue
        assert codec.decode(codec.encode(values(2000) * scale), 2000, torch.float32).isfinite().all()


def test_int8_is_right_on_average_and_within_one_step() -> None:
    codec, value = codec_of("int8"), values(1024)
    step = float(value.abs().max()) / 127
    decoded = torch.stack([codec.decode(codec.encode(value, seed), 1024, torch.float32) for seed in range(400)])
    assert float((decoded - value).abs().max()) < step * 1.0001
    assert float((decoded.mean(0) - value).abs().max()) < step * 0.15  # six standard errors of 0.5 / sqrt(400)
    assert not torch.equal(decoded[0], decoded[1])


@pytest.mark.parametrize("numel", [10, 1000, 65536, 65537, 200_003])
@pytest.mark.parametrize("kind", ["normal", "few", "equal"])
def test_topk_keeps_the_largest(numel: int, kind: str) -> None:
    codec, value = codec_of("topk:0.01"), values(numel)
    if kind == "few":  # so few that a sample sees none of them
        value = torch.zeros(numel)
        value[numel // 3] = 5.0
    if kind == "equal":
        value = torch.ones(numel)
    decoded = codec.decode(codec.encode(value), numel, torch.float32)
    kept = max(1, -(-numel // 100))
    sent = decoded != 0
    assert int(sent.sum()) == (1 if kind == "few" else kept)
    assert torch.equal(decoded[sent], value[sent])
    assert torch.equal(decoded.abs().sort().values[-kept:], value.abs().sort().values[-kept:])


def test_the_scaled_sign() -> None:
    codec = codec_of("1bit")
    decoded = codec.decode(codec.encode(torch.tensor([3.0, -1.0, 0.0, -2.0])), 4, torch.float32)
    assert decoded.tolist() == [1.5, -1.5, 1.5, -1.5]


def test_the_relative_threshold() -> None:
    codec = codec_of("2bit:rms*1.5")
    decoded = codec.decode(codec.encode(torch.tensor([2.0, -2.0, 0.0, 0.0])), 4, torch.float32)
    assert decoded.tolist() == [0.0] * 4  # the rms is 1.41, and 2 is less than 1.5 times that
    decoded = codec.decode(codec.encode(torch.tensor([0.0, -4.0, 0.0, 0.0])), 4, torch.float32)
    assert decoded.tolist() == pytest.approx([0, -3, 0, 0])


# --- codes that no encoder made ----------------------------------------------------------------------------------------


def words(*numbers: float, dtype: torch.dtype) -> list[int]:
    return as_bytes(torch.tensor(numbers, dtype=dtype)).tolist()


LEVEL = words(0.5, dtype=torch.float32)
HOSTILE = {
    "a 01": ("2bit:0.5", 5, [*LEVEL, 5, 0, 0, 0, 0b01000000, 0, 0, 0]),
    "bits after the last element": ("2bit:0.5", 5, [*LEVEL, 5, 0, 0, 0, 0, 0b00110000, 0, 0]),
    "its header counts 6": ("2bit:0.5", 5, [*LEVEL, 6, 0, 0, 0, 0, 0, 0, 0]),
    "its header counts 4294967295": ("1bit", 5, [*LEVEL, 255, 255, 255, 255, 0, 0, 0, 0]),
    "level -1.0": ("1bit", 5, [*words(-1.0, dtype=torch.float32), 5, 0, 0, 0, 0, 0, 0, 0]),
    "level inf": ("2bit:0.5", 5, [*words(float("inf"), dtype=torch.float32), 5, 0, 0, 0, 0, 0, 0, 0]),
    "bits after the last": ("1bit", 5, [*LEVEL, 5, 0, 0, 0, 0b00000100, 0, 0, 0]),
    "a -128": ("int8", 2, [*words(1.0, dtype=torch.float32), 128, 0]),
    "a scale below 0 or infinite": ("int8", 2, [*words(-1.0, dtype=torch.float32), 1, 0]),
    "its blocks' counts do not add up": ("topk:0.1", 20, [1, 0, 0, 0, 3, 0, 4, 0, *words(1, 2, dtype=torch.float32)]),
    "a position past the end": ("topk:0.1", 20, [2, 0, 0, 0, 3, 0, 20, 0, *words(1, 2, dtype=torch.float32)]),
    "positions that do not rise": ("topk:0.1", 20, [2, 0, 0, 0, 3, 0, 3, 0, *words(1, 2, dtype=torch.float32)]),
    "counts do not add up": (
        "topk:0.1",
        20,
        [255, 255, 255, 255, 3, 0, 4, 0, *words(1, 2, dtype=torch.float32)],
    ),
    "torch.uint8 of shape [3]": ("fp16", 2, [0, 0, 0]),
}


@pytest.mark.parametrize("given_text", HOSTILE)
def test_hostile_codes_are_refused(given_text: str) -> None:
    name, numel, code = HOSTILE[given_text]
    with pytest.raises(CommError) as caught:
        codec_of(name).decode(torch.tensor(code, dtype=torch.uint8), numel, torch.float32)
    assert f"a {name} code of {numel} elements: " in str(caught.value)
    assert given_text in str(caught.value)
    assert "nothing of it was used" in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_length_and_dtype_are_refused(name: str) -> None:
    codec = codec_of(name)
    code = codec.encode(values(100))
    for wrong in (code[:-1], torch.cat([code, code[:1]]), code[None], code.to(torch.int8)):
        with pytest.raises(CommError, match="of 100 elements"):
            codec.decode(wrong, 100, torch.float32, trusted=True)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_bytes_give_a_tensor_or_a_refusal(name: str, data: st.DataObject) -> None:
    codec = codec_of(name)
    numel = data.draw(st.sampled_from([1, 17, 300, 65537]))
    code = codec.encode(values(numel))
    for _ in range(data.draw(st.integers(1, 4))):
        # the front holds headers and counts, where damage does most
        place = data.draw(st.integers(0, min(code.numel(), 24) - 1) | st.integers(0, code.numel() - 1))
        code[place] = data.draw(st.integers(0, 255))
    try:
        decoded = codec.decode(code, numel, torch.float32)
    except CommError:
        return
    assert decoded.shape == (numel,)
