"""Marks: saved by the page in a browser, applied to the data set they are of, and to no other."""

from __future__ import annotations

import html
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from label_marks import mark, marked_data, save_marks
from report_pages import CHROMIUM, evaluated, in_browser
from tools import missing

from unisono.data.convert.table_files import Table, open_table, write_table
from unisono.errors import ConfigError, DataError
from unisono.quality.labels import relabel as relabel_module
from unisono.quality.labels.label_errors import find_label_errors
from unisono.quality.labels.relabel import relabel
from unisono.quality.options import DuplicateOptions
from unisono.quality.split import split

EVIL = "</script><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">"
EXACT = DuplicateOptions(near=0.0)
ROWS = [
    {"text": "same", "label": "a", "other": 1.5},
    {"text": "same", "label": "b", "other": 2.5},
    {"text": "alone", "label": "a", "other": 3.5},
    {"text": "same", "label": "a", "other": 4.5},
    {"text": EVIL, "label": EVIL, "other": 5.5},
    {"text": EVIL, "label": "b", "other": 6.5},
]


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    write_table(path, Table(rows=rows))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet", ".tar"])
def test_marked_labels_change_and_nothing_else(tmp_path: Path, suffix: str) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    data = write(tmp_path / f"all{suffix}")
    find_label_errors([data], tmp_path / "out", "label", options=EXACT, column="text")
    name = data.name
    marks = save_marks(
        tmp_path / "marks.json",
        tmp_path / "out",
        mark(name, 5, "b", "change", to=EVIL),
        mark(name, 0, "a", "keep"),
        mark(name, 2, "a", "drop"),
        mark(name, 1, "b", "change", to="a"),
    )
    result = relabel([data], tmp_path / "new", marks)
    assert (result.documents, result.kept, result.changed, result.num_dropped, result.confirmed) == (6, 5, 2, 1, 1)
    assert sorted(result.changes) == [("b", EVIL, 1), ("b", "a", 1)]
    expected = [dict(row) for row in open_table(data).rows]
    expected[1]["label"], expected[5]["label"] = "a", EVIL
    del expected[2]
    assert [dict(row) for row in open_table(tmp_path / "new" / "data" / name).rows] == expected
    assert np.load(tmp_path / "new" / "kept" / f"{name}.npy").tolist() == [0, 1, 3, 4, 5]
    changes = [json.loads(line) for line in (tmp_path / "new" / "changes.jsonl").read_text().splitlines()]
    assert changes == [
        {"file": name, "row": 1, "action": "change", "new_row": 1, "label": "b", "to": "a"},
        {"file": name, "row": 2, "action": "drop", "label": "a"},
        {"file": name, "row": 5, "action": "change", "new_row": 4, "label": "b", "to": EVIL},
    ]
    assert relabel([data], tmp_path / "new", marks) == result


