from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from histories import history_of
from hypothesis import given
from hypothesis import strategies as st

from unisono.observe.formatting import (
    RunEndFacts,
    event_message,
    key_value_line,
    percent,
    run_verdict,
    status_lines,
    summary_lines,
)
from unisono.observe.run_summary import (
    decimate,
    duration,
    format_gib,
    short_number,
    short_time,
    sparkline,
    summarise,
    time_frac,
)

STEP: dict[str, Any] = {
    "kind": "step",
    "step": 120,
    "steps_total": 5000,
    "train/loss": 3.2109,
    "train/lr": 2.9e-4,
    "train/grad_norm": 0.812,
    "train/tokens_total": 983040,
    "train/skipped_steps": 0,
    "perf/step_s": 0.199,
    "perf/tokens_per_s": 41234.0,
    "perf/tokens_per_s_device": 5154.0,
    "perf/tflops_device": 12.3,
    "perf/mfu": 0.384,
    "time/data_wait_frac": 0.012,
    "time/comm_exposed_frac": 0.041,
    "time/ckpt_stall_frac": 0.0,
    "mem/peak_bytes": 71 * 2**30,
    "mem/limit_bytes": 80 * 2**30,
    "eta_s": 11520.0,
}


def test_status_line_in_full() -> None:
    assert status_lines(STEP, 300) == [
        "step 120/5000 2.4% | loss 3.211 | lr 2.90e-04 | gnorm 0.81 | 41.2k tok/s (5.15k/dev) | mfu 38% | "
        "data 1% comm exposed 4% ckpt 0% | mem peak 71 GiB of 80 GiB | eta 3h12"
    ]


def test_status_line_names_the_measured_ceiling_and_warnings() -> None:
    event = {name: value for name, value in STEP.items() if name != "perf/mfu"}
    event |= {"perf/matmul_ceiling_frac": 0.5, "train/skipped_steps": 2, "perf/tokens_per_s_device": 41234.0}
    (line,) = status_lines(event, 300, warnings=["DATA01", "DATA01", "MEM01"])
    assert "| 41.2k tok/s | 50% of matmul ceiling |" in line
    assert "| skipped 2 |" in line
    assert line.endswith("| warn DATA01 MEM01")


@given(st.integers(1, 200), st.integers(1, 3))
def test_status_fits_any_width(width: int, max_lines: int) -> None:
    lines = status_lines(STEP, width, max_lines=max_lines, warnings=["W1"])
    assert len(lines) <= max_lines
    assert all(len(line) <= width for line in lines)
    assert lines[0].startswith("step 120/5000"[:width])


def test_status_of_a_bare_event() -> None:
    assert status_lines({"kind": "step", "step": 3}, 80) == ["step 3"]
    assert status_lines({"kind": "step", "step": 3, "train/loss": "NaN", "eta_s": "Infinity"}, 80) == [
        "step 3 | loss nan | eta ?"
    ]


def test_key_value_line_has_units_in_its_names() -> None:
    assert key_value_line(STEP) == (
        "step=120 steps_total=5000 loss=3.2109 lr=0.00029 grad_norm=0.812 tokens_total=983040 skipped_steps=0 step_s=0.199 "
        "tokens_per_s=41234 tokens_per_s_device=5154 tflops_device=12.3 mfu=0.384 data_wait_frac=0.012 "
        "comm_exposed_frac=0.041 ckpt_stall_frac=0.000 mem_peak_bytes=76235669504 mem_limit_bytes=85899345920 eta_s=11520"
    )
    assert key_value_line({"kind": "step", "step": 1, "train/loss": math.nan}) == "step=1 loss=nan"


