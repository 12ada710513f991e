"""The rules that every codec keeps, checked on small tensors: for plug-ins before use, for all codecs by their tests.

Workers exchange codes, so a codec that breaks a rule does not fail locally: workers would hold different values, wait
for bytes that never come, or train on after a non-finite gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from unisono.errors import CommError
from unisono.kvstore.compression.codec import Codec

_SIZES = (0, 1, 17, 1000, 4097)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_NOT_FINITE = (float("nan"), float("inf"), -float("inf"))


def contract_violations(codec: Codec) -> list[str]:
    """The rules of ``Codec`` that ``codec`` breaks, in words; an exception counts as one."""
    rules: dict[str, None] = {}
    try:
        for rule in _broken(codec):
            rules[rule] = None
    except Exception as error:  # a plug-in's code may raise anything
        rules[f"encodes and decodes without an error, not {type(error).__name__}: {error}"] = None
    return list(rules)


def _broken(codec: Codec) -> Iterator[str]:
    for numel in _SIZES:
        for dtype in _DTYPES:
            yield from _round_trip(codec, numel, dtype)
    plain = _values(2000)
    if not torch.equal(codec.encode(plain[::2]), codec.encode(plain[::2].contiguous())):
        yield "gives a tensor with gaps in memory the code of the same values without"
    for scale in (1e-38, 1.0, 1e4):
        if not _decoded(codec, _values(2000) * scale).isfinite().all():
            yield "gives finite values a code that decodes to finite ones"
    for bad in _NOT_FINITE:
        for numel in (1, 1025):
            value = _values(numel)
            value[numel // 2] = bad
            if _decoded(codec, value).isfinite().all():
                yield "never hides what is not finite: its code decodes to something that is not"
    code = codec.encode(_values(100))
    if len(code) > 0:
        for wrong in (code[:-1], torch.cat([code, code[:1]]), code[None], code.to(torch.int8)):
            if not _refuses(lambda wrong=wrong: codec.decode(wrong, 100, torch.float32)):
                yield "raises CommError for a code of another length, shape or dtype (``check_length``)"


def _round_trip(codec: Codec, numel: int, dtype: torch.dtype) -> Iterator[str]:
    value = _values(numel).to(dtype)
    before = value.clone()
    code = codec.encode(value, seed=1)
    if not torch.equal(value, before):
        yield "leaves the tensor as it is"
    if code.dtype != torch.uint8 or code.shape != (codec.encoded_bytes(numel),):
        yield "encodes n elements as uint8 of shape [encoded_bytes(n)]"
        return
    if not torch.equal(code, codec.encode(value, seed=1)):
        yield "gives the same values and seed the same code"
    decoded = codec.decode(code, numel, dtype)
    if decoded.shape != (numel,) or decoded.dtype != dtype:
        yield "decodes to a tensor [n] of the dtype it is asked for"
        return
    arrived = torch.cat([torch.zeros(3, dtype=torch.uint8), code])[3:]
    if not torch.equal(decoded, codec.decode(arrived, numel, dtype)):
        yield "decodes a code that starts at any byte of memory"
    if not torch.equal(decoded, codec.decode(code, numel, dtype, trusted=True)):
        yield "decodes trusted codes as others"
    if codec.summable is not None and codec.encoded_bytes(numel) != numel * codec.summable.itemsize:
        yield "has one element of the dtype it is summable in for each element"


def _values(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel))


def _decoded(codec: Codec, value: Tensor) -> Tensor:
    return codec.decode(codec.encode(value), len(value), torch.float32)


def _refuses(decode: Callable[[], object]) -> bool:
    try:
        decode()
    except CommError:
        return True
    return False
