"""Bit for bit what MXNet's gradient compression sends and holds back (vectors computed by MXNet 1.9.1)."""

from __future__ import annotations

import pytest
import torch

from unisono.kvstore.compression import ErrorFeedback, PowerSGD, find_codec

HEADER = 8

PR_7512 = [-6.0, -2, 3, 1, 10, 5, -3, 2, -8, 0]
HELD = [-3.0, 1, -1, 5, -2, 2, 3, -7, -2, -100]
SMALL = [0.625, -0.5, 0.375, -0.125, 0.5]

VECTORS = {
    "twice": (
        "2bit:0.5",
        [0.0] * 5,
        [
            (SMALL, "e0c00000", [0.5, -0.5, 0, 0, 0.5], [0.125, 0, 0.375, -0.125, 0]),
            (SMALL, "ecc00000", [0.5, -0.5, 0.5, 0, 0.5], [0.25, 0, 0.25, -0.25, 0]),
        ],
    ),
    "pull request 7512": (
        "2bit:4",
        HELD,
        [(PR_7512, "83f2a000", [-4, 0, 0, 4, 4, 4, 0, -4, -4, -4], [-5, -1, 2, 2, 4, 3, 0, -1, -6, -96])],
    ),
    "at most one quantum": ("2bit:0.5", [0.0], [([5.0], "c0000000", [0.5], [4.5])]),
    "one bit": (
        "1bit-mxnet:0",
        [0.0] * 4,
        [
            ([0.25, -0.25, 0, 2], "90000000", [1, -1, -1, 1], [-0.75, 0.75, 1, 1]),
            ([0.25, -0.25, 0, 2], "70000000", [-1, 1, 1, 1], [0.5, -0.5, 0, 2]),
        ],
    ),
}


@pytest.mark.parametrize("vector", VECTORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_vectors(vector: str, dtype: torch.dtype) -> None:
    name, held, steps = VECTORS[vector]
    codec = find_codec(name)
    assert not isinstance(codec, PowerSGD)
    feedback = ErrorFeedback({"w": torch.zeros(len(held), dtype=dtype)})
    state = feedback.state_dict()
    state["residual/w"].copy_(torch.tensor(held))
    for gradient, wire, output, left in steps:
        code = feedback.encode(codec, "w", torch.tensor(gradient, dtype=dtype))
        feedback.commit(True)
        assert bytes(code[HEADER:].tolist()).hex() == wire
        assert codec.decode(code, len(held), dtype).tolist() == output
        assert state["residual/w"].tolist() == left
        assert state["residual/w"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_wire_bytes() -> None:
    for numel in (0, 1, 16, 17, 32, 33, 1000):
        assert find_codec("2bit").encoded_bytes(numel) == HEADER + 4 * -(-numel // 16)
        assert find_codec("1bit-mxnet").encoded_bytes(numel) == HEADER + 4 * -(-numel // 32)
