"""Images: damaged, blank, blurred and misnamed ones are dropped; copies and parts of others are found."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import blurred, crop, edits, jpeg, photograph, write_photographs
from PIL import Image

from unisono.data.convert.formats.table import Table
from unisono.data.convert.pack import pack_images
from unisono.data.convert.table_files import write_table
from unisono.data.dataset import read_samples
from unisono.data.sources import open_source
from unisono.errors import ConfigError, DataError
from unisono.quality.clean import clean
from unisono.quality.leak import find_leaks
from unisono.quality.options import CleanRecipe, DuplicateOptions, FilterOptions, only_dedup
from unisono.quality.split import split

# how the pixels of a picture are stored for each EXIF orientation
STORED_BY = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
WITH_CROPS = only_dedup(DuplicateOptions(crops=True))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_each_defect_has_its_reason(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    write_photographs(folder / "good", range(6))
    whole = jpeg(photograph(100))
    noisy = np.random.default_rng(0).normal(100, 1, (240, 320))
    (folder / "truncated.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "text.jpg").write_bytes(b"no image at all")
    (folder / "empty.png").write_bytes(b"")
    (folder / "misnamed.png").write_bytes(whole)
    (folder / "blank.jpg").write_bytes(jpeg(Image.fromarray(noisy.astype(np.uint8))))
    (folder / "blurred.jpg").write_bytes(jpeg(blurred(photograph(101))))
    (folder / "tiny.jpg").write_bytes(jpeg(photograph(102).resize((40, 20))))
    result = clean([folder], tmp_path / "out")
    reasons = {record["file"]: record["reason"] for record in read(tmp_path / "out/dropped.jsonl")}
    assert reasons == {
        "truncated.jpg": "unreadable",
        "text.jpg": "unreadable",
        "empty.png": "unreadable",
        "misnamed.png": "images.checks_format",
        "blank.jpg": "images.min_contrast",
        "blurred.jpg": "images.max_blur",
        "tiny.jpg": "images.min_side_px",
    }
    faults = {record["file"]: record.get("fault", "") for record in read(tmp_path / "out/dropped.jsonl")}
    (misnamed,) = (record for record in read(tmp_path / "out/dropped.jsonl") if record["file"] == "misnamed.png")
    assert misnamed == {"file": "misnamed.png", "row": 0, "reason": "images.checks_format", "format": "JPEG"}
    assert all(faults[name] for name, reason in reasons.items() if reason == "unreadable")
    assert (result.documents, result.kept) == (13, 6)
    assert names(tmp_path / "out/data") == [f"good/{seed:04d}.jpg" for seed in range(6)]
    kept = tmp_path / "out/data/good/0000.jpg"
    assert kept.read_bytes() == (folder / "good/0000.jpg").read_bytes()
    assert '<img src="data:image/png;base64,' in (tmp_path / "out/report.html").read_text()


def test_copies_of_pictures(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    write_photographs(folder, range(30))
    for name, content in edits(photograph(3)).items():
        (folder / f"later-{name}").write_bytes(content)
    (folder / "later-exact.jpg").write_bytes((folder / "0007.jpg").read_bytes())
    result = clean([folder], tmp_path / "out", only_dedup(DuplicateOptions()))
    assert result.dropped == {"dedup.exact": 1, "dedup.near": 4}
    for record in read(tmp_path / "out/dropped.jsonl"):
        assert record["duplicate_of"]["file"] == ("0007.jpg" if record["reason"] == "dedup.exact" else "0003.jpg")
        assert record["similarity"] >= 0.85
    assert names(tmp_path / "out/data") == [f"{seed:04d}.jpg" for seed in range(30)]


def test_only_the_same_file(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    write_photographs(folder, range(3))
    (folder / "later-exact.jpg").write_bytes((folder / "0001.jpg").read_bytes())
    (folder / "later-near.jpg").write_bytes(edits(photograph(2))["poor.jpg"])
    result = clean([folder], tmp_path / "out", only_dedup(DuplicateOptions(near=0.0, image_near=0.0)))
    assert result.dropped == {"dedup.exact": 1}


@pytest.mark.parametrize("workers", [0, 2])
def test_every_planted_leak_is_found_and_no_other(tmp_path: Path, workers: int) -> None:
    write_photographs(tmp_path / "train", range(60))
    write_photographs(tmp_path / "test", range(1000, 1020))
    planted: set[tuple[str, str]] = set()
    for seed in range(20):
        (tmp_path / "test" / f"crop-{seed}.jpg").write_bytes(jpeg(crop(photograph(seed), seed), 80))
        planted.add((f"test/crop-{seed}.jpg", f"train/{seed:04d}.jpg"))
    for name, content in edits(photograph(30)).items():
        (tmp_path / "test" / name).write_bytes(content)
        planted.add((f"test/{name}", "train/0030.jpg"))
    # the training set may have the part, and the test set the whole
    (tmp_path / "train" / "part.jpg").write_bytes(jpeg(crop(photograph(1005), 5)))
    planted.add(("test/1005.jpg", "train/part.jpg"))
    (tmp_path / "test" / "exact.jpg").write_bytes((tmp_path / "train" / "0040.jpg").read_bytes())
    planted.add(("test/exact.jpg", "train/0040.jpg"))
    result = find_leaks(tmp_path / "train", [tmp_path / "test"], out=tmp_path / "out", workers=workers)
    found = {(pair["file"], pair["duplicate_of"]["file"]) for pair in result.pairs}
    assert found == planted
    assert result.splits[1].exact == 1


def test_parts_only_where_asked(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    write_photographs(folder, range(5))
    (folder / "part.jpg").write_bytes(jpeg(crop(photograph(2), 1)))
    assert clean([folder], tmp_path / "a", only_dedup(DuplicateOptions())).dropped == {}
    assert clean([folder], tmp_path / "b", WITH_CROPS).dropped == {"dedup.near": 1}


@pytest.mark.parametrize("suffix", [".parquet", ".mindrecord", ".rec"])
def test_images_in_tables(tmp_path: Path, suffix: str) -> None:
    pictures = [jpeg(photograph(seed)) for seed in range(8)]
    pictures += [edits(photograph(4))["poor.jpg"], pictures[0], b"\xff\xd8\xffno image"]
    rows = [{"image": picture, "label": number} for number, picture in enumerate(pictures)]
    path = tmp_path / f"images{suffix}"
    write_table(path, Table(rows=iter(rows)))
    result = clean([path], tmp_path / "out")
    assert result.dropped == {"unreadable": 1, "dedup.exact": 1, "dedup.near": 1}
    kept = np.load(tmp_path / f"out/kept/images{suffix}.npy")
    assert kept.tolist() == list(range(8))


def test_splits_keep_copies_together(tmp_path: Path) -> None:
    for name, begin in (("cat", 0), ("dog", 100)):
        write_photographs(tmp_path / "images" / name, range(begin, begin + 20))
        for copy in range(4):
            content = edits(photograph(begin + copy))["poor.jpg"]
            (tmp_path / "images" / name / f"copy-{copy}.jpg").write_bytes(content)
    parts = {"train": Fraction(1, 2), "test": Fraction(1, 2)}
    result = split([tmp_path / "images"], tmp_path / "out", parts, class_field="targets")
    assert [part.classes for part in result.parts] == [{"cat": 12, "dog": 12}] * 2
    train, test = (set(names(tmp_path / "out" / part / "data")) for part in parts)
    assert not train & test
    for name, begin in (("cat", 0), ("dog", 100)):
        for copy in range(4):
            both = {f"{name}/copy-{copy}.jpg", f"{name}/{begin + copy:04d}.jpg"}
            assert both <= train or both <= test


def test_image_records_keep_their_classes(tmp_path: Path) -> None:
    for name, begin in (("cat", 0), ("dog", 10)):
        write_photographs(tmp_path / "images" / name, range(begin, begin + 6))
    (tmp_path / "images" / "dog" / "copy.jpg").write_bytes(edits(photograph(2))["poor.jpg"])
    pack_images(tmp_path / "images", tmp_path / "all.rec")
    result = clean([tmp_path / "all.rec"], tmp_path / "out", only_dedup(DuplicateOptions()))
    assert result.dropped == {"dedup.near": 1}
    kept = open_source(tmp_path / "out/data/all.rec")
    samples = read_samples(kept, np.arange(len(kept)))
    assert [int(sample["targets"]) for sample in samples] == [0] * 6 + [1] * 6
    assert bytes(samples[2]["image"]) == (tmp_path / "images/cat/0002.jpg").read_bytes()
    assert kept.class_names == {"targets": ("cat", "dog")}
    half = {"a": Fraction(1, 2), "b": Fraction(1, 2)}
    parts = split([tmp_path / "all.rec"], tmp_path / "parts", half, class_field="targets").parts
    assert sum((Counter(part.classes) for part in parts), Counter()) == {"cat": 6, "dog": 7}


def test_images_without_gradients_are_near_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for number, slope in enumerate((0.10, 0.12, 0.14)):
        ramp = np.broadcast_to(100 + slope * np.arange(320), (240, 320)).astype(np.uint8)
        (folder / f"{number}.png").write_bytes(edits(Image.fromarray(ramp))["same.png"])
    assert clean([folder], tmp_path / "out", WITH_CROPS).dropped == {}


def test_what_is_refused(tmp_path: Path) -> None:
    write_photographs(tmp_path / "images", range(2))
    (tmp_path / "a.jsonl").write_text('{"text": "one two"}\n')
    with pytest.raises(DataError, match="texts and images"):
        clean([tmp_path / "images", tmp_path / "a.jsonl"], tmp_path / "out")
    (tmp_path / "nested.jsonl").write_text('{"meta": {"id": 1}, "text": "one two"}\n')
    with pytest.raises(DataError, match="texts and images"):
        clean([tmp_path / "images", tmp_path / "nested.jsonl"], tmp_path / "out")
    with pytest.raises(ConfigError, match=r"filter\.min_words = 3, for images"):
        clean([tmp_path / "images"], tmp_path / "out", CleanRecipe(filter=FilterOptions(min_words=3)))
    with pytest.raises(ConfigError, match=r"--image-near 0\.9, for text"):
        clean([tmp_path / "a.jsonl"], tmp_path / "out", only_dedup(DuplicateOptions(image_near=0.9)))
    (tmp_path / "images" / "broken.jpg").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"broken\.jpg: .*1 such documents in all"):
        clean([tmp_path / "images"], tmp_path / "out", only_dedup(DuplicateOptions()))
    result = clean([tmp_path / "images"], tmp_path / "new", only_dedup(DuplicateOptions()), skips_unreadable=True)
    assert result.dropped == {"unreadable": 1}
    (tmp_path / "images" / "rows.csv").write_text("text\none\n")
    with pytest.raises(DataError, match="1 tables and 3 images"):
        clean([tmp_path / "images"], tmp_path / "other")


def test_images_are_compared_as_viewers_turn_them(tmp_path: Path) -> None:
    write_photographs(tmp_path / "upright", range(3))
    (tmp_path / "turned").mkdir()
    for orientation, transpose in STORED_BY.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        photograph(1).transpose(transpose).save(tmp_path / "turned" / f"{orientation}.jpg", quality=80, exif=exif)
    (tmp_path / "turned" / "without.jpg").write_bytes(jpeg(photograph(1).transpose(Image.Transpose.ROTATE_90)))
    found = find_leaks(tmp_path / "upright", [tmp_path / "turned"]).pairs
    assert {pair["file"]: pair["duplicate_of"]["file"] for pair in found} == {
        f"turned/{orientation}.jpg": "upright/0001.jpg" for orientation in STORED_BY
    }
