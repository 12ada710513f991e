"""A link that is slower than it was measured to be, on events with exactly known times and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from event_streams import write_events

from unisono.diagnose import LinkTraffic, diagnose, read_run

COMPUTE = {"forward": 0.03, "backward": 0.05}  # with the exchange of 20 ms a step takes 100 ms


def times(rank: int, step: int) -> Mapping[str, float]:
    """Rank 1 comes last; what rank 0 waits longer is not the link's."""
    late = 0.0 if rank else 0.01
    own = {**COMPUTE, "backward": COMPUTE["backward"] - late}
    return {**own, "comm_exposed_dp": 0.02 + late}


def of_links(**row: Any) -> Any:
    """A ``links`` event of ten steps, every ten steps."""
    link = {"peer": "gloo: a reason", "sent_bytes": 20_000_000, "interface": "eth7", **row}

    def extra(rank: int, step: int) -> list[dict[str, Any]]:
        return [{"kind": "links", "steps": 10, "links": [link]}] if step % 10 == 0 else []

    return extra


@pytest.mark.parametrize(
    ("measured", "severity", "cost"),
    [
        (2e6 / 0.017, None, 0),  # 15 % slower
        (2e6 / 0.015, "warning", 0.05),
        (2e6 / 0.005, "critical", 0.15),
        (2e6 / 0.03, None, 0),  # computation hides a part
    ],
)
def test_a_slow_link(tmp_path: Path, measured: float, severity: str | None, cost: float) -> None:
    run = write_events(tmp_path, times, extra=of_links(measured_bytes_per_s=measured))
    found = {finding.id: finding for finding in diagnose(read_run(run))}
    if severity is None:
        assert "COMM03" not in found
        return
    finding = found["COMM03"]
    assert (finding.severity, finding.cost_frac) == (severity, pytest.approx(cost))
    assert finding.title == "the link is slower than it was: gloo on eth7"
    assert (
        "2 MB a step over gloo on eth7 take 20 ms that no computation hides, so at most 100 MB/s" in finding.evidence[0]
    )
    assert f"measured {measured / 1e6:,.3g} MB/s" in finding.evidence[1]
    assert "unisono launch --interface" in finding.advice


def test_a_slow_link_that_costs_little_is_no_finding(tmp_path: Path) -> None:
    def short(rank: int, step: int) -> Mapping[str, float]:
        return {**COMPUTE, "comm_exposed_dp": 0.001}

    run = write_events(tmp_path, short, extra=of_links(measured_bytes_per_s=1e12))
    assert diagnose(read_run(run)) == []


def test_traffic_is_added_up(tmp_path: Path) -> None:
    run = write_events(tmp_path, times, extra=of_links(measured_bytes_per_s=5.0))
    traffic = LinkTraffic(
        peer="gloo: a reason", steps=40, sent_bytes=80_000_000, measured_bytes_per_s=5.0, interface="eth7"
    )
    assert [rank.links for rank in read_run(run).ranks] == [(traffic,)] * 2


@pytest.mark.parametrize(
    "event",
    [
        {"steps": 10},
        {"steps": 0, "links": [{"peer": "gloo", "sent_bytes": 1, "measured_bytes_per_s": 1e-9}]},
        {"steps": "10", "links": []},
        {"steps": 10, "links": {}},
        {"steps": 10, "links": [None, 3, "x", [], {}]},
        {"steps": 10, "links": [{"peer": None, "sent_bytes": "many"}]},
        {"steps": 10, "links": [{"peer": "gloo", "sent_bytes": -1, "measured_bytes_per_s": 1e9}]},
        {"steps": 10, "links": [{"peer": "gloo", "sent_bytes": 1e300, "measured_bytes_per_s": 1e9}]},
        {"steps": 10, "links": [{"peer": {}, "sent_bytes": 1, "measured_bytes_per_s": "NaN", "interface": 3}]},
        {"steps": 10, "links": [{"peer": "gloo", "sent_bytes": 1, "measured_bytes_per_s": 0}]},
    ],
)
def test_events_of_anybody(tmp_path: Path, event: dict[str, Any]) -> None:
    run = write_events(tmp_path, times, extra=lambda rank, step: [{"kind": "links", **event}])
    assert "COMM03" not in [finding.id for finding in diagnose(read_run(run))]
