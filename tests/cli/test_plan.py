"""Strategy files: shown, checked, compared, trained from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import Desk, events_of
from plan_edit import dotted, is_plan_field

from unisono.config import renames
from unisono.config.renames import PLAN_FIELDS
from unisono.errors import PlanError
from unisono.parallel.device import computes_bf16
from unisono.plan.options import PlanOptions
from unisono.plan.plan import Plan, field_origins
from unisono.plan.resolve import derive_plan


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    options = PlanOptions(dp_shard=2, global_batch=8, micro_batch=1)
    derive_plan(options, world_size=4, device="cpu", native_bf16=False).save(path)
    return path


def changed(file: Path, **fields: object) -> Path:
    path = file.with_name("changed.json")
    data = json.loads(file.read_text())
    for name, value in fields.items():
        group, _, short = dotted(name).rpartition(".") if is_plan_field(name) else ("", "", name)
        (data[group] if group else data)[short] = value
    path.write_text(json.dumps(data))
    return path


def test_a_plan_file_reads_back_and_is_stable(file: Path, tmp_path: Path) -> None:
    plan = Plan.load(file)
    plan.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == file.read_bytes()
    assert list(json.loads(file.read_text())) == [*plan.to_json()]


def test_show_and_check(desk: Desk, file: Path) -> None:
    shown = desk.here("plan", "show", str(file))
    assert shown.out.startswith("4 x cpu, state over 2 (ZeRO 3), fp32, batch 8 = 4 ranks x 2 x 1")
    lines = dict(line.split()[:2] for line in shown.out.splitlines()[2:] if " " in line)
    assert (lines["mesh.dp_replicate"], lines["mesh.dp_shard"], lines["fsdp.shard_threshold_numel"]) == ("2", "2", "0")
    assert desk.here("plan", "show", str(file), "--json").json["plan"]["batch"]["accumulation"] == 2
    assert desk.here("plan", "check", str(file)).out.startswith("a legal plan for 4 processes: 4 x cpu")
    assert desk.here("plan", "check", str(file), "--json").json["processes"] == 4
    other = desk.here("plan", "check", str(file), "--processes", "6")
    assert other.code == 2
    assert other.err == (
        "unisono: 2 problems\n"
        "1. dp_replicate 2 x dp_shard 2 on 6 ranks\n"
        "  rule: the product of the mesh axes is the number of ranks\n"
        "  so:   the plan is for 4 ranks\n"
        "  try:  dp_replicate=3, dp_shard=2, or launch.num_processes=4 (of a script: unisono launch -n 4)\n"
        "2. dp_shard 2 with global_batch 8 on 6 ranks\n"
        "  rule: ranks that share one copy of the state run the same passes: global_batch is a multiple of the ranks\n"
        "  so:   a rank that is done would keep the others waiting for its part of the parameters\n"
        "  try:  plan.global_batch=6\n"
    )


def test_everything_wrong_with_a_file_comes_at_once(desk: Desk, file: Path) -> None:
    fields = {"zero": 4, "dp_shard": "two", "precisions": "fp32"}
    done = desk.here("plan", "check", str(changed(file, **fields)))
    assert done.code == 2
    assert "3 problems" in done.err
    assert "there is no field 'precisions'" in done.err
    assert "did you mean 'precision'?" in done.err
    assert "dp_shard = 'two': Expected `int`, got `str`" in done.err
    assert "zero = 4: Invalid enum value 4" in done.err
    assert "try:  1 or 2 or 3" in done.err
    file.write_text("{")
    assert "strategy file" in desk.here("plan", "show", str(file)).err
    assert "No such file" in desk.here("plan", "show", str(file.with_name("none.json"))).err
    assert (
        "dp_shard, cp, tp, ep, global_batch, micro_batch, accumulation are at least 1"
        in desk.here("plan", "check", str(changed_numbers(file, micro_batch=0))).err
    )
    numbers = changed_numbers(file, accumulation=5)
    assert "accumulation=2" in desk.here("plan", "check", str(numbers)).err


def changed_numbers(file: Path, **fields: int) -> Path:
    derive_plan(PlanOptions(global_batch=8, micro_batch=1), world_size=4, device="cpu", native_bf16=False).save(file)
    return changed(file, **fields)


def test_diff(desk: Desk, file: Path) -> None:
    assert desk.here("plan", "diff", str(file), str(file)).code == 0
    done = desk.here("plan", "diff", str(file), str(changed(file, zero=1, recompute="full")))
    assert (done.code, done.out) == (1, "recompute.mode: none -> full\nfsdp.zero: 3 -> 1\n")
    assert desk.here("plan", "diff", str(file), str(changed(file, zero=2)), "--json").json == {
        "differences": [{"field": "fsdp.zero", "a": 3, "b": 2}]
    }


def test_a_run_follows_a_strategy_file_and_keeps_its_own(desk: Desk, file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    plan = derive_plan(PlanOptions(global_batch=4, micro_batch=2), world_size=1, device="cpu", native_bf16=False)
    plan.save(file)
    arguments = [*desk.settings, f"--set=run.dir={run_dir}", "--set=train.steps=2"]
    arguments = [text for text in arguments if not text.startswith("--set=plan.")]
    done = desk.here("train", "--debug", "--plan", str(file), *arguments, "--json")
    assert done.code == 0, done.err
    assert Plan.load(run_dir / "plan.json") == plan
    start = next(event for event in events_of(run_dir) if event["kind"] == "run_start")
    assert (start["plan"]["batch"]["accumulation"], start["precision_why"]) == (2, "fp32 as asked")
    assert desk.here("plan", "diff", str(run_dir), str(file)).code == 0
    both = desk.here("train", "--debug", "--plan", str(file), *arguments, "--set=plan.zero=1", "--set=plan.tf32=true")
    assert both.code == 2
    assert "with plan.zero, plan.tf32" in both.err
    evaluated = desk.here("eval", str(run_dir), "--samples", "4", "--json")
    assert evaluated.code == 0, evaluated.err


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The migration lines since the last call."""
    lines = [message for message in caplog.messages if "earlier version" in message]
    caplog.clear()
    return lines


