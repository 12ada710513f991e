"""``unisono tune coord-check``: flat curves with muP, and none without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Desk, Outcome

SIZES = ("--set=model.dim=64", "--set=model.num_heads=4", "--set=model.num_kv_heads=4", "--set=plan.global_batch=8")


def checked(desk: Desk, out: Path, *arguments: str) -> Outcome:
    return desk.here("tune", "coord-check", *desk.settings, *SIZES, f"--out={out}", *arguments)


@pytest.mark.parametrize(("base", "code"), [(32, 0), (0, 1)])
def test_changes_are_of_one_size_with_mup_only(desk: Desk, tmp_path: Path, base: int, code: int) -> None:
    out = tmp_path / "check"
    done = checked(desk, out, f"--set=model.mup_base_dim={base}", "--widths=32,64,128", "--seeds=1", "--json")
    assert done.code == code, done.out + done.err
    found = done.json
    assert (found["out"], found["report"]) == (str(out), str(out / "report.html"))
    assert found["is_flat"] == (code == 0)
    assert found["widths"] == [32, 64, 128]
    assert sorted(found["slopes"]) == ["blocks.0", "blocks.0.attention", "blocks.0.ffn", "logits"]
    if code:
        assert found["slopes"]["blocks.0.ffn"] > 0.5
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "report.json"]
    assert json.loads((out / "report.json").read_text())["slopes"] == found["slopes"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--widths=32,64"], "3 or more different whole numbers"),
        (["--widths=32,64,x"], "3 or more different whole numbers"),
        (["--widths=16,40,64"], "a multiple of 16"),
        (["--set=model.mup_base_dim=24"], "would have a part of a head"),
    ],
)
def test_what_cannot_be_checked(desk: Desk, tmp_path: Path, arguments: list[str], words: str) -> None:
    done = checked(desk, tmp_path / "check", *arguments)
    assert done.code == 2
    assert words in done.err
    assert not (tmp_path / "check").exists()


def test_a_schedule_of_the_configuration_takes_no_part(desk: Desk, tmp_path: Path) -> None:
    """Its settings are those of another kind than the constant rate of the check."""
    schedule = ("--set=schedule.kind=wsd", "--set=schedule.decay_frac=0.5", "--set=schedule.warmup_steps=2")
    mup = "--set=model.mup_base_dim=32"
    done = checked(desk, tmp_path / "check", mup, *schedule, "--widths=32,64,128", "--seeds=1", "--steps=1", "--json")
    assert done.code == 0, done.out + done.err
    assert done.json["changes"]["logits"][0] > 0


@pytest.mark.parametrize("name", ["report.json", "report.html"])
def test_a_folder_with_a_report_is_left_alone(desk: Desk, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    done = checked(desk, tmp_path)
    assert done.code == 2
    assert "begins anew" in done.err
    assert name in done.err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]