@pytest.mark.parametrize(
    ("event", "level", "text"),
    [
        (
            {"kind": "eval", "step": 5, "eval/loss": 1.25, "eval/bits_per_byte": 1.8034},
            "info",
            "eval step=5 loss=1.25 bits_per_byte=1.803",
        ),
        (
            {
                "kind": "run_start",
                "parameters": 3_030_000,
                "plan_text": "1 x cpu, fp32",
                "precision_why": "no bf16 unit",
            }
            | {"data": {"corpus": "stdlib", "train_tokens": 9.5e6}},
            "info",
            "3.03M parameters on 1 x cpu, fp32 (no bf16 unit); stdlib, 9.5M tokens",
        ),
        ({"kind": "run_start", "parameters": 12, "plan_text": "1 x cpu"}, "info", "12 parameters on 1 x cpu"),
        (
            {"kind": "run_start", "parameters": 31_100, "parameters_trained": 340, "plan_text": "1 x cpu"},
            "info",
            "31.1k parameters (340 trained) on 1 x cpu",
        ),
        (
            {"kind": "run_start", "parameters": 12, "parameters_trained": 12, "plan_text": "1 x cpu"},
            "info",
            "12 parameters on 1 x cpu",
        ),
        (
            {"kind": "run_start", "parameters": 12, "plan_text": "1 x cpu", "optimization": "sgd, lr 1 constant"},
            "info",
            "12 parameters on 1 x cpu; sgd, lr 1 constant",
        ),
        (
            {"kind": "run_start", "parameters": 12, "plan_text": "1 x cpu"}
            | {"held_bytes": {"parameters": 3 << 20, "gradients": 0, "optimizer": 5 << 30}},
            "info",
            "12 parameters on 1 x cpu; held here: parameters 3 MiB, gradients 0 MiB, optimizer 5 GiB",
        ),
        ({"kind": "compiled", "first_step_s": 12.0}, "info", "compiled: the first step took 12s"),
        ({"kind": "profile", "first_step": 4, "step": 6, "folder": "runs/a"}, "info", "profiled steps 4 to 6: runs/a"),
        (
            {"kind": "profile", "first_step": 4, "step": 6, "error": "ENOSPC"},
            "info",
            "steps 4 to 6 have no complete profile: ENOSPC",
        ),
        ({"kind": "resumed", "step": 7, "checkpoint": "/c/7"}, "info", "resumed at step 7 from /c/7"),
        (
            {"kind": "notice", "code": "S1", "what": "a", "why": "b", "cost": "c", "fix": "d"},
            "notice",
            "S1: a; why: b; cost: c; fix: d",
        ),
        ({"kind": "warning", "code": "D1", "message": "slow"}, "warning", "D1: slow"),
        (
            {"kind": "sink_failed", "sink": "csv", "error": "OSError: full"},
            "warning",
            "sink csv failed (OSError: full); it was detached; the events file is complete; training continues",
        ),
        (
            {"kind": "sink_failed", "sink": "events", "error": "OSError: full"},
            "warning",
            "sink events failed (OSError: full); events are lost until writing works again; training continues",
        ),
        (
            {"kind": "checkpoint_failed", "step": 9, "error": "disk full"},
            "warning",
            "checkpoint at step 9 failed: disk full; the one before stays valid",
        ),
        (
            {"kind": "checkpoint_upload_failed", "step": 9, "error": "OSError: no network"},
            "warning",
            "upload of the checkpoint of step 9 failed: OSError: no network; it is in the run's folder",
        ),
        (
            {"kind": "checkpoint_downloaded", "step": 9, "path": "runs/a/checkpoints/step-00000009"},
            "info",
            "checkpoint of step 9 downloaded to runs/a/checkpoints/step-00000009",
        ),
        (
            {"kind": "checkpoint_quarantined", "checkpoint": "step-9", "reason": "digest of a.bin"},
            "warning",
            "checkpoint step-9 is damaged and was quarantined: digest of a.bin",
        ),
        (
            {"kind": "data_skipped", "step": 4, "samples": [7, 12, 40, 41, 42, 43]},
            "warning",
            "step 4: samples 7, 12, 40, 41, 42, … could not be read and weigh 0; further ones are in the event log",
        ),
        (
            {"kind": "skipped_step", "step": 4, "reason": "loss is NaN"},
            "warning",
            "step 4 skipped on all ranks: loss is NaN",
        ),
        (
            {"kind": "skipped_step", "step": 4, "loss": "NaN", "grad_norm": math.inf},
            "warning",
            "step 4 skipped on all ranks: loss nan, gradient norm inf",
        ),
        (
            {"kind": "resumed", "step": 7, "path": "/c/7", "differences": ["torch 2.13 -> 2.14", "cpu"]},
            "info",
            "resumed at step 7 from /c/7; later steps are not those of the saved run: torch 2.13 -> 2.14; cpu",
        ),
        (
            {"kind": "resumed", "step": 7, "path": "/c/7", "differences": [f"{name} is new" for name in "abcdefgh"]},
            "info",
            "resumed at step 7 from /c/7; later steps are not those of the saved run: "
            "a is new; b is new; c is new; d is new; e is new; "
            "3 more, in the event log",
        ),
        (
            {
                "kind": "compression",
                "asked": "auto",
                "codec": "none",
                "why": "no compression: 3 s with bf16, 2 without",
            },
            "notice",
            "compression auto: no compression: 3 s with bf16, 2 without",
        ),
        ({"kind": "servers", "message": "server 0 has lost 3 pushes"}, "warning", "server 0 has lost 3 pushes"),
        (
            {"kind": "early_stop", "step": 4, "best_loss": 1.25, "loss": 2.0, "patience": 3},
            "info",
            "stopped early at step 4: no eval loss below 1.25 in 3 evaluations",
        ),
        (
            {"kind": "corruption", "step": 4, "ranks": [1], "tensor": "model/a", "evidence": "its bits changed"},
            "warning",
            "step 4: silent corruption in model/a of rank 1: its bits changed",
        ),
        (
            {"kind": "corruption", "step": 4, "ranks": 7},
            "warning",
            "step 4: silent corruption in ? of rank ?: ?",
        ),
        (
            {"kind": "run_end", "step": 4, "reason": "failed", "error": "NumericsError", "message": "20 steps\n rule"},
            "warning",
            "the run failed at step 4: NumericsError: 20 steps",
        ),
        (
            {"kind": "preempt", "step": 4, "signal": "SIGTERM"},
            "warning",
            "stopping at step 4 on SIGTERM; the state is being saved",
        ),
        (
            {"kind": "early_stop", "step": 4, "best_loss": None, "loss": "NaN", "patience": 3},
            "info",
            "stopped early at step 4: no eval loss that is finite in 3 evaluations",
        ),
        ({"kind": "early_stop", "step": 4, "reason": "no gain"}, "info", "stopped early at step 4: no gain"),
        ({"kind": "events_lost", "lines": 3}, "warning", "3 event(s) could not be written and are lost"),
    ],
)
def test_messages(event: dict[str, Any], level: str, text: str) -> None:
    said = event_message(event)
    assert said is not None
    assert (said.level, said.text) == (level, text)


