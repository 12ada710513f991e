"""``unisono plan --cluster … --model …``: what is printed, and what is refused."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Desk
from report_pages import charts

from unisono.measure import DeviceRate, LinkRate, add_to_calibration
from unisono.measure.calibration import CALIBRATION_FILE
from unisono.measure.ceiling import cpu_name
from unisono.planner import measured_cluster

JOB = ("--cluster", "h100x64", "--model", "llama-3-70b", "--global-batch", "256")


def test_the_best_plan_its_reasons_and_other_values(desk: Desk) -> None:
    text = desk.here("plan", *JOB)
    assert text.code == 0, text.err
    first, layout, step, *more = text.out.splitlines()
    assert first.endswith("fit into 73.6 GiB of a device")
    assert layout.startswith("device=h100 params=70552387584 precision=bf16 num_devices=64 ")
    assert step.startswith("step ")
    assert any(line.startswith(("memory decides: ", "memory does not decide: ")) for line in more)
    first_other = more.index("other values, each with the best of the other axes") + 1
    others = more[first_other : more.index("values that no layout has")]
    assert {line.split("=")[0].strip() for line in others} >= {"tp", "pp", "micro_batch", "recompute"}
    found = json.loads(desk.here("plan", *JOB, "--json").out)
    assert found["best"]["prediction"]["step_s"] == pytest.approx(found["best"]["step_s"])
    assert found["best"]["needed_bytes"] <= found["limit_bytes"]
    assert len(found["changes"]) == len(others)


def test_the_best_plan_is_what_simulate_predicts(desk: Desk) -> None:
    best = json.loads(desk.here("plan", *JOB, "--json").out)["best"]
    layout = best["layout"]
    columns = [
        f"{name}={layout[name]}" for name in ("tp", "pp", "cp", "ep", "micro_batch", "global_batch", "recompute")
    ]
    columns += [
        f"fsdp={layout['dp_shard']}",
        f"zero={layout['zero']}",
        "cut=balanced",
        f"notes=VP={layout['stages_per_rank']}",
        f"keeps={', '.join(layout['keeps'])}",
    ]
    job = ("model=llama-3-70b", "gpu_type=h100", "gpus=64", *columns)
    simulated = json.loads(desk.here("plan", "simulate", "--json", *job).out)
    assert simulated["step_s"] == pytest.approx(best["step_s"])
    assert sum(simulated["memory"].values()) - simulated["memory"]["allocator"] == pytest.approx(best["needed_bytes"])


def test_tokens_pins_and_memory(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    tokens = json.loads(desk.here("plan", *JOB[:4], "--global-batch", "2Mtok", "--pin", "tp=8", "--json").out)
    assert tokens["best"]["layout"]["global_batch"] == 256
    assert {each["layout"]["tp"] for each in (tokens["best"], *tokens["pareto"])} == {8}
    replicas = json.loads(desk.here("plan", *JOB, "--pin", "zero=0", "--json").out)
    assert replicas["best"]["layout"]["zero"] == 0
    assert "does not fit: " in desk.here("plan", *JOB, "--memory-gib", "30").out
    small = desk.here("plan", *JOB, "--memory-gib", "2", "--report=none.html")
    assert small.code == 1
    assert "no layout fits, so nothing was written for --report" in caplog.text
    assert not (desk.folder / "none.html").exists()
    assert "none fits: the one that needs least takes " in small.out
    assert "\ntry more devices or devices with more memory\n" in small.out
    pinned = desk.here("plan", *JOB, "--memory-gib", "2", "--pin", "recompute=none", "--pin", "micro_batch=2")
    assert "\ntry full recompute, a micro-batch of 1, more devices or devices with more memory\n" in pinned.out
    assert "  no layout fits either with device memory x 0.5, device memory x 2, " in small.out
    assert "the same layout" not in small.out
    large = json.loads(desk.here("plan", *JOB, "--memory-gib", "2000", "--json").out)
    assert large["best"]["layout"] == large["without_limit"]["layout"]
    assert "memory does not decide" in desk.here("plan", *JOB, "--memory-gib", "2000").out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no command, and no --cluster, --model and --global-batch"),
        (JOB[:2], "no --model, no --global-batch"),
        (
            ("--cluster", "h100", *JOB[2:]),
            "--cluster h100\n  rule: a cluster is a device and how many there are, or a TOML",
        ),
        (("--cluster", "h100x0", *JOB[2:]), "--cluster h100x0\n  rule: a cluster is a device and how many there are"),
        (("--cluster", "", *JOB[2:]), "--cluster \n  rule: a cluster is a device and how many there are"),
        (("--cluster", "h100x12", *JOB[2:]), "12 devices of h100 in domains of 8\n  rule: domains are of equal size"),
        (("--cluster", "none.toml", *JOB[2:]), "no file none.toml\n  rule: every configuration that is named exists"),
        (JOB[2:4], "no --global-batch\n  rule: a plan is searched for a model, a batch and a cluster"),
        (("--cluster", "abacusx8", *JOB[2:]), "gpu_type 'abacus', a device without a preset"),
        ((*JOB[:2], "--model", "nobody-1b", *JOB[4:]), "model 'nobody-1b'"),
        (
            (*JOB[:4], "--global-batch", "many"),
            "--global-batch many\n  rule: it is a number of sequences, or of tokens",
        ),
        ((*JOB[:4], "--global-batch", f"{'9' * 400}tok"), "tok\n  rule: it is less than 2^53"),
        ((*JOB[:4], "--global-batch", str(2**53)), f"{2**53}\n  rule: it is less than 2^53"),
        ((*JOB, "--memory-gib", "nan"), "nan is no finite number"),
        ((*JOB, "--memory-gib", "1e308"), "is not in the range"),
        ((*JOB, "--pin", "tp=2", "--pin", "tp=4"), "--pin tp=2 --pin tp=4\n  rule: an axis has one value"),
        ((*JOB, "--pin", "tpp=2"), "--pin tpp=2\n  rule: an axis is one of tp, pp"),
        ((*JOB, "--pin", "tp=two"), "--pin tp=two\n  rule: the value of an axis is a whole number above 0"),
        ((*JOB, "--pin", "schedule=1f2b"), "--pin schedule=1f2b\n  rule: a schedule is gpipe, 1f1b, interleaved, zbv"),
        (
            (*JOB, "--pin", "schedule=zbv", "--pin", "stages_per_rank=4"),
            "schedule=zbv stages_per_rank=4\n  rule: schedule=zbv: no layout has it beside the others",
        ),
        ((*JOB, "--pin", "offload=1"), "--pin offload=1\n  rule: offload is true or false"),
        (
            (*JOB, "--pin", "offload=true", "--pin", "recompute=full"),
            "--pin offload=true with recompute=full\n  rule: offload moves what blocks keep",
        ),
        ((*JOB, "--pin", "recompute=some"), "recompute is none, selective, full or partial"),
        (
            (*JOB, "--pin", "recomputed_blocks=0"),
            "--pin recomputed_blocks=0\n  rule: the value of an axis is a whole number",
        ),
        ((*JOB, "--pin", "recomputed_blocks=80"), "; partial recompute is that of fewer blocks than a stage has"),
        (
            (*JOB, "--pin", "recomputed_blocks=4", "--pin", "recompute=full"),
            "--pin recomputed_blocks=4 with recompute=full\n  rule: some blocks are recomputed in partial recompute alone",
        ),
        (
            (*JOB, "--pin", "layers_per_stage=80"),
            "--pin layers_per_stage=80\n  rule: it is the blocks of each stage of a pipeline, with commas",
        ),
        (
            (*JOB, "--pin", "layers_per_stage=40,41"),
            "layers_per_stage [40, 41], which are 81 blocks\n  rule: the model has 80 blocks\n  so:   nothing was searched\n"
            "  try:  layers_per_stage=40,40",
        ),
        (
            (*JOB, "--pin", "layers_per_stage=40,40", "--pin", "pp=4"),
            "pp=4 layers_per_stage=40,40\n  rule: pp=4: it divides the 2 stages that are given\n"
            "  so:   nothing was searched\n  try:  pp=2",
        ),
        (
            (*JOB, "--pin", "layers_per_stage=40,40", "--pin", "layers_per_stage=41,39"),
            "--pin layers_per_stage=40,40 --pin layers_per_stage=41,39\n  rule: stages have one number of blocks",
        ),
        ((*JOB, "--pin", "layer_per_stage=40,40"), "try:  did you mean 'layers_per_stage'?"),
        ((*JOB, "--pin", "recompute=ful"), "try:  did you mean 'full'?"),
        ((*JOB, "--pin", "schedule=zb"), "try:  did you mean 'zbv'?"),
        ((*JOB, "--pin", "zero=7"), "try:  zero=3"),
        ((*JOB, "--pin", "zero=4"), "--pin zero=4\n  rule: the ZeRO stage is 0, 1, 2 or 3"),
        ((*JOB, "--pin", "tp=8", "--pin", "tp=4"), "--pin tp=8 --pin tp=4\n  rule: an axis has one value"),
        ((*JOB, "--pin", "tp=7"), "unisono: tp=7\n  rule: it divides 64 heads"),
        (
            (*JOB, "--report", "none/a.html"),
            "--report none/a.html\n  rule: the file is written into a folder that exists",
        ),
        (
            (*JOB, "--apply", "none/a.json"),
            "--apply none/a.json\n  rule: the file is written into a folder that exists",
        ),
        ((*JOB, "show", "plan.json"), "options of a search before the command 'show'"),
    ],
)
def test_what_is_refused(desk: Desk, arguments: tuple[str, ...], said: str) -> None:
    answer = desk.here("plan", *arguments)
    assert answer.code == 2
    assert said in answer.err


@pytest.mark.parametrize("option", ["--apply", "--report"])
def test_a_file_that_exists_is_kept(desk: Desk, option: str) -> None:
    (desk.folder / "taken").write_text("mine\n")
    refused = desk.here("plan", *JOB, option, "taken")
    assert refused.code == 2
    assert f"{option} taken\n  rule: a file that exists is not overwritten" in refused.err
    assert refused.out == ""
    assert (desk.folder / "taken").read_text() == "mine\n"


def test_the_page_has_the_plan_its_parts_and_the_other_values(desk: Desk) -> None:
    page = desk.folder / "plan.html"
    found = desk.here("plan", *JOB, "--report=plan.html", "--json").json
    text = page.read_text()
    drawn = charts(text)
    assert set(drawn) == {"time", "memory", "passes", "front"}
    best = found["best"]["prediction"]
    assert sum(sum(bar["x"]) for bar in drawn["time"]["data"]) == pytest.approx(best["step_s"], rel=1e-3)
    assert sum(sum(bar["x"]) for bar in drawn["memory"]["data"]) * 2**30 == pytest.approx(
        sum(best["memory"].values()), rel=1e-3
    )
    assert drawn["front"]["data"][0]["y"] == [each["step_s"] for each in found["pareto"]]
    assert "Fastest layout that fits: " in text
    assert text.count("<td>tp=") >= 2
    answer = desk.here("plan", *JOB, "--report=missing/plan.html")
    assert answer.code == 2
    assert "missing" in answer.err


def test_length_precision_and_compilation_are_those_of_the_layout(desk: Desk) -> None:
    given = (
        "--seq-len=4096",
        "--precision=fp8",
        "--pin=tp=8",
        "--pin=pp=1",
        "--pin=recompute=full",
        "--pin=micro_batch=1",
    )
    eager, compiled = (
        json.loads(desk.here("plan", *JOB, *given, "--json", *more).out) for more in ((), ("--compile",))
    )
    layout = eager["best"]["layout"]
    assert (layout["seq_len"], layout["precision"], layout["micro_batch"]) == (4096, "fp8", 1)
    memory = [each["best"]["prediction"]["memory"]["allocator"] for each in (eager, compiled)]
    assert 0 < memory[1] < memory[0]


def test_a_cluster_of_ones_own(desk: Desk) -> None:
    (desk.folder / "mine.toml").write_text('device = "h100"\nnum_devices = 64\n')
    of_file, of_preset = (
        desk.here("plan", "--cluster", cluster, *JOB[2:], "--json").json for cluster in ("mine.toml", "h100x64")
    )
    assert of_file == of_preset
    (desk.folder / "slow.toml").write_text('device = "h100"\nnum_devices = 64\nlink_gb_per_s = 20\nefficiency = 0.4\n')
    slow = desk.here("plan", "--cluster", "slow.toml", *JOB[2:], "--json").json
    assert slow["best"]["step_s"] > 1.2 * of_file["best"]["step_s"]
    simulated = desk.here("plan", "simulate", "model=llama-3-8b", "gpu_type=mine.toml", "fsdp=64", "--json").json
    assert simulated["layout"]["num_devices"] == 64
    answer = desk.here("plan", "simulate", "model=llama-3-8b", "gpu_type=folder.toml")
    assert (answer.code, "no file folder.toml" in answer.err) == (2, True)


LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip


def test_a_model_of_a_hugging_face_folder(desk: Desk) -> None:
    (desk.folder / "mine").mkdir()
    (desk.folder / "mine/config.json").write_text(json.dumps(LLAMA))
    job = ("--cluster", "h100x64", "--global-batch", "256")
    preset = desk.here("plan", *job, "--model=llama-3-8b", "--json").json
    for name in ("mine", "mine/config.json", str(desk.folder / "mine")):
        found = desk.here("plan", *job, f"--model={name}", "--json").json
        assert (preset["model"], found["model"]) == ("llama-3-8b", name)
        layouts = [dict(each["best"]["layout"]) for each in (found, preset)]
        assert [layout.pop("params") for layout in layouts] == [8_030_261_248, 8_030_261_248 - 65 * 4096]
        assert layouts[0] == layouts[1]
        assert found["best"]["step_s"] == pytest.approx(preset["best"]["step_s"], rel=1e-4)
    (desk.folder / "mine/config.json").write_text(json.dumps(LLAMA | {"hidden_size": -1}))
    refused = desk.here("plan", *job, "--model=mine")
    assert refused.code == 2
    assert "mine/config.json: hidden_size = -1" in refused.err


def test_a_model_of_a_configuration_is_applied_to_its_run(desk: Desk) -> None:
    (desk.folder / "gpt.toml").write_text("[model]\nnum_layers = 8\ndim = 512\nnum_heads = 8\n[data]\nseq_len = 512\n")
    job = ("--cluster=h100x8", "--model=gpt.toml", "--global-batch=64", "--json")
    layout = desk.here("plan", *job, "--apply=plan.json").json["best"]["layout"]
    blocks = 8 * (512 * 64 * (2 * 8 + 2 * 2) + 3 * 512 * 1376 + 2 * 512)
    assert (layout["params"], layout["seq_len"]) == (blocks + 512 * (320 + 1), 512)
    assert desk.here("plan", "check", "plan.json").code == 0
    (desk.folder / "image.toml").write_text('task.kind = "image"\ndata.train = "images"\n')
    refused = desk.here("plan", "--cluster=h100x8", "--model=image.toml", "--global-batch=64")
    assert refused.code == 2
    assert "image.toml: components.model 'resnet' for task.kind 'image'" in refused.err
    assert "unisono plan auto image.toml or unisono plan fit image.toml" in refused.err


def test_names_of_devices_are_text_in_the_page(desk: Desk) -> None:
    figures = "num_devices = 1\nmemory_gib = 80\nmemory_tb_per_s = 1\ntflops.bf16 = 100\n"
    (desk.folder / "named.toml").write_text(f'device = "<b>\\u001b[31m"\n{figures}')
    answer = desk.here(
        *("plan", "--cluster=named.toml", "--model=gpt2-124m", "--global-batch=8", "--report=named.html")
    )
    assert (answer.code, "\x1b" in answer.out) == (0, False)
    text = (desk.folder / "named.html").read_text()
    assert "on 1 &lt;b&gt;" in text
    assert "on 1 <b>" not in text
    assert "\x1b" not in text


def test_without_a_cluster_it_is_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_cluster, "_accelerator_names", lambda: [])
    desk, job = Desk(folder=tmp_path, cache=tmp_path / "cache"), ("--model=gpt2-124m", "--global-batch=64")
    answer = desk.here("plan", *job)
    assert answer.code == 2
    assert "that was not measured\n  rule: without --cluster the devices of this machine are taken" in answer.err
    assert "try:  unisono plan calibrate" in answer.err
    hosts = (socket.gethostname(),)
    rate = DeviceRate(
        hosts=hosts, name=cpu_name(), ranks=2, tflops=0.5, memory_bytes=2**34, memory_bytes_per_s=2e10, spread_frac=0.0
    )
    link = LinkRate(
        operation="all_reduce", transport="gloo", ranks=2, hosts=hosts, nbytes=1 << 26, seconds=0.05, spread_frac=0.0
    )
    add_to_calibration(tmp_path / "cache" / "unisono" / CALIBRATION_FILE, devices=[rate], links=[link])
    answer = desk.here("plan", *job)
    assert answer.code == 0, answer.err
    assert f"device={cpu_name()} params=123532032 precision=bf16 num_devices=2 " in answer.out
    assert " 0 TFLOP/s" not in answer.out  # of a CPU it is less than one
    monkeypatch.setattr(measured_cluster, "_accelerator_names", lambda: ["NVIDIA H100 80GB HBM3"] * 4)
    assert desk.here("plan", *job, "--json").json == desk.here("plan", "--cluster=h100x4", *job, "--json").json


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("box.json", "the name of such a file ends in .toml\n"),
        ("taken.toml", "a file that exists is not overwritten"),
        ("nowhere/box.toml", "the file is written into a folder that exists"),
    ],
)
def test_names_that_are_refused_before_anything_is_measured(desk: Desk, output: str, said: str) -> None:
    (desk.folder / "taken.toml").write_text("# mine\n")
    answer = desk.here("plan", "calibrate", f"--output={output}")
    assert answer.code == 2
    assert said in answer.err
    assert "so:   nothing was measured" in answer.err
    assert (desk.folder / "taken.toml").read_text() == "# mine\n"


def test_what_would_change_the_decision_fewer_devices_and_rules(desk: Desk) -> None:
    text = desk.here("plan", *JOB).out.splitlines()
    found = json.loads(desk.here("plan", *JOB, "--json").out)
    flips = text[text.index("what would change the decision") + 1 : text.index("all devices, and fewer")]
    other = [f"{flip['changed']} x {flip['factor']:g}" for flip in found["flips"] if flip["is_other"]]
    assert len(found["flips"]) == 10
    assert [line.strip()[: len(name)] for line, name in zip(flips, other, strict=False)] == other
    assert flips[-1].startswith("  the same layout with ")
    assert [each["num_devices"] for each in found["device_counts"]] == [64, 32, 16]
    assert found["device_counts"][0]["best"]["step_s"] == found["best"]["step_s"]
    assert any(line.startswith("  tp=16, 32, 64") and line.endswith("fast links connect 8 devices") for line in text)
    assert {(each["axis"], each["value"]) for each in found["refused"]} >= {("tp", 16), ("cp", 2), ("ep", 2)}
    assert all(each["reason"] for each in (*found["changes"], *found["refused"]))


def test_each_part_says_how_it_is_known_and_each_stage_what_it_needs(desk: Desk) -> None:
    given = (*JOB, "--pin", "pp=4")
    text = desk.here("plan", *given).out
    found = json.loads(desk.here("plan", *given, "--json").out)
    best = found["best"]
    for name in (*best["prediction"]["parts_s"], *best["prediction"]["memory"], "step_s", "needed_bytes", "params"):
        assert found["sources"][name]["kind"] in ("exact", "modelled", "fitted")
    lines = [line.split() for line in text.splitlines()]
    assert ["states", "exact"] in [[line[0], line[-1]] for line in lines if line]
    assert ["matmul", "fitted"] in [[line[0], line[-1]] for line in lines if line]
    assert list(best["stages"]) == ["first", "middle", "last"]
    assert max(stage["needed_bytes"] for stage in best["stages"].values()) == pytest.approx(best["needed_bytes"])
    assert sum("stage" in line[1:2] for line in lines) == 3
    assert best["refused_by_runs"] == ""


def test_partial_recompute_is_told_in_text_json_and_page(desk: Desk) -> None:
    given = (*JOB, "--memory-gib=44", "--pin=zero=1")
    text = desk.here("plan", *given, "--report=partial.html")
    assert text.code == 0, text.err
    found = desk.here("plan", *given, "--json").json
    layout = found["best"]["layout"]
    counts = layout["recomputed_blocks"]
    assert layout["recompute"] == "partial"
    assert len(counts) == layout["pp"] * layout["stages_per_rank"]
    told = f"fits with {sum(counts)} of 80 blocks recomputed, "
    assert f"recompute=partial recomputed_blocks={','.join(map(str, counts))}\n" in text.out
    assert told in text.out
    assert "; without any it would need " in text.out
    assert " blocks, " in text.out
    stages = found["best"]["stages"].values()
    assert all(f"{it['blocks']:g} blocks, {it['recomputed_blocks']:g} recomputed\n" in text.out for it in stages)
    page = (desk.folder / "partial.html").read_text()
    assert f"The layout {told}" in page
    assert f"recompute=partial ({sum(counts)} of 80 blocks)" in page
    (full,) = (each for each in found["changes"] if (each["axis"], each["value"]) == ("recompute", "full"))
    assert full["step_s"] > found["best"]["step_s"]
    # memory changes how many blocks are recomputed, which is another decision
    assert any(flip["is_other"] and flip["changed"] == "device memory" for flip in found["flips"])
    pinned = desk.here("plan", *JOB, "--pin=recomputed_blocks=2", "--json").json
    assert {max(each["layout"]["recomputed_blocks"]) for each in (pinned["best"], *pinned["pareto"])} == {2}


def test_a_pinned_cut_is_in_text_json_page_and_strategy_file_and_simulate_predicts_it(desk: Desk) -> None:
    given = (*JOB, "--pin=layers_per_stage=18,20,20,22", "--pin=tp=8")
    text = desk.here("plan", *given, "--report=cut.html", "--apply=cut.json")
    assert text.code == 0, text.err
    assert " cut=given layers_per_stage=18,20,20,22 " in text.out
    found = desk.here("plan", *given, "--json").json
    for each in (found["best"], found["smallest"], *found["pareto"], *found["changes"]):
        assert each["layout"]["layers_per_stage"] == [18, 20, 20, 22]
    page = (desk.folder / "cut.html").read_text()
    assert "blocks of each stage" in page
    assert "18, 20, 20, 22" in page
    layout = found["best"]["layout"]
    assert json.loads((desk.folder / "cut.json").read_text())["pipeline"]["layers_per_stage"] == [18, 20, 20, 22]
    columns = [
        f"{name}={layout[name]}"
        for name in ("tp", "pp", "micro_batch", "global_batch", "recompute", "zero", "cut", "schedule")
    ]
    job = ("model=llama-3-70b", "gpu_type=h100", "gpus=64", *columns, "layers_per_stage=18,20,20,22")
    if layout["recomputed_blocks"]:
        job = (*job, f"recomputed_blocks={','.join(map(str, layout['recomputed_blocks']))}")
    simulated = desk.here("plan", "simulate", "--json", *job).json
    assert simulated["step_s"] == pytest.approx(found["best"]["step_s"])
    wrong = desk.here("plan", "simulate", *job[:-1], "recompute=none") if layout["recomputed_blocks"] else None
    assert wrong is None or wrong.code == 2


def test_partial_recompute_is_what_simulate_predicts(desk: Desk) -> None:
    best = desk.here("plan", *JOB, "--memory-gib=44", "--pin=zero=1", "--json").json["best"]
    layout = best["layout"]
    columns = [
        f"{name}={layout[name]}" for name in ("tp", "pp", "micro_batch", "global_batch", "recompute", "zero", "cut")
    ]
    columns += [
        f"recomputed_blocks={','.join(map(str, layout['recomputed_blocks']))}",
        f"fsdp={layout['dp_shard']}",
        f"notes=VP={layout['stages_per_rank']}",
        f"keeps={', '.join(layout['keeps'])}",
    ]
    simulated = desk.here("plan", "simulate", "--json", "model=llama-3-70b", "gpu_type=h100", "gpus=64", *columns).json
    assert simulated["step_s"] == pytest.approx(best["step_s"])
    assert sum(simulated["memory"].values()) - simulated["memory"]["allocator"] == pytest.approx(best["needed_bytes"])


@pytest.mark.full
@pytest.mark.parametrize(
    "pins",
    [
        ("dp_shard=2", "zero=2"),
        ("pp=2", "stages_per_rank=2"),
        ("pp=2", "stages_per_rank=2", "recomputed_blocks=2"),
        ("pp=1", "zero=1", "recompute=partial"),
        ("pp=2", "schedule=zbv"),
        ("pp=2", "schedule=gpipe"),
        ("pp=2", "schedule=1f1b"),
    ],
    ids=str,
)
def test_a_run_trains_with_the_strategy_file_of_a_layout(desk: Desk, tmp_path: Path, pins: tuple[str, ...]) -> None:
    file = str(tmp_path / "plan.json")
    job = (
        "--cluster=h100x2",
        "--model=gpt2-124m",
        "--global-batch=4",
        *(f"--pin={pin}" for pin in pins),
        "--pin=micro_batch=1",
    )
    planned = desk.here("plan", *job, f"--apply={file}", "--json")
    assert planned.code == 0, planned.err
    assert desk.here("plan", "check", file, "--processes=2").code == 0
    assert desk.here("plan", *job, f"--apply={file}").code == 2
    settings = (
        *("model.dim=16", "model.num_heads=2", "model.num_layers=12", "data.seq_len=16", "train.steps=2"),
        *("launch.num_processes=2", f"run.dir={tmp_path / 'run'}", "plan.device=cpu", "train.eval_every_steps=0"),
    )
    done = desk.process("train", "--plan", file, *(f"--set={setting}" for setting in settings))
    assert done.code == 0, done.err
    plan = json.loads(desk.here("plan", "show", str(tmp_path / "run"), "--json").out)["plan"]
    layout = json.loads(planned.out)["best"]["layout"]
    assert (plan["mesh"]["pp"], plan["mesh"]["dp_shard"]) == (layout["pp"], layout["dp_shard"])
    assert plan["batch"] == {"global_batch": 4, "micro_batch": 1, "accumulation": 4 // layout["dp"]}
    assert layout["pp"] == 1 or (plan["pipeline"]["schedule"], sum(plan["pipeline"]["layers_per_stage"])) == (
        layout["schedule"],
        12,
    )
    assert layout["pp"] > 1 or plan["fsdp"]["zero"] == layout["zero"]
    assert plan["recompute"]["blocks_per_stage"] == layout["recomputed_blocks"]
    assert (plan["recompute"]["mode"] == "full") == (layout["recompute"] == "partial")


def test_a_layout_that_no_run_has_says_so_and_is_not_written(desk: Desk, tmp_path: Path) -> None:
    file = str(tmp_path / "plan.json")
    given = (*JOB, "--precision=fp8", "--pin=tp=8", "--pin=pp=1")
    text = desk.here("plan", *given)
    assert "unisono train refuses this layout: precision fp8 with tp 8" in text.out
    applied = desk.here("plan", *given, f"--apply={file}")
    assert applied.code == 2
    assert "runs compute in bf16 or fp16, and without tp in fp8" in applied.err
    assert not Path(file).exists()


def test_offload_is_told_in_text_json_and_page_and_written(desk: Desk) -> None:
    job = ("--cluster=gh200x64", *JOB[2:], "--seq-len=8192")
    text = desk.here("plan", *job, "--report=moved.html", "--apply=moved.json")
    assert text.code == 0, text.err
    found = desk.here("plan", *job, "--json").json
    best = found["best"]
    assert best["layout"]["offload"] is True
    assert " recompute=none offload=true\n" in text.out
    assert "\n  on the host " in text.out
    assert best["prediction"]["host_bytes"] > 2**30
    assert found["sources"]["offload"]["kind"] == "modelled"
    (other,) = (each for each in found["changes"] if each["axis"] == "offload")
    assert other["value"] is False
    assert other["step_s"] > best["step_s"]
    assert "\n  offload=false        +" in text.out
    page = (desk.folder / "moved.html").read_text()
    assert "on the host, of each device" in page
    assert ">offload</td>" in page
    assert desk.here("plan", "check", "moved.json").out.startswith("a legal plan for 64 processes: 64 x ")
    layout = best["layout"]
    names = ("tp", "pp", "micro_batch", "global_batch", "zero", "cut", "schedule")
    columns = [f"{name}={layout[name]}" for name in names if layout[name] is not None]
    columns += [f"seq_len={layout['seq_len']}", "offload=true", f"fsdp={layout['dp_shard']}", "gpus=64"]
    columns += [f"notes=VP={layout['stages_per_rank']}"]
    simulated = desk.here("plan", "simulate", "--json", "model=llama-3-70b", "gpu_type=gh200", *columns).json
    assert simulated["step_s"] == pytest.approx(best["step_s"])
    (desk.folder / "own.toml").write_text('device = "gh200"\nnum_devices = 64\nhost_gb_per_s = 20\n')
    slow = desk.here("plan", "--cluster=own.toml", *job[1:], "--json").json
    assert slow["best"]["layout"]["offload"] is False


OWN = """
from unisono import Components, DataOptions, RunConfig
from unisono.models.gpt import GPT, ModelOptions

