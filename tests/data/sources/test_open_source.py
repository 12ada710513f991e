"""``open_source``: values and order are those written, for each format."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec.implementations.zip
import numpy as np
import pytest
from modes import FILE, mode_of, umask
from source_files import write_arrow_folder, write_tar

from unisono.data import Loader, LoaderOptions, TokenWriter
from unisono.data.combined import concatenated, mapped, subset, weighted
from unisono.data.dataset import from_map_style, location_of
from unisono.data.image import encode_jpeg
from unisono.data.loading.sample_cache import cached
from unisono.data.mindrecord import MindRecordWriter
from unisono.data.recordio import ImageHeader, RecordWriter, pack_header
from unisono.data.sources import open_source, source_files, source_groups
from unisono.data.sources.remote import local_copies
from unisono.errors import DataError, ExtraError

ORDER = np.array([4, 0, 2, 4])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_tables_have_the_rows_that_were_written(tmp_path: Path) -> None:
    """CSV with quoted line ends, Parquet, TAR and Arrow folders: the same rows in any order."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"x": i, "y": i / 2, "text": f'a "{i}",\né'} for i in range(6)]
    lines = ["x,y,text", *('{},{},"{}"'.format(r["x"], r["y"], str(r["text"]).replace('"', '""')) for r in rows)]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    write_tar(tmp_path / "a.tar", {f"{r['x']:03d}.json": json.dumps(r).encode() for r in rows})
    write_arrow_folder(tmp_path / "arrow", table, {"x": {"dtype": "int64", "_type": "Value"}})
    for name in ("a.csv", "a.parquet", "arrow"):
        data = open_source(tmp_path / name)
        samples = data.samples(ORDER)  # type: ignore[attr-defined]
        assert [int(sample["x"]) for sample in samples] == ORDER.tolist()
        assert [float(sample["y"]) for sample in samples] == (ORDER / 2).tolist()
        assert [sample["text"].tobytes().decode() for sample in samples] == [rows[i]["text"] for i in ORDER]


def mixed_rows(folder: Path, suffix: str) -> Path:
    """Rows with a text, a number, and fields that no sample can hold: an object or decimal number, and a null in the last row."""
    path = folder / f"a{suffix}"
    if suffix == ".jsonl":
        rows = [{"text": f"t{n}", "label": n % 2, "meta": {"n": n}, "score": n if n < 4 else None} for n in range(5)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path
    import pyarrow as pa
    import pyarrow.parquet as pq

    meta = pa.array([f"{n}.50" for n in range(5)]).cast(pa.decimal128(9, 2))
    scores = pa.array([0, 1, 2, 3, None])
    pq.write_table(pa.table({"text": list("abcde"), "label": [0, 1] * 2 + [0], "meta": meta, "score": scores}), path)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_only_columns_that_are_read_need_values(tmp_path: Path, suffix: str) -> None:
    path = mixed_rows(tmp_path, suffix)
    for _ in range(2):  # the second time from the copy
        data = open_source(path, columns={"inputs": "text", "targets": "label"})
        assert [int(sample["targets"]) for sample in data.samples(np.arange(5))] == [0, 1, 0, 1, 0]  # type: ignore[attr-defined]
        whole = open_source(path)
        assert {*whole.samples(np.arange(1))[0]} == {"text", "label"}  # type: ignore[attr-defined]
        assert {*whole.column_faults} == {"meta", "score"}  # type: ignore[attr-defined]
        for name, said in (("meta", "object" if suffix == ".jsonl" else "decimal128(9, 2)"), ("score", "null")):
            with pytest.raises(DataError, match=re.escape(said)) as caught:
                open_source(path, columns={"inputs": name})
            assert name in str(caught.value)
    with pytest.raises(DataError, match="column 'mta'"):
        open_source(path, columns={"inputs": "mta"})


def test_a_folder_of_tables(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "more").mkdir(parents=True)
    for number, name in enumerate(
        ("b.jsonl", "more/c.jsonl", "a.jsonl", "z-00001-of-00002.jsonl", "z-00000-of-00002.jsonl")
    ):
        (folder / name).write_text(f'{{"x": {number}}}\n')
    (folder / "README.md").write_text("no table")
    (folder / ".hidden.csv").write_text("x\n5\n")
    data = open_source(folder)
    assert [int(sample["x"]) for sample in data.samples(np.arange(5))] == [2, 0, 1, 4, 3]  # type: ignore[attr-defined]
    assert source_files(folder, tmp_path / "cache")[0] == folder / "a.jsonl"
    (folder / "a.csv").write_text("x\n5\n")
    with pytest.raises(DataError, match="files of 2 formats"):
        open_source(folder)
    groups = source_groups([folder], tmp_path / "cache")
    assert [len(group) for group in groups] == [1, 5]


def test_rows_without_any_value_that_a_sample_can_hold(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"meta": {"n": 1}}\n{"meta": null}\n')
    assert open_source(tmp_path / "a.jsonl").samples(np.arange(2)) == [{}, {}]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "arrow"])
