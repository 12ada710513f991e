"""A rule of another package that is wrong in any way is left out, and takes no finding of another rule away."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from event_streams import COMPUTE, write_events

from unisono.diagnose import Finding, diagnose, read_run
from unisono.diagnose.overlay import patch_text
from unisono.report.render import write_report

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    class Entry:
        dist, value = None, "their_package:rule"

        def __init__(self, name: str, rule: Any) -> None:
            self.name, self.load = name, lambda: rule

    def install(**rules: Any) -> None:
        entries = [Entry(name, rule) for name, rule in rules.items()]
        monkeypatch.setattr("unisono.diagnose.rules.entry_points", lambda group: entries)

    return install


def own(**fields: Any) -> Finding:
    right: dict[str, Any] = {
        **{"id": "OWN01", "title": "own", "severity": "critical", "cost_frac": 0.5, "confidence": 1.0},
        **{"evidence": ("a figure",), "advice": "none"},
    }
    return Finding(**{**right, **fields})


def waiting(folder: Path) -> Path:
    """A run of which a rule of our own has something to say: DATA01."""
    times = {**COMPUTE, "data_wait": 0.025}
    return write_events(folder, lambda rank, step: times, settings={"loader.num_workers": 0})


@pytest.mark.parametrize(
    "fields",
    [
        *({"cost_frac": value} for value in (None, "0.3", math.nan, math.inf, -0.1, 1.5, True)),
        *({"confidence": value} for value in (None, math.nan, 7)),
        *({"expected_gain": value} for value in ("x", math.inf)),
        *({name: None} for name in ("id", "title", "advice", "severity", "evidence", "patch", "ranks")),
        *({"evidence": value} for value in ((1,), "a text", 5)),
        *({"ranks": value} for value in (("a",), (-1,), (True,), 3)),
        *(
            {"patch": value}
            for value in (["a"], {"foo.bar": 1}, {"a] \n": 1}, {3: 1}, {"loader.num_workers": object()})
        ),
        *({"patch": {"loader.num_workers": value}} for value in (math.nan, 10**400, [[object()]], "\x1b")),
        {"severity": "fatal"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_finding_with_a_wrong_field_is_left_out(
    tmp_path: Path, install: Install, caplog: pytest.LogCaptureFixture, fields: dict[str, Any]
) -> None:
    install(wrong=lambda facts: [own(**fields)], right=lambda facts: [own(id="OWN02")])
    run_dir = waiting(tmp_path)
    with caplog.at_level(logging.WARNING):
        found = diagnose(read_run(run_dir))
    assert [finding.id for finding in found] == ["OWN02", "DATA01"]
    assert "rule wrong of their_package:rule was left out: " in caplog.text
    assert "OWN02" in write_report(run_dir).read_text()


def test_numbers_of_numpy_become_plain_ones(tmp_path: Path, install: Install) -> None:
    patch = {"loader.num_workers": np.int64(3)}
    numbers = {"cost_frac": np.float32(0.5), "expected_gain": np.float64(0.25), "ranks": [np.int64(1)], "patch": patch}
    install(right=lambda facts: [own(**numbers)])
    found = diagnose(read_run(waiting(tmp_path)))[0]
    told = json.loads(json.dumps(found.to_json()))
    assert (told["cost_frac"], told["expected_gain"], told["ranks"]) == (0.5, 0.25, [1])
    assert patch_text(found.patch, is_script=True) == "LoaderOptions(num_workers=3)"


def test_text_of_a_finding_has_no_control_characters(tmp_path: Path, install: Install) -> None:
    install(odd=lambda facts: [own(title="a\x1b[2J", advice="b\u202e")])
    found = diagnose(read_run(waiting(tmp_path)))[0]
    assert (found.title, found.advice) == ("a\\x1b[2J", "b\\u202e")


def test_a_rule_that_ends_the_process(tmp_path: Path, install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install(ends=lambda facts: sys.exit(0))
    with caplog.at_level(logging.WARNING):
        assert [finding.id for finding in diagnose(read_run(waiting(tmp_path)))] == ["DATA01"]
    assert "rule ends of their_package:rule was left out: SystemExit" in caplog.text


@pytest.mark.parametrize(
    "arrays",
    [
        lambda facts: [facts.ranks[0].wall_s],
        lambda facts: [facts.ranks[0].phase_s["forward"]],
        lambda facts: [facts.training.losses],
        lambda facts: [facts.common_steps()],
    ],
)
@pytest.mark.parametrize("uneven", [False, True])
def test_a_rule_cannot_write_into_facts(
    tmp_path: Path, install: Install, caplog: pytest.LogCaptureFixture, arrays: Any, uneven: bool
) -> None:
    def writes(facts: Any) -> list[Finding]:
        for array in arrays(facts):
            array[:] = 0
        return []

    def reads(facts: Any) -> list[Finding]:
        return [own(title=f"{facts.wall_s().sum():.6f} {facts.common_steps().sum()}")]

    run_dir = waiting(tmp_path)
    if uneven:  # the ranks have other steps in common than each has
        path = run_dir / "events/rank00001.jsonl"
        path.write_bytes(b"\n".join(path.read_bytes().splitlines()[:-3]) + b"\n")
    install(reads=reads)
    before = diagnose(read_run(run_dir))
    install(writes=writes, reads=reads)
    with caplog.at_level(logging.WARNING):
        assert diagnose(read_run(run_dir)) == before
    assert "rule writes of their_package:rule was left out: ValueError" in caplog.text
