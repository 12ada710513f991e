"""Notices about the data at the start of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unisono.data.dataset import from_map_style
from unisono.data.options import DataOptions
from unisono.data.tokens.tokenizer import load_tokenizer
from unisono.tasks.columns import resolve_task
from unisono.tasks.data import language_data, predictor_data
from unisono.tasks.notices import cut_notice, found_notices
from unisono.tasks.options import ImageOptions, TaskOptions, TextOptions

BYTES = load_tokenizer("bytes")


def cut(tmp_path: Path, kind: Any, seq_len: int, rows: list[dict[str, str]]) -> dict[str, str] | None:
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    address = str(tmp_path / "t.jsonl")
    data = DataOptions(train=address, eval=address, seq_len=seq_len, cache_dir=str(tmp_path / "cache"))
    task = resolve_task(TaskOptions(kind=kind), data)
    if kind in ("text", "sequence_labelling"):
        found = predictor_data(task, data, ImageOptions(), TextOptions(), tokenizer=BYTES, buckets=8)
    else:
        found = language_data(
            task, data, tokens=None, tokenizer=BYTES, places_targets=False, mask=BYTES.mask, vocab_size=258
        )
    return cut_notice(task, found.train, BYTES, seq_len)


def test_cut_words(tmp_path: Path) -> None:
    rows = [{"words": "ab cd ef", "tags": "O P O"}, {"words": "gh", "tags": "O"}]
    assert cut(tmp_path, "sequence_labelling", 9, rows) is None
    # the mark at the front, "ab" and " c": of the second word a part, of the third none
    assert cut(tmp_path, "sequence_labelling", 5, rows) == {
        "code": "texts_cut",
        "what": "1 of the first 2 training texts have more than 5 tokens",
        "why": "texts are cut to data.seq_len tokens",
        "cost": "25 % of the words are cut off, neither learned nor scored",
        "fix": "data.seq_len=9, the longest of them, with another run.dir",
    }
    notice = cut(tmp_path, "sequence_labelling", 8, rows)
    assert notice is not None
    assert notice["cost"] == "their last words are cut short"


@pytest.mark.parametrize(("kind", "longest"), [("text", 8), ("masked_language_model", 8), ("language_model", 7)])
def test_cut_texts(tmp_path: Path, kind: str, longest: int) -> None:
    rows = [{"text": "abcdefg", "label": "x"}, {"text": "abc", "label": "y"}]
    assert cut(tmp_path, kind, longest, rows) is None
    notice = cut(tmp_path, kind, longest - 1, rows)
    assert notice is not None
    assert notice["fix"] == f"data.seq_len={longest}, the longest of them, with another run.dir"
    assert notice["cost"] == "the model does not see the rest of them"


def test_what_was_found() -> None:
    task = TaskOptions(kind="table", target="y", inputs=("a", "b", "c"), categories=("b",), classes=("no", "yes"))
    (notice,) = found_notices(task, from_map_style([0] * 9))
    assert notice["what"] == "target y of 2 classes (no, yes); numbers a, c; categories b"
    task = TaskOptions(kind="image", predicts="number", target="light", inputs=("image",))
    assert next(iter(found_notices(task, from_map_style([0] * 9))))["what"] == "target light; inputs image"


def test_many_classes() -> None:
    task = TaskOptions(kind="table", target="y", inputs=("a",), classes=tuple(map(str, range(100))))
    assert len(list(found_notices(task, from_map_style([0] * 300)))) == 1
    notice = list(found_notices(task, from_map_style([0] * 299)))[1]
    assert notice == {
        "code": "many_classes",
        "what": "100 classes for 299 training samples",
        "why": "each integer of the column 'y' is a class",
        "cost": "a class of one or two samples cannot be learned",
        "fix": "task.predicts=number, with another run.dir",
    }
