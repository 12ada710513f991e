"""Settings that are searched are read as they are written; a grid has each combination once."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import ConfigError
from unisono.tune.space import Choice, Range, grid, grid_size, read_space, settings_within


@pytest.mark.parametrize(
    ("text", "parameter"),
    [
        ("log:1e-4..1e-2", Range(low=1e-4, high=1e-2, is_log=True)),
        ("2..8", Range(low=2, high=8, is_integer=True)),
        ("2..9/2", Range(low=2, high=8, step=2, is_integer=True)),
        ("log:1..64", Range(low=1, high=64, is_log=True, is_integer=True)),
        ("0.0..1", Range(low=0, high=1)),
        ("-1..1", Range(low=-1, high=1, is_integer=True)),
        ("adamw, lamb", Choice(values=("adamw", "lamb"))),
        ("adamw", Choice(values=("adamw",))),
        ("[0.9, 0.95],[0.9, 0.99]", Choice(values=("[0.9, 0.95]", "[0.9, 0.99]"))),
        ('"a,b",c', Choice(values=('"a,b"', "c"))),
        ("true,false", Choice(values=("true", "false"))),
    ],
)
def test_a_specification(text: str, parameter: Choice | Range) -> None:
    assert read_space([f"a.b={text}"]) == {"a.b": parameter}
    assert read_space([f"a.b={parameter.text}"]) == {"a.b": parameter}


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "space.toml"
    file.write_text(
        '[space]\n"optim.lr" = "log:1e-4..1e-2"\noptim.kind = ["adamw", "lamb"]\noptim.betas = [[0.9, 0.95], [0.9, 0.99]]\n'
        "plan.tf32 = [true, false]\nmodel.dim = [64, 128]\n"
    )
    assert read_space([str(file), "train.steps=10,20"]) == {
        "optim.lr": Range(low=1e-4, high=1e-2, is_log=True),
        "optim.kind": Choice(values=("adamw", "lamb")),
        "optim.betas": Choice(values=("[0.9, 0.95]", "[0.9, 0.99]")),
        "plan.tf32": Choice(values=("true", "false")),
        "model.dim": Choice(values=("64", "128")),
        "train.steps": Choice(values=("10", "20")),
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a=", "not empty"),
        ("a=1,1", "different from each other"),
        ("a=1,,2", "not empty"),
        ("a=2..1", "up to a larger one"),
        ("a=1..1", "up to a larger one"),
        ("a=1..inf", "up to a larger one"),
        ("a=nan..1", "up to a larger one"),
        ("a=one..two", "are numbers"),
        ("a=1..2/x", "are numbers"),
        ("a=1..2/0", "the step is above 0"),
        ("a=1..2/3", "the step is above 0"),
        ("a=log:0..1", "begins above 0"),
        ("a=log:1..8/2", "has no step"),
        ("a=log:adamw", "log: is for a range"),
        ("missing.toml", "or a TOML file"),
    ],
)
def test_a_wrong_specification(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_space([text])


def test_a_file_without_a_space(tmp_path: Path) -> None:
    file = tmp_path / "space.toml"
    file.write_text("[optim]\nlr = 1.0\n")
    with pytest.raises(ConfigError, match=r"without a table \[space\]"):
        read_space([str(file)])
    with pytest.raises(ConfigError, match=r"optim\.lr twice"):
        read_space(["optim.lr=1..2", "optim.lr=2..3"])


def test_a_grid_is_every_combination() -> None:
    space = read_space(["a=1..3", "b=0..1.0/0.1", "c=x,y"])
    combinations = [tuple(each.values()) for each in grid(space)]
    tenths = [repr(0.1 * index) for index in range(11)]
    assert [float(text) for text in tenths] == pytest.approx([float(b) for _, b, _ in combinations[:22:2]])
    assert len(set(combinations)) == len(combinations) == grid_size(space) == 66
    assert [(a, c) for a, _, c in combinations] == [(a, c) for a, _, c in itertools.product("123", range(11), "xy")]


@pytest.mark.parametrize(
    ("text", "value", "found"),
    [
        ("a=log:1e-4..1e-2", 0.003, "0.003"),
        ("a=log:1e-4..1e-2", 1e-2, "0.01"),
        ("a=log:1e-4..1e-2", 0.011, None),
        ("a=0.0..1.0/0.1", 0.3, "0.3"),
        ("a=0.0..1.0/0.1", 0.35, None),
        ("a=2..8/2", 6, "6"),
        ("a=2..8/2", 5, None),
        ("a=2..8", 2.5, None),
        ("a=0..1", True, None),
        ("a=0.0..1", "none", None),
        ("a=adamw,lamb", "lamb", "lamb"),
        ("a=adamw,lamb", "sgd", None),
        ("a=1e-3,2e-3", 0.001, "1e-3"),
        ("a=true,false", False, "false"),
        ("a=[1, 2],[3]", [3], "[3]"),
        ("b=1..2", 1, None),
    ],
)
def test_the_values_of_a_configuration_in_a_space(text: str, value: object, found: str | None) -> None:
    settings = settings_within(read_space([text]), {"a": value, "other": 1})
    assert settings == (None if found is None else {"a": found})


@pytest.mark.parametrize("text", ["a=0.0..1", "a=log:1..8", "a=1..10000000"])
def test_a_grid_has_an_end(text: str) -> None:
    with pytest.raises(ConfigError, match="grid"):
        grid_size(read_space([text]))


@pytest.mark.parametrize("text", ["a=0.0..1", "a=log:1..8", "a=log:1e-4..1e-2"])
def test_the_rule_of_a_grid(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        grid_size(read_space([text]))
    (problem,) = caught.value.problems
    assert problem.rule == (
        "a grid needs a list, an integer range or a range with a step; a logarithmic range has no step"
    )


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e3), st.integers(1, 50))
def test_the_values_of_a_range_lie_in_it(low: float, step: float, count: int) -> None:
    parameter = read_space([f"a={low!r}..{low + step * count!r}/{step!r}"])["a"]
    values = [float(text) for text in parameter.grid() or ()]
    assert len(values) in (count, count + 1)  # rounding of the end
    assert all(low <= value <= low + step * count * (1 + 1e-6) for value in values)
