"""Which files of a folder are read as documents, and what is said of the others."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
from pictures import jpeg, photograph

from unisono.data.convert.file_kind import kind_of_name
from unisono.data.convert.pack.image_listing import list_images
from unisono.data.convert.table_files import Table, open_table, write_table
from unisono.data.sources import open_source
from unisono.errors import DataError
from unisono.quality.class_labels import find_labelled
from unisono.quality.clean import clean
from unisono.quality.input_files import list_files
from unisono.quality.options import DuplicateOptions, only_dedup

EXACT = only_dedup(DuplicateOptions(near=0.0))


def table(path: Path, *texts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_table(path, Table(rows=[{"text": text} for text in texts]))
    return path


def named(*paths: Path) -> list[str]:
    return [file.name for file in list_files(paths)[0]]


def test_files_with_the_beginning_of_a_name_of_a_table_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table(tmp_path / "st" / "part.0001.jsonl", "one")
    (tmp_path / "st" / "part.0002.jsonl.gz").write_bytes(gzip.compress(b'{"text": "two"}\n'))
    for name in ("part.0001.tsv", "part.json"):
        (tmp_path / "st" / name).write_text("text\n")
    assert named(tmp_path / "st") == ["part.0001.jsonl"]
    assert "3 files that are no tables are left out, such as 'part.0001.tsv'" in caplog.text


def test_files_that_belong_to_a_table_are_not_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "records"
    for name in ("a.rec", "b-train-00000-of-00002.rec", "c.d.mindrecord"):
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"")
    of_tables = ("a.idx", "a.uidx", "a.lst", "a.rec.classes.txt", "b.rec.classes.txt", "b-train-00000-of-00002.idx")
    for name in (*of_tables, "b.schema", "c.d.mindrecord.db", "a.rec.cleaning.json"):
        (folder / name).write_text("")
    assert len(named(folder)) == 3
    assert not caplog.records
    (folder / "c.idx").write_text("")  # c is none of the tables
    named(folder)
    assert "1 files that are no tables are left out, such as 'c.idx'" in caplog.text


def test_files_with_the_name_of_an_image_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("scan.1.png", "scan.2.tiff", "scan.3.PNG", "scan.1.txt"):
        (tmp_path / name).write_bytes(b"")
    assert named(tmp_path) == ["scan.1.png", "scan.3.PNG"]
    assert "2 files that are no images are left out, such as 'scan.1.txt'" in caplog.text


def test_hidden_files_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table(tmp_path / "data" / "a.jsonl", "one")
    for name in (".b.jsonl", ".more/c.jsonl", ".more/d.jsonl", ".git/config", ".DS_Store", "._a.jsonl"):
        (tmp_path / "data" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "data" / name).write_text('{"text": "two"}\n')
    assert named(tmp_path / "data") == ["a.jsonl"]
    assert "it has 2 hidden file(s) or folder(s), which are left out: .b.jsonl, .more" in caplog.text
    (tmp_path / "data" / "a.jsonl").unlink()
    with pytest.raises(DataError, match=r"holds no files, only 2 hidden file\(s\) or folder\(s\)"):
        list_files([tmp_path / "data"])


def test_hidden_images_are_no_samples(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a run, either: so kept rows, weights and losses are of the same images."""
    for name in ("cat/1.jpg", "cat/.2.jpg", ".thumbnails/3.jpg", "dog/4.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(jpeg(photograph(0)))
    listing = list_images(tmp_path)
    assert [image.name for image in listing.samples] == named(tmp_path) == ["cat/1.jpg", "dog/4.jpg"]
    assert listing.left_out == 2
    caplog.clear()
    assert len(open_source(tmp_path)) == 2
    assert "it has 2 hidden file(s) or folder(s), which are left out: .thumbnails, cat/.2.jpg" in caplog.text


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.JSONL", ".jsonl"),
        ("a.Csv", ".csv"),
        ("a.REC", ".rec"),
        ("a.TAR.GZ", ".tar.gz"),
        ("A.MINDRECORD0", ".mindrecord"),
        ("a.PARQUET-00000-of-00002", ".parquet"),
    ],
)
def test_suffixes_in_any_case(name: str, kind: str) -> None:
    assert kind_of_name(Path(name)) == kind


