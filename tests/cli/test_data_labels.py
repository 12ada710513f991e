"""``unisono data labels`` and ``relabel`` as a user types them, and the losses that they take."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from commands import Desk, make_desk
from pictures import edits, jpeg, photograph
from PIL import Image

from unisono.data.sample_losses import read_losses


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """A folder of its own."""
    return make_desk(tmp_path / "desk", tmp_path / "cache")


TEXT = " ".join(f"word{number}" for number in range(120))
NEAR = TEXT.replace("word60 ", "other ")


def test_labels_and_relabel(desk: Desk) -> None:
    pytest.importorskip("rensa")
    rows = [{"text": TEXT, "label": "a"}, {"text": NEAR, "label": "b"}, {"text": TEXT, "label": "a"}]
    (desk.folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = desk.here("data", "labels", "a.jsonl", "--label", "label", "--out", "out")
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        "3 documents with 2 labels",
        "1 conflicts of 3 documents",
        "look through and mark: out/report.html",
    ]
    alone = desk.here("data", "labels", "a.jsonl", "--label", "label", "--out", "exact", "--exact", "--json").json
    assert (alone["conflicts"], alone["labels"]) == (0, {"a": 2, "b": 1})
    one = desk.here("data", "labels", "a.jsonl", "--label", "label", "--out", "one", "--max-shown", "1")
    assert one.code == 0
    refused = desk.here(
        "data", "labels", "a.jsonl", "--label", "label", "--out", "no", "--whole-rows", "--column", "text"
    )
    assert refused.code == 2
    assert "--whole-rows and --column text" in refused.err
    page = (desk.folder / "out" / "report.html").read_text()
    about = json.loads(page.partition('id="marked-data">')[2].partition("</script>")[0])["about"]
    marks = [{"file": "a.jsonl", "row": 1, "label": "b", "action": "change", "to": "a"}]
    (desk.folder / "marks.json").write_text(json.dumps({**about, "marks": marks}))
    done = desk.here("data", "relabel", "a.jsonl", "--marks", "marks.json", "--out", "new")
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        "1 of 3 labels changed, 0 documents dropped, 0 labels confirmed",
        "     1 b to a",
        "report: new/report.html",
    ]
    lines = (desk.folder / "new" / "data" / "a.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{**row, "label": "a"} for row in rows]
    again = desk.here("data", "relabel", "new/data/a.jsonl", "--marks", "marks.json", "--out", "newer")
    assert again.code == 2
    assert "with marks of another data set" in again.err


def test_rows_without_label_are_left_out(desk: Desk) -> None:
    rows: list[dict[str, object]] = [{"text": "same", "label": "a"}, {"text": "same", "label": "b"}, {"text": "same"}]
    (desk.folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["data", "labels", "a.jsonl", "--label", "label", "--exact", "--out", "out"]
    failed = desk.here(*command)
    assert (failed.code, "has no column 'label'" in failed.err) == (2, True)
    done = desk.here(*command, "--on-error", "skip")
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        "3 documents with 2 labels",
        "1 conflicts of 2 documents",
        "1 documents could not be read and were left out",
        "look through and mark: out/report.html",
    ]
    page = (desk.folder / "out" / "report.html").read_text()
    about = json.loads(page.partition('id="marked-data">')[2].partition("</script>")[0])["about"]
    marks = [{"file": "a.jsonl", "row": 1, "label": "b", "action": "change", "to": "a"}]
    (desk.folder / "marks.json").write_text(json.dumps({**about, "marks": marks}))
    done = desk.here("data", "relabel", "a.jsonl", "--marks", "marks.json", "--out", "new")
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        "1 of 3 labels changed, 0 documents dropped, 0 labels confirmed",
        "     1 b to a",
        "1 documents could not be read and were left out",
        "report: new/report.html",
    ]
    lines = (desk.folder / "new" / "data" / "a.jsonl").read_text().splitlines()
    assert [json.loads(line)["label"] for line in lines] == ["a", "a"]


def test_labels_and_relabel_of_images(desk: Desk) -> None:
    photos = desk.folder / "photos"
    for seed in range(4):
        place = photos / ("cat" if seed < 2 else "dog") / f"{seed}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(jpeg(photograph(seed)))
    (photos / "dog" / "same.jpg").write_bytes(edits(photograph(1))["half.jpg"])
    done = desk.here("data", "labels", "photos", "--out", "out")
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        "5 documents with 2 labels",
        "1 conflicts of 2 documents",
        "look through and mark: out/report.html",
    ]
    strict = desk.here("data", "labels", "photos", "--out", "strict", "--image-near", "1.0", "--json").json
    assert (strict["conflicts"], strict["content"], strict["label"]) == (0, "images", "targets")
    for options, said in (
        (("photos", "--near", "0.9"), "--near 0.9, for images"),
        (("photos", "--whole-rows"), "--whole-rows for photos/cat/0.jpg"),
        (("photos", "--exact", "--image-near", "0.9"), "--exact and --image-near 0.9"),
    ):
        refused = desk.here("data", "labels", *options, "--out", "no")
        assert refused.code == 2
        assert said in refused.err
    page = (desk.folder / "out" / "report.html").read_text()
    about = json.loads(page.partition('id="marked-data">')[2].partition("</script>")[0])["about"]
    marks = [{"file": "dog/same.jpg", "row": 0, "label": "dog", "action": "change", "to": "cat"}]
    (desk.folder / "marks.json").write_text(json.dumps({**about, "marks": marks}))
    done = desk.here("data", "relabel", "photos", "--marks", "marks.json", "--out", "new")
    assert done.code == 0, done.err
    assert done.out.splitlines()[:2] == [
        "1 of 5 labels changed, 0 documents dropped, 0 labels confirmed",
        "     1 dog to cat",
    ]
    same = (photos / "dog" / "same.jpg").read_bytes()
    assert (desk.folder / "new" / "data" / "cat" / "same.jpg").read_bytes() == same
    assert not (desk.folder / "new" / "data" / "dog" / "same.jpg").exists()


def test_losses_of_samples_that_are_no_rows_and_of_a_part_of_them(desk: Desk, tmp_path: Path) -> None:
    assert desk.train(tmp_path / "run").code == 0
    windows = desk.here("eval", str(tmp_path / "run"), "--sample-losses", str(tmp_path / "losses.safetensors"))
    assert windows.code == 2
    assert "losses of windows of tokens" in windows.err
    both = desk.here("eval", str(tmp_path / "run"), "--sample-losses", "x", "--samples", "3")
    assert both.code == 2
    assert "--samples 3 with --sample-losses" in both.err
    assert not (tmp_path / "losses.safetensors").exists()


FOLDS = """
[task]
kind = "table"
[plan]
global_batch = 16
[train]
steps = 60
eval_every_steps = 0
[optim]
lr = 0.01
"""


@pytest.mark.full
def test_flipped_labels_are_found_by_a_cross_validation(desk: Desk) -> None:
    """Of 24 planted errors at least 22 are among the suspects (recall 0.9), and at most 3 other samples (precision 0.88)."""
    pytest.importorskip("optuna")
    rng = np.random.default_rng(0)
    classes = rng.integers(0, 3, 300)
    points = np.eye(4)[classes] * 6 + rng.normal(size=(300, 4))
    flipped = np.sort(rng.choice(300, 24, replace=False))
    labels = classes.copy()
    labels[flipped] = (labels[flipped] + rng.integers(1, 3, 24)) % 3
    names = ("ash", "birch", "cedar")
    lines = ["p,q,r,s,label"] + [
        ",".join(f"{value:.4f}" for value in point) + f",{names[label]}"
        for point, label in zip(points, labels, strict=True)
    ]
    (desk.folder / "points.csv").write_text("\n".join(lines) + "\n")
    (desk.folder / "folds.toml").write_text(FOLDS + '[data]\ntrain = "points.csv"\n')
    command = ["tune", "folds", "folds.toml", "--folds", "3", "--out", "folds", "--sample-losses"]
    done = desk.here(*command, f"--set=data.cache_dir={desk.cache}")
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1] == "losses of 300 of 300 samples: folds/losses.safetensors"
    losses = read_losses(desk.folder / "folds" / "losses.safetensors")
    assert [names[target] for target in losses.target] == [line.rpartition(",")[2] for line in lines[1:]]
    assert np.bincount(losses.fold).tolist() == [100, 100, 100]
    # a part whose file is lost is evaluated again, and the result is the same
    (desk.folder / "folds" / "losses" / "fold-0001.safetensors").unlink()
    (desk.folder / "folds" / "losses.safetensors").unlink()
    again = desk.here(*command, f"--set=data.cache_dir={desk.cache}", "--json")
    assert again.json["losses"] == "folds/losses.safetensors"
    assert np.array_equal(read_losses(desk.folder / "folds" / "losses.safetensors").loss, losses.loss)

    found = desk.here(
        "data",
        "labels",
        "points.csv",
        "--label",
        "label",
        "--whole-rows",
        "--exact",
        "--losses",
        "folds",
        "--out",
        "out",
    )
    assert found.code == 0, found.err
    suspects = [json.loads(line) for line in (desk.folder / "out" / "suspects.jsonl").read_text().splitlines()]
    hits = {suspect["row"] for suspect in suspects} & set(flipped.tolist())
    assert len(hits) >= 22
    assert len(suspects) - len(hits) <= 3
    right = [suspect for suspect in suspects if suspect["suggested"] == names[classes[suspect["row"]]]]
    assert len(right) >= 22


IMAGES = """
[task]
kind = "image"
[components]
model = "resnet14"
[image]
size = 16
[plan]
global_batch = 12
[train]
steps = 40
eval_every_steps = 0
[data]
train = "photos"
"""


@pytest.mark.full
def test_images_in_wrong_folders_are_found_by_a_cross_validation(desk: Desk) -> None:
    """Of 12 planted errors at least 11 are among the suspects (recall 0.9), and at most 3 other images."""
    pytest.importorskip("optuna")
    rng = np.random.default_rng(0)
    names = ("ash", "birch", "cedar")
    flipped: dict[str, str] = {}
    for number in range(120):
        of = number % 3
        pixels = rng.integers(0, 120, (20, 24, 3), dtype=np.uint8)
        pixels[..., of] += 100
        is_flipped = number % 10 == 0
        folder = names[(of + 1 + number // 10 % 2) % 3] if is_flipped else names[of]
        place = desk.folder / "photos" / folder / f"{number:03}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place)
        if is_flipped:
            flipped[f"{folder}/{number:03}.png"] = names[of]
    (desk.folder / "folds.toml").write_text(IMAGES)
    command = ["tune", "folds", "folds.toml", "--folds", "3", "--out", "folds", "--sample-losses"]
    done = desk.here(*command, f"--set=data.cache_dir={desk.cache}")
    assert done.code == 0, done.err
    found = desk.here("data", "labels", "photos", "--losses", "folds", "--out", "out")
    assert found.code == 0, found.err
    lines = [json.loads(line) for line in (desk.folder / "out" / "suspects.jsonl").read_text().splitlines()]
    suspects = {line["file"]: line["suggested"] for line in lines}
    hits = suspects.keys() & flipped.keys()
    assert len(hits) >= 11
    assert len(suspects) - len(hits) <= 3
    assert sum(suspects[name] == flipped[name] for name in hits) >= 11
