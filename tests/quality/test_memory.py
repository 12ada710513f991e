"""Memory of the cleaning of data: a bound in sizes of the largest document, and a few bytes for each copy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rensa")

if not Path("/proc/self/status").exists():
    pytest.skip("peaks of memory are read from /proc", allow_module_level=True)

# prints the result of a job, and by how many bytes it raised the peak of the memory above that of the same job on a small file
JOB = """
import json, re, sys
from dataclasses import asdict
from pathlib import Path
from unisono.quality.clean import clean
from unisono.quality.options import MASK_KINDS, CleanRecipe, DuplicateOptions, FilterOptions, MaskOptions, only_dedup

def peak():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

small, large, verb = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
all_steps = CleanRecipe(filter=FilterOptions(max_words=0), mask=MaskOptions(kinds=MASK_KINDS))
recipe = all_steps if verb == "clean" else only_dedup(DuplicateOptions())
clean([small], small.parent / "warm", recipe, workers=0)
before = peak()
result = clean([large], large.parent / "out", recipe, workers=0)
print(json.dumps({"kept": result.kept, "dropped": result.dropped, "bytes": peak() - before}))
"""
PROSE = (
    "The garden behind the house was quiet, and the old man who had built it sat under the tree that he liked most. "
    "He thought of nothing, or of the letters that he had never answered; the wind moved the leaves above him, and the "
    "river below the hill went on as it had on all the days that he remembered, slow and brown and full of light."
)


def run(small: Path, large: Path, verb: str) -> dict[str, object]:
    command = [sys.executable, "-c", JOB, str(small), str(large), verb]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_memory_of_one_large_document(tmp_path: Path) -> None:
    """The page says 15 times its size, besides 100 MB."""
    (tmp_path / "small.txt").write_text(PROSE)
    rng = np.random.default_rng(0)
    words = np.array([f"{'aeiou'[number % 5]}{number:04x}s" for number in range(5_000)])
    text = "\n".join(" ".join(rng.choice(words, 12)) for _ in range(40_000))
    (tmp_path / "large.txt").write_text(text)
    found = run(tmp_path / "small.txt", tmp_path / "large.txt", "clean")
    assert found["kept"] == 1
    assert len(text) > 3_000_000
    assert found["bytes"] < 100_000_000 + 15 * len(text), f"{found['bytes']:,} bytes for {len(text):,}"


@pytest.mark.full
def test_a_million_copies_of_a_row(tmp_path: Path) -> None:
    line = json.dumps({"text": PROSE[:100]}) + "\n"
    (tmp_path / "small.jsonl").write_text(line)
    with (tmp_path / "large.jsonl").open("w") as file:
        for _ in range(1_000):
            file.write(line * 1_000)
    found = run(tmp_path / "small.jsonl", tmp_path / "large.jsonl", "dedup")
    assert (found["kept"], found["dropped"]) == (1, {"dedup.exact": 999_999})
    assert found["bytes"] < 320 << 20, f"{found['bytes']:,}"
    with (tmp_path / "out" / "dropped.jsonl").open() as file:
        assert sum(1 for _ in file) == 999_999
