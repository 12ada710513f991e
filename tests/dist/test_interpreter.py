from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.dist.interpreter import code_command, module_path

PROGRAM = """
import json, sys
from unisono.dist.interpreter import module_path
print(json.dumps([sys.path, module_path().split(":")]))
"""
SOURCE = str(Path(__file__).parents[2] / "src")


@pytest.mark.parametrize("how", ["script", "-c", "-m"])
def test_a_child_finds_all_but_what_python_put_first_by_itself(tmp_path: Path, how: str) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "named").mkdir()
    command = {"script": ["program.py"], "-c": ["-c", PROGRAM], "-m": ["-m", "program"]}[how]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([SOURCE, "named"])}
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True, check=True
    )
    mine, its = json.loads(done.stdout)
    assert mine[0] in ("", str(tmp_path))
    assert its == mine[1:]
    assert SOURCE in its
    assert str(tmp_path / "named") in its


def test_a_working_folder_that_the_user_names_stays(tmp_path: Path) -> None:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([SOURCE, str(tmp_path)])}
    done = subprocess.run(
        code_command(PROGRAM), cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True, check=True
    )
    mine, its = json.loads(done.stdout)
    assert str(tmp_path) in its
    assert its == mine


def test_without_a_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert SOURCE in module_path().split(os.pathsep)
