"""The documentation runs: Python blocks are executed, commands exist with the options shown, sizes stay small."""

from __future__ import annotations

import dataclasses
import re
import shlex
import typing
from pathlib import Path

import pytest
import script
from click.testing import CliRunner
from nursery import Nursery

from unisono.cli.main import cli
from unisono.config import renames
from unisono.plan.plan import Plan
from unisono.train.config import RunConfig

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "tasks").glob("*.md")),
]

# folders of a user's run or job, which the repository does not have
OF_A_RUN = ("runs", "checkpoints", "export", "logs", "media", "trials")
# names of earlier options that pages also use for something else
ALSO_OTHER_WORDS = {"gradients", "sample", "servers", "weights"}


def python_blocks() -> list[tuple[str, str]]:
    return [(page.name, code) for page in PAGES for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.S)]


def commands() -> list[str]:
    """Every ``unisono …`` that starts a line of code, with or without a prompt, or stands in backticks."""
    found = []
    for page in PAGES:
        found += re.findall(r"^(?:    |\$ |    \$ )(unisono [^\n|#]*)$", page.read_text(), re.M)
        found += re.findall(r"`(unisono [^`]+)`", page.read_text())
    return sorted(set(found))


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
    words = words[: words.index("--")] if "--" in words else words  # what follows is another program's
    verb = [word for word in words[:2] if re.fullmatch(r"[a-z][a-z-]*", word)]
    if verb and verb[0] not in ("config", "checkpoint", "data", "kvstore", "plan", "tune"):
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


def missing_tests(text: str) -> list[str]:
    """The tests that ``text`` names as ``tests/….py::test_…`` and that do not exist."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text)
    return [f"{file}::{name}" for file, name in named if f"\ndef {name}(" not in (ROOT / file).read_text()]


def test_the_tests_of_the_rules_of_security_exist() -> None:
    text = (ROOT / "docs/security.md").read_text()
    rules = re.findall(r"^\| (\d+) \|.*::test_\w+` \|$", text, flags=re.MULTILINE)
    assert rules == [str(number) for number in range(1, 21)]
    assert missing_tests(text) == []
    assert missing_tests("`tests/test_docs.py::test_gone`") == ["tests/test_docs.py::test_gone"]


def earlier_names() -> set[str]:
    """Last components of option keys and plan fields of earlier versions that no option and no plan field has today."""
    old = {key.rpartition(".")[2] for key in (*renames.OPTIONS, *renames.PLAN_FIELDS)}
    return old - names_of_fields(RunConfig) - names_of_fields(Plan) - ALSO_OTHER_WORDS


def names_of_fields(cls: type) -> set[str]:
    types = typing.get_type_hints(cls)
    names = {field.name for field in dataclasses.fields(cls)}
    return names.union(*(names_of_fields(types[n]) for n in names if dataclasses.is_dataclass(types[n])))


def earlier_names_in(text: str) -> list[str]:
    names = "|".join(sorted(earlier_names()))
    return [match[0] for match in re.finditer(rf"`(?:\w+\.)*(?:{names})`|(?<![\w.-])(?:\w+\.)*(?:{names})=", text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_have_todays_option_names(page: Path) -> None:
    assert earlier_names_in(page.read_text()) == []


def test_an_earlier_option_name_is_found() -> None:
    text = "`damping`, `loader.fragments`, --set loader.workers=2; `num_fragments`, `overlap` and --set loader.num_workers=2"
    assert earlier_names_in(text) == ["`damping`", "`loader.fragments`", "loader.workers="]


def place_names(text: str) -> list[tuple[str, str]]:
    """What a page says is in a file: "`NAME` in `folder/file.py`", "`folder/file.py` (`NAME`, …)"."""
    places = re.findall(r"`(\w+)` in `([\w/]+\.py)`", text)
    for file, inside in re.findall(r"`([\w/]+\.py)` \(((?:`\w+`[, a-z]*)+)\)", text):
        places += [(name, file) for name in re.findall(r"`(\w+)`", inside)]
    return places


def test_architecture_names_what_is_in_the_files() -> None:
    places = place_names((ROOT / "docs/architecture.md").read_text())
    assert len(places) >= 10
    for name, file in places:
        path = next(folder / file for folder in (ROOT, ROOT / "src/unisono") if (folder / file).exists())
        assert re.search(rf"\b{name}\b", path.read_text()), f"no {name} in {file}"


@pytest.mark.parametrize("name", ["architecture.md", "glossary.md", "adr/0013-what-the-redesign-kept.md"])
def test_a_page_about_the_code_has_the_names_of_the_code(name: str) -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "src/unisono").rglob("*.py"))
    known = set(re.findall(r"\w+", code)) | {path.stem for path in (ROOT / "tests").rglob("*.py")}
    text = re.sub(r"^```.*?^```", "", (ROOT / "docs" / name).read_text(), flags=re.M | re.S)
    identifiers = set(re.findall(r"`_?([A-Za-z]+_\w+|[A-Z]\w*[a-z][A-Z]\w*)(?:\(.*?\))?`", text))
    assert not {identifier for identifier in identifiers if identifier not in known and f"_{identifier}" not in known}


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*PAGES, *sorted((ROOT / "docs" / "adr").glob("*.md"))]:
        for name, anchor in re.findall(r"\]\(([^)#:\s]*)#?([^):\s]*)\)", page.read_text()):
            target = page.parent / name if name else page
            assert target.exists(), f"{page.name} -> {name}"
            assert not anchor or anchor in slugs(target), f"{page.name} -> {name}#{anchor}"


def test_an_anchor_is_made_of_its_heading(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# One: `two` (3)\n```sh\n# no heading\n```\n")
    assert slugs(tmp_path / "page.md") == {"one-two-3"}
