"""Data sets of several sources: the classes of each, shares of a mixture, classes read equally often, batches of one length."""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from unisono.data.convert.pack import PackOptions, pack_images
from unisono.data.dataset import Dataset, read_samples
from unisono.data.options import DataOptions
from unisono.data.tokens.tokenizer import load_tokenizer
from unisono.errors import DataError
from unisono.tasks.columns import resolve_task
from unisono.tasks.data import TaskData, predictor_data
from unisono.tasks.options import ImageOptions, TaskOptions, TextOptions

COLOURS = {"azure": (0, 128, 255), "blue": (0, 0, 255), "red": (255, 0, 0)}
IMAGES = TaskOptions(kind="image")


def folder(path: Path, **counts: int) -> str:
    """A folder of images, whose one colour is that of their class."""
    for name, count in counts.items():
        (path / name).mkdir(parents=True)
        for at in range(count):
            Image.new("RGB", (8, 8), COLOURS[name]).save(path / name / f"{at}.png")
    return str(path)


def packed(source: str, **options: Any) -> str:
    """Records of a folder, with ``TARGET.classes.txt`` beside them."""
    pack_images(Path(source), Path(f"{source}.rec"), **options)
    return f"{source}.rec"


def opened(data: DataOptions, task: TaskOptions = IMAGES) -> tuple[TaskData, TaskOptions]:
    task = resolve_task(task, data)
    found = predictor_data(
        task,
        data,
        ImageOptions(size=8),
        TextOptions(),
        tokenizer=load_tokenizer("bytes") if task.kind == "text" else None,
        buckets=8,
    )
    return found, task


def options(tmp_path: Path, train: Any, **changes: Any) -> DataOptions:
    return DataOptions(train=train, cache_dir=str(tmp_path / "cache"), **changes)


def check_colours(data: Dataset, classes: tuple[str, ...]) -> Counter[str]:
    """Every image has the number of the class of its colour; returns how many are of each class."""
    names: list[str] = []
    for sample in read_samples(data, np.arange(len(data))):
        pixel = Image.open(io.BytesIO(sample["image"].tobytes())).getpixel((0, 0))
        names.append(classes[int(sample["targets"])])
        assert pixel == COLOURS[names[-1]], names[-1]
    return Counter(names)


def read(data: Dataset, count: int) -> list[Any]:
    """The first samples in the order of the data set."""
    order = data.sample_order(seed=0, global_batch=8)  # type: ignore[attr-defined]
    return read_samples(data, order.samples_at(np.arange(count))[0])


def test_all_samples_of_several_sources(tmp_path: Path) -> None:
    one, two = folder(tmp_path / "one", blue=6, red=4), folder(tmp_path / "two", azure=3, red=2)
    data, task = opened(options(tmp_path, (packed(one), two), eval=(one, two)))
    assert task.classes == ("blue", "red", "azure")  # number 0 of the second folder is azure
    assert check_colours(data.train, task.classes) == {"blue": 6, "red": 6, "azure": 3}
    assert len(data.held_out) == 15
    every, _ = opened(options(tmp_path, str(tmp_path / "[ot][nw][eo]")))
    assert len(every.train) + len(every.held_out) == 15


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("split", [None, {"train": Fraction(1, 2), "test": Fraction(1, 2)}])
def test_shards_and_parts_know_their_classes(tmp_path: Path, shards: int, split: Any) -> None:
    source = folder(tmp_path / "one", azure=6, red=8)
    packed(source, pack=PackOptions(shards=shards), split=split)
    train = f"{source}{'-train' if split else ''}{'-*' if shards > 1 else ''}.rec"
    data, task = opened(options(tmp_path, train))
    assert task.classes == ("azure", "red")
    check_colours(data.train, task.classes)
    Path(f"{source}.rec.classes.txt").unlink()
    assert opened(options(tmp_path / "again", train))[1].classes == ("0", "1")


@pytest.mark.parametrize("classes", [("red", "blue", "azure"), ("0", "1", "2")])
def test_classes_that_are_given_decide_their_numbers(tmp_path: Path, classes: tuple[str, ...]) -> None:
    one = folder(tmp_path / "one", azure=2, blue=2, red=2)
    data, task = opened(options(tmp_path, one, eval=one), replace(IMAGES, classes=classes))
    names = ("azure", "blue", "red") if classes[0] == "0" else classes
    assert task.classes == classes
    check_colours(data.train, names)


def test_held_out_data_with_other_folders(tmp_path: Path) -> None:
    one, two = folder(tmp_path / "one", azure=2, blue=2, red=2), folder(tmp_path / "two", red=3)
    (tmp_path / "two/blue").mkdir()
    Image.new("RGB", (8, 8), COLOURS["blue"]).save(tmp_path / "two/blue/0.png")
    data, _ = opened(options(tmp_path, one, eval=two))
    targets = [int(sample["targets"]) for sample in read_samples(data.held_out, np.arange(4))]
    assert targets == [1, 2, 2, 2]  # the folder's own numbers are 0 and 1
    with pytest.raises(DataError) as caught:
        opened(options(tmp_path, two, eval=one))
    assert str(caught.value) == (
        "data with the class 'azure'\n"
        "  rule: the classes are the 2 of task.classes: blue, red\n"
        "  so:   the number of the class is not known\n"
        "  try:  list all classes in task.classes, or rename the folder or class"
    )


def test_a_mixture_of_records_and_a_folder_has_its_shares(tmp_path: Path) -> None:
    one, two = folder(tmp_path / "one", blue=6), folder(tmp_path / "two", azure=3, red=9)
    data, task = opened(options(tmp_path, (packed(one), two), weights=(3.0, 1.0), eval=two))
    found = Counter(task.classes[int(sample["targets"])] for sample in read(data.train, 96))
    assert found["blue"] == 72
    check_colours(data.train, task.classes)


