"""The record of predicted and measured steps: what comes back, what is left out, and what is learned of it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from unisono.config import load_config
from unisono.dist import JobSpec
from unisono.observe.events import EventLog
from unisono.observe.history import read_history
from unisono.plan.options import PlanOptions
from unisono.plan.plan import Plan
from unisono.planner.learned import Learned
from unisono.planner.plan_record import (
    Machine,
    MeasuredRun,
    PlanPrediction,
    PlanRecord,
    SteadySteps,
    add_to_plan_record,
    measured_run,
    plan_digest,
    read_plan_record,
    used_axes,
    work_digest,
)
from unisono.train.config import RunConfig
from unisono.train.settings import function_name
from unisono.train.setup import resolve_plan

HERE = Machine(host="a", device="EPYC", torch="2.13.0+cpu")
PREDICTED = PlanPrediction(
    machine=HERE,
    plan="p",
    work="w",
    words="2 x cpu, tp 2",
    axes=("tp",),
    ranks=2,
    step_s=0.5,
    parts_s={"work": 0.4, "tp": 0.1},
    peak_bytes=1000,
    at_s=1.0,
)
RUN = MeasuredRun(predicted=PREDICTED, step_s=0.6, steps=20, data_wait_frac=0.0, peak_bytes=None, at_s=2.0)


def test_entries_come_back_and_a_later_prediction_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "plan_record.json"
    assert read_plan_record(path) == PlanRecord()
    add_to_plan_record(path, predictions=[PREDICTED], runs=[RUN])
    again, other = replace(PREDICTED, step_s=0.7, at_s=9.0), replace(PREDICTED, work="v", at_s=5.0)
    add_to_plan_record(path, predictions=[again, other], runs=[RUN])
    known = read_plan_record(path)
    assert known == PlanRecord(predictions=(other, again), runs=(RUN, RUN))
    assert known.predicted(HERE, "p", "w") == again
    for machine in (replace(HERE, host="b"), replace(HERE, torch="2.13.1"), replace(HERE, predictor=9)):
        assert known.predicted(machine, "p", "w") is None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def prediction(**changes: Any) -> dict[str, Any]:
    return {**asdict(PREDICTED), **changes}


@pytest.mark.parametrize(
    "wrong",
    [
        *(None, 3, "x", [], {}, {"plan": "p"}, prediction(step_s=0), prediction(step_s=-1), prediction(step_s="1")),
        *(prediction(step_s=1e300), prediction(parts_s={"work": -1}), prediction(parts_s=[]), prediction(axes="tp")),
        *(prediction(machine={}), prediction(peak_bytes=-5), prediction(ranks=0), prediction(words="\ud800")),
        *(prediction(peak_bytes=10**400), prediction(ranks=10**400), prediction(parts_s={"work": float("nan")})),
    ],
)
def test_a_wrong_entry_costs_only_itself(tmp_path: Path, wrong: Any) -> None:
    path = tmp_path / "plan_record.json"
    of_wrong = {**asdict(RUN), "predicted": wrong}
    content = {"version": 1, "predictions": [wrong, prediction(later=1)], "runs": [of_wrong, wrong, asdict(RUN)]}
    path.write_text(json.dumps(content))
    assert read_plan_record(path) == PlanRecord(predictions=(PREDICTED,), runs=(RUN,))
    add_to_plan_record(path, runs=[replace(RUN, at_s=3.0)])
    assert len(json.loads(path.read_text())["runs"]) == 2


@pytest.mark.parametrize(
    "content",
    ["", "not json", "null", "[]", "{", "NaN", "[" * 5000, '{"version": 2}', '{"version": 1, "runs": {}}', "\0\1"],
)
def test_a_file_that_is_none_is_empty_and_is_replaced(tmp_path: Path, content: str) -> None:
    path = tmp_path / "plan_record.json"
    path.write_text(content)
    assert read_plan_record(path) == PlanRecord()
    add_to_plan_record(path, runs=[RUN])
    assert read_plan_record(path).runs == (RUN,)


def test_a_link_and_a_file_that_others_can_write_are_not_read(tmp_path: Path) -> None:
    real = tmp_path / "plan_record.json"
    add_to_plan_record(real, runs=[RUN])
    (tmp_path / "link.json").symlink_to(real)
    assert read_plan_record(tmp_path / "link.json") == PlanRecord()
    os.chmod(real, 0o666)
    assert read_plan_record(real) == PlanRecord()


def test_the_newest_entries_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "plan_record.json"
    add_to_plan_record(
        path,
        predictions=[replace(PREDICTED, work=str(number), at_s=float(number)) for number in range(300)],
        runs=[replace(RUN, at_s=float(number)) for number in range(300)],
    )
    known = read_plan_record(path)
    assert [each.at_s for each in known.predictions] == [each.at_s for each in known.runs]
    assert [each.at_s for each in known.runs] == list(map(float, range(44, 300)))


ADDS = """
import sys
from dataclasses import replace
from pathlib import Path
from unisono.planner.plan_record import add_to_plan_record, read_plan_record

