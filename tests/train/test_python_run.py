"""A Trainer in a script of one's own shows, tracks and reports its run like the command line does."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from unisono import (
    CheckpointOptions,
    DataOptions,
    LoaderOptions,
    ObserveOptions,
    OptimOptions,
    PlanOptions,
    ScheduleOptions,
    Trainer,
    TrainOptions,
    from_map_style,
)
from unisono.cli.common import load_run
from unisono.errors import CheckpointError, ConfigError
from unisono.observe.events import events_path, read_events
from unisono.train import mean_squared_error
from unisono.train.step import COUNTED

SCRIPT = """
import torch
from unisono import PlanOptions, Trainer, TrainOptions

data = [(torch.randn(3), torch.ones(1)) for _ in range(16)]
run = Trainer(
    torch.nn.Linear(3, 1),
    data,
    PlanOptions(device="cpu", precision="fp32", global_batch=4),
    objective=lambda outputs, batch: ((outputs - batch["targets"]).square().sum(), torch.tensor(float(len(outputs)))),
    options=TrainOptions(steps=3, eval_every_steps=0),
)
"""


class Line(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs)


def script(folder: Path, body: str) -> str:
    path = folder / "fit_line.py"
    path.write_text(SCRIPT.replace("torch.nn.Linear(3, 1)", "Line(3, 1)").replace("data =", LINE + "\ndata =") + body)
    done = subprocess.run([sys.executable, path], cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


LINE = "class Line(torch.nn.Linear):\n    def forward(self, inputs):\n        return super().forward(inputs)\n"


def test_a_script_has_console_table_report_and_a_folder_of_its_name(tmp_path: Path) -> None:
    shown = script(tmp_path, "with run:\n    run.fit()\n")
    run_dir = tmp_path / "runs/fit_line"
    assert "step=1 steps_total=3 loss=" in shown
    assert "Finished 3 of 3 steps" in shown
    assert f"report   {Path('runs/fit_line/report.html')}" in shown
    assert (run_dir / "report.html").stat().st_size > 1000
    with (run_dir / "metrics.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["1", "2", "3"]
    again = script(tmp_path, "with run:\n    for step in run:\n        pass\n")
    assert "resumed at step 3" in again
    assert "this run has made 3 of 3 steps: no step is made" in again


def test_a_loop_of_ones_own_ends_like_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = from_map_style([(torch.ones(3) * n, torch.ones(1)) for n in range(8)])
    run = Trainer(
        Line(3, 1),
        data,
        PlanOptions(device="cpu", precision="fp32", global_batch=4),
        objective=mean_squared_error,
        options=TrainOptions(steps=2, eval_every_steps=0),
        run_dir=tmp_path,
        observe=ObserveOptions(trackers=("csv",)),
    )
    with run:
        for _ in run:
            pass
    ends = [e for e in read_events(events_path(tmp_path, 0)).events if e["kind"] == "run_end"]
    assert [end["reason"] for end in ends] == ["finished"]
    assert "Finished 2 of 2 steps" in capsys.readouterr().out
    assert (tmp_path / "report.html").exists()


def test_an_unknown_tracker_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="unknown tracker 'tensorbord'"),
        Trainer(
            Line(3, 1),
            [(torch.ones(3), torch.ones(1))],
            PlanOptions(device="cpu"),
            objective=mean_squared_error,
            run_dir=tmp_path / "run",
            observe=ObserveOptions(trackers=("tensorbord",)),
        ),
    ):
        pass
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"loader": LoaderOptions(last_batch="dropp")}, 'LoaderOptions: last_batch = "dropp"'),  # type: ignore[arg-type]
        ({"loader": LoaderOptions(num_workers=-5)}, "LoaderOptions: num_workers = -5"),
        ({"options": TrainOptions(steps=0)}, "TrainOptions: steps = 0"),
        ({"plan": PlanOptions(precision="bfloat16")}, 'PlanOptions: precision = "bfloat16"'),  # type: ignore[arg-type]
        ({"plan": PlanOptions(global_batch=0)}, "PlanOptions: global_batch = 0"),
        ({"optimizer": OptimOptions(lr=-1.0)}, "OptimOptions: lr = -1.0"),
        ({"optimizer": torch.optim.SGD, "clip_norm": -1.0}, "clip_norm=-1.0"),
        ({"schedule": ScheduleOptions(kind="cosin")}, 'ScheduleOptions: kind = "cosin"'),
        ({"schedule": StepLR(SGD([nn.Parameter(torch.ones(1))]), 1)}, "schedule=partial(StepLR, …)"),
        ({"objective": "mean_squared_eror"}, "the objective 'mean_squared_eror'"),
        ({"metrics": ["mea"]}, "the metric 'mea'"),
    ],
)
def test_options_are_checked_at_construction(tmp_path: Path, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Trainer(
            Line(3, 1),
            [(torch.ones(3), torch.ones(1))],
            **{"objective": mean_squared_error, "run_dir": tmp_path / "a"} | wrong,
        )
    assert said in str(caught.value)
    assert not (tmp_path / "a").exists()


def test_a_trainer_is_used_inside_of_its_with_statement_and_again_in_another(tmp_path: Path) -> None:
    data = [(torch.ones(3), torch.ones(1))]
    plan, options = PlanOptions(device="cpu", global_batch=1), TrainOptions(steps=3)
    trainer = Trainer(Line(3, 1), data, plan, objective=mean_squared_error, options=options, run_dir=tmp_path / "run")
    assert repr(trainer) == f"Trainer(Line, not entered, 3 steps, run_dir='{tmp_path}/run')"
    with pytest.raises(ConfigError) as before:
        trainer.evaluate(data)
    assert str(before.value) == (
        "evaluate() of a Trainer that was not entered\n"
        "  rule: it works inside of a with statement, which opens and closes its files, workers and connections\n"
        "  so:   nothing was done\n"
        "  try:  with trainer as run: run.evaluate(data)"
    )
    for call in (
        trainer.save,
        trainer.__iter__,
        trainer.averaged_weights,
        lambda: trainer.export(tmp_path / "none"),
        lambda: trainer.log("own", 1),
    ):
        with pytest.raises(ConfigError, match=r"(of|over) a Trainer that was not entered"):
            call()
    assert trainer.best is None
    assert not trainer.preempted
    assert not (tmp_path / "run").exists()
    with trainer as run:
        assert [step.index for step in run] == [1, 2, 3]
        assert repr(run) == f"Trainer(Line, open at step 3 of 3, run_dir='{tmp_path}/run')"
        with pytest.raises(ConfigError) as without:
            run.evaluate()
        assert str(without.value) == (
            "evaluate() of a Trainer without eval_data\n"
            "  rule: it evaluates the data that it is given, or eval_data\n"
            "  so:   nothing was evaluated\n"
            "  try:  run.evaluate(data), or Trainer(…, eval_data=data)"
        )
    for use in (trainer.evaluate, trainer.save, trainer.__iter__, lambda: trainer.log("own", 1)):
        with pytest.raises(ConfigError, match=r"(of|over) a Trainer that was left"):
            use()
    with trainer as run:
        assert run.fit().reason == "finished"
    events = read_events(tmp_path / "run/events/rank00000.jsonl").events
    assert [event["attempt"] for event in events if event["kind"] == "run_end"] == [1, 2]
    assert repr(trainer) == f"Trainer(Line, closed at step 3 of 3, run_dir='{tmp_path}/run')"


def test_fit_enters_and_leaves_by_itself_and_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = [(torch.ones(3) * n, torch.ones(1)) for n in range(8)]
    run = Trainer(
        Line(3, 1),
        data,
        PlanOptions(device="cpu", precision="fp32", global_batch=4),
        objective=mean_squared_error,
        options=TrainOptions(steps=3),
        eval_data=data[:2],
        run_dir=tmp_path / "run",
        observe=ObserveOptions(trackers=()),
    )
    result = run.fit()
    assert (result.step, result.reason, sorted(result.evaluation)) == (3, "finished", ["loss"])
    assert repr(run) == f"Trainer(Line, closed at step 3 of 3, run_dir='{tmp_path}/run')"
    assert run.best == tmp_path / "run/checkpoints/step-00000003"
    assert (run.best / "COMMIT").exists()
    assert (tmp_path / "run/report.html").exists()
    exported = load_file(run.export(tmp_path / "exported") / "model.safetensors")
    assert torch.equal(exported["weight"], run.model.weight)  # pyright: ignore[reportArgumentType]
    assert "Finished 3 of 3 steps" in capsys.readouterr().out
    again = run.fit()
    assert (again.step, again.reason) == (3, "finished")
    shown = capsys.readouterr().out
    assert "resumed at step 3" in shown
    assert "this run has made 3 of 3 steps: no step is made" in shown
    events = read_events(events_path(tmp_path / "run", 0)).events
    assert [(e["attempt"], e["reason"]) for e in events if e["kind"] == "run_end"] == [(1, "finished"), (2, "finished")]


def test_a_fit_that_fails_leaves_by_itself_and_can_be_repeated(tmp_path: Path) -> None:
    fails = True

    def objective(outputs: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if fails:
            raise RuntimeError("no loss today")
        return mean_squared_error(outputs, batch)  # pyright: ignore[reportReturnType]

    run = Trainer(
        Line(3, 1),
        [(torch.ones(3), torch.ones(1))],
        PlanOptions(device="cpu", global_batch=1),
        objective=objective,
        options=TrainOptions(steps=2),
        run_dir=tmp_path,
        observe=ObserveOptions(console="off", trackers=(), report=False),
    )
    with pytest.raises(RuntimeError, match="no loss today"):
        run.fit()
    assert "closed at step 0 of 2" in repr(run)
    fails = False
    assert run.fit().step == 2
    events = read_events(events_path(tmp_path, 0)).events
    assert [e["reason"] for e in events if e["kind"] == "run_end"] == ["failed", "finished"]


FIT_TWICE = """
import json, os, sys
from pathlib import Path
import torch
from unisono import ObserveOptions, PlanOptions, Trainer, TrainOptions
from unisono.errors import ConfigError

