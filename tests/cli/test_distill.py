"""``distill.teacher``: a student of each task learns from a run or a Hugging Face folder, and what does not fit is told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Desk, Outcome, events_of, losses_of, steps_of
from task_data import write_images, write_lines, write_reviews, write_table

LARGER = ("--set=model.dim=32", "--set=model.num_layers=2")
QUICK = (
    "--set=plan.global_batch=8",
    "--set=plan.precision=fp32",
    "--set=train.steps=3",
    "--set=train.eval_every_steps=0",
)
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture(scope="module")
def large(shared_desk: Desk) -> Path:
    """A finished run of a larger model, to be read only."""
    run_dir = shared_desk.folder / "large"
    done = shared_desk.train(run_dir, *LARGER)
    assert done.code == 0, done.err
    return run_dir


def terms(run_dir: Path) -> set[str]:
    """Names of the loss terms of the last step."""
    prefix = "train/loss/"
    return {name.removeprefix(prefix) for name in steps_of(run_dir)[-1] if name.startswith(prefix)}


def refused(done: Outcome) -> str:
    assert done.code == 2, done.err
    assert "nothing was started" in done.err
    return done.err


def test_a_language_model_learns_from_a_run(desk: Desk, large: Path, tmp_path: Path) -> None:
    features = '--set=distill.features=["blocks.0=blocks.1"]'
    done = desk.train(tmp_path / "small", f"--set=distill.teacher={large}", features, "--json")
    assert done.code == 0, done.err
    assert terms(tmp_path / "small") == {"ce", "kl", "features"}
    last = steps_of(tmp_path / "small")[-1]
    assert last["train/loss"] == pytest.approx(sum(last[f"train/loss/{name}"] for name in ("ce", "kl", "features")))
    # neither evaluation nor generation nor export needs the teacher
    again = desk.here("eval", str(tmp_path / "small"), "--json", "--samples=4")
    assert again.json["evaluation"]["loss"] == pytest.approx(done.json["evaluation"]["loss"], rel=1e-5)
    assert desk.here("generate", str(tmp_path / "small"), "--tokens=4").code == 0
    assert b"distill_projections" not in (tmp_path / "small" / "export" / "model.safetensors").read_bytes()


def test_a_killed_run_goes_on_as_if_it_had_not_been(desk: Desk, large: Path, tmp_path: Path) -> None:
    given = [
        f"--set=distill.teacher={large}",
        '--set=distill.features=["blocks.0=blocks.1"]',
        "--set=checkpoint.every_steps=1",
    ]
    assert desk.train(tmp_path / "whole", *given).code == 0
    settings = [f"--set=run.dir={tmp_path / 'parts'}", *desk.settings, *given]
    killed = desk.process("train", "--debug", *settings, UNISONO_FAULT="backward@2:0")
    assert killed.code != 0
    assert desk.here("train", "--debug", f"--set=run.dir={tmp_path / 'parts'}").code == 0
    assert losses_of(tmp_path / "parts")[-2:] == losses_of(tmp_path / "whole")[-2:]
    (resumed,) = [event for event in events_of(tmp_path / "parts") if event["kind"] == "resumed"]
    assert not any("distill" in text for text in resumed["differences"])


def test_a_teacher_that_was_trained_on_is_told(desk: Desk, large: Path, tmp_path: Path) -> None:
    other = shutil.copytree(large, tmp_path / "large")
    assert desk.train(tmp_path / "small", f"--set=distill.teacher={other}").code == 0
    assert desk.here("train", "--debug", f"--set=run.dir={other}", "--set=train.steps=6").code == 0
    assert desk.here("train", "--debug", f"--set=run.dir={tmp_path / 'small'}", "--set=train.steps=6").code == 0
    (resumed,) = [event for event in events_of(tmp_path / "small") if event["kind"] == "resumed"]
    assert any(text.startswith("distill.teacher '") for text in resumed["differences"])


def test_two_processes_make_the_same_steps(desk: Desk, large: Path, tmp_path: Path) -> None:
    given = [f"--set=distill.teacher={large}"]
    assert desk.train(tmp_path / "one", *given).code == 0
    settings = [f"--set=run.dir={tmp_path / 'two'}", *desk.settings, *given]
    done = desk.process("train", *settings, "--set=launch.num_processes=2", "--set=plan.dp_shard=2")
    assert done.code == 0, done.err
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-5)


def table(folder: Path) -> list[str]:
    return ["--set=task.kind=table", f"--set=data.train={write_table(folder / 'rows.jsonl')}", "--set=task.target=dear"]


def prices(folder: Path) -> list[str]:
    inputs = '--set=task.inputs=["x", "y", "kind"]'
    return [*table(folder)[:2], "--set=task.target=price", "--set=task.predicts=number", inputs]


def reviews(folder: Path) -> list[str]:
    return ["--set=task.kind=text", f"--set=data.train={write_reviews(folder / 'r.jsonl')}", "--set=data.seq_len=24"]


def images(folder: Path) -> list[str]:
    settings = ["--set=components.model=resnet14", "--set=image.size=16", "--set=image.mixup_alpha=0.2"]
    return ["--set=task.kind=image", f"--set=data.train={write_images(folder / 'images')}", *settings]


def hidden(folder: Path) -> list[str]:
    lines = f"--set=data.train={write_lines(folder / 'lines.jsonl')}"
    return ["--set=task.kind=masked_language_model", lines, "--set=data.seq_len=24"]


@pytest.mark.parametrize(
    ("task", "names"),
    [
        (table, {"ce", "kl"}),
        (prices, {"mse", "teacher_mse"}),
        (reviews, {"ce", "kl"}),
        (hidden, {"ce", "kl"}),
        pytest.param(images, {"ce", "kl"}, marks=pytest.mark.full),
    ],
)
def test_each_task_has_a_teacher(
    desk: Desk, tmp_path: Path, task: Callable[[Path], list[str]], names: set[str]
) -> None:
    settings = [*QUICK, *task(tmp_path)]
    sizes = [] if task is images else ["--set=model.num_heads=2", "--set=model.num_layers=1"]
    dims = [] if task is images else ["--set=model.dim=32"], [] if task is images else ["--set=model.dim=16"]
    large, small = tmp_path / "large", tmp_path / "small"
    if task in (table, prices):
        sizes, dims = [], (["--set=model.dim=32"], ["--set=model.dim=16"])
    done = desk.here("train", "--debug", f"--set=run.dir={large}", *settings, *sizes, *dims[0])
    assert done.code == 0, done.err
    done = desk.here(
        "train", "--debug", f"--set=run.dir={small}", *settings, *sizes, *dims[1], f"--set=distill.teacher={large}"
    )
    assert done.code == 0, done.err
    assert terms(small) == names


# --- folders of Hugging Face ---------------------------------------------------------------------------------------


def save(folder: Path, name: str, **values: Any) -> Path:
    transformers = pytest.importorskip(
        "transformers", reason="NOT CHECKED: the extra 'dev' (transformers) is not installed"
    )
    torch.manual_seed(0)
    config = transformers.BertConfig if name.startswith("Bert") else transformers.LlamaConfig
    getattr(transformers, name)(config(**(SIZES | values))).save_pretrained(folder)
    return folder


def test_a_hugging_face_folder_teaches_a_language_model(desk: Desk, tmp_path: Path) -> None:
    folder = save(tmp_path / "llama", "LlamaForCausalLM", vocab_size=320)
    done = desk.train(tmp_path / "small", f"--set=distill.teacher={folder}", "--json")
    assert done.code == 0, done.err
    assert terms(tmp_path / "small") == {"ce", "kl"}
    other = save(tmp_path / "other", "LlamaForCausalLM", vocab_size=300)
    told = refused(desk.train(tmp_path / "refused", f"--set=distill.teacher={other}"))
    assert "model.vocab_size 320 here, 300 there" in told
    assert "model.vocab_size=300" in told
    assert desk.train(tmp_path / "fits", f"--set=distill.teacher={other}", "--set=model.vocab_size=300").code == 0


def test_a_pretrained_student_learns_from_a_larger_one(desk: Desk, tmp_path: Path) -> None:
    import safetensors.torch

    small = save(tmp_path / "llama", "LlamaForCausalLM", vocab_size=320)
    large = save(tmp_path / "larger", "LlamaForCausalLM", vocab_size=320, num_hidden_layers=2)
    run_dir = tmp_path / "run"
    settings = [
        *QUICK,
        f"--set=data.corpus={desk.folder / 'corpus'}",
        f"--set=run.dir={run_dir}",
        f"--set=model.pretrained={small}",
        f"--set=distill.teacher={large}",
    ]
    done = desk.here("train", "--debug", *settings, "--json")
    assert done.code == 0, done.err
    assert terms(run_dir) == {"ce", "kl"}
    last = steps_of(run_dir)[-1]
    assert last["train/loss"] == pytest.approx(last["train/loss/ce"] + last["train/loss/kl"])
    begun, ended = (safetensors.torch.load_file(folder / "model.safetensors") for folder in (small, run_dir / "export"))
    assert begun.keys() == ended.keys()  # the student alone
    assert any(not torch.equal(begun[name], ended[name]) for name in begun)
    again = desk.here("eval", str(run_dir), "--json")
    assert again.json["evaluation"]["loss"] == pytest.approx(done.json["evaluation"]["loss"], rel=1e-5)


def test_a_hugging_face_folder_teaches_classes(desk: Desk, tmp_path: Path) -> None:
    values = {"vocab_size": 300, "max_position_embeddings": 32}
    names = {"id2label": {0: "neg", 1: "pos"}, "label2id": {"neg": 0, "pos": 1}}
    folder = save(tmp_path / "bert", "BertForSequenceClassification", **values, **names)
    settings = [*QUICK, *reviews(tmp_path), "--set=model.num_heads=2", "--set=model.num_layers=1", "--set=model.dim=16"]
    student = [*settings, f"--set=run.dir={tmp_path / 'small'}"]
    done = desk.here("train", "--debug", *student, f"--set=distill.teacher={folder}")
    assert done.code == 0, done.err
    assert terms(tmp_path / "small") == {"ce", "kl"}
    student[-1] = f"--set=run.dir={tmp_path / 'refused'}"
    bad = {"id2label": {0: "pos", 1: "neg"}, "label2id": {"neg": 1, "pos": 0}}
    other = save(tmp_path / "other", "BertForSequenceClassification", **values, **bad)
    told = refused(desk.here("train", "--debug", *student, f"--set=distill.teacher={other}"))
    assert 'classes ["neg", "pos"] here, ["pos", "neg"] there' in told
    # a folder without the head of this task has no outputs to learn from
    headless = save(tmp_path / "headless", "BertForMaskedLM", **values)
    told = refused(desk.here("train", "--debug", *student, f"--set=distill.teacher={headless}"))
    assert f"distill.teacher '{headless}' as BertForSequenceClassification" in told
    assert "those of its head too" in told


# --- what is refused -----------------------------------------------------------------------------------------------


def test_a_teacher_of_another_task_is_refused(desk: Desk, large: Path, tmp_path: Path) -> None:
    given = [f"--set=run.dir={tmp_path / 'a'}", *QUICK, *table(tmp_path), f"--set=distill.teacher={large}"]
    told = refused(desk.here("train", "--debug", *given))
    assert 'task.kind "table" here, "language_model" there' in told


def test_a_teacher_of_other_columns_is_refused(desk: Desk, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    given = [*QUICK, *table(tmp_path)]
    assert (
        desk.here("train", "--debug", f"--set=run.dir={teacher}", *given, '--set=task.inputs=["x", "kind"]').code == 0
    )
    told = refused(
        desk.here(
            "train",
            "--debug",
            f"--set=run.dir={tmp_path / 'b'}",
            *given,
            '--set=task.inputs=["y", "kind"]',
            f"--set=distill.teacher={teacher}",
        )
    )
    assert 'task.inputs ["y", "kind"] here, ["x", "kind"] there' in told
    assert "task.input_mean" in told


def test_a_run_does_not_teach_itself(desk: Desk, large: Path) -> None:
    told = refused(desk.train(large, *LARGER, f"--set=distill.teacher={large}", "--set=train.steps=9"))
    assert "which is run.dir" in told


def test_a_folder_without_a_model_is_refused(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    told = refused(desk.train(tmp_path / "a", f"--set=distill.teacher={tmp_path / 'empty'}"))
    assert "config.json" in told


def test_code_of_another_run_is_not_run(desk: Desk, large: Path, tmp_path: Path) -> None:
    other = shutil.copytree(large, tmp_path / "other")
    text = (other / "config.toml").read_text()
    (other / "code.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')\n")
    (other / "config.toml").write_text(f'base = "{other / "code.py"}"\n' + text)
    told = refused(desk.train(tmp_path / "a", f"--set=distill.teacher={other}"))
    assert "a run with code of its own" in told
    assert not (tmp_path / "was-run").exists()


def test_a_dry_run_has_the_teacher(desk: Desk, large: Path, tmp_path: Path) -> None:
    done = desk.here(
        "train",
        "--dry-run",
        "--json",
        f"--set=run.dir={tmp_path / 'a'}",
        *desk.settings,
        f"--set=distill.teacher={large}",
    )
    assert done.code == 0, done.err
    (rank,) = json.loads(done.out)["ranks"]
    assert rank["peak_bytes_by_kind"]["teacher"] > rank["parameters_bytes"]
