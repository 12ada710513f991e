"""What a user reads when a configuration is wrong: every text, word by word."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from config_example import Optim, Run, texts

from unisono.config import load_config, option
from unisono.errors import ConfigError


def fails(*sources: Path, **given: Any) -> list[tuple[str, str, str]]:
    with pytest.raises(ConfigError) as caught:
        load_config(Run, sources, **given)
    assert {problem.consequence for problem in caught.value.problems} == {"nothing was started"}
    return texts(caught.value)


def one(override: str) -> tuple[str, str, str]:
    (problem,) = fails(overrides=[override])
    return problem


@pytest.fixture
def run(tmp_path: Path):
    path = tmp_path / "run.toml"

    def write(text: str) -> Path:
        path.write_text(text, encoding="utf-8")
        return path

    return write


TOP = "only what is declared can be set at the top level"
IN_OPTIM = "only what is declared can be set in section [optim]"


def test_all_problems_at_once_in_one_text(run, tmp_path: Path):
    path = run("[optim]\nlr = 'fast'\nbeta = 1\n[modelz]\nheads = 3\n")
    with pytest.raises(ConfigError) as caught:
        load_config(
            Run, [tmp_path / "absent.toml", path], environ={"UNISONO__SEED": "-1"}, overrides=["optim.name=adam"]
        )
    assert caught.value.exit_code == 2
    assert str(caught.value) == (
        f"6 problems\n"
        f"1. no file {tmp_path}/absent.toml\n"
        "  rule: every configuration that is named exists\n"
        "  so:   nothing was started\n"
        f"  try:  {tmp_path} holds run.toml\n"
        f'2. {path}:2: optim.lr = "fast"\n'
        "  rule: optim.lr takes a number\n"
        "  so:   nothing was started\n"
        "  try:  optim.lr = 0.001 (the default)\n"
        f"3. {path}:3: unknown key optim.beta = 1\n"
        "  rule: only what is declared can be set in section [optim]\n"
        "  so:   nothing was started\n"
        "  try:  did you mean optim.betas?\n"
        f"4. {path}:4: unknown section modelz\n"
        "  rule: only what is declared can be set at the top level\n"
        "  so:   nothing was started\n"
        "  try:  did you mean model?\n"
        "5. env UNISONO__SEED: seed = -1\n"
        "  rule: seed must be >= 0\n"
        "  so:   nothing was started\n"
        "  try:  UNISONO__SEED=0\n"
        '6. --set: optim.name = "adam"\n'
        '  rule: optim.name is one of "adamw", "lamb", "sgd"\n'
        "  so:   nothing was started\n"
        "  try:  did you mean 'adamw'?"
    )


def test_a_wrong_value_is_told_even_where_a_later_layer_replaces_it(run):
    path = run("seed = 'one'\n")
    assert fails(path, overrides=["seed=1"]) == [
        (f'{path}:1: seed = "one"', "seed takes a whole number", "seed = 1 (the default)")
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        # the closest name of the section first, then the same name elsewhere
        (
            "[optim]\nhead = 2",
            (
                "2: unknown key optim.head = 2",
                IN_OPTIM,
                "one of: optim.lr, optim.betas, optim.name, optim.clip, optim.schedule",
            ),
        ),
        ("[optim]\nheads = 2", ("2: unknown key optim.heads = 2", IN_OPTIM, "did you mean model.heads?")),
        ("lr = 2", ("1: unknown key lr = 2", TOP, "did you mean optim.lr?")),
        (
            "[model]\nname = 2",
            ("2: unknown key model.name = 2", IN_OPTIM.replace("optim", "model"), "did you mean name or optim.name?"),
        ),
        ("[optim]\nschedules = 2", ("2: unknown key optim.schedules = 2", IN_OPTIM, "did you mean optim.schedule?")),
        ("[optim]\nscheduel.kind = 2", ("2: unknown section optim.scheduel", IN_OPTIM, "did you mean optim.schedule?")),
        ("[warmup_steps]", ("1: unknown section warmup_steps", TOP, "did you mean optim.schedule.warmup_steps?")),
        ("zzz = 1", ("1: unknown key zzz = 1", TOP, "one of: seed, name, note, tags, layers, weights, optim, model")),
        ("'optim.lr' = 1", ('1: unknown key "optim.lr" = 1', TOP, "did you mean optim.lr?")),
        # a section and a leaf confused
        ("\noptim = 3", ("2: optim = 3", "optim is a section with keys of its own", "optim.lr = 0.001")),
        (
            "[[model]]\nheads = 1",
            ("1: model = [{heads = 1}]", "model is a section with keys of its own", 'model.build = "gpt"'),
        ),
        (
            "[optim.lr]\npeak = 1",
            ("1: optim.lr = {peak = 1}", "optim.lr takes a number", "optim.lr = 0.001 (the default)"),
        ),
        (
            "[optim]\nlr.peak = 1",
            ("2: optim.lr = {peak = 1}", "optim.lr takes a number", "optim.lr = 0.001 (the default)"),
        ),
        # types
        ("seed = '3'", ('1: seed = "3"', "seed takes a whole number", "seed = 3")),
        ("seed = 3.0", ("1: seed = 3.0", "seed takes a whole number", "seed = 3")),
        ("seed = 3.5", ("1: seed = 3.5", "seed takes a whole number", "seed = 1 (the default)")),
        ("seed = true", ("1: seed = true", "seed takes a whole number", "seed = 1 (the default)")),
        ("name = 2024", ("1: name = 2024", "name takes a string", 'name = "2024"')),
        ("name = true", ("1: name = true", "name takes a string", 'name = "true"')),
        ("name = 2024-01-31", ("1: name = 2024-01-31", "name takes a string", 'name = "2024-01-31"')),
        ("note = 1", ("1: note = 1", 'note takes a string or "none"', 'note = "1"')),
        ("tags = 'a'", ('1: tags = "a"', "tags takes an array of strings", 'tags = ["a"]')),
        ("tags = 'a, b'", ('1: tags = "a, b"', "tags takes an array of strings", 'tags = ["a", "b"]')),
        (
            "tags = ['a', 'b', 3]",
            ('1: tags = ["a", "b", 3]', "tags takes an array of strings; see element 2", "tags = [] (the default)"),
        ),
        (
            "optim.betas = [0.9]",
            (
                "1: optim.betas = [0.9]",
                "optim.betas takes an array of 2 numbers",
                "optim.betas = [0.9, 0.999] (the default)",
            ),
        ),
        (
            "weights = {a = 'b'}",
            ('1: weights = {a = "b"}', "weights takes a table of numbers", "weights = {code = 1.0} (the default)"),
        ),
        (
            "optim.clip = 'no'",
            ('1: optim.clip = "no"', 'optim.clip takes a number or "none"', "optim.clip = 1.0 (the default)"),
        ),
        ("optim.lr = '0.1'", ('1: optim.lr = "0.1"', "optim.lr takes a number", "optim.lr = 0.1")),
        ("optim.lr = '-1'", ('1: optim.lr = "-1"', "optim.lr takes a number", "optim.lr = 0.001 (the default)")),
        ("model.tied = 1", ("1: model.tied = 1", "model.tied takes true or false", "model.tied = true (the default)")),
        ("model.tied = 'false'", ('1: model.tied = "false"', "model.tied takes true or false", "model.tied = false")),
        (
            "model.micro_batch = 'all'",
            (
                '1: model.micro_batch = "all"',
                'model.micro_batch takes a whole number or "auto"',
                'model.micro_batch = "auto" (the default)',
            ),
        ),
        (
            "model.build = 3",
            ("1: model.build = 3", "model.build takes a string, or code of a Python file", 'model.build = "3"'),
        ),
        # choices and ranges
        (
            "optim.schedule.kind = 'linea'",
            (
                '1: optim.schedule.kind = "linea"',
                'optim.schedule.kind takes "cosine" or "linear"',
                "did you mean 'linear'?",
            ),
        ),
        ("layers = [1, 4]", ("1: layers = [1, 4]", "each element of layers is one of 1, 2, 3", "one of: 1, 2, 3")),
        ("seed = -5", ("1: seed = -5", "seed must be >= 0", "seed = 0")),
        (
            "seed = 18446744073709551616",
            ("1: seed = 18446744073709551616", "seed fits in 64 bits", "seed = 1 (the default)"),
        ),
        ("optim.lr = 0", ("1: optim.lr = 0", "optim.lr must be > 0 and < 10", "optim.lr = 0.001 (the default)")),
        ("optim.lr = 10", ("1: optim.lr = 10", "optim.lr must be > 0 and < 10", "optim.lr = 0.001 (the default)")),
        ("optim.lr = nan", ("1: optim.lr = nan", "optim.lr must be > 0 and < 10", "optim.lr = 0.001 (the default)")),
        (
            "optim.clip = inf",
            ("1: optim.clip = inf", "optim.clip must be a finite number", "optim.clip = 1.0 (the default)"),
        ),
        (
            "weights = {a = inf}",
            (
                "1: weights = {a = inf}",
                "each element of weights must be a finite number",
                "weights = {code = 1.0} (the default)",
            ),
        ),
        ("optim.clip = nan", ("1: optim.clip = nan", "optim.clip must be >= 0", "optim.clip = 1.0 (the default)")),
        (
            "optim.betas = [0.9, 1]",
            (
                "1: optim.betas = [0.9, 1]",
                "each element of optim.betas must be >= 0 and < 1",
                "optim.betas = [0.9, 0.999] (the default)",
            ),
        ),
        (
            "weights = {a = -1}",
            ("1: weights = {a = -1}", "each element of weights must be >= 0", "weights = {code = 1.0} (the default)"),
        ),
        (
            "model.micro_batch = 0",
            ("1: model.micro_batch = 0", "model.micro_batch must be >= 1", "model.micro_batch = 1"),
        ),
    ],
)
def test_one_wrong_line(run, text: str, problem: tuple[str, str, str]):
    path = run(text)
    given, rule, nearest = problem
    assert fails(path) == [(f"{path}:{given}", rule, nearest)]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("seed", ('--set "seed"', "--set takes KEY=VALUE with a dotted key", "--set seed=VALUE")),
        ("=3", ('--set "=3"', "--set takes KEY=VALUE with a dotted key", "--set section.name=VALUE")),
        (".lr=3", ('--set: unknown section ""', TOP, "one of: seed, name, note, tags, layers, weights, optim, model")),
        ("name=2024", ("--set: name = 2024", "name takes a string", "--set 'name=\"2024\"'")),
        ("optm.lr=3", ("--set: unknown section optm", TOP, "did you mean optim?")),
        ("optim.lrr=3", ("--set: unknown key optim.lrr = 3", IN_OPTIM, "did you mean optim.lr?")),
        ("optim=fast", ('--set: optim = "fast"', "optim is a section with keys of its own", "--set optim.lr=0.001")),
        (
            "weights.web=3",
            (
                "--set: unknown key weights.web",
                "weights is one option and takes a table of numbers",
                "--set 'weights={code = 1.0}'",
            ),
        ),
        (
            "optim.lr.peak=3",
            ("--set: unknown key optim.lr.peak", "optim.lr is one option and takes a number", "--set optim.lr=0.001"),
        ),
        ("name=\udcff", ('--set: name = "\\udcff"', "name is Unicode text", "--set 'name=\"run\"' (the default)")),
        (
            "seed=" + "0x" + "f" * 5000,
            ("--set: seed = thousands of digits", "seed fits in 64 bits", "--set seed=1 (the default)"),
        ),
    ],
)
def test_one_wrong_override(override: str, problem: tuple[str, str, str]):
    assert one(override) == problem


def test_wrong_environment():
    assert fails(environ={"UNISONO__OPTIM__LERNING_RATE": "1", "UNISONO__OPTIM__LRR": "1", "UNISONO__": "x"}) == [
        (
            'env UNISONO__: unknown key "" = "x"',
            TOP,
            "one of: " + ", ".join(f"UNISONO__{name.upper()}" for name in Run.__slots__),
        ),
        (
            "env UNISONO__OPTIM__LERNING_RATE: unknown key optim.lerning_rate = 1",
            IN_OPTIM,
            "one of: " + ", ".join(f"UNISONO__OPTIM__{name.upper()}" for name in Optim.__slots__),
        ),
        ("env UNISONO__OPTIM__LRR: unknown key optim.lrr = 1", IN_OPTIM, "did you mean UNISONO__OPTIM__LR?"),
    ]


def test_wrong_plan():
    assert fails(planned={"model.micro_batch": 0, "model.micro": 1}) == [
        ("planned: model.micro_batch = 0", "model.micro_batch must be >= 1", "model.micro_batch = 1"),
        ("planned: unknown key model.micro = 1", IN_OPTIM.replace("optim", "model"), "did you mean model.micro_batch?"),
    ]


HEADS = "the width is a multiple of the heads"


def test_rules_across_fields_name_the_origin_of_the_field(run):
    path = run("\n[model]\nheads = 3\n")
    assert fails(path) == [(f"{path}:3: model.heads: 3 heads for a width of 128", HEADS, "heads = 4")]
    assert one("model.width=6") == ("default: model.heads: 4 heads for a width of 6", HEADS, "heads = 4")
    with pytest.raises(ConfigError) as caught:
        load_config(Run, overrides=["seed=999"])
    assert texts(caught.value)[0] == ("default: optim.schedule.warmup_steps: seed above width", "none", "none")


def test_rules_across_fields_wait_for_sound_fields(run, tmp_path: Path):
    assert len(fails(overrides=["model.heads=3", "model.width=0"])) == 1
    assert len(fails(overrides=["model.heads=3", "model.widths=6"])) == 1
    assert len(fails(tmp_path / "absent.toml", overrides=["model.heads=3"])) == 1
    assert len(fails(overrides=["model.heads=3", "optim.lr=-1"])) == 2, "another section is no reason to wait"


def test_a_default_that_breaks_its_own_rule():
    @dataclass(frozen=True, kw_only=True)
    class Wrong:
        size: int = option(0, "Size.", ge=1)
        kind: str = option("a", "Kind.", choices=("b", "c"))

    with pytest.raises(ConfigError) as caught:
        load_config(Wrong, overrides=["size=2"])
    assert texts(caught.value) == [
        ("default: size = 0", "size must be >= 1", "size = 1"),
        ('default: kind = "a"', 'kind is one of "b", "c"', "one of: b, c"),
    ]


def test_values_of_foreign_types_are_shown_as_such():
    import numpy as np

    assert fails(planned={"optim.lr": np.float64(0.5), "optim.clip": {1.0}, "tags": date, "seed": None}) == [
        ("planned: optim.lr = np.float64(0.5)", "optim.lr takes a number", "optim.lr = 0.5"),
        ("planned: optim.clip = {1.0}", 'optim.clip takes a number or "none"', "optim.clip = 1.0 (the default)"),
        ('planned: tags = "python:date"', "tags takes an array of strings", "tags = [] (the default)"),
        ('planned: seed = "none"', "seed takes a whole number", "seed = 1 (the default)"),
    ]


# ---------------------------------------------------------------------------------------------- files

EXISTS = "every configuration that is named exists"


def test_missing_files(tmp_path: Path, run):
    assert fails(tmp_path / "x.toml") == [
        (f"no file {tmp_path}/x.toml", EXISTS, f"{tmp_path} holds no .toml or .py file")
    ]
    assert fails(tmp_path / "no" / "x.toml") == [
        (f"no file {tmp_path}/no/x.toml", EXISTS, f"there is no folder {tmp_path}/no")
    ]
    path = run('\nbase = "runs.toml"\n')
    assert fails(path) == [
        (f'{path}:2: base = "runs.toml": no file {tmp_path}/runs.toml', EXISTS, f"did you mean {path}?")
    ]


def test_files_of_another_kind(tmp_path: Path):
    given = tmp_path / "run.yaml"
    rule = "a configuration is a .toml file or a .py file with def config()"
    assert fails(given) == [(f"{given} is neither TOML nor Python", rule, "run.toml")]
    folder = tmp_path / "dir.toml"
    folder.mkdir()
    assert fails(folder) == [
        (
            f"{folder}: Is a directory",
            "a configuration is a regular file, which this process may read",
            f"ls -ld {folder}",
        )
    ]


def test_a_broken_file_does_not_hide_another(run, tmp_path: Path):
    path = run("seed = \n")
    other = tmp_path / "other.toml"
    other.write_text("sed = 1\n")
    assert [given for given, _, _ in fails(path, other)] == [f"{path}:1: seed =", f"{other}:1: unknown key sed = 1"]


def test_base_that_is_no_file_name(run):
    path = run("base = ['a.toml']\nseed = -1")
    assert fails(path) == [
        (
            f'{path}:1: base = ["a.toml"]',
            "base names one file, as a string, relative to this one",
            'base = "other.toml"',
        ),
        (f"{path}:2: seed = -1", "seed must be >= 0", "seed = 0"),
    ]


def test_cycles(run, tmp_path: Path):
    rule = "the layers beneath a file end somewhere"
    path = run('base = "run.toml"\n')
    assert fails(path) == [
        (f'{path}:1: base = "run.toml": comes back to {path}', rule, "drop one base of run.toml -> run.toml")
    ]
    run('base = "b.toml"\n')
    second = tmp_path / "b.toml"
    second.write_text('# b\nbase = "./run.toml"\n')
    top = tmp_path / "top.toml"
    top.write_text('base = "run.toml"\n')
    assert fails(top) == [
        (
            f'{second}:2: base = "./run.toml": comes back to {path}',
            rule,
            "drop one base of run.toml -> b.toml -> run.toml",
        )
    ]


def test_a_cycle_under_another_spelling(run, tmp_path: Path):
    path = run(f'base = "../{tmp_path.name}/run.toml"\n')
    ((given, _, _),) = fails(path)
    assert given.endswith(f"comes back to {tmp_path}/../{tmp_path.name}/run.toml")
