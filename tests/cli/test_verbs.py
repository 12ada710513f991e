"""Every verb but train: what it prints, as text and as JSON, and the code it ends with."""

from __future__ import annotations

import json
import math
import shutil
import tomllib
from pathlib import Path

import jsonschema
import pytest
from commands import Desk, events_of, problem
from safetensors import safe_open

from unisono.checkpoint import list_checkpoints
from unisono.checkpoint.reader import read_manifest
from unisono.cli.common import print_json

# --- init ------------------------------------------------------------------------------------------------------------


def test_init_writes_a_starter_that_means_the_defaults(desk: Desk, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    done = desk.here("init", str(path))
    assert (done.code, done.out, done.err) == (0, f"wrote {path}; try: unisono train {path}\n", "")
    assert desk.here("config", "show", str(path)).out == desk.here("config", "show").out
    again = desk.here("init", str(path))
    assert again.code == 2
    assert again.err == (
        f"unisono: init {path}\n  rule: a file that exists is not overwritten\n  so:   nothing was written\n"
        f"  try:  another name, or remove {path} first\n"
    )


def test_init_where_nothing_can_be_written(desk: Desk, tmp_path: Path) -> None:
    done = desk.here("init", str(tmp_path / "no/run.toml"), "--json")
    assert (done.code, done.err) == (2, "")
    assert done.json == {
        "error": "ConfigError",
        "problems": [
            {
                "given": f"init {tmp_path}/no/run.toml: No such file or directory",
                "rule": "the file can be created",
                "consequence": "nothing was written",
                "nearest": "a path in a folder that exists and that you may write to",
            }
        ],
    }


def test_the_python_template_trains_and_goes_on_from_its_folder(desk: Desk, tmp_path: Path) -> None:
    path, run_dir = tmp_path / "run.py", tmp_path / "run"
    assert desk.here("init", "--python", str(path), "--json").json == {"path": str(path)}
    code = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith(('"""', "#"))]
    assert len(code) == 10
    assert f"unisono train {path.name}" in path.read_text()
    small = [text for text in desk.settings if not text.startswith(("--set=model.", "--set=train.steps"))]
    first = desk.here(
        "train", str(path), "--debug", *small, "--set=train.steps=3", f"--set=run.dir={run_dir}", "--json"
    )
    assert first.code == 0, first.err
    assert first.json["step"] == 3
    assert first.json["evaluation"].keys() == {"loss", "bits_per_byte", "accuracy"}
    assert "sample" not in first.json
    # the folder alone: its config.toml names the file, which gives the callables
    again = desk.here("train", "--debug", f"--set=run.dir={run_dir}", "--set=train.steps=5")
    assert again.code == 0, again.err
    assert "generate" not in again.out
    assert [e["step"] for e in events_of(run_dir) if e["kind"] == "step"] == [1, 2, 3, 4, 5]
    with safe_open(run_dir / "export/model.safetensors", "pt") as file:
        assert {name: file.get_tensor(name).shape for name in file.keys()} == {"weight": (257, 257)}  # noqa: SIM118
    assert not (run_dir / "export/config.json").exists()
    assert desk.here("eval", str(run_dir), "--json").json["step"] == 5
    refused = desk.here("generate", str(run_dir))
    assert refused.code == 2
    assert refused.err == (
        "unisono: generate with Bigram on tokens\n  rule: text is written by the reference GPT, trained on tokens\n"
        "  so:   there is nothing to print\n  try:  call your own model from Python\n"
    )


# --- eval, generate --------------------------------------------------------------------------------------------------


