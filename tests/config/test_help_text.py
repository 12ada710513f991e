from __future__ import annotations

import re
from pathlib import Path

import pytest
from config_example import Run, texts

from unisono.config import explain, load_config, starter
from unisono.errors import ConfigError


def test_explain_an_option():
    assert explain(Run, "optim.lr") == (
        "optim.lr\n"
        "  Peak learning rate.\n"
        "  type      a number\n"
        "  range     > 0 and < 10\n"
        "  default   0.001\n"
        "  TOML      [optim]\n"
        "            lr = 0.001\n"
        "  --set     --set optim.lr=0.001\n"
        "  env       UNISONO__OPTIM__LR=0.001"
    )
    assert explain(Run, "optim.name").splitlines()[3] == '  choices   "adamw", "lamb", "sgd"'
    assert explain(Run, "weights") == (
        "weights\n"
        "  Share of each corpus.\n"
        "  type      a table of numbers\n"
        "  range     >= 0\n"
        "  default   {code = 1.0}\n"
        "  TOML      weights = {code = 1.0}\n"
        "  --set     --set 'weights={code = 1.0}'\n"
        "  env       UNISONO__WEIGHTS='{code = 1.0}'"
    )


def test_explain_an_option_for_python():
    assert "  python    a callable, in the config() of a Python file" in explain(Run, "model.build").splitlines()


def test_explain_a_section():
    assert explain(Run, "optim") == (
        "[optim]\n"
        "  How parameters move.\n"
        "  optim.lr                     0.001  Peak learning rate.\n"
        "  optim.betas                  [0.9, 0.999]  Decay of the moments.\n"
        '  optim.name                   "adamw"  Update rule.\n'
        "  optim.clip                   1.0  Largest global norm of the gradient.\n"
        '  optim.schedule.kind          "cosine"  Shape of the decay.\n'
        "  optim.schedule.warmup_steps  100  Steps of linear warm-up."
    )
    assert explain(Run, "").startswith("Run\n  Everything about one run.\n  seed ")
    assert len(explain(Run, "").splitlines()) == 2 + len(load_config(Run).origins)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("optim.lrr", "did you mean optim.lr?"),
        ("lr", "did you mean optim.lr?"),
        ("optimm.lr", "did you mean optim or optim.lr?"),
        ("optim.lr.x", "did you mean optim.lr?"),
        ("zzz.zzz", "one of: seed, name, note, tags, layers, weights, optim, model"),
    ],
)
def test_explain_something_unknown(key: str, nearest: str):
    with pytest.raises(ConfigError) as caught:
        explain(Run, key)
    assert texts(caught.value) == [(f"no option {key}", "only an option or a section can be explained", nearest)]
    assert caught.value.problems[0].consequence == "nothing was explained"


def test_what_explain_says_works(tmp_path: Path):
    for key in load_config(Run).origins:
        told = dict(re.findall(r"^  (--set|env) +(.*)$", explain(Run, key), re.MULTILINE))
        import shlex

        (override,) = shlex.split(told["--set"])[1:]
        (variable,) = shlex.split(told["env"])
        name, _, value = variable.partition("=")
        assert load_config(Run, overrides=[override], environ={name: value}).hash == load_config(Run).hash
        toml = explain(Run, key).partition("  TOML      ")[2].partition("\n  --set")[0]
        path = tmp_path / "run.toml"
        path.write_text(toml)
        assert load_config(Run, [path]).hash == load_config(Run).hash


def test_starter_loads_to_the_defaults(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text(starter(Run), encoding="utf-8")
    resolved = load_config(Run, [path])
    assert resolved.value == Run()
    assert set(resolved.origins.values()) == {"default"}


def test_starter_uncommented_sets_every_option_to_its_default(tmp_path: Path):
    text = "\n".join(
        line.removeprefix("# ") if re.match(r"# \w+ = ", line) else line for line in starter(Run).splitlines()
    )
    path = tmp_path / "run.toml"
    path.write_text(text.replace('base = "other.toml"', ""), encoding="utf-8")
    resolved = load_config(Run, [path])
    assert resolved.hash == load_config(Run).hash
    assert "default" not in resolved.origins.values()


def test_starter_tells_help_type_and_limits():
    text = starter(Run)
    assert text.startswith("# Run: every option with its default. Remove the # before a line to change it.\n")
    assert "\n# Peak learning rate. (a number; range > 0 and < 10)\n# lr = 0.001\n" in text
    assert '\n# Update rule. (a string; choices "adamw", "lamb", "sgd")\n# name = "adamw"\n' in text
    assert "\n[optim]\n# How parameters move.\n" in text
    assert '\n# Shape of the decay. ("cosine" or "linear")\n# kind = "cosine"\n' in text