def test_names_of_an_earlier_version_are_read_and_told_in_one_line(
    desk: Desk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = tmp_path / "run"
    old = ("--set=launch.threads=1", "--set=plan.fragments=1", "--set=sample.tokens=0")
    done = desk.train(run_dir, *old, "--set=train.steps=1", "--set=schedule.kind=constant")
    assert done.code == 0, done.err
    assert told(caplog) == [
        "the configuration uses names of an earlier version, which were read as: launch.threads → launch.num_threads, "
        "plan.fragments → plan.num_fragments, sample → nothing (this option is gone)"
    ]
    # the run keeps today's names: there is nothing more to tell
    assert "num_threads = 1" in (run_dir / "config.toml").read_text()
    again = desk.here("train", "--debug", f"--set=run.dir={run_dir}", "--set=run.resume=strict", "--set=train.steps=2")
    assert again.code == 0, again.err
    assert told(caplog) == []
    both = desk.here("train", "--debug", "--set=plan.fragments=1", "--set=plan.num_fragments=1")
    assert both.code == 2
    assert "plan.fragments is the earlier name of plan.num_fragments" in both.err


def test_a_strategy_file_of_version_2_is_shown_and_told(
    desk: Desk, file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {dotted: name for name, dotted in PLAN_FIELDS.items()}
    plan = Plan.load(file)
    values = {names.get(name, name): value for name, value in plan.decisions().items()}
    file.write_text(json.dumps(values | {"version": 2, "pins": [], "provenance": "by hand"}))
    shown = desk.here("plan", "show", str(file), "--json")
    assert Plan.from_json(shown.json["plan"]) == plan
    (line,) = told(caplog)
    assert "dp_shard → mesh.dp_shard, " in line
    file.write_text(file.read_text() + "\n")
    monkeypatch.setenv("RANK", "1")  # the other ranks of a job are silent
    renames._announced.clear()
    assert desk.here("plan", "check", str(file)).code == 0
    assert told(caplog) == []


def test_a_partial_file_is_filled_in_and_each_field_says_by_whom(desk: Desk, tmp_path: Path) -> None:
    part = tmp_path / "part.json"
    part.write_text(json.dumps({"mesh": {"dp_shard": 2}, "fsdp": {"prefetch_blocks": 1}, "batch": {"accumulation": 2}}))
    shown = desk.here("plan", "show", str(part), "--processes", "4", "--json").json
    plan = Plan.from_json(shown["plan"])
    assert (plan.mesh.dp_shard, plan.mesh.dp_replicate, plan.fsdp.prefetch_blocks) == (2, 2, 1)
    assert (plan.batch.global_batch, plan.batch.micro_batch, plan.batch.accumulation) == (8, 1, 2)
    origins = shown["origins"]
    given = {name for name, origin in origins.items() if origin == "strategy file"}
    assert given == {"mesh.dp_shard", "fsdp.prefetch_blocks", "batch.accumulation"}
    assert origins.keys() == {name for name in plan.decisions() if name != "version"}
    assert {origins[name] for name in ("mesh.dp_replicate", "batch.micro_batch", "precision.compute")} == {"planner"}
    assert {origins[name] for name in ("mesh.tp", "fsdp.zero", "sync.bucket_bytes")} == {"default"}
    text = desk.here("plan", "show", str(part)).out  # the fewest ranks that it fits
    assert text.startswith("2 x cpu, state over 2")
    assert any(line.split() == ["mesh.dp_shard", "2", "strategy", "file"] for line in text.splitlines())
    # written whole, it is the same plan, and so is what is read from that
    settings = ("--set=plan.tf32=true", f"--set=plan.file={part}", f"--set=run.dir={tmp_path / 'none'}")
    out = str(tmp_path / "whole.json")
    done = desk.here("plan", "export", *settings, "--processes=4", "--output", out)
    assert done.code == 0, done.err
    assert done.out.startswith(f"wrote {out}: 4 x cpu, state over 2")
    whole = Plan.load(out)
    assert whole == plan.updated(backend={"tf32": True})
    assert field_origins(whole)["backend.tf32"] == "setting plan.tf32"
    assert derive_plan(PlanOptions(file=out), world_size=4, device="cpu", native_bf16=False) == whole
    assert derive_plan(PlanOptions(file=out, tf32=True), world_size=4, device="cpu", native_bf16=False) == whole


def test_export_writes_what_a_run_derives_and_never_over_a_file(desk: Desk, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        "[plan]\ndevice = 'cpu'\ndp_shard = 0\nglobal_batch = 8\nrecompute = 'full'\n[launch]\nnum_processes = 2\n"
    )
    out = tmp_path / "plan.json"
    done = desk.here("plan", "export", str(config), "--output", str(out), "--json")
    assert done.code == 0, done.err
    options = PlanOptions(device="cpu", dp_shard=0, global_batch=8, recompute="full")
    plan = derive_plan(options, world_size=2, device="cpu", native_bf16=computes_bf16(torch.device("cpu")))
    assert Plan.load(out) == plan == Plan.from_json(done.json["plan"])
    assert derive_plan(PlanOptions(file=str(out)), world_size=2, device="cpu", native_bf16=False) == plan
    before = out.read_bytes()
    again = desk.here("plan", "export", str(config), "--output", str(out), "--set=plan.zero=1")
    assert (again.code, out.read_bytes()) == (2, before)
    assert again.err == (
        f"unisono: plan export --output {out}\n"
        "  rule: a file that exists is not overwritten\n"
        "  so:   nothing was written\n"
        "  try:  another name, or --force\n"
    )
    assert desk.here("plan", "export", str(config), "--output", str(out), "--set=plan.zero=1", "--force").code == 0
    assert Plan.load(out) == plan.updated(fsdp={"zero": 1})
    before = config.read_bytes()
    itself = desk.here("plan", "export", str(config), "--output", str(config), "--force")
    assert (itself.code, "does not replace a file that it is made of" in itself.err) == (2, True)
    assert config.read_bytes() == before
    nowhere = desk.here("plan", "export", str(config), "--output", str(tmp_path / "none" / "plan.json"))
    assert nowhere.code == 2
    assert "the file can be created" in nowhere.err


def test_a_partial_file_is_checked_like_a_whole_one(desk: Desk, tmp_path: Path) -> None:
    part = tmp_path / "part.json"
    part.write_text(json.dumps({"mesh": {"tpp": 2}, "fsdp": {"zero": 4}}))
    done = desk.here("plan", "check", str(part))
    assert done.code == 2
    assert "2 problems" in done.err
    assert "did you mean 'mesh.tp'?" in done.err
    part.write_text("{}")
    assert "gives at least one field of backend, batch, fsdp" in desk.here("plan", "check", str(part)).err
    part.write_text(json.dumps({"mesh": {"dp_shard": 0}}))
    assert "are at least 1" in desk.here("plan", "check", str(part)).err
    part.write_text(json.dumps({"mesh": {"tp": 2}, "fsdp": {"zero": 2}}))
    with pytest.raises(PlanError) as raised:
        derive_plan(PlanOptions(file=str(part), tp=4, cp=2), world_size=4, device="cpu", native_bf16=False)
    assert str(raised.value) == (
        f"plan.file '{part}' with plan.tp\n"
        "  rule: a field that the strategy file gives is not set to another value\n"
        "  so:   it would be unclear which of the two counts\n"
        "  try:  change tp in the file, or leave it out of one"
    )


def test_a_run_trains_with_a_partial_file_and_settings(desk: Desk, tmp_path: Path) -> None:
    run_dir, part = tmp_path / "run", tmp_path / "part.json"
    part.write_text(json.dumps({"sync": {"bucket_bytes": 4096}}))
    done = desk.train(run_dir, "--plan", str(part), "--set=train.steps=1", "--set=schedule.kind=constant")
    assert done.code == 0, done.err
    shown = desk.here("plan", "show", str(run_dir), "--json").json
    assert shown["origins"]["sync.bucket_bytes"] == "strategy file"
    assert shown["origins"]["batch.global_batch"] == "setting plan.global_batch"
    assert desk.here("eval", str(run_dir), "--samples", "4").code == 0
