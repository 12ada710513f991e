"""``unisono tune params`` and ``tune folds`` while they run, and folds that fail."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import small_trainings
from commands import Desk

from unisono.cli import tune_trials
from unisono.data.sample_losses import read_losses

pytest.importorskip("optuna")


def test_the_report_is_written_after_each_trial(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a search that is killed, or that goes on for days, has a page and its best trial."""
    out = tmp_path / "search"
    small_trainings.install(monkeypatch)
    seen: list[tuple[bool, float | None]] = []

    def look(printed: object, trial: object) -> None:
        lr = tomllib.loads((out / "best.toml").read_text())["optim"]["lr"] if (out / "best.toml").exists() else None
        seen.append(((out / "report.html").exists(), lr))

    monkeypatch.setattr(tune_trials._Printed, "on_start", look)
    space = ["--space=optim.lr=1e-3,2e-3", "--sampler=grid"]
    done = desk.here("tune", "params", *desk.settings, *space, f"--out={out}")
    assert done.code == 0, done.err
    assert seen == [(False, None), (True, 1e-3)]


def test_the_first_trial_has_the_values_of_the_configuration(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = small_trainings.install(monkeypatch)
    out, config = tmp_path / "search", tmp_path / "run.toml"
    config.write_text('[optim]\nlr = 0.0012\nkind = "sgd"\n')
    command = ["tune", "params", str(config), *desk.settings, "--space=optim.lr=log:1e-4..1e-2"]
    command += ["--space=optim.kind=adamw,sgd", "--trials=2", f"--out={out}", "--json"]
    found = desk.here(*command).json["trials"]
    assert found[0]["settings"] == {"optim.lr": "0.0012", "optim.kind": "sgd"}
    assert [trial["from_configuration"] for trial in found] == [True, False]
    assert {"--set=optim.lr=0.0012", "--set=optim.kind=sgd"} <= set(calls[0])
    page = (out / "report.html").read_text()
    assert "(configuration)" in page
    assert "with the configuration's values" in page.replace("&#39;", "'")


TABLE = """
[task]
kind = "table"
predicts = "number"
target = "price"
[data]
train = "TRAIN"
[train]
steps = 3
[plan]
global_batch = 8
"""


def test_a_fold_that_fails_is_named(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_trainings.install(monkeypatch, failing_folds=("1", "2"))
    table, config = tmp_path / "table.csv", tmp_path / "table.toml"
    table.write_text("a,price\n1,2\n2,4\n")
    config.write_text(TABLE.replace("TRAIN", str(table)))
    done = desk.here("tune", "folds", str(config), "--folds=3", f"--out={tmp_path / 'folds'}", "--json")
    assert done.code == 1
    assert done.json["failed"] == [1, 2]
    assert done.json["values"] == {"0": 1.5}
    assert [trial["outcome"] for trial in done.json["trials"]] == ["done", "failed", "failed"]


def test_token_shards_have_no_folds(desk: Desk, tmp_path: Path) -> None:
    out = tmp_path / "folds"
    assert desk.here("data", "pack", "corpus", "shards.bin").code == 0
    settings = [each for each in desk.settings if not each.startswith("--set=data.corpus")]
    done = desk.here("tune", "folds", *settings, "--set=data.train=shards-*.bin", f"--out={out}")
    assert done.code == 2
    assert done.err.startswith(
        "unisono: tune folds with the token shards shards-*.bin\n  rule: each fold of the samples"
    )
    assert not out.exists()


def classes_of(table: Path) -> str:
    return TABLE.replace("TRAIN", str(table)).replace('predicts = "number"\n', "").replace("price", "label")


@pytest.mark.parametrize(("group", "setting"), [([], "stratified"), (["--group=user"], "group:user")])
def test_folds_by_class_and_by_group(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: list[str], setting: str
) -> None:
    calls = small_trainings.install(monkeypatch)
    table, config = tmp_path / "table.csv", tmp_path / "table.toml"
    rows = [f"{number},{'ab'[number % 2]},{number // 5}" for number in range(20)]
    table.write_text("\n".join(["x,label,user", *rows]) + "\n")
    config.write_text(classes_of(table))
    command = ["tune", "folds", str(config), "--folds=2", *group, f"--out={tmp_path / 'folds'}", "--json"]
    done = desk.here(*command)
    assert done.code == 0, done.err
    text = setting if setting == "stratified" else f'"{setting}"'
    assert [f"--set=data.eval_split={text}" in arguments for arguments in calls] == [True, True]
    other = desk.here(*command, "--set=data.eval_split=group:x")
    assert other.code == 2
    both = "--group user with data.eval_split=group:x" if group else "data.eval_split group:x for the search in"
    assert both in other.json["problems"][0]["given"]


def test_random_folds_of_classes(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task with classes has them where the configuration says so."""
    calls = small_trainings.install(monkeypatch)
    table, config = tmp_path / "table.csv", tmp_path / "table.toml"
    table.write_text("\n".join(["x,label", *(f"{number},{'ab'[number % 2]}" for number in range(20))]) + "\n")
    config.write_text(classes_of(table))
    command = ["tune", "folds", str(config), "--folds=2", "--set=data.eval_split=random"]
    assert desk.here(*command, f"--out={tmp_path / 'folds'}").code == 0
    splits = [[text for text in arguments if "eval_split" in text] for arguments in calls]
    assert splits == [["--set=data.eval_split=random"]] * 2
    refused = desk.here(*command, "--group=x", f"--out={tmp_path / 'grouped'}")
    assert refused.code == 2
    assert "--group x with data.eval_split=random" in refused.err


@pytest.mark.full
@pytest.mark.parametrize("group", [[], ["--group=user"]])
def test_real_trainings_with_folds_by_class_and_by_group(desk: Desk, tmp_path: Path, group: list[str]) -> None:
    """The file of losses says which samples each fold had."""
    table, config, out = tmp_path / "table.csv", tmp_path / "table.toml", tmp_path / "folds"
    rows = [f"{number},{'ab'[number % 4 == 0]},{number // 5}" for number in range(40)]
    table.write_text("\n".join(["x,label,user", *rows]) + "\n")
    config.write_text(classes_of(table))
    done = desk.here("tune", "folds", str(config), "--folds=2", *group, "--sample-losses", f"--out={out}", "--json")
    assert done.code == 0, done.err
    losses = read_losses(out / "losses.safetensors")
    assert losses.sample.tolist() == list(range(40))
    if group:
        assert all(len(set(losses.fold[user : user + 5].tolist())) == 1 for user in range(0, 40, 5))
        assert losses.fold.sum() == 20
    else:
        assert [int((losses.fold[losses.target == label] == 1).sum()) for label in (0, 1)] == [15, 5]
