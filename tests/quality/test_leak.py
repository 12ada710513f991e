"""``find_leaks``: every planted pair between sets is found, and none within one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import planted
import pytest

from unisono.data.convert import convert
from unisono.data.convert.table_files import Table, write_table
from unisono.errors import ConfigError, DataError
from unisono.quality.leak import find_leaks
from unisono.quality.options import DuplicateOptions

pytest.importorskip("rensa")


def write(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(exist_ok=True)
    write_table(path, Table(rows=[{"text": text} for text in texts]))
    return path


def test_every_planted_pair_is_found(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    texts = planted.documents(3000, rng)
    train, fresh = texts[:2500], texts[2500:]
    originals = rng.choice(2500, size=200, replace=False)
    exact = [train[number] for number in originals[:100]]
    near = [planted.edited(train[number], 2, rng) for number in originals[100:]]
    is_near = [planted.jaccard(train[number], text) >= 0.8 for number, text in zip(originals[100:], near, strict=True)]
    result = find_leaks(
        write(tmp_path / "train.jsonl", train), [write(tmp_path / "test.jsonl", [*fresh, *exact, *near])]
    )
    expected = {500 + number: int(originals[number]) for number in range(200) if number < 100 or is_near[number - 100]}
    assert sum(is_near) > 60
    assert {pair["row"]: pair["duplicate_of"]["row"] for pair in result.pairs} == expected
    assert all(pair["file"] == "test.jsonl" and pair["duplicate_of"]["file"] == "train.jsonl" for pair in result.pairs)
    assert [(split.documents, split.exact, split.near) for split in result.splits] == [
        (2500, 0, 0),
        (700, 100, sum(is_near)),
    ]


def sets(tmp_path: Path) -> list[Path]:
    rng = np.random.default_rng(2)
    a, b, c, d, e = planted.documents(5, rng)
    return [
        write(tmp_path / "train.jsonl", [a, b, a]),
        write(tmp_path / "valid.jsonl", [c, c, planted.edited(b, 1, rng)]),
        write(tmp_path / "test.jsonl", [d, a, c, d, e, e, planted.edited(c, 1, rng)]),
    ]


def test_other_sets_of_the_same_files_are_another_question(tmp_path: Path) -> None:
    a, b, c = planted.documents(3, np.random.default_rng(3))
    first, second = write(tmp_path / "train/a.jsonl", [a, b]), write(tmp_path / "train/b.jsonl", [c, a])
    test = write(tmp_path / "test.jsonl", [c])
    assert len(find_leaks(tmp_path / "train", [test], out=tmp_path / "out").pairs) == 1
    with pytest.raises(ConfigError, match="results of other inputs"):
        find_leaks(first, [second, test], out=tmp_path / "out")
    assert len(find_leaks(first, [second, test], out=tmp_path / "new").pairs) == 2


def test_leaks_between_evaluation_sets(tmp_path: Path) -> None:
    train, valid, test = sets(tmp_path)
    result = find_leaks(train, [valid, test])
    assert [
        (pair["file"], pair["row"], pair["duplicate_of"]["file"], pair["duplicate_of"]["row"], pair["exact"])
        for pair in result.pairs
    ] == [
        ("valid.jsonl", 2, "train.jsonl", 1, False),
        ("test.jsonl", 1, "train.jsonl", 0, True),
        ("test.jsonl", 2, "valid.jsonl", 0, True),
        ("test.jsonl", 6, "valid.jsonl", 0, False),
    ]


def test_copies_within_a_set_leak_as_their_original(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    (text,) = planted.documents(1, rng)
    copy = planted.edited(text, 1, rng)
    result = find_leaks(write(tmp_path / "train.jsonl", [text]), [write(tmp_path / "test.jsonl", [copy, copy])])
    assert [(pair["row"], pair["exact"]) for pair in result.pairs] == [(0, False), (1, False)]
    assert result.splits[1].near == 2


def test_what_is_written(tmp_path: Path) -> None:
    train, valid, test = sets(tmp_path)
    out = tmp_path / "out" / "leaks"
    out.parent.mkdir()
    result = find_leaks(train, [valid, test], out=out)
    assert [json.loads(line) for line in (out / "pairs.jsonl").read_text().splitlines()] == list(result.pairs)
    assert np.load(out / "kept" / "test.jsonl.npy").tolist() == [0, 3, 4, 5]
    assert np.load(out / "kept" / "train.jsonl.npy").tolist() == [0, 1, 2]
    assert "4 of 10 documents" in (out / "report.html").read_text()
    assert find_leaks(train, [valid, test], out=out) == result


def test_folders_with_files_of_the_same_names(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    texts = planted.documents(3, rng)
    for name, part in (("train", texts[:2]), ("test", texts[1:])):
        (tmp_path / name).mkdir()
        for number, text in enumerate(part):
            (tmp_path / name / f"{number}.txt").write_text(text)
    (pair,) = find_leaks(tmp_path / "train", [tmp_path / "test"]).pairs
    assert (pair["file"], pair["duplicate_of"]["file"]) == ("test/0.txt", "train/1.txt")


def test_only_the_same_text(tmp_path: Path) -> None:
    train, valid, test = sets(tmp_path)
    result = find_leaks(train, [valid, test], options=DuplicateOptions(near=0))
    assert [pair["row"] for pair in result.pairs] == [1, 2]


def test_a_set_alone(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="unisono data dedup finds the duplicates within one set"):
        find_leaks(write(tmp_path / "train.jsonl", ["a"]), [])


def test_sets_whose_texts_have_different_names(tmp_path: Path) -> None:
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    write_table(train, Table(rows=[{"body": "one two"}]))
    write_table(test, Table(rows=[{"question": "one two", "answer": "three"}]))
    alone = r"data convert .*test\.jsonl NEW --column question; or, if it is a benchmark, unisono data clean with"
    with pytest.raises(DataError, match=rf"'text' is no field, but 'question', 'answer'(.|\n)*{alone}"):
        find_leaks(train, [test])
    with pytest.raises(DataError, match=r"train\.jsonl, in which 'question' is no field(.|\n)*NEW --column body"):
        find_leaks(train, [test], column="question")
    convert(test, tmp_path / "alone.jsonl", columns=["question"])  # as the error says
    assert len(find_leaks(train, [tmp_path / "alone.jsonl"]).pairs) == 1
    for first in ('{"text": "one two", "meta": {"a": [1]}}', '{"text": null, "answer": null}'):  # no column of both
        train.write_text(f'{first}\n{{"text": "one two"}}\n')
        with pytest.raises(DataError, match=rf"test\.jsonl, in which 'text' is no field(.|\n)*{alone}"):
            find_leaks(train, [test])
    write_table(train, Table(rows=[{"question": "one two", "id": "a"}]))
    with pytest.raises(DataError, match="--column question"):
        find_leaks(train, [test])
    assert len(find_leaks(train, [test], column="question").pairs) == 1
