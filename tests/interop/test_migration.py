"""The pairs of snippets that the pages on migration show: both sides return the same numbers.

The right side runs here, in one process and in two. What the left side returned is kept in fixtures/migration; with the library's
own Python (tests/peers/venvs.sh) it is run again.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import migration
import migration_pages
import numpy as np
import pytest
from migration import ORIGINS, difference, functions, listed, recorded, run_after, run_before, tolerance
from nursery import Nursery

sys.path.append(str(migration.EXAMPLES))
import shared_samples as samples

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
    assert results.keys() == recorded(origin).keys() - set(listed(origin, "before", "FRAGILE"))
    for name, result in results.items():
        require_equal(result, origin, name)


COMPRESSION = """
import numpy
numpy.bool = bool
import mxnet as mx
given = {"type": "2bit", "threshold": 0.5}
net = mx.gluon.nn.Dense(1, in_units=2)
net.initialize()
trainer = mx.gluon.Trainer(net.collect_params(), "sgd", kvstore="local", compression_params=given)
with mx.autograd.record():
    loss = net(mx.nd.ones((1, 2))).sum()
loss.backward()
trainer.step(1)
print("one device: silent")
mx.kv.create("local").set_gradient_compression(given)
"""


@pytest.mark.peer
def test_mxnet_refuses_compression_of_local_and_ignores_it_on_one_device(tmp_path: Path) -> None:
    """What from-mxnet.md and kvstore.md say of it."""
    if "UNISONO_MXNET_PYTHON" not in os.environ:
        pytest.skip("UNISONO_MXNET_PYTHON is not set; see tests/peers/venvs.sh")
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [os.environ["UNISONO_MXNET_PYTHON"], "-c", COMPRESSION]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "one device: silent\n"
    assert done.returncode == 1
    assert "Gradient compression is not supported for this type of kvstore" in done.stderr


@pytest.mark.parametrize("origin", ORIGINS)
def test_a_page_shows_the_code_that_runs(origin: str) -> None:
    assert migration_pages.page_path(origin).read_text() == migration_pages.page(origin)


def test_a_function_is_shown_with_its_decorator() -> None:
    page = (migration.ROOT / "docs" / "from-horovod.md").read_text()
    assert "```py\n@hvd.elastic.run\ndef train(state):\n" in page


@pytest.mark.parametrize("origin", ORIGINS)
def test_every_snippet_of_the_left_side_has_a_counterpart_or_says_why_not(origin: str) -> None:
    before = {node.name: ast.get_docstring(node) for node in functions(origin, "before")}
    after = {node.name: ast.get_docstring(node) for node in functions(origin, "after")}
    assert after.keys() == {name for name, reason in before.items() if not reason}
    assert all(text and "\n\n" in text for text in after.values())


def test_accumulation_without_add_is_the_step_of_the_last_micro_batch() -> None:
    """The idiom in print: a quarter of that step, and not the step of all four."""
    results = recorded("mxnet")
    start = np.append(samples.WEIGHT, samples.BIAS)
    inputs, targets = samples.parts(4)[-1]
    errors = inputs @ samples.WEIGHT.T + samples.BIAS - targets
    step = np.append(errors.T @ inputs, errors.sum()) / 64
    printed = np.array(list(migration.leaves(results["accumulation_without_add"])))
    assert printed == pytest.approx(start - 0.1 * step, rel=1e-5)
    assert difference(results["accumulation_without_add"], results["accumulation"], 1e-2)


def test_a_difference_is_found() -> None:
    assert difference([1.0, [2.0]], [1.0, [2.0 + 1e-6]], 1e-5) == ""
    assert difference([1.0, [2.0]], [1.0, [2.1]], 1e-5) == "value 1: 2.0, expected 2.1"
    assert difference([True], [False], 1e-5) == "value 0: True, expected False"
    assert difference([1.0], [1.0, 2.0], 1e-5) == "1 values, expected 2"
