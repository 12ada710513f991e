"""``unisono plan auto``, ``plan calibrate`` and ``train --plan auto``: real searches of tiny runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import Desk

from unisono.cli.plan_auto import _problems_of
from unisono.dist.interpreter import module_command, module_path
from unisono.measure.calibration import CALIBRATION_FILE, read_calibration
from unisono.plan.plan import VERSION

SMALL = (
    "model.dim=16",
    "model.num_heads=2",
    "data.seq_len=16",
    "train.steps=2",
    "train.eval_every_steps=0",
)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches run in the process of the test, which has one thread as a rank would have."""
    monkeypatch.setenv("UNISONO_TRIES_RANKS", "")


def auto(desk: Desk, *arguments: str, settings: tuple[str, ...] = (), code: int = 0):
    sets = [f"--set={setting}" for setting in (*SMALL, *settings)]
    outcome = desk.here("plan", "auto", *arguments, *sets)
    assert outcome.code == code, outcome.err or outcome.out
    return outcome


@pytest.mark.usefixtures("here")
def test_a_single_process_searches_its_micro_batch(desk: Desk) -> None:
    shown = auto(desk, "--apply=fast.toml", "--report=why.html", settings=("plan.recompute=none",)).out.splitlines()
    assert shown[0].startswith("1 rank on cpu; tensors of a rank may take")
    assert shown[1].startswith("  as configured: ")
    (verdict,) = [line for line in shown if line.startswith("fastest: ")]
    changed = shown[shown.index(verdict) + 1 : -2]
    assert changed.pop(0).startswith("nine of ten such steps take ")
    assert changed[0] == "with one setting changed:"
    assert any(line.startswith("  micro_batch=") for line in changed)
    assert shown[-2] == "kept as given: plan.recompute"
    assert shown[-1].endswith("fast.toml")
    assert desk.here("config", "show", "fast.toml").code == 0
    page = (desk.folder / "why.html").read_text()
    assert "The fastest plan of 1 rank" in page
    assert all(line.split(":")[0].strip() in page for line in changed[1:] if not line.startswith("with "))


@pytest.mark.usefixtures("here")
def test_pinned_settings_stay_and_each_plan_has_a_time_or_a_reason(desk: Desk) -> None:
    outcome = json.loads(auto(desk, "--json", settings=("plan.micro_batch=4", "plan.recompute=full")).out)
    assert outcome["pinned"] == ["micro_batch", "recompute"]
    assert set(outcome["sources"]) == {
        "peak_bytes",
        "work_s",
        "communication_s",
        "bubble_s",
        "straggler_s",
        "learned_factor",
    }
    assert outcome["neighbours"] == outcome["flips"] == []
    assert outcome["settings"] == {}
    (candidate,) = outcome["candidates"]
    assert candidate["step_s"] == candidate["work_s"] + candidate["straggler_s"] + candidate["bubble_s"]
    assert candidate["refused"] is None


@pytest.mark.usefixtures("here")
def test_nothing_fits(desk: Desk) -> None:
    outcome = auto(desk, "--memory-gib=1e-5", settings=("plan.recompute=full",), code=1)
    assert "no plan fits" in outcome.out
    assert "GiB too much" in outcome.out


@pytest.mark.usefixtures("here")
def test_links_that_were_not_measured_are_named(desk: Desk) -> None:
    error = auto(desk, "--processes=2", settings=("plan.dp_shard=2",), code=2).err
    assert "unisono plan calibrate --processes 2" in error


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("option", ["--apply", "--report"])
def test_a_file_that_exists_is_kept(desk: Desk, option: str) -> None:
    (desk.folder / "taken").write_text("# mine\n")
    refused = auto(desk, f"{option}=taken", code=2)
    assert f"{option} taken\n  rule: a file that exists is not overwritten" in refused.err
    assert refused.out == ""
    assert (desk.folder / "taken").read_text() == "# mine\n"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("option", ["--apply=none/new.toml", "--report=none/new.html"])
def test_a_folder_that_is_missing_is_told_before_the_search(desk: Desk, option: str) -> None:
    refused = auto(desk, option, code=2)
    assert "the file is written into a folder that exists" in refused.err
    assert refused.out == ""


