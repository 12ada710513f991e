"""Folders and lists of images become records that lose nothing, whatever the number of processes and however often cut short."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray
from PIL import Image

from unisono.data.convert.pack import ImageOptions, PackOptions, images, pack_images
from unisono.data.convert.pack.image_listing import list_images
from unisono.data.convert.pack.partial_target import PartialTarget
from unisono.data.image import TileGrid, decode, decode_region, probe
from unisono.data.recordio import RecordFile, unpack_header
from unisono.data.recordio.maintenance import verify
from unisono.errors import DataError
from unisono.exit_codes import REQUEUE

ROTATED = "dog/07.jpg"


def read(path: Path) -> list[tuple[float, int, bytes]]:
    """(label, id, image) of each record."""
    records: list[tuple[float, int, bytes]] = []
    for record in RecordFile(path):
        header, image = unpack_header(record)
        assert isinstance(header.label, float)
        records.append((header.label, header.id, bytes(image)))
    return records


def names(root: Path) -> list[str]:
    """im2rec's order: folder by folder."""
    files = [path.relative_to(root) for path in root.rglob("*") if path.is_file()]
    return [path.as_posix() for path in sorted(files, key=lambda path: (path.parent.parts, path.name))]


def content(folder: Path, stem: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob(f"{stem}*"))}


