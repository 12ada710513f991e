"""The documentation runs: Python blocks are executed, commands exist with the options shown, sizes stay small."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import script
from click.testing import CliRunner
from nursery import Nursery

from unisono.cli.main import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

# folders of a user's run or job, which the repository does not have
OF_A_RUN = ("runs", "checkpoints", "export")


def python_blocks() -> list[tuple[str, str]]:
    return [(page.name, code) for page in PAGES for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.S)]


def commands() -> list[str]:
    """Every ``unisono …`` that starts a line of code, with or without a prompt, or stands in backticks."""
    found = []
    for page in PAGES:
        found += re.findall(r"^(?:    |\$ |    \$ )(unisono [^\n|#]*)$", page.read_text(), re.M)
        found += re.findall(r"`(unisono [^`]+)`", page.read_text())
    return sorted(set(found))


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery("pool:warm") as nursery:
        yield nursery


@pytest.mark.parametrize(("page", "code"), python_blocks())
def test_python_blocks_run(page: str, code: str, tmp_path: Path, nursery: Nursery) -> None:
    block = tmp_path / "block.py"
    block.write_text(code)
    exit_code, output = script.run(nursery, block)
    assert exit_code == 0, output


def test_there_are_blocks_and_commands() -> None:
    assert python_blocks()
    assert len(commands()) >= 4


@pytest.mark.parametrize("command", commands())
def test_commands_exist_with_their_options(command: str) -> None:
    words = shlex.split(command.replace("[", "").replace("]", ""))[1:]
    verb = [word for word in words[:2] if re.fullmatch(r"[a-z]+", word)]
    if verb and verb[0] not in ("config", "checkpoint", "data", "kvstore"):
        verb = verb[:1]
    text = CliRunner().invoke(cli, [*verb, "--help"]).output
    assert "Usage:" in text, command
    for option in [word.split("=")[0] for word in words if word.startswith("-")]:
        assert option in text, f"{command}: {option}"


def test_readme_is_short_enough() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 250


def missing_files(text: str, folders: tuple[Path, ...]) -> list[str]:
    """The paths of repository files in ``text`` that exist below none of ``folders``."""
    paths = re.findall(r"(?<![\w/.-])((?:[\w-]+/)+[\w.-]*\.(?:py|md|toml|sh|json|txt))(?![\w/])", text)
    return [path for path in paths if not any((folder / path).exists() for folder in folders)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_pages_name_exist(page: Path) -> None:
    text = re.sub(r"```python\n.*?```", "", page.read_text(), flags=re.S)
    folders = (ROOT, ROOT / "src/unisono", page.parent)
    missing = [path for path in missing_files(text, folders) if path.split("/")[0] not in OF_A_RUN]
    assert missing == []


def test_a_missing_file_is_found() -> None:
    text = "see `train/step.py`, tests/train/test_gone.py and https://example.org/a/b.py"
    assert missing_files(text, (ROOT, ROOT / "src/unisono")) == ["tests/train/test_gone.py"]


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} -> {target}"
