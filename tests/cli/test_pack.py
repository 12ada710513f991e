"""``unisono data pack``: what people see, what scripts read, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import Desk, problem
from PIL import Image

from unisono.data.convert import Table, write_table
from unisono.data.convert.pack import RecordSchema, partial_target
from unisono.data.recordio import RecordFile, RecordWriter
from unisono.data.tokens.shards import open_tokens


@pytest.fixture
def album(tmp_path: Path) -> Path:
    root = tmp_path / "album"
    for name in ("ant", "bee"):
        (root / name).mkdir(parents=True)
        for number in range(4):
            pixels = np.full((20, 30, 3), 40 * number, np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.jpg")
    return root


def test_a_folder_of_images(desk: Desk, album: Path, tmp_path: Path) -> None:
    done = desk.here("data", "pack", str(album), str(tmp_path / "a.rec"))
    assert (done.code, done.out) == (0, f"{tmp_path}/a.rec\n8 records of 8 inputs\n")
    assert RecordFile(tmp_path / "a.rec").side["label"].tolist() == [0] * 4 + [1] * 4
    options = ["--resize", "16", "--center-crop", "--color", "gray", "--quality", "70", "--no-exif", "--tiles"]
    split = ["--split", "train=3/4", "--split", "val=0.25", "--shuffle", "3", "--workers", "0"]
    done = desk.here("data", "pack", str(album), str(tmp_path / "b.rec"), *options, *split)
    assert done.out == f"{tmp_path}/b-train.rec\n{tmp_path}/b-val.rec\n8 records of 8 inputs, 6 in train, 2 in val\n"
    file = RecordFile(tmp_path / "b-train.rec")
    assert (set(file.side["width"].tolist()), set(file.side["height"].tolist())) == ({16}, {16})
    assert "tiles" in file.side


def test_bad_inputs_and_the_report(desk: Desk, album: Path, tmp_path: Path) -> None:
    (album / "ant/x.jpg").write_bytes(b"")
    (album / "ant/notes.md").touch()
    target = tmp_path / "a.rec"
    failed = desk.here("data", "pack", str(album), str(target), "--json")
    assert failed.code == 2
    assert "ant/x.jpg: not an image that is read here: it is empty" in failed.out + failed.err
    skipped = desk.here("data", "pack", str(album), str(target), "--on-error", "skip")
    assert skipped.out == (
        f"{target}\n8 records of 9 inputs, 1 bad, 1 files that are not images left out\n"
        "     bad ant/x.jpg: not an image that is read here: it is empty\n"
    )
    report = json.loads((tmp_path / "a.rec.report.json").read_text())
    assert report["bad"] == [{"path": "ant/x.jpg", "reason": "not an image that is read here: it is empty"}]
    again = desk.here(
        "data", "pack", str(album), str(tmp_path / "b.rec"), "--on-error", "skip", "--json", "--shards", "2"
    )
    assert again.json == {
        "files": [f"{tmp_path}/b-0000{n}-of-00002.rec" for n in range(2)],
        "inputs": 9,
        "records": 8,
        "empty": 0,
        "left_out": 1,
        "splits": {},
        "bad": report["bad"],
        "report": f"{tmp_path}/b.rec.report.json",
    }


def test_progress_is_logged(desk: Desk, album: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_target, "_PROGRESS_S", 0.0)
    done = desk.here("data", "pack", str(album), str(tmp_path / "a.rec"), "-v")
    lines = [line for line in done.err.splitlines() if "packing:" in line]
    assert len(lines) == 8
    assert lines[-1].startswith("INFO packing: 8 of 8 inputs, 8 records, 0.0 MB, ")
    assert lines[-1].endswith(" inputs/s, 0 s left")


def test_text_rows_and_functions(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    done = desk.here("data", "pack", str(tmp_path / "a.txt"), str(tmp_path / "t.bin"), "--lines")
    assert done.out == f"{tmp_path}/t-00000.bin\n2 records of 2 inputs\n"
    assert open_tokens([tmp_path / "t-00000.bin"]).num_documents == 2
    (tmp_path / "a.jsonl").write_text('{"id": 1, "text": "x", "more": 2}\n')
    columns = ["--column", "text=data", "--column", "id", "--payload", "data"]
    done = desk.here("data", "pack", str(tmp_path / "a.jsonl"), str(tmp_path / "r.rec"), *columns)
    assert done.out == f"{tmp_path}/r.rec\n1 records of 1 inputs\n"
    assert list(RecordFile(tmp_path / "r.rec")) == [b"x"]
    (tmp_path / "packing_for_the_cli.py").write_text("def rows():\n    yield {'x': [1, 2]}\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    function = ["--function", "packing_for_the_cli:rows", "--schema", "x=int32[?]"]
    done = desk.here("data", "pack", "-", str(tmp_path / "f.rec"), *function)
    assert done.out == f"{tmp_path}/f.rec\n1 records of 1 inputs\n"
    layout = RecordSchema.load(tmp_path / "f.rec.schema")
    assert layout.decode(RecordFile(tmp_path / "f.rec").read(0))["x"].tolist() == [1, 2]


def test_images_of_a_tar(desk: Desk, album: Path, tmp_path: Path) -> None:
    rows = [{"__key__": str(n), "jpg": path.read_bytes(), "cls": n} for n, path in enumerate(album.glob("*/*.jpg"))]
    write_table(tmp_path / "a.tar", Table(rows=rows))
    done = desk.here(
        "data", "pack", str(tmp_path / "a.tar"), str(tmp_path / "a.rec"), "--image", "jpg", "--label", "cls"
    )
    assert done.out == f"{tmp_path}/a.rec\n8 records of 8 inputs\n"
    assert RecordFile(tmp_path / "a.rec").side["label"].tolist() == list(range(8))


def test_a_source_that_could_be_anything(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    done = desk.here("data", "pack", str(tmp_path / "folder"), str(tmp_path / "a.rec"))
    assert done.code == 2
    assert done.err == problem(
        f"{tmp_path}/folder, whose kind is not clear",
        "the kinds are images, text, rows, python",
        "nothing was packed",
        "--kind, one of these",
    )


def test_a_source_that_is_not_there(desk: Desk, tmp_path: Path) -> None:
    done = desk.here("data", "pack", str(tmp_path / "nowhere"), str(tmp_path / "a.rec"))
    assert (done.code, f"{tmp_path}/nowhere, which is not there" in done.err) == (2, True)
    done = desk.here("data", "pack", "-", str(tmp_path / "a.rec"), "--kind", "rows")
    assert (done.code, done.out, list(tmp_path.iterdir())) == (2, "", [])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--kind", "rows", "--resize", "3", "--array", "x"], "--resize with --kind rows"),
        (["--column", "x", "--tokenizer", "bytes"], "--column, --tokenizer with --kind images"),
        (["--pass-through", "--quality", "3"], "--pass-through and --quality"),
        (["--exif"], "--exif or --no-exif with images passed through"),
        (["--shards", "2", "--shard-size", "3"], "--shards and --shard-size"),
        (["--shards", "9"], "9 shards of 8 images"),
        (["--encoding", "png", "--tiles"], "--tiles with --encoding png"),
        (["--encoding", "png", "--quality", "3"], "--quality with --encoding png"),
        (["--split", "train=0.9"], "the split train=0.9"),
        (["--image", "jpg"], "--image jpg, --label None"),
        (["--image", "jpg", "--label", "cls", "--shards", "2"], "--image jpg, --label cls, --shards"),
        (["--kind", "python"], "--kind python without --function or --schema"),
        (["--kind", "text", "--lines", "--text-column", "x"], "--lines and --text-column"),
        (["--kind", "text"], "whose suffix is '.rec'"),
    ],
)
def test_options_that_say_nothing_here(desk: Desk, album: Path, tmp_path: Path, options: list[str], said: str) -> None:
    done = desk.here("data", "pack", str(album), str(tmp_path / "a.rec"), *options)
    assert done.code == 2
    assert said in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["album"]


@pytest.mark.parametrize("value", ["train", "train=x", "train=1/0"])
def test_a_split_is_a_name_and_a_fraction(desk: Desk, album: Path, tmp_path: Path, value: str) -> None:
    done = desk.here("data", "pack", str(album), str(tmp_path / "a.rec"), "--split", value)
    assert done.code == 2
    assert "is not NAME=FRACTION, as train=0.9 or train=9/10" in done.err


def test_stats_from_side_columns_or_from_some_records(desk: Desk, album: Path, tmp_path: Path) -> None:
    desk.here("data", "pack", str(album), str(tmp_path / "a.rec"))
    done = desk.here("data", "stats", str(tmp_path / "a.rec"))
    size = (tmp_path / "a.rec").stat().st_size
    lines = done.out.splitlines()
    assert lines[0] == f"{tmp_path}/a.rec: 8 records, {size:,} bytes"
    assert lines[3] == "width px: 30 to 30, mean 30, 10 % below 30, half below 30, 90 % below 30"
    assert lines[5:] == ["label 0: 4", "label 1: 4"]
    first = desk.here("data", "stats", str(tmp_path / "a.rec"), "--json").json
    (tmp_path / "a.uidx").unlink()
    again = desk.here("data", "stats", str(tmp_path / "a.rec"), "--json").json
    assert (first.pop("sampled"), again.pop("sampled")) == (0, 8)
    assert first == again
    assert "of 8 records, evenly spread" in desk.here("data", "stats", str(tmp_path / "a.rec")).out


def test_stats_of_others(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1\n22\n333\n")
    desk.here("data", "pack", str(tmp_path / "a.txt"), str(tmp_path / "t.bin"), "--lines")
    found = desk.here("data", "stats", str(tmp_path / "t-00000.bin"), "--json").json
    assert (found["records"], found["bytes"]) == (3, 18)
    spread = found["spreads"]["document tokens"]
    assert (spread["least"], spread["median"], spread["most"], spread["mean"]) == (1, 2, 3, 2)
    with RecordWriter(tmp_path / "b.rec") as writer:
        writer.write(b"no image")
    assert list(desk.here("data", "stats", str(tmp_path / "b.rec"), "--json").json["spreads"]) == ["payload bytes"]
    refused = desk.here("data", "stats", str(tmp_path / "a.txt"))
    assert (refused.code, "content and suffix '.txt' are of no known kind" in refused.err) == (2, True)


def test_a_sheet_of_images(desk: Desk, album: Path, tmp_path: Path) -> None:
    desk.here("data", "pack", str(album), str(tmp_path / "a.rec"))
    done = desk.here("data", "inspect", str(tmp_path / "a.rec"), "--sheet", str(tmp_path / "a.png"))
    assert done.code == 0
    with Image.open(tmp_path / "a.png") as page:
        cells = [page.getpixel((4 + 132 * number + 64, 4 + 64)) for number in range(8)]
    assert [cell[0] // 40 for cell in cells if isinstance(cell, tuple)] == [0, 1, 2, 3] * 2
