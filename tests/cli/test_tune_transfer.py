"""``unisono tune params`` and ``lr`` with ``--transfer mup``: trials of a narrow model, and results for the wide one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from commands import Desk, Outcome, losses_of
from procs import wait_until

from unisono.tune import transfer
from unisono.tune.coordinates import CoordinateCheck, write_coordinates

pytest.importorskip("optuna")

WIDE = ("--set=model.dim=64", "--set=model.num_heads=4", "--set=model.num_kv_heads=4", "--set=plan.global_batch=8")
LR = "--space=optim.lr=log:1e-4..1e-2"
SIZES = {"dim": 64, "num_heads": 4, "num_kv_heads": 4, "ffn_dim": 0, "mup_base_dim": 16}


def tuned(desk: Desk, verb: str, out: Path, *arguments: str) -> Outcome:
    return desk.here("tune", verb, *desk.settings, *WIDE, f"--out={out}", "--json", *arguments)


def model_of(run_dir: Path | str) -> dict[str, Any]:
    model = tomllib.loads((Path(run_dir) / "config.toml").read_text())["model"]
    return {name: model[name] for name in SIZES}


def test_a_rate_is_searched_with_a_narrow_model_for_a_wide_one(desk: Desk, tmp_path: Path) -> None:
    out = tmp_path / "search"
    arguments = [LR, "--transfer=mup", "--proxy-width=16"]
    done = tuned(desk, "params", out, *arguments, "--trials=1")
    assert done.code == 0, done.out + done.err
    checked = (out / "coordinates" / "report.json").stat()
    found = tuned(desk, "params", out, *arguments, "--trials=2").json  # it goes on, without another check
    assert (out / "coordinates" / "report.json").stat().st_mtime_ns == checked.st_mtime_ns
    transfer = found["transfer"]
    assert (transfer["proxy_width"], transfer["full_width"]) == (16, 64)
    assert (transfer["coordinates"]["is_flat"], transfer["coordinates"]["widths"]) == (True, [16, 32, 64])
    narrow = {"dim": 16, "num_heads": 1, "num_kv_heads": 1, "ffn_dim": 0, "mup_base_dim": 16}
    assert [model_of(trial["run_dir"]) for trial in found["trials"]] == [narrow] * 2
    settings = tomllib.loads((out / "best.toml").read_text())
    assert settings["model"] == SIZES
    assert settings["optim"] == {"lr": float(found["best"]["settings"]["optim.lr"])}
    assert "Searched at width 16, for width 64 with model.mup_base_dim=16." in (out / "report.html").read_text()

    again = desk.here("train", str(out / "best.toml"))
    assert again.code == 0, again.err
    assert model_of(out / "best") == SIZES
    assert len(losses_of(out / "best")) == 4

    refused = tuned(desk, "params", out, LR, "--transfer=mup", "--proxy-width=32")
    assert refused.code == 2
    (problem,) = refused.json["problems"]
    assert problem["given"].startswith("proxy_width 32 for the search in ")
    assert problem["given"].endswith("which began with 16")


def test_a_range_of_learning_rates_of_a_narrow_model(desk: Desk, tmp_path: Path) -> None:
    """The narrow width is that of the configuration; its schedule takes no part."""
    out = tmp_path / "range"
    schedule = ("--set=schedule.kind=wsd", "--set=schedule.decay_frac=0.5")
    done = desk.here(
        "tune", "lr", *desk.settings, *WIDE, *schedule, "--set=model.mup_base_dim=16", "--transfer=mup", "--steps=12",
        "--high=0.1", f"--out={out}",
    )  # fmt: skip
    assert done.code == 0, done.out + done.err
    assert "coordinate check at widths 16, 32, 64\nFlat: with muP of base width 16 " in done.out
    assert "Searched at width 16, for width 64 with model.mup_base_dim=16.\n" in done.out
    assert " --set model.mup_base_dim=16\n" in done.out
    assert model_of(out / "run")["dim"] == 16
    assert (out / "coordinates" / "report.html").exists()
    assert "width of the result" in (out / "report.html").read_text()


def test_no_trial_begins_where_activations_grow(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is that of an earlier start of the search, which was stopped after it."""
    widths = (16, 32, 64)
    found = CoordinateCheck(base_dim=16, widths=widths, steps=8, changes={"logits": [float(width) for width in widths]})

    def stopped(folder: Path, *_: Any) -> None:
        folder.mkdir()
        write_coordinates(folder, found)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(transfer, "check_coordinates", stopped)
        assert tuned(desk, "params", tmp_path, LR, "--transfer=mup", "--proxy-width=16").code == 75
    done = tuned(desk, "params", tmp_path, LR, "--transfer=mup", "--proxy-width=16")
    assert done.code == 1
    assert (done.json["trials"], done.json["best"]) == ([], None)
    assert done.json["transfer"]["coordinates"]["is_flat"] is False
    assert "logits as width^1.00. No trial was started" in (tmp_path / "report.html").read_text()
    assert not (tmp_path / "best.toml").exists()
    refused = tuned(desk, "lr", tmp_path, "--transfer=mup", "--proxy-width=16")  # which begins anew
    assert "this command begins anew" in refused.json["problems"][0]["rule"]


FALLING = """
import torch
from unisono import Components, RunConfig


def falling(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)


def config():
    return RunConfig(components=Components(schedule=falling))
"""