def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 1))


sharded = sys.argv[1] == "sharded"
data = [(torch.ones(3) * n, torch.ones(1)) for n in range(8)]
run = Trainer(
    build if sharded else build(),
    data,
    PlanOptions(device="cpu", precision="fp32", global_batch=4, dp_shard=2 if sharded else 1),
    objective="mean_squared_error",
    options=TrainOptions(steps=3, eval_every_steps=0),
    eval_data=data[:3],
    run_dir="run",
    observe=ObserveOptions(console="off", trackers=(), report=False),
)
first, second = run.fit(), run.fit()
run.export("exported")
if sharded:
    run = Trainer(build(), data, run.plan, objective="mean_squared_error", options=run.options, run_dir="run")
    run.fit()
    try:
        run.fit()
    except ConfigError as error:
        assert "a plan that shards the module it was given" in str(error), error
    else:
        raise AssertionError("a module of shards was taken for a whole one")
facts = [first.step, second.step, second.reason, first.evaluation == second.evaluation, run.best.name]
Path(f"facts.{os.environ['RANK']}").write_text(json.dumps(facts))
"""


@pytest.mark.full
@pytest.mark.parametrize("kind", ["replicated", "sharded"])
@pytest.mark.parametrize("launcher", ["unisono", "torchrun"])
def test_ranks_fit_without_a_with_statement_twice(tmp_path: Path, kind: str, launcher: str) -> None:
    (tmp_path / "twice.py").write_text(FIT_TWICE)
    command = {
        "unisono": ["unisono", "launch", "-n", "2", "--", sys.executable],
        "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    }[launcher]
    done = subprocess.run(
        [sys.executable, "-m", *command, "twice.py", kind],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    facts = [json.loads((tmp_path / f"facts.{rank}").read_text()) for rank in (0, 1)]
    assert facts == [[3, 3, "finished", True, "step-00000003"]] * 2
    assert set(load_file(tmp_path / "exported/model.safetensors")) == {"0.weight", "0.bias"}


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (
            lambda o: StepLR(o, 1),
            (
                "a schedule that raised TypeError: int is not an Optimizer for step 0",
                "schedule(optimizer), by that name, returns a torch scheduler",
                "there is no learning rate",
                "the parameter 'o' called 'optimizer'",
            ),
        ),
        (
            lambda step: None,
            (
                "a schedule that returned NoneType for step 0",
                "schedule(optimizer), by that name, returns a torch scheduler",
                "there is no learning rate",
                "lambda optimizer:",
            ),
        ),
        (
            OneCycleLR,
            (
                "a schedule that raised TypeError: OneCycleLR.__init__() missing 1 required positional argument: 'max_lr'",
                "of the optimizer alone",
                "there is no learning rate",
                "functools.partial(OneCycleLR, max_lr=0.1",
            ),
        ),
        (
            partial(OneCycleLR, max_lr=0.1, total_steps=200),
            (
                "schedule OneCycleLR of 200 steps for a run of 300",
                "a learning rate for each step",
                "step 201 would have none",
                "total_steps=300, or TrainOptions(steps=200)",
            ),
        ),
    ],
)
def test_a_schedule_without_a_rate_is_refused(tmp_path: Path, schedule: Any, said: tuple[str, ...]) -> None:
    with (
        pytest.raises(ConfigError) as caught,
        Trainer(
            Line(3, 1),
            [(torch.ones(3), torch.ones(1))],
            PlanOptions(device="cpu", global_batch=1),
            objective="mean_squared_error",
            optimizer=SGD,
            schedule=schedule,
            run_dir=tmp_path,
        ),
    ):
        pass
    (problem,) = caught.value.problems
    assert problem.given == said[0]
    for part, text in zip((problem.rule, problem.consequence, problem.nearest), said[1:], strict=True):
        assert text in part


def test_the_folder_names_an_own_optimizer_and_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Trainer(
        Line(3, 1),
        [(torch.ones(3), torch.ones(1))],
        PlanOptions(device="cpu", global_batch=1),
        objective="mean_squared_error",
        optimizer={"bias": SGD, "*": torch.optim.NAdam},
        schedule=lambda step: 0.1,
        options=TrainOptions(steps=1),
        run_dir=tmp_path,
    ) as run:
        run.fit()
    written = (tmp_path / "config.toml").read_text()
    assert 'optimizer = "python:bias: SGD, *: NAdam"' in written
    assert "<lambda>" in written.partition('schedule = "python:')[2].partition("\n")[0]
    assert callable(load_run(str(tmp_path)).value.components.optimizer)
    monkeypatch.setenv("UNISONO__COMPONENTS__OPTIMIZER", "adam")
    assert load_run(str(tmp_path)).value.components.optimizer == "adam"  # a variable wins over the name of missing code


@pytest.mark.parametrize("lengths", [(1, 1), (3, 5)], ids=["of one token", "ragged"])
def test_texts_without_a_length_to_record(tmp_path: Path, lengths: tuple[int, int]) -> None:
    """``config.toml`` of the run can be loaded: it names no ``data.seq_len`` that is none."""

    class Tokens(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(9, 1)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.embed(tokens).sum(1)

    def pad(samples: list[Any]) -> dict[str, torch.Tensor]:
        rows = torch.nn.utils.rnn.pad_sequence([sample["tokens"] for sample in samples], batch_first=True)
        return {"tokens": rows, "targets": torch.stack([sample["targets"] for sample in samples])}

    data = [{"tokens": torch.ones(length, dtype=torch.long), "targets": torch.ones(1)} for length in lengths]
    run = Trainer(
        Tokens(),
        data,
        PlanOptions(device="cpu", precision="fp32", global_batch=2),
        objective="mean_squared_error",
        options=TrainOptions(steps=1, eval_every_steps=0),
        collate_fn=pad,
        run_dir=tmp_path,
        observe=ObserveOptions(console="off", trackers=(), report=False),
    )
    with run:
        run.fit()
    assert load_run(str(tmp_path)).value.data.seq_len == DataOptions().seq_len


def test_held_out_data_may_be_a_list(tmp_path: Path) -> None:
    data = [(torch.ones(3) * n, torch.ones(1)) for n in range(8)]
    plan = PlanOptions(device="cpu", precision="fp32", global_batch=4)
    observe = ObserveOptions(console="off", trackers=(), report=False)
    options = TrainOptions(steps=2, eval_every_steps=1)
    run = Trainer(
        Line(3, 1),
        data,
        plan,
        objective=mean_squared_error,
        options=options,
        eval_data=data[:4],
        run_dir=tmp_path,
        observe=observe,
    )
    with run:
        result = run.fit()
        assert run.evaluate(data[:4]) == result.evaluation


def test_the_best_checkpoint_after_early_stopping(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Training towards 1 moves away from held-out targets of -1: the first checkpoint is the best one."""
    run = Trainer(
        Line(3, 1),
        [(torch.ones(3), torch.ones(1))] * 8,
        PlanOptions(device="cpu", precision="fp32", global_batch=4),
        objective=mean_squared_error,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        options=TrainOptions(steps=20, eval_every_steps=1, early_stop_patience=2),
        checkpoint=CheckpointOptions(every_steps=1, keep_last=1),
        eval_data=[(torch.ones(3), -torch.ones(1))] * 4,
        run_dir=tmp_path,
    )
    with run:
        result = run.fit()
        assert (result.step, result.reason) == (3, "early_stop")
        assert run.best == tmp_path / "checkpoints/step-00000001"
        now, best = (
            load_file(run.export(tmp_path / name, checkpoint=path) / "model.safetensors")
            for name, path in (("now", None), ("best", run.best))
        )
        assert torch.equal(now["weight"], run.model.weight)  # pyright: ignore[reportArgumentType]
        assert best["bias"] < now["bias"]  # training has moved it up since
        with pytest.raises(CheckpointError, match="step-00000009"):
            run.export(tmp_path / "none", checkpoint=tmp_path / "checkpoints/step-00000009")
        assert not (tmp_path / "none").exists()
    shown = capsys.readouterr().out
    assert f"was at step 1: {tmp_path}/checkpoints/step-00000001\n" in shown
    assert "take it with --best" in shown


