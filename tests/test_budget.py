"""What of the full tier is run in which order, and what the end of its time leaves out (tests/support/budget.py)."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import budget
import pytest
from budget import (
    ROOT,
    SHARDS,
    Budget,
    budget_s,
    commit_number,
    key,
    order,
    package,
    packages_of,
    read_durations,
    shard_of,
)

IDS = [
    f"tests/{folder}test_{file}.py::test_it[{case}]"
    for folder in ("data/image/", "kvstore/", "train/", "")
    for file in ("a", "b")
    for case in range(20)
]


def test_a_test_belongs_to_the_package_of_its_folder() -> None:
    assert package("tests/data/image/test_a.py::test_it[1/2]") == "data"
    assert package("tests/train/test_a.py::test_it") == "train"
    assert package("tests/test_docs.py::test_it") == ""
    paths = [
        "src/unisono/data/image/crop.py",
        "src/unisono/errors.py",
        "tests/train/test_a.py",
        "tests/conftest.py",
        "docs/a/b",
    ]
    assert packages_of([*paths, "README.md"]) == {"data", "train"}


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "abc", ""])
def test_a_budget_is_a_number_of_seconds(text: str) -> None:
    assert budget_s("2.5") == 2.5
    with pytest.raises(argparse.ArgumentTypeError, match="is no number of seconds above 0"):
        budget_s(text)


@pytest.mark.parametrize("content", [b"", b"null", b"[1]", b"\xff", b'{"a": "x", "b": NaN, "c": -1}'])
def test_a_damaged_table_gives_no_estimates(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "durations.json"
    assert read_durations(path) == {}
    path.write_bytes(content)
    assert read_durations(path) == {}
    path.write_text('{"a": 2, "b": null}')
    assert read_durations(path) == {"a": 2.0}


def test_estimates_survive_a_move_and_are_shared_by_cases() -> None:
    assert key("tests/kvstore/server/test_a.py::test_it[a/b::c[0]]") == "test_a.py::test_it"
    assert key("tests/storage/test_a.py::test_it") == "test_a.py::test_it"


def test_changed_packages_come_first_then_the_shard_then_the_others_in_turn() -> None:
    ordered = order(IDS, {"kvstore", "gone"}, 7)
    assert sorted(ordered) == sorted(IDS)
    count = sum(package(test) == "kvstore" for test in IDS)
    assert all(package(test) == "kvstore" for test in ordered[:count])
    for half in (ordered[:count], ordered[count:]):
        turns = [(shard_of(test) - 7) % SHARDS for test in half]
        assert turns == sorted(turns)
        for turn in range(SHARDS):
            shard = [test for test, its in zip(half, turns, strict=True) if its == turn]
            assert shard == [test for test in IDS if test in shard], "modules stay together"


def test_nothing_changed_leaves_the_shards() -> None:
    assert [shard_of(test) for test in order(IDS, set(), 3)] == sorted(
        map(shard_of, IDS), key=lambda n: (n - 3) % SHARDS
    )


def test_every_commit_begins_with_the_soak() -> None:
    soaks = [f"{budget.SOAK}test_it[{case}]" for case in range(4)]
    assert (ROOT / budget.SOAK.removesuffix("::")).exists()
    for number in range(SHARDS):
        ordered = order([*IDS, *soaks], {"kvstore"}, number)
        assert set(ordered[:4]) == set(soaks)
        assert ordered[4:] == order(IDS, {"kvstore"}, number)


def test_as_many_pushes_as_shards_reach_every_test_when_each_has_time_for_one() -> None:
    reached: set[str] = set()
    for number in range(41, 41 + SHARDS):
        first = order(IDS, set(), number)
        reached |= set(first[: sum(shard_of(test) == number % SHARDS for test in IDS)])
    assert reached == set(IDS)


def run(budget_s: float, durations: dict[str, float], slowness: float = 1.0) -> tuple[list[str], float]:
    """Which of IDS are run, in order, and when the last ends."""
    planned, now, reached = Budget(100.0 + budget_s, durations), 100.0, []
    for test in IDS:
        if planned.fits(test, now):
            seconds = slowness * durations.get(key(test), budget.UNKNOWN_S)
            planned.took(test, seconds)
            now += seconds
            reached.append(test)
    return reached, now - 100.0


@pytest.mark.parametrize("slowness", [0.3, 1.0, 6.0])
def test_nothing_starts_that_cannot_end(slowness: float) -> None:
    durations = {"test_a.py::test_it": 2.0, "test_b.py::test_it": 30.0}
    everything, seconds = run(slowness * 4 * 20 * 32 + 45 * max(1.0, slowness), durations, slowness)
    assert everything == IDS
    some, ended = run(seconds / 3, durations, slowness)
    assert ended <= seconds / 3
    assert 0 < len(some) < len(IDS)
    assert some[-1].split("::")[0].endswith("test_a.py"), "where a long test does not fit any more, short ones still do"


def test_a_test_without_an_estimate_is_taken_for_a_long_one() -> None:
    assert Budget(100.0, {}).fits(IDS[0], 100.0 - budget.MARGIN * budget.UNKNOWN_S)
    assert not Budget(100.0, {}).fits(IDS[0], 101.0 - budget.MARGIN * budget.UNKNOWN_S)


def test_this_commit_has_a_number() -> None:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    shallow = git("rev-parse", "--is-shallow-repository") == "true"
    assert commit_number() == (
        int(git("rev-parse", "HEAD")[:8], 16) if shallow else int(git("rev-list", "--count", "HEAD"))
    )


PROJECT = """
import time
import pytest

@pytest.fixture(scope="module")
def shared():
    yield 1
    print("torn down")

@pytest.mark.parametrize("case", range(4))
def test_short(case, shared): pass

def test_long(shared): raise AssertionError("was started")

def test_slower_than_known(): time.sleep({sleep_s})
"""


@pytest.mark.parametrize(
    ("budget_s", "sleep_s", "options", "missed"),
    [
        (100, 0, [], {1}),
        pytest.param(100, 0, ["-n", "2"], {1}, marks=pytest.mark.full),
        # one is cut off, which is no failure; how many come after it depends on the commit's shard
        pytest.param(30, 60, [], {2, 3, 4, 5, 6}, marks=pytest.mark.full),
    ],
)
def test_a_run_ends_in_time_and_says_what_it_did_not_reach(
    tmp_path: Path, budget_s: int, sleep_s: int, options: list[str], missed: set[int]
) -> None:
    folder = tmp_path / "tests" / "data"
    folder.mkdir(parents=True)
    (folder / "test_some.py").write_text(PROJECT.replace("{sleep_s}", str(sleep_s)))
    table = {
        "test_some.py::test_short": 0.1,
        "test_some.py::test_long": 600,
        "test_some.py::test_slower_than_known": 0.1,
    }
    (tmp_path / "durations.json").write_text(json.dumps(table))
    (tmp_path / "conftest.py").write_text(
        f"import sys\nfrom pathlib import Path\nsys.path.insert(0, {str(Path(budget.__file__).parent)!r})\n"
        "import budget\nbudget.TABLE = Path(__file__).with_name('durations.json')\npytest_plugins = ['budget']\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 50\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--budget-s", str(budget_s), *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed" not in done.stdout
    named = re.search(r"NOT REACHED within the budget: (\d) tests: tests/data/test_some.py \((\d)\)", done.stdout)
    assert named is not None, done.stdout
    assert named[1] == named[2]
    assert int(named[1]) in missed
    assert f"{named[1]} skipped" in done.stdout
    assert f" of {SHARDS} came first" in done.stdout
