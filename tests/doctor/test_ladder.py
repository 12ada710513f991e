"""The rungs of a configuration, and what is said of those that fail, are slow, or would be tried twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from unisono.config import load_config
from unisono.doctor import ladder
from unisono.doctor.child import TrainOutcome
from unisono.doctor.ladder import CostlyFinding, RungReport, climb, rungs
from unisono.doctor.short_run import set_arguments
from unisono.observe.events import encode, events_path
from unisono.tasks.starters import TASKS, task_starter
from unisono.train.config import RunConfig

DEFAULTS = load_config(RunConfig).encoded


def settings_of(*overrides: str, files: Sequence[str] = ()) -> dict[str, Any]:
    return load_config(RunConfig, list(files), overrides=overrides).encoded


SHARDED = ("launch.num_processes=4", "plan.global_batch=16", "plan.micro_batch=2", "plan.dp_shard=2", "plan.tp=2")


def by_code(*overrides: str, corpus: Path = Path("/tmp/x/corpus")) -> dict[str, Any]:
    return {rung.code: rung for rung in rungs(settings_of(*overrides), DEFAULTS, corpus)}


def test_each_rung_adds_one_thing() -> None:
    found = by_code("data.corpus=/my/text", "data.tokenizer=/my/tokenizer", "schedule.warmup_steps=200", *SHARDED)
    assert not any(rung.skipped for rung in found.values())
    small = {"model.num_layers": 2, "model.dim": 32, "model.num_heads": 2, "model.num_kv_heads": 1}
    changes = {code: rung.changes for code, rung in found.items()}
    first, second, third, fourth, fifth = changes.values()
    assert first["data.corpus"] == "/tmp/x/corpus"
    assert first["data.tokenizer"] == "bytes"
    assert not any(name.startswith("data.") for each in (second, third, fourth, fifth) for name in each)
    for each, is_small in ((first, True), (second, True), (third, False), (fourth, False), (fifth, False)):
        names = {name for name in each if name.startswith("model.")}
        assert bool(names) == is_small
        assert names <= {*small, "model.ffn_dim"}
        assert each["train.steps"] == ladder.STEPS
        assert each["schedule.warmup_steps"] == 0
        assert each["launch.max_restarts"] == 0
    one = {"plan.dp_shard": 1, "plan.tp": 1, "plan.global_batch": 4, "plan.micro_batch": 2}
    for each in (first, second, third):
        assert {name: each[name] for name in one} == one
    assert {name: fourth[name] for name in one} == one | {"plan.global_batch": 16}
    assert not any(name.startswith("plan.") for name in fifth)
    assert [rung.ranks for rung in found.values()] == [1, 1, 1, 4, 4]


def test_rungs_that_are_the_same_training_are_left_out() -> None:
    found = by_code("launch.num_processes=1")
    same = "the same training as RUNG03"
    assert [rung.skipped for rung in found.values()] == ["", "", "", same, same]
    found = by_code("model.num_layers=2", "model.dim=32", "model.num_heads=2", "model.num_kv_heads=1")
    assert found["RUNG03"].skipped == "the same training as RUNG02"
    assert found["RUNG01"].on_config  # it is small already: own data is compared with it
    assert [rung.stands_for for rung in found.values()] == [(), ("RUNG03", "RUNG04", "RUNG05"), (), (), ()]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        SHARDED,
        ("components.model=moe", "model.num_experts=8", "model.num_experts_per_token=4"),
        ("task.kind=masked_language_model",),
        ("plan.sync=dist_async", "plan.staleness=3", "launch.num_servers=2", "launch.num_processes=2"),
        ("plan.sync=dist_local", "plan.local_steps=4", "launch.num_processes=2"),
        ("schedule.kind=wsd", "schedule.decay_frac=0.5", "schedule.warmup_steps=50"),
        ("train.epochs=3",),
        ("train.early_stop_patience=3", "data.packing=best_fit", "data.seq_len=2048"),
        ("data.train=/a.jsonl", "data.eval=/b.jsonl", "task.inputs=['t']"),
        ("data.train=/a.csv", "task.kind=table", "components.model=mlp", "model.num_layers=7", "model.dim=512"),
        ("data.train=/a", "task.kind=image", "components.model=resnet50"),
        ("data.train=/a", "task.kind=image"),
        ("model.pretrained=/m",),
    ],
)
def test_every_rung_is_a_valid_configuration(tmp_path: Path, overrides: Sequence[str]) -> None:
    settings = settings_of(*overrides)
    found = rungs(settings, DEFAULTS, tmp_path)
    assert [rung.code for rung in found] == [f"RUNG0{number}" for number in range(1, 6)]
    for rung in found:
        if rung.skipped:
            continue
        sets = [text.removeprefix("--set=") for text in set_arguments(rung.changes)]
        base = list(overrides) if rung.on_config else []
        # as files are, under the command line: the length of a run may be in either
        base_file = tmp_path / f"{rung.code}.toml"
        lines = [text.replace("=", " = ", 1) if _is_literal(text) else _quoted(text) for text in base]
        base_file.write_text("\n".join(["# as in a file", *lines]))
        load_config(RunConfig, [str(base_file)], overrides=[*sets, "launch.num_processes=2"])


def _is_literal(text: str) -> bool:
    value = text.partition("=")[2]
    return value.replace(".", "").isdigit() or value.startswith("[")


def _quoted(text: str) -> str:
    name, _, value = text.partition("=")
    return f'{name} = "{value}"'


@pytest.mark.parametrize("task", TASKS)
def test_the_rungs_of_every_starter_are_valid(tmp_path: Path, task: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(task_starter(task, path.name))
    for rung in rungs(settings_of(files=[str(path)]), DEFAULTS, tmp_path):
        if not rung.skipped:
            sets = [text.removeprefix("--set=") for text in set_arguments(rung.changes)]
            load_config(RunConfig, [str(path)] if rung.on_config else [], overrides=sets)


# --- verdicts on trainings with exactly known times ------------------------------------------------------------------


class Trainings:
    """Stands for trainings: seconds of a step, or the words of a failure, by the name of the rung's folder."""

    def __init__(self, outcomes: Mapping[str, float | str], findings: Mapping[str, list[CostlyFinding]]) -> None:
        self.outcomes, self.findings, self.started = outcomes, findings, list[str]()

    def train(self, run_dir: Path, arguments: Sequence[str], *, timeout_s: float) -> TrainOutcome:
        self.started.append(run_dir.name)
        outcome = self.outcomes.get(run_dir.name, 0.1)
        if isinstance(outcome, str):
            return TrainOutcome(run_dir=run_dir, code=None if outcome == "late" else 1, took_s=9.0, said=outcome)
        return _Timed(run_dir=run_dir, code=0, took_s=9.0, said="", seconds=outcome)

    def diagnose(self, run_dir: Path) -> list[CostlyFinding]:
        return self.findings.get(run_dir.name, [])


