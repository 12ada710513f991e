"""Texts of data stay texts in charts: plotly reads markup, such as links, in titles, names and categories."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from report_pages import CHROMIUM, charts, in_browser
from tools import missing

from unisono.quality.balance import balance
from unisono.quality.columns.check import check_columns
from unisono.quality.labels.label_errors import find_label_errors
from unisono.quality.split import split
from unisono.tune.search_page import write_search_page
from unisono.tune.space import read_space
from unisono.tune.study import StudyOptions, TrialRecord

LINK = "<b>BOLD</b> & <a href='http://evil.example/'>click</a>"
SHOWN = "&lt;b>BOLD&lt;/b> &amp; &lt;a href='http://evil.example/'>click&lt;/a>"


def table(folder: Path) -> Path:
    path = folder / "a.jsonl"
    rows: list[dict[str, Any]] = [
        {"text": f"text number {number}", "label": (LINK, "other")[number % 2], LINK: number + 0.5}
        for number in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chart(page: Path, name: str) -> dict[str, Any]:
    return charts(page.read_text())[name]


def test_balance(tmp_path: Path) -> None:
    balance([table(tmp_path)], tmp_path / "out", field="label")
    assert all(SHOWN in bars["x"] for bars in chart(tmp_path / "out/report.html", "classes")["data"])


def test_columns(tmp_path: Path) -> None:
    check_columns([table(tmp_path)], out=tmp_path / "out")
    assert chart(tmp_path / "out/report.html", "histogram0")["layout"]["title"]["text"] == SHOWN


def test_labels_and_split(tmp_path: Path) -> None:
    pytest.importorskip("rensa")
    find_label_errors([table(tmp_path)], tmp_path / "labels", "label")
    assert SHOWN in chart(tmp_path / "labels/report.html", "labels")["data"][0]["x"]
    parts = {"<b>train": Fraction(1, 2), "rest": Fraction(1, 2)}
    split([table(tmp_path)], tmp_path / "parts", parts, class_field="label")
    bars = chart(tmp_path / "parts/report.html", "classes")["data"]
    assert [each["name"] for each in bars] == ["&lt;b>train", "rest"]
    assert all(SHOWN in each["x"] for each in bars)


def test_search(tmp_path: Path) -> None:
    name, shown = "run.name<b>", "run.name&lt;b>"
    records = [
        TrialRecord(
            number=number,
            settings={name: value},
            outcome="done",
            value=float(number),
            took_s=1.0,
            device_s=1.0,
            reason="",
            run_dir=tmp_path,
        )
        for number, value in enumerate(("a", LINK))
    ]
    path = tmp_path / "search.html"
    space = read_space([f"{name}=a,{LINK}"])
    write_search_page(path, space, StudyOptions(metric="eval/<b>"), records, records[0], {name: 1.0})
    lines = chart(path, "parallel")["data"]
    assert all(line["x"] == [shown, "eval/&lt;b>"] for line in lines)
    assert sorted(line["hovertemplate"] for line in lines) == [
        f"trial 0<br>{shown}: a<br>eval/&lt;b>: 0<extra></extra>",
        f"trial 1<br>{shown}: {SHOWN}<br>eval/&lt;b>: 1<extra></extra>",
    ]
    assert chart(path, "importances")["data"][0]["y"] == [shown]
    assert chart(path, "setting0")["layout"]["xaxis"]["title"]["text"] == shown


@pytest.mark.skipif(
    CHROMIUM is None and bool(missing("chromium")),
    reason="no chromium on this machine: texts of charts are NOT tested in a browser",
)
def test_a_label_in_a_browser(tmp_path: Path) -> None:
    balance([table(tmp_path)], tmp_path / "out", field="label")
    page, complaints = in_browser(tmp_path / "out/report.html", tmp_path / "profile")
    assert complaints == []
    assert 'data-drawn="1"' in page
    assert '"http://evil.example/"' not in page
    assert "&lt;b&gt;BOLD&lt;/b&gt; &amp; &lt;a href" in page