def test_eval_repeats_the_number_of_training(desk: Desk, trained: Path) -> None:
    last = [event for event in events_of(trained) if event["kind"] == "eval"][-1]
    same = desk.here("eval", str(trained), "--samples=4", "--json").json
    assert same.keys() == {"run_dir", "step", "samples", "samples_total", "evaluation"}
    assert (same["step"], same["samples"]) == (4, 4)
    assert same["evaluation"] == pytest.approx({k: last[f"eval/{k}"] for k in ("loss", "bits_per_byte", "accuracy")})
    everything = desk.here("eval", str(trained), "--samples=100000", "--json").json
    assert everything["samples"] == desk.here("eval", str(trained), "--json").json["samples"] > 4
    text = desk.here("eval", str(trained), "--samples=4", "--log-level=error")
    assert text.code == 0
    assert text.out.splitlines()[0] == "step 4, 4 of 33 held-out samples"
    assert text.out.splitlines()[1] == f"  loss             {same['evaluation']['loss']:.4f}"


def test_eval_of_an_earlier_checkpoint(desk: Desk, trained: Path) -> None:
    path = trained / "checkpoints/step-00000002"
    assert desk.here("eval", str(trained), "--checkpoint", str(path), "--json").json["step"] == 2
    missing = desk.here("eval", str(trained), "--checkpoint", str(trained / "checkpoints/step-00000003"))
    assert missing.code == 2
    assert f"unisono: {trained}/checkpoints/step-00000003: " in missing.err


