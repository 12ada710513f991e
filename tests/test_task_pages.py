"""The pages of tasks are run from top to bottom: the files that they make, then each command."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Desk

PAGES = sorted(path for path in (Path(__file__).parents[1] / "docs" / "tasks").glob("*.md") if path.name != "index.md")
# one page in the quick tier
QUICK = "tables.md"


def steps_of(page: str) -> list[tuple[str, str]]:
    """("python", code) and ("shell", command), in the order of the page."""
    pattern = re.compile(r"```python\n(?P<python>.*?)```|^    (?P<shell>\S[^\n]*)$", re.S | re.M)
    return [(str(match.lastgroup), match[str(match.lastgroup)]) for match in pattern.finditer(page)]


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.name, marks=[] if page.name == QUICK else [pytest.mark.full]) for page in PAGES],
)
def test_a_page_runs(page: Path, tmp_path: Path) -> None:
    desk = Desk(folder=tmp_path, cache=tmp_path / "cache")
    ran = 0
    for kind, text in steps_of(page.read_text()):
        if kind == "python":
            done = subprocess.run(
                [sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            continue
        words = shlex.split(text)
        if words[0] == "mkdir":
            (tmp_path / words[1]).mkdir()
            continue
        assert words[0] == "unisono", text
        # a run in this process; other tests launch
        arguments = ["train", "--debug", *words[2:]] if words[1] == "train" else words[1:]
        outcome = desk.here(*arguments)
        assert outcome.code == 0, f"{text}\n{outcome.err}"
        ran += 1
    assert ran >= 3