def test_a_balanced_mixture(tmp_path: Path) -> None:
    """Each source has its share, and inside of a source each class is read equally often."""
    one, two = folder(tmp_path / "one", blue=9, red=3), folder(tmp_path / "two", azure=2, red=10)
    data, task = opened(
        options(tmp_path, (one, two), weights=(3.0, 1.0), eval=two, cache_gib=0.01), replace(IMAGES, balance=True)
    )
    found = Counter(task.classes[int(sample["targets"])] for sample in read(data.train, 24 * 8))
    assert found == pytest.approx({"blue": 72, "red": 96, "azure": 24}, abs=1)
    check_colours(data.train, task.classes)


def test_a_balanced_folder(tmp_path: Path) -> None:
    data, task = opened(
        options(tmp_path, folder(tmp_path / "one", blue=18, red=6), eval_frac=0.01), replace(IMAGES, balance=True)
    )
    found = Counter(task.classes[int(sample["targets"])] for sample in read(data.train, 23))
    assert found == pytest.approx({"blue": 11.5, "red": 11.5}, abs=1)


@pytest.mark.parametrize("balance", [False, True])
def test_texts_of_a_mixture_are_grouped_by_length(tmp_path: Path, balance: bool) -> None:
    rng = np.random.default_rng(0)
    for name, (low, high) in {"short": (1, 40), "long": (41, 80)}.items():
        rows = [{"text": "x" * int(rng.integers(low, high)), "label": int(at % 4 == 0)} for at in range(64)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = (str(tmp_path / "short.jsonl"), str(tmp_path / "long.jsonl"))
    given = options(tmp_path, train, weights=(3.0, 1.0), eval=train[0], bucket_batches=16, seq_len=96)
    data, _ = opened(given, TaskOptions(kind="text", balance=balance))
    samples = read(data.train, 128)  # one window of 16 batches of 8
    lengths = np.array([sample["text"].size for sample in samples]).reshape(16, 8)
    assert np.ptp(lengths, axis=1).mean() < 6  # of some 80
    assert np.mean(lengths > 40) == pytest.approx(0.25, abs=0.02)
    assert np.mean([sample["targets"] for sample in samples]) == pytest.approx(0.5 if balance else 0.25, abs=0.08)


def labels_of(tmp_path: Path, task: TaskOptions, **files: str) -> tuple[list[int], list[int], tuple[str, ...]]:
    """Targets of the training and held-out rows of tables with the columns x and label."""
    for name, labels in files.items():
        (tmp_path / f"{name}.csv").write_text(
            "x,label\n" + "".join(f"{at},{label}\n" for at, label in enumerate(labels.split()))
        )
    data, task = opened(options(tmp_path, str(tmp_path / "train.csv"), eval=str(tmp_path / "test.csv")), task)
    train, test = (
        [int(sample["targets"]) for sample in read_samples(part, np.arange(len(part)))]
        for part in (data.train, data.held_out)
    )
    return train, test, task.classes


def test_integers_in_held_out_data_are_the_classes_of_these_names(tmp_path: Path) -> None:
    """A column with one text is text, and a file without that row has integers."""
    train, test, classes = labels_of(tmp_path, TaskOptions(kind="table"), train="1 2 x 1", test="1 2 2 1")
    assert classes == ("1", "2", "x")
    assert (train, test) == ([0, 1, 2, 0], [0, 1, 1, 0])
    given = TaskOptions(kind="table", classes=("1", "0"))
    assert labels_of(tmp_path, given, train="0 1 1", test="1 0")[:2] == ([1, 0, 0], [0, 1])
    with pytest.raises(DataError, match=r"the target 2\n"):
        labels_of(tmp_path, given, train="0 1 1", test="1 2")


def test_integers_are_not_classes_of_a_text_column(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        labels_of(tmp_path, TaskOptions(kind="table"), train="cat dog cat", test="0 1")
    assert str(caught.value) == (
        f"{tmp_path}/test.csv, whose first target is the number 0, where training data have names\n"
        "  rule: data.train and data.eval have the same targets: the classes are cat, dog\n"
        "  so:   the numbers could be those of other classes\n"
        "  try:  the names as targets in data.eval too"
    )
    given = TaskOptions(kind="table", classes=("cat", "dog"))
    assert labels_of(tmp_path, given, train="0 1 0", test="1 0")[:2] == ([0, 1, 0], [1, 0])


def test_folders_whose_names_are_numbers(tmp_path: Path) -> None:
    for name in ("1", "2"):
        (tmp_path / "one" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "one" / name / "0.png")
    one = str(tmp_path / "one")
    for classes, numbers in (((), [0, 1]), (("2", "1"), [1, 0]), (("0", "1", "2"), [1, 2])):
        data, _ = opened(options(tmp_path, one, eval=one), replace(IMAGES, classes=classes))
        assert [int(sample["targets"]) for sample in read_samples(data.train, np.arange(2))] == numbers


@pytest.mark.parametrize("names", ["too many", "no text", "a pipe"])
def test_names_of_classes_that_are_none(tmp_path: Path, names: str) -> None:
    source = folder(tmp_path / "one", azure=2, red=2)
    packed(source)
    file = Path(f"{source}.rec.classes.txt")
    file.unlink()
    if names == "a pipe":
        os.mkfifo(file)
    elif names == "no text":
        file.write_bytes(b"\xff")
    else:
        file.touch()
        os.truncate(file, 1 << 40)
    with pytest.raises(DataError, match="the names of the classes are a small text file beside the records"):
        opened(options(tmp_path / "again", f"{source}.rec"))
