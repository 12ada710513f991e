"""The pairs of snippets that the pages on migration show: both sides return the same numbers.

The right side runs here, in one process and in two. What the left side returned is kept in tests/interop/fixtures/migration; with the
library's own Python (tests/peers/venvs.sh) it is run again.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import migration
import migration_pages
import pytest
from migration import ORIGINS, difference, functions, listed, recorded, run_after, run_before, tolerance
from nursery import Nursery

RUNNABLE = [name for name, origin in ORIGINS.items() if origin.environment is not None]
_known: dict[str, dict[str, Any]] = {}


def snippets(*, ranks: int) -> list[Any]:
    """Origin and name of each snippet of the right side that runs in this many processes; slow ones are marked."""
    found = []
    for origin in ORIGINS:
        slow = listed(origin, "after", "SLOW")
        elsewhere = listed(origin, "after", "ALONE" if ranks > 1 else "TOGETHER")
        for node in functions(origin, "after"):
            if node.name not in elsewhere:
                marks = [pytest.mark.full] if node.name in slow or ranks > 1 else []
                found.append(pytest.param(origin, node.name, marks=marks, id=f"{origin}-{node.name}"))
    return found


def require_equal(result: dict[str, Any], origin: str, name: str) -> None:
    assert "error" not in result, result["error"]
    assert difference(result["result"], recorded(origin)[name], tolerance(origin, name)) == ""


@pytest.mark.parametrize(("origin", "name"), snippets(ranks=1))
def test_the_right_side_returns_what_the_left_side_returned(
    origin: str, name: str, tmp_path_factory: pytest.TempPathFactory, nursery: Nursery
) -> None:
    """All that are quick in one process of the origin, which is started once."""
    if name in listed(origin, "after", "SLOW"):
        results = run_after(origin, tmp_path_factory.mktemp(origin), nursery, only=[name])
    else:
        if origin not in _known:
            _known[origin] = run_after(origin, tmp_path_factory.mktemp(origin), nursery)
        results = _known[origin]
    require_equal(results[name], origin, name)


@pytest.mark.parametrize(("origin", "name"), snippets(ranks=2))
def test_two_processes_return_the_same(origin: str, name: str, tmp_path: Path, nursery: Nursery) -> None:
    require_equal(run_after(origin, tmp_path, nursery, ranks=2, only=[name])[name], origin, name)


@pytest.mark.peer
@pytest.mark.parametrize("origin", RUNNABLE)
def test_the_left_side_returns_what_is_recorded(origin: str, tmp_path: Path) -> None:
    environment = ORIGINS[origin].environment
    if environment and environment not in os.environ:
        pytest.skip(f"{environment} is not set; see tests/peers/venvs.sh")
    results = run_before(origin, tmp_path)
    assert results.keys() == recorded(origin).keys()
    for name, result in results.items():
        require_equal(result, origin, name)