def test_bytes_pass_through_in_the_order_of_the_folders(album: Path, tmp_path: Path) -> None:
    packed = pack_images(album, tmp_path / "a.rec")
    assert (packed.num_inputs, packed.num_records, packed.bad, packed.files) == (30, 30, (), (tmp_path / "a.rec",))
    assert read(tmp_path / "a.rec") == [
        (float(n // 10), n, (album / name).read_bytes()) for n, name in enumerate(names(album))
    ]
    assert (tmp_path / "a.rec.classes.txt").read_text() == "cat\ndog\ndog/small\n"
    file = RecordFile(tmp_path / "a.rec")
    assert file.side["label"].tolist() == [n // 10 for n in range(30)]
    assert file.side["width"].tolist()[:2] == [90, 90]
    assert file.side["height"].tolist()[:2] == [40, 47]
    assert json.loads(packed.report.read_text())["records"] == 30
    assert not list(tmp_path.glob("*.part"))


def test_sizes_of_im2rec(album: Path, tmp_path: Path) -> None:
    pack_images(album, tmp_path / "a.rec", ImageOptions(resize=33))
    for (_, _, image), name in zip(read(tmp_path / "a.rec"), names(album), strict=True):
        before, after = probe((album / name).read_bytes()), probe(image)
        height, width = before.height, before.width
        if name == ROTATED:
            height, width = width, height
        short = min(height, width)
        assert (after.height, after.width) == (height * 33 // short, width * 33 // short)
        assert after.format == "JPEG"


def test_pixels_are_cropped_turned_and_grey(album: Path, tmp_path: Path) -> None:
    pack_images(album, tmp_path / "a.rec", ImageOptions(center_crop=True, color="gray", encoding="png"))
    images = dict(zip(names(album), [image for _, _, image in read(tmp_path / "a.rec")], strict=True))
    for name in ("cat/00.png", "dog/03.jpg", ROTATED):
        whole = decode((album / name).read_bytes(), color="gray")
        side = min(whole.shape[:2])
        top, left = (whole.shape[0] - side) // 2, (whole.shape[1] - side) // 2
        want = whole[top : top + side, left : left + side]
        assert np.array_equal(decode(images[name], color="gray"), np.rot90(want, -1) if name == ROTATED else want), name


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_turned_as_pillow_turns_it(orientation: int, tmp_path: Path) -> None:
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.jpg", exif=exif)
    pack_images(tmp_path, tmp_path / "a.rec", ImageOptions(encoding="png"))
    ((_, _, image),) = read(tmp_path / "a.rec")
    raw = (tmp_path / "a.jpg").read_bytes()
    with Image.open(io.BytesIO(raw)) as opened:
        want: NDArray[np.uint8] = np.asarray(ImageOps.exif_transpose(opened))
    assert np.array_equal(decode(image), want)
    pack_images(tmp_path, tmp_path / "b.rec", ImageOptions(encoding="png", exif=False))
    ((_, _, image),) = read(tmp_path / "b.rec")
    assert np.array_equal(decode(image), decode(raw))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            ImageOptions(tiles=True), marks=pytest.mark.skipif(not shutil.which("jpegtran"), reason="no jpegtran")
        ),
        ImageOptions(tiles=True, resize=64),
    ],
)
def test_tiles_lead_to_the_pixels(album: Path, tmp_path: Path, options: ImageOptions) -> None:
    pack_images(album, tmp_path / "a.rec", options)
    column = RecordFile(tmp_path / "a.rec").side["tiles"]
    for number, ((_, _, image), name) in enumerate(zip(read(tmp_path / "a.rec"), names(album), strict=True)):
        if options.passes_through:
            before = (album / name).read_bytes()
            assert np.array_equal(decode(image), decode(before))
            if name.endswith("png"):
                assert (image, len(column[number])) == (before, 0)
                continue
        grid = TileGrid.from_column(image, column[number])
        assert np.array_equal(decode_region(image, (8, 8, 20, 20), grid), decode(image)[8:28, 8:28])
        assert grid.rows * grid.columns > 1


def test_a_split_loses_nothing_and_stays(album: Path, tmp_path: Path) -> None:
    split = {"train": Fraction("0.7"), "val": Fraction("0.15"), "test": Fraction("0.15")}
    packed = pack_images(album, tmp_path / "a.rec", split=split)
    assert packed.splits == {"train": 21, "val": 5, "test": 4}  # 21, 25.5 and 30 rounded, half to even
    parts = {name: [key for _, key, _ in read(tmp_path / f"a-{name}.rec")] for name in split}
    assert sorted(key for keys in parts.values() for key in keys) == list(range(30))
    assert all(keys == sorted(keys) for keys in parts.values())
    pack_images(album, tmp_path / "b.rec", split=split, shuffle=1)
    for name, keys in parts.items():
        again = [image for _, _, image in read(tmp_path / f"b-{name}.rec")]
        first = [image for _, _, image in read(tmp_path / f"a-{name}.rec")]
        assert Counter(again) == Counter(first)
        assert len(keys) == len(again)
    with pytest.raises(DataError) as caught:
        pack_images(album, tmp_path / "c.rec", split={"train": Fraction("0.7"), "test": Fraction("0.2")})
    assert str(caught.value) == (
        "the split train=0.7, test=0.2\n"
        "  rule: fractions are above 0 and their sum is 1, so that no image is lost; a name is letters, digits and _\n"
        "  so:   nothing was written\n"
        "  try:  train=0.9 test=0.1"
    )


def test_shards_by_number_and_by_size(album: Path, tmp_path: Path) -> None:
    pack_images(album, tmp_path / "whole.rec")
    whole = read(tmp_path / "whole.rec")
    packed = pack_images(album, tmp_path / "a.rec", pack=PackOptions(shards=4))
    assert [path.name for path in packed.files] == [f"a-{n:05d}-of-00004.rec" for n in range(4)]
    assert [len(read(path)) for path in packed.files] == [7, 8, 7, 8]
    assert [record for path in packed.files for record in read(path)] == whole
    sized = pack_images(album, tmp_path / "b.rec", pack=PackOptions(shard_bytes=10_000))
    assert [record for path in sized.files for record in read(path)] == whole
    assert all(sum(map(len, RecordFile(path))) >= 10_000 for path in sized.files[:-1])
    assert len(sized.files) > 2
    assert all(not verify(path).findings for path in (*packed.files, *sized.files))


def test_shuffle_is_another_order_of_the_same(album: Path, tmp_path: Path) -> None:
    orders: list[list[int]] = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        pack_images(album, tmp_path / f"{name}.rec", shuffle=seed)
        orders.append([key for _, key, _ in read(tmp_path / f"{name}.rec")])
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == list(range(30))
    assert orders[0] != sorted(orders[0])


@pytest.mark.parametrize("workers", [1, 3])
def test_bytes_do_not_depend_on_processes(album: Path, tmp_path: Path, workers: int) -> None:
    before = psutil.Process().children()
    for name, count in (("a", 0), ("b", workers)):
        (tmp_path / name).mkdir()
        pack_images(
            album,
            tmp_path / name / "a.rec",
            ImageOptions(resize=32, quality=80),
            pack=PackOptions(shards=2, workers=count),
        )
    assert content(tmp_path / "a", "a-") == content(tmp_path / "b", "a-")
    assert set(psutil.Process().children()) <= set(before)


LST = "7\t2.5\tcat/01.jpg\n3\t1\tdog/02.jpg\n\n9\t-1\tdog/small/03.jpg\n"


def test_a_list_says_index_label_and_order(album: Path, tmp_path: Path) -> None:
    (tmp_path / "a.lst").write_text(LST)
    pack_images(tmp_path / "a.lst", tmp_path / "a.rec", root=album)
    assert [(label, key) for label, key, _ in read(tmp_path / "a.rec")] == [(2.5, 7), (1.0, 3), (-1.0, 9)]
    file = RecordFile(tmp_path / "a.rec")
    assert file.keys.tolist() == [7, 3, 9]
    assert file.side["label"].tolist() == [2.5, 1.0, -1.0]
    assert not (tmp_path / "a.rec.classes.txt").exists()


def test_several_labels(album: Path, tmp_path: Path) -> None:
    (tmp_path / "a.lst").write_text("0\t1\t2\tcat/01.jpg\n1\t3\tcat/02.jpg\n")
    pack_images(tmp_path / "a.lst", tmp_path / "a.rec", root=album)
    file = RecordFile(tmp_path / "a.rec")
    first, second = (unpack_header(record)[0].label for record in file)
    assert np.array_equal(first, np.array([1, 2], np.float32))
    assert second == 3.0
    assert [row.tolist() for row in file.side["label"].tolist()] == [[1.0, 2.0], [3.0]]


def test_labels_that_a_32_bit_float_does_not_hold(album: Path, tmp_path: Path) -> None:
    (tmp_path / "a.lst").write_text("0\t16777217\tcat/01.jpg\n1\t16777216\tcat/02.jpg\n2\t0.1\tcat/03.jpg\n")
    packed = pack_images(tmp_path / "a.lst", tmp_path / "a.rec", root=album, pack=PackOptions(on_error="skip"))
    assert [each.reason for each in packed.bad] == ["label 16777217, which a 32-bit float does not hold"]
    assert RecordFile(tmp_path / "a.rec").side["label"].tolist() == [16777216.0, 0.1]


def test_a_folder_of_nothing_good(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="which names no images"):
        pack_images(tmp_path, tmp_path / "a.rec")
    (tmp_path / "a.jpg").touch()
    packed = pack_images(tmp_path, tmp_path / "a.rec", pack=PackOptions(on_error="skip"))
    assert (packed.num_records, len(RecordFile(tmp_path / "a.rec"))) == (0, 0)


def test_a_table_of_class_names(album: Path, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('path,label\ncat/01.jpg,"tom, cat"\ndog/01.jpg,rex\ncat/02.jpg,"tom, cat"\n')
    pack_images(tmp_path / "a.csv", tmp_path / "a.rec", root=album)
    assert [label for label, _, _ in read(tmp_path / "a.rec")] == [1.0, 0.0, 1.0]
    assert (tmp_path / "a.rec.classes.txt").read_text() == "rex\ntom, cat\n"


def test_every_problem_of_a_list_is_said_at_once(album: Path, tmp_path: Path) -> None:
    (tmp_path / "out.jpg").write_bytes((album / "cat/01.jpg").read_bytes())
    root = shutil.copytree(album, tmp_path / "album")
    (root / "empty.jpg").touch()
    (root / "words.jpg").write_text("words")
    os.mkfifo(root / "pipe.jpg")
    (tmp_path / "a.lst").write_text(
        LST + "7\t1\tcat/02.jpg\n10\t1\tcat/01.jpg\n11\tx\tcat/03.jpg\n12\t1\t../out.jpg\n13\t1\tgone.jpg\n"
        "14\t1\tempty.jpg\n15\t1\twords.jpg\n16\t1\tpipe.jpg\n"
    )
    with pytest.raises(DataError) as caught:
        pack_images(tmp_path / "a.lst", tmp_path / "a.rec", root=root)
    bad = [
        ("a.lst:5", "index 7 appears twice"),
        ("a.lst:6", "cat/01.jpg appears twice"),
        ("a.lst:7", "a line is index, tab, labels, tab, path: could not convert string to float: 'x'"),
        ("a.lst:8", f"../out.jpg lies outside of {root}; --follow-links takes it"),
        ("gone.jpg", "it cannot be read: No such file or directory"),
        ("empty.jpg", "not an image that is read here: it is empty"),
        ("words.jpg", "not an image that is read here: it begins with 77 6f 72 64 73"),
        ("pipe.jpg", "not a file"),
    ]
    assert str(caught.value) == (
        "8 bad inputs:"
        + "".join(f"\n    {path}: {reason}" for path, reason in bad)
        + "\n  rule: every input is packed, unless --on-error skip\n"
        "  so:   the target was not written; finished shards, if any, are kept for a next run\n"
        "  try:  --follow-links, which takes what links and paths lead out to; else repair or remove them; or --on-error "
        "skip packs the rest and lists them in the report"
    )
    report = json.loads((tmp_path / "a.rec.report.json").read_text())
    assert report["bad"] == [{"path": path, "reason": reason} for path, reason in bad]
    assert not report["written"]
    assert not (tmp_path / "a.rec").exists()
    packed = pack_images(tmp_path / "a.lst", tmp_path / "a.rec", root=root, pack=PackOptions(on_error="skip"))
    assert (packed.num_inputs, packed.num_records) == (11, 3)
    assert [(each.path, each.reason) for each in packed.bad] == bad
    followed = pack_images(
        tmp_path / "a.lst", tmp_path / "b.rec", root=root, follow_links=True, pack=PackOptions(on_error="skip")
    )
    assert followed.num_records == 4


def test_a_path_with_a_nul_byte_is_a_bad_input(album: Path, tmp_path: Path) -> None:
    (tmp_path / "a.lst").write_text("0\t1\tcat/01\0.jpg\n1\t1\tcat/02.jpg\n")
    packed = pack_images(tmp_path / "a.lst", tmp_path / "a.rec", root=album, pack=PackOptions(on_error="skip"))
    assert [(each.path, each.reason) for each in packed.bad] == [("a.lst:1", "a path with a NUL byte")]
    assert packed.num_records == 1


def test_a_cell_of_a_table_that_is_too_long(album: Path, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('path,label\ncat/01.jpg,"' + "x" * 200_000)
    with pytest.raises(DataError, match="a table of images is a CSV file"):
        pack_images(tmp_path / "a.csv", tmp_path / "a.rec", root=album)


def test_images_found_bad_only_when_read(album: Path, tmp_path: Path) -> None:
    root = shutil.copytree(album, tmp_path / "album")
    jpeg, png = (root / "cat/01.jpg").read_bytes(), (root / "cat/00.png").read_bytes()
    (root / "cat/cut.jpg").write_bytes(jpeg[:-40])
    (root / "cat/cut.png").write_bytes(png[:-40])
    head = b"IHDR" + (60000).to_bytes(4, "big") * 2 + png[24:29]
    (root / "cat/huge.png").write_bytes(png[:12] + head + zlib.crc32(head).to_bytes(4, "big") + png[33:])
    with pytest.raises(DataError, match=r"1 bad input:\n    cat/cut.jpg: a JPEG of \d+ bytes without an end marker\n"):
        pack_images(root, tmp_path / "a.rec")
    for name, options in (("a", ImageOptions()), ("b", ImageOptions(resize=32))):
        packed = pack_images(root, tmp_path / f"{name}.rec", options, pack=PackOptions(on_error="skip", workers=1))
        assert [each.path for each in packed.bad] == ["cat/cut.jpg", "cat/cut.png", "cat/huge.png"]
        assert "60000x60000" in packed.bad[2].reason
        assert packed.num_records == 30
        assert [key for _, key, _ in read(tmp_path / f"{name}.rec")][
            10
        ] == 13  # of the listing, with the bad ones in it


def test_links_are_followed_only_where_asked(album: Path, tmp_path: Path) -> None:
    root = shutil.copytree(album / "cat", tmp_path / "album/cat").parent
    (root / "cat/inside.jpg").symlink_to("01.jpg")
    (root / "cat/outside.jpg").symlink_to(album / "dog/01.jpg")
    (root / "dog").symlink_to(album / "dog")
    (root / "cat/loop").symlink_to(root)
    (root / "cat/notes.txt").write_text("not an image by name")
    packed = pack_images(root, tmp_path / "a.rec", pack=PackOptions(on_error="skip"))
    assert [(each.path, each.reason) for each in packed.bad] == [
        ("cat/loop", "a link to a folder; --follow-links takes it"),
        ("cat/outside.jpg", "a link that leads out; --follow-links takes it"),
        ("dog", "a link to a folder; --follow-links takes it"),
    ]
    assert (packed.num_records, packed.num_left_out) == (11, 1)
    followed = pack_images(root, tmp_path / "b.rec", follow_links=True, pack=PackOptions(on_error="skip"))
    assert [(each.path, each.reason) for each in followed.bad] == [("cat/loop", "a link to a folder that it lies in")]
    assert followed.num_records == 12 + 20


@pytest.mark.parametrize("workers", [0, 1])
def test_a_folder_that_becomes_a_link_after_the_listing_is_not_packed(
    workers: int, album: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = shutil.copytree(album / "cat", tmp_path / "album/cat").parent
    private = shutil.copytree(album / "cat", tmp_path / "private")

    def listed_then_exchanged(*args: Any, **kwargs: Any) -> Any:
        listing = list_images(*args, **kwargs)
        if not (root / "cat").is_symlink():
            (root / "cat").rename(tmp_path / "away")
            (root / "cat").symlink_to(private)
        return listing

    monkeypatch.setattr(images, "list_images", listed_then_exchanged)
    packed = pack_images(root, tmp_path / "a.rec", pack=PackOptions(on_error="skip", workers=workers))
    assert {each.reason for each in packed.bad} == {f"it cannot be read: it leads out of {root}"}
    assert (len(packed.bad), packed.num_records) == (10, 0)
    followed = pack_images(root, tmp_path / "b.rec", follow_links=True, pack=PackOptions(workers=workers))
    assert followed.num_records == 10


def test_names_that_are_not_utf_8(album: Path, tmp_path: Path) -> None:
    (tmp_path / "album").mkdir()
    shutil.copy(album / "cat/01.jpg", tmp_path / "album/é.jpg")
    shutil.copy(album / "cat/01.jpg", os.fsencode(tmp_path / "album") + b"/\xe9.jpg")
    packed = pack_images(
        tmp_path / "album", tmp_path / "a.rec", ImageOptions(resize=8), pack=PackOptions(on_error="skip", workers=1)
    )
    assert packed.num_records == 1
    assert [(each.path, each.reason) for each in packed.bad] == [("\\udce9.jpg", "its name is not UTF-8")]
    assert json.loads(packed.report.read_text())["bad"][0]["path"] == "\\udce9.jpg"


def test_a_target_is_written_once(album: Path, tmp_path: Path) -> None:
    pack_images(album, tmp_path / "a.rec", pack=PackOptions(shards=2))
    report = (tmp_path / "a.rec.report.json").read_bytes()
    with pytest.raises(DataError, match=r"a-00000-of-00002.rec, which exists"):
        pack_images(album, tmp_path / "a.rec")
    assert (tmp_path / "a.rec.report.json").read_bytes() == report
    pack_images(album, tmp_path / "a-b.rec")
    pack_images(album, tmp_path / "b.rec")


@pytest.fixture(scope="module")
def many(album: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 images: so many that a process can be stopped before it is through."""
    root = tmp_path_factory.mktemp("many")
    for number in range(2):
        shutil.copytree(album, root / f"{number}")
    return root


def start(album: Path, target: Path, *options: str, stderr: int | None = None) -> subprocess.Popen[bytes]:
    """Below the test's own priority, which has to see it before it is through."""
    command = [
        "nice",
        "-n",
        "19",
        sys.executable,
        "-m",
        "unisono",
        "data",
        "pack",
        str(album),
        str(target),
        "--resize",
        "64",
        *options,
    ]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)


def alive(process: psutil.Process) -> bool:
    """Not ended: one that nobody has waited for yet has."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_killed_and_started_again_it_ends_with_the_same_bytes(many: Path, tmp_path: Path) -> None:
    options = ["--shards", "24", "--workers", "1"]
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    assert start(many, tmp_path / "a/x.rec", *options).wait(60) == 0
    part = tmp_path / "b/x.rec.part"
    for shard in (1, 4):
        process = start(many, tmp_path / "b/x.rec", *options)
        wait_for(part / f"all-{shard:05d}.json", process)
        workers = psutil.Process(process.pid).children()
        process.kill()
        process.wait()
        assert len(workers) == 1
        deadline = time.monotonic() + 20
        while alive(workers[0]):  # it ends by itself
            assert time.monotonic() < deadline
            time.sleep(0.01)
    inodes = {path.parent.name: path.stat().st_ino for path in part.glob("all-0000[0-4]/part.rec")}
    assert len(inodes) == 5
    damaged = part / "all-00003/part.rec"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    assert start(many, tmp_path / "b/x.rec", *options).wait(60) == 0
    assert content(tmp_path / "a", "x-") == content(tmp_path / "b", "x-")
    after = [(tmp_path / f"b/x-{n:05d}-of-00024.rec").stat().st_ino for n in range(3)]
    assert after == [inodes[f"all-{n:05d}"] for n in range(3)]  # reused, not made again
    assert not part.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_says_what_is_kept(many: Path, tmp_path: Path, number: signal.Signals) -> None:
    process = start(many, tmp_path / "x.rec", "--shards", "24", "--workers", "1", stderr=subprocess.PIPE)
    wait_for(tmp_path / "x.rec.part/all-00002.json", process)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == REQUEUE
    part = tmp_path / "x.rec.part"
    assert said.decode().splitlines() == [
        f"unisono: packing was interrupted; finished shards are kept in {part}, and the same command goes on there"
    ]
    assert start(many, tmp_path / "x.rec", "--shards", "24", "--workers", "1").wait(60) == 0


def test_other_options_do_not_take_over(many: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    process = start(many, tmp_path / "x.rec", "--shards", "24", "--workers", "1")
    wait_for(tmp_path / "x.rec.part/all-00002.json", process)
    process.kill()
    process.wait()
    pack_images(many, tmp_path / "x.rec", ImageOptions(resize=32), pack=PackOptions(shards=4))
    assert "its files belong to other inputs or options; they are deleted and written again" in caplog.text
    pack_images(many, tmp_path / "y.rec", ImageOptions(resize=32), pack=PackOptions(shards=4))
    assert [path.read_bytes() for path in sorted(tmp_path.glob("x-*"))] == [
        path.read_bytes() for path in sorted(tmp_path.glob("y-*"))
    ]


def no_link(*_: Any, **__: Any) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))  # as vfat says it


@pytest.mark.parametrize("call", ["link", "replace"])
def test_cut_short_while_files_get_their_names(
    album: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    pack_images(album, tmp_path / "a.rec", pack=PackOptions(shards=3))
    moved = 0
    move = getattr(os, call)

    def failing(old: Any, new: Any, **options: Any) -> None:
        nonlocal moved
        moved += "src_dir_fd" in options and Path(new).parent == tmp_path
        if moved == 5:
            raise KeyboardInterrupt
        move(old, new, **options)

    if call == "replace":
        monkeypatch.setattr(os, "link", no_link)
    monkeypatch.setattr(os, call, failing)
    with pytest.raises(KeyboardInterrupt):
        pack_images(album, tmp_path / "b.rec", pack=PackOptions(shards=3))
    monkeypatch.undo()
    assert len(list(tmp_path.glob("b-*"))) == 4
    packed = pack_images(album, tmp_path / "b.rec", pack=PackOptions(shards=3))
    assert packed.num_records == 30
    assert list(content(tmp_path, "a-").values()) == list(content(tmp_path, "b-").values())
    assert not (tmp_path / "b.rec.part").exists()


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_that_appears_while_files_get_their_names_stays(
    album: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    pack_images(album, tmp_path / "a.rec", pack=PackOptions(shards=3))
    theirs = tmp_path / "b-00001-of-00003.rec"
    commit = PartialTarget.commit

    def late(partial: PartialTarget, moves: Mapping[str, str], folder: Path) -> None:
        theirs.write_text("theirs")
        commit(partial, moves, folder)

    monkeypatch.setattr(PartialTarget, "commit", late)
    if not has_links:
        monkeypatch.setattr(os, "link", no_link)
    with pytest.raises(DataError, match="a packed file replaces no other"):
        pack_images(album, tmp_path / "b.rec", pack=PackOptions(shards=3))
    monkeypatch.undo()
    assert theirs.read_text() == "theirs"
    theirs.unlink()
    pack_images(album, tmp_path / "b.rec", pack=PackOptions(shards=3))
    assert list(content(tmp_path, "a-").values()) == list(content(tmp_path, "b-").values())
    assert not (tmp_path / "b.rec.part").exists()
    assert {path.stat().st_nlink for path in tmp_path.glob("b*") if path.is_file()} == {1}


def test_one_process_at_a_time(many: Path, tmp_path: Path) -> None:
    process = start(many, tmp_path / "x.rec", "--shards", "24", "--workers", "1")
    wait_for(tmp_path / "x.rec.part/all-00001.json", process)
    process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(DataError, match=r"x\.rec\.part: another process is packing to it"):
            pack_images(many, tmp_path / "x.rec", ImageOptions(resize=64), pack=PackOptions(shards=24))
    finally:
        process.send_signal(signal.SIGCONT)
    assert process.wait(60) == 0


def test_a_file_system_without_locks_is_said(album: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_lock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_lock)
    with pytest.raises(DataError, match=r"x\.rec\.part: its file system gives no lock"):
        pack_images(album, tmp_path / "x.rec")


def test_a_worker_that_dies_is_named(many: Path, tmp_path: Path) -> None:
    process = start(many, tmp_path / "x.rec", "--workers", "1", "--shards", "24", stderr=subprocess.PIPE)
    wait_for(tmp_path / "x.rec.part/all-00000.json", process)
    process.send_signal(signal.SIGSTOP)
    for child in psutil.Process(process.pid).children():
        os.kill(child.pid, signal.SIGKILL)
    process.send_signal(signal.SIGCONT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"its packing process ended with exit code -9" in said
    assert b"finished shards are kept and not made again" in said
    assert (tmp_path / "x.rec.part/all-00000.json").exists()
