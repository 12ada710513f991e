from __future__ import annotations

import json
import struct

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from unisono.checkpoint.safetensors_format import build_header, dtype_code, dtype_from_code, header_length, parse_header


def test_header_and_offsets_survive_the_round_trip_and_data_is_aligned():
    tensors = [
        ("w", torch.float32, (3, 2)),
        ("b", torch.bfloat16, (5,)),
        ("s", torch.bool, ()),
        ("e", torch.int8, (0, 9)),
    ]
    header, begins = build_header(tensors, {"step": "12"})
    assert len(header) % 64 == 0
    assert begins == [len(header), len(header) + 24, len(header) + 34, len(header) + 35]
    size = len(header) + 35
    assert header_length(header[:8], size) == len(header) - 8
    parsed = parse_header(header[8:], size)
    assert [(key, each.dtype, each.shape, each.begin) for key, each in parsed.items()] == [
        (key, dtype, shape, begin) for (key, dtype, shape), begin in zip(tensors, begins, strict=True)
    ]


def test_two_tensors_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two tensors are called 'w'"):
        build_header([("w", torch.float32, (1,)), ("w", torch.float32, (1,))], {})


def test_dtypes_have_the_names_the_safetensors_package_gives_them():
    from safetensors.torch import _TYPES

    for code, dtype in _TYPES.items():
        if dtype_code(dtype) is not None:
            assert dtype_code(dtype) == code
            assert dtype_from_code(code) == dtype
    with pytest.raises(ValueError, match="unknown dtype 'F7'"):
        dtype_from_code("F7")


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([1], "no JSON object"),
        ({"w": 3}, "'w' is malformed"),
        ({"w": entry(dtype="F99")}, "unknown dtype 'F99'"),
        ({"w": entry(shape=(-2,))}, "whole numbers from 0"),
        ({"w": entry(shape=(2.0,))}, "whole numbers from 0"),
        ({"w": entry(shape=(True, 2))}, "whole numbers from 0"),
        ({"w": entry(offsets=(0, 8, 9))}, "'w' is malformed"),
        ({"w": entry(offsets=(8, 0))}, "-8 bytes, its shape needs 8"),
        ({"w": entry(shape=(3,))}, "8 bytes, its shape needs 12"),
        ({"w": entry(offsets=(4, 12))}, "begin at"),
        ({"w": entry(), "v": entry()}, "begin at"),
        ({"w": entry(shape=(1,), offsets=(0, 4))}, "end at byte"),
        ({}, "end at byte"),
    ],
)
def test_a_header_that_contradicts_itself_or_the_file_is_refused(header, message):
    text = json.dumps(header).encode()
    with pytest.raises(ValueError, match=message):
        parse_header(text, 8 + len(text) + 8)


def test_an_absurd_header_length_is_refused_before_anything_is_read():
    for length in (2**63, 10**8 + 1, 93):
        with pytest.raises(ValueError, match=f"a header of {length} bytes does not fit a file of 100"):
            header_length(struct.pack("<Q", length), 100)
    with pytest.raises(ValueError, match="3 bytes are too few"):
        header_length(b"abc", 3)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
@example(data=None)
def test_a_changed_header_is_refused_or_still_describes_the_same_bytes(data):
    header, _ = build_header([("w", torch.float32, (3, 2)), ("b", torch.int8, (5,))], {})
    text = bytearray(header[8:])
    if data is not None:
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = parse_header(bytes(text), len(header) + 29)
    except ValueError:
        return
    assert sorted(each.end - each.begin for each in found.values()) == [5, 24]
