"""Tables, functions and text become files that their readers read, also after a kill, in little memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unisono.data.convert import Table, open_table, write_table
from unisono.data.convert.formats.table import encode_png
from unisono.data.convert.pack import (
    ImageOptions,
    PackOptions,
    RecordSchema,
    pack_function,
    pack_image_rows,
    pack_images,
    pack_rows,
    pack_text,
)
from unisono.data.image import decode
from unisono.data.mindrecord import MindRecordFile
from unisono.data.recordio import RecordDataset, RecordFile, unpack_header
from unisono.data.tokens.shards import open_tokens
from unisono.errors import DataError

SCHEMA = RecordSchema.parse("id=int32,box=float32[?],text=string")
FUNCTIONS = """
import os, sys, time
import numpy as np

def row(item):
    number = int(item)
    if number == 13:
        raise ValueError("unlucky")
    if number == 5:
        return []
    if number == 6:
        return [{"id": 6, "box": [0.5], "text": "a"}, {"id": 66, "box": [], "text": "b"}]
    return {"id": number, "box": np.arange(number % 3, dtype=np.float32), "text": item}

def rows():
    for number in range(40):
        yield {"id": number, "box": [0.0] * (number % 4), "text": "x" * number}

def slow():
    for row in rows():
        time.sleep(0.02)
        yield row

def big(item):
    return {"raw": bytes(1 << 20)}
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    rows = [{"id": n, "box": [n / 2] * 2, "text": f"té{n}"} for n in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "packing_functions.py").write_text(FUNCTIONS)
    before = list(sys.path)
    yield "packing_functions"
    sys.path[:] = before
    sys.modules.pop("packing_functions", None)


def test_a_payload_and_numbers(table: Path, tmp_path: Path) -> None:
    packed = pack_rows(table, tmp_path / "a.rec", columns={"text": "data", "id": "label"}, payload="data")
    assert packed.num_records == 20
    file = RecordFile(tmp_path / "a.rec")
    assert list(file) == [f"té{n}".encode() for n in range(20)]
    assert file.side["label"].tolist() == list(range(20))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".mindrecord"])
def test_columns_that_are_left_out_may_be_of_any_type(tmp_path: Path, suffix: str) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    prices = pa.array(["1.50", "2.25"]).cast(pa.decimal128(9, 2))
    pq.write_table(pa.table({"price": prices, "id": pa.array([3, 4])}), tmp_path / "a.parquet")
    pack_rows(tmp_path / "a.parquet", tmp_path / f"new{suffix}", columns={"id": "number"})
    assert [dict(row) for row in open_table(tmp_path / f"new{suffix}").rows] == [{"number": 3}, {"number": 4}]


def test_typed_records_are_a_data_set(table: Path, tmp_path: Path) -> None:
    packed = pack_rows(
        table,
        tmp_path / "a.rec",
        schema=RecordSchema.parse("id=int32,box=float32[2],text=string"),
        pack=PackOptions(shard_bytes=99),
    )
    assert len(packed.files) > 2
    layout = RecordSchema.load(tmp_path / "a.rec.schema")
    whole = [layout.decode(record) for path in packed.files for record in RecordFile(path)]
    assert [(row["id"], row["box"].tolist(), row["text"]) for row in whole] == [
        (n, [n / 2] * 2, f"té{n}") for n in range(20)
    ]
    numbers = RecordDataset(packed.files, lambda record: {"box": layout.decode(record)["box"]}, fingerprint="1")
    batch = numbers.read(np.array([3, 19, 0]))
    assert batch["box"].tolist() == [[1.5, 1.5], [9.5, 9.5], [0.0, 0.0]]


def test_mindrecord_with_stated_types(table: Path, tmp_path: Path) -> None:
    packed = pack_rows(
        table, tmp_path / "a.mindrecord", schema=RecordSchema.parse("id=int32,box=float32[2],text=string")
    )
    file = MindRecordFile(packed.files[0])
    assert (file.schema["id"].type, file.schema["box"].type) == ("int32", "float32")
    assert [row["id"] for row in file] == list(range(20))


def test_formats_in_shards_are_a_set_again(table: Path, tmp_path: Path) -> None:
    packed = pack_rows(table, tmp_path / "b.jsonl", pack=PackOptions(shard_bytes=100))
    assert len(packed.files) > 2
    rows = list(open_table(packed.files[0]).rows)
    assert [row["text"] for row in rows] == [f"té{n}" for n in range(20)]