def test_a_step_names_all_its_values(tmp_path: Path) -> None:
    data = [(torch.ones(3), torch.ones(1))] * 8
    plan = PlanOptions(device="cpu", precision="fp32", global_batch=4)
    observe = ObserveOptions(console="off", trackers=(), report=False)
    run = Trainer(Line(3, 1), data, plan, objective=mean_squared_error, run_dir=tmp_path, observe=observe)
    with run:
        step = next(iter(run))
        values = [
            step.loss,
            step.grad_norm,
            float(not step.skipped),
            step.weight,
            float(step.stats[COUNTED]),
            float(step.stopping),
            step.rank_loss,
        ]
        assert values == step.stats.tolist()
        assert (step.weight, step.stopping) == (4.0, False)


def test_several_trainers_are_open_at_once(tmp_path: Path) -> None:
    """Each makes the steps that it makes alone."""
    observe = ObserveOptions(console="off", trackers=("csv",), report=False)

    def trainer(name: str, seed: int) -> Trainer:
        torch.manual_seed(seed)
        return Trainer(
            nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.0), nn.Linear(8, 1)),
            [(torch.randn(3), torch.ones(1)) for _ in range(16)],
            PlanOptions(device="cpu", precision="fp32", global_batch=4),
            objective=mean_squared_error,
            options=TrainOptions(steps=4, eval_every_steps=0),
            run_dir=tmp_path / name,
            observe=observe,
        )

    with trainer("a", 0) as a, trainer("b", 1) as b:
        together = [(one.loss, other.loss) for one, other in zip(a, b, strict=True)]
    alone: list[list[float]] = []
    for name, seed in (("c", 0), ("d", 1)):
        with trainer(name, seed) as run:
            alone.append([step.loss for step in run])
    assert together == list(zip(*alone, strict=True))
    assert (tmp_path / "a/config.toml").exists()
    assert (tmp_path / "b/metrics.csv").read_text().count("\n") == 5


def test_a_loop_that_is_left_by_break_can_be_continued(tmp_path: Path) -> None:
    data = [(torch.ones(3), torch.ones(1))] * 8
    plan = PlanOptions(device="cpu", precision="fp32", global_batch=4)
    observe = ObserveOptions(console="off", trackers=(), report=False)
    options = TrainOptions(steps=5, eval_every_steps=0)
    for reached in (2, 5):
        run = Trainer(
            Line(3, 1), data, plan, objective=mean_squared_error, options=options, run_dir=tmp_path, observe=observe
        )
        with run:
            for step in run:
                if step.index == 2:
                    break
        assert run.state.step == reached
    ends = [e for e in read_events(events_path(tmp_path, 0)).events if e["kind"] == "run_end"]
    assert [(end["step"], end["reason"]) for end in ends] == [(2, "left"), (5, "finished")]


def test_components_that_are_no_section_are_an_error_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("components = 3\n")
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config\.toml:1: .*components"):
        load_run(str(tmp_path))
