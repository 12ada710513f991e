"""Files that webdataset, the tfrecord package and the authors of MNIST and CIFAR wrote are read as their own tools read them."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from unisono.data.convert import open_table
from unisono.data.convert.table_files import convert
from unisono.data.mindrecord import MindRecordFile
from unisono.data.recordio import RecordFile, unpack_header
from unisono.errors import DataError

FIXTURES = Path(__file__).parent / "fixtures"
WEBDATASET = json.loads((FIXTURES / "webdataset.json").read_text())
MINDSPORE = json.loads((FIXTURES / "mindspore.json").read_text())


def told(value: Any) -> Any:
    """A value as the maker of the fixtures writes it."""
    if isinstance(value, np.ndarray):
        digest = hashlib.sha256(value.tobytes()).hexdigest()
        return {"dtype": value.dtype.name, "shape": list(value.shape), "sha256": digest}
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return {"float": value.hex()} if isinstance(value, float) else value


@pytest.mark.parametrize("name", ["samples.tar", "samples.tar.gz"])
def test_webdataset(name: str) -> None:
    found = [
        # our name of a typed field is without its type
        {("mask.npy" if key == "mask" else key): told(value) for key, value in row.items()}
        for row in open_table(FIXTURES / name).rows
    ]
    for row in found:
        row["json"] = json.loads(row["json"])
    assert found == WEBDATASET[name]
    assert len(found) == 5
    assert len(found[3]["__key__"]) > 100  # a name in a header of its own


def test_tfrecord() -> None:
    table = open_table(FIXTURES / "examples.tfrecord")
    found = [
        {
            name: [told(each) for each in value.tolist()] if isinstance(value, np.ndarray) else [told(value)]
            for name, value in row.items()
        }
        for row in table.rows
    ]
    assert [dict(sorted(row.items())) for row in found] == MINDSPORE["examples"]
    assert table.schema is not None
    assert {name: (field.type, field.shape) for name, field in table.schema.items()} == {
        "image": ("bytes", None),
        "label": ("int64", None),
        "score": ("float32", None),
        "ids": ("int64", (-1,)),
        "box": ("float32", (-1,)),
        "text": ("bytes", None),
    }


@pytest.mark.parametrize("packed", [False, True])
def test_mnist(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / "train-images-idx3-ubyte"
    for file in (FIXTURES / "mnist").iterdir():
        if packed:
            (tmp_path / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        else:
            shutil.copy(file, tmp_path)
    rows = list(open_table(path.with_name(path.name + ".gz") if packed else path).rows)
    # MindSpore has a dim for the one colour, and labels of uint32
    assert [told(row["image"][..., None]) for row in rows] == [row["image"] for row in MINDSPORE["mnist"]]
    assert [told(np.array(row["label"], np.uint32)) for row in rows] == [row["label"] for row in MINDSPORE["mnist"]]


@pytest.mark.parametrize(
    ("name", "labels"),
    [("cifar10/data_batch_3.bin", ["label"]), ("cifar100/train.bin", ["coarse_label", "fine_label"])],
)
def test_cifar(name: str, labels: list[str]) -> None:
    rows = list(open_table(FIXTURES / name).rows)
    expected = MINDSPORE[name.partition("/")[0]]
    assert [told(row["image"]) for row in rows] == [row["image"] for row in expected]
    for label in labels:
        assert [told(np.array(row[label], np.uint32)) for row in rows] == [row[label] for row in expected]


def test_pictures_become_png_with_the_labels_before_it(tmp_path: Path) -> None:
    source = FIXTURES / "cifar100/train.bin"
    rows = list(open_table(source).rows)
    assert convert(source, tmp_path / "a.rec") == 2
    records = RecordFile(tmp_path / "a.rec")
    for number, (row, record) in enumerate(zip(rows, records, strict=True)):
        header, png = unpack_header(record)
        assert header.id == number
        assert np.asarray(header.label).tolist() == [row["coarse_label"], row["fine_label"]]
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(png))), row["image"])
    assert records.side["fine_label"].tolist() == [row["fine_label"] for row in rows]


def test_grey_pictures_in_mindrecord_and_one_label(tmp_path: Path) -> None:
    source = FIXTURES / "mnist/train-images-idx3-ubyte"
    rows = list(open_table(source).rows)
    convert(source, tmp_path / "a.mindrecord")
    for row, found in zip(rows, MindRecordFile(tmp_path / "a.mindrecord"), strict=True):
        assert found["label"] == row["label"]
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(found["image"]))), row["image"])
    convert(source, tmp_path / "a.rec")
    assert unpack_header(RecordFile(tmp_path / "a.rec")[7])[0].label == 7.0
    convert(source, tmp_path / "a.parquet")
    for row, found in zip(rows, open_table(tmp_path / "a.parquet").rows, strict=True):
        np.testing.assert_array_equal(found["image"], row["image"], strict=True)


def test_pictures_without_labels_are_no_image_records(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        convert(FIXTURES / "mnist/train-images-idx3-ubyte", tmp_path / "a.rec", columns=["image"])
    assert str(caught.value).startswith("row 0 without a label as an image record")
    assert list(tmp_path.iterdir()) == []
