"""A TOML file, an override and the environment are data: nothing in them is imported, called or built."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from config_example import Run, texts

from unisono.config import load_config
from unisono.errors import ConfigError

HOSTILE = [
    "!!python/object/apply:os.system ['touch owned']",
    "!!python/object/new:subprocess.Popen [[touch, owned]]",
    "os.system",
    "os.system('touch owned')",
    "__import__('os').system('touch owned')",
    "${oc.env:HOME}",
    "{{ self.__init__.__globals__ }}",
    "$(touch owned)",
    "antigravity",
    "config_example:Run",
    "../../etc/passwd",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(f"name = {text!r}\n[model]\nbuild = '''{text}'''\n" if "'" not in text else f'name = "{text}"\n')
    monkeypatch.delitem(sys.modules, "antigravity", raising=False)
    for resolved in (
        load_config(Run, [path]),
        load_config(Run, overrides=[f"name={text}"]),
        load_config(Run, environ={"UNISONO__NAME": text, "UNISONO__MODEL__BUILD": text}),
    ):
        assert resolved.value.name == text
        assert isinstance(resolved.value.model.build, str)
        assert resolved.python is None
    assert "antigravity" not in sys.modules
    assert [item.name for item in tmp_path.iterdir()] == ["run.toml"]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_refused_where_the_type_or_the_choices_say_so(text: str):
    with pytest.raises(ConfigError) as caught:
        load_config(Run, environ={f"UNISONO__{key}": text for key in ("SEED", "OPTIM__NAME", "MODEL__TIED")})
    assert [rule for _, rule, _ in texts(caught.value)] == [
        "model.tied takes true or false",
        'optim.name is one of "adamw", "lamb", "sgd"',
        "seed takes a whole number",
    ]


LABEL = "a python: label stands for the callable that the Python file beneath gives model.build"


def test_a_label_names_no_code(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text("[model]\nbuild = 'python:os.system'\n")
    with pytest.raises(ConfigError) as caught:
        load_config(Run, [path], overrides=["model.build=python:os.system"])
    nearest = 'base = "config.py", whose config() gives model.build'
    assert texts(caught.value) == [
        (f'{path}:2: model.build = "python:os.system"', LABEL, nearest),
        ('--set: model.build = "python:os.system"', LABEL, nearest),
    ]


def test_a_label_has_to_match_the_callable_beneath(tmp_path: Path):
    (tmp_path / "config.py").write_text(
        "from config_example import Model, Run\ndef tower(): ...\ndef config(): return Run(model=Model(build=tower))\n"
    )
    path = tmp_path / "run.toml"
    path.write_text("base = 'config.py'\n[model]\nbuild = 'python:config'\n")
    with pytest.raises(ConfigError) as caught:
        load_config(Run, [path])
    assert texts(caught.value) == [(f'{path}:3: model.build = "python:config"', LABEL, "that file gives python:tower")]


def test_a_label_is_plain_text_in_an_ordinary_field():
    assert load_config(Run, overrides=["name=python:os.system"]).value.name == "python:os.system"