def test_labels_with_lone_surrogates(tmp_path: Path) -> None:
    """JSON escapes them, and UTF-8 does not have them."""
    data = tmp_path / "all.jsonl"
    data.write_text('{"text":"same","label":"\\ud800x"}\n{"text":"same","label":"b"}\n{"text":"\\udfff","label":"b"}\n')
    found = find_label_errors([data], tmp_path / "out", "label", options=EXACT)
    assert found.labels == {"\ud800x": 1, "b": 2}
    assert find_label_errors([data], tmp_path / "out", "label", options=EXACT) == found
    conflict = json.loads((tmp_path / "out" / "conflicts.jsonl").read_bytes())
    assert conflict["labels"] == {"\ud800x": 1, "b": 1}
    marks = save_marks(tmp_path / "marks.json", tmp_path / "out", mark("all.jsonl", 1, "b", "change", to="\ud800x"))
    assert relabel([data], tmp_path / "new", marks).changes == (("b", "\ud800x", 1),)
    assert json.loads((tmp_path / "new" / "changes.jsonl").read_bytes())["to"] == "\ud800x"
    lines = (tmp_path / "new" / "data" / "all.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["label"] for line in lines] == ["\ud800x", "\ud800x", "b"]
    parts = {"train": Fraction(2, 3), "test": Fraction(1, 3)}
    result = split([data], tmp_path / "parts", parts, class_field="label", options=EXACT)
    assert sum(part.classes["\ud800x"] for part in result.parts) == 1
    assert split([data], tmp_path / "parts", parts, class_field="label", options=EXACT) == result


def test_changes_can_be_undone(tmp_path: Path) -> None:
    """Lines that are not marked stay as they were written, byte for byte; the others come back by their record."""
    data = tmp_path / "all.jsonl"
    data.write_text('{"label": 1, "text":"x"}\n{"text": "x",   "label": 2}\n{"text": "\\u00fc", "label": 2}\n')
    find_label_errors([data], tmp_path / "out", "label", options=EXACT)
    marks = save_marks(tmp_path / "marks.json", tmp_path / "out", mark("all.jsonl", 0, 1, "change", to="2"))
    relabel([data], tmp_path / "new", marks)
    lines = (tmp_path / "new" / "data" / "all.jsonl").read_text().splitlines()
    assert lines == ['{"label": 2, "text":"x"}', *data.read_text().splitlines()[1:]]
    (change,) = map(json.loads, (tmp_path / "new" / "changes.jsonl").read_text().splitlines())
    undone = json.loads(lines[change["new_row"]]) | {"label": int(change["label"])}
    assert undone == json.loads(data.read_text().splitlines()[change["row"]])


def test_other_values_of_a_line_may_be_any(tmp_path: Path) -> None:
    data = tmp_path / "all.jsonl"
    data.write_text('{"text": "x", "score": NaN, "label": "a", "\\udfff": "\\ud800"}\n{"text": "x", "label": "b"}\n')
    find_label_errors([data], tmp_path / "out", "label", options=EXACT)
    marks = save_marks(tmp_path / "marks.json", tmp_path / "out", mark("all.jsonl", 0, "a", "change", to="b"))
    relabel([data], tmp_path / "new", marks)
    assert (tmp_path / "new" / "data" / "all.jsonl").read_text() == data.read_text().replace('"a"', '"b"')


def test_rows_that_are_compared_whole(tmp_path: Path) -> None:
    data = tmp_path / "all.csv"
    data.write_text("a,b,kind\n1,2.5,x\n1,2.5,y\n3,4.0,x\n")
    find_label_errors([data], tmp_path / "out", "kind", options=EXACT, whole_rows=True)
    marks = save_marks(tmp_path / "marks.json", tmp_path / "out", mark("all.csv", 1, "y", "change", to="x"))
    relabel([data], tmp_path / "new", marks)
    assert [row["kind"] for row in open_table(tmp_path / "new" / "data" / "all.csv").rows] == ["x", "x", "x"]


def test_marks_of_another_data_set_are_refused(tmp_path: Path) -> None:
    data = write(tmp_path / "all.jsonl")
    find_label_errors([data], tmp_path / "out", "label", options=EXACT)
    marks = save_marks(tmp_path / "marks.json", tmp_path / "out", mark("all.jsonl", 1, "b", "change", to="a"))
    others = [ROWS[:5], [*ROWS[:2], ROWS[3], ROWS[2], *ROWS[4:]], [{**ROWS[0], "label": "b"}, *ROWS[1:]]]
    for number, rows in enumerate(others):
        (tmp_path / f"{number}").mkdir()
        with pytest.raises(DataError) as raised:
            relabel([write(tmp_path / f"{number}" / "all.jsonl", rows)], tmp_path / f"new{number}", marks)
        assert "with marks of another data set than" in str(raised.value)
        assert not (tmp_path / f"new{number}" / "report.json").exists()
    (tmp_path / "moved").mkdir()
    assert relabel([write(tmp_path / "moved" / "all.jsonl")], tmp_path / "new", marks).changed == 1


@pytest.mark.parametrize(
    ("marks", "said"),
    [
        ([mark("all.jsonl", 1, "a", "keep")], "a mark of the label 'a' in all.jsonl, row 1, which has another"),
        ([mark("all.jsonl", 6, "a", "keep")], "a mark of 'all.jsonl', row 6, which is not there"),
        ([mark("../all.jsonl", 0, "a", "keep")], "a mark of '../all.jsonl', row 0, which is not there"),
        ([mark("all.jsonl", 0, "a", "change", to="c")], "a change to 'c', which no document has as its label"),
        ([mark("all.jsonl", 0, "a", "keep"), mark("all.jsonl", 0, "a", "drop")], "two marks of all.jsonl, row 0"),
        ([mark("all.jsonl", 0, "a", "change")], "is change to None"),
        ([mark("all.jsonl", 0, "a", "keep", to="b")], "is keep to b"),
        ([mark("all.jsonl", 0, "a", "remove")], "Invalid enum value 'remove'"),
        ([{"file": "all.jsonl"}], "missing required field `row`"),
    ],
)
def test_damaged_marks_are_refused(tmp_path: Path, marks: list[dict[str, Any]], said: str) -> None:
    data = write(tmp_path / "all.jsonl")
    find_label_errors([data], tmp_path / "out", "label", options=EXACT)
    with pytest.raises(DataError) as raised:
        relabel([data], tmp_path / "new", save_marks(tmp_path / "marks.json", tmp_path / "out", *marks))
    assert said in str(raised.value)
    assert not (tmp_path / "new" / "data").exists()


def test_a_file_that_is_none_of_marks_is_refused(tmp_path: Path) -> None:
    data = write(tmp_path / "all.jsonl")
    find_label_errors([data], tmp_path / "out", "label", options=EXACT)
    marks = save_marks(tmp_path / "marks.json", tmp_path / "out", version=2)
    for content, said in (
        (None, "version 2"),
        (marks.read_bytes()[:-5], "delimiter"),
        (b"", "Expecting value"),
        (b"[]", "object"),
    ):
        if content is not None:
            marks.write_bytes(content)
        with pytest.raises(DataError) as raised:
            relabel([data], tmp_path / "new", marks)
        assert said in str(raised.value)
    with pytest.raises(DataError):
        relabel([data], tmp_path / "new", tmp_path / "nothing.json")


def test_a_killed_job_goes_on_and_others_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write(tmp_path / "all.jsonl")
    find_label_errors([data], tmp_path / "out", "label", options=EXACT)
    marks = save_marks(tmp_path / "marks.json", tmp_path / "out", mark("all.jsonl", 1, "b", "change", to="a"))

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(relabel_module, "write_relabel_page", killed)
        with pytest.raises(KeyboardInterrupt):
            relabel([data], tmp_path / "new", marks)
    assert not (tmp_path / "new" / "data").exists()
    other = save_marks(tmp_path / "other.json", tmp_path / "out")
    assert relabel([data], tmp_path / "new", marks).changed == 1
    assert not (tmp_path / "new" / "work").exists()
    with pytest.raises(ConfigError, match="results of other inputs or settings"):
        relabel([data], tmp_path / "new", other)


def test_what_texts_and_labels_say_stays_text(tmp_path: Path) -> None:
    data = write(tmp_path / "all.jsonl")
    find_label_errors([data], tmp_path / "out", "label", options=EXACT)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<img" not in page
    assert html.escape(EVIL, quote=False) in page.replace("&#34;", '"').replace("&#39;", "'")
    assert [EVIL, "b"] in [entry[2:] for entry in marked_data(page)["documents"]]


_CLICK = """
(() => {
  let text = null, saved = null;
  const make = JSON.stringify;
  JSON.stringify = (...given) => text = make(...given);
  URL.createObjectURL = blob => { saved = {text, type: blob.type, size: blob.size}; return "#"; };
  HTMLAnchorElement.prototype.click = function() { saved.name = this.download; };
  const card = place => [...document.querySelectorAll(".card")].find(each => each.textContent.includes(place));
  const press = (place, action) => card(place).querySelector(`[data-action=${action}]`).click();
  const choose = (place, value) => {
    const input = card(place).querySelector("input");
    input.value = value;
    input.dispatchEvent(new Event("change"));
    return [input.value, input.classList.contains("chosen"), input.validity.valid];
  };
  const names = [...document.querySelectorAll("#label-names option")].map(each => each.value);
  const third = names.find(name => name !== "a" && name !== "b");
  const typed = [choose("row 3", third), choose("row 3", ""), choose("row 0", "no such label"), choose("row 0", third)];
  press("row 1", "change"); press("row 0", "keep"); press("row 3", "drop"); press("row 3", "skip"); press("row 4", "change");
  const pressed = document.querySelectorAll("[aria-pressed=true]").length;
  const before = document.getElementById("count").textContent;
  document.getElementById("save").click();
  return {pressed, before, after: document.getElementById("count").textContent, title: document.title, names, typed, ...saved};
})()
"""


@pytest.mark.skipif(
    CHROMIUM is None and bool(missing("chromium")),
    reason="no chromium on this machine: the page of labels is NOT tested in a browser",
)
def test_buttons_in_a_browser_make_marks_that_are_applied(tmp_path: Path) -> None:
    data = write(tmp_path / "all.jsonl")
    find_label_errors([data], tmp_path / "out", "label", options=EXACT)
    page = tmp_path / "out" / "report.html"
    dom, complaints = in_browser(page, tmp_path / "profile")
    assert complaints == []  # the policy lets the page's own script run
    assert '<span id="count">0 marked</span>' in dom
    assert 'data-drawn="1"' in dom
    found = evaluated(page, tmp_path, _CLICK, width=1000)
    assert found["title"] == "Labels of out"
    assert sorted(found["names"]) == sorted(["a", "b", EVIL])
    assert found["typed"] == [
        [EVIL, True, True],
        ["", False, True],
        ["no such label", False, False],
        [EVIL, True, True],
    ]
    assert (found["pressed"], found["before"], found["after"]) == (3, "3 marked, not saved", "3 marked")
    assert (found["name"], found["type"]) == ("marks.json", "application/json")
    assert found["size"] == len(found["text"].encode()) + 1  # and a line end
    marks = tmp_path / "marks.json"
    marks.write_text(found["text"])
    assert json.loads(found["text"])["marks"] == [
        mark("all.jsonl", 0, "a", "keep"),  # its first mark was the first of all
        mark("all.jsonl", 1, "b", "change", to="a"),
        mark("all.jsonl", 4, EVIL, "change", to="b"),
    ]
    result = relabel([data], tmp_path / "new", marks)
    assert (result.changed, result.num_dropped, result.confirmed) == (2, 0, 1)
    labels = [row["label"] for row in open_table(tmp_path / "new" / "data" / "all.jsonl").rows]
    assert labels == ["a", "a", "a", "a", "b", "b"]