def test_a_torch_scheduler_is_refused_before_the_first_trial(desk: Desk, tmp_path: Path) -> None:
    config, out = tmp_path / "falling.py", tmp_path / "search"
    config.write_text(FALLING)
    done = tuned(desk, "params", out, str(config), LR, "--transfer=mup", "--proxy-width=16")
    assert done.code == 2
    (problem,) = done.json["problems"]
    assert problem["given"].startswith("the coordinate check of widths 16,32,64: a torch scheduler with a model of mup")
    assert list((out / "trials").iterdir()) == []


@pytest.mark.parametrize("verb", ["params", "lr"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--transfer=mup"], "--transfer mup without --proxy-width"),
        (["--proxy-width=16"], "--proxy-width 16 without --transfer"),
        (["--transfer=mup", "--proxy-width=64"], "narrower than the one that the result is for"),
        (["--transfer=mup", "--proxy-width=24"], "such as --proxy-width 32"),
        (["--transfer=mup", "--proxy-width=16", "--set=optim.kind=lamb"], "optim.kind 'lamb'"),
        (["--transfer=mup", "--proxy-width=16", "--set=optim.kind=lars"], "optim.kind 'lars'"),
        (["--transfer=mup", "--proxy-width=16", "--set=model.num_experts=4"], "the router"),
        (["--transfer=mup", "--proxy-width=16", "--set=components.model=moe"], "--transfer mup with the model moe"),
        (["--transfer=mup", "--proxy-width=16", "--set=plan.sync=dist_async"], "servers have one learning rate"),
    ],
)
def test_a_transfer_that_is_refused(desk: Desk, tmp_path: Path, verb: str, arguments: list[str], words: str) -> None:
    out = tmp_path / "search"
    space = [LR] if verb == "params" else []
    done = tuned(desk, verb, out, *space, *arguments)
    assert done.code == 2
    assert words in json.dumps(done.json["problems"])
    assert not out.exists()


def test_a_transfer_of_another_model_is_refused(desk: Desk, tmp_path: Path) -> None:
    """Before a setting of muP that the user has not given."""
    table, out = tmp_path / "mail.csv", tmp_path / "search"
    table.write_text("text,label\n" + "".join(f"word {i},{i % 2}\n" for i in range(30)))
    settings = {"task.kind": "text", "task.target": "label", "data.train": table}
    given = [f"--set={name}={value}" for name, value in settings.items()]
    done = desk.here("tune", "params", *given, LR, "--transfer=mup", "--proxy-width=16", f"--out={out}")
    assert done.code == 2
    assert done.err.startswith("unisono: --transfer mup with the model bert\n  rule: muP is for the model gpt")
    assert not out.exists()


@pytest.mark.parametrize(
    "name", ["optim.weight_decay=0.0,0.1", "model.dropout=0.0,0.1", "model.tied=true,false", "optim.kind=adamw,adam"]
)
def test_a_setting_that_does_not_transfer(desk: Desk, tmp_path: Path, name: str) -> None:
    out = tmp_path / "search"
    settings = ["--set=optim.weight_decay=0"] if name.startswith("optim.kind") else []
    done = tuned(desk, "params", out, LR, f"--space={name}", *settings, "--transfer=mup", "--proxy-width=16")
    assert done.code == 2
    (problem,) = done.json["problems"]
    assert problem["given"] == f"--space {name.partition('=')[0]} with --transfer mup"
    assert not out.exists()


@pytest.mark.full
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_search_that_was_stopped_in_its_check_goes_on(desk: Desk, tmp_path: Path, sent: signal.Signals) -> None:
    out = tmp_path / "search"
    arguments = [LR, "--transfer=mup", "--proxy-width=16", "--trials=1"]
    command = [sys.executable, "-m", "unisono", "tune", "params", *desk.settings, *WIDE, f"--out={out}", *arguments]
    process = subprocess.Popen(command, cwd=desk.folder, env=desk.child_environ(), stdout=subprocess.DEVNULL)
    wait_until(lambda: any(out.glob("coordinates/.trainings-*/*/events")), "a training of the check", timeout_s=90.0)
    process.send_signal(sent)
    process.wait(timeout=60)
    assert not (out / "coordinates" / "report.json").exists()
    found = tuned(desk, "params", out, *arguments)
    assert found.code == 0, found.out + found.err
    assert found.json["transfer"]["coordinates"]["is_flat"]
    assert [trial["outcome"] for trial in found.json["trials"]] == ["done"]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_rate_of_the_narrow_model_is_within_a_place_of_that_of_the_wide_one(desk: Desk, tmp_path: Path) -> None:
    """On a grid of factors of 4; the wide model is trained as best.toml says, at each rate."""
    rates = [4.0**-power for power in range(1, 7)]
    space = f"--space=optim.lr={','.join(map(repr, rates))}"
    longer = [
        "--sampler=grid",
        "--set=train.steps=60",
        "--set=train.eval_every_steps=60",
        "--set=train.num_eval_samples=64",
    ]
    narrow = tuned(desk, "params", tmp_path / "narrow", space, *longer, "--transfer=mup", "--proxy-width=16")
    assert narrow.code == 0, narrow.out + narrow.err
    wide = tuned(desk, "params", tmp_path / "wide", space, *longer, "--set=model.mup_base_dim=16")
    assert wide.code == 0, wide.out + wide.err
    places = [rates.index(float(each.json["best"]["settings"]["optim.lr"])) for each in (narrow, wide)]
    assert abs(places[0] - places[1]) <= 1
