"""The command line on runs that shard the model along one axis or another: all verbs, in order, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Desk, events_of, losses_of

SIZES = ("model.num_layers=2", "model.num_heads=4", "model.num_kv_heads=2")
AXES = {
    "pp": ("plan.pp=2", "plan.micro_batch=2"),
    "interleaved": ("plan.pp=2", "plan.schedule=interleaved", "plan.micro_batch=2", "model.num_layers=4"),
    "cp": ("plan.cp=2",),
    "tp": ("plan.tp=2", "plan.sequence_parallel=true"),
    "ep": ("model.num_experts=4", "plan.dp_shard=2", "plan.ep=2"),
}


def start(desk: Desk, run_dir: Path, *settings: str) -> list[str]:
    return [f"--set=run.dir={run_dir}", *desk.settings, *(f"--set={each}" for each in (*SIZES, *settings))]


@pytest.mark.full
@pytest.mark.parametrize("axis", AXES)
def test_train_and_every_verb_after_it(desk: Desk, tmp_path: Path, axis: str) -> None:
    run_dir = tmp_path / "run"
    done = desk.process("train", *start(desk, run_dir, *AXES[axis], "launch.num_processes=2"), "--json")
    assert done.code == 0, done.err
    assert (done.json["reason"], done.json["step"]) == ("finished", 4)
    assert done.json["sample"].startswith("def ")
    for made in ("export/model.safetensors", "export/config.json", "report.html", "plan.json"):
        assert (run_dir / made).stat().st_size > 0, made
    # like one process
    model = [each for each in AXES[axis] if each.startswith("model.")]
    alone = desk.here("train", "--debug", *start(desk, tmp_path / "alone", *model), "--json")
    assert alone.code == 0, alone.err
    assert losses_of(run_dir) == pytest.approx(losses_of(tmp_path / "alone"), rel=1e-5)
    assert done.json["evaluation"] == pytest.approx(alone.json["evaluation"], rel=1e-5)
    # the verbs
    evaluated = desk.here("eval", str(run_dir), "--samples=4", "--json")
    assert evaluated.json["evaluation"] == pytest.approx(done.json["evaluation"], rel=1e-5)
    text = desk.here("generate", str(run_dir), "--tokens=8", "--json").json["text"]
    assert text.startswith("def ")
    exported = desk.here("checkpoint", "export", str(run_dir), str(tmp_path / "exported"))
    assert exported.code == 0, exported.err
    assert (tmp_path / "exported/model.safetensors").read_bytes() == (run_dir / "export/model.safetensors").read_bytes()
    # the plan that the run has kept
    plan = json.loads((run_dir / "plan.json").read_text())
    assert plan["pipeline"]["layers_per_stage"] == {"pp": [1, 1], "interleaved": [1, 1, 1, 1]}.get(axis, [])
    assert desk.here("plan", "show", str(run_dir)).code == 0
    checked = desk.here("plan", "check", str(run_dir), "--processes=2")
    assert checked.out.startswith("a legal plan for 2 processes"), checked.err
    assert desk.here("plan", "check", str(run_dir), "--processes=3").code == 2
    compared = desk.here("plan", "diff", str(run_dir), str(tmp_path / "alone"))
    assert compared.code == 1
    assert f"{'pp' if axis == 'interleaved' else axis}: 2 -> 1\n" in compared.out


@pytest.mark.full
@pytest.mark.parametrize("axis", ["pp", "tp", "ep"])
def test_a_kept_plan_trains_again_and_a_run_goes_on(desk: Desk, tmp_path: Path, axis: str) -> None:
    run_dir, again = tmp_path / "run", tmp_path / "again"
    done = desk.process("train", *start(desk, run_dir, *AXES[axis], "launch.num_processes=2"), "--json")
    assert done.code == 0, done.err
    rest = [each for each in start(desk, again, *AXES[axis], "launch.num_processes=2") if "=plan." not in each]
    repeated = desk.process("train", "--plan", str(run_dir / "plan.json"), *rest, "--json")
    assert repeated.code == 0, repeated.err
    assert losses_of(again) == losses_of(run_dir)
    assert desk.here("plan", "diff", str(run_dir), str(again)).code == 0
    # alone, with what two processes have saved; the folder's own settings ask for two
    defaults = (
        "pp=1",
        "cp=1",
        "tp=1",
        "ep=1",
        "dp_shard=1",
        "sequence_parallel=false",
        "schedule=1f1b",
        "micro_batch=0",
    )
    more = ["--set=train.steps=6", *(f"--set=plan.{each}" for each in defaults)]
    more_done = desk.here("train", "--debug", f"--set=run.dir={run_dir}", *more, "--json")
    assert more_done.code == 0, more_done.err
    assert more_done.json["step"] == 6
    (resumed,) = [event for event in events_of(run_dir) if event["kind"] == "resumed"]
    assert resumed["step"] == 4