@pytest.mark.parametrize("suffix", [".JSONL", ".CSV", ".Parquet", ".TAR", ".MindRecord"])
def test_tables_with_suffixes_in_any_case(tmp_path: Path, suffix: str) -> None:
    if suffix == ".Parquet":
        pytest.importorskip("pyarrow")
    path = table(tmp_path / "in" / f"a{suffix.lower()}", "one", "one", "two")
    path = path.rename(path.with_name(f"a{suffix}"))
    for index in path.parent.glob("*.db"):
        index.unlink()
    assert clean([path.parent], tmp_path / "out", EXACT).kept == 2
    kept = open_table(tmp_path / "out" / "data" / path.name).rows
    assert [row["text"] for row in kept] == ["one", "two"]
    assert len(open_source(path, cache_dir=tmp_path / "cache")) == 3


def test_a_path_and_a_link_to_it_are_the_same_files(tmp_path: Path) -> None:
    table(tmp_path / "real" / "a.jsonl", "one")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "real" / "a.jsonl")
    for other in ("link", "b.jsonl", "link/a.jsonl"):
        with pytest.raises(DataError, match=r"files that are given twice: .*'real/a\.jsonl'"):
            list_files([tmp_path / "real", tmp_path / other])
        with pytest.raises(DataError, match="files that are given twice"):
            find_labelled([tmp_path / "real", tmp_path / other])
    assert named(tmp_path / "link") == ["a.jsonl"]


def test_a_folder_named_stdlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``stdlib`` is a setting of a run, and as a path the folder of that name."""
    table(tmp_path / "stdlib" / "a.jsonl", "one")
    monkeypatch.chdir(tmp_path)
    assert named(Path("stdlib")) == ["a.jsonl"]
    (tmp_path / "stdlib" / "a.jsonl").rename(tmp_path / "a.jsonl")
    (tmp_path / "stdlib").rmdir()
    table(tmp_path / "in.jsonl", "one").rename(tmp_path / "stdlib")
    assert [file.path.name for file in list_files([Path("stdlib")])[0]] == ["stdlib"]


def test_pipes(tmp_path: Path) -> None:
    """By name, and in a folder that has no other files; nothing is said of training or a corpus."""
    (tmp_path / "in").mkdir()
    os.mkfifo(tmp_path / "in" / "p.jsonl")
    with pytest.raises(DataError) as caught:
        list_files([tmp_path / "in" / "p.jsonl"])
    assert str(caught.value) == (
        f"{tmp_path}/in/p.jsonl, which is neither a folder nor a regular file\n"
        "  rule: documents are in tables, in files of text or images, or in folders of these\n"
        "  so:   nothing was written\n"
        "  try:  a file with its content"
    )
    with pytest.raises(DataError) as caught:
        list_files([tmp_path / "in"])
    assert str(caught.value) == (
        f"{tmp_path}/in/p.jsonl cannot be read: it is not a regular file\n"
        "  rule: every file of a folder of data is readable, regular, and named in UTF-8\n"
        "  so:   nothing was read; no file is left out silently\n"
        "  try:  repair or remove it, or another folder"
    )


@pytest.mark.parametrize(
    ("name", "given", "nearest"),
    [
        ("a.jsonl.gz", "a compressed file", "gunzip -k {}"),
        ("a.JSONL.ZST", "a compressed file", "unzstd {}"),
        ("a.zip", "a compressed file", "unzip {}"),
        ("a.npy", "a binary file", "its rows as .jsonl, .csv or .parquet, or its text as .txt"),
    ],
)
def test_compressed_and_binary_files(
    tmp_path: Path, name: str, given: str, nearest: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "in" / name
    path.parent.mkdir()
    path.write_bytes(b"")
    with pytest.raises(DataError) as caught:
        list_files([path])
    assert str(caught.value) == (
        f"{path}, {given}\n"
        "  rule: a file is read as it is: a table (.jsonl, .csv, .parquet, …), an image, or plain text\n"
        "  so:   nothing was written\n"
        f"  try:  {nearest.format(path)}"
    )
    with pytest.raises(DataError, match=r"which has only 1 compressed or binary file\(s\), which are left out: a\."):
        list_files([path.parent])
    (path.parent / "b.txt").write_text("text")
    assert named(path.parent) == ["b.txt"]
    assert f"{path.parent}: it has 1 compressed or binary file(s), which are left out: {name}" in caplog.text
    assert len(caplog.records) == 1


def test_a_stream_is_no_file(tmp_path: Path) -> None:
    """Its name has no suffix, so rows of a table would be read as prose."""
    path = table(tmp_path / "a.jsonl", "one")
    with path.open() as opened, pytest.raises(DataError, match=r"/dev/fd/\d+, a stream"):
        list_files([Path(f"/dev/fd/{opened.fileno()}")])
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(DataError, match="which is neither a folder nor a regular file"):
            list_files([other])
