"""Label conflicts: all planted ones are found, and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import planted
import pytest

from unisono.errors import DataError
from unisono.quality.labels.label_errors import find_label_errors
from unisono.quality.options import DuplicateOptions

pytest.importorskip("rensa")


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def conflicts_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "conflicts.jsonl").read_text().splitlines()]


def found_rows(out: Path) -> list[list[int]]:
    return sorted(sorted(each["row"] for each in group["documents"]) for group in conflicts_of(out))


def test_planted_conflicts_are_all_found_and_no_others(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    rows: list[dict[str, Any]] = []
    planted_groups: list[list[int]] = []
    for number, text in enumerate(planted.documents(400, rng)):
        label, other = ("a", "b") if number % 2 else ("b", "a")
        begin = len(rows)
        near = planted.edited(text, 1, rng)
        if number % 8 == 0:  # the same text with another label
            texts, labels = [text, text], [label, other]
        elif number % 8 == 1:  # a near text with another label
            texts, labels = [text, near], [label, other]
        elif number % 8 == 2:  # copies with the same label: no conflict
            texts, labels = [text, near, text], [label] * 3
        elif number % 8 == 3:  # a copy that is near one of its own label, and has another
            texts, labels = [text, near, near], [label, label, other]
        else:
            texts, labels = [text], [label]
        rows += [{"text": each, "label": name} for each, name in zip(texts, labels, strict=True)]
        if len(set(labels)) > 1:
            planted_groups.append(list(range(begin, len(rows))))
    result = find_label_errors([write(tmp_path / "all.jsonl", rows)], tmp_path / "out", "label")
    assert found_rows(tmp_path / "out") == planted_groups
    assert result.conflicts == len(planted_groups) == 150
    assert result.in_conflict == sum(map(len, planted_groups))
    assert result.num_capped == 0


def test_a_conflict_behind_many_copies_of_one_label_is_found(tmp_path: Path) -> None:
    """More copies than a bucket holds; the kept document of their star has their label."""
    text = planted.documents(1, np.random.default_rng(1), words=(150, 151))[0]
    rng = np.random.default_rng(2)
    rows = [{"text": planted.edited(text, 1, rng), "label": "common"} for _ in range(300)]
    rows += [{"text": planted.edited(text, 1, rng), "label": "rare"}]
    result = find_label_errors([write(tmp_path / "all.jsonl", rows)], tmp_path / "out", "label")
    (group,) = conflicts_of(tmp_path / "out")
    assert 300 in {each["row"] for each in group["documents"]}
    assert group["majority"] == "common"
    assert result.num_capped == 1  # the rare one, which was not compared with all


def test_a_group_says_labels_majority_and_similarity(tmp_path: Path) -> None:
    text = " ".join(f"word{number}" for number in range(120))
    near = text.replace("word60 ", "other ")
    rows = [
        {"text": text, "label": 1},
        {"text": text, "label": 1.0},
        {"text": near, "label": 2},
        {"text": "x", "label": 2},
    ]
    find_label_errors([write(tmp_path / "all.jsonl", rows)], tmp_path / "out", "label")
    (group,) = conflicts_of(tmp_path / "out")
    assert group["labels"] == {"1": 2, "2": 1}
    assert group["majority"] == "1"
    similarity = round(planted.jaccard(text, near), 4)
    assert group["documents"] == [
        {"file": "all.jsonl", "row": row, "label": label, "similarity": similarity}
        for row, label in ((0, "1"), (1, "1"), (2, "2"))
    ]
    exact = find_label_errors([tmp_path / "all.jsonl"], tmp_path / "exact", "label", options=DuplicateOptions(near=0.0))
    assert exact.conflicts == 0


def test_rows_without_a_text_are_compared_whole(tmp_path: Path) -> None:
    (tmp_path / "all.csv").write_text("a,b,kind\n1,2.5,x\n1,2.5,y\n3,4.0,x\n3,4.5,x\n")
    with pytest.raises(DataError) as raised:
        find_label_errors([tmp_path / "all.csv"], tmp_path / "refused", "kind")
    assert "whose only text is the label 'kind'" in str(raised.value)
    exact = DuplicateOptions(near=0.0)
    find_label_errors([tmp_path / "all.csv"], tmp_path / "out", "kind", options=exact, whole_rows=True)
    assert found_rows(tmp_path / "out") == [[0, 1]]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"text": "a", "label": "x"}, {"text": "b", "label": None}], "line 2 at offset 28: field 'label': null is "),
        ([{"text": "a", "label": "x"}, {"text": "b", "label": "x"}], "with 1 different values in 2 rows"),
        ([{"text": "a"}, {"text": "b"}], "has no column 'label'"),
    ],
)
def test_rows_without_labels(tmp_path: Path, rows: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(DataError) as raised:
        find_label_errors([write(tmp_path / "all.jsonl", rows)], tmp_path / "out", "label")
    assert said in str(raised.value)
    assert not (tmp_path / "out" / "report.json").exists()
