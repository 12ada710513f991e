"""Every block of commands of README and docs is run, or has its reason above it; those with a reason are listed here."""

from __future__ import annotations

from pathlib import Path

import pages
import pytest
from page_data import PREPARE

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "tasks").glob("*.md"))]
NOT_RUN = {
    ("README.md", "git clone <this repository> && cd unisono"): "clones a repository and installs packages from the network",
    ("kvstore.md", "unisono launch --hostfile hosts --servers 2 --tls /etc/job/tls -- python train.py"): (
        "needs the hosts of a hosts file"
    ),
    ("launching.md", "unisono launch --hostfile hosts -- python train.py"): "needs the hosts of a hosts file",
    ("launching.md", "unisono launch --mpirun --hostfile hosts -- python train.py"): (
        "needs the hosts of a hosts file, and SLURM"
    ),
    ("launching.md", "export UNISONO_SECRET_FILE=$PWD/secret      # umask 077; head -c 32 /dev/urandom > secret, "
     "the same file on every host"): "needs launch.py of dmlc-core",
    ("launching.md", "unisono train --set launch.num_processes=2 --set launch.collective_backend=fabric"): (
        "needs a package with a back end"
    ),
    ("profile.md", "unisono profile runs/mine --now --steps 3"): "needs a run that is under way",
    ("quality.md", "unisono data clean corpus.jsonl --out clean --ray auto"): "needs a Ray cluster",
    ("security.md", "pip install --require-hashes -r locks/cpu.txt"): "needs a checkout of the repository",
}  # fmt: skip


def has_commands(page: Path) -> bool:
    return any(block.language in pages.COMMANDS and not block.reason for block in pages.blocks_of(page.read_text()))


def test_blocks_that_are_not_run_are_these() -> None:
    blocks = [(page.name, block) for page in PAGES for block in pages.blocks_of(page.read_text())]
    assert {(name, block.text.splitlines()[0]): block.reason for name, block in blocks if block.reason} == NOT_RUN


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_run_or_shown(page: Path) -> None:
    # python blocks are run here or by test_docs.py
    known = {*pages.COMMANDS, *pages.SHOWN, "python"}
    assert {block.language for block in pages.blocks_of(page.read_text())} <= known


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", [page for page in PAGES if has_commands(page)], ids=lambda page: page.name)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    folder = tmp_path / "reader"
    folder.mkdir()
    environ = pages.environment(folder)
    if prepare := PREPARE.get(page.name):
        environ |= prepare(folder)
    of_a_task = page.parent.name == "tasks"
    # the blocks of Python of other pages stand alone; test_docs.py runs them
    assert pages.run_page(page.read_text(), folder, environ, with_python=of_a_task) >= 1 + 2 * of_a_task


def test_a_reason_and_kinds_of_blocks_are_found() -> None:
    page = "a\n\n<!-- not run: no host -->\n\n    ssh a\n\nb\n\n    one\n\n    two\n\n- item\n    more\n\n```toml\nx = 1\n```\n"
    found = [(block.line, block.language, block.text, block.reason) for block in pages.blocks_of(page)]
    assert found == [(5, "", "ssh a", "no host"), (9, "", "one\n\ntwo", ""), (16, "toml", "x = 1", "")]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("    true\n    false", "exit code 1"),
        ("    (sleep 0.1; exit 3) &\n    true", "exit code 3"),
        ("    $ echo a\n    b", "echo a printed\na"),
        ("    $ true\n    unisono: refused", "exit code 0"),
    ],
)
def test_a_block_that_fails_is_found(block: str, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "reader"
    folder.mkdir()
    with pytest.raises(AssertionError, match=message):
        pages.run_page(f"\n{block}\n", folder, pages.environment(folder), with_python=False)


def test_dots_stand_for_any_text() -> None:
    assert pages.like(["loss …", "end"], "loss  1.5\nmore\nend\n")
    assert not pages.like(["loss …", "end"], "loss 1.5\n")