def test_a_variable_moves_a_run_to_another_device(desk: Desk, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO__PLAN__DEVICE", "none_such")
    done = desk.here("eval", str(trained))
    assert done.code == 2
    assert "plan.device 'none_such'" in done.err


def test_generate_is_a_function_of_its_seed(desk: Desk, trained: Path) -> None:
    def written(*arguments: str) -> str:
        done = desk.here("generate", str(trained), "--tokens=24", "--prompt=class ", *arguments)
        assert done.code == 0, done.err
        return done.out

    assert written("--seed=1") == written("--seed=1")
    assert written("--seed=1") != written("--seed=2")
    assert written("--temperature=0", "--seed=1") == written("--temperature=0", "--seed=2")
    assert written("-v").startswith("class ")
    told = desk.here("generate", str(trained), "--json").json
    assert told.keys() == {"run_dir", "step", "text"}
    assert told["text"].startswith("def ")


def test_generate_needs_no_corpus(desk: Desk, shared_desk: Desk, mine: Path) -> None:
    text = (mine / "config.toml").read_text()
    (mine / "config.toml").write_text(text.replace(str(shared_desk.folder / "corpus"), "/gone"))
    assert desk.here("generate", str(mine)).code == 0
    assert desk.here("eval", str(mine)).code == 2


# --- config ----------------------------------------------------------------------------------------------------------


def test_config_show_says_where_each_value_comes_from(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base.toml").write_text("[optim]\nlr = 0.5\nbeta1 = 0.8\n")
    (tmp_path / "top.toml").write_text('base = "base.toml"\n\n[optim]\nlr = 0.25\n')
    monkeypatch.setenv("UNISONO__OPTIM__BETA2", "0.9")
    given = ["config", "show", str(tmp_path / "top.toml"), "-s", "run.seed=7"]
    rows = [line.split() for line in desk.here(*given, "--origin").out.splitlines()]
    found = {key: (value, " ".join(origin)) for key, value, *origin in rows if len(value) < 6}
    assert found["optim.lr"] == ("0.25", f"{tmp_path}/top.toml:4")
    assert found["optim.beta1"] == ("0.8", f"{tmp_path}/base.toml:3")
    assert found["optim.beta2"] == ("0.9", "env UNISONO__OPTIM__BETA2")
    assert found["run.seed"] == ("7", "--set")
    assert found["model.dropout"] == ("0.0", "default")
    told = desk.here(*given, "--json").json
    assert told["values"]["optim.lr"] == {"value": "0.25", "origin": f"{tmp_path}/top.toml:4"}
    # what is shown is a file, and means the same
    shown = desk.here(*given).out
    assert tomllib.loads(shown)["optim"]["lr"] == 0.25
    (tmp_path / "shown.toml").write_text(shown)
    monkeypatch.delenv("UNISONO__OPTIM__BETA2")
    assert desk.here("config", "show", str(tmp_path / "shown.toml"), "--json").json["hash"] == told["hash"]


def test_config_explain(desk: Desk) -> None:
    text = desk.here("config", "explain", "plan.micro_batch").out
    assert text.startswith("plan.micro_batch\n  Samples per forward pass on one rank; ")
    assert desk.here("config", "explain", "plan.micro_batch", "--json").json == {
        "key": "plan.micro_batch",
        "text": text.rstrip("\n"),
    }
    wrong = desk.here("config", "explain", "plan.microbatch")
    assert wrong.code == 2
    assert "try:  did you mean plan.micro_batch?" in wrong.err


def test_config_schema_accepts_what_show_prints(desk: Desk) -> None:
    schema = desk.here("config", "schema", "--json").json
    assert schema == desk.here("config", "schema").json
    jsonschema.Draft202012Validator.check_schema(schema)
    shown = tomllib.loads(desk.here("config", "show").out)
    jsonschema.validate(shown, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"optim": {"lt": 1}}, schema)


def test_config_diff(desk: Desk, tmp_path: Path) -> None:
    a, b = tmp_path / "a.toml", tmp_path / "b.toml"
    a.write_text("[optim]\nlr = 0.5\n")
    b.write_text("[run]\nseed = 3\n")
    done = desk.here("config", "diff", str(a), str(b))
    default = desk.here("config", "show", "--json").json["values"]["optim.lr"]["value"]
    assert done.code == 1
    assert done.out == f"run.seed: 0 (default) -> 3 ({b}:2)\noptim.lr: 0.5 ({a}:2) -> {default} (default)\n"
    told = desk.here("config", "diff", str(a), str(b), "--json")
    assert told.code == 1
    assert told.json["differences"][0] == {"key": "run.seed", "a": "0", "b": "3"}
    same = desk.here("config", "diff", str(a), str(a), "--json")
    assert (same.code, same.json) == (0, {"differences": []})


# --- checkpoint ------------------------------------------------------------------------------------------------------


def test_checkpoint_ls_and_verify(desk: Desk, mine: Path, caplog: pytest.LogCaptureFixture) -> None:
    listed = desk.here("checkpoint", "ls", str(mine), "--json").json["checkpoints"]
    assert [(row["step"], row["state"]) for row in listed] == [(2, "committed"), (4, "committed")]
    assert all(row["bytes"] == sum(f.stat().st_size for f in Path(row["path"]).iterdir()) for row in listed)
    assert [line.split()[:2] for line in desk.here("checkpoint", "ls", str(mine)).out.splitlines()] == [
        ["2", "committed"],
        ["4", "committed"],
    ]
    whole = desk.here("checkpoint", "verify", str(mine))
    assert (whole.code, whole.out) == (0, "".join(f"ok   {row['path']}\n" for row in listed))
    (shard,) = Path(listed[1]["path"]).glob("shard-*")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    bad = desk.here("checkpoint", "verify", str(mine))
    assert bad.code == 1
    assert bad.out == (
        f"ok   {listed[0]['path']}\n"
        f"bad  {listed[1]['path']}\n"
        f"     {listed[1]['path']}: {shard.name} has another digest than when it was written\n"
        "       rule: every file of a checkpoint has the size and digest its manifest says, and COMMIT seals the manifest\n"
        "       so:   it will not be resumed from\n"
        '       try:  resume = "auto" moves it into quarantine and takes the one before\n'
    )
    evaluated = desk.here("eval", str(mine), "--json")  # the one before is taken, and nothing is moved
    assert evaluated.code == 0, evaluated.err
    assert evaluated.json["step"] == 2
    assert f"{listed[1]['path']} is damaged and was not taken: " in caplog.text
    assert Path(listed[1]["path"]).is_dir()
    one = desk.here("checkpoint", "verify", listed[1]["path"], "--json")
    assert one.code == 1
    assert one.json["ok"] is False
    assert [(row["path"], row["ok"]) for row in one.json["checkpoints"]] == [(listed[1]["path"], False)]


def test_checkpoint_verbs_where_there_is_nothing(desk: Desk, tmp_path: Path) -> None:
    assert desk.here("checkpoint", "ls", str(tmp_path)).out == f"no checkpoints in {tmp_path}\n"
    nearest = "  try:  the folder given as run.dir when training (default runs/first)\n"
    rule = "  rule: checkpoints lie in the folder 'checkpoints' of a run's folder\n"
    missing = desk.here("checkpoint", "ls", str(tmp_path / "no"))
    assert missing.code == 2
    assert missing.err == f"unisono: no folder '{tmp_path}/no'\n{rule}  so:   nothing was listed\n{nearest}"
    (tmp_path / "checkpoints").mkdir()
    empty = desk.here("checkpoint", "verify", str(tmp_path))
    assert empty.code == 2
    assert empty.err == (
        f"unisono: '{tmp_path}' holds no committed checkpoint\n{rule}  so:   nothing was verified\n{nearest}"
    )


def test_checkpoint_export(desk: Desk, trained: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    done = desk.here("checkpoint", "export", str(trained), str(target), "--json")
    assert done.json == {"run_dir": str(trained), "step": 4, "path": str(target)}
    assert (target / "model.safetensors").read_bytes() == (trained / "export/model.safetensors").read_bytes()
    earlier = str(trained / "checkpoints/step-00000002")
    again = desk.here("checkpoint", "export", str(trained), str(target), "--checkpoint", earlier)
    assert again.out == f"step 2 exported to {target}\n"
    assert (target / "model.safetensors").read_bytes() != (trained / "export/model.safetensors").read_bytes()


def test_checkpoint_export_in_several_files(desk: Desk, trained: Path, tmp_path: Path) -> None:
    done = desk.here("checkpoint", "export", str(trained), str(tmp_path / "out"), "--max-shard-gib", "0.00001")
    assert done.code == 0
    assert len(list((tmp_path / "out").glob("model-0*-of-0*.safetensors"))) > 1
    assert (tmp_path / "out/model.safetensors.index.json").is_file()


def test_checkpoint_convert(desk: Desk, trained: Path, tmp_path: Path) -> None:
    source = str(trained / "checkpoints/step-00000002")
    done = desk.here(
        "checkpoint", "convert", source, str(tmp_path / "out"), "--files", "2", "--drop-optimizer", "--json"
    )
    assert done.json["path"] == str(tmp_path / "out/step-00000002")
    assert 0 < done.json["bytes"] < sum(f.stat().st_size for f in Path(source).iterdir()) / 2
    assert desk.here("checkpoint", "verify", done.json["path"]).code == 0
    gone = desk.here("checkpoint", "convert", str(tmp_path / "none"), str(tmp_path / "out"))
    assert gone.code == 2
    assert "nothing was written" in gone.err
    whole = desk.here("checkpoint", "convert", str(trained), str(tmp_path / "out"))
    assert whole.code == 2
    assert "is the folder of a run" in whole.err
    assert "checkpoints/step-00000004" in whole.err


def test_an_export_never_replaces_what_is_no_export(desk: Desk, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    for target in (str(tmp_path), str(tmp_path / "thesis.txt")):
        done = desk.here("checkpoint", "export", str(trained), target)
        assert done.code == 2
        assert done.err == (
            f"unisono: export to '{target}', where there is thesis.txt\n"
            "  rule: an export is a new folder, or takes the place of an earlier export\n"
            "  so:   nothing was exported and nothing was removed\n"
            f"  try:  a folder inside it, such as '{target}/export'\n"
        )
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
    unwritable = desk.here("checkpoint", "export", str(trained), str(tmp_path / "thesis.txt/out"))
    assert unwritable.code == 2
    assert f"export to '{tmp_path}/thesis.txt/out': File exists\n" in unwritable.err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


# --- what all verbs share --------------------------------------------------------------------------------------------


def test_debug_level_shows_where_an_error_was_raised(desk: Desk, tmp_path: Path) -> None:
    quiet = desk.here("eval", str(tmp_path))
    loud = desk.here("eval", str(tmp_path), "--log-level", "debug")
    assert "Traceback" not in quiet.err
    assert "Traceback (most recent call last):" in loud.err
    assert loud.err.endswith(quiet.err)


def test_a_usage_error_is_json_too(desk: Desk) -> None:
    done = desk.here("eval", "--samples=many", "--json")
    assert (done.code, done.err) == (2, "")
    assert done.json["error"] == "BadParameter"
    assert done.json["problems"][0]["given"] == "Invalid value for '--samples': 'many' is not a valid integer range."
    assert done.json["problems"][0]["nearest"].endswith("eval --help")


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": math.nan, "b": [math.inf, 1.5], "c": {"d": -math.inf}})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.5], "c": {"d": None}}


def test_a_reader_that_leaves_is_no_error(desk: Desk) -> None:
    script = "import sys, os; sys.stdout.close(); r, w = os.pipe(); os.close(r); os.dup2(w, 1); sys.stdout = os.fdopen(1, 'w')\n"
    script += "import sys; sys.argv = ['unisono', 'config', 'schema']; from unisono.cli.main import entry; entry()"
    done = desk.process(python=["-c", script])
    assert (done.code, done.err) == (1, "")


def test_the_best_checkpoint_is_evaluated_and_exported(desk: Desk, mine: Path, tmp_path: Path) -> None:
    folders = {entry.step: entry for entry in list_checkpoints(mine / "checkpoints")}
    scores = {step: read_manifest(entry.path).score for step, entry in folders.items()}
    assert len(scores) == 2
    assert None not in scores.values()
    best = min(scores, key=lambda step: scores[step] or 0.0)
    assert desk.here("eval", str(mine), "--best", "--json").json["step"] == best
    exported = desk.here("checkpoint", "export", str(mine), str(tmp_path / "best"), "--best", "--json")
    assert exported.json["step"] == best
    # the best one is damaged: the other is
    (part,) = sorted(folders[best].path.glob("*.safetensors"))[:1]
    part.write_bytes(part.read_bytes()[:-4])
    assert desk.here("eval", str(mine), "--best", "--json").json["step"] == sum(scores) - best
    assert desk.here("eval", str(mine), "--best", "--checkpoint=x").err == problem(
        "--checkpoint x with --best", "one checkpoint is chosen", "nothing was loaded", "one of them"
    )


def test_without_a_scored_checkpoint_there_is_no_best(desk: Desk, mine: Path) -> None:
    for entry in list_checkpoints(mine / "checkpoints"):
        shutil.rmtree(entry.path)
    assert desk.here("eval", str(mine), "--best").err == problem(
        f"the best checkpoint of {mine}",
        "a checkpoint is compared by its held-out loss, if the run was evaluated at its step",
        "none of the 0 checkpoints can be chosen",
        "the newest one, without --best; train.eval_every_steps and checkpoint.every_steps at the same steps",
    )


def test_an_evaluation_says_of_how_many_samples_it_is(desk: Desk, mine: Path) -> None:
    values = desk.here("eval", str(mine), "--samples=3", "--json").json
    assert values["samples"] == 3
    assert values["samples_total"] > 3
    assert (
        f"step 4, 3 of {values['samples_total']} held-out samples\n" in desk.here("eval", str(mine), "--samples=3").out
    )
    evaluations = [event for event in events_of(mine) if event["kind"] == "eval"]
    assert {(event["samples"], event["samples_total"]) for event in evaluations} == {(4, values["samples_total"])}
