"""Which parameters decay: the rule on real modules, user-made ones, ties and frozen parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unisono.errors import ConfigError
from unisono.optim import OptimOptions, build_optimizer, param_groups
from unisono.optim.groups import Role, parameter_roles


class ScaleNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2, 3))  # two dims, and yet a norm


class Oddly(nn.LayerNorm):
    """Named after nothing, but a LayerNorm by its base."""


class NormalizedLinear(nn.Linear):
    """Has Norm in its name and is none."""


class TokenEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(5, 3))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(2, 3, 4))
        self.up_bias = nn.Parameter(torch.zeros(2, 4))
        self.biased = nn.Parameter(torch.zeros(2, 4))


class Tied(nn.Module):
    def __init__(self, *, head_first: bool) -> None:
        super().__init__()
        if head_first:
            self.head = nn.Linear(3, 5, bias=False)
            self.tokens = nn.Embedding(5, 3)
        else:
            self.tokens = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.tokens.weight


DECAY, NO_DECAY, PLAIN = Role.DECAY, Role.NO_DECAY, Role.PLAIN


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Linear(2, 3), {"weight": DECAY, "bias": PLAIN}),
        (nn.Conv2d(2, 3, 3), {"weight": DECAY, "bias": PLAIN}),
        (nn.BatchNorm2d(3), {"weight": PLAIN, "bias": PLAIN}),
        (nn.GroupNorm(1, 3), {"weight": PLAIN, "bias": PLAIN}),
        (nn.LayerNorm((2, 3)), {"weight": PLAIN, "bias": PLAIN}),
        (nn.RMSNorm((2, 3)), {"weight": PLAIN}),
        (Oddly((2, 3)), {"weight": PLAIN, "bias": PLAIN}),
        (ScaleNorm(), {"gain": PLAIN}),
        (NormalizedLinear(2, 3), {"weight": DECAY, "bias": PLAIN}),
        (nn.Embedding(5, 3), {"weight": NO_DECAY}),
        (nn.EmbeddingBag(5, 3), {"weight": NO_DECAY}),
        (TokenEmbedding(), {"table": NO_DECAY}),
        (Experts(), {"up": DECAY, "up_bias": PLAIN, "biased": DECAY}),
        (
            nn.MultiheadAttention(4, 2),
            {"in_proj_weight": DECAY, "in_proj_bias": PLAIN, "out_proj.weight": DECAY, "out_proj.bias": PLAIN},
        ),
        (
            nn.LSTM(2, 3),
            {"weight_ih_l0": DECAY, "weight_hh_l0": DECAY, "bias_ih_l0": PLAIN, "bias_hh_l0": PLAIN},
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_the_rule(module: nn.Module, expected: dict[str, Role]) -> None:
    assert parameter_roles(module) == expected


@pytest.mark.parametrize("head_first", [True, False])
def test_a_tied_head_is_the_embedding_and_counts_once(head_first: bool) -> None:
    model = Tied(head_first=head_first)
    assert parameter_roles(model) == {"head.weight" if head_first else "tokens.weight": NO_DECAY}
    [group] = param_groups(model, OptimOptions())
    assert [id(p) for p in group["params"]] == [id(model.tokens.weight)]


def test_a_module_used_twice_counts_once() -> None:
    shared = nn.Linear(3, 3)
    model = nn.ModuleDict({"b": shared, "a": shared})
    assert parameter_roles(model) == {"b.bias": PLAIN, "b.weight": DECAY}
    assert sum(len(group["params"]) for group in param_groups(model, OptimOptions())) == 2


def test_groups_are_in_the_order_of_names() -> None:
    model = nn.ModuleDict(
        {"z": nn.Linear(2, 3), "norm": nn.LayerNorm(3), "a": nn.Linear(3, 3), "e": nn.Embedding(4, 3)}
    )
    names = {id(p): name for name, p in model.named_parameters()}
    groups = build_optimizer(model, OptimOptions(weight_decay=0.3)).param_groups
    assert [(g["name"], g["weight_decay"], g["adapt"], [names[id(p)] for p in g["params"]]) for g in groups] == [
        ("decay", 0.3, True, ["a.weight", "z.weight"]),
        ("no_decay", 0.0, True, ["e.weight"]),
        ("plain", 0.0, False, ["a.bias", "norm.bias", "norm.weight", "z.bias"]),
    ]


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    assert list(parameter_roles(model)) == ["1.bias", "1.weight"]


def test_more_can_be_excluded_by_name() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(3, 3)})
    assert parameter_roles(model, ["b.w*"]) == {
        "a.bias": PLAIN,
        "a.weight": DECAY,
        "b.bias": PLAIN,
        "b.weight": NO_DECAY,
    }


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    model = nn.ModuleDict({"encoder": nn.Linear(2, 3)})
    with pytest.raises(ConfigError) as caught:
        build_optimizer(model, OptimOptions(decay_exclude=("encoder.*", "encoder.weights", "decoder.*")))
    assert [str(problem) for problem in caught.value.problems] == [
        "decay_exclude has 'encoder.weights'\n"
        "  rule: each pattern names at least one parameter\n"
        "  so:   it would exclude nothing\n"
        "  try:  did you mean 'encoder.weight'?",
        "decay_exclude has 'decoder.*'\n"
        "  rule: each pattern names at least one parameter\n"
        "  so:   it would exclude nothing\n"
        "  try:  did you mean 'encoder.bias'?",
    ]


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        build_optimizer(nn.Linear(2, 3).requires_grad_(False), OptimOptions())
    assert str(caught.value) == (
        "Linear has no parameter that requires a gradient\n"
        "  rule: an optimizer needs something to train\n"
        "  so:   training would change nothing\n"
        "  try:  requires_grad_(True) on the layers to train"
    )


def test_an_unknown_optimizer_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        build_optimizer(nn.Linear(2, 3), OptimOptions(kind="lamp", weight_decay=0.1))
    assert str(caught.value) == (
        "optimizer kind 'lamp'\n"
        "  rule: the kind is one of sgd, adam, adamw, lamb, lars\n"
        "  so:   there is no optimizer\n"
        "  try:  did you mean 'lamb'?"
    )
