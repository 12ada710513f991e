"""Rules of runs with parameter servers, on events with exactly known figures, and in a run with a server that is slow."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from event_streams import write_events

from unisono.diagnose import Finding, diagnose, read_run

ASYNC = {"sync": {"kind": "dist_async"}}
SETTINGS = {"launch.num_servers": 1, "plan.staleness": "none"}


def with_links(every: int, link: Callable[[int], dict[str, Any]]) -> Any:
    """A ``links`` event every ``every`` steps, of a second for ten steps."""

    def extra(rank: int, step: int) -> list[dict[str, Any]]:
        row = {"peer": "host:1", "sent_bytes": 1, **link(step)}
        return [{"kind": "links", "steps": every, "wall_s": every / 10, "links": [row]}] if step % every == 0 else []

    return extra


def found(folder: Path, wait_s: float, **options: Any) -> list[Finding]:
    times = {"forward": 0.1 - wait_s, "comm_exposed_dp": wait_s}
    run = write_events(folder, lambda rank, step: times, plan=ASYNC, settings=SETTINGS, **options)
    return diagnose(read_run(run))


@pytest.mark.parametrize(
    ("busy_s", "cpu_s", "wait_s", "severity", "cause"),
    [
        (0.9, 0.88, 0.03, "critical", "computes on 1.0 cores"),
        (0.9, 0.09, 0.02, "warning", "it waits for its network"),
        (0.9, 0.88, 0.005, None, ""),
    ],
)
def test_a_server_that_is_busy_all_the_time(
    tmp_path: Path, busy_s: float, cpu_s: float, wait_s: float, severity: str | None, cause: str
) -> None:
    link = {"busy_s": busy_s, "served_s": 1.8, "cpu_s": cpu_s, "sent_bytes": 1e6, "received_bytes": 2e6}
    findings = found(tmp_path, wait_s, extra=with_links(10, lambda step: link))
    assert [(finding.id, finding.severity) for finding in findings] == ([("SRV01", severity)] if severity else [])
    for finding in findings:
        assert finding.cost_frac == pytest.approx(10 * wait_s)
        assert (finding.patch, finding.expected_gain) == ({"launch.num_servers": 2}, pytest.approx(5 * wait_s))
        assert "host:1 is busy 90% of the time with 2.0 requests at once" in finding.evidence[1]
        assert cause in finding.evidence[1]
        # two workers, each 3 MB in the second of an event
        assert finding.evidence[2] == "bytes a second, there and back: host:1 6 MB/s"


def test_workers_that_wait_for_an_idle_server_wait_for_the_network(tmp_path: Path) -> None:
    link = {"busy_s": 0.3, "served_s": 0.3, "cpu_s": 0.3}
    assert [one.id for one in found(tmp_path, 0.03, extra=with_links(10, lambda step: link))] == ["COMM01"]


@pytest.mark.parametrize(("follows", "ids"), [(True, ["STALE01"]), (False, [])])
def test_losses_that_vary_with_the_lag(tmp_path: Path, follows: bool, ids: list[str]) -> None:
    rng = np.random.default_rng(0)

    def lag(step: int) -> int:
        return 8 if (step - 1) // 20 % 2 else 1  # of the period of twenty steps

    def loss(rank: int, step: int) -> dict[str, Any]:
        width = 0.01 * lag(step) if follows else 0.03
        return {"train/loss": 2.0 + width * rng.standard_normal()}

    extra = with_links(20, lambda step: {"pushes": 40, "lag_square_total": 40 * lag(step) ** 2 + step % 7})
    findings = found(tmp_path, 0.0, steps=240, extra=extra, fields_of=loss)
    assert [finding.id for finding in findings] == ids
    for finding in findings:
        assert finding.patch == {"plan.staleness": 0}
        assert "come 1.0 to 8.0 pushes" in finding.evidence[0]


@pytest.mark.parametrize(
    "row",
    [
        {"busy_s": "NaN", "served_s": -1, "cpu_s": 1e300},
        {"busy_s": [], "pushes": -3, "lag_square_total": 1},
        {"busy_s": 1e308, "served_s": None, "pushes": 1e300, "lag_square_total": math.pi},
    ],
)
def test_figures_that_mean_harm_are_left_out(tmp_path: Path, row: dict[str, Any]) -> None:
    findings = found(tmp_path, 0.0, extra=with_links(10, lambda step: row))
    assert [finding.id for finding in findings] == []
