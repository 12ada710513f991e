"""What is found out about the columns of training data, and the errors of single values."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unisono.data.dataset import read_samples
from unisono.data.options import DataOptions
from unisono.errors import DataError
from unisono.tasks.columns import resolve_task
from unisono.tasks.data import predictor_data
from unisono.tasks.inputs import EncodeRow
from unisono.tasks.options import ImageOptions, TaskOptions, TextOptions

TABLE = TaskOptions(kind="table")
NUMBER = TaskOptions(kind="table", predicts="number")


def table(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def resolved(tmp_path: Path, train: str, task: TaskOptions) -> TaskOptions:
    return resolve_task(task, DataOptions(train=train, cache_dir=str(tmp_path / "cache")))


def refused(tmp_path: Path, train: str, task: TaskOptions) -> str:
    with pytest.raises(DataError) as caught:
        resolved(tmp_path, train, task)
    return str(caught.value)


def test_large_numbers_keep_their_deviation(tmp_path: Path) -> None:
    times = 1_700_000_000 + np.arange(33) * 0.75
    rows = [f"{time!r},{time!r}" for time in times.tolist()]
    train = table(tmp_path / "t.csv", "time,target", *rows)
    task = resolved(tmp_path, train, NUMBER)
    assert (task.target_mean, task.target_std) == pytest.approx((times.mean(), times.std()), rel=1e-12)
    assert (task.input_mean, task.input_std) == (pytest.approx((times.mean(),)), pytest.approx((times.std(),)))
    data = predictor_data(
        task,
        DataOptions(train=train, eval=train, cache_dir=str(tmp_path / "cache")),
        ImageOptions(),
        TextOptions(),
        tokenizer=None,
        buckets=8,
    )
    samples = read_samples(data.held_out, np.arange(33))
    for found in (np.array([sample["targets"] for sample in samples]), np.concatenate([s["numbers"] for s in samples])):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, (times - times.mean()) / times.std(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("value", "said"), [("1e308", "1e+308"), ("inf", "inf")])
def test_a_number_that_float32_cannot_hold(tmp_path: Path, value: str, said: str) -> None:
    train = table(tmp_path / "t.csv", "x,target", "1.5,2.5", f"{value},3.5")
    text = (
        "  rule: numbers are absent, or finite and up to 3.403e+38\n"
        "  so:   losses would be infinite\n"
        "  try:  correct the value, or leave it empty"
    )
    assert refused(tmp_path, train, NUMBER) == f"column 'x', row 2 of {train}: the number {said}\n{text}"
    target = TaskOptions(kind="table", predicts="number", target="x", inputs=("target",))
    assert refused(tmp_path, train, target) == f"column 'x', row 2 of {train}: the target {said}\n{text}"
    # in held-out data
    encode = EncodeRow(numbers=("x",), mean=(0.0,), std=(1.0,), categories=(), buckets=8)
    with pytest.raises(DataError) as caught:
        encode({"x": np.float64(value)})
    assert str(caught.value) == f"{said} in the column 'x'\n{text}"


def test_one_text_among_numbers_is_an_error_and_many_are_categories(tmp_path: Path) -> None:
    def column(*ages: str) -> str:
        rows = [f"{at},{age},{'ab'[at % 2]},{at % 2}" for at, age in enumerate(ages)]
        return table(tmp_path / "t.csv", "x,age,kind,target", *rows)

    train = column("", *map(str, range(20, 42)), "nope", *map(str, range(16)))
    assert refused(tmp_path, train, TABLE) == (
        f"the column 'age' with text in 1 of 39 values: 'nope', row 24 of {train}\n"
        "  rule: a column of text in up to 5 % of its values is of numbers\n"
        "  so:   these samples have no such number\n"
        "  try:  correct the values, or leave them empty: that counts as the mean; categories are named by "
        'task.categories=["kind", "age"]'
    )
    given = TaskOptions(kind="table", categories=("kind", "age"))
    assert resolved(tmp_path, train, given).categories == ("kind", "age")
    assert resolved(tmp_path, column("nope", "1", "2", "inf"), TABLE).categories == ("age", "kind")
    few = TaskOptions(kind="table", categories=("kind",))
    assert "text in 1 of 4 values: 'nope', row 1" in refused(tmp_path, column("nope", "1", "2", "3"), few)


@pytest.mark.parametrize("rows", [["a", "", "b", ""], ["1", "", "2", ""]])
def test_rows_without_a_label(tmp_path: Path, rows: list[str]) -> None:
    train = table(tmp_path / "t.csv", "x,label", *(f"1,{row}" for row in rows))
    text = (
        f"2 of 4 training samples without a target in the column 'label': first row 2 of {train}\n"
        "  rule: every training sample has a target\n"
        "  so:   they cannot be learned from\n"
        "  try:  add the targets, or remove these samples"
    )
    assert refused(tmp_path, train, TABLE) == text
    if "a" not in rows:
        assert refused(tmp_path, train, NUMBER) == text


def test_words_without_labels(tmp_path: Path) -> None:
    rows = [{"words": "a b", "tags": "O P"}, {"words": "a b", "tags": ""}, {"words": "a b", "tags": "O\n\nP"}]
    train = table(tmp_path / "t.jsonl", *map(json.dumps, rows))
    said = refused(tmp_path, train, TaskOptions(kind="sequence_labelling"))
    assert said.startswith(f"2 of 3 training samples without a target in the column 'tags': first row 2 of {train}\n")
    assert "every training sample has a target, a sequence one for each word\n" in said


def test_labels_with_a_line_end_are_those_without(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"words": "a b", "tags": "PER O\n"}, {"words": "a b\n", "tags": "O PER"}]
    train = table(tmp_path / "t.jsonl", *map(json.dumps, rows))
    assert resolved(tmp_path, train, TaskOptions(kind="sequence_labelling")).classes == ("O", "PER")


def test_a_text_as_a_number_to_predict(tmp_path: Path) -> None:
    train = table(tmp_path / "t.csv", "x,sex", "1,m", "2,f")
    assert refused(tmp_path, train, TaskOptions(kind="table", predicts="number", target="sex")) == (
        f"column 'sex', row 1 of {train}: the text 'm' as the target\n"
        "  rule: every value of the column is a number or empty\n"
        "  so:   the sample has no such number\n"
        "  try:  correct the value, or task.predicts=class"
    )


def test_a_whole_number_is_one_category_in_any_file(tmp_path: Path) -> None:
    """A column of integers has floats in a file where one is absent, and text where one is text."""
    encode = EncodeRow(numbers=(), mean=(), std=(), categories=("code",), buckets=1 << 20)
    task = TaskOptions(kind="table", categories=("code",))
    found: list[list[int]] = []
    for name, codes in (("train", "10 20 30"), ("eval", "10 20 30 nan"), ("text", "10 20 30 x")):
        path = table(
            tmp_path / f"{name}.csv", "code,label", *(f"{code},{'ab'[at % 2]}" for at, code in enumerate(codes.split()))
        )
        data = DataOptions(train=path, eval=path, cache_dir=str(tmp_path / "cache"))
        tables = predictor_data(
            resolve_task(task, data),
            data,
            ImageOptions(),
            TextOptions(),
            tokenizer=None,
            buckets=1 << 20,
        )
        found.append([int(sample["categories"][0]) for sample in read_samples(tables.held_out, np.arange(3))])
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == 3
    empty = encode({"code": np.zeros(0, np.uint8)})["categories"]
    assert encode({"code": np.float64("nan")})["categories"] == empty


def test_classes_of_other_names_are_found_again(tmp_path: Path) -> None:
    from unisono.data.recordio import ImageHeader, RecordWriter, pack_header

    with RecordWriter(tmp_path / "a.rec") as writer:
        for at in range(4):
            writer.write(pack_header(ImageHeader(label=at % 2), b"\xff\xd8\xff"))
    for names in (("cat", "dog"), ("cat", "wolf")):
        (tmp_path / "a.rec.classes.txt").write_text("\n".join(names) + "\n")
        assert resolved(tmp_path, str(tmp_path / "a.rec"), TaskOptions(kind="image")).classes == names


def test_the_class_of_a_webdataset_is_its_target(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for at in range(4):
            for name, content in ((f"{at}.cls", b"%d" % (at % 2)), (f"{at}.txt", b"a text")):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    task = resolved(tmp_path, str(tmp_path / "a.tar"), TaskOptions(kind="text"))
    assert (task.inputs, task.target, task.classes) == (("txt",), "cls", ("0", "1"))


@pytest.mark.parametrize("separator", [";", "\t", "|"])
@pytest.mark.parametrize("target", ["", "label"])
def test_another_separator_than_commas(tmp_path: Path, separator: str, target: str) -> None:
    train = table(tmp_path / "t.csv", separator.join(("x", "label")), separator.join("10"), separator.join("21"))
    said = (
        f"offset 0: a header line with the one name {separator.join(('x', 'label'))!r}\n"
        "  rule: a .csv file has commas between its columns\n"
        "  so:   nothing from there on was read\n"
        f"  try:  the file with commas between its columns, where it has {separator!r}; or this name in quotes, if it is one"
    )
    assert refused(tmp_path, train, TaskOptions(kind="table", target=target)) == f"{train}: {said}"
    train = table(tmp_path / "u.csv", separator.join(("x", "label")), separator.join(("1,5", "0")))
    assert refused(tmp_path, train, TABLE) == f"{train}: {said}"


def test_a_file_without_rows(tmp_path: Path) -> None:
    (tmp_path / "t.csv").touch()
    said = refused(tmp_path, str(tmp_path / "t.csv"), TABLE)
    assert said.startswith(f"{tmp_path}/t.csv: offset 0: an empty file, without header line and rows\n")
    assert refused(tmp_path, table(tmp_path / "u.csv", "x,label"), TABLE).startswith(
        f"{tmp_path}/u.csv, which has no rows\n"
    )


def test_columns_that_a_task_does_not_read_may_hold_anything(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"text": f"t{n}", "label": "ab"[n % 2], "meta": {"n": n}} for n in range(6)]
    train = table(tmp_path / "t.jsonl", *map(json.dumps, rows))
    task = resolved(tmp_path, train, TaskOptions(kind="text"))
    assert (task.inputs, task.target, task.classes) == (("text",), "label", ("a", "b"))
    assert "meta" in refused(tmp_path, train, TaskOptions(kind="table", target="label"))
    rows[3]["text"] = None
    train = table(tmp_path / "u.jsonl", *map(json.dumps, rows))
    data = DataOptions(train=train, eval=train, cache_dir=str(tmp_path / "cache"))
    task = resolved(tmp_path, train, TaskOptions(kind="text"))
    with pytest.raises(DataError, match="line 4, field 'text'"):
        predictor_data(task, data, ImageOptions(), TextOptions(), tokenizer=None, buckets=8)


def test_a_folder_of_tables_of_two_formats(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    table(folder / "a.csv", "text,label", *(f"t{n},{'ab'[n % 2]}" for n in range(6)))
    table(folder / "b.jsonl", *(json.dumps({"text": f"u{n}", "label": "c"}) for n in range(4)))
    task = resolved(tmp_path, str(folder), TABLE)
    assert task.classes == ("a", "b", "c")
    options = DataOptions(train=str(folder), eval_frac=0.2, cache_dir=str(tmp_path / "cache"))
    data = predictor_data(task, options, ImageOptions(), TextOptions(), tokenizer=None, buckets=8)
    assert data.train is not None
    assert len(data.train) + len(data.held_out) == 10
