"""Each task from raw files to evaluation and export, by the command line."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from commands import Desk, losses_of, problem
from task_data import SMALL, write_images, write_lines, write_reviews, write_table, write_tagged

from unisono.config import load_config
from unisono.data import Loader
from unisono.dist import JobSpec, join_world
from unisono.observe.events import events_path, read_events
from unisono.train.build import build_data, find_tokenizer, resolve_run
from unisono.train.config import RunConfig
from unisono.train.load import load_model

STEPS = ("--set=plan.global_batch=16", "--set=train.steps=40", "--set=optim.lr=0.01", "--set=train.eval_every_steps=0")
BYTES = "--set=data.tokenizer=bytes"


def train(desk: Desk, run_dir: Path, *settings: str) -> dict[str, float]:
    """Train, evaluate and export a run; returns the evaluation."""
    done = desk.here("train", "--debug", "--json", f"--set=run.dir={run_dir}", *STEPS, *settings)
    assert done.code == 0, done.err
    again = desk.here("eval", str(run_dir), "--json")
    assert again.code == 0, again.err
    evaluation: dict[str, float] = json.loads(done.out)["evaluation"]
    assert json.loads(again.out)["evaluation"] == pytest.approx(evaluation, rel=1e-5, abs=1e-7)
    exported = desk.here("checkpoint", "export", str(run_dir), str(run_dir / "again"))
    assert exported.code == 0, exported.err
    for name in ("model.safetensors", "task.json", "config.json"):
        first, second = run_dir / "export" / name, run_dir / "again" / name
        assert first.is_file() == second.is_file()
        assert not first.is_file() or first.read_bytes() == second.read_bytes()
    return evaluation


def task_of(run_dir: Path) -> dict[str, Any]:
    return tomllib.loads((run_dir / "config.toml").read_text())["task"]


def refused(desk: Desk, tmp_path: Path, *settings: str) -> str:
    done = desk.here("train", "--debug", f"--set=run.dir={tmp_path / 'run'}", *STEPS, *settings)
    assert done.code == 2, done.err
    assert not (tmp_path / "run").exists()
    return done.err


def test_images_of_a_folder(desk: Desk, tmp_path: Path) -> None:
    images = write_images(tmp_path / "images")
    settings = ("--set=task.kind=image", f"--set=data.train={images}", "--set=image.size=16", "--set=train.steps=8")
    values = train(
        desk,
        tmp_path / "run",
        *settings,
        "--set=components.model=resnet14",
        "--set=data.eval_frac=0.25",
        "--set=image.jitter=0.1",
    )
    assert values["accuracy"] == values["f1:2"] == 1
    assert task_of(tmp_path / "run")["classes"] == ["blue", "red"]
    facts = json.loads((tmp_path / "run" / "export" / "task.json").read_text())
    assert facts["classes"] == ["blue", "red"]
    assert facts["image"]["size"] == 16


def test_texts(desk: Desk, tmp_path: Path) -> None:
    texts = write_reviews(tmp_path / "reviews.jsonl")
    values = train(
        desk,
        tmp_path / "run",
        "--set=task.kind=text",
        f"--set=data.train={texts}",
        "--set=data.seq_len=24",
        *SMALL,
        "--set=text.swap=0.1",
    )
    assert values["accuracy"] == 1
    assert task_of(tmp_path / "run") | {"inputs": ["text"], "target": "label", "classes": ["neg", "pos"]} == task_of(
        tmp_path / "run"
    )


def test_an_exported_classifier_is_that_of_transformers(desk: Desk, tmp_path: Path) -> None:
    from transformers import BertForSequenceClassification, BertForTokenClassification

    for kind, raw, cls in (
        ("text", write_reviews(tmp_path / "reviews.jsonl"), BertForSequenceClassification),
        ("sequence_labelling", write_tagged(tmp_path / "tagged.jsonl"), BertForTokenClassification),
    ):
        run_dir = tmp_path / kind
        train(
            desk,
            run_dir,
            f"--set=task.kind={kind}",
            f"--set=data.train={raw}",
            "--set=data.seq_len=24",
            *SMALL,
            "--set=train.steps=3",
        )
        config = load_config(RunConfig, [run_dir / "config.toml"]).value
        world = join_world(JobSpec(), device_type="cpu", timeout_s=60)
        model, _ = load_model(config, find_tokenizer(config), world, None)
        theirs: Any = cls.from_pretrained(run_dir / "export").eval()
        assert theirs.config.label2id[config.task.classes[1]] == 1
        tokens = torch.randint(0, 256, (3, 24))
        padding = torch.arange(24)[None] < torch.tensor([[24], [10], [3]])
        with torch.no_grad():
            ours = model(tokens=tokens, attention_mask=padding)
            logits = theirs(input_ids=tokens, attention_mask=padding.long()).logits
        visible = padding if kind == "sequence_labelling" else torch.ones(3, dtype=torch.bool)
        torch.testing.assert_close(ours[visible], logits[visible], rtol=1e-5, atol=1e-5)


def test_labels_of_words(desk: Desk, tmp_path: Path) -> None:
    tagged = write_tagged(tmp_path / "tagged.jsonl")
    settings = ("--set=task.kind=sequence_labelling", f"--set=data.train={tagged}", "--set=data.seq_len=24", *SMALL)
    assert train(desk, tmp_path / "run", *settings, "--set=train.steps=120")["accuracy"] > 0.95
    assert task_of(tmp_path / "run")["classes"] == ["LOC", "O", "PER"]


@pytest.mark.parametrize("target", ["dear", "price"])
def test_tables(desk: Desk, tmp_path: Path, target: str) -> None:
    table = write_table(tmp_path / "table.jsonl")
    settings = ["--set=task.kind=table", f"--set=data.train={table}", f"--set=task.target={target}", *SMALL[:2]]
    settings.append('--set=task.inputs=["x","y","kind"]')
    if target == "price":
        settings.append("--set=task.predicts=number")
    values = train(desk, tmp_path / "run", *settings)
    task = task_of(tmp_path / "run")
    assert (task["inputs"], task["categories"], len(task["input_mean"])) == (["x", "y", "kind"], ["kind"], 2)
    notices = [e for e in read_events(events_path(tmp_path / "run", 0)).events if e["kind"] == "notice"]
    (found,) = (notice["what"] for notice in notices if notice["code"] == "columns")
    assert (
        found
        == f"target {'dear of 2 classes (no, yes)' if target == 'dear' else target}; numbers x, y; categories kind"
    )
    if target == "dear":
        assert values["accuracy"] > 0.9
        return
    assert values["r2"] > 0.9
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    prices = [row["price"] for row in rows]
    assert (task["target_mean"], task["target_std"]) == pytest.approx((np.mean(prices), np.std(prices)))
    assert task["input_mean"][0] == pytest.approx(np.mean([row["x"] for row in rows]))
    # in the units of the column: the standard deviation is some 2000
    assert values["rmse"] == pytest.approx(task["target_std"] * values["loss"] ** 0.5, rel=1e-4)


@pytest.mark.full
def test_language_models_of_samples_and_of_token_shards(desk: Desk, tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "lines.jsonl")
    assert (
        train(desk, tmp_path / "lines", f"--set=data.train={lines}", "--set=data.seq_len=32", *SMALL)["perplexity"] < 30
    )
    (tmp_path / "tokens").mkdir()
    packed = desk.here("data", "pack", str(lines), str(tmp_path / "tokens" / "cat.bin"), "--text-column=text")
    assert packed.code == 0, packed.err
    for name, kind in (("shards", "language_model"), ("masked", "masked_language_model")):
        values = train(
            desk,
            tmp_path / name,
            f"--set=task.kind={kind}",
            f"--set=data.train={tmp_path / 'tokens'}",
            "--set=data.seq_len=32",
            *SMALL,
        )
        assert values["loss"] < 4


def test_token_shards_are_mixed_and_refuse_what_they_do_not_have(desk: Desk, tmp_path: Path) -> None:
    for name, text in (("a", "aaaa"), ("b", "bbbb")):
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.txt").write_text(f"{text}\n" * 400)
        assert (
            desk.here("data", "pack", str(tmp_path / f"{name}.txt"), str(tmp_path / name / "t.bin"), "--kind=text").code
            == 0
        )
    both = [f"data.train=['{tmp_path / 'a'}','{tmp_path / 'b'}']", "data.seq_len=16", f"data.cache_dir={tmp_path}"]
    config = load_config(RunConfig, overrides=[*both, "data.weights=[1,3]", f"data.eval={tmp_path / 'b'}"]).value
    data = build_data(config)
    loader = Loader(data.train, seed=0, global_batch=16, micro_batch=16, rank=0, world_size=1)
    firsts = [int(row[2]) for step in loader.iterate(0, 8) for row in step.micro_batches[0]["tokens"]]
    loader.close()
    share = sum(token == ord("b") for token in firsts) / sum(token in (ord("a"), ord("b")) for token in firsts)
    assert share == pytest.approx(0.75, abs=0.05)
    shards = f"--set=data.train={tmp_path / 'a'}"
    for setting in ("data.cache_gib=1", "data.bucket_batches=4", "task.inputs=['text']"):
        said = refused(desk, tmp_path, shards, f"--set={setting}")
        assert f"{setting.partition('=')[0]} " in said
        assert "with token shards" in said
    (tmp_path / "c.jsonl").write_text('{"text": "x"}\n')
    assert "training and held-out data are of one kind" in refused(
        desk, tmp_path, shards, f"--set=data.eval={tmp_path / 'c.jsonl'}"
    )


@pytest.mark.parametrize(
    "kind", ["table", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("text", "language_model"))]
)
def test_evaluation_reads_no_training_data_beside_data_eval(desk: Desk, tmp_path: Path, kind: str) -> None:
    write = {"table": write_table, "text": write_reviews, "language_model": write_lines}[kind]
    train_data, held_out = write(tmp_path / "train.jsonl"), write(tmp_path / "eval.jsonl")
    settings = [f"--set=task.kind={kind}", f"--set=data.train={train_data}", f"--set=data.eval={held_out}", *SMALL[:2]]
    if kind == "table":
        settings += ["--set=task.target=dear", "--set=task.balance=true", "--set=data.cache_gib=0.001"]
    else:
        settings += ["--set=data.seq_len=24", "--set=data.bucket_batches=2"]
    run_dir = tmp_path / "run"
    done = desk.here("train", "--debug", "--json", f"--set=run.dir={run_dir}", *STEPS, *settings, "--set=train.steps=2")
    assert done.code == 0, done.err
    train_data.unlink()
    again = desk.here("eval", str(run_dir), "--json")
    assert again.code == 0, again.err
    assert json.loads(again.out)["evaluation"] == pytest.approx(json.loads(done.out)["evaluation"], rel=1e-5)


def test_a_run_of_a_task_resumes(desk: Desk, tmp_path: Path) -> None:
    texts = write_reviews(tmp_path / "reviews.jsonl")
    settings = (
        "--set=task.kind=text",
        f"--set=data.train={texts}",
        "--set=data.seq_len=24",
        *SMALL,
        "--set=text.swap=0.1",
    )
    for name, lengths in (("whole", [12]), ("parts", [6, 12])):
        for steps in lengths:
            done = desk.here(
                "train",
                "--debug",
                f"--set=run.dir={tmp_path / name}",
                *STEPS,
                *settings,
                "--set=schedule.kind=constant",
                f"--set=train.steps={steps}",
            )
            assert done.code == 0, done.err
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole")
    for name in ("model.safetensors", "task.json"):
        assert (tmp_path / "parts" / "export" / name).read_bytes() == (
            tmp_path / "whole" / "export" / name
        ).read_bytes()


def test_pretrained_models_are_fine_tuned(desk: Desk, tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

    torch.manual_seed(0)
    sizes: dict[str, int] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    base: Any = BertForMaskedLM(BertConfig(vocab_size=300, max_position_embeddings=32, **sizes))
    base.save_pretrained(tmp_path / "hf")
    texts = write_reviews(tmp_path / "reviews.jsonl")
    task = (
        "--set=task.kind=text",
        f"--set=data.train={texts}",
        "--set=data.seq_len=24",
        f"--set=model.pretrained={tmp_path / 'hf'}",
    )
    frozen = "--set=optim.freeze=['bert.embeddings.*']"
    train(desk, tmp_path / "run", *task, frozen, "--set=train.steps=5")
    tuned: Any = BertForSequenceClassification.from_pretrained(tmp_path / "run" / "export")
    assert tuned.config.id2label == {0: "neg", 1: "pos"}
    name = "bert.embeddings.word_embeddings.weight"
    torch.testing.assert_close(tuned.state_dict()[name], base.state_dict()[name], rtol=0, atol=0)
    name = "bert.encoder.layer.0.output.dense.weight"
    assert not torch.equal(tuned.state_dict()[name], base.state_dict()[name])


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
def test_adapters_of_a_pretrained_model(desk: Desk, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, int] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=320, max_position_embeddings=64, **sizes)).save_pretrained(tmp_path / "hf")  # pyright: ignore
    lines = write_lines(tmp_path / "lines.jsonl")
    settings = (f"--set=data.train={lines}", "--set=data.seq_len=32", f"--set=model.pretrained={tmp_path / 'hf'}")
    train(desk, tmp_path / "run", *settings, "--set=lora.rank=2", "--set=train.steps=3")
    tensors = safetensors.torch.load_file(tmp_path / "run" / "export" / "adapter_model.safetensors")
    assert tensors
    assert all("lora_" in name for name in tensors)
    trained = sum(tensor.numel() for tensor in tensors.values())
    start = next(
        event for event in read_events(events_path(tmp_path / "run", 0)).events if event["kind"] == "run_start"
    )
    assert start["parameters_trained"] == trained < start["parameters"]
    assert "lora.modules ['nothing'] for LlamaForCausalLM" in refused(
        desk, tmp_path / "x", *settings, "--set=lora.rank=2", "--set=lora.modules=['nothing']"
    )


@pytest.mark.parametrize(
    ("config", "files", "given"),
    [
        (None, [], "FileNotFoundError"),
        (
            {"model_type": "bert", "auto_map": {"AutoModel": "evil.Model"}},
            ["model.safetensors"],
            "names code in the folder",
        ),
        ({"model_type": "bert"}, ["pytorch_model.bin"], "without *.safetensors, with pytorch_model.bin"),
        ({"model_type": "nothing"}, ["model.safetensors"], "as AutoModelForSequenceClassification"),
    ],
)
def test_folders_that_are_not_loaded(
    desk: Desk, tmp_path: Path, config: dict[str, Any] | None, files: list[str], given: str
) -> None:
    texts = write_reviews(tmp_path / "reviews.jsonl")
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    for name in files:
        (folder / name).write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00{}")
    settings = ("--set=task.kind=text", f"--set=data.train={texts}", f"--set=model.pretrained={folder}")
    said = refused(desk, tmp_path / "x", *settings)
    assert f"model.pretrained {str(folder)!r}" in said
    assert given in said
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("chosen", ["task.predicts=class", "task.kind=text"])
def test_a_run_keeps_its_task(desk: Desk, tmp_path: Path, chosen: str) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.toml").write_text(
        '[data]\ntrain = "t.csv"\n[task]\nkind = "table"\npredicts = "number"\ninput_mean = [0.5]\ninput_std = [1.0]\n'
        "target_mean = 1.5\ntarget_std = 2.0\n"
    )
    done = desk.here("train", f"--set=run.dir={run_dir}", f"--set={chosen}")
    assert done.code == 2
    assert done.err == problem(
        f"{chosen} for {run_dir}, a run of task.kind=table with task.predicts=number",
        "the run in a folder keeps its task",
        "nothing was started",
        "another run.dir for another task",
    )


def test_errors(desk: Desk, tmp_path: Path) -> None:
    texts, table = write_reviews(tmp_path / "reviews.jsonl"), write_table(tmp_path / "table.jsonl")
    assert refused(desk, tmp_path, "--set=task.kind=image", f"--set=data.train={texts}") == problem(
        "training data with the columns text, label",
        "without task.inputs the column is one of image, img, jpg, png",
        "it is unknown which column is meant",
        "task.inputs=NAME",
    )
    assert refused(desk, tmp_path, f"--set=data.train={table}") == problem(
        "training data with the columns x, y, kind, price, dear",
        "without task.inputs the column is one of text, content, txt",
        "it is unknown which column is meant",
        "task.inputs=NAME of a column of texts, or task.kind=table to predict a column from the others",
    )
    assert "column 'colour'" in refused(
        desk, tmp_path, "--set=task.kind=text", f"--set=data.train={texts}", "--set=task.target=colour"
    )
    assert refused(
        desk, tmp_path, "--set=task.kind=text", f"--set=data.train={texts}", "--set=components.model=gpt"
    ) == problem(
        "components.model 'gpt' for task.kind 'text'",
        "models for it are bert",
        "nothing was started",
        "components.model=bert",
    )
    numbers = ("--set=task.kind=table", f"--set=data.train={table}", "--set=task.predicts=number")
    said = refused(desk, tmp_path, *numbers, "--set=task.target=dear")
    assert f"column 'dear', row 1 of {table}: the text 'yes' as the target" in said
    settings = ("--set=task.kind=text", f"--set=data.train={texts}", "--set=task.classes=['neg','neutral']")
    done = desk.here("train", "--debug", f"--set=run.dir={tmp_path / 'unknown'}", *STEPS, *settings)
    assert done.code == 2
    assert "the target 'pos'\n" in done.err


def test_batches_of_similar_lengths_are_padded_to_their_longest(tmp_path: Path) -> None:
    tagged = write_tagged(tmp_path / "tagged.jsonl")
    settings = ["task.kind=sequence_labelling", f"data.train={tagged}", "data.seq_len=64", "data.bucket_batches=4"]
    world = join_world(JobSpec(), device_type="cpu", timeout_s=60)
    settings.append(f"data.cache_dir={tmp_path}")
    data = build_data(resolve_run(load_config(RunConfig, overrides=settings), world).value)
    loader = Loader(
        data.train,
        seed=0,
        global_batch=8,
        micro_batch=8,
        rank=0,
        world_size=1,
        transform=data.transform,
        collate_fn=data.collate_fn,
    )
    widths: list[int] = []
    for step in loader.iterate(0, 8):
        batch = step.micro_batches[0]
        widths.append(batch["tokens"].shape[1])
        assert widths[-1] == batch["attention_mask"].sum(1).max()
        assert bool((batch["targets"][batch["attention_mask"] == 0] == -100).all())
    loader.close()
    assert len(set(widths)) > 1


@pytest.mark.parametrize("kind", [pytest.param("image", marks=pytest.mark.full), "masked_language_model"])
def test_an_unchanged_run_resumes_strictly_in_another_folder(desk: Desk, tmp_path: Path, kind: str) -> None:
    """Transforms and masks of a task are recorded without what differs from start to start."""
    settings = [f"--set=task.kind={kind}", "--set=plan.global_batch=4", "--set=train.steps=1"]
    if kind == "image":
        images = write_images(tmp_path / "images", per_class=4)
        settings += [f"--set=data.train={images}", "--set=image.size=16", "--set=image.mixup_alpha=0.2"]
        settings += ["--set=components.model=resnet14"]
    else:
        settings += [f"--set=data.train={write_lines(tmp_path / 'lines.jsonl')}", *SMALL, "--set=data.seq_len=16"]
    first, second = tmp_path / "first", tmp_path / "second"
    done = desk.here("train", "--debug", f"--set=run.dir={first}", *settings)
    assert done.code == 0, done.err
    first.rename(second)
    done = desk.here("train", "--debug", f"--set=run.dir={second}", "--set=run.resume=strict", *settings)
    assert done.code == 0, done.err
    resumed = [event for event in read_events(events_path(second, 0)).events if event["kind"] == "resumed"]
    assert [event["differences"] for event in resumed] == [[]]


def test_metrics_that_do_not_fit_the_task_are_refused(desk: Desk, tmp_path: Path) -> None:
    settings = ["--set=task.kind=table", f"--set=data.train={write_table(tmp_path / 'table.jsonl')}"]
    settings += ['--set=task.inputs=["x","y"]', f"--set=run.dir={tmp_path / 'run'}", "--set=plan.global_batch=4"]
    numbers = ["--set=task.target=price", "--set=task.predicts=number"]
    done = desk.here("train", *settings, *numbers, '--set=components.metrics=["accuracy","r2"]')
    assert done.code == 2
    assert done.err == (
        "unisono: --set: components.metrics: the metric 'accuracy' with task.predicts 'number'\n"
        "  rule: accuracy compares classes, and the targets are numbers\n"
        "  so:   its value would mean nothing, and nothing was started\n"
        "  try:  mae, rmse, r2 or spearman:<low>:<high>\n"
    )
    done = desk.here("train", *settings, "--set=task.target=dear", '--set=components.metrics=["mae"]')
    first = done.err.splitlines()[0]
    assert (done.code, first) == (2, "unisono: --set: components.metrics: the metric 'mae' with task.kind 'table'")
    assert not (tmp_path / "run").exists()


def test_a_metric_of_fewer_classes_than_the_task_is_refused(desk: Desk, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"x": n / 10, "size": "SML"[n % 3]}) + "\n" for n in range(60)))
    settings = ["--set=task.kind=table", f"--set=data.train={rows}", "--set=task.target=size"]
    settings += ['--set=task.inputs=["x"]', f"--set=run.dir={tmp_path / 'run'}", "--set=plan.global_batch=4"]
    done = desk.here("train", "--debug", *settings, '--set=components.metrics=["accuracy","f1:2"]')
    assert done.code == 2
    assert (
        "unisono: components.metrics 'f1:2' with 3 classes\n"
        "  rule: f1:2 counts 2 classes, and each class of the task is one of them\n"
        "  so:   the metric would have no value, and nothing was started\n"
        "  try:  f1:3\n"
    ) in done.err
    assert not list((tmp_path / "run").glob("checkpoints/*"))


@pytest.mark.parametrize(
    ("kind", "unit"),
    [
        ("image", "images"),
        ("table", "samples"),
        ("language_model", "tokens"),
        ("masked_language_model", "tokens"),
        ("sequence_labelling", "samples"),
    ],
)
def test_throughput_is_named_in_what_is_counted(desk: Desk, tmp_path: Path, kind: str, unit: str) -> None:
    raw = {
        "image": lambda: write_images(tmp_path / "images", per_class=4),
        "table": lambda: write_table(tmp_path / "table.jsonl"),
        "language_model": lambda: write_lines(tmp_path / "lines.jsonl"),
        "masked_language_model": lambda: write_lines(tmp_path / "lines.jsonl"),
        "sequence_labelling": lambda: write_tagged(tmp_path / "tagged.jsonl"),
    }[kind]()
    settings = [
        f"--set=task.kind={kind}",
        f"--set=data.train={raw}",
        "--set=plan.global_batch=4",
        "--set=train.steps=4",
    ]
    settings += {
        "image": ["--set=image.size=16", "--set=components.model=resnet14"],
        "table": ["--set=task.target=dear", '--set=task.inputs=["x","y","kind"]'],
    }.get(kind, [*SMALL, "--set=data.seq_len=24"])
    done = desk.here("train", "--debug", f"--set=run.dir={tmp_path / 'run'}", "--set=observe.console=plain", *settings)
    assert done.code == 0, done.err
    last = [event for event in read_events(events_path(tmp_path / "run", 0)).events if event["kind"] == "step"][-1]
    assert last["unit"] == unit
    assert f"{unit}/s" in done.out
    assert f"{unit}_per_s=" in done.out
    if unit != "tokens":
        assert "token" not in done.out
        assert last["perf/tokens_per_s"] * last["perf/step_s"] == pytest.approx(4, rel=0.5)
    if kind == "masked_language_model":  # all of four texts of 24 tokens, not the 15 % that are hidden
        assert last["train/tokens_total"] == 4 * 4 * 24
    report = (tmp_path / "run" / "report.html").read_text()
    assert f"{unit}/s, all devices" in report


def test_the_tokenizer_of_a_pretrained_model(desk: Desk, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Raw bytes take its place with a notice, where there is none; another kind of file is not passed over."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    folder = tmp_path / "hf"
    BertForMaskedLM(BertConfig(vocab_size=300, max_position_embeddings=32, **sizes)).save_pretrained(folder)  # pyright: ignore
    texts = write_reviews(tmp_path / "reviews.jsonl")
    settings = ("--set=task.kind=text", f"--set=data.train={texts}", "--set=data.seq_len=24", "--set=train.steps=1")
    settings += (f"--set=model.pretrained={folder}",)
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n")
    assert f"model.pretrained {str(folder)!r} with vocab.txt and without tokenizer.json" in refused(
        desk, tmp_path / "x", *settings
    )
    (folder / "vocab.txt").unlink()
    done = desk.here("train", "--debug", f"--set=run.dir={tmp_path / 'run'}", *STEPS, *settings)
    assert done.code == 0, done.err
    assert f"{folder} has no tokenizer: a token is a byte of the text" in caplog.text
    assert "5 tensors that BertForSequenceClassification does not use" in caplog.text


@pytest.mark.full
def test_masked_language_models_count_all_tokens(desk: Desk, tmp_path: Path) -> None:
    """The same of our model and of a pretrained one, in events, console and report; padding does not count."""
    transformers = pytest.importorskip(
        "transformers", reason="NOT CHECKED: the extra 'dev' (transformers) is not installed"
    )
    sizes = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    base = transformers.BertForMaskedLM(transformers.BertConfig(max_position_embeddings=64, **sizes))
    base.save_pretrained(tmp_path / "hf")
    texts = ["the cat", "a dog ate", "it rains", "so long"]
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": texts[n % 4]}) + "\n" for n in range(40)))
    settings = ["--set=task.kind=masked_language_model", f"--set=data.train={lines}", "--set=data.seq_len=32"]
    settings += [
        "--set=plan.global_batch=4",
        "--set=plan.micro_batch=2",
        "--set=train.steps=9",
        "--set=data.eval_frac=0.1",
    ]
    totals: list[float] = []
    for name, model in {"own": SMALL, "theirs": [f"--set=model.pretrained={tmp_path / 'hf'}"]}.items():
        run_dir = tmp_path / name
        own = [*settings, *model, "--set=data.seq_len=32", f"--set=run.dir={run_dir}", "--set=observe.console=plain"]
        done = desk.here("train", "--debug", *own)
        assert done.code == 0, done.err
        steps = [event for event in read_events(events_path(run_dir, 0)).events if event["kind"] == "step"]
        assert {event["unit"] for event in steps} == {"tokens"}
        totals.append(steps[-1]["train/tokens_total"])
        counted = steps[-1]["perf/tokens_per_s"] * steps[-1]["perf/step_s"]  # a step of four texts
        assert 4 * 7 <= counted <= 4 * (9 + 2)
        assert f"tokens_total={totals[-1]:.0f} " in done.out
        assert "tokens/s" in done.out
        report = (run_dir / "report.html").read_text()
        assert "tokens/s, all devices" in report
        assert "tokens trained on" in report
    # an epoch has 36 of the 40 texts, of 7 to 9 bytes and up to two marks
    assert totals[0] == totals[1]
    assert 36 * 7 <= totals[0] <= 36 * (9 + 2)
