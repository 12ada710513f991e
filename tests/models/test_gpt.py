"""The reference decoder: shapes, causality, documents, initialisation, generation."""

from __future__ import annotations

import math

import pytest
import torch

from unisono.models.gpt import GPT, rotary_angles, rotate
from unisono.models.options import ModelOptions

SMALL = {"num_layers": 2, "dim": 32, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 64}


def build(**changes: object) -> GPT:
    torch.manual_seed(0)
    return GPT(ModelOptions(**{**SMALL, **changes}))


def test_sizes_come_from_the_configuration() -> None:
    model = build(num_layers=3, ffn_dim=48, tied=False)
    per_block = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48 + 2 * 32
    assert sum(p.numel() for p in model.parameters()) == 2 * 64 * 32 + 3 * per_block + 32
    assert sum(p.numel() for p in build(num_layers=3, ffn_dim=48).parameters()) == 64 * 32 + 3 * per_block + 32


def test_a_token_sees_only_its_past() -> None:
    model = build().eval()
    tokens = torch.randint(0, 64, (2, 16))
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 64
    before, after = model(tokens).logits(), model(changed).logits()
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_documents_in_one_window_do_not_see_each_other() -> None:
    model = build().eval()
    first, second = torch.randint(0, 64, (1, 6)), torch.randint(0, 64, (1, 10))
    packed = model(
        torch.cat([first, second], dim=1),
        positions=torch.cat([torch.arange(6), torch.arange(10)])[None],
        documents=torch.tensor([[0] * 6 + [1] * 10], dtype=torch.int32),
    ).logits()
    alone = torch.cat([model(first).logits(), model(second).logits()], dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-6)


def test_rotary_scores_depend_on_distance_only() -> None:
    query, key = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    def score(at: int, other: int) -> torch.Tensor:
        turned = [rotate(x, *rotary_angles(torch.tensor([p]), 8, 10000.0)) for x, p in ((query, at), (key, other))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(3, 1), score(103, 101), rtol=1e-4, atol=1e-4)
    assert not torch.isclose(score(3, 1), score(3, 2), atol=1e-4)


def test_initialisation_is_the_documented_one() -> None:
    model = build(dim=256, num_layers=8, vocab_size=1024)
    block = model.blocks[0]
    assert block.attention.q.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert block.ffn.down.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.03)
    assert block.attention.out.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.03)
    assert torch.equal(model.norm.weight, torch.ones(256))
    torch.manual_seed(0)
    again = GPT(model.options)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_generation_is_seeded_and_leaves_the_runs_randomness_alone() -> None:
    model = build().eval()
    before = torch.get_rng_state()
    prompt = torch.tensor([[1, 2, 3]])
    first = model.generate(prompt, 12, temperature=1.0, context=8, seed=5)
    assert torch.equal(first, model.generate(prompt, 12, temperature=1.0, context=8, seed=5))
    assert not torch.equal(first, model.generate(prompt, 12, temperature=1.0, context=8, seed=6))
    assert torch.equal(torch.get_rng_state(), before)
    likeliest = model.generate(prompt, 1, temperature=0.0, context=8, seed=0)
    assert likeliest[0, -1] == model(prompt).logits()[0, -1].argmax()


def test_heads_that_do_not_divide_are_refused_with_what_would() -> None:
    found = dict(ModelOptions(dim=96, num_heads=7, num_kv_heads=2, vocab_size=8).problems())
    assert str(found["num_heads"]) == (
        "num_heads 7 with dim 96\n"
        "  rule: dim is divisible by num_heads, and each head's width is even (rotary pairs)\n"
        "  so:   the attention cannot be built\n"
        "  try:  num_heads in {6, 8, 4}".replace("{6, 8, 4}", "{4, 6, 8}")
    )
    assert found["num_kv_heads"].nearest == "num_kv_heads in {1, 7}"
    assert [name for name, _ in ModelOptions(dim=96, num_heads=7, num_kv_heads=7, head_dim=8).problems()] == []
    odd = dict(ModelOptions(dim=96, num_heads=7, num_kv_heads=7, head_dim=5).problems())
    assert odd["head_dim"].nearest == "head_dim=6"
    assert not list(ModelOptions(vocab_size=8).problems())
