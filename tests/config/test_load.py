"""Layers, origins and conversion of values that are right."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from config_example import Model, Optim, Run, Schedule

from unisono.config import load_config, option, render_origins


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_nothing_given_is_the_default():
    resolved = load_config(Run)
    assert resolved.value == Run()
    assert set(resolved.origins.values()) == {"default"}
    assert resolved.python is None


def test_precedence_and_origin_of_every_layer(tmp_path: Path):
    base = write(tmp_path / "base.toml", "seed = 2\nname = 'base'\n\n[optim]\nlr = 0.2\nclip = 2\n[model]\nheads = 2\n")
    run = write(
        tmp_path / "run.toml", "# run\nbase = 'base.toml'\noptim.lr = 0.3\noptim.clip = 3.0\n[model]\nwidth = 8\n"
    )
    top = write(tmp_path / "top.toml", "[optim]\nclip = 4.0\nname = 'sgd'\n")
    resolved = load_config(
        Run,
        [run, str(top)],
        overrides=["optim.name=lamb", "optim.schedule.warmup_steps=7", "optim.schedule.warmup_steps=8"],
        environ={"UNISONO__OPTIM__NAME": "adamw", "UNISONO__MODEL__TIED": "false", "UNISONO_RANK": "0", "PATH": "x"},
        planned={"seed": 9, "model.micro_batch": 16},
    )
    assert resolved.value == Run(
        seed=2,
        name="base",
        optim=Optim(lr=0.3, clip=4.0, name="lamb", schedule=Schedule(warmup_steps=8)),
        model=Model(heads=2, width=8, micro_batch=16, tied=False),
    )
    told = {key: origin for key, origin in resolved.origins.items() if origin != "default"}
    assert told == {
        "seed": f"{base}:1",
        "name": f"{base}:2",
        "optim.lr": f"{run}:3",
        "optim.clip": f"{top}:2",
        "optim.name": "--set",
        "optim.schedule.warmup_steps": "--set",
        "model.heads": f"{base}:8",
        "model.width": f"{run}:6",
        "model.micro_batch": "planned",
        "model.tied": "env UNISONO__MODEL__TIED",
    }
    assert render_origins(resolved)[:3] == [
        ("seed", "2", f"{base}:1"),
        ("name", '"base"', f"{base}:2"),
        ("note", '"none"', "default"),
    ]


def test_base_is_relative_to_its_file_and_chains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    write(tmp_path / "root.toml", "seed = 5\nname = 'root'\n")
    write(tmp_path / "a" / "mid.toml", "base = '../root.toml'\nname = 'mid'\n")
    write(tmp_path / "a" / "b" / "run.toml", "base = '../mid.toml'\nnote = 'run'\n")
    monkeypatch.chdir(tmp_path)
    resolved = load_config(Run, ["a/b/run.toml"])
    assert (resolved.value.seed, resolved.value.name, resolved.value.note) == (5, "mid", "run")
    assert resolved.origins["seed"] == "a/b/../../root.toml:1"
    assert load_config(Run, ["a/mid.toml", "a/mid.toml"]).value.name == "mid", "twice is no cycle"


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("optim.lr=3", "lr", 3.0),
        ("optim.lr=3e-4", "lr", 0.0003),
        ("optim.lr = 0.5 ", "lr", 0.5),
        ("optim.betas=[0, 0.5]", "betas", (0.0, 0.5)),
        ("optim.clip=none", "clip", None),
        ("optim.name=sgd", "name", "sgd"),
        ('optim.name="sgd"', "name", "sgd"),
        ("optim={name='sgd'}", "name", "sgd"),
        ("optim.schedule.kind='linear'", "schedule", Schedule(kind="linear")),
    ],
)
def test_overrides_that_fit(override: str, key: str, value: Any):
    found = getattr(load_config(Run, overrides=[override]).value.optim, key)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", ""),
        ("runs/a b", "runs/a b"),
        ("a=b", "a=b"),
        ('"3"', "3"),
        ("1 # 2", "1 # 2"),
        ("1, 2", "1, 2"),
        ("1,", "1,"),
        ("1]\nseed = [4", "1]\nseed = [4"),
        ("os.system('true')", "os.system('true')"),
        ("[" * 5000, "[" * 5000),
        ("9" * 4400 + "x", "9" * 4400 + "x"),
        ("ü→", "ü→"),
    ],
)
def test_text_that_is_no_toml_literal_stays_text(text: str, value: str):
    assert load_config(Run, overrides=[f"name={text}"]).value.name == value.strip()
    assert load_config(Run, environ={"UNISONO__NAME": text}).value.name == value


@pytest.mark.parametrize("spelling", ["note = 'none'", 'note = "none"'])
def test_none_in_a_file_unsets_what_lies_beneath(tmp_path: Path, spelling: str):
    base = write(tmp_path / "base.toml", "note = 'text'\nname = 'none'\n")
    over = write(tmp_path / "over.toml", spelling + "\n")
    value = load_config(Run, [base, over]).value
    assert value.note is None
    assert value.name == "none", "a field that cannot be None keeps the word"


def test_an_array_or_a_table_is_one_value(tmp_path: Path):
    base = write(tmp_path / "base.toml", "tags = ['a', 'b']\n[weights]\ncode = 1\nweb = 2\n")
    over = write(tmp_path / "over.toml", "tags = []\nweights.books = 3\n")
    resolved = load_config(Run, [base, over])
    assert resolved.value.weights == {"books": 3.0}
    assert resolved.value.tags == ()
    assert resolved.origins["weights"] == f"{over}:2"
    assert load_config(Run, overrides=["weights={}"]).value.weights == {}


def test_a_file_of_comments_is_all_defaults(tmp_path: Path):
    assert load_config(Run, [write(tmp_path / "run.toml", "# all defaults")]).value == Run()


@dataclass(frozen=True, kw_only=True, slots=True)
class Length:
    steps: int = option(300, "Steps.")
    epochs: float = option(0.0, "Epochs instead.", instead_of="steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class Long:
    length: Length = Length()


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        ("length.epochs = 2", (300, 2.0)),
        ("length.steps = 5", (5, 0.0)),
        ("length.epochs = 0.0", (9, 0.0)),  # the default takes nothing's place
        ("length = {steps = 7, epochs = 3}", (7, 3.0)),  # for the rules of the section to refuse
        ("# nothing", (9, 0.0)),
    ],
)
def test_a_layer_that_sets_one_of_two_unsets_the_other_beneath(tmp_path: Path, over: str, expected: Any):
    base = write(tmp_path / "base.toml", "length.steps = 9\n")
    resolved = load_config(Long, [base, write(tmp_path / "over.toml", over)])
    assert (resolved.value.length.steps, resolved.value.length.epochs) == expected
    if expected[0] == 300:
        assert resolved.origins["length.steps"] == "default"
    back = load_config(Long, [write(tmp_path / "epochs.toml", "length.epochs = 4")], overrides=["length.steps=5"])
    assert back.value.length == Length(steps=5)
