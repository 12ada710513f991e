"""Runs on the rows that a data command kept, and the recipe's hash in runs on data that are made of cleaned ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import Desk, events_of, losses_of, make_desk

from unisono.data.cleaning_record import cleaning_facts


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """A folder with two tables of 100 reviews, the last 20 of them copies, and one number that is out of line."""
    desk = make_desk(tmp_path / "desk", tmp_path / "cache")
    rows: list[dict[str, Any]] = [
        {"text": f"it was {'bad' if n % 2 else 'fine'} {n}", "label": "np"[n % 2], "x": n % 10} for n in range(80)
    ]
    rows[5]["x"] = 1_000_000
    (desk.folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, *rows[:20]]))
    lines = [f'"{row["text"]}","{row["label"]}",{row["x"]}\n' for row in [*rows, *rows[:20]]]
    (desk.folder / "a.csv").write_text("".join(["text,label,x\n", *lines]))
    return desk


def train(desk: Desk, run: str, steps: int, *more: str) -> Path:
    values = {
        "run.dir": run,
        "task.kind": "text",
        "task.target": "label",
        "task.inputs": "['text']",
        "data.cache_dir": desk.cache / "data",
        "data.seq_len": 16,
        "model.dim": 16,
        "model.num_layers": 1,
        "model.num_heads": 2,
        "plan.global_batch": 8,
        "plan.precision": "fp32",
        "schedule.kind": "constant",
        "train.steps": steps,
        "train.eval_every_steps": 0,
        "checkpoint.every_steps": 5,
        "observe.report": "false",
    }
    done = desk.here("train", "--debug", *(f"--set={key}={value}" for key, value in values.items()), *more)
    assert done.code == 0, done.err
    return desk.folder / run


def cleaning_of(run: Path) -> dict[str, Any]:
    """What the run's start records of its data, by address."""
    starts = [event for event in events_of(run) if event["kind"] == "run_start"]
    return starts[-1].get("cleaning", {})


def hashes_in(facts: Any) -> set[str]:
    """Hashes of recipes in the facts, at any depth."""
    if not isinstance(facts, dict):
        return set()
    own = {facts["recipe_hash"]} if "recipe_hash" in facts else set[str]()
    return own.union(*(hashes_in(value) for value in facts.values()))


def test_a_run_on_kept_rows_is_that_on_their_copy(desk: Desk) -> None:
    cleaned = desk.here("data", "dedup", "a.jsonl", "--exact", "--column=text", "--index-only", "--out=kept", "--json")
    assert cleaned.code == 0, cleaned.err
    written = desk.here("data", "convert", "a.jsonl", "b.jsonl", "--kept-rows", "kept")
    assert (written.code, written.out) == (0, "b.jsonl: 80 rows\n")
    copy = train(desk, "copy", 15, "--set=data.train=b.jsonl")
    rows = ("--set=data.train=a.jsonl", "--set=data.kept_rows=kept")
    train(desk, "rows", 5, *rows)
    found = train(desk, "rows", 15, *rows)
    assert losses_of(found) == losses_of(copy)
    assert losses_of(train(desk, "all", 15, "--set=data.train=a.jsonl")) != losses_of(copy)
    (facts,) = cleaning_of(found).values()
    names = ("recipe_hash", "documents", "kept", "dropped")  # not what was masked: these rows are as they were
    assert facts == {**{name: cleaned.json[name] for name in names}, "inputs": {}}
    assert hashes_in(cleaning_of(copy)) == {cleaned.json["recipe_hash"]}


def test_a_resume_with_other_rows_is_refused(desk: Desk) -> None:
    assert desk.here("data", "dedup", "a.jsonl", "--exact", "--column=text", "--index-only", "--out=kept").code == 0
    train(desk, "run", 5, "--set=data.train=a.jsonl")
    again = ["--set=run.dir=run", "--set=data.train=a.jsonl", "--set=data.kept_rows=kept", "--set=train.steps=10"]
    refused = desk.here("train", "--debug", *again)
    assert refused.code != 0
    assert "never see others" in refused.err


def test_the_counts_of_a_part_go_with_it(desk: Desk) -> None:
    assert desk.here("data", "dedup", "a.jsonl", "--exact", "--column=text", "--out=unique").code == 0
    shares = ("--part=train=0.75", "--part=valid=0.25")
    for more in ((), ("--index-only",)):
        out = "rows" if more else "parts"
        done = desk.here(
            "data", "split", "unique/data/a.jsonl", "--exact", "--column=text", f"--out={out}", *shares, *more
        )
        assert done.code == 0, done.err
    run = train(desk, "run", 5, "--set=data.train=parts/train/data/a.jsonl", "--set=data.eval=parts/valid/data/a.jsonl")
    addresses = ("parts/train", "parts/valid/data", "rows/valid")
    cleaning = [*cleaning_of(run).values(), *cleaning_facts(desk.folder / each for each in addresses).values()]
    assert [(facts["part"], facts["documents"]) for facts in cleaning] == [
        ("train", 60),
        ("valid", 20),
        ("train", 60),
        ("valid", 20),
        ("valid", 20),
    ]
    assert [facts["kept"] for each in cleaning for facts in each["inputs"].values()] == [80] * 5


