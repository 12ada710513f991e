"""Each rule names its cause, rank and cost on events with exactly known times, and is silent without its cause."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from event_streams import COMPUTE, SETTINGS, findings, only, together, write_events

from unisono.diagnose import Finding, diagnose, read_run
from unisono.diagnose.finding_text import confidence_word
from unisono.observe.events import EVENT_SCHEMA


def test_a_healthy_run_has_no_findings(tmp_path: Path) -> None:
    small = {"data_wait": 0.001, "comm_exposed": 0.004, **COMPUTE}
    assert findings(tmp_path, lambda rank, step: small) == []


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("windows", [True, False])
def test_all_ranks_wait_for_data(tmp_path: Path, every: int, windows: bool) -> None:
    work = {rank: {**COMPUTE, "data_wait": 0.025} for rank in (0, 1)}
    finding = only(tmp_path, together(work), every=every, windows=windows)
    assert (finding.id, finding.severity, finding.ranks, finding.patch) == ("DATA01", "critical", (), {})
    assert finding.cost_frac == pytest.approx(0.25)
    assert "each step waits 25 ms of 100 ms" in finding.evidence[0]


@pytest.mark.parametrize(
    ("settings", "patch", "gain"),
    [
        # one worker hides as much as there is to compute
        ({"loader.num_workers": 0}, {"loader.num_workers": -1}, 0.25),
        ({"loader.num_workers": 2, "loader.worker_kind": "thread"}, {"loader.num_workers": 3}, 0.225),
        ({"loader.num_workers": 2, "loader.worker_kind": "auto"}, {"loader.num_workers": 3}, 0.225),
        ({"loader.num_workers": -1}, {}, 0.0),
        ({}, {}, 0.0),
    ],
)
def test_a_data_bound_run_gets_more_workers(
    tmp_path: Path, settings: Mapping[str, Any], patch: Mapping[str, Any], gain: float
) -> None:
    finding = only(tmp_path, lambda rank, step: {**COMPUTE, "data_wait": 0.025}, ranks=1, settings=settings)
    assert (finding.patch, finding.expected_gain) == (patch, pytest.approx(gain))


@pytest.mark.parametrize(
    ("work_s", "first", "advice"),
    [
        (
            {"read": 0.06, "transform": 0.02, "collate": 0.001},
            "reading 60 ms, transforms 20 ms, collating 1 ms",
            "data pack",
        ),
        ({"transform": 0.03}, "transforms 30 ms", "cheaper transforms"),
        ({"collate": 0.03, "read": 0.01}, "collating 30 ms, reading 10 ms", "collate_fn"),
    ],
)
def test_a_data_bound_run_names_the_longest_stage(
    tmp_path: Path, work_s: Mapping[str, float], first: str, advice: str
) -> None:
    fields = {f"time/loader_{stage}_s": seconds for stage, seconds in work_s.items()}
    times = {**COMPUTE, "data_wait": 0.025}
    finding = only(tmp_path, lambda rank, step: times, ranks=1, settings={"loader.worker_kind": "auto"}, fields=fields)
    assert finding.evidence[1] == f"the loader's work on it: {first}"
    assert advice in finding.advice


@pytest.mark.parametrize("steps", [(20, 31), tuple(range(5, 61))])
def test_a_wait_before_a_few_steps_is_no_slow_work(tmp_path: Path, steps: tuple[int, ...]) -> None:
    waits = {step: 3.0 / len(steps) for step in steps}
    finding = only(tmp_path, lambda rank, step: {**COMPUTE, "data_wait": waits.get(step, 0.0)}, ranks=1, steps=60)
    assert finding.id == "DATA01"
    says = "80% of that is in 2 of 58 readings, which end with step 20, 31: pauses" in finding.evidence[1]
    assert says == (len(steps) == 2)


def test_pauses_need_no_workers(tmp_path: Path) -> None:
    def waits(steady_s: float) -> Any:
        return lambda rank, step: {**COMPUTE, "data_wait": 10.0 if step == 20 else steady_s}

    one = {"loader.num_workers": 1}
    finding = only(tmp_path / "paused", waits(0.001), ranks=1, steps=60, settings=one)
    assert (finding.id, finding.severity, finding.patch, finding.expected_gain) == ("DATA01", "critical", {}, 0.0)
    assert finding.advice.startswith("find what stands still at these steps")
    # without the pause a fifth of a step is waited for: two workers hide it
    finding = only(tmp_path / "both", waits(0.01875), ranks=1, steps=60, settings=one)
    assert finding.patch == {"loader.num_workers": 2}
    steps_s = 57 * (0.075 + 0.01875)
    assert finding.expected_gain == pytest.approx(0.9 * 0.2 * steps_s / (steps_s + 10.075), rel=1e-3)


def test_one_rank_waits_for_data_and_the_network_is_not_blamed(tmp_path: Path) -> None:
    finding = only(tmp_path, together({0: COMPUTE, 1: {**COMPUTE, "data_wait": 0.025}, 2: COMPUTE}), ranks=3)
    assert (finding.id, finding.ranks, finding.severity) == ("DATA02", (1,), "critical")
    assert finding.cost_frac == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("rates", "evidence", "advice"),
    [
        (
            (2e12, 1e12, 2e12),
            "measured 1 and 2 TFLOP/s on the nodes of ranks 1 and 0: that node was as slow",
            "another node",
        ),
        (
            (2e12, 1.9e12, 2e12),
            "measured 1.9 and 2 TFLOP/s on the nodes of ranks 1 and 0: the node itself is not",
            "look at",
        ),
        ((2e12, None, 2e12), None, "look at that host"),
        ((2e12, float("nan"), 2e12), None, "look at that host"),
        ((2e12, "fast", 2e12), None, "look at that host"),
    ],
)
def test_a_slow_rank_and_what_its_node_was_measured_to_do(
    tmp_path: Path, rates: tuple[Any, ...], evidence: str | None, advice: str
) -> None:
    work = {rank: {**COMPUTE, "forward": 0.095 if rank == 1 else 0.02} for rank in range(3)}  # twice as long
    finding = only(tmp_path, together(work), ranks=3, start_of=lambda rank: {"baseline_flops_per_s": rates[rank]})
    assert (finding.id, finding.ranks) == ("BAL01", (1,))
    assert len(finding.evidence) == 3 + (evidence is not None)
    assert evidence is None or evidence in finding.evidence[3]
    assert finding.advice.startswith(advice)


@pytest.mark.parametrize("ranks", [2, 3])
def test_exposed_communication(tmp_path: Path, ranks: int) -> None:
    plan = {"sync": {"kind": "dist_sync"}, "mesh": {"dp_replicate": ranks, "tp": 1}}
    finding = only(tmp_path, together(dict.fromkeys(range(ranks), COMPUTE), 0.025), ranks=ranks, plan=plan)
    assert (finding.id, finding.ranks, finding.severity) == ("COMM01", (), "critical")
    assert finding.cost_frac == pytest.approx(0.25)
    assert f"dp_replicate {ranks}" in finding.evidence[0]


def test_exposed_communication_names_the_axis(tmp_path: Path) -> None:
    # of two tensor-parallel pairs; rank 3 comes last, and what the others wait longer, along whichever axis, is not the network's
    waits = {
        0: {"tp": 0.03, "dp": 0.015},
        1: {"tp": 0.03, "dp": 0.015},
        2: {"tp": 0.04, "dp": 0.005},
        3: {"tp": 0.02, "dp": 0.005},
    }
    plan = {"sync": {"kind": "dist_sync"}, "mesh": {"dp_replicate": 2, "tp": 2}}
    late = {rank: {**COMPUTE, "forward": 0.04 if rank == 3 else 0.02} for rank in range(4)}

    def times(rank: int, step: int) -> Mapping[str, float]:
        return {**late[rank], **{f"comm_exposed_{axis}": seconds for axis, seconds in waits[rank].items()}}

    found = {finding.id: finding for finding in findings(tmp_path, times, ranks=4, plan=plan)}
    assert sorted(found) == ["BAL01", "COMM01"]
    assert found["COMM01"].title == "steps wait for communication along tp"
    assert found["COMM01"].cost_frac == pytest.approx(0.025 / 0.12)
    assert "by axis: tp 20 ms, dp 5 ms" in found["COMM01"].evidence[1]
    assert "plan.tp" in found["COMM01"].advice
    assert found["BAL01"].ranks == (3,)


@pytest.mark.parametrize(
    ("schedule", "micro_batch", "passes", "patch", "gain"),
    [
        # of two stages, seven micro-batches leave less than 15 % of a step idle, and six do (1/7)
        ("1f1b", 8, 2, {"plan.micro_batch": 2}, 0.4 * (1 - (1 / 9) / (1 / 3))),
        ("gpipe", 2, 2, {"plan.micro_batch": 1}, 0.4 * (1 - (1 / 5) / (1 / 3))),
        ("1f1b", 1, 2, {}, 0.0),
        ("zbv", 8, 2, {}, 0.0),
    ],
)
def test_pipeline_stages_that_wait_for_each_other(
    tmp_path: Path, schedule: str, micro_batch: int, passes: int, patch: Mapping[str, Any], gain: float
) -> None:
    plan = {
        "sync": {"kind": "dist_sync"},
        "mesh": {"pp": 2},
        "batch": {"micro_batch": micro_batch, "accumulation": passes},
        "pipeline": {"schedule": schedule},
    }
    finding = only(tmp_path, lambda rank, step: {**COMPUTE, "bubble": 0.05}, plan=plan)
    assert (finding.id, finding.severity, finding.patch) == ("PP01", "critical", patch)
    assert (finding.cost_frac, finding.expected_gain) == (pytest.approx(0.4), pytest.approx(gain))
    assert ("are idle for 33% of a step of 2 micro-batches" in " ".join(finding.evidence)) == (schedule != "zbv")


def test_a_slow_stage_is_no_bubble(tmp_path: Path) -> None:
    work = {0: {**COMPUTE, "forward": 0.055}, 1: {**COMPUTE, "bubble": 0.035}}
    finding = only(tmp_path, lambda rank, step: work[rank], plan={"sync": {"kind": "dist_sync"}, "mesh": {"pp": 2}})
    assert (finding.id, finding.ranks, finding.cost_frac) == ("BAL01", (0,), pytest.approx(0.035 / 0.11))


@pytest.mark.parametrize(("rank", "phase"), [(0, "forward"), (1, "other"), (3, "optimizer")])
def test_a_slow_rank(tmp_path: Path, rank: int, phase: str) -> None:
    work = {each: dict(COMPUTE) for each in range(4)}
    work[rank][phase] += 0.03
    finding = only(tmp_path, together(work), ranks=4)
    assert (finding.id, finding.ranks, finding.severity) == ("BAL01", (rank,), "critical")
    assert finding.cost_frac == pytest.approx(0.03 / 0.105)
    words = {"forward": "the forward pass", "other": "code between steps", "optimizer": "the optimizer"}
    assert words[phase] in finding.evidence[1]
    assert ("the body of the loop" in finding.advice) == (phase == "other")


def test_two_slow_ranks_of_a_host_are_one_finding(tmp_path: Path) -> None:
    work = {rank: {**COMPUTE, "forward": 0.05 if rank in (2, 3) else 0.02} for rank in range(5)}
    finding = only(tmp_path, together(work), ranks=5)
    assert (finding.id, finding.ranks, finding.title) == ("BAL01", (2, 3), "ranks 2, 3 are slower than the others")
    assert finding.cost_frac == pytest.approx(0.03 / 0.105)


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "tap", "step": "x", "skipped": False},
        {"kind": "tap", "step": 5, "skipped": False, "modules": [1], "parameters": {"a": 3}},
        {
            "kind": "tap",
            "step": 5,
            "skipped": False,
            "modules": {"a": {"output": {"dead_frac": "NaN"}}},
            "parameters": None,
        },
        {"kind": "tap", "step": 5, "skipped": False, "parameters": {"a": {"shape": 7, "update_frac": "Infinity"}}},
        {"kind": "nonfinite", "step": 5, "reproduced": True, "samples": {"a": 1}, "layer": 3},
        {"kind": "nonfinite", "step": None, "reproduced": True},
        {"kind": "nonfinite", "step": 5, "reproduced": "yes"},
        {"kind": "corruption", "step": None, "source": "memory", "ranks": [0]},
        {"kind": "corruption", "step": 5, "source": 3, "ranks": [0]},
    ],
)
def test_events_of_others_are_no_trouble(tmp_path: Path, event: dict[str, Any]) -> None:
    assert (
        findings(tmp_path, lambda rank, step: COMPUTE, extra=lambda rank, step: [event] if step % 5 == 0 else []) == []
    )


def test_rarer_saves_leave_no_finding(tmp_path: Path) -> None:
    finding = only(tmp_path / "a", lambda rank, step: {"forward": 0.09, "ckpt_stall": 0.01}, ranks=1)
    factor = finding.patch["checkpoint.every_steps"] / SETTINGS["checkpoint.every_steps"]
    assert findings(tmp_path / "b", lambda rank, step: {"forward": 0.09, "ckpt_stall": 0.01 / factor}, ranks=1) == []


def test_one_rank_that_saves_longer_is_named(tmp_path: Path) -> None:
    work = {0: {"forward": 0.09}, 1: {"forward": 0.09, "ckpt_stall": 0.01}}
    assert [(each.id, each.ranks) for each in findings(tmp_path, together(work))] == [("CKPT01", (1,))]


def test_left_out_readings_make_steps_no_shorter(tmp_path: Path) -> None:
    """Those around a profile have other times; what a step takes is told by the others."""
    profiled = {"kind": "profile", "first_step": 11}
    finding = only(
        tmp_path,
        lambda rank, step: {"forward": 0.09, "data_wait": 0.11},
        ranks=1,
        extra=lambda rank, step: [profiled] if step == 20 else [],
    )
    assert "waits 110 ms of 200 ms for its batch" in finding.evidence[0]


def test_a_rank_that_failed_in_an_earlier_attempt_does_not_count(tmp_path: Path) -> None:
    failed = {"kind": "run_end", "reason": "failed", "error": "CommError", "message": "a peer is gone"}
    write_events(tmp_path, lambda rank, step: COMPUTE, ranks=3, extra=lambda rank, step: [failed] if step == 40 else [])
    assert [each.id for each in diagnose(read_run(tmp_path))] == ["EXIT01"]
    write_events(tmp_path, lambda rank, step: COMPUTE, ranks=2, began_s=1000.0)
    assert diagnose(read_run(tmp_path)) == []


def test_an_end_that_a_launcher_recorded_as_good(tmp_path: Path) -> None:
    failed = {"kind": "run_end", "reason": "failed", "error": "CommError", "message": "a peer is gone"}
    write_events(tmp_path, lambda rank, step: COMPUTE, extra=lambda rank, step: [failed] if step == 40 else [])
    (tmp_path / "launch.json").write_text(json.dumps({"attempt": 0, "attempts": [{"attempt": 0, "cause": None}]}))
    assert diagnose(read_run(tmp_path)) == []


def test_events_of_a_later_release_are_noted(tmp_path: Path) -> None:
    facts = read_run(write_events(tmp_path, lambda rank, step: COMPUTE, start={"schema": EVENT_SCHEMA + 1}))
    assert len(facts.notes) == 2
    assert f"events of version {EVENT_SCHEMA + 1}" in facts.notes[0]
    assert read_run(write_events(tmp_path, lambda rank, step: COMPUTE, start={"schema": "x"})).notes == ()


def test_ranks_that_left_before_the_last_attempt_do_not_count(tmp_path: Path) -> None:
    write_events(tmp_path, lambda rank, step: {**COMPUTE, "data_wait": 0.1}, ranks=4, began_s=0.0)
    write_events(tmp_path, lambda rank, step: COMPUTE, ranks=2, began_s=1000.0)
    facts = read_run(tmp_path)
    assert (facts.rank_numbers, diagnose(facts)) == ((0, 1), [])


def test_ranks_that_are_slow_in_turn_are_no_stragglers(tmp_path: Path) -> None:
    def times(rank: int, step: int) -> Mapping[str, float]:
        slow = step % 2 == rank
        return {**COMPUTE, "forward": 0.045 if slow else 0.02, "comm_exposed": 0.0 if slow else 0.025}

    assert findings(tmp_path, times) == []


def test_two_causes_at_once_are_both_named_most_costly_first(tmp_path: Path) -> None:
    work = {
        0: {**COMPUTE, "data_wait": 0.05},
        1: {**COMPUTE, "data_wait": 0.05, "forward": 0.045},
        2: {**COMPUTE, "data_wait": 0.05},
    }
    found = findings(tmp_path, together(work), ranks=3)
    assert [(finding.id, finding.ranks) for finding in found] == [("DATA01", ()), ("BAL01", (1,))]
    assert [finding.cost_frac for finding in found] == [pytest.approx(1 / 3), pytest.approx(1 / 6)]


@pytest.mark.parametrize(
    ("settings", "patch", "gain"),
    [
        (SETTINGS, {"checkpoint.every_steps": 50 * 23}, 0.1 * 22 / 23),
        ({**SETTINGS, "checkpoint.asynchronous": False}, {"checkpoint.asynchronous": True}, 0.05),
        ({}, {}, 0.0),
    ],
)
def test_training_stands_still_while_it_saves(
    tmp_path: Path, settings: Mapping[str, Any], patch: Mapping[str, Any], gain: float
) -> None:
    finding = only(tmp_path, lambda rank, step: {"forward": 0.09, "ckpt_stall": 0.01}, ranks=1, settings=settings)
    assert (finding.id, finding.severity, finding.cost_frac) == ("CKPT01", "critical", pytest.approx(0.1))
    assert (finding.patch, finding.expected_gain) == (patch, pytest.approx(gain))


@pytest.mark.parametrize(("device", "gain"), [("cpu", 0.025), ("cuda", 0.05)])
def test_saves_in_the_background_share_the_processors_of_a_run_on_the_cpu(
    tmp_path: Path, device: str, gain: float
) -> None:
    settings, plan = {"checkpoint.asynchronous": False}, {"mesh": {"device": device}}
    times = {"forward": 0.09, "ckpt_stall": 0.01}
    finding = only(tmp_path, lambda rank, step: times, ranks=1, settings=settings, plan=plan)
    assert (finding.id, finding.expected_gain) == ("CKPT01", pytest.approx(gain))


@pytest.mark.parametrize(
    "fields",
    [
        {"step": 10**30},
        {"step": [1]},
        {"step": math.inf},
        {"time/window_s": -1.0},
        {"time/window_s": math.nan},
        {"time/window_s": math.inf},
        {"kind": "skipped_step", "step": math.inf, "samples": {"a": 1}},
        {"kind": "compiled", "step": {}},
    ],
)
def test_events_that_mean_harm_are_left_out(tmp_path: Path, fields: dict[str, Any]) -> None:
    row = {"kind": "step", "time/other_frac": 1.0, "time/window_s": 1.0, **fields}
    assert findings(tmp_path, lambda rank, step: COMPUTE, extra=lambda rank, step: [row] if step > 10 else []) == []


def test_a_few_steps_say_nothing_of_time(tmp_path: Path) -> None:
    assert findings(tmp_path, lambda rank, step: {**COMPUTE, "data_wait": 1.0}, steps=9) == []


def test_warm_up_and_compiled_steps_are_left_out(tmp_path: Path) -> None:
    def times(rank: int, step: int) -> Mapping[str, float]:
        return {**COMPUTE, "data_wait": 9.0} if step in (1, 2, 20) else COMPUTE

    compiled = {"kind": "compiled", "first_step_s": 9.0}
    assert findings(tmp_path, times, extra=lambda rank, step: [compiled] if step == 20 else []) == []


def test_workers_of_their_own_do_not_wait_for_each_other(tmp_path: Path) -> None:
    work = {0: COMPUTE, 1: {**COMPUTE, "forward": 0.2}}
    assert findings(tmp_path, lambda rank, step: work[rank], plan={"sync": {"kind": "dist_async"}}) == []


def test_rules_of_other_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def own(facts: Any) -> list[Finding]:
        return [
            Finding(
                id="OWN01", title="own", severity="warning", cost_frac=0.5, confidence=1, evidence=(), advice="none"
            )
        ]

    class Entry:
        dist, value = None, "their_package:rule"

        def __init__(self, name: str, rule: Any) -> None:
            self.name, self.load = name, lambda: rule

    entries = [Entry("good", own), Entry("bad", lambda facts: 1 / 0), Entry("odd", lambda facts: [{"id": "OWN02"}])]
    monkeypatch.setattr(
        "unisono.diagnose.rules.entry_points", lambda group: entries if group == "unisono.rules" else []
    )
    with caplog.at_level(logging.WARNING):
        assert [finding.id for finding in findings(tmp_path, lambda rank, step: COMPUTE)] == ["OWN01"]
    assert "rule bad of their_package:rule was left out: ZeroDivisionError" in caplog.text
    assert "rule odd of their_package:rule was left out: TypeError" in caplog.text


def test_the_page_has_all_rules() -> None:
    root = Path(__file__).parents[2]
    source = "".join(path.read_text() for path in sorted((root / "src/unisono/diagnose").glob("*_rules.py")))
    table = (root / "docs/diagnosis.md").read_text().partition("## Rules\n")[2].partition("## Rules of your own")[0]
    assert re.findall("^\\| `([A-Z]+[0-9]+)` ", table, re.MULTILINE) == sorted(
        set(re.findall('(?:id=| {8})"([A-Z]+[0-9]+)"', source)), key=table.index
    )


@pytest.mark.parametrize(("copy_s", "severity"), [(0.001, None), (0.005, "warning"), (0.025, "critical")])
def test_copies_to_the_device(tmp_path: Path, copy_s: float, severity: str | None) -> None:
    found = findings(tmp_path, lambda rank, step: {**COMPUTE, "h2d": copy_s}, ranks=1)
    assert [(finding.id, finding.severity) for finding in found] == ([("H2D01", severity)] if severity else [])
    if severity:
        assert found[0].cost_frac == pytest.approx(copy_s / (0.075 + copy_s))


def sampled(rank: int, step: int) -> list[dict[str, Any]]:
    """A sample of the monitor of a host that is not busy, in each step."""
    return [{"kind": "system", "sys/cpu_frac": 0.2, "sys/core_wait_frac": 0.0}]


def test_a_rank_that_becomes_slower(tmp_path: Path) -> None:
    def work(step: int) -> dict[int, dict[str, float]]:
        return {0: COMPUTE, 1: {**COMPUTE, "other": 0.005 + 0.025 * (step > 30)}}

    def times(rank: int, step: int) -> Mapping[str, float]:
        return together(work(step))(rank, step)

    finding = only(tmp_path, times, steps=62, extra=sampled)  # BAL01 is of ranks that are slow all the time
    assert (finding.id, finding.ranks, finding.severity) == ("BAL02", (1,), "warning")
    assert finding.cost_frac == pytest.approx(0.25)
    assert "1.33 times as long" in finding.evidence[0]


def test_all_ranks_become_slower(tmp_path: Path) -> None:
    slower = lambda rank, step: {**COMPUTE, "backward": 0.04 + 0.075 * (step > 40)}  # noqa: E731
    finding = only(tmp_path, slower, steps=62, extra=sampled)
    assert (finding.id, finding.ranks, finding.severity) == ("BAL02", (), "critical")
    assert finding.cost_frac == pytest.approx(0.5)
    assert finding.confidence == pytest.approx(0.8)


@pytest.mark.parametrize(("first", "said"), [(99, "no samples"), (61, "fewer than 3 samples")])
def test_a_slowdown_without_samples_may_be_of_a_busy_host(tmp_path: Path, first: int, said: str) -> None:
    slower = lambda rank, step: {**COMPUTE, "backward": 0.04 + 0.075 * (step > 40)}  # noqa: E731
    extra = lambda rank, step: sampled(rank, step) if not 50 < step < first else []  # noqa: E731
    finding = only(tmp_path, slower, steps=62, extra=extra)
    assert (finding.id, finding.severity, confidence_word(finding)) == ("BAL02", "warning", "possible")
    assert finding.evidence[-1].startswith(f"the host may be busy with something else: there are {said} of the monitor")


def test_a_small_slowdown_without_samples_is_no_finding(tmp_path: Path) -> None:
    slower = lambda rank, step: {**COMPUTE, "backward": 0.04 + 0.015 * (step > 40)}  # noqa: E731
    assert findings(tmp_path / "alone", slower, steps=62) == []
    assert [one.id for one in findings(tmp_path / "sampled", slower, steps=62, extra=sampled)] == ["BAL02"]


def test_a_slowdown_of_a_step_that_waits_is_no_cost(tmp_path: Path) -> None:
    def times(rank: int, step: int) -> Mapping[str, float]:
        return {"forward": 0.001 + 0.002 * (step > 40), "ckpt_stall": 0.1}

    assert "BAL02" not in {finding.id for finding in findings(tmp_path, times, steps=62)}


def test_a_few_slow_steps_are_no_slowdown(tmp_path: Path) -> None:
    def times(rank: int, step: int) -> Mapping[str, float]:
        return {**COMPUTE, "backward": 0.04 + 0.2 * (step in (58, 60))}

    assert findings(tmp_path, times, steps=62) == []


@pytest.mark.parametrize(
    ("settings", "patch", "gain"),
    [
        ({"train.gc_every_steps": 0}, {"train.gc_every_steps": 100}, 0.18),
        ({"train.gc_every_steps": 10}, {}, 0.0),
        ({}, {}, 0.0),
    ],
)
def test_garbage_collection(tmp_path: Path, settings: Mapping[str, Any], patch: Mapping[str, Any], gain: float) -> None:
    def fields(rank: int, step: int) -> Mapping[str, Any]:
        return {"time/gc_frac": 0.2 if rank else 0.01}

    finding = only(tmp_path, lambda rank, step: COMPUTE, settings=settings, fields_of=fields)
    assert (finding.id, finding.severity, finding.patch) == ("GC01", "critical", patch)
    assert (finding.cost_frac, finding.expected_gain) == (pytest.approx(0.2), pytest.approx(gain))
    assert "on rank 1 collections take 15 ms of 75 ms" in finding.evidence[0]
