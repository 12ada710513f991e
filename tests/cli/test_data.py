"""``unisono data``: what people see of record files, and exit codes scripts can use."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from commands import Desk

from unisono.cli.data import _listed
from unisono.data.recordio import RecordFile, RecordWriter
from unisono.data.recordio.maintenance import Finding


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with RecordWriter(tmp_path / "a.rec") as writer:
        for number in range(12):
            writer.write(b"%02d" % number * (number + 1), key=number + 5, side={"label": number % 3})
    return tmp_path / "a.rec"


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[70] ^= 1
    path.write_bytes(content)


def test_verify_says_ok_and_bad_and_its_exit_code_too(desk: Desk, path: Path) -> None:
    good = desk.here("data", "verify", str(path))
    assert (good.code, good.out) == (0, f"ok   {path}  12 records, {path.stat().st_size} bytes, checksums written\n")
    damage(path)
    bad = desk.here("data", "verify", str(path))
    assert bad.code == 1
    assert bad.out == (
        f"bad  {path}  12 records, {path.stat().st_size} bytes, checksums written\n"
        f"     {path}: record 4 offset 56 to 76: the bytes do not have their checksum\n"
    )
    found = desk.here("data", "verify", str(path), "--json")
    assert found.code == 1
    (file,) = found.json["files"]
    assert file["findings"] == [
        {"path": str(path), "record": 4, "offset": 56, "end": 76, "what": "the bytes do not have their checksum"}
    ]


def test_the_end_of_a_long_list_says_where_the_rest_is() -> None:
    lines = _listed([Finding(path=Path("a.rec"), what="no bytes")] * 22, "lost records")
    assert lines[-1] == "     and 2 more (--json has all lost records)"


def test_repair_names_what_is_lost(desk: Desk, path: Path, tmp_path: Path) -> None:
    damage(path)
    done = desk.here("data", "repair", str(path), str(tmp_path / "b.rec"))
    assert done.code == 0
    assert done.out == (
        f"{tmp_path}/b.rec: 11 records saved, 0 of them mended, 1 lost\n"
        f"     {path}: record 4 offset 56 to 76: no bytes of the file have its checksum\n"
    )
    assert RecordFile(tmp_path / "b.rec").keys.tolist() == [5, 6, 7, 8, 10, 11, 12, 13, 14, 15, 16]
    again = desk.here("data", "repair", str(path), str(tmp_path / "b.rec"))
    assert again.code == 2
    assert f"{tmp_path}/b.rec, which exists" in again.err


def test_reindex_trusts_the_file(desk: Desk, path: Path) -> None:
    damage(path)
    assert desk.here("data", "reindex", str(path)).out == f"ok   {path}\n"
    assert desk.here("data", "verify", str(path)).code == 0
    (path.parent / "a.idx").write_text("5\t1\n")
    done = desk.here("data", "reindex", str(path), "--json")
    (file,) = done.json["files"]
    assert file["not_kept"] == [f"keys: {path.parent}/a.idx: line 1 says offset 1, where no record begins"]


def test_shard_cuts_and_joins(desk: Desk, path: Path, tmp_path: Path) -> None:
    cut = desk.here("data", "shard", str(path), "--into", str(tmp_path / "part"), "--shards", "5")
    parts = cut.out.split()
    assert [Path(part).name for part in parts] == [f"part-{number:05d}-of-00005.rec" for number in range(5)]
    joined = desk.here("data", "shard", *parts, "--into", str(tmp_path / "whole"), "--json")
    (whole,) = joined.json["files"]
    assert Path(whole).read_bytes() == path.read_bytes()


def test_convert_goes_by_the_suffixes(desk: Desk, path: Path, tmp_path: Path) -> None:
    done = desk.here("data", "convert", str(path), str(tmp_path / "a.mindrecord"))
    assert (done.code, done.out) == (0, f"{tmp_path}/a.mindrecord: 12 rows\n")
    back = desk.here("data", "convert", str(tmp_path / "a.mindrecord"), str(tmp_path / "b.rec"), "--json")
    assert back.json == {"path": f"{tmp_path}/b.rec", "rows": 12}
    assert (tmp_path / "b.rec").read_bytes() == path.read_bytes()
    again = desk.here("data", "convert", str(path), str(tmp_path / "b.rec"))
    assert again.code == 2
    assert "another name, or --overwrite" in again.err


def test_convert_takes_fields_and_says_where_base64_is(desk: Desk, path: Path, tmp_path: Path) -> None:
    table = tmp_path / "a.csv"
    fields = ["--column", "label", "--column", "data"]
    refused = desk.here("data", "convert", str(path), str(table), *fields)
    assert refused.code == 2
    assert "try:  --base64 data; a .jsonl, .parquet or .mindrecord file holds bytes" in refused.err
    done = desk.here("data", "convert", str(path), str(table), *fields, "--base64", "data")
    assert (done.code, done.out) == (0, f"{table}: 12 rows\n")
    assert table.read_text().splitlines()[:3] == ["label,data", "0,MDA=", "1,MDEwMQ=="]
    back = desk.here("data", "convert", str(table), str(tmp_path / "b.rec"), "--base64", "data")
    assert back.code == 0
    assert list(RecordFile(tmp_path / "b.rec")) == list(RecordFile(path))
    inert = desk.here("data", "convert", str(table), str(tmp_path / "b.jsonl"), "--array", "label")
    assert (inert.code, "only tf.Example leaves that open" in inert.err) == (2, True)


def test_inspect_shows_columns_of_arrays(desk: Desk, tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "a.rec") as writer:
        for number in range(3):
            writer.write(b"x", side={"tiles": np.arange(number, dtype=np.uint16)})
    shown = desk.here("data", "inspect", str(tmp_path / "a.rec"))
    assert "side column tiles: arrays of uint16, 0 to 2 values" in shown.out


def test_inspect_and_cat_of_other_formats(desk: Desk, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 1, "box": [0.5, 1.5], "data": {"base64": "AAE="}}\n' * 9)
    shown = desk.here("data", "inspect", str(path))
    assert shown.code == 0
    assert shown.out.splitlines()[:5] == [
        f"{path}: {path.stat().st_size} bytes, rows of 3 fields",
        "field id: int64",
        "field box: float64 [-1]",
        "field data: bytes",
        "  row 0: id 1 (int), box an array of float64 and shape [2], data b'\\x00\\x01' (bytes)",
    ]
    assert len(shown.out.splitlines()) == 9
    told = desk.here("data", "inspect", str(path), "--json").json
    assert told["fields"]["box"] == {"type": "float64", "shape": [-1]}
    assert len(told["first"]) == 5
    row = {"id": 1, "box": [0.5, 1.5], "data": {"base64": "AAE="}}
    assert json.loads(desk.here("data", "cat", str(path), "--index", "8").out) == row
    assert desk.here("data", "cat", str(path), "--index", "0", "--json").json == {"index": 0, "row": row}
    for number in ("9", "-1"):
        none = desk.here("data", "cat", str(path), "--index", number)
        assert none.code == 2
        assert f"row {number} of {path}" in none.err
    path.write_text('{"id": NaN}\n')
    endless = desk.here("data", "cat", str(path), "--index", "0")
    assert (endless.code, "JSON has finite numbers only" in endless.err) == (2, True)


def test_inspect_shows_what_is_in_a_file(desk: Desk, path: Path) -> None:
    shown = desk.here("data", "inspect", str(path))
    assert shown.out.splitlines()[:4] == [
        f"{path}: 12 records, {path.stat().st_size} bytes, checksums written",
        "payloads of 2 to 24 bytes, 13 on average",
        "side column label: int64, 0 to 2",
        "  key        5           2 bytes  3030",
    ]
    values = desk.here("data", "inspect", str(path), "--json").json
    assert values["records"] == 12
    assert values["payload_bytes"] == {"least": 2, "mean": 13, "most": 24}
    assert values["side"] == {"label": {"dtype": "int64", "least": 0, "most": 2}}


def test_cat_writes_a_payload_as_it_is(desk: Desk, path: Path) -> None:
    done = desk.process("data", "cat", str(path), "--index", "3")
    assert (done.code, done.out) == (0, "03" * 4)
    coded = desk.here("data", "cat", str(path), "--index", "-1", "--json").json
    assert base64.b64decode(coded["base64"]) == b"11" * 12
    beyond = desk.here("data", "cat", str(path), "--index", "12")
    assert beyond.code == 2
    assert beyond.err == (
        f"unisono: record 12 of {path}\n"
        "  rule: it holds 12 records, counted from 0\n"
        "  so:   nothing was written\n"
        "  try:  --index 11 is the last one\n"
    )


@pytest.mark.parametrize("verb", ["verify", "reindex", "inspect"])
def test_a_file_that_is_not_there(desk: Desk, tmp_path: Path, verb: str) -> None:
    done = desk.here("data", verb, str(tmp_path / "no.rec"), "--json")
    assert done.code == 2
    assert json.loads(done.out)["problems"][0]["given"] == f"{tmp_path}/no.rec: No such file or directory"
