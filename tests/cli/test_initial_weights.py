"""``model.weights``: a run begins where another ended, on any number of ranks, and is a run of its own afterwards."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from commands import Desk, losses_of

STILL = ("--set=optim.lr=1e-9", "--set=train.eval_every_steps=1", "--set=train.num_eval_samples=0")


def test_a_run_begins_where_another_ended(desk: Desk, trained: Path, tmp_path: Path) -> None:
    ended = desk.here("eval", str(trained), "--json").json["evaluation"]["loss"]
    shutil.copytree(trained, tmp_path / "source")
    for number, source in enumerate(("", "export", "export/model.safetensors", "checkpoints/step-00000004")):
        run_dir = tmp_path / f"new{number}"
        done = desk.train(run_dir, f"--set=model.weights={tmp_path / 'source' / source}", *STILL)
        assert done.code == 0, done.err
        found = desk.here("eval", str(run_dir), "--json").json["evaluation"]["loss"]
        assert found == pytest.approx(ended, rel=1e-6)
    assert losses_of(tmp_path / "new0") == losses_of(tmp_path / "new1")
    shutil.rmtree(tmp_path / "source")  # the checkpoint of a run has all that evaluation and export need
    assert desk.here("eval", str(run_dir), "--json").json["evaluation"]["loss"] == found
    assert desk.here("checkpoint", "export", str(run_dir), str(tmp_path / "out")).code == 0
    gone = desk.train(tmp_path / "other", f"--set=model.weights={tmp_path / 'source'}")
    assert gone.code == 2
    assert "there is no such file or folder" in gone.err


def test_ranks_that_share_a_model_begin_alike(desk: Desk, trained: Path, tmp_path: Path) -> None:
    given = [f"--set=model.weights={trained / 'export'}", "--set=plan.precision=fp32"]
    assert desk.train(tmp_path / "one", *given).code == 0
    sharded = ["--set=launch.num_processes=2", "--set=plan.dp_shard=2"]
    done = desk.process("train", f"--set=run.dir={tmp_path / 'two'}", *desk.settings, *given, *sharded)
    assert done.code == 0, done.err
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-5)


def test_it_is_no_setting_beside_a_pretrained_folder(desk: Desk, trained: Path, tmp_path: Path) -> None:
    given = (f"--set=model.weights={trained}", f"--set=model.pretrained={trained / 'export'}")
    refused = desk.here("train", f"--set=run.dir={tmp_path / 'run'}", *given)
    assert refused.code == 2
    assert "model.weights" in refused.err