def test_lists_of_strings_are_texts_with_a_line_for_each(tmp_path: Path, name: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def write(rows: list[dict[str, Any]], folder: Path) -> Path:
        folder.mkdir()
        (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet")
        write_arrow_folder(folder / "arrow", pa.Table.from_pylist(rows), {})
        return folder / name

    rows = [{"words": ["Bob", "in", "New York"][: 1 + i % 3], "tags": [2, 0, 1][: 1 + i % 3]} for i in range(6)]
    data: Any = open_source(write(rows, tmp_path / "good"))
    for number, sample in zip(ORDER, data.samples(ORDER), strict=True):
        assert sample["words"].tobytes().decode().split("\n") == rows[number]["words"]
        assert sample["tags"].dtype == np.int64
        assert sample["tags"].tolist() == rows[number]["tags"]
    bad = write([*rows, {"words": ["Rome", "a\nb"], "tags": [1, 0]}], tmp_path / "bad")
    with pytest.raises(DataError) as caught:
        open_source(bad)
    assert str(caught.value) == (
        "row 6, column 'words': the string 'a\\nb' (str) of a list\n"
        "  rule: a list of strings is read as one text with a line for each, so that none has a line end\n"
        "  so:   the list would have more parts than were written\n"
        "  try:  the same strings without line ends, or a column that is one text"
    )


def test_a_webdataset(tmp_path: Path) -> None:
    members = {
        f"{i:03d}.{ext}": content for i in range(6) for ext, content in (("cls", b"%d" % (i % 2)), ("txt", b"t%d" % i))
    }
    write_tar(tmp_path / "a.tar", members)
    data = open_source(tmp_path / "a.tar", columns={"text": "txt", "targets": "cls"})
    samples = data.samples(ORDER)  # type: ignore[attr-defined]
    assert [sample["text"].tobytes() for sample in samples] == [b"t%d" % i for i in ORDER]
    assert [int(sample["targets"]) for sample in samples] == (ORDER % 2).tolist()


def test_classes_of_an_arrow_folder(tmp_path: Path) -> None:
    import pyarrow as pa

    png = {"bytes": b"encoded", "path": None}
    table = pa.table({"image": [png, png], "label": [1, 0]})
    names: dict[str, object] = {"names": ["cat", "dog"], "_type": "ClassLabel"}
    write_arrow_folder(tmp_path / "d" / "train", table, {"image": {"_type": "Image"}, "label": names})
    data: Any = open_source(tmp_path / "d" / "train")
    assert (data.classes, data.class_column) == (("cat", "dog"), "label")
    assert data.samples(np.array([0]))[0]["image"].tobytes() == b"encoded"
    other: dict[str, object] = {**names, "names": ["tom", "rex"]}
    write_arrow_folder(tmp_path / "e", table, {"image": {"_type": "Image"}, "label": other})
    assert open_source(tmp_path / "e").fingerprint != data.fingerprint
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match="which has the splits train, test"):
        open_source(tmp_path / "d")
    (file,) = (tmp_path / "d" / "train").glob("*.arrow")
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(DataError, match="a data set of Hugging Face on disk"):
        open_source(tmp_path / "d" / "train")


@pytest.mark.parametrize("name", ["data-00000-of-00001.arrow", "state.json", "dataset_info.json", "dataset_dict.json"])
def test_links_out_of_an_arrow_folder(tmp_path: Path, name: str) -> None:
    import pyarrow as pa

    folder = write_arrow_folder(tmp_path / "d", pa.table({"x": [1, 2]}), {})
    if name == "dataset_dict.json":
        (folder / "state.json").unlink()
        (folder / name).write_text('{"splits": ["train"]}')
    outside = (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(outside)
    with pytest.raises(DataError) as caught:
        open_source(folder, cache_dir=tmp_path / "cache")
    (problem,) = caught.value.problems
    assert problem.given == f"{folder / name}, a link to {outside}"
    assert problem.rule == f"the files of a data set lie in its folder, {folder}, links followed"


def test_links_inside_an_arrow_folder(tmp_path: Path) -> None:
    import pyarrow as pa

    folder = write_arrow_folder(tmp_path / "d", pa.table({"x": [1, 2]}), {})
    (file,) = folder.glob("*.arrow")
    file.symlink_to(file.rename(folder / "shard").name)
    (tmp_path / "link").symlink_to(folder)
    assert len(open_source(tmp_path / "link", cache_dir=tmp_path / "cache")) == 2


def test_classes_of_lists_in_an_arrow_folder(tmp_path: Path) -> None:
    """As datasets writes them: ``List`` and ``LargeList`` since version 4, before that ``Sequence`` or a JSON list."""
    import pyarrow as pa

    table = pa.table({"tokens": [["Bob", "runs"]], "chunks": [[0, 1]], "ner_tags": [[1, 0]]})
    tags: dict[str, object] = {"names": ["O", "PER"], "id": None, "_type": "ClassLabel"}
    features: dict[str, object] = {
        "tokens": {"feature": {"dtype": "string", "_type": "Value"}, "_type": "List"},
        "chunks": {"feature": {"names": ["B", "I"], "_type": "ClassLabel"}, "_type": "List"},
    }
    for number, feature in enumerate(
        (
            {"feature": tags, "_type": "List"},
            {"feature": tags, "length": 2, "_type": "List"},
            {"feature": tags, "_type": "LargeList"},
            {"feature": tags, "length": -1, "id": None, "_type": "Sequence"},
            [tags],
        )
    ):
        write_arrow_folder(tmp_path / f"{number}", table, {**features, "ner_tags": feature})
        data: Any = open_source(tmp_path / f"{number}")
        assert data.class_names == {"chunks": ("B", "I"), "ner_tags": ("O", "PER")}
        assert (data.classes, data.class_column) == (("B", "I"), "chunks")
    for feature in ([], [None], {"feature": None, "_type": "List"}, {"feature": {"x": tags}, "_type": "Sequence"}):
        folder = tmp_path / f"other{number}"
        write_arrow_folder(folder, table, {"ner_tags": feature})
        assert open_source(folder).classes == ()  # type: ignore[attr-defined]
        number += 1


def test_changed_files_are_read_again_and_copies_elsewhere_are_the_same_data(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    first = open_source(tmp_path / "a.jsonl").fingerprint
    (tmp_path / "b.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    assert open_source(tmp_path / "b.jsonl").fingerprint == first
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"x": 3}\n')
    changed = open_source(tmp_path / "a.jsonl")
    assert changed.fingerprint != first
    assert changed.read(np.array([1]))["x"].tolist() == [3]


def test_a_glob_of_a_set_of_files_has_each_row_once(tmp_path: Path) -> None:
    for part in range(2):
        (tmp_path / f"d-{part:05d}-of-00002.jsonl").write_text(f'{{"x": {2 * part}}}\n{{"x": {2 * part + 1}}}\n')
    data = open_source(f"{tmp_path}/d-*.jsonl")
    assert data.read(np.arange(len(data)))["x"].tolist() == [0, 1, 2, 3]
    (tmp_path / "d-00001-of-00002.jsonl").write_text('{"x": 7}\n')
    changed = open_source(tmp_path / "d-00000-of-00002.jsonl")
    assert changed.read(np.arange(len(changed)))["x"].tolist() == [0, 1, 7]


def test_floats_are_those_of_the_file(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    large = [1700000000.5, 1e308, 0.1]
    (tmp_path / "a.csv").write_text("x\n" + "".join(f"{x!r}\n" for x in large))
    (tmp_path / "a.jsonl").write_text("".join(f'{{"x": {x!r}}}\n' for x in large))
    pq.write_table(pa.table({"x": large}), tmp_path / "a.parquet")
    with MindRecordWriter(tmp_path / "a.mindrecord", {"x": "float64", "y": "float32"}) as writer:
        for x in large:
            writer.write({"x": x, "y": 0.5})
    for suffix in ("csv", "jsonl", "parquet", "mindrecord"):
        read = open_source(tmp_path / f"a.{suffix}").read(np.arange(3))
        assert (read["x"].dtype, read["x"].tolist()) == (np.float64, large)
    assert read["y"].dtype == np.float32


def test_copies_of_other_versions_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 1 had the floats of tables as float32."""
    from unisono.data.sources import converted

    (tmp_path / "a.csv").write_text("x\n1700000000.5\n")
    now = converted.__dict__["_VERSION"]
    monkeypatch.setattr(converted, "_VERSION", 1)
    open_source(tmp_path / "a.csv")
    (old,) = (tmp_path / "cache").rglob("*.rec")
    old.write_bytes(b"")
    monkeypatch.setattr(converted, "_VERSION", now)
    assert open_source(tmp_path / "a.csv").read(np.arange(1))["x"].tolist() == [1700000000.5]


@pytest.mark.parametrize("change", ["moved", "renamed", "empty"])
def test_an_image_folder_is_other_data_with_other_classes(tmp_path: Path, change: str) -> None:
    jpeg = encode_jpeg(np.zeros((16, 16, 3), np.uint8))
    for name in ("cat/0", "cat/1", "dog/2"):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "images" / f"{name}.jpg").write_bytes(jpeg)
    first: Any = open_source(tmp_path / "images")
    assert open_source(tmp_path / "images").fingerprint == first.fingerprint
    if change == "moved":
        (tmp_path / "images/cat/1.jpg").rename(tmp_path / "images/dog/1.jpg")
    elif change == "renamed":
        (tmp_path / "images/dog").rename(tmp_path / "images/ant")
    else:
        (tmp_path / "images/dog/2.jpg").rename(tmp_path / "images/cat/2.jpg")
    assert open_source(tmp_path / "images").fingerprint != first.fingerprint


def test_samples_know_where_they_are_from(tmp_path: Path) -> None:
    for name, count in (("a", 3), ("b", 2)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"x": {i}}}\n' for i in range(count)))
        with RecordWriter(tmp_path / f"{name}.rec") as writer:
            for i in range(count):
                writer.write(pack_header(ImageHeader(label=i % 2), encode_jpeg(np.zeros((16, 16, 3), np.uint8))))
    a, b = open_source(tmp_path / "a.jsonl"), open_source(tmp_path / "b.jsonl")
    assert location_of(a, 2) == f"row 3 of {tmp_path}/a.jsonl"
    assert location_of(open_source(f"{tmp_path}/[ab].jsonl"), 3) == (
        f"row 4 of the 2 files from {tmp_path}/a.jsonl to {tmp_path}/b.jsonl"
    )
    both = concatenated([subset(a, [2, 0]), mapped(b, dict)])
    kept = cached(weighted(both, [1, 1, 1, 1]), budget_bytes=1 << 20, folder=tmp_path)
    assert [location_of(kept, at) for at in range(4)] == [
        f"row {row} of {tmp_path}/{name}.jsonl" for row, name in ((3, "a"), (1, "a"), (1, "b"), (2, "b"))
    ]
    assert location_of(open_source(f"{tmp_path}/[ab].rec"), 3) == f"record 0 of {tmp_path}/b.rec"
    images = tmp_path / "images/cat/0.jpg"
    images.parent.mkdir(parents=True)
    images.write_bytes(encode_jpeg(np.zeros((16, 16, 3), np.uint8)))
    assert location_of(open_source(tmp_path / "images"), 0) == str(images)
    assert location_of(from_map_style([1, 2]), 0) == ""


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.full)])
def test_the_error_of_a_sample_names_its_row(tmp_path: Path, workers: int) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"x": {i}}}\n' for i in range(8)))
    data = subset(open_source(tmp_path / "a.jsonl"), [6, 2])
    options = LoaderOptions(num_workers=workers, worker_kind="process" if workers else "thread")
    loader = Loader(mapped(data, refuse_2), seed=0, global_batch=2, options=options)
    with pytest.raises(DataError) as caught:
        next(iter(loader))
    loader.close()
    assert str(caught.value).startswith(
        f"reading sample 1 of step 0, row 3 of {tmp_path}/a.jsonl, failed with ValueError: x is 2\n"
    )


def refuse_2(sample: Any) -> Any:
    if sample["x"] == 2:
        raise ValueError("x is 2")
    return sample


def test_addresses_of_another_filesystem(tmp_path: Path) -> None:
    import fsspec

    memory: Any = fsspec.filesystem("memory")
    memory.pipe("/bucket/a/0.jsonl", b'{"x": 1}\n')
    memory.pipe("/bucket/a/1.jsonl", b'{"x": 2}\n')
    jpeg = encode_jpeg(np.zeros((16, 16, 3), np.uint8))
    for name in ("cat/0.jpg", "dog/1.jpg"):
        memory.pipe(f"/bucket/images/{name}", jpeg)
    assert len(open_source("memory://bucket/a/0.jsonl")) == 1
    assert open_source("memory://bucket/a/*.jsonl").read(np.arange(2))["x"].tolist() == [1, 2]
    images: Any = open_source("memory://bucket/images")
    assert (len(images), images.classes) == (2, ("cat", "dog"))
    with TokenWriter(tmp_path, "t", vocab_size=100, end_of_document=99) as writer:
        writer.add(np.arange(41), np.ones(41, np.uint32))
    for name in ("t-00000.bin", "t-00000.idx"):
        memory.pipe(f"/bucket/{name}", (tmp_path / name).read_bytes())
    tokens = open_source("memory://bucket/t-00000.bin", seq_len=8)
    assert tokens.read(np.array([1]))["tokens"].tolist() == [list(range(8, 16))]
    for i in range(2):
        with RecordWriter(tmp_path / f"{i}.rec") as writer:
            writer.write(pack_header(ImageHeader(label=i), jpeg))
        memory.pipe(f"/bucket/records/{i}.rec", (tmp_path / f"{i}.rec").read_bytes())
    records = open_source("memory://bucket/records/*.rec", cache_dir=tmp_path / "own")
    assert records.read(np.arange(2))["targets"].tolist() == [0, 1]
    assert (tmp_path / "own" / "remote").is_dir()
    with pytest.raises(DataError, match=r"memory://bucket/none/\*\.rec, which does not exist"):
        open_source("memory://bucket/none/*.rec")
    memory.pipe("/bucket/a/0.jsonl", b'{"x": 7, "y": 1}\n')
    assert open_source("memory://bucket/a/0.jsonl").read(np.arange(1))["x"].tolist() == [7]
    with pytest.raises(DataError, match="which does not exist"):
        open_source("memory://bucket/none.csv")
    with pytest.raises(DataError, match="nothing was opened"):
        open_source("nothing://bucket/none.csv")


def write_zip(path: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content)


@pytest.mark.parametrize("kind", ["zip", "tar"])
@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("", "../escaped.csv"),
        ("", "../../../escaped.csv"),
        ("", "/escaped.csv"),
        ("", "//escaped.csv"),
        ("", "x/../../escaped.csv"),
        ("x", "x/../../escaped.csv"),
        ("x", "x/../escaped.csv"),
        ("x", "x/y/../../.."),
    ],
)
def test_no_file_of_an_archive_is_written_outside_of_the_cache_folder(
    tmp_path: Path, kind: str, folder: str, name: str
) -> None:
    cache = tmp_path / "cache" / "deep"
    cache.mkdir(parents=True)
    write = {"zip": write_zip, "tar": write_tar}[kind]
    write(tmp_path / f"evil.{kind}", {f"{folder}/a.csv".lstrip("/"): b"x,y\n1,2\n", name: b"x,y\n3,4\n"})
    before = sorted(tmp_path.rglob("*"))
    url = f"{kind}://{folder}::{tmp_path}/evil.{kind}"
    with pytest.raises(DataError) as caught:
        open_source(url, cache_dir=cache)
    (problem,) = caught.value.problems
    assert problem.given.startswith(f"{url} has a file named ")
    assert problem.given.endswith(name.rpartition("/")[2] + "'")
    assert problem.rule == "files are copied below one folder, so their names are relative and do not lead out of it"
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("folder", ["", "t", "t/0.csv"])
def test_a_bomb_in_an_archive_is_not_copied(tmp_path: Path, folder: str) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(1 if folder.endswith("csv") else 40):
            archive.writestr(f"t/{number}.csv", bytes(40 << 20 if folder.endswith("csv") else 1 << 20))
    url = f"zip://{folder}::{tmp_path}/bomb.zip"
    with pytest.raises(DataError) as caught:
        open_source(url, cache_dir=tmp_path / "cache")
    (problem,) = caught.value.problems
    assert re.fullmatch(r".* [\d,]+ compressed bytes, which are 41,943,040 bytes unpacked", problem.given)
    assert problem.rule == "a file of an archive expands 200 times at most, or to 16 MiB"
    assert problem.consequence == "nothing was copied"
    assert [path for path in tmp_path.rglob("*") if path.suffix == ".csv" or ".tmp-" in path.name] == []


def test_files_larger_than_the_disk_are_not_copied(tmp_path: Path) -> None:
    memory: Any = fsspec.filesystem("memory")
    for number in range(3):
        memory.pipe(f"/large/{number}.csv", b"x,y\n1,2\n")
    free, info = shutil.disk_usage(tmp_path).free, type(memory).info

    def says(self: Any, path: str, **more: Any) -> dict[str, Any]:  # each fits, and all of them do not
        facts = info(self, path, **more)
        return facts | ({"size": free // 2} if facts["type"] == "file" and "/large/" in path else {})

    with mock.patch.object(type(memory), "info", says), pytest.raises(DataError, match="bytes free") as caught:
        open_source("memory://large", cache_dir=tmp_path / "cache")
    assert "files behind a URL are copied into a folder with room for them" in str(caught.value)
    assert not (tmp_path / "cache").exists()


def test_a_copy_is_complete_or_absent_follows_no_link_and_overwrites_nothing(tmp_path: Path) -> None:
    memory: Any = fsspec.filesystem("memory")
    memory.pipe("/copied/a.csv", b"x,y\n1,2\n")
    cache, victim = tmp_path / "cache", tmp_path / "victim"
    victim.write_text("mine")
    get, seen = type(memory).get_file, []

    def cut(self: Any, path: str, target: str, **more: Any) -> None:
        get(self, path, target, **more)
        seen.append(mode_of(Path(target)))
        os.truncate(target, 3)

    with (
        umask(0),
        mock.patch.object(type(memory), "get_file", cut),
        pytest.raises(DataError, match="3 of 8 bytes arrived"),
    ):
        local_copies("memory://copied/a.csv", cache)
    assert seen == [FILE] * 3
    assert [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"] == []
    (copy,) = local_copies("memory://copied/a.csv", cache)
    assert copy.read_bytes() == b"x,y\n1,2\n"
    copy.write_bytes(b"x,y\n5,6\n")  # the copy is there: it is not fetched over it again
    assert local_copies("memory://copied/a.csv", cache) == [copy]
    assert copy.read_bytes() == b"x,y\n5,6\n"
    copy.unlink()
    with mock.patch.object(secrets, "token_hex", return_value="0" * 8):  # even where a name is foreseen
        (copy.parent / f".{copy.name}.tmp-{os.getpid()}-{'0' * 8}").symlink_to(victim)
        with pytest.raises(DataError, match="EEXIST"):
            local_copies("memory://copied/a.csv", cache)
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_a_folder_of_an_archive_is_a_source(tmp_path: Path, kind: str) -> None:
    jpeg = encode_jpeg(np.zeros((16, 16, 3), np.uint8))
    write = {"zip": write_zip, "tar": write_tar}[kind]
    write(tmp_path / f"a.{kind}", {"./cat/0.jpg": jpeg, "./dog/1.jpg": jpeg, "t/x.csv": b"x,y\n1,2\n"})
    write(tmp_path / f"b.{kind}", {"cat/0.jpg": jpeg, "dog/1.jpg": jpeg})
    for archive in ("a", "b"):
        url = f"{kind}://{'.' if archive == 'a' else ''}::{tmp_path}/{archive}.{kind}"
        images: Any = open_source(url, cache_dir=tmp_path / "cache")
        assert (len(images), images.classes) == (2, ("cat", "dog")), archive
    table = open_source(f"{kind}://t/x.csv::{tmp_path}/a.{kind}", cache_dir=tmp_path / "cache")
    assert table.read(np.arange(1))["x"].tolist() == [1]


def test_another_archive_under_the_same_address_is_copied_again(tmp_path: Path) -> None:
    for value in (1, 7):
        write_zip(tmp_path / "a.zip", {"t.csv": b"x,y\n%d,2\n" % value})
        fsspec.implementations.zip.ZipFileSystem.clear_instance_cache()
        table = open_source(f"zip://t.csv::{tmp_path}/a.zip", cache_dir=tmp_path / "cache")
        assert table.read(np.arange(1))["x"].tolist() == [value]


def test_an_address_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no.zip").write_bytes(b"not an archive")
    for url, reason in {
        f"zip://a.csv::{tmp_path}/none.zip": "FileNotFoundError",
        f"zip://a.csv::{tmp_path}/no.zip": "BadZipFile",
        f"tar://a.csv::{tmp_path}/none.tar": "FileNotFoundError",
        "nothing://bucket/none.csv": "ValueError: Protocol not known: nothing",
    }.items():
        with pytest.raises(DataError) as caught:
            open_source(url, cache_dir=tmp_path / "cache")
        assert caught.value.problems[0].given.startswith(f"{url}: {reason}")
        assert caught.value.problems[0].consequence == "nothing was opened"
    monkeypatch.setitem(sys.modules, "s3fs", None)
    for suffix in ("csv", "rec"):
        with pytest.raises(ExtraError) as missing:
            open_source(f"s3://x/y.{suffix}", cache_dir=tmp_path / "cache")
        given = missing.value.problems[0].given
        assert given == f"the address 's3://x/y.{suffix}' needs the package 's3fs', which is not installed"


def test_jsonl_over_several_files(tmp_path: Path) -> None:
    for part in range(2):
        lines = [json.dumps({"x": 3 * part + i, "text": f"é{i}"}, ensure_ascii=False) for i in range(3)]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    data = open_source(f"{tmp_path}/*.jsonl")
    assert len(data) == 6
    assert [int(sample["x"]) for sample in data.samples(ORDER)] == ORDER.tolist()
    assert data.samples(ORDER)[2]["text"].tobytes().decode() == "é2"


def test_missing_addresses(tmp_path: Path) -> None:
    (tmp_path / "sh[1]").mkdir()
    with TokenWriter(tmp_path / "sh[1]", "t", vocab_size=100, end_of_document=99) as writer:
        writer.add(np.arange(41), np.ones(41, np.uint32))
    (tmp_path / "sh[1]" / "r-00000-of-00002.rec").touch()
    for name, nearest in (
        ("none.rec", "an address that exists"),
        ("no/*.jsonl", "an address that exists"),
        ("sh[1]/u.bin", "an address that exists"),
        ("sh[1]/t.rec", "an address that exists"),
        ("sh[1]/t.bin", f"{tmp_path}/sh[1]/t-*.bin, the shards of that name"),
        ("sh[1]/r.rec", f"{tmp_path}/sh[1]/r-*.rec, the shards of that name"),
    ):
        with pytest.raises(DataError) as caught:
            open_source(tmp_path / name, seq_len=8)
        assert str(caught.value) == (
            f"{tmp_path}/{name}, which does not exist\n"
            "  rule: an address is that of a file or folder, or a glob that matches some\n"
            "  so:   nothing was opened\n"
            f"  try:  {nearest}"
        )


@pytest.mark.parametrize("shards", [1, 3])
def test_mindrecord(tmp_path: Path, shards: int) -> None:
    path = tmp_path / "a.mindrecord"
    with MindRecordWriter(path, {"x": "int32", "b": "bytes"}, shards=shards) as writer:
        for i in range(6):
            writer.write({"x": i, "b": bytes([i])})
    data = open_source(path if shards == 1 else Path(f"{path}0"), columns={"inputs": "b", "targets": "x"})
    batch = data.read(ORDER)
    assert (batch["inputs"][:, 0] == batch["targets"]).all()
    assert sorted(data.read(np.arange(6))["targets"].tolist()) == list(range(6))


def test_token_shards(tmp_path: Path) -> None:
    with TokenWriter(tmp_path, "t", vocab_size=100, end_of_document=99) as writer:
        writer.add(np.arange(41), np.ones(41, np.uint32))
    data = open_source(tmp_path / "t-00000.bin", seq_len=8)
    assert data.read(np.array([1]))["tokens"].tolist() == [list(range(8, 16))]


def test_image_records_and_folder(tmp_path: Path) -> None:
    jpegs = [encode_jpeg(np.full((16, 16, 3), 40 * i, np.uint8)) for i in range(6)]
    with RecordWriter(tmp_path / "a.rec") as writer:
        for i, jpeg in enumerate(jpegs):
            writer.write(pack_header(ImageHeader(label=i % 2), jpeg))
    for i, jpeg in enumerate(jpegs):
        folder = tmp_path / "images" / "ab"[i // 3]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i}.jpg").write_bytes(jpeg)
    for address, labels in ((tmp_path / "a.rec", [0, 0, 0, 0]), (tmp_path / "images", [1, 0, 0, 1])):
        samples = open_source(address, columns={"image": "image", "label": "targets"}).samples(ORDER)  # type: ignore[attr-defined]
        assert [sample["image"].tobytes() for sample in samples] == [jpegs[i] for i in ORDER]
        assert [int(sample["label"]) for sample in samples] == labels


def test_worker_processes_give_the_same_samples(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"x": {i}}}\n' for i in range(20)))

    def epoch(options: LoaderOptions) -> list[list[int]]:
        loader = Loader(open_source(tmp_path / "a.jsonl"), seed=0, global_batch=5, options=options)
        batches = [batch["x"].tolist() for batch in loader]
        loader.close()
        return batches

    assert epoch(LoaderOptions(num_workers=0)) == epoch(LoaderOptions(num_workers=2, worker_kind="process"))


def test_bad_sources(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n')
    (tmp_path / "bad.jsonl").write_text('{"x": 1}\n{"x": \n')
    (tmp_path / "deep.jsonl").write_text('{"x": ' + "[" * 100_000 + "\n")
    (tmp_path / "a.xls").write_text("x\n1\n")
    with pytest.raises(DataError, match="line 2 at offset 9"):
        open_source(tmp_path / "bad.jsonl")
    assert not list((tmp_path / "cache").rglob("*.rec"))
    with pytest.raises(DataError, match="line 1 at offset 0"):
        open_source(tmp_path / "deep.jsonl")
    with pytest.raises(DataError, match="has no column 'y'"):
        open_source(tmp_path / "a.jsonl", columns={"x": "y"})
    with pytest.raises(DataError, match=r"whose suffix is '\.xls'") as caught:
        open_source(tmp_path / "a.xls")
    assert "\n  rule: training data are .bin token shards, .rec records" in str(caught.value)
    assert "\n  so:   nothing was opened\n" in str(caught.value)
    with pytest.raises(DataError, match="seq_len for"):
        open_source(tmp_path / "a.jsonl", seq_len=8)