class _Timed(TrainOutcome):
    def __init__(self, *, seconds: float, **fields: Any) -> None:
        super().__init__(**fields)
        object.__setattr__(self, "_seconds", seconds)

    __slots__ = ("_seconds",)

    def step_s(self) -> float:
        return self._seconds


Climb = Callable[..., tuple[list[RungReport], list[str]]]


@pytest.fixture
def climbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Climb:
    def run(
        outcomes: Mapping[str, float | str],
        findings: Mapping[str, list[CostlyFinding]] | None = None,
        devices: int = 0,
        overrides: Sequence[str] = SHARDED,
    ) -> tuple[list[RungReport], list[str]]:
        trainings = Trainings(outcomes, findings or {})
        monkeypatch.setattr(ladder, "train_child", trainings.train)
        monkeypatch.setattr(ladder, "count_accelerators", lambda: devices)
        settings = settings_of(f"run.dir={tmp_path}/runs/mine", *overrides)
        reports = list(climb(["run.toml"], settings, DEFAULTS, diagnose=trainings.diagnose))
        assert list(tmp_path.iterdir()) == []
        return reports, trainings.started

    return run


def verdicts(reports: Sequence[RungReport]) -> list[str]:
    return [report.verdict for report in reports]


def test_all_rungs_are_well(climbed: Climb) -> None:
    # the whole model computes longer than the small one, and four ranks share the cores of one
    reports, started = climbed({"rung01": 0.1, "rung02": 0.11, "rung03": 2.0, "rung04": 8.1, "rung05": 8.2})
    assert verdicts(reports) == ["ok"] * 5
    assert started == [f"rung0{number}" for number in range(1, 6)]
    assert reports[3].check.evidence == "8.1 s a step of 16 samples, 8 s expected from RUNG03"


