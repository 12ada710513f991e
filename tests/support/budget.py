"""The full tier under a time budget: which tests come first, which still fit, and which were not reached.

    pytest -m full --budget-s 1200            starts nothing that cannot end within 1200 s, and names what it did not reach
    pytest -m full --record-durations         writes durations.json, the estimates, from what this run took

Order: the soak first, which takes a minute under a budget; then tests of packages that differ from ``origin/main``, where that
ref is known; in each half the shard of this commit first, then the others in turn, so that a few pushes reach every test. A
package's tests are those of the folder of its name.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import time
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("durations.json")
SHARDS = 5
UNKNOWN_S = 10.0
# a test starts if this many times its estimate is left
MARGIN = 1.5
SOAK = "tests/train/test_soak.py::"
NOT_REACHED = "not reached within the time budget"


def key(test_id: str) -> str:
    """``test_file.py::function``: parameters and folders aside, so that a file that moves keeps its estimates."""
    return test_id.split("[", 1)[0].rsplit("/", 1)[-1]


def package(test_id: str) -> str:
    """The folder below ``tests`` that holds the test."""
    parts = test_id.split("::", 1)[0].split("/")
    return parts[1] if len(parts) > 2 else ""


def packages_of(paths: Iterable[str]) -> set[str]:
    """Packages that files of ``src/unisono`` and ``tests`` belong to."""
    found = set()
    for path in paths:
        for prefix in ("src/unisono/", "tests/"):
            name, slash, _ = path.removeprefix(prefix).partition("/")
            if path.startswith(prefix) and slash:
                found.add(name)
    return found


def shard_of(test_id: str) -> int:
    """A number below SHARDS that depends on the test alone, not on which others there are. Cases of a function differ."""
    return zlib.crc32(test_id.encode()) % SHARDS


def order(ids: Sequence[str], changed: Collection[str], number: int) -> list[str]:
    """``ids`` as they are to be run: the soak, changed packages, the others; in each part the shard ``number`` mod SHARDS first.

    Tests of one shard stay in their order, which keeps a module's fixtures in use.
    """

    def place(test: str) -> tuple[bool, bool, int]:
        return not test.startswith(SOAK), package(test) not in changed, (shard_of(test) - number) % SHARDS

    return sorted(ids, key=place)


class Budget:
    """Decides test by test whether there is time; estimates are scaled by what the tests so far took."""

    def __init__(self, end_s: float, durations: Mapping[str, float]) -> None:
        self._end_s = end_s
        self._durations = durations
        self._estimated_s = self._taken_s = 0.0

    def left_s(self, now_s: float) -> float:
        return max(0.0, self._end_s - now_s)

    def estimate_s(self, test_id: str) -> float:
        """Seconds on this machine, as far as is known; never less than on the machine of the table."""
        slowness = max(1.0, self._taken_s / self._estimated_s) if self._estimated_s else 1.0
        return self._durations.get(key(test_id), UNKNOWN_S) * slowness

    def fits(self, test_id: str, now_s: float) -> bool:
        return MARGIN * self.estimate_s(test_id) <= self.left_s(now_s)

    def took(self, test_id: str, seconds: float) -> None:
        known = self._durations.get(key(test_id))
        if known is not None:
            self._estimated_s += known
            self._taken_s += seconds


def budget_s(text: str) -> float:
    """A budget from the command line. Raises ArgumentTypeError unless it is finite and above 0."""
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0; leave it out to run everything")


def read_durations(path: Path) -> dict[str, float]:
    """The estimates; without those that are no number of seconds, and none where the file is missing or damaged."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        table = {}
    entries: dict[str, Any] = table if isinstance(table, dict) else {}
    return {key: float(s) for key, s in entries.items() if isinstance(s, int | float) and 0 <= s < math.inf}