def test_the_recipe_goes_with_packed_texts(desk: Desk) -> None:
    cleaned = desk.here("data", "dedup", "a.jsonl", "--exact", "--column=text", "--out=unique", "--json").json
    packed = desk.here("data", "pack", "unique/data/a.jsonl", "t.bin", "--text-column=text")
    assert packed.code == 0, packed.err
    done = desk.here(
        "train", "--debug", "--set=run.dir=run", *desk.settings[1:], f"--set=data.train={desk.folder}/t-*.bin"
    )
    assert done.code == 0, done.err
    assert hashes_in(cleaning_of(desk.folder / "run")) == {cleaned["recipe_hash"]}


def test_the_recipe_goes_with_masked_columns(desk: Desk) -> None:
    cleaned = desk.here("data", "dedup", "a.csv", "--exact", "--column=text", "--out=unique", "--json").json
    masked = desk.here("data", "columns", "unique/data/a.csv", "--column=x", "--mask=outlier", "--out=masked", "--json")
    assert masked.code == 0, masked.err
    assert (desk.folder / "masked/data/a.csv").read_text().splitlines()[6].endswith(",")
    run = train(desk, "run", 5, "--set=data.train=masked/data/a.csv")
    assert hashes_in(cleaning_of(run)) == {cleaned["recipe_hash"]}


def test_the_recipe_goes_with_record_files(desk: Desk) -> None:
    """Through a conversion, shards, a repair and a second packing."""
    cleaned = desk.here("data", "dedup", "a.jsonl", "--exact", "--column=text", "--out=unique", "--json").json
    for command in (
        "convert unique/data/a.jsonl a.mindrecord",
        "pack a.mindrecord a.rec --payload text --column text --column x",
        "shard a.rec --into parts --shards 2",
        "repair parts-00001-of-00002.rec whole.rec",
        "convert whole.rec rows/c.jsonl",
    ):
        (desk.folder / "rows").mkdir(exist_ok=True)
        done = desk.here("data", *command.split())
        assert done.code == 0, done.err
    names = ("a.mindrecord", "a.rec", "parts-00000-of-00002.rec", "parts-*.rec", "whole.rec", "rows/c.jsonl", "rows")
    facts = cleaning_facts(desk.folder / name for name in names)
    assert [hashes_in(each) for each in facts.values()] == [{cleaned["recipe_hash"]}] * len(names)
    assert cleaning_facts([desk.folder / "a.jsonl"]) == {}
    corpus = desk.here("data", "pack", "rows", "t.bin", "--kind=text", "--lines")  # facts are no text of a corpus
    assert corpus.code == 0, corpus.err
    assert "40 records of 40 inputs" in corpus.out


def test_a_file_that_takes_the_place_of_a_cleaned_one_has_no_recipe(desk: Desk) -> None:
    assert desk.here("data", "dedup", "a.jsonl", "--exact", "--column=text", "--out=unique").code == 0
    assert desk.here("data", "convert", "unique/data/a.jsonl", "b.csv").code == 0
    assert cleaning_facts([desk.folder / "b.csv"])
    assert desk.here("data", "convert", "a.jsonl", "b.csv", "--overwrite").code == 0
    assert cleaning_facts([desk.folder / "b.csv"]) == {}
    (desk.folder / "t.bin.cleaning.json").write_text("{}")
    refused = desk.here("data", "pack", "a.jsonl", "t.bin", "--text-column=text")
    assert refused.code == 2
    assert "t.bin.cleaning.json, which exists" in refused.err


def test_rows_of_other_data(desk: Desk) -> None:
    assert desk.here("data", "dedup", "a.jsonl", "--exact", "--column=text", "--index-only", "--out=kept").code == 0
    (desk.folder / "b.jsonl").write_text((desk.folder / "a.jsonl").read_text())
    for refused in (
        desk.here("data", "convert", "b.jsonl", "c.jsonl", "--kept-rows=kept"),
        desk.here("data", "convert", "a.jsonl", "c.jsonl", "--kept-rows=nowhere"),
        desk.here(
            "train",
            "--debug",
            "--set=run.dir=run",
            "--set=task.kind=text",
            "--set=data.train=b.jsonl",
            "--set=data.kept_rows=kept",
        ),
    ):
        assert refused.code == 2
        assert "rule: a folder of kept rows is valid only for the unchanged files" in refused.err
    assert not (desk.folder / "c.jsonl").exists()