def test_messages_are_printable_and_unknown_kinds_quiet() -> None:
    said = event_message({"kind": "warning", "code": "\x1b[2J", "message": "a\x1b]0;x\x07b\nc"})
    assert said is not None
    assert said.text == r"\x1b[2J: a\x1b]0;x\x07b c"
    assert event_message({"kind": "checkpoint_saved", "step": 3}) is None
    assert event_message({"kind": "anything"}) is None
    assert event_message({"kind": "run_start", "steps_total": 3}) is None
    assert event_message({"kind": "compiled"}) is None
    assert event_message({"kind": "profile"}) is None
    assert event_message({"kind": "compression", "asked": "int8", "codec": "int8", "why": "as asked"}) is None
    assert event_message({"kind": "run_end", "step": 3, "reason": "finished"}) is None


def history(**last: Any) -> list[dict[str, Any]]:
    envelope = {"run": "r", "rank": 0, "attempt": 1}
    events: list[dict[str, Any]] = [{"kind": "run_start", "m": 100.0, "steps_total": 4} | envelope]
    for step, loss in enumerate((4.0, 3.0, 2.5, 2.0), start=1):
        events.append(
            {
                "kind": "step",
                "m": 100.0 + step,
                "step": step,
                "train/loss": loss,
                "perf/step_s": float(step),
                "perf/tokens_per_s": 100.0 * step,
                "perf/tokens_per_s_device": 50.0 * step,
                "perf/mfu": 0.1 * step,
                "time/forward_frac": 0.5,
                "time/other_frac": 0.1 * step,
                "mem/peak_bytes": step * 2**30,
                "train/tokens_total": 1000 * step,
            }
            | envelope
        )
    events.append({"kind": "eval", "m": 105.0, "step": 4, "eval/loss": 2.2, "eval/bits_per_byte": 3.1739} | envelope)
    return [*events, {"kind": "run_end", "m": 106.5, "step": 4, **last} | envelope]


