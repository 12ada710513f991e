from __future__ import annotations

import json
import sys

import pytest

from unisono.storage.limits import LimitError, decode_json, num_elements


def test_depth_is_counted_outside_of_strings() -> None:
    piece = 1 << 20
    for filler in (
        b"",
        b" " * (piece - 7),
        b'"' + b"[" * (2 * piece) + b'",',
        b'"' + b'\\"[' * piece + b'",',
        b'"\\\\",',
    ):
        for depth, fine in ((100, True), (101, False)):
            lists = b"[" * (depth - 1) + b"]" * (depth - 1)
            text = b"[" + filler + b'"]]]","\\"{{{",' + b"[1]," * 2000 + lists + b"]"
            assert json.loads(text)
            if fine:
                decode_json(text)
            else:
                with pytest.raises(LimitError, match="JSON with more than 100 lists"):
                    decode_json(text)
    for shift in range(-4, 5):  # an escape at the end of a piece
        text = (
            b"[" + b" " * (piece + shift - 6) + b'"\\\\\\"[[[",' + b"[" * 50 + b"]" * 50 + b"," + b"[1]," * 100 + b"0]"
        )
        decode_json(text)


def test_the_limit_of_depth_holds_where_python_has_none() -> None:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)  # then the decoder itself would end the process
    try:
        with pytest.raises(LimitError):
            decode_json(b"[" * 10**6)
    finally:
        sys.setrecursionlimit(before)


def test_number_of_elements() -> None:
    assert num_elements([]) == 1
    assert num_elements([2, 0, 3]) == 0
    assert num_elements([1] * 64) == 1
    assert num_elements([2**31, 2**30], 2) == 2**61
    for shape in ([1] * 65, [2**62], [2**63], [2**31, 2**32], [-1], [0, 2**62, 2]):
        with pytest.raises(LimitError):
            num_elements(shape, 2)
