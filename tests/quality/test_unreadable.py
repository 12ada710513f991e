"""Documents that cannot be read are left out by every command: counted, listed, and warned about."""

from __future__ import annotations

import json
import logging
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from label_marks import mark, save_marks
from pictures import jpeg, photograph

from unisono.errors import ConfigError, DataError
from unisono.quality import documents as documents_module
from unisono.quality.clean import clean
from unisono.quality.duplicates import sketch_folder
from unisono.quality.labels.label_errors import find_label_errors
from unisono.quality.labels.relabel import relabel
from unisono.quality.leak import find_leaks
from unisono.quality.options import DuplicateOptions, only_dedup
from unisono.quality.split import split

EXACT = DuplicateOptions(near=0.0)
HALVES = {"x": Fraction(1, 2), "y": Fraction(1, 2)}


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def tree(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def test_leaks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = write(tmp_path / "train.jsonl", {"text": "a"}, "no JSON", {"text": "b"})
    test = write(tmp_path / "test.jsonl", {"text": 5}, {"text": "b"}, {"body": "a"}, {"text": "c"}, "no JSON")
    with pytest.raises(DataError, match=r"train\.jsonl: line 2 at offset 14"):
        find_leaks(train, [test], options=EXACT)
    out = tmp_path / "out"
    result = find_leaks(train, [test], out=out, options=EXACT, skips_unreadable=True)
    assert [(part.documents, part.unreadable, part.exact) for part in result.splits] == [(3, 1, 0), (5, 3, 1)]
    assert [(pair["row"], pair["duplicate_of"]["row"]) for pair in result.pairs] == [(1, 2)]
    assert np.load(out / "kept" / "train.jsonl.npy").tolist() == [0, 2]
    assert np.load(out / "kept" / "test.jsonl.npy").tolist() == [3]
    dropped = read(out / "dropped.jsonl")
    assert [(line["file"], line["row"], line["reason"]) for line in dropped] == [
        ("train.jsonl", 1, "unreadable"),
        *[("test.jsonl", row, "unreadable") for row in (0, 2, 4)],
    ]
    assert "field 'text': 5 (int)" in dropped[1]["fault"]
    page = (out / "report.html").read_text()
    assert "Not read" in page
    assert "train.jsonl: line 2 at offset 14" in page
    assert "4 documents that cannot be read are left out, the first is train.jsonl, row 1: " in caplog.text
    assert find_leaks(train, [test], out=out, options=EXACT, skips_unreadable=True) == result


def test_parts_have_none_of_them(tmp_path: Path) -> None:
    rows = [{"text": f"text {row}", "user": row // 2, "label": "ab"[row % 2]} for row in range(12)]
    without_user = {"text": "text 3", "label": "a"}  # the same text as one that has a user
    source = write(tmp_path / "a.jsonl", *rows, "no JSON", without_user, {"text": "z", "user": 1, "label": None})
    settings: dict[str, Any] = {"class_field": "label", "group_field": "user", "options": EXACT}
    result = split([source], tmp_path / "out", HALVES, skips_unreadable=True, **settings)
    assert (result.documents, result.unreadable, result.clusters) == (15, 3, 6)
    assert [(part.documents, part.classes) for part in result.parts] == [(6, {"a": 3, "b": 3})] * 2
    kept = [np.load(tmp_path / "out" / part / "kept" / "a.jsonl.npy").tolist() for part in "xy"]
    assert sorted(kept[0] + kept[1]) == list(range(12))
    assert [line["row"] for line in read(tmp_path / "out" / "dropped.jsonl")] == [12, 13, 14]
    assert "line 14 of " in (tmp_path / "out" / "report.html").read_text()
    # those that can be read go where they would go without the others
    alone = split([write(tmp_path / "b.jsonl", *rows)], tmp_path / "alone", HALVES, **settings)
    assert (alone.unreadable, alone.parts) == (0, result.parts)
    assert [np.load(tmp_path / "alone" / part / "kept" / "b.jsonl.npy").tolist() for part in "xy"] == kept
    assert not (tmp_path / "alone" / "dropped.jsonl").exists()


def test_labels_and_what_is_marked(tmp_path: Path) -> None:
    rows = [{"text": "same", "label": "a"}, {"text": "same", "label": "b"}, {"text": "same", "label": None}]
    source = write(tmp_path / "a.jsonl", *rows, "no JSON", {"text": "alone", "label": "a"}, {"label": "c"})
    with pytest.raises(DataError):
        find_label_errors([source], tmp_path / "failed", "label", options=EXACT)
    result = find_label_errors([source], tmp_path / "out", "label", options=EXACT, skips_unreadable=True)
    assert (result.documents, result.unreadable, result.labels) == (6, 3, {"a": 2, "b": 1})
    (conflict,) = read(tmp_path / "out" / "conflicts.jsonl")
    assert [document["row"] for document in conflict["documents"]] == [0, 1]
    dropped = read(tmp_path / "out" / "dropped.jsonl")
    assert [line["row"] for line in dropped] == [2, 3, 5]
    assert "null is no number" in dropped[0]["fault"]
    marks = save_marks(tmp_path / "marks.json", tmp_path / "out", mark("a.jsonl", 1, "b", "change", to="a"))
    changed = relabel([source], tmp_path / "new", marks)
    assert (changed.kept, changed.changed, changed.unreadable, changed.num_dropped) == (3, 1, 3, 0)
    lines = read(tmp_path / "new" / "data" / "a.jsonl")
    assert lines == [rows[0], {"text": "same", "label": "a"}, {"text": "alone", "label": "a"}]
    assert [line["row"] for line in read(tmp_path / "new" / "dropped.jsonl")] == [2, 3, 5]
    wrong = save_marks(tmp_path / "wrong.json", tmp_path / "out", mark("a.jsonl", 3, "b", "drop"))
    with pytest.raises(DataError, match=r"a mark of the label 'b' in a\.jsonl, row 3, which has another"):
        relabel([source], tmp_path / "no", wrong)


def test_images(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jpg").write_bytes(jpeg(photograph(1)))
        (tmp_path / name / "b.jpg").write_bytes(b"nothing" if name == "test" else jpeg(photograph(2)))
    paths = (tmp_path / "train", [tmp_path / "test"])
    with pytest.raises(DataError, match=r"test/b\.jpg: .*; 1 such documents in all"):
        find_leaks(*paths, options=DuplicateOptions())
    result = find_leaks(*paths, options=DuplicateOptions(), skips_unreadable=True)
    assert [(part.documents, part.unreadable, part.exact) for part in result.splits] == [(2, 0, 0), (2, 1, 1)]


def test_a_job_that_failed_goes_on_without_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the chunks that are there; and no job goes on that would have to make an error of what was left out."""
    monkeypatch.setattr(sketch_folder, "CHUNK_DOCUMENTS", 4)
    lines = [json.dumps({"text": f"text {row % 7}"}) for row in range(30)]
    lines[18] = "no JSON"
    source = write(tmp_path / "a.jsonl", *lines)
    sketched: list[int] = []
    real = sketch_folder.make_chunk

    def counted(texts: list[bytes], *rest: Any) -> bytes:
        sketched.append(len(texts))
        return real(texts, *rest)

    monkeypatch.setattr(sketch_folder, "make_chunk", counted)
    recipe = only_dedup(EXACT)
    whole = clean([source], tmp_path / "whole" / "out", recipe, skips_unreadable=True, workers=0)
    assert sum(sketched) == 30
    with pytest.raises(DataError, match="line 19"):
        clean([source], tmp_path / "failed" / "out", recipe, workers=0)
    sketched.clear()
    assert clean([source], tmp_path / "failed" / "out", recipe, skips_unreadable=True, workers=0) == whole
    assert sum(sketched) == 14
    assert tree(tmp_path / "failed") == tree(tmp_path / "whole")
    with pytest.raises(ConfigError, match="results of other inputs or settings"):
        clean([source], tmp_path / "failed" / "out", recipe, workers=0)


def test_a_job_that_is_done_without_faults_is_done(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", {"text": "a"}, {"text": "b"})
    done = clean([source], tmp_path / "out", only_dedup(EXACT))
    before = tree(tmp_path / "out")
    assert clean([source], tmp_path / "out", only_dedup(EXACT), skips_unreadable=True) == done
    assert clean([source], tmp_path / "out", only_dedup(EXACT)) == done
    assert tree(tmp_path / "out") == before


@pytest.mark.parametrize("damaged", [False, True])
def test_a_job_of_other_settings_that_has_done_nothing_is_begun_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: bool
) -> None:
    lines = [{"text": f"a {number}"} for number in range(5)]
    source, recipe = write(tmp_path / "a.jsonl", *lines, "no JSON"), only_dedup(EXACT)
    options: dict[str, Any] = {"skips_unreadable": True, "index_only": True, "workers": 0}
    whole = clean([source], tmp_path / "whole" / "out", recipe, **options)
    with pytest.raises(DataError):
        clean([source], tmp_path / "out", recipe)
    if damaged:
        (tmp_path / "out" / "job.json").write_text("[")
    with caplog.at_level(logging.WARNING):
        assert clean([source], tmp_path / "out", recipe, **options) == whole
    assert "had other inputs or settings and had done nothing yet: it begins anew" in caplog.text
    assert tree(tmp_path / "out") == tree(tmp_path / "whole" / "out")


@pytest.mark.parametrize("name", ["mine.txt", "kept", "report.json", "work/sketches/chunk-000000.safetensors"])
@pytest.mark.parametrize("damaged", [False, True])
def test_a_folder_with_other_files_is_not_begun_anew(tmp_path: Path, name: str, damaged: bool) -> None:
    source = write(tmp_path / "a.jsonl", {"text": "a"}, "no JSON")
    with pytest.raises(DataError):
        clean([source], tmp_path / "out", only_dedup(EXACT))
    (tmp_path / "out" / name).touch()
    if damaged:
        (tmp_path / "out" / "job.json").write_text("[")
    before = tree(tmp_path / "out")
    reason = "job.json, which is damaged" if damaged else "results of other inputs or settings"
    with pytest.raises(ConfigError, match=reason):
        clean([source], tmp_path / "out", only_dedup(EXACT), skips_unreadable=True, index_only=True)
    assert tree(tmp_path / "out") == before


@pytest.mark.parametrize("name", ["work", "work/sketches", "work/new", "work/old"])
@pytest.mark.parametrize("is_link", [True, False])
def test_intermediate_files_stay_in_the_folder(tmp_path: Path, name: str, is_link: bool) -> None:
    source = write(tmp_path / "a.jsonl", {"text": "a"}, "no JSON")
    with pytest.raises(DataError):
        clean([source], tmp_path / "out", only_dedup(EXACT))
    place = tmp_path / "out" / name
    place.rename(tmp_path / "elsewhere")
    if is_link:
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.touch()
    before = tree(tmp_path)
    for options in (only_dedup(EXACT), only_dedup(DuplicateOptions(near=0.5))):
        with pytest.raises(ConfigError, match=f"{name}, which is {'a link' if is_link else 'no folder'}"):
            clean([source], tmp_path / "out", options, skips_unreadable=True)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("suffix", [".txt", ".jpg"])
def test_a_file_that_is_too_large_for_a_document(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = jpeg(photograph(0)) if suffix == ".jpg" else b"nine bytes"
    monkeypatch.setattr(documents_module, "MAX_RECORD_BYTES", len(content))
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / f"a{suffix}").write_bytes(content + b".")
    (folder / f"b{suffix}").write_bytes(content)
    recipe = only_dedup(EXACT)
    with pytest.raises(DataError, match=rf"a{suffix}, of more than [0-9,]+ bytes") as caught:
        clean([folder], tmp_path / "out", recipe)
    assert "--on-error skip" in str(caught.value)
    assert clean([folder], tmp_path / "out", recipe, skips_unreadable=True).dropped["unreadable"] == 1
    assert [path.name for path in (tmp_path / "out" / "data").iterdir()] == [f"b{suffix}"]


def test_errors_name_the_way_out(tmp_path: Path) -> None:
    """Of a text that is not UTF-8, a broken or blank line, and a row without its label."""
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "code").write_bytes(b"a\xe9")
    lines = write(tmp_path / "a.jsonl", {"text": "a"}, "{broken")
    blank = write(tmp_path / "b.jsonl", {"text": "a"}, "", {"text": "b"})
    for source in (tmp_path / "raw", tmp_path / "raw" / "code", lines, blank):
        with pytest.raises(DataError, match=r"try:.*; --on-error skip leaves such documents out"):
            clean([source], tmp_path / "out", only_dedup(EXACT))
        clean([source], tmp_path / "out", only_dedup(EXACT), skips_unreadable=True)
        shutil.rmtree(tmp_path / "out")
    unlabelled = write(tmp_path / "c.jsonl", {"text": "a", "label": 1}, {"text": "b"})
    with pytest.raises(DataError, match=r"try:.*; --on-error skip leaves such documents out"):
        split([unlabelled], tmp_path / "out", HALVES, class_field="label", options=EXACT)


@pytest.mark.parametrize(
    ("content", "given", "nearest"),
    [
        ("text,n\na,1\nb\n", "line 3 has 1 fields, and the header 2", "a line with 2 fields, or without that line"),
        ("text,text\na,1\n", r"names \['text', 'text'\]", "another name in the header for a column"),
    ],
)
def test_csv_that_is_no_table(tmp_path: Path, content: str, given: str, nearest: str) -> None:
    (tmp_path / "a.csv").write_text(content)
    for skips in (False, True):
        with pytest.raises(DataError, match=given) as caught:
            clean([tmp_path / "a.csv"], tmp_path / "out", only_dedup(EXACT), skips_unreadable=skips)
        assert nearest in str(caught.value)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("x.tsv", "write it as .csv, with commas between the columns"),
        ("x.json", "write it as .jsonl, with one object on each line"),
        ("x.ndjson", "name it .jsonl"),
    ],
)
def test_tables_of_other_formats_are_text(
    tmp_path: Path, name: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / name).write_text("a\tb\n")
    for source in (tmp_path / "files", tmp_path / "files" / name):
        caplog.clear()
        assert clean([source], tmp_path / f"of-{source.name}", only_dedup(EXACT)).documents == 1
        assert (
            f"{name} is read as one document of text; tables are .jsonl, .csv, .parquet: to read its rows, {how}"
            in caplog.text
        )
    caplog.clear()
    (tmp_path / "files" / name).rename(tmp_path / "files" / "x.txt")
    clean([tmp_path / "files"], tmp_path / "text", only_dedup(EXACT))
    assert "is read as" not in caplog.text
