"""One table of names: what runs emit is in it, what is in it is emitted, and the page has it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from pool import Pool

from unisono.device.health import DeviceHealth
from unisono.dist import World
from unisono.observe.events import EventLog, read_events
from unisono.observe.metric_names import GROUPS, METRIC_NAMES, find_metric, markdown_table
from unisono.observe.system_monitor import SystemMonitor
from unisono.observe.tracked import TRACKED, event_metrics
from unisono.train.objectives import next_token

ROOT = Path(__file__).parents[2]
EMITTERS = (
    "train/metrics_reader.py",
    "train/evaluate.py",
    "observe/meters.py",
    "measure/flops.py",
    "observe/system_monitor.py",
)
DEVICE = DeviceHealth(
    util_frac=0.5,
    power_w=300.0,
    power_limit_w=400.0,
    temperature_c=60.0,
    clock_hz=1e9,
    max_clock_hz=2e9,
    memory_bytes=1 << 30,
    slowdowns=("power brake",),
    corrected_errors=1,
    uncorrected_errors=0,
)
PAGE = ROOT / "docs" / "trackers.md"


def two_losses(outputs: torch.Tensor, batch: dict) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    loss, weight = next_token(outputs, batch)
    return {"text": 0.25 * loss, "rest": 0.75 * loss}, weight


def emitting(world: World, run_dir: str) -> None:
    with tiny.trainer(
        run_dir,
        world=world,
        steps=4,
        dp_shard=2,
        objective=two_losses,
        eval_data=tiny.RaggedTokens(7),
        metrics=["token_accuracy", "perplexity"],
        gradient_stats_every_steps=2,
        observe=replace(tiny.QUIET, taps=("blocks.*@2",)),
    ) as run:
        for _ in run:
            pass
        run.evaluate()


def test_every_number_of_a_run_is_in_the_table(pool: Pool, tmp_path: Path) -> None:
    pool.run(emitting, str(tmp_path / "run"), ranks=2)
    events = tiny.events(tmp_path / "run")
    with EventLog(tmp_path / "system.jsonl", rank=0, run_id="r", attempt=1) as log:
        readers = {"cpu": DEVICE.figures, "own": lambda: {"fan_hz": 30.0}}
        monitor = SystemMonitor(log, every_s=0.05, step=lambda: 1, with_host=True, readers=readers)
        while not (tmp_path / "system.jsonl").stat().st_size:
            torch.zeros(1000).sum()
        monitor.close()
    events += read_events(tmp_path / "system.jsonl").events
    emitted = {
        (event["kind"], name)
        for event in events
        if event["kind"] in TRACKED
        for name in event_metrics(event)
        if name not in ("samples", "samples_total")
    }
    assert len(emitted) > 30
    for kind, name in sorted(emitted):
        entry = find_metric(name)
        assert entry is not None, f"{name} of {kind} events is not in observe/metric_names.py"
        assert entry.kind == kind
    found = {find_metric(name) for _, name in emitted}
    missing = {entry.name for entry in METRIC_NAMES if entry not in found}
    # of other plans, and of devices whose speed is known
    assert {name for name in missing if not name.startswith("time/comm_exposed_")} <= {
        *("perf/tflops_device", "perf/mfu", "perf/matmul_ceiling_frac", "perf/step_s", "perf/tokens_per_s"),
        *("mem/peak_reserved_bytes", "mem/alloc_retries"),
        "perf/tokens_per_s_device",
        "comm/<axis>_used_frac",  # of links that were measured
        *(() if Path("/proc/self/schedstat").exists() else ("sys/core_wait_frac",)),
    }


def test_every_name_of_the_table_is_in_the_code_that_emits_it() -> None:
    text = "".join((ROOT / "src" / "unisono" / file).read_text() for file in EMITTERS)
    for entry in METRIC_NAMES:
        made = entry.name.startswith(("time/", "sys/")) or "<" in entry.name or entry.name == "eval/loss"
        assert made or f'"{entry.name}"' in text, entry.name
    literals = set(re.findall(r'"((?:train|eval|perf|mem|time|sys)/[a-z0-9_/]+)"', text))
    assert literals - {entry.name for entry in METRIC_NAMES} == set()


def test_names_are_plain_and_of_one_meaning() -> None:
    names = [entry.name for entry in METRIC_NAMES]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9_]+(/([a-z0-9_]|<[a-z]+>)+)+", name) for name in names)
    for entry in METRIC_NAMES:
        for suffix, unit in (("_s", "s"), ("_bytes", "bytes"), ("_frac", "1")):
            if entry.name.endswith(suffix) and not entry.name.endswith("_per_s"):
                assert entry.unit == unit, entry.name


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("train/loss", "train/loss"),
        ("train/loss/text", "train/loss/<name>"),
        ("eval/loss", "eval/loss"),
        ("eval/confusion:2/0", "eval/<metric>"),
        ("time/comm_exposed_tp_frac", "time/comm_exposed_tp_frac"),
        ("sys/device_util_frac", "sys/device_util_frac"),
        ("comm/dp_used_frac", "comm/<axis>_used_frac"),
        ("sys/device_fan_hz", "sys/device_<figure>"),
        ("train/lossy", None),
        ("own/loss", None),
    ],
)
def test_a_name_is_looked_up(name: str, entry: str | None) -> None:
    found = find_metric(name)
    assert (found.name if found else None) == entry


def test_a_users_numbers_have_other_first_parts() -> None:
    assert {"train", "eval", "perf", "mem", "time", "comm", "tap", "sys"} == GROUPS


def test_the_page_has_the_table() -> None:
    assert markdown_table() in PAGE.read_text(), (
        "python -c 'from unisono.observe.metric_names import markdown_table as t; print(t())' prints it"
    )