def test_shares_are_of_the_time_of_the_readings() -> None:
    """An evaluation makes one reading long, and the mean time of a step does not have it."""
    step = {"kind": "step", "attempt": 1, "perf/step_s": 1.0}
    short = {"time/window_s": 1.0, "time/forward_frac": 1.0, "time/eval_frac": 0.0}
    long = {"time/window_s": 100.0, "time/forward_frac": 0.01, "time/eval_frac": 0.99}
    events = [{**step, "step": number, **(long if number == 50 else short)} for number in range(1, 101)]
    assert time_frac(history_of(events)) == pytest.approx({"forward": 100 / 199, "eval": 99 / 199})


def test_summary_of_a_finished_run() -> None:
    summary = summarise(history_of(history(reason="finished")))
    assert (summary.state, summary.steps, summary.steps_total, summary.attempts) == ("finished", 4, 4, 1)
    assert summary.train_loss == 2.0
    assert summary.eval_metrics == {"loss": 2.2, "bits_per_byte": 3.1739}
    assert (summary.tokens_per_s, summary.tokens_per_s_device, summary.step_s) == (250.0, 125.0, 2.5)
    assert summary.utilization == ("mfu", 0.25)
    assert summary.peak_bytes == 4 * 2**30
    assert summary.wall_s == 6.5
    # weighted by step time: (1*0.1 + 2*0.2 + 3*0.3 + 4*0.4) / 10
    assert summary.time_frac == pytest.approx({"forward": 0.5, "other": 0.3})
    assert run_verdict(summary) == (
        "Finished 4 of 4 steps in 6.5s, train loss 2, eval loss 2.2, 3.174 bits per byte, 250 tokens/s"
    )


def test_summary_rows() -> None:
    facts = RunEndFacts(
        sample_text="a\n\tb\x1b[31m\n", best=(0.25, 2, Path("r/step-2")), next_commands=("unisono generate",)
    )
    assert summary_lines(summarise(history_of(history(reason="finished"))), facts, 80) == [
        ("result", "Finished 4 of 4 steps in 6.5s, train loss 2, eval loss 2.2, 3.174 bits per byte, 250 tokens/s"),
        ("speed", "250 tokens/s (125 per device), 2.5 s per step, MFU 25%, peak memory 4 GiB"),
        ("time", "forward 50%, other 30%"),
        ("loss", "█▅▃▁  4 -> 2"),
        ("sample", "| a"),
        ("sample", r"|     b\x1b[31m"),
        ("best", "the lowest eval loss of a checkpoint, 0.25, was at step 2: r/step-2"),
        ("best", "unisono eval and unisono checkpoint export take it with --best"),
        ("try next", "unisono generate"),
    ]


def test_summary_names_links_and_their_speed() -> None:
    link = {"peer": "n1:4711", "sent_bytes_per_s": 41.2e6, "received_bytes_per_s": 999.0}
    told = {"kind": "links", "step": 4, "links": [link], "run": "r", "rank": 0, "attempt": 1, "m": 104.5}
    rows = summary_lines(summarise(history_of([*history(reason="finished"), told])), RunEndFacts(), 80)
    assert ("link", "n1:4711: sent 41.2MB/s, received 999B/s") in rows
    told = told | {"links": [link | {"used_frac": 0.123}]}
    rows = summary_lines(summarise(history_of([*history(reason="finished"), told])), RunEndFacts(), 80)
    assert ("link", "n1:4711: sent 41.2MB/s, received 999B/s, 12% of what doctor --bench measured") in rows


