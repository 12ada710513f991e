"""The programs of examples/programs: each makes its data, runs as its first lines say, and asserts its own result."""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[1] / "examples" / "programs"


def lines() -> list[tuple[str, str]]:
    """Each program's name, and each command line in its docstring."""
    found: list[tuple[str, str]] = []
    for path in sorted(PROGRAMS.glob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        commands = [line for line in text.splitlines() if path.name in line]
        assert commands, path
        found += [(path.name, command) for command in commands]
    return found


@pytest.mark.full
@pytest.mark.parametrize(("name", "command"), lines())
def test_a_program_runs_as_it_says(name: str, command: str, tmp_path: Path) -> None:
    parts = shlex.split(command.replace("FOLDER", str(tmp_path / "folder")))
    python = [sys.executable]
    known = {
        "python": python,
        "unisono": [*python, "-m", "unisono"],
        "torchrun": [*python, "-m", "torch.distributed.run"],
    }
    tool, *rest = parts
    arguments = [
        str(PROGRAMS / part) if part == name else (sys.executable if part == "python" else part) for part in rest
    ]
    path = os.pathsep.join(filter(None, [str(PROGRAMS.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [*known[tool], *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.strip().splitlines(), "it says nothing of its result"


def test_every_program_asserts_its_result_and_is_on_the_page() -> None:
    page = (PROGRAMS.parents[1] / "docs" / "programs.md").read_text()
    for path in PROGRAMS.glob("*.py"):
        assert f"`{path.name}`" in page
        tree = ast.parse(path.read_text())
        assert any(isinstance(node, ast.Assert) for node in ast.walk(tree)), path
