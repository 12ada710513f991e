"""Labels of images: planted conflicts are all found and no others, pictures are on the page, and marks move files."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import edits, jpeg, photograph, write_photographs
from PIL import Image
from report_pages import CHROMIUM, evaluated, in_browser
from tools import missing

from unisono.data.convert.pack import pack_images
from unisono.data.convert.pack.image_listing import list_images
from unisono.data.convert.table_files import Table, open_table, write_table
from unisono.data.dataset import read_samples
from unisono.data.kept_rows import kept_samples, read_kept_rows, without_dropped
from unisono.data.recordio import ImageHeader, pack_header
from unisono.data.sample_losses import VERSION, LossesOf, SampleLosses, describe_files
from unisono.data.sources import open_source
from unisono.errors import ConfigError, DataError
from unisono.quality.image_records import with_class
from unisono.quality.labels import page as label_page
from unisono.quality.labels.label_errors import find_label_errors
from unisono.quality.labels.relabel import relabel
from unisono.quality.options import DuplicateOptions

EXACT = DuplicateOptions(near=0.0, image_near=0.0)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def in_script(page: Path, name: str) -> Any:
    found = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', page.read_text(), flags=re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def save_marks(path: Path, out: Path, *marks: dict[str, Any]) -> Path:
    """As the page saves them."""
    path.write_text(json.dumps({**in_script(out / "report.html", "marked-data")["about"], "marks": marks}))
    return path


def mark(file: str, label: str, action: str, *, row: int = 0, **to: str) -> dict[str, Any]:
    return {"file": file, "row": row, "label": label, "action": action, **to}


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def squares(folder: Path, names: Sequence[str]) -> Path:
    """A small picture of its own for each name."""
    for number, name in enumerate(names):
        pixels = np.random.default_rng(number).integers(0, 256, (24, 24, 3), dtype=np.uint8)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / name, format="PNG")
    return folder


def conflicting(folder: Path) -> list[set[str]]:
    """Photographs of two classes, with copies under both; returns the groups in conflict."""
    write_photographs(folder / "cat", range(14))
    write_photographs(folder / "dog", range(100, 114))
    for name, content in edits(photograph(3)).items():
        (folder / "dog" / f"near-{name}").write_bytes(content)
    (folder / "dog" / "exact.jpg").write_bytes((folder / "cat" / "0007.jpg").read_bytes())
    # a copy that is near one of its own label, too
    (folder / "dog" / "again.jpg").write_bytes(edits(photograph(101))["poor.jpg"])
    (folder / "cat" / "wrong.jpg").write_bytes(edits(photograph(101))["half.jpg"])
    # copies, before it and behind it, of a picture that has both labels
    (folder / "dog" / "both.jpg").write_bytes((folder / "cat" / "0009.jpg").read_bytes())
    (folder / "cat" / "0009-before.jpg").write_bytes(edits(photograph(9))["half.jpg"])
    (folder / "cat" / "near.jpg").write_bytes(edits(photograph(9))["poor.jpg"])
    # copies of one label are no conflict
    (folder / "cat" / "right.jpg").write_bytes(edits(photograph(5))["brighter.jpg"])
    (folder / "cat" / "right-exact.jpg").write_bytes((folder / "cat" / "0006.jpg").read_bytes())
    return [
        {"cat/0003.jpg", *(f"dog/near-{name}" for name in edits(photograph(3)))},
        {"cat/0007.jpg", "dog/exact.jpg"},
        {"dog/0101.jpg", "dog/again.jpg", "cat/wrong.jpg"},
        {"cat/0009.jpg", "dog/both.jpg", "cat/0009-before.jpg", "cat/near.jpg"},
    ]


def groups(out: Path) -> list[set[str]]:
    return [{document["file"] for document in group["documents"]} for group in read(out / "conflicts.jsonl")]


def by_first(found: list[set[str]]) -> list[set[str]]:
    return sorted(found, key=min)


@pytest.mark.parametrize("workers", [0, 2])
def test_planted_conflicts_are_all_found_and_no_others(tmp_path: Path, workers: int) -> None:
    planted = conflicting(tmp_path / "photos")
    result = find_label_errors([tmp_path / "photos"], tmp_path / "out", workers=workers)
    assert by_first(groups(tmp_path / "out")) == by_first(planted)
    assert (result.content, result.label, result.num_capped) == ("images", "targets", 0)
    assert (result.conflicts, result.in_conflict) == (4, 14)
    assert result.labels == {"cat": 19, "dog": 21}
    of_three = next(each for each in read(tmp_path / "out" / "conflicts.jsonl") if len(each["documents"]) == 3)
    assert (of_three["labels"], of_three["majority"]) == ({"dog": 2, "cat": 1}, "dog")
    assert all(0.85 <= document["similarity"] <= 1 for document in of_three["documents"])
    if workers:
        return
    exact = find_label_errors([tmp_path / "photos"], tmp_path / "exact", options=EXACT)
    assert by_first(groups(tmp_path / "exact")) == [{"cat/0007.jpg", "dog/exact.jpg"}, {"cat/0009.jpg", "dog/both.jpg"}]
    assert exact.conflicts == 2


def test_folders_of_classes_have_one_name_in_several_folders(tmp_path: Path) -> None:
    for root, seeds in (("train", (1, 2)), ("valid", (1, 3))):
        for name, seed in zip(("cat", "dog"), seeds, strict=True):
            write_photographs(tmp_path / root / name, range(seed, seed + 1))
    result = find_label_errors([tmp_path / "train", tmp_path / "valid"], tmp_path / "out")
    assert (result.labels, result.conflicts) == ({"cat": 2, "dog": 2}, 0)
    classes = [tmp_path / "train" / "cat", tmp_path / "train" / "dog"]
    assert find_label_errors(classes, tmp_path / "classes").labels == {"cat": 1, "dog": 1}


@pytest.mark.parametrize("suffix", [".parquet", ".tar", ".mindrecord"])
def test_labels_in_tables_of_images(tmp_path: Path, suffix: str) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    images = [jpeg(photograph(seed)) for seed in range(4)] + [edits(photograph(2))["poor.jpg"]]
    rows = [{"image": image, "label": number % 3, "other": number} for number, image in enumerate(images)]
    data = tmp_path / f"all{suffix}"
    write_table(data, Table(rows=rows))
    find_label_errors([data], tmp_path / "out", "label")
    (group,) = read(tmp_path / "out" / "conflicts.jsonl")
    assert [(each["row"], each["label"]) for each in group["documents"]] == [(2, "2"), (4, "1")]
    assert len(in_script(tmp_path / "out" / "report.html", "pictures")) == 2
    marks = save_marks(tmp_path / "marks.json", tmp_path / "out", mark(data.name, "1", "change", row=4, to="2"))
    relabel([data], tmp_path / "new", marks)
    expected = [dict(row) for row in open_table(data).rows]
    expected[4]["label"] = 2
    assert [dict(row) for row in open_table(tmp_path / "new" / "data" / data.name).rows] == expected


def test_labels_of_image_records(tmp_path: Path) -> None:
    planted = conflicting(tmp_path / "photos")
    pack_images(tmp_path / "photos", tmp_path / "photos.rec")
    names = [image.name for image in list_images(tmp_path / "photos").samples]
    records = [tmp_path / "photos.rec"]
    result = find_label_errors(records, tmp_path / "out")
    found = [
        {names[each["row"]] for each in group["documents"]} for group in read(tmp_path / "out" / "conflicts.jsonl")
    ]
    assert by_first(found) == by_first(planted)
    assert (result.label, result.labels) == ("targets", {"cat": 19, "dog": 21})
    with pytest.raises(DataError, match="the label of an image record is the class in its header"):
        find_label_errors(records, tmp_path / "other", "label")
    row = names.index("cat/wrong.jpg")
    marks = save_marks(
        tmp_path / "marks.json", tmp_path / "out", mark("photos.rec", "cat", "change", row=row, to="dog")
    )
    relabel(records, tmp_path / "new", marks)
    before, after = (open_source(path) for path in (records[0], tmp_path / "new" / "data" / "photos.rec"))
    assert after.class_names == before.class_names == {"targets": ("cat", "dog")}
    old, new = (read_samples(source, np.arange(len(names))) for source in (before, after))
    assert all(np.array_equal(one["image"], other["image"]) for one, other in zip(old, new, strict=True))
    changed = [at for at, (one, other) in enumerate(zip(old, new, strict=True)) if one["targets"] != other["targets"]]
    assert (changed, int(new[row]["targets"])) == ([row], 1)


def losses_of(folder: Path, wrong: dict[str, str]) -> SampleLosses:
    """Losses of a run whose model is sure of the folder of each image, and of ``wrong`` of another one."""
    listing = list_images(folder)
    target = np.array([int(image.labels[0]) for image in listing.samples])
    model = [wrong.get(image.name, listing.classes[int(image.labels[0])]) for image in listing.samples]
    probabilities = np.full((len(target), len(listing.classes)), 0.05, np.float32)
    surest = [0.9 if image.name in wrong else 0.8 for image in listing.samples]
    probabilities[np.arange(len(target)), [listing.classes.index(name) for name in model]] = surest
    about = LossesOf(
        version=VERSION,
        num_samples=len(target),
        target="targets",
        classes=listing.classes,
        files=describe_files([folder]),
    )
    return SampleLosses(
        about=about,
        sample=np.arange(len(target)),
        loss=np.arange(len(target), dtype=np.float64),
        fold=np.arange(len(target)) % 3,
        target=target,
        probabilities=probabilities,
    )


# by their paths the images of "cat-big" are before those of "cat"; a run numbers those of "cat" first
NAMES = [*(f"{folder}/{number}.png" for folder in ("cat", "cat-big", "dog/old") for number in range(5))]


def test_losses_of_a_run_are_matched_with_images(tmp_path: Path) -> None:
    folder = squares(tmp_path / "photos", NAMES)
    losses_of(folder, {"cat/3.png": "dog/old", "cat-big/1.png": "cat"}).write(tmp_path / "losses.safetensors")
    result = find_label_errors([folder], tmp_path / "out", losses=tmp_path / "losses.safetensors", options=EXACT)
    found = {line["file"]: (line["label"], line["suggested"]) for line in read(tmp_path / "out" / "suspects.jsonl")}
    assert found == {"cat/3.png": ("cat", "dog/old"), "cat-big/1.png": ("cat-big", "cat")}
    losses = {line["file"]: line["loss"] for line in read(tmp_path / "out" / "suspects.jsonl")}
    assert losses == {"cat/3.png": 3.0, "cat-big/1.png": 6.0}
    assert (result.ranked_by, result.evaluated) == ("probabilities", 15)
    cards = re.findall(r'<img data-picture="(\d+)" alt="([^"]*)">', (tmp_path / "out" / "report.html").read_text())
    assert sorted(name for _, name in cards if name in found) == sorted(found)
    assert len(cards) == 2 + 2 * 3  # each beside typical pictures of the suggested label


def test_losses_of_images_that_have_changed_are_refused(tmp_path: Path) -> None:
    folder = squares(tmp_path / "photos", NAMES)
    losses = tmp_path / "losses.safetensors"
    losses_of(folder, {}).write(losses)
    with pytest.raises(DataError, match="only one of both has"):
        find_label_errors([folder / "cat", folder / "dog"], tmp_path / "part", losses=losses)
    (folder / "cat" / "0.png").rename(folder / "cat" / "00.png")  # the order stays
    with pytest.raises(DataError, match=r"losses of the images in .*photos, which have changed since"):
        find_label_errors([folder], tmp_path / "renamed", losses=losses)
    folder.rename(tmp_path / "moved")
    with pytest.raises(DataError, match="which have changed since, or are not there"):
        find_label_errors([tmp_path / "moved"], tmp_path / "gone", losses=losses)


def test_a_page_has_small_pictures_and_only_so_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conflicting(tmp_path / "photos")
    find_label_errors([tmp_path / "photos"], tmp_path / "out")
    page = tmp_path / "out" / "report.html"
    pictures = in_script(page, "pictures")
    shown = re.findall(r'<img data-picture="(\d+)"', page.read_text())
    assert sorted(shown) == sorted(pictures)
    assert len(shown) == 14
    for address in pictures.values():
        kind, _, content = address.partition(",")
        assert kind == "data:image/jpeg;base64"
        assert Image.open(io.BytesIO(base64.b64decode(content))).size in ((160, 120), (160, 121))
    assert "further pictures" not in page.read_text()
    monkeypatch.setattr(label_page, "MAX_PICTURES", 4)
    find_label_errors([tmp_path / "photos"], tmp_path / "few")
    page = tmp_path / "few" / "report.html"
    assert len(in_script(page, "pictures")) == len(re.findall(r"<img data-picture=", page.read_text())) == 4
    assert "10 further pictures are not on this page" in page.read_text()


_CLICK = """
(() => {
  let text = null, saved = null;
  const make = JSON.stringify;
  JSON.stringify = (...given) => text = make(...given);
  URL.createObjectURL = blob => { saved = text; return "#"; };
  HTMLAnchorElement.prototype.click = function() {};
  const card = place => [...document.querySelectorAll("[data-card]")].find(each => each.textContent.includes(place));
  const press = (place, action) => card(place).querySelector(`[data-action=${action}]`).click();
  press("cat/wrong.jpg", "change"); press("dog/exact.jpg", "drop"); press("dog/again.jpg", "keep");
  document.getElementById("save").click();
  const widths = [...document.querySelectorAll(".card img")].map(image => image.naturalWidth);
  return {text: saved, widths, width: document.querySelector(".card img").getBoundingClientRect().width};
})()
"""


@pytest.mark.skipif(
    CHROMIUM is None and bool(missing("chromium")),
    reason="no chromium on this machine: pictures on the page of labels are NOT tested in a browser",
)
def test_pictures_and_buttons_in_a_browser(tmp_path: Path) -> None:
    conflicting(tmp_path / "photos")
    find_label_errors([tmp_path / "photos"], tmp_path / "out")
    page = tmp_path / "out" / "report.html"
    dom, complaints = in_browser(page, tmp_path / "profile")
    assert complaints == []  # the policy lets the page's own script give pictures to cards
    assert dom.count('src="data:image/jpeg;base64,') == 14
    found = evaluated(page, tmp_path, _CLICK, width=1000)
    assert found["widths"] == [160] * 14
    assert found["width"] == 160
    marks = tmp_path / "marks.json"
    marks.write_text(found["text"])
    result = relabel([tmp_path / "photos"], tmp_path / "new", marks)
    assert (result.changed, result.num_dropped, result.confirmed) == (1, 1, 1)
    expected = tree(tmp_path / "photos")
    expected["dog/wrong.jpg"] = expected.pop("cat/wrong.jpg")
    del expected["dog/exact.jpg"]
    assert tree(tmp_path / "new" / "data") == expected


def test_files_move_to_the_folders_of_their_labels_and_back(tmp_path: Path) -> None:
    names = ["a/1.png", "a/2.png", "b/1.png", "b/1-1.png", "c/1.png", "c/3.png"]
    folder = squares(tmp_path / "photos", names)
    (folder / "c" / "same.png").write_bytes((folder / "a" / "1.png").read_bytes())
    before = tree(folder)
    find_label_errors([folder], tmp_path / "out", options=EXACT)
    marks = save_marks(
        tmp_path / "marks.json",
        tmp_path / "out",
        mark("a/1.png", "a", "change", to="b"),
        mark("b/1.png", "b", "change", to="a"),
        mark("c/1.png", "c", "change", to="b"),
        mark("a/2.png", "a", "change", to="c"),
        mark("c/3.png", "c", "drop"),
        mark("b/1-1.png", "b", "keep"),
    )
    result = relabel([folder], tmp_path / "new", marks)
    assert (result.kept, result.changed, result.num_dropped, result.confirmed) == (6, 4, 1, 1)
    assert tree(folder) == before
    after = tree(tmp_path / "new" / "data")
    assert after == {
        "b/1-2.png": before["a/1.png"],  # the inputs have b/1.png and b/1-1.png
        "a/1-1.png": before["b/1.png"],
        "b/1-3.png": before["c/1.png"],
        "c/2.png": before["a/2.png"],
        "b/1-1.png": before["b/1-1.png"],
        "c/same.png": before["c/same.png"],
    }
    changes = read(tmp_path / "new" / "changes.jsonl")
    assert changes[0] == {
        "file": "a/1.png",
        "row": 0,
        "action": "change",
        "new_file": "b/1-2.png",
        "new_row": 0,
        "label": "a",
        "to": "b",
    }
    assert changes[-1] == {"file": "c/3.png", "row": 0, "action": "drop", "label": "c"}
    for change in changes[:-1]:
        after[change["file"]] = after.pop(change["new_file"])
    after["c/3.png"] = before["c/3.png"]
    assert after == before
    # the numbers of the kept rows are those of the inputs, under their names
    kept = read_kept_rows(tmp_path / "new")
    assert without_dropped(kept, folder, before) == [name for name in before if name != "c/3.png"]
    assert len(kept_samples(kept, [folder])[0]) == 6
    # the new data set is read as any other, with its new labels
    again = find_label_errors([tmp_path / "new" / "data"], tmp_path / "again", options=EXACT)
    assert again.labels == {"b": 3, "c": 2, "a": 1}


def test_files_of_text_move_as_well(tmp_path: Path) -> None:
    for name, text in (("spam/1.txt", "buy now"), ("ham/1.txt", "buy now"), ("ham/2.txt", "see you")):
        (tmp_path / "mails" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mails" / name).write_text(text)
    find_label_errors([tmp_path / "mails"], tmp_path / "out", options=EXACT)
    marks = save_marks(tmp_path / "marks.json", tmp_path / "out", mark("ham/1.txt", "ham", "change", to="spam"))
    relabel([tmp_path / "mails"], tmp_path / "new", marks)
    assert tree(tmp_path / "new" / "data") == {
        "ham/2.txt": b"see you",
        "spam/1.txt": b"buy now",
        "spam/1-1.txt": b"buy now",
    }


def test_what_is_refused(tmp_path: Path) -> None:
    folder = squares(tmp_path / "photos", NAMES)
    with pytest.raises(DataError, match=r"--whole-rows for .*, a file that is one document"):
        find_label_errors([folder], tmp_path / "out", whole_rows=True)
    with pytest.raises(ConfigError, match=r"--near 0\.9, for images"):
        find_label_errors([folder], tmp_path / "out", options=DuplicateOptions(near=0.9))
    with pytest.raises(DataError, match=r"field 'label' of .*, a file that is one document"):
        find_label_errors([folder], tmp_path / "label", "label")
    with pytest.raises(DataError, match="field 'targets' with 1 different values in 2 rows"):
        find_label_errors([squares(tmp_path / "one", ["a.png", "b.png"])], tmp_path / "alone")
    (folder / "cat" / "broken.png").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"broken\.png: .*1 such documents in all"):
        find_label_errors([folder], tmp_path / "broken")
    (tmp_path / "a.jsonl").write_text('{"text": "one", "label": "a"}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl without --label"):
        find_label_errors([tmp_path / "a.jsonl"], tmp_path / "out")
    with pytest.raises(ConfigError, match=r"--image-near 0\.9, for text"):
        find_label_errors([tmp_path / "a.jsonl"], tmp_path / "out", "label", options=DuplicateOptions(image_near=0.9))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("names", "given", "rule"),
    [
        ((), "class 'cat' for an image record without class names", "class labels of such records are integers"),
        (("dog", "owl"), "class 'cat' for an image record whose 2 classes are others", "one of those in .classes.txt"),
    ],
)
def test_a_class_that_an_image_record_cannot_have(names: tuple[str, ...], given: str, rule: str) -> None:
    row = {"data": pack_header(ImageHeader(label=1.0), b"")}
    with pytest.raises(DataError) as caught:
        with_class(row, names, "cat")
    assert caught.value.problems[0].given == given
    assert rule in caught.value.problems[0].rule
