"""``unisono completion``: the script loads in bash, and bash then completes verbs and options."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Desk


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_names_the_command(desk: Desk, shell: str) -> None:
    done = desk.here("completion", shell)
    assert done.code == 0, done.err
    assert f"_UNISONO_COMPLETE={shell}_complete" in done.out


def test_an_unknown_shell_is_refused(desk: Desk) -> None:
    done = desk.here("completion", "csh")
    assert (done.code, "'bash', 'zsh', 'fish'" in done.err) == (2, True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["unisono", "comp"], ["compare", "completion"]),
        (["unisono", "data", "ver"], ["verify"]),
        (["unisono", "data", "bench", "--sec"], ["--seconds"]),
    ],
)
def test_bash_completes(tmp_path: Path, words: list[str], completed: list[str]) -> None:
    program = tmp_path / "unisono"
    program.write_text(f"#!{sys.executable}\nfrom unisono.__main__ import main\nmain()\n")  # as it is installed
    program.chmod(0o755)
    script = (
        "source <(unisono completion bash); "
        f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _unisono_completion unisono; "
        'echo "${COMPREPLY[@]}"'
    )
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == completed, done.stderr