def _git(*arguments: str) -> str | None:
    """Standard output, None where git, the repository or the ref is missing."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def changed_packages() -> set[str]:
    """Packages that differ between ``origin/main`` and the working tree; none where that ref is unknown."""
    names = _git("diff", "--name-only", "origin/main")
    return packages_of((names or "").splitlines())


def commit_number() -> int:
    """The number of commits up to this one; in a shallow clone a number made of its hash."""
    if _git("rev-parse", "--is-shallow-repository") == "false":
        return int(_git("rev-list", "--count", "HEAD") or 0)
    return int((commit_hash() or "0")[:8], 16)


def commit_hash() -> str:
    """The hash of this commit, empty without a repository."""
    return _git("rev-parse", "HEAD") or ""


# --- pytest ----------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("budget")
    group.addoption(
        "--budget-s", type=budget_s, metavar="S", help="start no test that cannot end within S seconds from now"
    )
    group.addoption("--record-durations", action="store_true", help=f"write {TABLE.name} from this run")


def pytest_configure(config: pytest.Config) -> None:
    seconds = config.getoption("budget_s")
    worker = getattr(config, "workerinput", None)
    if seconds is not None:
        end_s = time.time() + seconds if worker is None else worker["budget_end_s"]
        config.pluginmanager.register(_Runner(end_s), "budget-runner")
    if worker is None and config.getoption("record_durations"):
        config.pluginmanager.register(_Recorder(), "budget-recorder")


class _Runner:
    """Under pytest-xdist there is one in the controller, which reports, and one in each worker, which runs."""

    def __init__(self, end_s: float) -> None:
        self._end_s = end_s
        self._changed = sorted(changed_packages())
        self._number = commit_number()
        self._budget = Budget(end_s, read_durations(TABLE))
        self._missed: Counter[str] = Counter()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["budget_end_s"] = self._end_s

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        place = {test: at for at, test in enumerate(order([i.nodeid for i in items], self._changed, self._number))}
        items.sort(key=lambda item: place[item.nodeid])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        start_s = time.time()
        fits = self._budget.fits(item.nodeid, start_s)
        if fits:
            own = item.get_closest_marker("timeout")
            own_s = float(own.args[0] if own and own.args else item.config.getini("timeout"))
            if self._budget.left_s(start_s) < own_s:
                item.add_marker(pytest.mark.timeout(max(1.0, self._budget.left_s(start_s))), append=False)
                item.user_properties.append(("capped", True))
        else:
            item.user_properties.append(("not reached", True))
        result = yield
        if fits:
            self._budget.took(item.nodeid, time.time() - start_s)
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if ("not reached", True) in item.user_properties:
            pytest.skip(NOT_REACHED)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        """A test that the end of the budget cut off says nothing about the code."""
        report: pytest.TestReport = yield
        if report.failed and ("capped", True) in item.user_properties and time.time() >= self._end_s - 1:
            report.outcome = "skipped"
            report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: cut off, {NOT_REACHED}")
            report.user_properties.append(("not reached", True))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and ("not reached", True) in report.user_properties:
            self._missed[report.nodeid.split("::", 1)[0]] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        changed = ", ".join(self._changed) or "none known"
        terminalreporter.write_line(
            f"Shard {self._number % SHARDS} of {SHARDS} came first; packages changed against origin/main: {changed}"
        )
        if self._missed:
            modules = ", ".join(f"{module} ({count})" for module, count in sorted(self._missed.items()))
            terminalreporter.write_line(f"NOT REACHED within the budget: {self._missed.total()} tests: {modules}")
        else:
            terminalreporter.write_line("All selected tests were reached within the budget.")


class _Recorder:
    """The longest time of each test function, of those that passed; functions that did not run keep their entry."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if not report.passed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        table = read_durations(TABLE)
        longest: dict[str, float] = {}
        for test in self._seconds.keys() - self._failed:
            longest[key(test)] = max(longest.get(key(test), 0.1), round(self._seconds[test], 1))
        TABLE.write_text(json.dumps(dict(sorted((table | longest).items())), indent=1) + "\n", encoding="utf-8")
