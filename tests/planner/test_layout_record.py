"""What runs took, by their layouts: what comes back from the file, what a search learns of it, and which layout a run has."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unisono.config import load_config
from unisono.errors import PlanError
from unisono.planner.cluster_file import ClusterOptions, TflopsOptions, as_cluster
from unisono.planner.decision_flips import sensitivity
from unisono.planner.devices import DEVICES
from unisono.planner.layout import Layout
from unisono.planner.layout_record import MeasuredLayout, learned_factors, predicted_steps_s
from unisono.planner.layout_space import Job, Space
from unisono.planner.layout_strategy import plan_of
from unisono.planner.learned import Learned
from unisono.planner.model_presets import PRESETS
from unisono.planner.plan_record import PlanRecord, add_to_plan_record, read_plan_record
from unisono.planner.run_layout import layout_of_run
from unisono.planner.search import choose, compare
from unisono.planner.simulate import predict
from unisono.planner.stage_blocks import blocks_per_stage
from unisono.train.config import RunConfig

MODEL = PRESETS["llama-3-8b"]
H100 = DEVICES["h100"]
JOB = Job(model=MODEL, device=H100, num_devices=16, precision="bf16", global_batch=64, seq_len=8192, pins={})
BOX = as_cluster(
    ClusterOptions(
        device="mine", num_devices=4, devices_per_domain=4, memory_gib=24, memory_tb_per_s=1, link_gb_per_s=20,
        tflops=TflopsOptions(bf16=100),
    ),
    place="box",
).device  # fmt: skip


def layout(**changes: Any) -> Layout:
    values: dict[str, Any] = {"model": MODEL, "device": H100, "precision": "bf16", "num_devices": 16}
    return Layout(**{**values, "global_batch": 64, "seq_len": 8192, "zero": 3, "cut": "balanced", **changes})


def run(ratio: float = 1.0, **changes: Any) -> MeasuredLayout:
    """A run that took ``ratio`` times as long as predicted."""
    more = {name: changes.pop(name) for name in ("data_wait_frac", "at_s") if name in changes}
    made = layout(**changes)
    step_s = ratio * predict([made])[0].step_s
    return MeasuredLayout(**{"layout": made, "step_s": step_s, "steps": 20, "data_wait_frac": 0.0, "at_s": 1.0, **more})


RUNS = [run(1.2, micro_batch=1), run(1.3, micro_batch=2), run(1.4, micro_batch=4)]
TENSOR = [run(ratio, tp=8, micro_batch=size) for ratio, size in ((3.0, 1), (3.2, 2), (2.8, 4))]


def test_layouts_come_back_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "plan_record.json"
    partial = replace(
        run(), layout=layout(pp=2, stages_per_rank=1, schedule="1f1b", recompute="partial", recomputed_blocks=(3, 1))
    )
    unlimited = replace(run(), layout=layout(device=BOX, num_devices=4, global_batch=8), at_s=2.0)
    assert math.isinf(unlimited.layout.device.network_bytes_per_s)
    add_to_plan_record(path, layouts=[partial])
    add_to_plan_record(path, layouts=[unlimited])
    assert read_plan_record(path) == PlanRecord(layouts=(partial, unlimited))


def changed(**changes: Any) -> dict[str, Any]:
    return {**asdict(RUNS[0]), **changes}


@pytest.mark.parametrize(
    "wrong",
    [
        *(None, 3, [], {}, changed(step_s=0), changed(step_s=math.nan), changed(step_s="1"), changed(steps=0)),
        *(changed(data_wait_frac=2), changed(at_s=-1), changed(layout=None), changed(step_s=math.inf)),
        changed(layout={**asdict(RUNS[0].layout), "tp": 3}),
        changed(layout={**asdict(RUNS[0].layout), "precision": "fp4"}),
    ],
)
def test_a_wrong_entry_costs_only_itself(tmp_path: Path, wrong: Any) -> None:
    path = tmp_path / "plan_record.json"
    path.write_text(json.dumps({"version": 1, "predictions": [], "runs": [], "layouts": [wrong, asdict(RUNS[0])]}))
    assert read_plan_record(path) == PlanRecord(layouts=(RUNS[0],))


@pytest.mark.parametrize("change", [{"hidden": 10**400}, {"layers": 0}, {"vocab": -(10**9), "heads": 0}])
def test_numbers_that_no_model_has_teach_nothing_and_cost_no_other_run(change: dict[str, Any]) -> None:
    odd = replace(RUNS[0], layout=replace(RUNS[0].layout, model=replace(MODEL, **change)))
    predicted = predicted_steps_s([odd.layout, RUNS[1].layout])
    assert predicted[1] == pytest.approx(RUNS[1].step_s / 1.3)
    assert learned_factors([odd] * 3, MODEL, H100).of(()) == Learned()
    assert learned_factors([odd, *RUNS], MODEL, H100).of(("dp",)) == Learned(factor=pytest.approx(1.3), runs=3)


def test_runs_with_the_same_axes_teach_before_others() -> None:
    learned = learned_factors([*RUNS, *TENSOR], MODEL, H100)
    assert learned.of(("dp",)) == Learned(factor=pytest.approx(1.3), runs=3)
    assert learned.of(("dp", "tp")) == Learned(factor=pytest.approx(3.0), runs=3)
    assert learned.of(("dp", "pp")) == Learned(factor=pytest.approx(2.1), runs=6)
    assert learned_factors(RUNS[:2], MODEL, H100).of(("dp",)) == Learned()
    assert learned_factors([RUNS[0]] * 5, MODEL, H100).of(("dp",)) == Learned()  # of one layout


def test_runs_on_other_devices_of_other_sizes_or_that_waited_teach_nothing() -> None:
    other = [replace(each, layout=replace(each.layout, device=DEVICES["h200"])) for each in RUNS]
    small = [replace(each, layout=replace(each.layout, model=PRESETS["llama-3.2-1b"])) for each in RUNS]
    waited = [replace(each, data_wait_frac=0.2) for each in RUNS]
    for runs in (other, small, waited):
        assert learned_factors(runs, MODEL, H100).of(("dp",)) == Learned()
    alike = [replace(each, layout=replace(each.layout, model=PRESETS["mistral-7b"])) for each in RUNS]
    assert learned_factors(alike, MODEL, H100).of(("dp",)).runs == 3


def test_steps_are_predicted_again_for_the_device_as_it_is_described_now() -> None:
    slower = replace(H100, efficiency=0.6)
    then, now = (learned_factors(RUNS, MODEL, device).of(("dp",)).factor for device in (H100, slower))
    assert now < then / 1.05
    without_bf16 = replace(H100, tflops={"fp16": 900.0})
    assert learned_factors(RUNS, MODEL, without_bf16).of(("dp",)) == Learned()


def test_a_search_multiplies_what_it_predicts_and_avoids_what_was_slow() -> None:
    learning = replace(JOB, learned=learned_factors([*RUNS, *TENSOR], MODEL, H100))
    before, after = compare(JOB), compare(learning)
    without = {
        str(replace(each, learned_factor=1.0)): step_s
        for each, step_s in zip(before.layouts, before.step_s, strict=True)
    }
    factors = [learning.learned.of(each.shared_axes).factor for each in after.layouts]
    assert len(set(factors)) >= 3
    expected = [
        without[str(replace(each, learned_factor=1.0))] * factor
        for each, factor in zip(after.layouts, factors, strict=True)
    ]
    np.testing.assert_allclose(after.step_s, expected, rtol=1e-9)
    best = choose(learning, after).best
    assert best is not None
    prediction = predict([best.layout])[0]
    assert sum(prediction.parts_s.values()) == pytest.approx(best.step_s)

    slow = replace(
        JOB, learned=learned_factors([run(9.0, tp=1, micro_batch=size) for size in (1, 2, 4)] + TENSOR, MODEL, H100)
    )
    chosen, unlearned = choose(slow, compare(slow)).best, choose(JOB, before).best
    assert unlearned is not None
    assert chosen is not None
    assert unlearned.layout.tp == 1
    assert chosen.layout.shared_axes == ("dp", "tp")


def test_fewer_devices_and_changed_links_are_corrected_alike() -> None:
    learning = replace(JOB, learned=learned_factors(RUNS, MODEL, H100))
    plain, corrected = sensitivity(JOB, compare(JOB)), sensitivity(learning, compare(learning))
    for one, other in zip(plain.device_counts, corrected.device_counts, strict=True):
        assert one.best is not None
        assert other.best is not None
        assert other.best.step_s == pytest.approx(1.3 * one.best.step_s)
    for one, other in zip(plain.perturbations, corrected.perturbations, strict=True):
        assert (one.best is None) == (other.best is None)
        if one.best is not None and other.best is not None:
            assert other.best.step_s == pytest.approx(1.3 * one.best.step_s)


# --- which layout a run has -----------------------------------------------------------------------------------------

SIZES = (
    "model.num_layers=8",
    "model.dim=256",
    "model.num_heads=8",
    "model.num_kv_heads=8",
    "data.seq_len=64",
    "model.tied=false",
)


def config(*settings: str) -> RunConfig:
    return load_config(RunConfig, overrides=[*SIZES, *settings]).value


def test_the_plan_of_each_layout_leads_back_to_it() -> None:
    plain = config()
    start = layout_of_run(plain, plan_of(layout(num_devices=1, zero=0, dp_shard=1, global_batch=8)), H100, 512)
    assert start is not None
    assert (start.model.layers, start.model.hidden, start.model.vocab, start.seq_len) == (8, 256, 512, 64)
    job = replace(JOB, model=start.model, num_devices=8, global_batch=32, seq_len=64)
    found = [each for each in Space(job).layouts if each.num_micro_batches.is_integer()]
    assert {each.schedule for each in found} >= {None, "1f1b", "interleaved", "zbv"}
    seen = 0
    for each in found:
        try:
            plan = plan_of(each)
        except PlanError:
            continue
        assert layout_of_run(plain, plan, H100, 512) == each
        seen += 1
    assert seen > 100


@pytest.mark.parametrize(
    "setting",
    [
        *("optim.kind=sgd", "train.ema_decay=0.9", "observe.verify_every_steps=1", "optim.freeze=['norm*']"),
        "quantize.scheme=int8",
    ],
)
def test_a_step_that_does_other_work_has_no_layout(setting: str) -> None:
    plan = plan_of(layout(num_devices=1, zero=0, dp_shard=1, global_batch=8))
    assert layout_of_run(config(), plan, H100, 512) is not None
    other = config(setting)
    assert layout_of_run(other, plan, H100, 512) is None


def test_another_cut_of_the_stages_is_a_given_one_and_precisions_without_a_peak_have_no_layout() -> None:
    plan = plan_of(layout(model=replace(MODEL, layers=8), num_devices=2, pp=2, stages_per_rank=1, schedule="1f1b", zero=0,
                          dp_shard=1, global_batch=8))  # fmt: skip
    uneven = plan.updated(pipeline={"layers_per_stage": (2, 6)})
    found = layout_of_run(config(), uneven, H100, 512)
    assert found is not None
    assert (found.cut, found.layers_per_stage) == ("given", (2, 6))
    balanced = replace(found, cut="balanced", layers_per_stage=())
    same = plan.updated(pipeline={"layers_per_stage": blocks_per_stage(balanced)})
    assert layout_of_run(config(), same, H100, 512) == balanced
    assert predicted_steps_s([found]) > predicted_steps_s([balanced])
    assert layout_of_run(config(), plan.updated(pipeline={"layers_per_stage": (2, 7)}), H100, 512) is None
    assert layout_of_run(config(), plan.updated(precision={"compute": "fp32"}), H100, 512) is None