@pytest.mark.full
def test_plan_fit_has_the_seconds_of_what_was_really_measured(desk: Desk) -> None:
    done = desk.process("plan", "calibrate", "--processes=2", "--json")
    assert done.code == 0, done.err
    sets = [f"--set={setting}" for setting in (*SMALL, "plan.precision=bf16")]
    (rung,) = desk.process("plan", "fit", "--processes=2", "--json", *sets).json["rungs"]
    assert rung["compute_s"] == rung["flops"] / (json.loads(done.out)["figures"]["device"]["tflops"] * 1e12)


@pytest.mark.full
def test_calibrated_ranks_are_searched_and_trained(desk: Desk) -> None:
    """In processes of their own: two ranks, links that are really measured, and a run of two ranks with what was found."""
    done = desk.process("plan", "calibrate", "--processes=2", "--output=box.toml", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["cluster_file"] == "box.toml"
    planned = desk.here("plan", "--cluster=box.toml", "--model=gpt2-124m", "--global-batch=8", "--json")
    assert planned.json["best"]["layout"]["num_devices"] == 2, planned.err
    stored = Path(json.loads(done.out)["stored_in"])
    assert stored.name == CALIBRATION_FILE
    operations = {rate.operation for rate in read_calibration(stored).links}
    assert operations == {"all_reduce", "all_reduce_in_step", "send", "send_in_step"}
    # what is set is not searched, so that it takes less time
    given = ("launch.num_processes=2", "plan.micro_batch=2", "plan.recompute=none", "plan.cp=1", "plan.pp=1")
    sets = [f"--set={setting}" for setting in (*SMALL, *given)]
    found = desk.process("plan", "auto", "--json", *sets)
    assert found.code == 0, found.err
    outcome = json.loads(found.out)
    tried = [candidate["settings"] for candidate in outcome["candidates"]]
    assert {"plan.dp_shard": 2} in tried
    assert {"plan.tp": 2} in tried
    assert all((candidate["step_s"] is None) == bool(candidate["refused"]) for candidate in outcome["candidates"])
    best = min(candidate["step_s"] for candidate in outcome["candidates"] if candidate["step_s"])
    (chosen,) = [candidate for candidate in outcome["candidates"] if candidate["step_s"] == best]
    assert chosen["settings"] == outcome["settings"]
    trained = desk.process("train", "--plan=auto", *sets, "--set=run.dir=run")
    assert trained.code == 0, trained.err
    plan = json.loads((desk.folder / "run" / "plan.json").read_text())
    again = desk.process("train", "--plan=auto", *sets, "--set=run.dir=run", "--set=train.steps=3")
    assert again.code == 0, again.err  # with the plan that the run has
    assert json.loads((desk.folder / "run" / "plan.json").read_text())["mesh"] == plan["mesh"]
    # semi-automatic: the file has tp and placements, and micro-batches and recompute are searched
    columns = {"module": "blocks.*.ffn", "parameter": "up.weight", "dims": ["tp", None]}
    rows = {"module": "blocks.*.ffn", "parameter": "down.weight", "dims": [None, "tp"]}
    gate = {**columns, "parameter": "gate.weight"}
    placed = {"version": VERSION, "mesh": {"tp": 2}, "tensor_parallel": {"placements": [columns, rows, gate]}}
    (desk.folder / "placed.json").write_text(json.dumps(placed))
    placed_sets = [
        *(f"--set={setting}" for setting in (*SMALL, "launch.num_processes=2")),
        "--set=plan.file=placed.json",
    ]
    semi = desk.process("plan", "auto", "--json", *placed_sets)
    assert semi.code == 0, semi.err
    candidates = json.loads(semi.out)["candidates"]
    assert sum(candidate["step_s"] is not None for candidate in candidates) >= 2
    assert not any("plan.tp" in candidate["settings"] for candidate in candidates)

    alone = [setting for setting in sets if "launch." not in setting]
    fewer = desk.process("train", "--plan=auto", *alone, "--set=run.dir=run", "--set=train.steps=4")
    assert fewer.code == 0, fewer.err  # that plan is for two ranks


def test_a_search_that_says_nothing_has_a_reason_all_the_same() -> None:
    for said in ("", "{}", "[]", '{"problems": [{}]}', '{"settings": null}'):
        (problem,) = _problems_of(said)
        assert problem.given == "train --plan auto, whose search found no plan"
        assert "unisono plan auto, which shows each plan" in problem.nearest


@pytest.mark.full
def test_a_search_ends_with_the_command_that_started_it(desk: Desk) -> None:
    """Killed outright, it cannot end the process that tries the ranks; something else does."""
    sets = [f"--set={setting}" for setting in SMALL]
    command = module_command("unisono", "plan", "auto", "--processes=2", *sets)
    environ = {**os.environ, "PYTHONPATH": module_path()}
    with subprocess.Popen(command, cwd=desk.folder, env=environ, stdout=subprocess.DEVNULL) as started:
        try:
            (search,) = waited_for(lambda: searches_of(started.pid))
            time.sleep(1)  # it is watched a moment after it was started
            search.suspend()  # so that it comes to no end of its own
        finally:
            started.kill()
    try:
        waited_for(lambda: not search.is_running() or search.status() == psutil.STATUS_ZOMBIE)
    finally:
        with suppress(psutil.NoSuchProcess):
            search.kill()


@pytest.mark.full
@pytest.mark.parametrize("command", ["auto", "fit"])
def test_what_an_interrupted_search_has_made_is_removed(desk: Desk, tmp_path: Path, command: str) -> None:
    sets = [f"--set={setting}" for setting in SMALL]
    environ = {**os.environ, "PYTHONPATH": module_path(), "TMPDIR": str(tmp_path)}
    arguments = module_command("unisono", "plan", command, "--processes=1", *sets)
    with subprocess.Popen(
        arguments, cwd=desk.folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as started:
        try:
            waited_for(lambda: list(tmp_path.glob("unisono-dry-run-*")))
            started.terminate()
            _, said = started.communicate(timeout=60)
        finally:
            started.kill()
    assert (started.returncode, said.strip()) == (75, "unisono: interrupted")
    assert not list(tmp_path.glob("unisono-dry-run-*"))


@pytest.mark.full
@pytest.mark.parametrize("command", [("plan", "auto"), ("plan", "fit"), ("train", "--dry-run")], ids=" ".join)
def test_what_a_killed_command_has_made_is_removed_by_the_next_one(
    desk: Desk, tmp_path: Path, command: tuple[str, ...]
) -> None:
    arguments = [*command, "--processes=1", *(f"--set={setting}" for setting in (*SMALL, "plan.recompute=full"))]
    environ = {**os.environ, "PYTHONPATH": module_path(), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        module_command("unisono", *arguments), cwd=desk.folder, env=environ, stdout=subprocess.DEVNULL
    ) as started:
        waited_for(lambda: list(tmp_path.glob("unisono-dry-run-*/.scratch.lock")))
        searches = psutil.Process(started.pid).children(recursive=True)
        started.kill()
    assert started.returncode == -signal.SIGKILL
    waited_for(lambda: not any(search.is_running() for search in searches))
    assert list(tmp_path.glob("unisono-dry-run-*"))
    done = desk.process(*arguments, TMPDIR=str(tmp_path))
    assert done.code == 0, done.err
    assert not list(tmp_path.glob("unisono-dry-run-*"))


def searches_of(pid: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(pid).children() if "auto" in child.cmdline()]


def waited_for(condition: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + 30
    while not (found := condition()):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    return found


def test_a_rank_of_a_job_searches_nothing(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**job, "MASTER_PORT": "29999"}.items():
        monkeypatch.setitem(os.environ, name, value)
    assert "unisono plan auto --apply FILE before" in desk.here("train", "--plan=auto").err


def test_what_the_search_refuses_starts_nothing(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_TRIES_RANKS", "")
    sets = [f"--set={setting}" for setting in (*SMALL, "plan.global_batch=3", "plan.micro_batch=4", "run.dir=none")]
    outcome = desk.here("train", "--plan=auto", *sets)
    assert outcome.code == 2
    assert "micro_batch 4 with global_batch 3" in outcome.err
    assert not (desk.folder / "none").exists()
