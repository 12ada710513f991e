"""Mutated files of the kinds in ``fuzz.FORMATS`` give rows or an error of four parts, in bounded memory and time.

What was found is kept in ``crashes/`` (``FORMAT-SEED-FILE.bin.z``: the mutated file, compressed) and replayed. More of
them: ``make fuzz``, which CI runs with seeds of the commit. One case again:

    python tests/support/fuzz_run.py FORMAT SEED [COUNT]
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz import FORMATS, make, mutate
from fuzz_run import check, fuzz, keep, read_whole
from untrusted import Confined

QUICK = 30  # mutations of each kind
RECORDED = 100_000  # mutations of each kind that were read once, at least
CRASHES = Path(__file__).parent / "crashes"


@pytest.fixture(scope="module")
def child() -> Iterator[Confined]:
    with Confined() as confined:
        yield confined


@pytest.mark.parametrize("name", FORMATS)
def test_a_whole_file_is_read(name: str, tmp_path: Path, child: Confined) -> None:
    assert read_whole(name, tmp_path, child).rows


@pytest.mark.parametrize("name", FORMATS)
def test_mutations(name: str, tmp_path: Path, child: Confined) -> None:
    counts = fuzz(name, tmp_path, range(QUICK), child)
    # of these, a damaged line or record is left out
    assert (counts.refused > 0) is (name not in ("events", "run_folder", "recordio_repaired")), counts


@pytest.mark.parametrize("path", sorted(CRASHES.glob("*-*.bin.z")), ids=lambda path: path.name)
def test_what_was_found_before(path: Path, tmp_path: Path, child: Confined) -> None:
    name, _, target = path.name.removesuffix(".bin.z").partition("-")
    case = FORMATS[name]
    whole = read_whole(name, tmp_path, child)
    mutated = next(file for file in case.mutated if target.endswith(Path(file).name))
    (tmp_path / "whole" / mutated).write_bytes(zlib.decompress(path.read_bytes()))
    outcome = child.read(case.reader, tmp_path / "whole" / case.file)
    assert not check(case, whole, outcome), path.name


def test_all_kinds_were_mutated_many_times() -> None:
    recorded = json.loads((Path(__file__).parent / "mutations.json").read_text())
    assert recorded.keys() == FORMATS.keys()
    for name, counts in recorded.items():
        assert counts["mutations"] >= RECORDED, name
        assert counts["failures"] == 0, name
        assert counts["read"] + counts["refused"] == counts["mutations"], name


def test_the_page_names_the_kinds() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    kinds = page.partition("These kinds are mutated:")[2].partition("100,000 mutations")[0]
    assert sorted(re.findall("`([^`]*)`", kinds)) == sorted(FORMATS)


def test_the_file_of_a_failure_is_kept(tmp_path: Path) -> None:
    make("jsonl", tmp_path / "whole")
    (path,) = keep("jsonl", 3, tmp_path, tmp_path / "new" / "kept")
    mutate("jsonl", tmp_path / "whole", tmp_path / "again", 3)
    assert path == tmp_path / "new" / "kept" / "jsonl-3-a.jsonl.bin.z"
    assert zlib.decompress(path.read_bytes()) == (tmp_path / "again" / "a.jsonl").read_bytes()


def test_a_mutation_is_a_function_of_its_seed(tmp_path: Path) -> None:
    make("csv", tmp_path / "whole")
    seen: set[bytes] = set()
    for seed in range(8):
        mutate("csv", tmp_path / "whole", tmp_path / "one", seed)
        mutate("csv", tmp_path / "whole", tmp_path / "two", seed)
        content = (tmp_path / "one" / "a.csv").read_bytes()
        assert content == (tmp_path / "two" / "a.csv").read_bytes()
        seen.add(content)
    assert len(seen) > 6
