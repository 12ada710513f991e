"""Each rule names its cause, rank and cost on events with exactly known times, and is silent without its cause."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from event_streams import SETTINGS, write_events

from unisono.diagnose import Finding, diagnose, read_run
from unisono.profile import RankProfile
from unisono.profile.rank_profile import GrowingAllocation, profile_folder

COMPUTE = {"forward": 0.02, "backward": 0.04, "optimizer": 0.01, "other": 0.005}


def findings(folder: Path, times: Any, **options: Any) -> list[Finding]:
    return diagnose(read_run(write_events(folder, times, **options)))


def only(folder: Path, times: Any, **options: Any) -> Finding:
    found = findings(folder, times, **options)
    assert len(found) == 1, [finding.id for finding in found]
    return found[0]


def together(work: Mapping[int, Mapping[str, float]], exchange_s: float = 0.0) -> Any:
    """Times of ranks that step together: those that are done early wait for the last one."""
    slowest = max(sum(phases.values()) for phases in work.values())

    def times(rank: int, step: int) -> Mapping[str, float]:
        return {**work[rank], "comm_exposed": slowest - sum(work[rank].values()) + exchange_s}

    return times


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
        ({"loader.num_workers": 2, "loader.worker_kind": "auto"}, {}, 0.0),
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


def test_two_slow_ranks_of_a_host_are_one_finding(tmp_path: Path) -> None:
    work = {rank: {**COMPUTE, "forward": 0.05 if rank in (2, 3) else 0.02} for rank in range(5)}
    finding = only(tmp_path, together(work), ranks=5)
    assert (finding.id, finding.ranks, finding.title) == ("BAL01", (2, 3), "ranks 2, 3 are slower than the others")
    assert finding.cost_frac == pytest.approx(0.03 / 0.105)


GIB = 2.0**30


@pytest.mark.parametrize(
    ("mib_per_step", "steps", "severity"),
    [(2.0, 300, "critical"), (0.5, 300, "warning"), (0.1, 300, None), (2.0, 150, None)],
)
def test_memory_that_grows(tmp_path: Path, mib_per_step: float, steps: int, severity: str | None) -> None:
    def memory(rank: int, step: int) -> dict[str, float]:
        return {
            "mem/now_bytes": 8 * GIB + (mib_per_step * 2**20 * step if rank == 1 else 0),
            "mem/limit_bytes": 32 * GIB,
        }

    found = findings(tmp_path, lambda rank, step: COMPUTE, steps=steps, fields_of=memory)
    assert [(one.id, one.severity, one.ranks) for one in found] == ([("MEM03", severity, (1,))] if severity else [])
    if severity:
        assert f"grows by {mib_per_step:.3g} MiB a step" in found[0].evidence[0]
        left_steps = (24 * 1024 - mib_per_step * steps) / mib_per_step
        assert f"after {left_steps:,.0f} more steps" in found[0].evidence[1]


def test_caches_that_fill_are_no_growth(tmp_path: Path) -> None:
    def memory(rank: int, step: int) -> dict[str, float]:
        return {"mem/now_bytes": GIB * min(4.0, 1 + step / 100), "mem/limit_bytes": 8 * GIB}

    assert findings(tmp_path, lambda rank, step: COMPUTE, steps=600, fields_of=memory) == []


def series(**columns: Any) -> Any:
    """Fields of the steps of a healthy run, with these values by step."""
    return lambda rank, step: {f"train/{name}": values[step - 1] for name, values in columns.items()}


@pytest.mark.parametrize(
    ("stacks", "grows", "texts"),
    [
        (False, (), ("unisono profile RUN_DIR --now --steps 5 --stacks",)),
        (True, (), ("in the 3 profiled steps no line's tensors, arrays or objects stayed",)),
        (
            True,
            (
                ("tensor", "own.py:7", "forward", 1.5),
                ("object", "own.py:9", "", 0.5),
                ("tensor", "x.py:1", "other", 0.1),
            ),
            ("tensors (forward) of own.py:7 stay: 1.5 MiB a step", "objects of own.py:9 stay: 0.5 MiB a step"),
        ),
    ],
)
def test_lines_whose_memory_grows(tmp_path: Path, stacks: bool, grows: Any, texts: tuple[str, ...]) -> None:
    def memory(rank: int, step: int) -> dict[str, float]:
        return {"mem/now_bytes": 8 * GIB + 2 * 2**20 * step * rank, "mem/limit_bytes": 32 * GIB}

    lines = tuple(
        GrowingAllocation(kind=kind, source=source, phase=phase, bytes_per_step=mib * 2**20)
        for kind, source, phase, mib in grows
    )
    run = write_events(tmp_path, lambda rank, step: COMPUTE, steps=300, fields_of=memory)
    for rank in (0, 1):
        path = profile_folder(run, 5) / f"rank-{rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        seen = lines if rank else ()
        made = RankProfile(rank=rank, num_steps=3, wall_s=1.0, has_stacks=stacks, grows=seen)
        path.write_bytes(made.to_bytes())
    (finding,) = diagnose(read_run(run))
    assert finding.id == "MEM03"
    assert len(finding.evidence) == 2 + len(texts)
    assert all(text in line for text, line in zip(texts, finding.evidence[2:], strict=True))


def noisy(count: int, level: float = 2.0) -> list[float]:
    return (level + 0.1 * np.random.default_rng(0).standard_normal(count)).tolist()


@pytest.mark.parametrize(("at", "severity"), [((120,), "warning"), (tuple(range(60, 200, 20)), "critical"), ((), None)])
def test_losses_that_jump(tmp_path: Path, at: tuple[int, ...], severity: str | None) -> None:
    losses = noisy(200)
    for step in at:
        losses[step - 1] = 9.0
    settings = {**SETTINGS, "train.spike_sigmas": 0.0}
    found = findings(tmp_path, lambda rank, step: COMPUTE, steps=200, fields_of=series(loss=losses), settings=settings)
    assert [(one.id, one.severity) for one in found] == ([("NUM02", severity)] if severity else [])
    if severity:
        assert found[0].patch == {"train.spike_sigmas": 8.0}
        assert f"{len(at)} of 200 steps: {at[0]}" in found[0].evidence[0]
        assert "9, the 50 steps before it 2" in found[0].evidence[1]


def test_a_step_that_the_guard_skipped_is_no_jump(tmp_path: Path) -> None:
    losses = noisy(200)
    losses[119] = losses[149] = 9.0

    def skipped(rank: int, step: int) -> list[dict[str, Any]]:
        return [{"kind": "skipped_step", "loss": 9.0, "grad_norm": 1.0, "samples": []}] if step == 120 else []

    finding = only(tmp_path, lambda rank, step: COMPUTE, steps=200, fields_of=series(loss=losses), extra=skipped)
    assert (finding.id, finding.evidence[0]) == ("NUM02", "1 of 199 steps: 150")


def test_a_falling_loss_does_not_jump(tmp_path: Path) -> None:
    losses = [10 * math.exp(-step / 40) + noise - 2 for step, noise in enumerate(noisy(300))]
    assert findings(tmp_path, lambda rank, step: COMPUTE, steps=300, fields_of=series(loss=losses)) == []


def stats(norms: Mapping[str, Any]) -> Any:
    """Statistics of gradients every ten steps; ``norms``: by parameter, the norm at a step."""

    def events(rank: int, step: int) -> list[dict[str, Any]]:
        layers = {name: {"norm": norm(step), "max": norm(step), "nonfinite": 0} for name, norm in norms.items()}
        return [{"kind": "gradient_stats", "layers": layers}] if step % 10 == 0 else []

    return events


def test_gradients_that_grow(tmp_path: Path) -> None:
    norms = [1.05**step for step in range(1, 101)]
    grown = stats({"head": lambda step: 1.0, "blocks.1.ffn": lambda step: 1.05**step})
    finding = only(tmp_path, lambda rank, step: COMPUTE, steps=100, fields_of=series(grad_norm=norms), extra=grown)
    assert (finding.id, finding.severity) == ("NUM03", "warning")
    assert "50 times that of the first" in finding.evidence[0]
    assert finding.evidence[1] == "blocks.1.ffn has grown most, 81 times"


def test_gradients_of_a_warm_up_do_not_grow(tmp_path: Path) -> None:
    norms = [min(step, 30) / 30 for step in range(1, 101)]
    assert findings(tmp_path, lambda rank, step: COMPUTE, steps=100, fields_of=series(grad_norm=norms)) == []


def test_parameters_without_gradients(tmp_path: Path) -> None:
    norms = stats(
        {"a": lambda step: 1.0, "b": lambda step: 2.0, "blocks.0.gate": lambda step: 0.0 if step > 10 else 1.0}
    )
    finding = only(tmp_path, lambda rank, step: COMPUTE, extra=norms)
    assert (finding.id, finding.severity) == ("NUM04", "warning")
    assert finding.evidence[0] == "1 of 3: blocks.0.gate"
    assert "in steps 20, 30, 40, the median is 1" in finding.evidence[1]


@pytest.mark.parametrize(
    ("evals", "train_falls", "severity"),
    [
        ((3.0, 2.5, 2.6, 2.8), True, "critical"),
        ((3.0, 2.5, 2.52, 2.56), True, "warning"),
        ((3.0, 2.5, 2.6, 2.8), False, None),  # training has become worse too: no overfitting
        ((3.0, 2.9, 2.8, 2.7), True, None),
        ((3.0, 2.9, 2.5, 2.8), True, None),  # one evaluation is no trend
    ],
)
def test_overfitting(tmp_path: Path, evals: tuple[float, ...], train_falls: bool, severity: str | None) -> None:
    def evaluations(rank: int, step: int) -> list[dict[str, Any]]:
        return [{"kind": "eval", "eval/loss": evals[step // 10 - 1]}] if step % 10 == 0 else []

    losses = [3 - step / 50 if train_falls else 2 + step / 50 for step in range(1, 41)]
    settings = {**SETTINGS, "train.early_stop_patience": 0}
    found = findings(
        tmp_path, lambda rank, step: COMPUTE, fields_of=series(loss=losses), extra=evaluations, settings=settings
    )
    assert [(one.id, one.severity) for one in found] == ([("NUM05", severity)] if severity else [])
    if severity:
        assert found[0].patch == {"train.early_stop_patience": 3}
        assert "eval loss 2.5 at step 20" in found[0].evidence[0]


@pytest.mark.parametrize(("patience", "ids"), [(0, ["NUM05"]), (1, ["NUM05"]), (2, []), (3, [])])
def test_a_run_that_stops_by_itself_is_no_overfitting(tmp_path: Path, patience: int, ids: list[str]) -> None:
    evals = (3.0, 2.5, 2.6, 2.8)

    def evaluations(rank: int, step: int) -> list[dict[str, Any]]:
        return [{"kind": "eval", "eval/loss": evals[step // 10 - 1]}] if step % 10 == 0 else []

    found = findings(
        tmp_path,
        lambda rank, step: COMPUTE,
        fields_of=series(loss=[3 - step / 50 for step in range(1, 41)]),
        extra=evaluations,
        settings={**SETTINGS, "train.early_stop_patience": patience},
    )
    assert [one.id for one in found] == ids


def tap(step: int, *, dead: Mapping[str, float], updates: Mapping[str, float], skipped: bool = False) -> dict[str, Any]:
    return {
        "kind": "tap",
        "step": step,
        "skipped": skipped,
        "modules": {path: {"output": {"dead_frac": share}} for path, share in dead.items()},
        "parameters": {name: {"shape": [4, 4], "update_frac": share} for name, share in updates.items()}
        | {"bias": {"shape": [4], "update_frac": 9.0}, "frozen": {"shape": [4, 4]}},
    }


def every_tenth(event: Any) -> Any:
    return lambda rank, step: [event(step)] if step % 10 == 0 else []


@pytest.mark.parametrize(
    ("share", "severity"), [(lambda step: 0.6, "warning"), (lambda step: 0.95, "critical"), (lambda step: 0.3, None),
                            (lambda step: 0.95 if step < 30 else 0.1, None)],
)  # fmt: skip
def test_units_that_are_dead(tmp_path: Path, share: Any, severity: str | None) -> None:
    events = every_tenth(lambda step: tap(step, dead={"blocks.0.relu": share(step), "blocks.1": 0.0}, updates={}))
    found = findings(tmp_path, lambda rank, step: COMPUTE, extra=events)
    assert [(one.id, one.severity) for one in found] == ([("NUM06", severity)] if severity else [])
    if severity:
        assert found[0].evidence == (
            f"in steps 20, 30, 40, channels that are 0 for the whole batch: {share(40):.0%} of blocks.0.relu",
        )


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (lambda step: 2e-6, "low"),
        (lambda step: 0.4, "high"),
        (lambda step: 1e-3, None),
        (lambda step: 1e-3 if step == 10 else 1e-7, None),  # the end of a schedule
        (lambda step: 0.4 if step == 10 else 1e-3, None),  # its begin
    ],
)
def test_updates_that_are_too_small_or_large(tmp_path: Path, ratio: Any, text: str | None) -> None:
    events = every_tenth(lambda step: tap(step, dead={}, updates={"a": ratio(step), "b": ratio(step), "c": 0.02}))
    settings = {**SETTINGS, "optim.lr": 0.01}
    found = findings(tmp_path, lambda rank, step: COMPUTE, extra=events, settings=settings)
    assert [one.id for one in found] == (["NUM07"] if text else [])
    if text:
        assert found[0].title == f"the learning rate is too {text} for the weights"
        assert f"{ratio(40):.2g} of its norm, in 4 taps" in found[0].evidence[0]
        low, high = {"low": ("0.5", "50"), "high": ("2.5e-06", "0.00025")}[text]
        assert found[0].evidence[2] == f"optim.lr is 0.01; {low} to {high} is worth a try"


def test_taps_of_skipped_steps_do_not_count(tmp_path: Path) -> None:
    events = every_tenth(lambda step: tap(step, dead={"relu": 1.0}, updates={"a": 0.0}, skipped=True))
    assert findings(tmp_path, lambda rank, step: COMPUTE, extra=events) == []


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


def corrupt(**changes: Any) -> Any:
    """Rank 0 has written of silent corruption in step 7."""
    event = {
        "kind": "corruption",
        "source": "memory",
        "ranks": [1],
        "hosts": ["node-b"],
        "tensor": "model/a",
        "certain": True,
    }
    event |= {"evidence": "its bits changed", **changes}
    return lambda rank, step: [event] if (rank, step) == (0, 7) else []


def test_silent_corruption(tmp_path: Path) -> None:
    finding = only(tmp_path, lambda rank, step: COMPUTE, extra=corrupt())
    assert (finding.id, finding.ranks, finding.severity) == ("SDC01", (1,), "critical")
    assert finding.evidence == ("step 7, memory, model/a: its bits changed",)
    assert "test memory and devices of node-b" in finding.advice


def test_corruption_of_one_of_two_copies(tmp_path: Path) -> None:
    finding = only(tmp_path, lambda rank, step: COMPUTE, extra=corrupt(ranks=[1, 0], certain=False, source="replica"))
    assert (finding.ranks, finding.confidence) == ((0, 1), 0.7)
    assert finding.title == "silent corruption on one of several ranks"
    assert "three replicas" in finding.advice


@pytest.mark.parametrize(
    "damage",
    [
        {"ranks": "all", "hosts": 3, "tensor": None, "evidence": []},
        {"ranks": [-1, "x", 1 << 70, True, None], "hosts": [None, {}, ["a"]], "certain": "yes"},
        {"tensor": "x" * 10**5, "ranks": list(range(5000))},
    ],
)
def test_a_corruption_event_of_another_form_does_no_harm(tmp_path: Path, damage: dict[str, Any]) -> None:
    finding = only(tmp_path, lambda rank, step: COMPUTE, extra=corrupt(**damage))
    assert finding.id == "SDC01"
    assert all(len(text) < 2000 for text in finding.evidence)


def skip(loss: Any, **origin: Any) -> Any:
    """Step 7 was skipped, and rank 1 found its origin."""

    def events(rank: int, step: int) -> list[dict[str, Any]]:
        if step != 7:
            return []
        skipped = {"kind": "skipped_step", "loss": loss, "grad_norm": "NaN", "rank_loss": 1.0, "samples": [1, 2]}
        found = {"kind": "nonfinite", "reproduced": True, "value": "nan", "tensor": "", "layer": "", "operator": ""}
        return [skipped, *([found | {"samples": [4, 2], **origin}] if rank == 1 and origin else [])]

    return events


@pytest.mark.parametrize(
    ("origin", "evidence", "advice"),
    [
        (
            {"where": "input", "tensor": "image"},
            "input image; samples 4, 2",
            "mend or leave out these samples: their image",
        ),
        (
            {"where": "forward", "layer": "blocks.3.ffn", "operator": "aten.div.Tensor"},
            "aten.div.Tensor of blocks.3.ffn (forward); samples 4, 2",
            "look at blocks.3.ffn (aten.div.Tensor), whose inputs are finite",
        ),
        (
            {"where": "loss", "operator": "aten.log.default", "samples": []},
            "aten.log.default of the loss (loss)",
            "look at the objective (aten.log.default)",
        ),
        (
            {"where": "parameter", "tensor": "head.weight", "samples": []},
            "parameter head.weight",
            "the weights that the run",
        ),
    ],
)
def test_the_origin_of_a_step_that_is_no_number(tmp_path: Path, origin: dict, evidence: str, advice: str) -> None:
    finding = only(tmp_path, lambda rank, step: COMPUTE, extra=skip("NaN", **origin))
    assert (finding.id, finding.ranks, finding.confidence) == ("NUM01", (1,), 0.95)
    assert finding.evidence[1] == f"step 7, rank 1: the first nan is of {evidence}"
    assert finding.advice.startswith(advice)


def test_a_gradient_that_is_no_number(tmp_path: Path) -> None:
    origin = {"where": "backward", "layer": "norm", "operator": "aten.div.Tensor"}
    finding = only(tmp_path / "found", lambda rank, step: COMPUTE, extra=skip(2.0, **origin))
    assert (finding.id, finding.title) == ("NUM01", "the gradient is no number in some steps")
    assert findings(tmp_path / "scale", lambda rank, step: COMPUTE, extra=skip(2.0)) == []  # fp16 finds its loss scale


@pytest.mark.parametrize(
    ("loss", "eval_loss", "settings", "found"),
    [
        (lambda step: 4.0, 4.05, {}, True),
        (lambda step: 4.0, 4.05, {"model.pretrained": "x"}, False),
        (lambda step: 4.0, 5.0, {}, False),  # NUM05's, or other data
        (lambda step: 4.0 - min(step, 100) / 100, 3.0, {}, False),  # it has learned, and is flat now
        (lambda step: 4.0 - step / 400, 3.45, {}, False),  # it learns
    ],
)
def test_a_model_that_does_not_learn(tmp_path: Path, loss: Any, eval_loss: float, settings: dict, found: bool) -> None:
    losses = [loss(step) + noise - 2 for step, noise in enumerate(noisy(220), start=1)]
    events = lambda rank, step: [{"kind": "eval", "eval/loss": eval_loss}] if step % 50 == 0 else []  # noqa: E731
    result = findings(
        tmp_path,
        lambda rank, step: COMPUTE,
        steps=220,
        fields_of=series(loss=losses),
        extra=events,
        settings={**SETTINGS, **settings},
    )
    assert [one.id for one in result] == (["NUM08"] if found else [])


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
        (SETTINGS, {"checkpoint.every_steps": 500}, 0.09),
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


@pytest.mark.parametrize(("peak", "severity"), [(91, "warning"), (97, "critical")])
def test_memory_that_is_nearly_full(tmp_path: Path, peak: int, severity: str) -> None:
    plan = {"sync": {"kind": "local"}, "batch": {"micro_batch": 8}}
    memory = {"mem/peak_bytes": peak << 30, "mem/limit_bytes": 100 << 30}
    finding = only(tmp_path, lambda rank, step: COMPUTE, ranks=1, plan=plan, fields=memory)
    assert (finding.id, finding.severity, finding.patch) == ("MEM01", severity, {"plan.micro_batch": 4})
    assert f"{peak} of 100 GiB" in finding.evidence[0]


def test_a_smaller_micro_batch_divides_the_global_batch(tmp_path: Path) -> None:
    plan = {"sync": {"kind": "local"}, "batch": {"micro_batch": 9}}
    memory = {"mem/peak_bytes": 95 << 30, "mem/limit_bytes": 100 << 30}
    assert only(tmp_path, lambda rank, step: COMPUTE, ranks=1, plan=plan, fields=memory).patch == {
        "plan.micro_batch": 3
    }


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


def test_a_loss_that_is_no_number_has_a_rank_and_samples(tmp_path: Path) -> None:
    def extra(rank: int, step: int) -> list[dict[str, Any]]:
        own = math.nan if rank == 1 else 3.0
        row = {
            "kind": "skipped_step",
            "loss": math.nan,
            "grad_norm": math.nan,
            "rank_loss": own,
            "samples": [10 * rank, 10 * rank + 1],
        }
        return [row] if step == 7 else []

    finding = only(tmp_path, lambda rank, step: COMPUTE, extra=extra)
    assert (finding.id, finding.ranks, finding.severity) == ("NUM01", (1,), "warning")
    assert finding.evidence == (
        "1 of 40 steps were skipped: 7",
        "step 7: the losses of rank 1 alone sum to nan; its samples are 10, 11",
    )


def test_the_search_for_a_loss_scale_is_no_finding(tmp_path: Path) -> None:
    row = {"kind": "skipped_step", "loss": 3.0, "grad_norm": math.inf, "rank_loss": 3.0, "samples": []}
    assert findings(tmp_path, lambda rank, step: COMPUTE, extra=lambda rank, step: [row] if step < 9 else []) == []


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


def test_a_rank_that_becomes_slower(tmp_path: Path) -> None:
    def work(step: int) -> dict[int, dict[str, float]]:
        return {0: COMPUTE, 1: {**COMPUTE, "other": 0.005 + 0.025 * (step > 30)}}

    def times(rank: int, step: int) -> Mapping[str, float]:
        return together(work(step))(rank, step)

    finding = only(tmp_path, times, steps=62)  # BAL01 is of ranks that are slow all the time
    assert (finding.id, finding.ranks, finding.severity) == ("BAL02", (1,), "warning")
    assert finding.cost_frac == pytest.approx(0.25)
    assert "1.33 times as long" in finding.evidence[0]


def test_all_ranks_become_slower(tmp_path: Path) -> None:
    finding = only(tmp_path, lambda rank, step: {**COMPUTE, "backward": 0.04 + 0.075 * (step > 40)}, steps=62)
    assert (finding.id, finding.ranks, finding.severity) == ("BAL02", (), "critical")
    assert finding.cost_frac == pytest.approx(0.5)


def test_a_few_slow_steps_are_no_slowdown(tmp_path: Path) -> None:
    def times(rank: int, step: int) -> Mapping[str, float]:
        return {**COMPUTE, "backward": 0.04 + 0.2 * (step in (58, 60))}

    assert findings(tmp_path, times, steps=62) == []


@pytest.mark.parametrize(
    ("settings", "patch", "gain"),
    [
        ({"train.gc_every_steps": 0}, {"train.gc_every_steps": 100}, 0.1),
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


@pytest.mark.parametrize(
    ("reserved", "retries", "severity"), [(50, 0, None), (58, 0, "warning"), (58, 3, "critical"), (70, 0, "critical")]
)
def test_fragmented_device_memory(tmp_path: Path, reserved: int, retries: int, severity: str | None) -> None:
    def fields(rank: int, step: int) -> Mapping[str, Any]:
        gib = 2**30
        return {
            "mem/peak_bytes": 30 * gib if rank else 45 * gib,
            "mem/peak_reserved_bytes": reserved * gib,
            "mem/limit_bytes": 90 * gib,
            "mem/alloc_retries": retries * rank,
        }

    found = [
        finding for finding in findings(tmp_path, lambda rank, step: COMPUTE, fields_of=fields) if finding.id == "MEM02"
    ]
    assert [(finding.ranks, finding.severity) for finding in found] == ([((1,), severity)] if severity else [])


def test_a_retried_allocation_is_near_out_of_memory(tmp_path: Path) -> None:
    fields = {"mem/peak_bytes": 50, "mem/peak_reserved_bytes": 60, "mem/limit_bytes": 100, "mem/alloc_retries": 2}
    finding = only(tmp_path, lambda rank, step: COMPUTE, fields=fields)
    assert (finding.id, finding.severity) == ("MEM01", "critical")
    assert "2 allocations found no free memory at first" in finding.evidence
