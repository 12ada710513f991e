"""Chunked cross-entropy against the plain one, and the memory it is there to save."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from unisono.models.loss import LazyLogits, cross_entropy_sum
from unisono.train.objectives import next_token


def problem(tokens: int, dim: int, vocab: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, dim, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, dim, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(0, vocab, (tokens,)), torch.rand(tokens)


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_equals_the_plain_loss_and_its_gradients(chunk: int) -> None:
    hidden, weight, targets, weights = problem(64, 16, 40)
    loss, total = cross_entropy_sum(LazyLogits(hidden, weight, chunk), targets, weights)
    gradients = torch.autograd.grad(loss * 3, [hidden, weight])
    plain = (F.cross_entropy(hidden @ weight.mT, targets, reduction="none") * weights).sum()
    expected = torch.autograd.grad(plain * 3, [hidden, weight])
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=1e-4)
    assert total == weights.sum()
    for got, want in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_weight_of_zero_silences_a_token() -> None:
    hidden, weight, targets, _ = problem(8, 4, 10)
    weights = torch.tensor([1.0, 0.0] * 4)
    loss, total = cross_entropy_sum(LazyLogits(hidden, weight, 3), targets, weights)
    (gradient,) = torch.autograd.grad(loss, [hidden])
    assert total == 4
    assert torch.equal(gradient[1::2], torch.zeros(4, 4))


def test_minus_100_does_not_count_as_in_torch() -> None:
    hidden, weight, targets, _ = problem(8, 4, 10)
    targets[[0, 3, 4, 5, 7]] = -100  # one chunk of three has no target at all
    loss, total = next_token(LazyLogits(hidden, weight, 3), {"targets": targets.view(2, 4)})
    gradients = torch.autograd.grad(loss, [hidden, weight])
    plain = F.cross_entropy(hidden @ weight.mT, targets, reduction="sum")
    assert total == 3
    torch.testing.assert_close(loss, plain)
    for got, want in zip(gradients, torch.autograd.grad(plain, [hidden, weight]), strict=True):
        torch.testing.assert_close(got, want)
    weights = torch.rand(8)
    loss, total = cross_entropy_sum(LazyLogits(hidden, weight, 3), targets, weights)
    plain = F.cross_entropy(hidden @ weight.mT, targets, reduction="none") * weights
    torch.testing.assert_close((loss, total), (plain.sum(), weights[targets != -100].sum()))


def test_bf16_autocast_computes_in_bf16_and_returns_the_parameters_dtype() -> None:
    hidden, weight, targets, weights = problem(64, 16, 40)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = cross_entropy_sum(LazyLogits(hidden, weight, 16), targets, weights)
    gradients = torch.autograd.grad(loss, [hidden, weight])
    assert loss.dtype == torch.float32
    assert [g.dtype for g in gradients] == [torch.float32, torch.float32]
    plain = (F.cross_entropy(hidden @ weight.mT, targets, reduction="none") * weights).sum()
    assert abs(loss - plain) / plain < 1e-2


def test_never_holds_more_than_a_chunk_of_logits() -> None:
    tokens, vocab, chunk = 512, 4096, 32
    hidden, weight, targets, weights = problem(tokens, 8, vocab)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        loss, _ = cross_entropy_sum(LazyLogits(hidden, weight, chunk), targets, weights)
        loss.backward()
    assert largest == chunk * vocab < tokens * vocab


def test_head_chunks_are_the_logits() -> None:
    hidden, weight, _, _ = problem(10, 4, 6)
    head = LazyLogits(hidden.view(2, 5, 4), weight, 3)
    pieces = torch.cat([logits for _, logits in head.chunks()])
    torch.testing.assert_close(pieces, head.logits().flatten(0, 1))


def test_hidden_states_in_bf16_beside_a_weight_in_fp32_give_logits_in_fp32() -> None:
    hidden, weight, _, _ = problem(6, 8, 10)
    head = LazyLogits(hidden.bfloat16(), weight, 4)
    expected = hidden.bfloat16().float() @ weight.mT
    torch.testing.assert_close(head.logits(), expected)
    torch.testing.assert_close(torch.cat([logits for _, logits in head.chunks()]), expected)
