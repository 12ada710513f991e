"""Initial values of a GPT by its width, and the refusal of models that muP does not cover."""

from __future__ import annotations

import pytest
import torch

from unisono.config import load_config
from unisono.errors import ConfigError
from unisono.models.gpt import GPT
from unisono.models.options import ModelOptions
from unisono.train.config import RunConfig

WIDE = {"num_layers": 2, "dim": 256, "num_heads": 8, "num_kv_heads": 4, "vocab_size": 512}


def build(**changes: object) -> GPT:
    torch.manual_seed(0)
    return GPT(ModelOptions(**{**WIDE, **changes}))


@pytest.mark.parametrize("tied", [True, False])
def test_at_the_base_width_the_values_are_those_without_mup(tied: bool) -> None:
    plain, mup = build(tied=tied), build(tied=tied, mup_base_dim=256)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), mup.parameters(), strict=True))


@pytest.mark.parametrize("tied", [True, False])
def test_values_at_four_times_the_base_width(tied: bool) -> None:
    plain = dict(build(tied=tied).named_parameters())
    factors = {
        name: float((parameter / plain[name]).detach().mean())
        for name, parameter in build(tied=tied, mup_base_dim=64).named_parameters()
    }
    output = "norm.weight" if tied else "head.weight"
    for name, factor in factors.items():
        hidden = name.startswith("blocks.") and "norm" not in name
        assert factor == pytest.approx(0.25 if name == output else 0.5 if hidden else 1.0, rel=1e-5), name


def test_a_tied_head_has_the_logits_of_an_output_that_is_multiplied() -> None:
    """Table 8 of the paper: the output is multiplied by the base width over the width."""
    tokens = torch.randint(0, 512, (2, 8), generator=torch.Generator().manual_seed(1))
    model = build(mup_base_dim=64)
    logits = model(tokens).logits()
    with torch.no_grad():
        model.norm.weight.fill_(1.0)
    torch.testing.assert_close(logits, model(tokens).logits() / 4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model.mup_base_dim=32"], ["num_kv_heads 2", "would have a part of a head", "mup_base_dim=64"]),
        (["model.mup_base_dim=64", "model.num_experts=4"], ["the router", "num_experts=0"]),
        (["model.mup_base_dim=64", "components.model=moe"], ["mup_base_dim", "'moe'"]),
        (["model.mup_base_dim=64", "optim.kind=lamb"], ["optim.kind 'lamb'", "optim.kind=adamw"]),
        (["model.mup_base_dim=64", "optim.kind=adam", "optim.weight_decay=0.1"], ["a weight decay of adam"]),
        (["model.mup_base_dim=64", "optim.kind=sgd"], ["optim.clip_norm 1 of sgd", "optim.clip_norm=0"]),
        (["model.mup_base_dim=64", "plan.sync=dist_async"], ["servers have one learning rate"]),
        (["model.mup_base_dim=64", "components.optimizer=x"], ["components.optimizer with model.mup_base_dim"]),
        (
            ["model.mup_base_dim=64", "components.init=[{match='*', kind='xavier'}]"],
            ["components.init with model.mup_base_dim"],
        ),
    ],
)
def test_what_does_not_follow_the_width_is_refused(settings: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(RunConfig, overrides=settings)
    for word in words:
        assert word in str(refused.value)