def test_summary_names_the_axes_of_the_mesh_and_their_speed() -> None:
    rows = [
        {"axis": "dp", "group": "all", "transport": "gloo", "wire_bytes_per_s": 9.0},
        {"axis": "dp", "group": "shard", "transport": "gloo", "wire_bytes_per_s": 41.2e6, "used_frac": 0.123},
        {"axis": "tp", "group": "tp", "transport": "nccl", "wire_bytes_per_s": 1e9},
    ]
    told = {"kind": "links", "step": 4, "links": [], "axes": rows, "run": "r", "rank": 0, "attempt": 1, "m": 104.5}
    shown = summary_lines(summarise(history_of([*history(reason="finished"), told])), RunEndFacts(), 80)
    assert [text for label, text in shown if label == "link"] == [
        "dp (shard, gloo): 41.2MB/s on the wire, 12% of what doctor --bench measured",
        "tp (nccl): 1GB/s on the wire",
    ]


@pytest.mark.parametrize(
    ("events", "state"),
    [
        (history(reason="finished"), "finished"),
        (history(error="boom"), "failed"),
        (history()[:-1], "interrupted"),
        ([*history()[:-1], {"kind": "preempt", "m": 106.0, "step": 4, "attempt": 1}], "preempted"),
        (
            [*history()[:-1], {"kind": "early_stop", "m": 106.0, "step": 4, "attempt": 1}, history()[-1]],
            "stopped early",
        ),
        ([*history(), {"kind": "run_start", "m": 200.0, "attempt": 2}], "interrupted"),
        ([], "interrupted"),
    ],
)
def test_how_a_run_ended(events: list[dict[str, Any]], state: str) -> None:
    assert summarise(history_of(events)).state == state
    assert run_verdict(summarise(history_of(events)))


def test_wall_time_sums_attempts_not_the_gap_between() -> None:
    gap = {"kind": "run_start", "m": 9.0, "attempt": 2}, {"kind": "resumed", "step": 4, "m": 12.0, "attempt": 2}
    summary = summarise(history_of([*history(), *gap]))  # the second machine booted later: its clock starts anew
    assert summary.wall_s == 6.5 + 3.0
    assert summary.attempts == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999.7, "1k"),
        (41234, "41.2k"),
        (1500000.0, "1.5M"),
        (2000000000.0, "2G"),
        (0.00123, "0.00123"),
        (-50000.0, "-50k"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_short(value: float, text: str) -> None:
    assert short_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0s"),
        (9.94, "9.9s"),
        (9.96, "10s"),
        (59.6, "1m00"),
        (187, "3m07"),
        (11520, "3h12"),
        (187200, "2d04h"),
        (-3, "0.0s"),
        (math.inf, "?"),
        (3599.7, "1h00"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("fraction", "text"), [(0, "0%"), (0.004, "0.4%"), (0.012, "1%"), (0.384, "38%"), (1.0, "100%"), (math.nan, "?")]
)
def test_percent(fraction: float, text: str) -> None:
    assert percent(fraction) == text


def test_short_time() -> None:
    assert [short_time(seconds) for seconds in (0.0123, 0.125, 0.9996, 2.5, 61.0)] == [
        "12.3 ms",
        "125 ms",
        "1 s",
        "2.5 s",
        "61 s",
    ]


def test_gib() -> None:
    assert format_gib(2**30) == "1 GiB"
    assert format_gib(2**20 * 12) == "12 MiB"
    assert format_gib(80e9) == "74.5 GiB"
    assert format_gib(1213.4 * 2**30) == "1,213 GiB"


def test_sparkline() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([3, 3, 3], 10) == "▁▁▁"
    assert sparkline([0, math.nan, 7], 3) == "▁!█"
    assert sparkline([math.nan], 3) == "!"
    assert sparkline([], 5) == sparkline([1.0], 0) == ""
    assert sparkline([0, 7], 5, ascii_only=True) == "_#"


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=60), st.integers(-1, 20))
def test_sparkline_never_exceeds_its_width(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) <= max(0, width)


def test_decimate_keeps_spikes_gaps_and_ends() -> None:
    values = np.ones(10_000)
    values[[4321, 7777, 1234]] = 99.0, -5.0, math.nan
    kept = decimate(values, 200).tolist()
    assert len(kept) <= 200
    assert {0, 4321, 7777, 1234, 9999} <= set(kept)
    assert kept == sorted(set(kept))
    assert decimate(values[:50], 200).tolist() == list(range(50))