path = Path(sys.argv[1])
(run,) = read_plan_record(path.with_name("one.json")).runs
for number in range(10):
    add_to_plan_record(path, runs=[replace(run, at_s=float(sys.argv[2]) + number)])
"""


def test_runs_that_end_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "plan_record.json"
    add_to_plan_record(path.with_name("one.json"), runs=[RUN])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    started = [
        subprocess.Popen([sys.executable, "-c", ADDS, str(path), str(100 * number)], env=environ) for number in range(3)
    ]
    assert [process.wait(timeout=120) for process in started] == [0, 0, 0]
    assert sorted(run.at_s for run in read_plan_record(path).runs) == [
        100.0 * process + number for process in range(3) for number in range(10)
    ]


def runs_of(*ratios: float, axes: tuple[str, ...] = ("tp",), machine: Machine = HERE, **changes: Any):
    """Runs that took ``ratios`` times as long as predicted, each of a prediction of its own."""
    return [
        replace(
            RUN,
            predicted=replace(PREDICTED, plan=f"{axes}{number}", axes=axes, machine=machine),
            step_s=ratio * PREDICTED.step_s,
            **changes,
        )
        for number, ratio in enumerate(ratios)
    ]


def test_plans_with_the_same_axes_teach_before_others() -> None:
    record = PlanRecord(runs=[*runs_of(1.1, 1.2, 1.3), *runs_of(2.0, 2.0, axes=("dp",))])
    assert record.learned(HERE).of(("tp",)) == Learned(factor=pytest.approx(1.2), runs=3)
    # of two runs with this axis too few is known, and of this one nothing: all runs count
    for axes in (("dp",), ("pp", "tp"), ()):
        assert record.learned(HERE).of(axes) == Learned(factor=pytest.approx(1.3), runs=5)


@pytest.mark.parametrize("ratios", [(), (1.5,), (1.5, 1.5)])
def test_two_predictions_teach_nothing(ratios: tuple[float, ...]) -> None:
    assert PlanRecord(runs=runs_of(*ratios)).learned(HERE).of(("tp",)) == Learned()


def test_runs_of_one_prediction_count_as_one() -> None:
    disturbed = [replace(RUN, step_s=0.05)] * 7
    assert PlanRecord(runs=disturbed).learned(HERE).of(("tp",)) == Learned()
    learned = PlanRecord(runs=[*disturbed, *runs_of(1.2, 1.4)]).learned(HERE).of(("tp",))
    assert learned == Learned(factor=pytest.approx(1.2), runs=9)
    # predicted again, it is another one
    again = replace(RUN, predicted=replace(PREDICTED, at_s=7.0), step_s=0.9)
    assert PlanRecord(runs=[RUN, *runs_of(1.3), again]).learned(HERE).of(("tp",)).factor == pytest.approx(1.3)


def test_the_newest_teach() -> None:
    assert PlanRecord(runs=runs_of(*[9.0] * 30, *[1.5] * 20)).learned(HERE).of(("tp",)) == Learned(factor=1.5, runs=20)


@pytest.mark.parametrize("other", [{"host": "b"}, {"device": "Xeon"}, {"torch": "2.12.1"}, {"predictor": 0}])
def test_other_machines_and_waits_for_data_teach_nothing(other: dict[str, Any]) -> None:
    ratios = (1.1, 1.2, 1.3)
    assert PlanRecord(runs=runs_of(*ratios, machine=replace(HERE, **other))).learned(HERE).of(("tp",)) == Learned()
    assert PlanRecord(runs=runs_of(*ratios, machine=replace(HERE, torch="2.13.1"))).learned(HERE).of(("tp",)).runs == 3
    assert PlanRecord(runs=runs_of(*ratios, data_wait_frac=0.2)).learned(HERE).of(("tp",)) == Learned()


# --- what a run took ------------------------------------------------------------------------------------------------


def measured(
    folder: Path, seconds: list[float | None], *, predicted: PlanPrediction = PREDICTED, attempts: int = 1, **more: Any
):
    """What a run says whose steps had these times in their events; None for a step of the warm-up."""
    path = folder / "events.jsonl"
    for attempt in range(1, attempts + 1):
        with EventLog(path, rank=0, run_id="run", attempt=attempt) as events:
            for step, step_s in enumerate(seconds, start=1 + (attempt - 1) * len(seconds)):
                fields = {"perf/step_s": step_s * attempt} if step_s else {}
                events.emit("step", step=step, **fields, **{"time/window_s": 1.0, "time/data_wait_frac": 0.25}, **more)
    steady = SteadySteps.of(read_history(path), attempts)
    return None if steady is None else measured_run(predicted, steady, at_s=3.0)


def test_a_run_is_measured_by_the_median_of_its_steady_steps(tmp_path: Path) -> None:
    run = measured(tmp_path, [None, None, *[0.5] * 6, *[0.7] * 5])
    assert run == replace(RUN, step_s=0.5, steps=11, data_wait_frac=0.25, at_s=3.0)


@pytest.mark.parametrize("count", [0, 9])
def test_a_short_run_is_not_measured(tmp_path: Path, count: int) -> None:
    assert measured(tmp_path, [None, None, *[0.5] * count]) is None


def test_only_the_attempt_itself_is_measured(tmp_path: Path) -> None:
    run = measured(tmp_path, [None, None, *[0.5] * 10], attempts=2)
    assert run is not None
    assert (run.step_s, run.steps) == (1.0, 10)


def test_memory_is_that_of_an_allocator_on_a_rank_like_all_others(tmp_path: Path) -> None:
    seconds: list[float | None] = [0.5] * 12
    fields = {"mem/peak_bytes": 5000, "mem/peak_reserved_bytes": 6000}
    for name, predicted, more, peak in [
        ("accelerator", PREDICTED, fields, 5000),
        ("host", PREDICTED, {"mem/peak_bytes": 5000}, None),
        ("pipeline", replace(PREDICTED, axes=("pp",)), fields, None),
    ]:
        folder = tmp_path / name
        folder.mkdir()
        run = measured(folder, seconds, predicted=predicted, **more)
        assert run is not None
        assert run.peak_bytes == peak


# --- which prediction is that of a run ------------------------------------------------------------------------------


def plan_of(ranks: int = 2, **options: Any) -> Plan:
    given: dict[str, Any] = {"device": "cpu", "global_batch": 16, "micro_batch": 2, **options}
    return resolve_plan(PlanOptions(**given), JobSpec(world_size=ranks))[1]


def test_a_plan_is_known_once_the_run_has_completed_it() -> None:
    plan = plan_of(pp=2)
    assert plan_digest(plan.updated(pipeline={"layers_per_stage": (1, 3)})) == plan_digest(plan)
    others = [plan_of(pp=2, micro_batch=1), plan_of(tp=2), plan_of(pp=2, recompute="full"), plan_of(4, pp=2)]
    assert len({plan_digest(each) for each in (plan, *others)}) == 5
    assert [used_axes(each) for each in (plan, plan_of(4, tp=2), plan_of(), plan_of(1))] == [
        ("pp",),
        ("dp", "tp"),
        ("dp",),
        (),
    ]


def work_of(*settings: str) -> str:
    return work_digest(load_config(RunConfig, overrides=settings).value, function_name)


@pytest.mark.parametrize(
    ("setting", "is_other"),
    [
        *(("model.dim=32", True), ("data.seq_len=32", True), ("optim.kind=sgd", True), ("launch.num_threads=1", True)),
        *(("data.corpus=folder", True), ("optim.lr=0.5", False), ("train.steps=7", False), ("run.dir=x", False)),
        *(("run.seed=4", False), ("checkpoint.every_steps=3", False), ("plan.micro_batch=1", False)),
    ],
)
def test_what_a_step_computes_tells_works_apart(setting: str, is_other: bool) -> None:
    assert (work_of(setting) != work_of()) == is_other