ERROR = "unisono: 'x' is missing\n  rule: it is there\n  so:   nothing\n  try:  another x\n"


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_the_first_rung_that_fails_ends_the_ladder_with_its_error(climbed: Climb, number: int) -> None:
    reports, _ = climbed({f"rung0{number}": ERROR})
    assert verdicts(reports) == [*["ok"] * (number - 1), "failed"]
    check = reports[-1].check
    assert (check.code, check.status, check.cure) == (f"RUNG0{number}", "failure", "another x")
    assert check.evidence.startswith("'x' is missing\n  rule: it is there")


def test_a_rung_that_takes_too_long(climbed: Climb) -> None:
    reports, _ = climbed({"rung02": "late"})
    assert (reports[-1].verdict, reports[-1].check.evidence) == ("failed", "not done after 9 s")


@pytest.mark.parametrize(
    ("outcomes", "devices", "slow"),
    [
        ({"rung01": 0.1, "rung02": 0.29}, 0, []),
        ({"rung01": 0.1, "rung02": 0.31}, 0, ["RUNG02"]),
        ({"rung01": 0.01, "rung02": 0.05}, 0, []),  # a few milliseconds are the host's
        ({"rung03": 1.0, "rung04": 6.3, "rung05": 6.3}, 0, []),
        ({"rung03": 1.0, "rung04": 6.5, "rung05": 6.5}, 0, ["RUNG04"]),
        ({"rung03": 1.0, "rung04": 1.5, "rung05": 1.5}, 4, []),  # a device each
        ({"rung03": 1.0, "rung04": 1.7, "rung05": 1.7}, 4, ["RUNG04"]),
        ({"rung03": 1.0, "rung04": 1.0, "rung05": 1.7}, 4, ["RUNG05"]),
    ],
)
def test_slow_rungs(climbed: Climb, outcomes: Mapping[str, float], devices: int, slow: list[str]) -> None:
    reports, _ = climbed(outcomes, devices=devices)
    assert [report.check.code for report in reports if report.verdict == "slow"] == slow
    for report in reports:
        assert (report.check.status == "warning") == (report.verdict == "slow") == bool(report.check.cure)


def test_costly_findings_make_a_rung_slow(climbed: Climb) -> None:
    costly = CostlyFinding(id="DATA01", title="training waits for data", cost_frac=0.4, advice="more workers")
    cheap = CostlyFinding(id="COMM01", title="waits", cost_frac=0.1, advice="less")
    findings = {"rung01": [costly], "rung02": [costly], "rung03": [cheap, costly], "rung04": [cheap]}
    reports, _ = climbed({"rung03": 1.0, "rung04": 4.0, "rung05": 4.0}, findings)
    # of a model that computes next to nothing, waiting for data is a large share
    assert verdicts(reports) == ["ok", "ok", "slow", "ok", "ok"]
    assert reports[2].check.evidence.endswith("DATA01: training waits for data, costs 40% of the time")
    assert reports[2].check.cure == "more workers"


# a pretrained model is not made small: own data and the whole model are one rung
WHOLE = ("model.pretrained=/m",)


