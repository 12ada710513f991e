"""Corpus, tokenizer and pretrained model at an address of fsspec: the same run as of the local files."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Desk, events_of, losses_of, problem
from task_data import write_reviews

STEPS = ("--set=plan.global_batch=8", "--set=train.steps=3", "--set=train.eval_every_steps=0")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    backend: Any = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    backend.train_from_iterator(
        ["it was bad, it was fine", "def f(x): return x"],
        trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, special_tokens=special, show_progress=False),
    )
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    backend.save(str(path))
    return path


@pytest.mark.full
def test_corpus_and_tokenizer_at_addresses(desk: Desk, tmp_path: Path, tokenizer: Path) -> None:
    given = {"data.corpus": desk.folder / "corpus", "data.tokenizer": tokenizer.parent}
    for name, prefix in (("local", ""), ("remote", "file://")):
        settings = [f"--set={key}={prefix}{path}" for key, path in given.items()]
        done = desk.train(tmp_path / name, *STEPS, *settings)
        assert done.code == 0, done.err
    check_same_run(desk, tmp_path)
    data = tomllib.loads((tmp_path / "remote" / "config.toml").read_text())["data"]
    assert {f"data.{key}": data[key] for key in ("corpus", "tokenizer")} == {
        key: f"file://{path}" for key, path in given.items()
    }
    assert (tmp_path / "remote" / "export" / "tokenizer.json").read_bytes() == tokenizer.read_bytes()


def check_same_run(desk: Desk, tmp_path: Path) -> None:
    assert losses_of(tmp_path / "remote") == losses_of(tmp_path / "local")
    assert len(losses_of(tmp_path / "local")) == 3
    found = [desk.here("eval", str(tmp_path / name), "--json") for name in ("local", "remote")]
    assert found[1].code == 0, found[1].err
    assert json.loads(found[0].out)["evaluation"] == json.loads(found[1].out)["evaluation"]
    exports = [tmp_path / name / "export" for name in ("local", "remote")]
    names = [sorted(path.name for path in export.iterdir()) for export in exports]
    assert names[0] == names[1]
    assert (exports[0] / "model.safetensors").read_bytes() == (exports[1] / "model.safetensors").read_bytes()


@pytest.mark.full
def test_a_pretrained_model_at_an_address(desk: Desk, tmp_path: Path, tokenizer: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes: dict[str, int] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    base: Any = BertForMaskedLM(BertConfig(vocab_size=300, max_position_embeddings=32, **sizes))
    base.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    texts = write_reviews(tmp_path / "reviews.jsonl")
    for name in ("local", "remote"):
        prefix = "" if name == "local" else "file://"
        settings = ("--set=task.kind=text", f"--set=data.train={texts}", "--set=data.seq_len=24")
        folder = f"--set=model.pretrained={prefix}{tmp_path / 'hf'}"
        done = desk.here("train", "--debug", f"--set=run.dir={tmp_path / name}", *STEPS, *settings, folder)
        assert done.code == 0, done.err
    check_same_run(desk, tmp_path)
    # its own tokenizer was used
    assert (tmp_path / "remote" / "export" / "tokenizer.json").read_bytes() == tokenizer.read_bytes()


@pytest.mark.full
def test_a_corpus_is_tokenized_as_the_pretrained_model_reads_text(desk: Desk, tmp_path: Path, tokenizer: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, int] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=320, max_position_embeddings=64, **sizes)).save_pretrained(tmp_path / "hf")  # pyright: ignore
    (tmp_path / "hf" / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    settings = (f"--set=data.corpus={desk.folder / 'corpus'}", "--set=data.seq_len=16")
    pretrained = f"--set=model.pretrained=file://{tmp_path / 'hf'}"
    done = desk.here("train", "--debug", f"--set=run.dir={tmp_path / 'run'}", *STEPS, *settings, pretrained)
    assert done.code == 0, done.err
    (start,) = [event for event in events_of(tmp_path / "run") if event["kind"] == "run_start"]
    facts = start["data"]
    assert (Path(facts["tokenizer"]) / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    assert facts["train_tokens"] < facts["train_bytes"]


def test_addresses_that_are_not_there(desk: Desk, tmp_path: Path) -> None:
    texts = write_reviews(tmp_path / "reviews.jsonl")
    for key, more in (
        ("data.corpus", ()),
        ("data.tokenizer", ()),
        ("model.pretrained", ("--set=task.kind=text", f"--set=data.train={texts}")),
    ):
        url = f"file://{tmp_path}/none"
        done = desk.here("train", "--debug", f"--set=run.dir={tmp_path / 'run'}", *STEPS, *more, f"--set={key}={url}")
        assert done.code == 2
        assert done.err == problem(
            f"{url}, which does not exist",
            "the address is that of one file or folder",
            "nothing was opened",
            "an address that exists",
        )
    done = desk.here(
        "train", "--debug", f"--set=run.dir={tmp_path / 'run'}", *STEPS, "--set=data.corpus=nothing://bucket/texts"
    )
    assert done.code == 2
    assert "nothing://bucket/texts: ValueError: Protocol not known: nothing" in done.err
    assert not (tmp_path / "run").exists()
