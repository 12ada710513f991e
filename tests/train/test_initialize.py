"""Initial values by name: MXNet's scales, the first match, and the same bits whatever the order, the ranks and the plan."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from unisono.config import load_config
from unisono.errors import ConfigError
from unisono.models.init_rules import InitRule
from unisono.parallel.deferred_init import deferred_init
from unisono.train.build import build_model
from unisono.train.config import RunConfig
from unisono.train.initialize import initialize


def drawn(shape: tuple[int, ...], **rule: str | float) -> Tensor:
    module = nn.ParameterDict({"weight": nn.Parameter(torch.full(shape, 9.0))})
    initialize(module, [{"match": "weight", **rule}], seed=0)
    return module["weight"].detach()


def mxnet_fan(shape: tuple[int, ...], factor: str) -> float:
    """``Xavier._init_weight`` of mxnet/initializer.py, 1.9.1."""
    hw_scale = math.prod(shape[2:]) if len(shape) > 2 else 1.0
    fan_in, fan_out = shape[1] * hw_scale, shape[0] * hw_scale
    return {"avg": (fan_in + fan_out) / 2.0, "in": fan_in, "out": fan_out}[factor]


@pytest.mark.parametrize("shape", [(300, 200), (40, 30, 5, 7)])
@pytest.mark.parametrize("factor", ["avg", "in", "out"])
def test_xavier_has_mxnets_scale(shape: tuple[int, ...], factor: str) -> None:
    scale = math.sqrt(2.34 / mxnet_fan(shape, factor))
    flat = drawn(shape, kind="xavier", factor=factor, magnitude=2.34)
    assert 0.999 * scale < flat.abs().max() <= scale
    assert float(flat.std()) == pytest.approx(scale / math.sqrt(3), rel=0.01)
    bell = drawn(shape, kind="xavier", factor=factor, magnitude=2.34, distribution="gaussian")
    assert float(bell.std()) == pytest.approx(scale, rel=0.01)
    assert float((bell.abs() > scale).float().mean()) == pytest.approx(0.3173, abs=0.01)  # of a normal distribution
    assert abs(float(bell.mean())) < 4 * scale / math.sqrt(bell.numel())


@pytest.mark.parametrize("slope", [0.25, 0.0, 1.0])
def test_msra_prelu_is_a_gaussian_xavier_of_magnitude_2_by_1_plus_slope_squared(slope: float) -> None:
    magnitude = 2.0 / (1 + slope**2)
    weight = drawn((300, 200), kind="msra_prelu", slope=slope, factor="in")
    assert float(weight.std()) == pytest.approx(math.sqrt(magnitude / 200), rel=0.01)
    same = drawn((300, 200), kind="xavier", distribution="gaussian", factor="in", magnitude=magnitude)
    assert torch.equal(weight, same)


def test_defaults_are_mxnets() -> None:
    assert torch.equal(drawn((9, 4), kind="msra_prelu"), drawn((9, 4), kind="msra_prelu", slope=0.25, factor="avg"))
    explicit = drawn((9, 4), kind="xavier", distribution="uniform", factor="avg", magnitude=3)
    assert torch.equal(drawn((9, 4), kind="xavier"), explicit)
    assert drawn((300, 200), kind="uniform").abs().max() == pytest.approx(0.07, rel=1e-3)
    assert float(drawn((300, 200), kind="normal").std()) == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize("distribution", ["uniform", "gaussian"])
@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (8, 3, 3, 3)])
def test_orthogonal_rows_or_columns(shape: tuple[int, ...], distribution: str) -> None:
    flat = drawn(shape, kind="orthogonal", distribution=distribution).reshape(shape[0], -1)
    small = flat @ flat.mT if flat.shape[0] <= flat.shape[1] else flat.mT @ flat
    torch.testing.assert_close(small, 1.414**2 * torch.eye(len(small)), rtol=0, atol=1e-5)


def test_constants() -> None:
    assert drawn((2, 3), kind="zeros").eq(0).all()
    assert drawn((3,), kind="ones").eq(1).all()
    assert drawn((3,), kind="constant", value=0.25).eq(0.25).all()


def net() -> nn.Module:
    torch.manual_seed(0)
    parts = {"body": nn.Linear(4, 8), "norm": nn.LayerNorm(8), "head": nn.Linear(8, 3)}
    return nn.Sequential(nn.ModuleDict(parts))


RULES: list[InitRule] = [
    {"match": "*head.*", "kind": "normal", "std": 0.5},
    {"match": "*.weight", "kind": "xavier"},
    {"match": "*body.bias", "kind": "orthogonal"},
]


def test_values_are_drawn_on_the_host_whatever_the_default_device() -> None:
    module, expected = nn.Linear(4, 3), initialize(nn.Linear(4, 3), [{"match": "*", "kind": "xavier"}], seed=1)
    with torch.device("meta"):
        initialize(module, [{"match": "*", "kind": "xavier"}], seed=1)
    assert torch.equal(module.weight, expected.weight)


def test_the_first_match_wins_and_the_rest_keeps_its_values() -> None:
    before, after = net().state_dict(), initialize(net(), RULES, seed=1).state_dict()
    assert after["0.head.bias"].abs().max() > 0.1  # a kind without fans draws vectors too
    assert after["0.body.bias"].eq(0).all()
    assert after["0.norm.weight"].eq(1).all()
    assert torch.equal(before["0.norm.bias"], after["0.norm.bias"])
    assert not torch.equal(before["0.body.weight"], after["0.body.weight"])


def test_values_depend_on_seed_and_name_alone() -> None:
    one = initialize(net(), RULES, seed=1).state_dict()
    torch.rand(3)
    again = initialize(net(), RULES, seed=1).state_dict()
    other = initialize(net(), RULES, seed=2).state_dict()
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["0.head.weight"], other["0.head.weight"])
    more = nn.ModuleDict({"first": nn.Linear(5, 5), "0": net()[0]})  # other parameters, of which one comes before
    alone = initialize(more, [{"match": "0.*", "kind": "xavier"}], seed=1).state_dict()
    assert torch.equal(alone["0.body.weight"], one["0.body.weight"])
    state = torch.get_rng_state()
    initialize(more, [{"match": "0.*", "kind": "xavier"}], seed=1)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["xavier", "msra_prelu", "orthogonal", "normal", "uniform", "ones"])
def test_a_sharded_model_gets_the_same_bits(kind: str) -> None:
    """A plan that shards the model builds it without values and draws them a tensor at a time."""

    def build() -> nn.Module:
        return initialize(net(), [{"match": "*.weight", "kind": kind}], seed=3)

    expected = build().state_dict()
    deferred = deferred_init(build)
    values = {name: value.clone() for name, value in deferred.values(expected.keys())}
    assert values.keys() == expected.keys()
    assert all(torch.equal(values[name], expected[name]) for name in expected)


def test_from_toml(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        "[model]\nnum_layers = 1\ndim = 16\nnum_heads = 2\nvocab_size = 300\n"
        '[[components.init]]\nmatch = "*embed*"\nkind = "normal"\nstd = 1\n'
        '[[components.init]]\nmatch = "blocks.*.weight"\nkind = "xavier"\nmagnitude = 12.0\ndistribution = "gaussian"\n'
    )
    config = load_config(RunConfig, [file]).value
    model = build_model(config, None)
    parameters = {name: value for name, value in model.state_dict().items() if value.ndim > 1}
    name = next(name for name in parameters if name.startswith("blocks"))
    assert float(parameters[name].std()) == pytest.approx(
        math.sqrt(12 / mxnet_fan(parameters[name].shape, "avg")), rel=0.1
    )
    assert float(next(value for name, value in parameters.items() if "embed" in name).std()) == pytest.approx(
        1, rel=0.05
    )


def test_texts_of_errors() -> None:
    def told(*rules: InitRule) -> str:
        with pytest.raises(ConfigError) as error:
            initialize(net(), rules, seed=0)
        return str(error.value)

    assert told({"match": "*", "kind": "xavier", "slope": 0.1}) == (
        "rule 1 of the initial values has slope, which xavier does not read\n"
        "  rule: a rule has match, a pattern of parameter names, kind, and constants that this kind reads\n"
        "  so:   it is unclear what values the parameters get\n"
        "  try:  leave it out; xavier reads distribution, factor, magnitude"
    )
    assert told({"match": "*.norm.weight", "kind": "msra_prelu"}) == (
        "initial values of kind 'msra_prelu' for '*.norm.weight', which matches only 0.norm.weight [8]\n"
        "  rule: their scale comes from the two dims of a matrix or a convolution kernel\n"
        "  so:   it would change nothing\n"
        "  try:  kind = 'normal', 'constant', 'zeros' or 'ones'"
    )
    assert told({"match": "*.haed.*", "kind": "zeros"}) == (
        "the table of initial values has the pattern '*.haed.*', which matches no parameter\n"
        "  rule: the first pattern that matches a name wins, and each pattern gets at least one parameter\n"
        "  so:   it would change nothing\n"
        "  try:  one of: 0.body.bias, 0.body.weight, 0.head.bias, 0.head.weight, 0.norm.bias, 0.norm.weight"
    )
    assert "'*.head.*', whose parameters '*' takes before it" in told(
        {"match": "*", "kind": "zeros"}, {"match": "*.head.*", "kind": "ones"}
    )
    for rule, part in [
        ({"kind": "zeros"}, "has no match"),
        ({"match": "*"}, "has no kind"),
        ({"match": "*", "kind": "xavir"}, "did you mean 'xavier'?"),
        ({"match": "*", "kind": "xavier", "factor": "both"}, "factor 'both'"),
        ({"match": "*", "kind": "xavier", "magnitude": -1}, "magnitude -1"),
        ({"match": "*", "kind": "xavier", "magnitude": "big"}, "magnitude 'big'"),
        ({"match": "*", "kind": "constant"}, "has no value"),
    ]:
        assert part in told(rule)
    with pytest.raises(ConfigError, match=r"0\.body\.weight, which is on the meta device"), torch.device("meta"):
        initialize(net(), RULES, seed=0)
    with pytest.raises(ConfigError, match="rule 1 of the initial values has no kind"):
        load_config(RunConfig, overrides=["components.init=[{match='a'}]"])
