"""What may be imported when: torch only by who computes. And the size of what users see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import size

import unisono
from unisono.config.fields import option_tree
from unisono.train.config import RunConfig

# Each command runs in one process, in order; after each one torch must not be there.
SCRIPT = """
import contextlib, io, json, runpy, sys
import unisono, unisono.train.config
from unisono.cli.main import COMMANDS

def found():
    return sorted({"torch", "numpy", "plotly", "rich"} & set(sys.modules))

def run(arguments):
    sys.argv = ["unisono", *arguments]
    out = io.StringIO()
    code = "none"
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            runpy.run_module("unisono", run_name="__main__")
        except SystemExit as end:
            code = end.code
    return [arguments, code, found(), out.getvalue()]

groups = {
    "config": ["show", "explain", "schema", "diff"],
    "checkpoint": ["ls", "verify", "export"],
    "plan": ["show", "check", "diff", "import"],
    "data": ["verify", "repair", "reindex", "convert", "shard", "inspect", "cat", "pack", "stats", "bench"],
}
print(json.dumps({
    "import": found(),
    "verbs": sorted(COMMANDS),
    "runs": [run(each) for each in [
        ["--help"], ["--version"], *([verb, "--help"] for verb in COMMANDS),
        *([group, verb, "--help"] for group, verbs in groups.items() for verb in verbs),
        ["config", "show"], ["config", "show", "--origin"], ["config", "show", "--json"], ["config", "schema"],
        ["completion", "bash"], ["config", "explain", "optim.lr"], ["init", "run.toml"], ["init", "--python", "run.py"],
        ["config", "diff", "run.toml", "run.toml"],
        [], ["trian"], ["train", "--nonsense"], ["train", "run.yaml"], ["train", "--set", "optim.lt=1"],
        ["train", "--set", "model.num_heads=3"], ["eval", "--samples", "many"], ["eval", "nowhere"], ["generate", "nowhere"],
        ["predict", "nowhere", "-"],
        ["config", "explain", "nothing"], ["init", "run.toml"], ["checkpoint", "ls", "nowhere"],
        ["plan", "check", "nowhere"], ["checkpoint", "verify", "nowhere"], ["checkpoint", "export", "nowhere"],
    ]],
}))
"""


def test_nothing_loads_torch_before_it_computes(tmp_path: Path) -> None:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["import"] == []
    verbs = [
        "checkpoint",
        "compare",
        "completion",
        "config",
        "data",
        "diagnose",
        "doctor",
        "eval",
        "generate",
        "init",
        "kvstore",
        "launch",
        "plan",
        "predict",
        "profile",
        "prune",
        "quantize",
        "report",
        "top",
        "train",
        "tune",
    ]
    assert told["verbs"] == verbs
    codes = [(" ".join(arguments), code) for arguments, code, _, _ in told["runs"]]
    assert [arguments for arguments, _, found, _ in told["runs"] if found] == []
    assert [arguments for arguments, _, _, text in told["runs"] if not text] == [["config", "diff", *2 * ["run.toml"]]]
    assert {code for _, code in codes} == {0, 2}
    assert [text for text, code in codes if code == 2] == [
        *("", "trian", "train --nonsense", "train run.yaml", "train --set optim.lt=1", "train --set model.num_heads=3"),
        *(
            "eval --samples many",
            "eval nowhere",
            "generate nowhere",
            "predict nowhere -",
            "config explain nothing",
            "init run.toml",
        ),
        "checkpoint ls nowhere",
        "plan check nowhere",
        "checkpoint verify nowhere",
        "checkpoint export nowhere",
    ]
    helps = {" ".join(arguments): text for arguments, _, _, text in told["runs"] if "--help" in arguments}
    for command, text in helps.items():
        last = command.removesuffix(" --help")
        if last not in ("--help", "config", "checkpoint", "plan", "data", "kvstore", "tune"):
            assert "--json" in text, f"{command} has no --json"
            assert "--log-level" in text, f"{command} has no --log-level"
            assert "-v, --verbose" in text, f"{command} has no -v"


def test_the_public_surface_is_the_stub() -> None:
    assert dir(unisono) == sorted(unisono.__all__)
    assert 20 <= len(unisono.__all__) <= 40
    for name in unisono.__all__:
        assert getattr(unisono, name).__name__ == name


def test_users_have_a_bounded_number_of_fields() -> None:
    """Settings common to all tasks are 93 at most; components, which name code, and the own section of each task, of adapters, of
    a teacher and of quantized layers 16 more. Data have 17: which rows are read, how a part is held out, and which part are
    questions of their own. A model has 18: where its weights come from is one, and a head's width another, which is free once
    heads have been pruned."""
    leaves = option_tree(RunConfig).leaves
    own = {
        section: [key for key in leaves if key.startswith(f"{section}.")]
        for section in ("components", "task", "model", "lora", "distill", "quantize", "data", "image", "text")
    }
    most = {"data": 17, "model": 18}
    assert {section: len(keys) for section, keys in own.items() if len(keys) > most.get(section, 16)} == {}
    common = leaves.keys() - {key for keys in own.values() for key in keys}
    assert len(common) <= 93, sorted(common)


def test_every_field_says_what_it_is_in_one_line() -> None:
    for key, leaf in option_tree(RunConfig).leaves.items():
        assert leaf.spec.help.endswith("."), key
        assert "\n" not in leaf.spec.help, key


def test_modules_are_within_their_budget() -> None:
    assert size.problems() == []
