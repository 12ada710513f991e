"""The global norm and the clip coefficient: exact cases, long tensors, layouts and what is not finite."""

from __future__ import annotations

import math

import pytest
import torch

from unisono.optim import clip_coefficient, global_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_norm_of_a_long_tensor_is_exact_to_float32(dtype: torch.dtype) -> None:
    """torch's own CPU norm of this one is 0.01 % off in float32, and 0.4 % at 50 million elements."""
    tensor = torch.randn(4_000_000, generator=torch.Generator().manual_seed(0)).mul_(0.01).to(dtype)
    exact = tensor.double().square().sum().sqrt().item()
    norm = global_norm([tensor])
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert norm.item() == pytest.approx(exact, rel=2e-6)


def test_the_norm_does_not_depend_on_how_values_are_spread_over_tensors() -> None:
    values = torch.randn(300_000, generator=torch.Generator().manual_seed(1))
    whole = global_norm([values]).item()
    parts = [values[:7], values[7:100_000].reshape(-1, 3), values[100_000:]]
    assert global_norm(parts).item() == pytest.approx(whole, rel=1e-6)
    image = values[:294_912].reshape(16, 128, 12, 12).contiguous(memory_format=torch.channels_last)
    assert global_norm([image]).item() == pytest.approx(global_norm([values[:294_912]]).item(), rel=1e-6)
    gaps = values.reshape(3000, 100)[:, ::2]
    # with gaps torch's loop has one accumulator instead of eight
    assert global_norm([gaps]).item() == pytest.approx(gaps.double().norm().item(), rel=1e-5)


def test_small_and_empty_cases() -> None:
    assert global_norm([]).item() == 0.0
    assert global_norm([torch.zeros(0), torch.tensor(3.0), torch.full((2, 2), 2.0)]).item() == 5.0
    assert global_norm([torch.zeros(0)]).shape == ()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_value_shows(bad: float) -> None:
    tensors = [torch.ones(3), torch.ones(200_000)]
    tensors[1][150_000] = bad
    assert not global_norm(tensors).isfinite().item()


def test_the_coefficient_is_exactly_one_within_the_limit() -> None:
    for norm in (0.0, 1e-30, 0.7, 0.99999994, 1.0):
        assert clip_coefficient(torch.tensor(norm), 1.0).item() == 1.0
    grads = [torch.full((10,), 3.0)]
    norm = global_norm(grads)
    assert global_norm([grads[0] * clip_coefficient(norm, 0.5)]).item() == pytest.approx(0.5, rel=1e-6)


def test_no_limit_and_no_norm() -> None:
    assert clip_coefficient(torch.tensor(1e9), 0.0).item() == 1.0
    assert clip_coefficient(torch.tensor(math.nan), 1.0).isnan().item()
    assert clip_coefficient(torch.tensor(math.inf), 1.0).item() == 0.0