def test_a_rung_that_stands_for_the_whole_model_is_judged_as_it(climbed: Climb) -> None:
    costly = CostlyFinding(id="DATA01", title="training waits for data", cost_frac=0.4, advice="more workers")
    overrides = (*WHOLE, "launch.num_processes=1")
    reports, started = climbed({"rung01": 0.1, "rung02": 1.0}, {"rung02": [costly]}, overrides=overrides)
    assert started == ["rung01", "rung02"]
    assert verdicts(reports) == ["ok", "slow", "left out", "left out", "left out"]
    # the first rung is another model: its time says nothing
    assert reports[1].check.evidence == (
        "1 s a step of 8 samples; DATA01: training waits for data, costs 40% of the time"
    )


def test_ranks_are_compared_with_the_rung_that_stands_for_the_whole_model(climbed: Climb) -> None:
    reports, _ = climbed({"rung02": 1.0, "rung04": 6.5, "rung05": 6.5}, overrides=(*WHOLE, *SHARDED))
    assert verdicts(reports) == ["ok", "ok", "left out", "slow", "ok"]
    assert "4 s expected from RUNG02" in reports[3].check.evidence


def test_a_pretrained_model_that_the_plan_shards_need_not_fit_into_one_process(climbed: Climb) -> None:
    outcomes = {"rung02": "torch.OutOfMemoryError: CUDA out of memory"}
    reports, started = climbed(outcomes, overrides=(*WHOLE, *SHARDED))
    assert verdicts(reports) == ["ok", "left out", "left out", "left out", "ok"]
    assert started == ["rung01", "rung02", "rung05"]


def saved(folder: Path, size: float, took_s: float) -> TrainOutcome:
    """A training whose only checkpoint was as large and took as long."""
    event = {"kind": "checkpoint_saved", "step": 12, "bytes": size, "save_s": took_s, "rank": 0, "attempt": 1}
    events = events_path(folder, 0)
    events.parent.mkdir(parents=True)
    events.write_bytes(encode({"t": 1.0, "m": 1.0, "run": "x", **event}) + b"\n")
    return TrainOutcome(run_dir=folder, code=0, took_s=9.0, said="")


@pytest.mark.parametrize(
    ("overrides", "took_s", "free_gib", "says", "cure"),
    [
        (("checkpoint.every_steps=100",), 9.0, 100, "", ""),
        (("checkpoint.every_steps=100",), 11.0, 100, "each waits until the one before", "every_steps=2200"),
        (("checkpoint.every_steps=100", "checkpoint.asynchronous=false"), 0.4, 100, "", ""),
        (
            ("checkpoint.every_steps=100", "checkpoint.asynchronous=false"),
            2.5,
            100,
            "training stands still for 20% of the time",
            "checkpoint.asynchronous=true; checkpoint.every_steps=500",
        ),
        (("checkpoint.every_steps=0",), 99.0, 100, "", ""),
        (
            ("checkpoint.keep_last=3",),
            1.0,
            11,
            "5 of them need 10 GiB of the 11 GiB that are free",
            "room on that disk",
        ),
    ],
)
def test_what_saves_will_cost(
    tmp_path: Path, overrides: Sequence[str], took_s: float, free_gib: int, says: str, cure: str
) -> None:
    outcome = saved(tmp_path / "run", 2 * 2**30, took_s)
    report = ladder._saving(outcome, 0.1, settings_of(*overrides), free_gib * 2**30)  # pyright: ignore[reportPrivateUsage]
    assert report is not None
    assert (report.verdict, bool(report.check.cure)) == (("slow", True) if cure else ("ok", False))
    assert says in report.check.evidence
    assert cure in report.check.cure


def test_a_model_that_the_plan_shards_need_not_fit_into_one_process(climbed: Climb) -> None:
    reports, started = climbed({"rung03": "torch.OutOfMemoryError: CUDA out of memory"})
    assert verdicts(reports) == ["ok", "ok", "left out", "left out", "ok"]
    assert started == ["rung01", "rung02", "rung03", "rung05"]
    assert "has not enough memory for the whole model" in reports[2].check.evidence
