"""``unisono data`` on a file of each kind, under its own name and under another, healthy and damaged."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from commands import Desk

from unisono.data.mindrecord import MindRecordWriter
from unisono.data.recordio import RecordWriter

MINDSPORE = Path(__file__).parents[1] / "data/mindrecord/fixtures"


def mindspore_file(folder: Path, name: str) -> Path:
    """A file that MindSpore wrote, and its index."""
    for part in (name, f"{name}.db"):
        (folder / part).write_bytes(gzip.decompress((MINDSPORE / f"{part}.gz").read_bytes()))
    return folder / name


@pytest.fixture
def shard(desk: Desk, tmp_path: Path) -> Path:
    """A token shard of three documents."""
    (tmp_path / "a.txt").write_text("1\n22\n333\n")
    done = desk.here("data", "pack", str(tmp_path / "a.txt"), str(tmp_path / "t.bin"), "--lines")
    assert done.code == 0, done.err
    return tmp_path / "t-00000.bin"


def listing(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["pages", "shards1", "scalars", "packed", "noblob", "empty2"])
def test_verify_of_what_mindspore_wrote(desk: Desk, tmp_path: Path, name: str) -> None:
    path = mindspore_file(tmp_path, name)
    expected = json.loads((MINDSPORE / "expected.json").read_text())["cases"]
    rows = next(len(case["read"][name]) for case in expected.values() if name in case["read"])
    done = desk.here("data", "verify", str(path))
    assert done.code == 0, done.err
    assert done.out == (
        f"ok   {path}  {rows:,} records, {path.stat().st_size:,} bytes, no checksums: changed payloads cannot be seen\n"
    )


def test_verify_names_the_row_of_a_damaged_mindrecord(desk: Desk, tmp_path: Path) -> None:
    with MindRecordWriter(tmp_path / "a.mindrecord", {"text": "string"}) as writer:
        for number in range(20):
            writer.write({"text": f"text {number}"})
    path = tmp_path / "a.mindrecord"
    content = bytearray(path.read_bytes())
    begin = content.index(b"text 12")
    content[begin : begin + 7] = b"\xff" * 7
    path.write_bytes(content)
    (file,) = desk.here("data", "verify", str(path), "--json").json["files"]
    (finding,) = file["findings"]
    assert (file["ok"], file["records"], finding["record"]) == (False, 20, 12)
    assert finding["what"].startswith("row 12 at offset ")
    (path.parent / "a.mindrecord.db").write_bytes(b"no index")
    bad = desk.here("data", "verify", str(path))
    assert (bad.code, "a.mindrecord.db" in bad.out) == (1, True)
    path.write_bytes(b"")
    assert desk.here("data", "verify", str(path)).code == 1


def test_verify_of_an_encrypted_mindrecord_asks_for_its_key(desk: Desk, tmp_path: Path) -> None:
    path = mindspore_file(tmp_path, "encrypted")
    done = desk.here("data", "verify", str(path))
    assert done.code == 2
    assert done.err == (
        f"unisono: {path}, which is encrypted\n"
        "  rule: verify reads the rows, and they need the key of MindSpore's set_enc_key\n"
        "  so:   nothing was read\n"
        "  try:  MindRecordFile(path, key=...) in Python\n"
    )


def test_token_shards(desk: Desk, shard: Path) -> None:
    done = desk.here("data", "verify", str(shard))
    assert (done.code, done.out) == (0, f"ok   {shard}  3 records, 18 bytes, checksums written\n")
    shown = desk.here("data", "inspect", str(shard)).out.splitlines()
    assert shown == [
        f"{shard}: token shard, 9 tokens of 6 bytes of text",
        "3 documents, each ended by id 256 of a vocabulary of 257",
        "  document 0: 49",
        "  document 1: 50 50",
        "  document 2: 51 51 51",
    ]
    assert desk.here("data", "inspect", str(shard), "--json").json["vocab_size"] == 257
    assert json.loads(desk.here("data", "cat", str(shard), "--index", "-1").out) == [51, 51, 51]
    beyond = desk.here("data", "cat", str(shard), "--index", "3")
    assert (beyond.code, "it holds 3 documents, counted from 0" in beyond.err) == (2, True)
    (rate,) = desk.here("data", "bench", str(shard), "--seconds", "0.05", "--json").json["rates"]
    assert (rate["what"], rate["per_s"] > 0) == ("random windows of 8 tokens", True)
    flip(shard, 3)
    bad = desk.here("data", "verify", str(shard))
    assert bad.code == 1
    assert "the payload beside it does not match its digest" in bad.out
    shard.write_bytes(shard.read_bytes()[:-2])
    cut = desk.here("data", "verify", str(shard))
    assert (cut.code, "it has 16 bytes where its sidecar says 18" in cut.out) == (1, True)


@pytest.mark.parametrize("verb", ["repair", "reindex", "shard", "stats"])
def test_verbs_of_other_kinds_refuse_and_write_nothing(desk: Desk, shard: Path, tmp_path: Path, verb: str) -> None:
    path = mindspore_file(tmp_path, "pages")
    (tmp_path / "b.jsonl").write_text('{"a": 1}\n')
    before = listing(tmp_path)
    names = {path: "a MindRecord file", shard: "a token shard", tmp_path / "b.jsonl": "a table (.jsonl)"}
    if verb == "stats":
        del names[shard]
    more = {"repair": [str(tmp_path / "new.rec")], "shard": ["--into", str(tmp_path / "new")]}
    for file, name in names.items():
        done = desk.here("data", verb, str(file), *more.get(verb, []))
        assert done.code == 2, done.out
        assert done.err.startswith(f"unisono: {file}, which is {name}\n  rule: {verb} works on RecordIO files"), (
            done.err
        )
        assert "  so:   nothing was read or written\n  try:  " in done.err
    assert listing(tmp_path) == before


@pytest.mark.parametrize("verb", ["verify", "repair", "reindex", "shard", "stats", "bench", "inspect", "cat"])
def test_unknown_files_folders_and_indexes_are_refused(desk: Desk, shard: Path, tmp_path: Path, verb: str) -> None:
    mindspore_file(tmp_path, "pages")
    (tmp_path / "photo.jpg").write_bytes(bytes(range(256)))
    before = listing(tmp_path)
    more = {"repair": [str(tmp_path / "new.rec")], "shard": ["--into", str(tmp_path / "new")], "cat": ["--index", "0"]}
    said = {
        tmp_path / "photo.jpg": "content and suffix '.jpg' are of no known kind",
        tmp_path / "pages.db": "which is an index",
        shard.with_suffix(".idx"): "which is an index",
        tmp_path: "Is a directory",
    }
    for file, words in said.items():
        done = desk.here("data", verb, str(file), *more.get(verb, []))
        assert (done.code, words in done.err, "  try:  " in done.err) == (2, True, True), done.err
    assert {path.name for path in tmp_path.iterdir()} == before.keys()


def test_repair_that_saves_nothing_writes_nothing(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "a.rec").write_bytes(bytes(range(1, 201)))
    done = desk.here("data", "repair", str(tmp_path / "a.rec"), str(tmp_path / "b.rec"))
    assert done.code == 2
    assert done.err == (
        f"unisono: {tmp_path}/a.rec, 200 bytes in which no record was found\n"
        "  rule: repair copies the records whose checksum or framing is intact\n"
        "  so:   nothing was written\n"
        "  try:  a whole copy of the file, or the source that it was written from\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["a.rec"]


def test_records_and_mindrecords_under_other_names(desk: Desk, tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "a.rec") as writer:
        for number in range(4):
            writer.write(b"%d" % number)
    (tmp_path / "plain").write_bytes((tmp_path / "a.rec").read_bytes())
    assert desk.here("data", "verify", str(tmp_path / "plain")).out.startswith(f"ok   {tmp_path}/plain  4 records")
    path = mindspore_file(tmp_path, "shards0")
    for name in ("shards1", "shards2"):
        mindspore_file(tmp_path, name)
    done = desk.here("data", "convert", str(path), str(tmp_path / "b.jsonl"))
    assert done.code == 0, done.err
    rows = (tmp_path / "b.jsonl").read_text().splitlines()
    assert json.loads(desk.here("data", "cat", str(path), "--index", "2").out) == json.loads(rows[2])
    rates = desk.here("data", "bench", str(path), "--seconds", "0.05", "--json").json["rates"]
    assert [rate["what"] for rate in rates] == ["random rows, first pass", "random rows"]


def test_verify_and_bench_of_tables(desk: Desk, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    assert desk.here("data", "verify", str(path)).out.startswith(f"ok   {path}  2 records, 18 bytes, no checksums")
    (rate,) = desk.here("data", "bench", str(path), "--seconds", "0.05", "--json").json["rates"]
    assert (rate["what"], rate["per_s"] > 0) == ("rows in order, one pass", True)
    path.write_text('{"a": 1}\n{"a": \n')
    bad = desk.here("data", "verify", str(path))
    assert bad.code == 1
    assert bad.out.startswith(f"bad  {path}  1 records")


def test_values_that_no_row_can_hold_are_no_damage(desk: Desk, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "a.jsonl").write_text('{"text": "a", "meta": {"n": 1}}\n{"text": "b", "meta": null}\n')
    prices = pa.array(["1.50", None]).cast(pa.decimal128(9, 2))
    pq.write_table(pa.table({"text": ["a", "b"], "price": prices}), tmp_path / "a.parquet")
    files = [str(tmp_path / name) for name in ("a.jsonl", "a.parquet")]
    done = desk.here("data", "verify", *files, "--json")
    assert done.code == 0, done.out
    assert [(file["ok"], file["records"]) for file in json.loads(done.out)["files"]] == [(True, 2)] * 2
    for file, name, kind in ((files[0], "meta", "object"), (files[1], "price", "decimal128(9, 2)")):
        done = desk.here("data", "inspect", file)
        assert (done.code, done.err) == (0, "")
        assert f"field {name}: {kind}" in done.out
        assert "field text: string" in done.out
        done = desk.here("data", "inspect", file, "--json")
        assert json.loads(done.out)["fields"][name] == {"type": kind, "shape": None}


def test_verify_finds_damage_in_columns_that_no_row_can_hold(desk: Desk, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "a.jsonl").write_text('{"a": 1, "b": {"base64": "?"}}\n{"a": 2}\n')
    prices = pa.array([f"{n}.50" for n in range(999)]).cast(pa.decimal128(9, 2))
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"price": prices}), path, write_page_checksum=True, compression="none", use_dictionary=False
    )
    flip(path, path.stat().st_size // 2)
    done = desk.here("data", "verify", str(tmp_path / "a.jsonl"), str(path))
    assert done.code == 1
    assert done.out.count("bad  ") == 2
    assert "base64" in done.out


def test_a_token_shard_is_not_converted(desk: Desk, shard: Path, tmp_path: Path) -> None:
    done = desk.here("data", "convert", str(shard), str(tmp_path / "b.jsonl"))
    assert (done.code, f"{shard}, a token shard" in done.err) == (2, True)
    assert not (tmp_path / "b.jsonl").exists()