def test_rows_that_do_not_fit_are_listed(table: Path, tmp_path: Path) -> None:
    with table.open("a") as file:
        file.write('{"id": 1099511627776, "box": [], "text": "late"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl: row 20: field 'id', 1099511627776"):
        pack_rows(table, tmp_path / "a.rec", schema=SCHEMA)
    packed = pack_rows(table, tmp_path / "a.rec", schema=SCHEMA, pack=PackOptions(on_error="skip"))
    assert (packed.num_records, packed.bad[0].path) == (20, "a.jsonl: row 20")
    with pytest.raises(DataError, match=r"--on-error skip for rows without payload or schema"):
        pack_rows(table, tmp_path / "c.jsonl", pack=PackOptions(on_error="skip"))
    with pytest.raises(DataError, match=r"payload 'text' for c\.jsonl"):
        pack_rows(table, tmp_path / "c.jsonl", payload="text")
    with pytest.raises(DataError, match=r"whose suffix is '\.txt'"):
        pack_rows(table, tmp_path / "c.txt")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_function_of_items(functions: str, tmp_path: Path, workers: int) -> None:
    items = tmp_path / "items.txt"
    items.write_text("".join(f"{n}\n" for n in range(20)))
    with pytest.raises(DataError, match="13: packing_functions:row raised ValueError: unlucky"):
        pack_function(f"{functions}:row", tmp_path / "a.rec", SCHEMA, items=items, pack=PackOptions(workers=workers))
    packed = pack_function(
        f"{functions}:row", tmp_path / "a.rec", SCHEMA, items=items, pack=PackOptions(workers=workers, on_error="skip")
    )
    assert (packed.num_inputs, packed.num_records, packed.num_empty, len(packed.bad)) == (20, 19, 1, 1)
    rows = [SCHEMA.decode(record) for record in RecordFile(tmp_path / "a.rec")]
    assert [row["id"] for row in rows] == [0, 1, 2, 3, 4, 6, 66, *range(7, 13), *range(14, 20)]
    assert rows[2]["box"].tolist() == [0.0, 1.0]


def test_a_function_that_gives_all(functions: str, tmp_path: Path) -> None:
    pack_function(f"{functions}:rows", tmp_path / "a.rec", SCHEMA)
    assert [SCHEMA.decode(record)["id"] for record in RecordFile(tmp_path / "a.rec")] == list(range(40))
    for name, said in (("nothing", "has no attribute"), ("np", "which is no function"), ("", "not module:function")):
        with pytest.raises(DataError, match=said):
            pack_function(f"{functions}:{name}", tmp_path / "b.rec", SCHEMA)


def test_mindrecord_in_shards_keeps_its_names(table: Path, tmp_path: Path) -> None:
    packed = pack_rows(
        table, tmp_path / "a.mindrecord", columns={"id": "n", "box": "box"}, pack=PackOptions(shard_bytes=300)
    )
    assert [path.name for path in packed.files] == ["a-00000.mindrecord", "a-00001.mindrecord"]
    assert [row["n"] for path in packed.files for row in MindRecordFile(path)] == list(range(20))


def test_a_killed_function_goes_on(functions: str, tmp_path: Path) -> None:
    pack_function(f"{functions}:rows", tmp_path / "a.rec", SCHEMA, pack=PackOptions(shard_bytes=200))
    (tmp_path / "b").mkdir()
    script = (
        "import sys; from pathlib import Path; from unisono.data.convert.pack import PackOptions, RecordSchema, pack_function\n"
        f"pack_function('{functions}:slow', Path(sys.argv[1]), RecordSchema.parse('{SCHEMA.text}'),"
        " pack=PackOptions(shard_bytes=200))"
    )
    target = tmp_path / "b/a.rec"
    process = subprocess.Popen([sys.executable, "-c", script, str(target)])
    journal = target.with_name(f"{target.name}.part") / "all-00001.json"
    while not journal.exists():
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not target.exists()
    pack_function(f"{functions}:slow", target, SCHEMA, pack=PackOptions(shard_bytes=200))
    ours = {path.name: path.read_bytes() for path in tmp_path.glob("a-*")}
    assert ours == {path.name: path.read_bytes() for path in (tmp_path / "b").glob("a-*")}
    assert len(ours) > 4


MEMORY = """
import os, resource, sys
from pathlib import Path
from unisono.data.convert.pack import PackOptions, RecordSchema, pack_function
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
schema = RecordSchema.parse("raw=bytes")
pack_function("packing_functions:big", Path("a.rec"), schema, items=Path("items"), pack=PackOptions(workers=1))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the unit of ru_maxrss is another")
def test_memory_is_bounded(functions: str, tmp_path: Path) -> None:
    (tmp_path / "items").write_text("x\n" * 150)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True
    )
    assert (tmp_path / "a.rec").stat().st_size > 150 << 20
    assert int(done.stdout) < 60 << 10  # KiB: room for some tens of records of 1 MiB, not for all


def texts(paths: Any) -> list[str]:
    tokens = open_tokens(list(paths))
    found: list[str] = []
    for shard in tokens.shards:
        ends = [*shard.starts[1:].tolist(), shard.tokens.size]
        found += [
            bytes(shard.tokens[a : b - 1].astype(np.uint8)).decode()
            for a, b in zip(shard.starts.tolist(), ends, strict=True)
        ]
    return found


def test_text_of_files_lines_and_columns(table: Path, tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("one\r\n\ntwo\n", newline="")
    (folder / "b.txt").write_bytes(b"\xff")
    (folder / "c.txt").write_text("é\u2028x")
    with pytest.raises(DataError, match=r"b.txt: byte 0 is not utf-8"):
        pack_text(folder, tmp_path / "a.bin")
    packed = pack_text(folder, tmp_path / "a.bin", pack=PackOptions(on_error="skip"))
    assert [path.name for path in packed.files] == ["a-00000.bin"]
    assert texts(packed.files) == ["one\r\n\ntwo\n", "é\u2028x"]
    lines = pack_text(folder, tmp_path / "b.bin", lines=True, pack=PackOptions(on_error="skip", shard_bytes=4))
    assert texts(lines.files) == ["one", "two", "é\u2028x"]
    assert (lines.num_inputs, lines.num_records, lines.num_empty, len(lines.bad), len(lines.files)) == (5, 3, 1, 1, 3)
    rows = pack_text(table, tmp_path / "c.bin", column="text")
    assert texts(rows.files) == [f"té{n}" for n in range(20)]
    with pytest.raises(DataError, match="every file of the folder is text to be packed"):
        pack_text(folder, folder / "d.bin")
    with pytest.raises(DataError, match="--text-column NAME; or --lines"):
        pack_text(table, tmp_path / "d.bin")
    with pytest.raises(DataError, match="row 0: 0 \\(int\\), no text"):
        pack_text(table, tmp_path / "d.bin", column="id")


def test_text_goes_on_at_the_first_shard_that_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "lines.txt"
    source.write_text("".join(f"line {n}\n" for n in range(50)))
    pack_text(source, tmp_path / "a.bin", lines=True, pack=PackOptions(shard_bytes=200))

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("unisono.data.convert.pack.pack_job.PartialTarget.write_plan", stop)
        with pytest.raises(KeyboardInterrupt):
            pack_text(source, tmp_path / "b.bin", lines=True, pack=PackOptions(shard_bytes=200))
    shards = sorted((tmp_path / "b.bin.part").glob("all-*/part-00000.bin"))
    os.truncate(shards[2], 10)
    pack_text(source, tmp_path / "b.bin", lines=True, pack=PackOptions(shard_bytes=200))
    assert [path.read_bytes() for path in sorted(tmp_path.glob("a-*"))] == [
        path.read_bytes() for path in sorted(tmp_path.glob("b-*"))
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_images_in_a_tar(album: Path, tmp_path: Path, workers: int) -> None:
    files = sorted(album.glob("*/*.jpg"))
    rows = [{"__key__": f"{n:03d}", "jpg": path.read_bytes(), "cls": n % 3} for n, path in enumerate(files)]
    rows.insert(2, {"__key__": "x", "jpg": b"no image", "cls": 1})
    rows.insert(5, {"__key__": "y", "jpg": files[0].read_bytes(), "cls": 2.5})
    write_table(tmp_path / "a.tar", Table(rows=rows))
    options = ImageOptions(resize=24)
    packed = pack_image_rows(
        tmp_path / "a.tar",
        tmp_path / "a.rec",
        options,
        field="jpg",
        label="cls",
        pack=PackOptions(workers=workers, on_error="skip", shard_bytes=5000),
    )
    assert [each.path for each in packed.bad] == ["a.tar: row 2", "a.tar: row 5"]
    assert "field 'cls' is 2.5 (float), not a label as that of the first row" in packed.bad[1].reason
    pack_images(album, tmp_path / "b.rec", options)
    files_packed = {unpack_header(record)[1].tobytes() for record in RecordFile(tmp_path / "b.rec")}
    records = [unpack_header(record) for path in packed.files for record in RecordFile(path)]
    assert len(packed.files) > 1
    assert [header.id for header, _ in records] == [n for n in range(len(rows)) if n not in (2, 5)]
    assert [header.label for header, _ in records] == [n % 3 for n in range(len(files))]
    assert all(image.tobytes() in files_packed for _, image in records)
    assert RecordFile(packed.files[0]).side["label"].dtype == np.int64
    with pytest.raises(DataError, match=r"a\.tar: row 2: "):
        pack_image_rows(
            tmp_path / "a.tar", tmp_path / "c.rec", field="jpg", label="cls", pack=PackOptions(workers=workers)
        )


def test_pictures_and_labels_of_arrays(tmp_path: Path) -> None:
    rows = [{"image": np.full((9, 8), n, np.uint8), "label": np.array([n, n + 1])} for n in range(3)]
    write_table(tmp_path / "a.parquet", Table(rows=[{**row, "image": encode_png(row["image"])} for row in rows]))
    packed = pack_image_rows(tmp_path / "a.parquet", tmp_path / "a.rec", field="image", label="label")
    file = RecordFile(packed.files[0])
    assert [decode(unpack_header(record)[1])[0, 0, 0] for record in file] == [0, 1, 2]
    assert [row.tolist() for row in file.side["label"].tolist()] == [[0, 1], [1, 2], [2, 3]]
