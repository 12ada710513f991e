"""RMSNorm: torch's own formula and derivative, the dtype that comes out, and that a compiled graph takes it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from unisono.models.layers import RMSNorm


@pytest.mark.parametrize("shape", [(2, 3, 16), (5, 16), (1, 1, 2, 16)])
def test_value_and_gradients_are_those_of_torchs_formula(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(16, 1e-2)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2.0)
    x, upstream = torch.randn(shape, requires_grad=True), torch.randn(shape)
    wanted_x, wanted_weight = (t.detach().double().requires_grad_() for t in (x, norm.weight))
    wanted = F.rms_norm(wanted_x, (16,), wanted_weight, 1e-2)
    wanted.backward(upstream.double())
    out = norm(x)
    out.backward(upstream)
    for found, right in ((out, wanted), (x.grad, wanted_x.grad), (norm.weight.grad, wanted_weight.grad)):
        assert found is not None
        assert right is not None
        torch.testing.assert_close(found, right.float(), rtol=1e-5, atol=1e-6)


def test_under_autocast_it_is_rounded_once_at_the_end() -> None:
    norm, x = RMSNorm(16, 1e-5), torch.randn(4, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = norm(x)
    assert torch.equal(out, norm(x).bfloat16())
    out.backward(torch.ones_like(out))
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    half = RMSNorm(16, 1e-5).bfloat16()
    rounded = x.detach().bfloat16().requires_grad_()
    half(rounded).sum().backward()
    assert half(rounded).dtype == half.weight.grad.dtype == rounded.grad.dtype == torch.bfloat16


def test_a_row_of_zeros_has_finite_gradients() -> None:
    norm, x = RMSNorm(8, 1e-5), torch.zeros(2, 8, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
