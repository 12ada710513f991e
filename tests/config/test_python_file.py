"""Python files as configurations: what they give, and whom their mistakes are blamed on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from config_example import Model, Optim, Run, texts

from unisono.config import diff, load_config
from unisono.config.python_file import read_objects
from unisono.errors import ConfigError

GOOD = """\
from config_example import Model, Optim, Run
import neighbour_of_config

def build(options):
    return neighbour_of_config.NAME

def config() -> Run:
    return Run(seed=7, model=Model(build=build, width=128), optim=Optim(betas=[0, 0.5], clip=None))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder with a neighbour module; what a test imports from it is forgotten afterwards."""
    (tmp_path / "neighbour_of_config.py").write_text("NAME = 'tower'\n")
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


def write(folder: Path, text: str, name: str = "config.py") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_values_origins_and_a_working_callable(folder: Path):
    path = write(folder, GOOD)
    before = list(sys.path)
    resolved = load_config(Run, [path], overrides=["optim.name=sgd"], planned={"model.micro_batch": 2})
    assert sys.path == before
    assert not list(folder.glob("__pycache__/config*")), "a stale compiled file could run instead of the digested text"
    assert resolved.value.model.build(None) == "tower"
    assert resolved.value == Run(
        seed=7,
        model=Model(build=resolved.value.model.build, width=128, micro_batch=2),
        optim=Optim(betas=(0.0, 0.5), clip=None, name="sgd"),
    )
    assert {key: origin for key, origin in resolved.origins.items() if origin != "default"} == {
        "seed": str(path),
        "model.build": str(path),
        "model.micro_batch": "planned",
        "optim.betas": str(path),
        "optim.clip": str(path),
        "optim.name": "--set",
    }


def test_resolved_file_runs_the_python_file_again(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    path = write(folder, GOOD)
    first = load_config(Run, [path], overrides=["seed=8"])
    saved = tmp_path_factory.mktemp("run") / "resolved.toml"
    saved.write_text(first.to_toml(), encoding="utf-8")
    assert saved.read_text().splitlines()[1] == f'base = "{path}"'
    assert 'build = "python:build"' in saved.read_text()
    second = load_config(Run, [saved])
    assert second.hash == first.hash
    assert second.to_toml() == first.to_toml()
    assert second.value.seed == 8
    assert second.value.model.build(None) == "tower"
    assert diff(first, second) == []
    # the same file elsewhere is the same configuration; another content is another
    write(folder, GOOD, "copy.py")
    assert load_config(Run, [folder / "copy.py"], overrides=["seed=8"]).hash == first.hash
    write(folder, GOOD + "# changed\n")
    third = load_config(Run, [saved])
    assert third.hash != first.hash
    (only,) = diff(first, third)
    assert only.key == "model.build"
    assert only.left.startswith('"python:build" @')
    assert only.left != only.right


def test_without_callables_the_python_file_does_not_matter_any_more(folder: Path):
    path = write(folder, "from config_example import Run\ndef config(): return Run(seed=3)\n")
    resolved = load_config(Run, [path])
    assert resolved.hash == load_config(Run, overrides=["seed=3"]).hash
    assert resolved.python is None
    assert "base" not in resolved.to_toml()
    replaced = load_config(Run, [write(folder, GOOD)], overrides=["model.build=gpt"])
    assert replaced.python is None


def test_a_toml_file_over_a_python_file(folder: Path):
    write(folder, GOOD)
    run = write(folder, "base = 'config.py'\nseed = 9\n", "run.toml")
    resolved = load_config(Run, [run])
    assert (resolved.value.seed, resolved.origins["seed"]) == (9, f"{run}:2")
    assert resolved.value.model.build(None) == "tower"
    assert resolved.python is not None
    assert resolved.python.path == folder / "config.py"


def test_lambdas_partials_and_classes_keep_their_labels(folder: Path):
    path = write(
        folder,
        "from __future__ import annotations\nimport dataclasses, functools\nfrom config_example import Model, Run\n"
        "@dataclasses.dataclass\nclass Net:\n    width: int = 1\n"
        "def config(): return Run(model=Model(build=functools.partial(Net, 3), loss=lambda x: x))\n",
    )
    resolved = load_config(Run, [path])
    assert resolved.encoded["model.build"] == "python:partial"
    assert resolved.encoded["model.loss"] == "python:config.<locals>.<lambda>"
    assert resolved.value.model.build().width == 3
    saved = write(folder, resolved.to_toml(), "resolved.toml")
    assert load_config(Run, [saved]).hash == resolved.hash


def test_future_statements_of_the_loader_do_not_leak_into_the_file(folder: Path):
    path = write(
        folder,
        "from config_example import Run\ndef f(x: int): ...\nassert f.__annotations__['x'] is int\n"
        "assert __name__ != '__main__'\ndef config(): return Run(name=__file__)\n",
    )
    assert load_config(Run, [path]).value.name == str(path)


def fails(*sources: Path) -> list[tuple[str, str, str]]:
    with pytest.raises(ConfigError) as caught:
        load_config(Run, sources)
    return texts(caught.value)


WITHOUT_RAISING = "config() returns a Run without raising"


@pytest.mark.parametrize(
    ("text", "given", "rule", "nearest"),
    [
        (
            "x = 1\n",
            ": defines no function config",
            "a Python configuration file has def config() -> Run",
            "add def config() -> Run: return Run()",
        ),
        (
            "def get_config(): ...\n",
            ": defines no function config",
            "a Python configuration file has def config() -> Run",
            "rename get_config to config",
        ),
        (
            "config = {'seed': 1}\n",
            ": config is a dict, not a function",
            "a Python configuration file has def config() -> Run",
            "add def config() -> Run: return Run()",
        ),
        ("\ndef config():\n    pass\n", ":2: config() returned None", "config() returns a Run", "return Run(...)"),
        ("def config(): return 3\n", ":1: config() returned an int", "config() returns a Run", "return Run(...)"),
        (
            "def config():\n  return 1 +\n",
            ":2: SyntaxError: invalid syntax",
            "the file is valid Python",
            "look at line 2: return 1 +",
        ),
        (
            "import not_there_at_all\n",
            ":1: ModuleNotFoundError: No module named 'not_there_at_all'",
            WITHOUT_RAISING,
            "look at line 1: import not_there_at_all",
        ),
        (
            "def inner():\n    raise ValueError('first\\nsecond')\n\ndef config():\n    return inner()\n",
            ":2: ValueError: first",
            WITHOUT_RAISING,
            "look at line 2: raise ValueError('first\\nsecond')",
        ),
        (
            "import json\ndef config():\n    return json.loads('{')\n",
            ":3: JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
            WITHOUT_RAISING,
            "look at line 3: return json.loads('{')",
        ),
        (
            "from config_example import Run\ndef config():\n    return Run(sed=1)\n",
            ":3: TypeError: Run.__init__() got an unexpected keyword argument 'sed'",
            WITHOUT_RAISING,
            "look at line 3: return Run(sed=1)",
        ),
        ("raise SystemExit(3)\n", ":1: SystemExit: 3", WITHOUT_RAISING, "look at line 1: raise SystemExit(3)"),
        (
            "def config(options): ...\n",
            ": TypeError: config() missing 1 required positional argument: 'options'",
            WITHOUT_RAISING,
            "repair config.py",
        ),
    ],
)
def test_mistakes_in_a_python_file(folder: Path, text: str, given: str, rule: str, nearest: str):
    path = write(folder, text)
    before = list(sys.path)
    assert fails(path) == [(f"{path}{given}", rule, nearest)]
    assert sys.path == before


def test_a_file_that_fails_leaves_no_module_and_keeps_its_traceback(folder: Path):
    path = write(folder, "1 / 0\n")
    before = set(sys.modules)
    with pytest.raises(ConfigError) as caught:
        load_config(Run, [path])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert not [name for name in set(sys.modules) - before if name.startswith("unisono_config_")]


def test_not_utf8(folder: Path):
    path = folder / "config.py"
    path.write_bytes(b"x = '\xff'\n")
    ((given, rule, _),) = fails(path)
    assert given.startswith(f"{path}")
    assert "SyntaxError" in given
    assert rule in ("the file is valid Python", WITHOUT_RAISING)


def test_wrong_values_from_python_are_all_told(folder: Path):
    path = write(
        folder,
        "from config_example import Model, Optim, Run\n"
        "def config(): return Run(seed='a', tags={'x'}, name=len, optim=3, model=Model(build=[], width=0))\n",
    )
    assert fails(path) == [
        (f"{path}: optim = 3", "optim is an instance of Optim", "optim=Optim(...)"),
        (f'{path}: seed = "a"', "seed takes a whole number", "seed = 1 (the default)"),
        (f'{path}: name = "python:len"', "name takes a string", 'name = "run" (the default)'),
        (f"{path}: tags = {{'x'}}", "tags takes an array of strings", "tags = [] (the default)"),
        (
            f"{path}: model.build = []",
            "model.build takes a string, or code of a Python file",
            'model.build = "gpt" (the default)',
        ),
        (f"{path}: model.width = 0", "model.width must be >= 1", "model.width = 1"),
    ]


def test_equal_to_the_default_is_not_enough(folder: Path):
    """True equals 1, which is the default of seed."""
    path = write(folder, "from config_example import Run\ndef config(): return Run(seed=True)\n")
    assert fails(path) == [(f"{path}: seed = true", "seed takes a whole number", "seed = 1 (the default)")]


def test_problems_of_a_configuration_loaded_inside_are_passed_on(folder: Path):
    write(folder, "sed = 1\n", "inner.toml")
    path = write(
        folder,
        "from pathlib import Path\nfrom config_example import Run\nfrom unisono.config import load_config\n"
        "def config(): return load_config(Run, [Path(__file__).with_name('inner.toml')]).value\n",
    )
    assert [given for given, _, _ in fails(path)] == [f"{folder}/inner.toml:1: unknown key sed = 1"]


def test_a_python_file_is_the_lowest_layer(folder: Path):
    first = write(folder, "seed = 2\n", "first.toml")
    path = write(folder, GOOD)
    rule = "a Python file gives every value, so it can only be the lowest layer"
    assert fails(first, path) == [(f"{path} comes after {first}", rule, "name config.py first")]
    over = write(folder, "base = 'config.py'\n", "over.toml")
    assert fails(first, over) == [
        (f'{over}:1: base = "config.py": {path} comes after {first}', rule, "name config.py first")
    ]
    assert load_config(Run, [path, first]).value.seed == 2


def test_code_that_is_too_long_for_a_script_is_not_read(folder: Path):
    path = write(folder, "NAME = 1\n" + "#" * (1 << 20))
    with pytest.raises(ConfigError, match=r"config\.py: more than 1,048,576 bytes"):
        read_objects(f"{path}:NAME")
