"""The hash knows values only; the resolved file loads again to the same."""

from __future__ import annotations

import random
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from config_example import Model, Run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unisono.config import Difference, Resolved, diff, load_config, render_origins
from unisono.config.values import CALLABLE, encode, env_name, toml_value

text = st.text(max_size=20)
number = st.floats(allow_nan=False, allow_infinity=False)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "seed": st.integers(0, 100),
    "name": text,
    "note": st.none() | text.filter(lambda t: t != "none"),
    "tags": st.lists(text, max_size=3),
    "layers": st.lists(st.sampled_from([1, 2, 3]), max_size=3),
    "weights": st.dictionaries(text, st.floats(0, allow_infinity=False) | st.integers(0, 2**60), max_size=3),
    "optim.lr": st.floats(0, 10, exclude_min=True, exclude_max=True) | st.integers(1, 9),
    "optim.betas": st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)),
    "optim.name": st.sampled_from(["adamw", "lamb", "sgd"]),
    "optim.clip": st.none() | st.floats(0, allow_infinity=False),
    "optim.schedule.kind": st.sampled_from(["cosine", "linear"]),
    "optim.schedule.warmup_steps": st.integers(0, 2**64 - 1),
    "model.build": text.filter(lambda t: not t.startswith(CALLABLE)),
    "model.heads": st.integers(1, 8),
    "model.micro_batch": st.just("auto") | st.integers(1, 8),
    "model.tied": st.booleans(),
}
chosen = st.fixed_dictionaries({}, optional=VALUES).map(lambda v: {**v, "model.width": 840})


def nested(values: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = encode(value)
    return tree


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=chosen, seed=st.integers(0, 1000))
def test_same_values_same_hash_whatever_the_layout(tmp_path: Path, values: dict[str, Any], seed: int):
    first = load_config(Run, planned=values)
    assert {key for key, origin in first.origins.items() if origin == "planned"} == set(values)

    saved = tmp_path / "resolved.toml"
    saved.write_text(first.to_toml(), encoding="utf-8", newline="")
    again = load_config(Run, [saved])
    assert again.value == first.value
    assert again.hash == first.hash
    assert again.to_toml() == first.to_toml()
    lines = saved.read_text(encoding="utf-8").split("\n")
    for key, origin in again.origins.items():
        file, _, line = origin.rpartition(":")
        assert file == str(saved)
        assert lines[int(line) - 1].startswith(f"{key.rpartition('.')[2]} = "), "the origin is the line that sets it"

    shuffled = list(values.items())
    random.Random(seed).shuffle(shuffled)
    other = tmp_path / "other.toml"
    dotted = "".join(f"{key} = {toml_value(encode(value))}\n\n" for key, value in shuffled)
    for content in (dotted, tomli_w.dumps(nested(dict(shuffled)), multiline_strings=False)):
        other.write_text(content, encoding="utf-8", newline="")
        assert load_config(Run, [other]).hash == first.hash
    written = {key: toml_value(encode(value)) for key, value in shuffled}
    assert load_config(Run, overrides=[f"{key}={value}" for key, value in written.items()]).hash == first.hash
    assert load_config(Run, environ={env_name(key): value for key, value in written.items()}).hash == first.hash


@settings(max_examples=40, deadline=None)
@given(left=chosen, right=chosen)
def test_hashes_differ_exactly_when_values_do(left: dict[str, Any], right: dict[str, Any]):
    a, b = load_config(Run, planned=left), load_config(Run, planned=right)
    assert (a.hash == b.hash) == (repr(a.value) == repr(b.value)) == (not diff(a, b))
    assert [d.key for d in diff(a, b)] == [key for key in a.encoded if repr(a.encoded[key]) != repr(b.encoded[key])]


@settings(max_examples=50, deadline=None)
@given(
    st.recursive(st.booleans() | st.integers() | number | st.text(), lambda v: st.lists(v) | st.dictionaries(text, v))
)
def test_any_value_on_one_line(value: Any):
    written = toml_value(value)
    assert "\n" not in written
    assert tomllib.loads(f"v = {written}") == {"v": value}


def test_the_whole_file():
    resolved = load_config(Run, overrides=["seed=3", "note=hello", "optim.clip=none", "weights={a=1, 'b c'=2.5}"])
    assert resolved.to_toml() == (
        f"# resolved configuration {resolved.hash}\n"
        "seed = 3\n"
        'name = "run"\n'
        'note = "hello"\n'
        "tags = []\n"
        "layers = [1, 2]\n"
        'weights = {a = 1.0, "b c" = 2.5}\n'
        "\n[optim]\n"
        "lr = 0.001\n"
        "betas = [0.9, 0.999]\n"
        'name = "adamw"\n'
        'clip = "none"\n'
        "\n[optim.schedule]\n"
        'kind = "cosine"\n'
        "warmup_steps = 100\n"
        "\n[model]\n"
        'build = "gpt"\n'
        'loss = "none"\n'
        "heads = 4\n"
        "width = 128\n"
        'micro_batch = "auto"\n'
        "tied = true\n"
    )


def test_the_hash_is_stable_over_versions_of_the_program():
    """Run folders keep hashes: changing how they are made breaks every resumed run."""
    assert load_config(Run).hash == "14ab544ba3a196ac2a427caadbfbf53b"


def test_difference_tells_values_and_origins(tmp_path: Path):
    path = tmp_path / "b.toml"
    path.write_text("optim.lr = 0.5\nseed = 1\n")
    a, b = load_config(Run, overrides=["model.heads=2"]), load_config(Run, [path])
    assert diff(a, b) == [
        Difference(key="optim.lr", left="0.001", right="0.5", left_origin="default", right_origin=f"{path}:1"),
        Difference(key="model.heads", left="2", right="4", left_origin="--set", right_origin="default"),
    ]
    with pytest.raises(TypeError, match=r"^cannot compare Run with Model$"):
        diff(a, load_config(Model))  # type: ignore[arg-type]


def test_rendered_origins():
    rows = render_origins(load_config(Run, overrides=["optim.clip=none"]))
    assert ("optim.clip", '"none"', "--set") in rows
    assert ("weights", "{code = 1.0}", "default") in rows
    assert [key for key, _, _ in rows] == list(load_config(Run).origins)


def test_resolved_is_generic_and_frozen():
    resolved: Resolved[Run] = load_config(Run)
    with pytest.raises(AttributeError):
        resolved.hash = "x"  # type: ignore[misc]
