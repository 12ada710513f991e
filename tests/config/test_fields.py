from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import date
from typing import Any, Literal

import pytest
from config_example import Model, Run

from unisono.config import load_config, option
from unisono.config.fields import limit_words, option_tree, type_words
from unisono.train import Components, RunConfig, TrainOptions


def test_flat_view_in_order_of_declaration():
    layout = option_tree(Run)
    assert list(layout.sections) == ["", "optim", "optim.schedule", "model"]
    assert list(layout.leaves)[:10] == [
        "seed",
        "name",
        "note",
        "tags",
        "layers",
        "weights",
        "optim.lr",
        "optim.betas",
        "optim.name",
        "optim.clip",
    ]
    assert layout.leaves["optim.schedule.kind"].choices == ("cosine", "linear")
    assert layout.leaves["model.width"].default == 128, "the section's own default wins over its class"


def test_mutable_defaults_are_not_shared():
    first = load_config(Run).value
    first.weights["code"] = 5.0
    first.layers.append(9)
    Run().weights["web"] = 1.0
    assert load_config(Run).value.weights == {"code": 1.0}
    assert load_config(Run).value.layers == [1, 2]
    assert Run().weights == {"code": 1.0}


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("seed", "a whole number"),
        ("note", 'a string or "none"'),
        ("tags", "an array of strings"),
        ("layers", "an array of whole numbers"),
        ("weights", "a table of numbers"),
        ("optim.betas", "an array of 2 numbers"),
        ("optim.clip", 'a number or "none"'),
        ("optim.schedule.kind", '"cosine" or "linear"'),
        ("model.micro_batch", 'a whole number or "auto"'),
        ("model.tied", "true or false"),
        ("model.build", "a string"),
    ],
)
def test_types_in_words(key: str, words: str):
    assert type_words(option_tree(Run).leaves[key]) == words


def test_nested_arrays_in_words():
    @dataclass(frozen=True, kw_only=True)
    class Grid:
        shape: tuple[tuple[int, ...], ...] = option(((1, 2),), "Shape.")

    assert type_words(option_tree(Grid).leaves["shape"]) == "an array of values, each an array of whole numbers"
    assert load_config(Grid, overrides=["shape=[[1], [2, 3]]"]).value.shape == ((1,), (2, 3))


def test_large_limits_are_written_out():
    @dataclass(frozen=True, kw_only=True)
    class Big:
        size: int = option(1, "Size.", ge=1, le=4294967295)

    assert limit_words(option_tree(Big).leaves["size"].spec) == ">= 1 and <= 4294967295"


def test_a_section_may_come_from_a_factory_or_from_its_class():
    @dataclass(frozen=True, kw_only=True)
    class Factory:
        model: Model = field(default_factory=lambda: Model(heads=2))

    assert load_config(Factory).value == Factory()
    assert load_config(Factory).value.model.heads == 2


def _function() -> None: ...


@pytest.mark.parametrize(
    ("hint", "default", "message"),
    [
        ("int", None, None),
        ("date", date(2020, 1, 1), "x: an option cannot have the type <class 'datetime.date'>"),
        ("dict[int, str]", {}, "x: an option cannot have the type dict[int, str]"),
        ("Any", 1, "x: an option cannot have the type typing.Any"),
        ("None", None, "x: an option cannot have the type <class 'NoneType'>"),
        ("Literal[b'x']", b"x", "x: an option cannot have the type typing.Literal[b'x']"),
        ("Callable[..., Any]", 1, "x: an option cannot have the type collections.abc.Callable[..., typing.Any]"),
        ("str | Callable[..., Any]", "a", "x: an option cannot have the type str | collections.abc.Callable"),
        ("str", _function, "x: an option needs a default that TOML can write"),
    ],
)
def test_declarations_that_cannot_be_held(hint: str, default: Any, message: str | None):
    cls = dataclass(frozen=True, kw_only=True)(
        type("Odd", (), {"__annotations__": {"x": hint}, "__module__": __name__, "x": option(default, "X.")})
    )
    if message is None:
        option_tree(cls)
    else:
        with pytest.raises(TypeError) as caught:
            option_tree(cls)
        assert str(caught.value).startswith(message)


def test_python_only_belongs_to_callables():
    @dataclass(frozen=True, kw_only=True)
    class Plain:
        x: str = option("a", "X.", python_only=True)

    with pytest.raises(TypeError, match=r"^x: an option cannot have the type <class 'str'>$"):
        option_tree(Plain)


def test_an_option_needs_a_default():
    @dataclass(frozen=True, kw_only=True)
    class Bare:
        x: int

    with pytest.raises(TypeError, match=r"^x: an option needs a default that TOML can write$"):
        option_tree(Bare)


def test_base_is_no_option():
    @dataclass(frozen=True, kw_only=True)
    class Taken:
        base: int = option(1, "Base.")

    with pytest.raises(TypeError, match=r"^Taken\.base: the name is taken by the layering key of TOML files$"):
        option_tree(Taken)


def test_the_repr_of_options_is_the_call_that_makes_them():
    run = RunConfig(train=TrainOptions(steps=5), components=Components(objective=limit_words, metrics=("f1",)))
    told = "RunConfig(components=Components(objective=limit_words, metrics=('f1',)), train=TrainOptions(steps=5))"
    assert repr(run) == told
    assert repr(RunConfig()) == "RunConfig()"
    sections = [getattr(run, each.name) for each in fields(run)]
    assert all("options_repr" in type(section).__repr__.__qualname__ for section in sections)


assert Literal  # named inside the annotations above
assert Callable
