"""``unisono data balance``, and a run with its weights, as a user types them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Desk, losses_of, make_desk, steps_of
from procs import wait_until


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """A folder with reviews, of which every tenth is of the rare class."""
    desk = make_desk(tmp_path / "desk", tmp_path / "cache")
    rows = [
        {"text": f"it was {'bad' if n % 10 else 'fine'} {n}", "label": "common" if n % 10 else "rare"}
        for n in range(100)
    ]
    (desk.folder / "reviews.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return desk


def settings(desk: Desk, run_dir: Path, steps: int, *more: str) -> list[str]:
    values = {
        "run.dir": run_dir,
        "task.kind": "text",
        "data.train": "reviews.jsonl",
        "data.sample_weights": "balanced",
        "data.cache_dir": desk.cache / "data",
        "data.seq_len": 16,
        "model.dim": 16,
        "model.num_layers": 1,
        "model.num_heads": 2,
        "plan.global_batch": 8,
        "plan.precision": "fp32",
        "train.steps": steps,
        "train.eval_every_steps": 0,
        "checkpoint.every_steps": 5,
    }
    return [*(f"--set={key}={value}" for key, value in values.items()), *more]


def test_the_summary_and_the_weights(desk: Desk) -> None:
    done = desk.here("data", "balance", "reviews.jsonl", "--label", "label", "--out", "balanced", "--max-repeats", "3")
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        "100 rows of 2 classes, effectively 1.384; the largest has 9 times the rows of the smallest",
        "  90.00% common: 90 rows; with the weights 70.00%, a row 0.7778 times an epoch",
        "  10.00% rare: 10 rows; with the weights 30.00%, a row 3 times an epoch",
        "report: balanced/report.html",
    ]
    before = sorted(path.name for path in desk.folder.iterdir())
    found = desk.here("data", "balance", "reviews.jsonl", "--label", "label", "--power", "0.5", "--json").json
    assert [each["weighted_share"] for each in found["classes"]] == pytest.approx([0.75, 0.25])
    assert sorted(path.name for path in desk.folder.iterdir()) == before
    refused = desk.here("data", "balance", "reviews.jsonl", "--label", "kind")
    assert refused.code == 2
    assert "column 'kind', which no row of" in refused.err
    assert "one of: label, text" in refused.err
    assert "did you mean 'label'?" in desk.here("data", "balance", "reviews.jsonl", "--label", "lbl").err


def test_a_run_in_two_parts_reads_the_same_samples(desk: Desk, tmp_path: Path) -> None:
    assert desk.here("data", "balance", "reviews.jsonl", "--label", "label", "--out", "balanced").code == 0
    for name, lengths in (("whole", [20]), ("parts", [10, 20])):
        for steps in lengths:
            done = desk.here(
                "train", "--debug", *settings(desk, tmp_path / name, steps, "--set=schedule.kind=constant")
            )
            assert done.code == 0, done.err
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole")
    plain = desk.here(
        "train",
        "--debug",
        *settings(desk, tmp_path / "plain", 20, "--set=schedule.kind=constant", "--set=data.sample_weights="),
    )
    assert plain.code == 0, plain.err
    assert losses_of(tmp_path / "plain") != losses_of(tmp_path / "whole")


@pytest.mark.full
def test_a_killed_run_goes_on_with_the_same_samples(desk: Desk, tmp_path: Path) -> None:
    assert desk.here("data", "balance", "reviews.jsonl", "--label", "label", "--out", "balanced").code == 0
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = desk.process("train", "--debug", *settings(desk, whole, 200))
    assert done.code == 0, done.err
    command = [sys.executable, "-m", "unisono", "train", "--debug", *settings(desk, killed, 200)]
    run = subprocess.Popen(
        command, cwd=desk.folder, env=desk.child_environ(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    wait_until(lambda: run.poll() is not None or any(killed.glob("checkpoints/step-*")), "the first checkpoint")
    run.send_signal(signal.SIGKILL)
    _, err = run.communicate(timeout=60)
    assert run.returncode == -signal.SIGKILL, err
    done = desk.process("train", "--debug", *settings(desk, killed, 200))
    assert done.code == 0, done.err
    by_step = {event["step"]: event["train/loss"] for event in steps_of(killed)}
    assert [by_step[step] for step in sorted(by_step)] == losses_of(whole)


def test_a_resume_with_other_weights_is_refused(desk: Desk, tmp_path: Path) -> None:
    for name, power in (("balanced", "1"), ("other", "0.5")):
        given = ["--label", "label", "--out", name, "--power", power]
        assert desk.here("data", "balance", "reviews.jsonl", *given).code == 0
    assert desk.here("train", "--debug", *settings(desk, tmp_path / "run", 5)).code == 0
    refused = desk.here("train", "--debug", *settings(desk, tmp_path / "run", 10, "--set=data.sample_weights=other"))
    assert refused.code != 0
    assert "never see others" in refused.err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--set=task.balance=true", "data.sample_weights with task.balance"),
        ("--set=data.train=[]", "sample_weights 'balanced' without data.train"),
    ],
)
def test_settings_that_exclude_each_other(desk: Desk, tmp_path: Path, more: str, message: str) -> None:
    refused = desk.here("train", "--debug", *settings(desk, tmp_path / "run", 5, more))
    assert refused.code == 2
    assert message in refused.err


def test_token_shards_have_no_weights(desk: Desk, tmp_path: Path) -> None:
    assert desk.here("data", "pack", "corpus", "shards.bin").code == 0
    given = [
        f"--set=data.train={desk.folder}/shards*.bin",
        "--set=data.sample_weights=balanced",
        "--set=data.cache_dir=cache",
    ]
    refused = desk.here("train", "--debug", f"--set=run.dir={tmp_path / 'run'}", *given)
    assert refused.code == 2
    assert "data.sample_weights 'balanced' with token shards" in refused.err