def make():
    return GPT(ModelOptions(num_layers=4, dim=64, num_heads=4, vocab_size=96))

def config():
    return RunConfig(components=Components(model=lambda config: make()), data=DataOptions(seq_len=64))
"""


def test_a_model_of_ones_own_code(desk: Desk) -> None:
    (desk.folder / "own.py").write_text(OWN)
    job = ("--cluster=h100x4", "--global-batch=64", "--json")
    named = desk.here("plan", *job, "--model=own.py:make", "--seq-len=64", "--apply=own.json")
    assert named.code == 0, named.err
    layout = named.json["best"]["layout"]
    assert (layout["seq_len"], layout["tp"]) == (64, 1)
    assert desk.here("plan", "check", "own.json").code == 0
    configured = desk.here("plan", *job, "--model=own.py").json
    assert configured["best"] == named.json["best"]
    unnamed = desk.here("plan", *job, "--model=own.py:none_such")
    assert (unnamed.code, "own.py has no none_such" in unnamed.out) == (2, True)


def test_code_that_a_run_folder_names_needs_trust(desk: Desk) -> None:
    (desk.folder / "run").mkdir()
    (desk.folder / "run/own.py").write_text(OWN.replace("dim=64", "dim=128"))
    (desk.folder / "run/config.toml").write_text('base = "own.py"\n')
    job = ("plan", "--cluster=h100x4", "--global-batch=64", "--model=run", "--json")
    refused = desk.here(*job)
    assert refused.code == 2
    assert "is a file that you have not run in this form" in refused.out
    assert desk.here(*job, "--trust-python").json["best"]["layout"]["seq_len"] == 64


GPT = "[model]\nnum_layers = 4\ndim = 512\nnum_heads = 8\nnum_kv_heads = 4\nvocab_size = 1000\n[data]\nseq_len = 512\n"
# without recompute it needs more than this as traced, and less as counted
TRACED = (
    *("--cluster", "h100x2", "--model", "gpt.toml", "--global-batch", "16", "--pin", "pp=2", "--pin", "schedule=1f1b"),
    *("--pin", "micro_batch=4", "--pin", "zero=0", "--trace"),
)


def test_finalists_are_traced_and_decide(desk: Desk) -> None:
    (desk.folder / "gpt.toml").write_text(GPT)
    outputs = ("--json", "--apply", "best.json", "--report", "page.html")
    found = desk.here("plan", *TRACED, "--memory-gib", "0.33", *outputs).json
    finalists = found["traced"]["finalists"]
    assert [each["fits"] for each in finalists[:2]] == [False, True]
    assert finalists[0]["counted_bytes"] <= found["limit_bytes"] < finalists[0]["traced_bytes"]
    assert {each["confidence"] for each in finalists} == {"exact"}
    best = next(each for each in finalists if each["layout"] == found["best"]["layout"])
    assert best["fits"]
    assert best["traced_bytes"] == found["best"]["needed_bytes"] == found["best"]["prediction"]["memory"]["traced"]
    assert found["sources"]["traced"]["kind"] == "exact"
    applied = json.loads((desk.folder / "best.json").read_text())["recompute"]
    assert applied == {"mode": "selective"}
    assert found["best"]["layout"]["recompute"] == "selective"
    page = (desk.folder / "page.html").read_text()
    assert "Traced layouts" in page
    assert "does not fit" in page


def test_where_no_traced_layout_fits(desk: Desk) -> None:
    (desk.folder / "gpt.toml").write_text(GPT)
    none = desk.here("plan", *TRACED, "--memory-gib", "0.2", "--pin", "recompute=full")
    assert none.code == 1
    _, head, finalist, end, *_ = none.out.splitlines()
    assert head == "traced as unisono runs them (exact); counts of other layouts are corrected by these"
    assert re.fullmatch(
        r"  counted [\d.]+ GiB, traced [\d.]+ GiB: does not fit, \S+ s, with pp=2 micro_batch=4 recompute=full",
        finalist,
    )
    assert end == "none of 1 traced layouts fits; by corrected counts none does"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--compile",), "--trace --compile"),
        (("--pin", "offload=true"), "--trace --pin offload=true"),
    ],
)
def test_what_is_not_traced_is_refused(desk: Desk, arguments: tuple[str, ...], said: str) -> None:
    refused = desk.here("plan", *JOB, "--trace", *arguments)
    assert refused.code == 2
    assert said in refused.err


def test_a_model_that_unisono_does_not_build_is_not_traced(desk: Desk) -> None:
    job = ("--cluster", "h100x8", "--model", "gpt2-1.5b", "--global-batch", "64")
    text = desk.here("plan", *job, "--trace")
    assert (
        "traced: no: feed-forward layers of the model have no gate, and a trace is of unisono's gpt or moe" in text.out
    )
    plain, traced = (json.loads(desk.here("plan", *job, *more, "--json").out) for more in ((), ("--trace",)))
    assert "traced" not in plain
    assert traced.pop("traced")["finalists"] == []
    assert traced == plain


def test_torch_is_imported_for_traces_alone(desk: Desk) -> None:
    script = "import sys; from unisono.cli.main import entry; sys.argv = ['unisono', *sys.argv[1:]]\n"
    script += "try: entry()\nexcept SystemExit: pass\nsys.exit('torch' in sys.modules)"
    for more in ((), ("--trace",)):  # a model that is not traced
        command = [sys.executable, "-c", script, "plan", *JOB[:2], "--model", "gpt2-1.5b", *JOB[4:], *more]
        done = subprocess.run(command, cwd=desk.folder, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
