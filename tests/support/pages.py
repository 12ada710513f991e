"""The blocks of code of a page, and how a reader runs them: commands by bash, one block after the other in one folder.

An indented block, or a fenced one of ``sh`` or ``console``, is commands. In a block with prompts (``$ command``) what follows
a command is what it prints; ``…`` stands for any text. Two comments, which a reader does not see, stand above a block:
``<!-- not run: reason -->``, and ``<!-- alternatives -->`` where each command starts without the runs of the one before.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

COMMANDS = ("", "sh", "console", "bash")
# what is shown and not run: data, output, files of the repository, what Sphinx reads, and with "py" parts of files that tests
# run elsewhere (migration_pages.py)
SHOWN = ("py", "text", "toml", "json", "{include}", "{literalinclude}", "{toctree}")
TIMEOUT_S = 120


@dataclass(frozen=True)
class Block:
    """``language`` is "" for an indented block; ``comment`` is the comment directly above."""

    line: int
    language: str
    text: str
    comment: str

    @property
    def reason(self) -> str:
        """Why it is not run, or ""."""
        return self.comment.removeprefix("not run: ") if self.comment.startswith("not run: ") else ""


def blocks_of(page: str) -> list[Block]:
    """In the order of the page."""
    lines = page.splitlines()
    found: list[Block] = []
    comment, at = "", 0
    while at < len(lines):
        line, start = lines[at], at
        if line.startswith("```"):
            at = next(i for i in range(at + 1, len(lines)) if lines[i].startswith("```"))
            text = lines[start + 1 : at]
            found.append(Block(start + 1, line[3:].split(" ")[0], "\n".join(text), comment))
        elif line.startswith("    ") and (start == 0 or not lines[start - 1].strip()):
            while at + 1 < len(lines) and (lines[at + 1].startswith("    ") or _goes_on(lines, at + 1)):
                at += 1
            text = [each[4:] for each in lines[start : at + 1]]
            found.append(Block(start + 1, "", "\n".join(text), comment))
        if line.strip():
            whole = re.fullmatch(r"<!-- (.*) -->", line)
            comment = whole[1] if whole else ""
        at += 1
    return found


def _goes_on(lines: list[str], at: int) -> bool:
    return not lines[at].strip() and at + 1 < len(lines) and lines[at + 1].startswith("    ")


def run_page(page: str, folder: Path, environ: dict[str, str], *, with_python: bool) -> int:
    """Run the blocks of ``page`` in ``folder``; returns how many ran, lines or scripts. AssertionError names what failed."""
    ran = 0
    for block in blocks_of(page):
        if block.reason or block.language in SHOWN or (block.language == "python" and not with_python):
            continue
        if block.language == "python":
            script = folder / f"block_{block.line}.py"
            script.write_text(block.text)
            _succeeds(f"{sys.executable} {script.name}", folder, environ, block.text)
            script.unlink()
            ran += 1
        elif "$ " in {line[:2] for line in block.text.splitlines()}:
            for command, printed in _transcript(block.text):
                fails = bool(printed) and printed[0].startswith("unisono: ")
                code, output = bash(command, folder, environ)
                assert (code != 0) == fails, f"line {block.line}: {command}\nexit code {code}\n{output}"
                assert not printed or like(printed, output), f"line {block.line}: {command} printed\n{output}"
                ran += 1
        elif block.comment == "alternatives":
            for command in block.text.splitlines():
                shutil.rmtree(folder / "runs", ignore_errors=True)
                _succeeds(command, folder, environ, f"line {block.line}: {command}")
                ran += 1
        else:
            _succeeds(block.text, folder, environ, f"line {block.line}:\n{block.text}")
            ran += len(block.text.splitlines())
    return ran


def _succeeds(command: str, folder: Path, environ: dict[str, str], shown: str) -> None:
    code, output = bash(command, folder, environ)
    assert code == 0, f"{shown}\nexit code {code}\n{output}"


def _transcript(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each command, and the lines below it."""
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        command, *printed = part.splitlines()
        yield command, printed


def like(printed: list[str], output: str) -> bool:
    """Whether ``output`` has the lines ``printed``, apart from the space in them; … is any text, also several lines."""
    pattern = " ".join("\n".join(printed).split())
    return bool(re.fullmatch(re.escape(pattern).replace("…", ".*"), " ".join(output.split())))


def bash(command: str, folder: Path, environ: dict[str, str]) -> tuple[int, str]:
    """Exit code and output. A line that fails ends the script, and so does a job in the background that failed."""
    script = f"set -euo pipefail\n{command}\nfor job in $(jobs -p); do wait $job; done\n"
    child = subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = child.communicate(timeout=TIMEOUT_S)
    finally:
        # whatever it started and left
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    return child.returncode, output


def environment(folder: Path) -> dict[str, str]:
    """A user's: the programs of this environment first, and a home and a cache of one's own."""
    kept = {name: os.environ[name] for name in ("LANG", "LC_ALL", "LD_LIBRARY_PATH") if name in os.environ}
    home = folder.with_name(folder.name + "-home")
    home.mkdir(exist_ok=True)
    return kept | {
        "HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
