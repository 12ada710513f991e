"""A link that is slower than it was measured to be, on events with exactly known times and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from event_streams import write_events

from unisono.diagnose import diagnose, read_run
from unisono.observe import LinkTraffic
from unisono.observe.meters import COMM_AXES

COMPUTE = {"forward": 0.03, "backward": 0.05}  # with the exchange of 20 ms a step takes 100 ms


# an entry of ``axes`` that says nothing of the link
WRONG_AXIS = {"axis": "dp", "group": ["x"], "transport": None, "ranks": "NaN", "wire_bytes": 1, "expected_s": -1}


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


def of_axis(axis: str, **row: Any) -> Any:
    """A ``links`` event of ten steps in a second, every ten steps: 2 MB a step in four collectives."""
    entry = {"axis": axis, "group": axis, "transport": "nccl", "ranks": 2, "hosts": 1, "collectives": 40}
    entry |= {"payload_bytes": 30_000_000, "wire_bytes": 20_000_000, "expected_latency_s": 0.001, **row}
    rest = {"axis": axis, "group": "all", "transport": "nccl", "ranks": 4, "wire_bytes": 80}  # not measured

    def extra(rank: int, step: int) -> list[dict[str, Any]]:
        event = {"kind": "links", "steps": 10, "wall_s": 1.0, "links": [], "axes": [entry, rest]}
        return [event] if step % 10 == 0 else []

    return extra


@pytest.mark.parametrize("axis", COMM_AXES)
def test_an_axis_whose_link_is_slow(tmp_path: Path, axis: str) -> None:
    def waits(rank: int, step: int) -> Mapping[str, float]:
        return {**COMPUTE, f"comm_exposed_{axis}": 0.02}

    run = write_events(tmp_path, waits, extra=of_axis(axis, expected_s=0.1, interface="eth7"))  # 10 ms a step
    found = {finding.id: finding for finding in diagnose(read_run(run))}
    finding = found["COMM03"]
    assert (finding.severity, finding.cost_frac) == ("critical", pytest.approx(0.1))
    along = "" if axis == "dp" else f" along {axis}"
    assert finding.title == f"the link{along} is slower than it was: nccl on eth7"
    assert finding.evidence == (
        "2 MB a step over nccl on eth7 take 20 ms that no computation hides, so at most 100 MB/s",
        "unisono doctor --bench measured 200 MB/s, which is 10 ms",
    )
    assert found["COMM01"].evidence[-1] == (
        f"{axis}: 2 MB a step over nccl, 2 ranks; 20 MB/s, 10% of the 200 MB/s that unisono doctor --bench measured"
    )


@pytest.mark.parametrize(
    ("exposed_s", "expected_s", "latency_s", "is_found"),
    [
        (0.02, 0.165, 0.001, False),  # 16.5 ms a step: less than a fifth slower is as it was
        (0.02, 0.150, 0.001, True),
        (0.02, 0.049, 0.001, False),  # less than 5 % of a step is expected, and it is not a multiple
        (0.08, 0.049, 0.001, True),  # 16 times as long, half of the step
        (0.08, 0.090, 0.001, True),  # more than 5 % of the step
        (0.08, 0.049, 0.049, False),  # small messages, which take as long as their latency
        (0.08, 0.090, 0.030, False),  # a third of it is latency
        (0.02, 0.010, 0.001, False),  # 20 times as long, but a fifth of the step
    ],
)
def test_ranks_that_exchange_little_do_not_wait_for_the_link(
    tmp_path: Path, exposed_s: float, expected_s: float, latency_s: float, *, is_found: bool
) -> None:
    def waits(rank: int, step: int) -> Mapping[str, float]:
        return {**COMPUTE, "comm_exposed_tp": exposed_s}

    row = of_axis("tp", expected_s=expected_s, expected_latency_s=latency_s)
    found = [finding.id for finding in diagnose(read_run(write_events(tmp_path, waits, extra=row)))]
    assert ("COMM03" in found) == is_found


def test_single_interruptions_are_not_the_link(tmp_path: Path) -> None:
    def waits(rank: int, step: int) -> Mapping[str, float]:
        return {**COMPUTE, "comm_exposed_tp": 0.3 if step % 4 == 0 else 0.02}

    run = write_events(tmp_path, waits, extra=of_axis("tp", expected_s=0.2))
    assert "COMM03" not in [finding.id for finding in diagnose(read_run(run))]


def test_an_axis_that_is_measured_in_part_is_not_judged(tmp_path: Path) -> None:
    def waits(rank: int, step: int) -> Mapping[str, float]:
        return {**COMPUTE, "comm_exposed_tp": 0.02}

    def extra(rank: int, step: int) -> list[dict[str, Any]]:
        events = of_axis("tp", **({"expected_s": 0.1} if step <= 20 else {}))(rank, step)
        return events

    run = write_events(tmp_path, waits, extra=extra)
    found = {finding.id: finding for finding in diagnose(read_run(run))}
    assert "COMM03" not in found
    assert found["COMM01"].evidence[-1] == "tp: 2 MB a step over nccl, 2 ranks; 20 MB/s"


def test_traffic_by_axis_is_added_up(tmp_path: Path) -> None:
    run = write_events(tmp_path, times, extra=of_axis("cp", expected_s=0.1))
    main, rest = read_run(run).ranks[0].axes
    assert (main.axis, main.group, main.transport, main.ranks, main.hosts) == ("cp", "cp", "nccl", 2, 1)
    assert (main.steps, main.wall_s, main.collectives) == (40, 4.0, 160)
    assert (main.payload_bytes, main.wire_bytes, main.expected_s) == (12e7, 8e7, pytest.approx(0.4))
    assert (rest.group, rest.wire_bytes, rest.expected_s) == ("all", 320, 0)


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
        *({"steps": 10, "wall_s": wall_s, "axes": [WRONG_AXIS]} for wall_s in (None, "x", -1, 0, 1e300)),
        *({"steps": steps, "wall_s": 1.0, "axes": [WRONG_AXIS]} for steps in (None, "x", -1, 0, 1 << 70)),
        *(
            {"steps": 10, "wall_s": 1.0, "axes": axes}
            for axes in (None, 3, {}, [None, 3, "x", [], {}], [WRONG_AXIS] * 999)
        ),
        {
            "steps": 10,
            "wall_s": 1.0,
            "axes": [{"axis": name, "wire_bytes": 1, "group": name} for name in ("x", None, 3)],
        },
        {"steps": 10, "wall_s": 1.0, "axes": [{"axis": "dp", "group": str(n), "wire_bytes": 1} for n in range(999)]},
    ],
)
def test_events_of_anybody(tmp_path: Path, event: dict[str, Any]) -> None:
    run = write_events(tmp_path, times, extra=lambda rank, step: [{"kind": "links", **event}])
    assert "COMM03" not in [finding.id for finding in diagnose(read_run(run))]
