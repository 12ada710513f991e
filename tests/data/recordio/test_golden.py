"""Files made by Apache MXNet 1.9.1 (tests/peers/make_recordio_fixtures.py): read identically, and written byte for byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from unisono.data.recordio import ImageHeader, RecordFile, RecordWriter, pack_header, unpack_header
from unisono.data.recordio.framing import frame_payload
from unisono.errors import DataError

FIXTURES = Path(__file__).parent / "fixtures"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The fixtures, where indexes may be written beside them."""
    return shutil.copytree(FIXTURES, tmp_path / "mxnet")


def test_payloads_and_keys_read_as_mxnet_reads_them(folder: Path) -> None:
    records = RecordFile(folder / "payloads.rec")
    assert records.keys.tolist() == EXPECTED["keys"]
    wanted = [bytes.fromhex(EXPECTED["payloads"][str(key)]) for key in EXPECTED["keys"]]
    assert [records.read(number) for number in range(len(records))] == wanted
    assert [records.read_key(key) for key in EXPECTED["keys"]] == wanted
    assert list(records) == wanted
    assert [bytes(view) for view in records.views(range(len(records)))] == wanted
    assert [bytes(each) for each in records.read_many(np.arange(len(records)))] == wanted


def test_the_same_payloads_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "ours.rec") as writer:
        for key in EXPECTED["keys"]:
            writer.write(bytes.fromhex(EXPECTED["payloads"][str(key)]), key=key)
    assert (tmp_path / "ours.rec").read_bytes() == (folder / "payloads.rec").read_bytes()
    assert (tmp_path / "ours.idx").read_bytes() == (folder / "payloads.idx").read_bytes()


def test_image_records_have_their_labels_and_pictures(folder: Path, tmp_path: Path) -> None:
    records = RecordFile(folder / "images.rec")
    assert len(records) == len(EXPECTED["images"])
    with RecordWriter(tmp_path / "ours.rec") as writer:
        for number, wanted in enumerate(EXPECTED["images"]):
            header, payload = unpack_header(records.view(number))
            assert (header.id, header.id2) == (wanted["id"], wanted["id2"])
            assert np.array_equal(np.ravel(header.label), np.array(wanted["label"], np.float32))
            assert isinstance(header.label, float) == (wanted["flag"] == 0)
            assert bytes(payload) == bytes.fromhex(wanted["payload"])
            writer.write(pack_header(header, bytes(payload)))
    assert (tmp_path / "ours.rec").read_bytes() == (folder / "images.rec").read_bytes()


def test_the_index_names_records_by_their_place_in_it_not_in_the_file(folder: Path) -> None:
    """An .idx may leave records out and list them in any order: MXNet's samples are its lines."""
    lines = (folder / "payloads.idx").read_text().splitlines()
    chosen = [lines[5], lines[40], lines[2]]
    (folder / "payloads.idx").write_text("\n".join(chosen) + "\n")
    records = RecordFile(folder / "payloads.rec")
    keys = [int(line.split()[0]) for line in chosen]
    assert records.keys.tolist() == keys
    assert list(records) == [bytes.fromhex(EXPECTED["payloads"][str(key)]) for key in keys]


@pytest.mark.parametrize(
    ("payload", "written"),
    [
        ("", "0a23d7ce00000000"),
        ("616263", "0a23d7ce0300000061626300"),
        ("61626364", "0a23d7ce0400000061626364"),
        ("0a23d7ce", "0a23d7ce000000200a23d7ce00000060"),
        ("580a23d7ce", "0a23d7ce05000000580a23d7ce000000"),
        ("414243440a23d7ce4546", "0a23d7ce04000020414243440a23d7ce0200006045460000"),
        ("0a23d7ce0a23d7ce", "0a23d7ce000000200a23d7ce000000400a23d7ce00000060"),
    ],
)
def test_known_vectors(payload: str, written: str) -> None:
    assert b"".join(frame_payload(bytes.fromhex(payload))).hex() == written


def test_header_vectors() -> None:
    assert pack_header(ImageHeader(label=4.0, id=2574), b"").hex() == (
        "00000000000080400e0a000000000000" + "0000000000000000"
    )
    several = pack_header(ImageHeader(label=np.array([1, 2, 3], np.float32)), b"x")
    assert len(several) == 36 + 1
    assert several[:8].hex() == "0300000000000000"


def test_a_record_of_2_to_the_29_bytes_is_refused(tmp_path: Path) -> None:
    class Long(bytes):
        def __len__(self) -> int:
            return 1 << 29

    with RecordWriter(tmp_path / "a.rec") as writer:
        with pytest.raises(DataError) as caught:
            writer.write(Long())
        writer.write(b"short")
    assert str(caught.value) == (
        "a record of 536870912 bytes\n"
        "  rule: RecordIO keeps a length in 29 bits: a record has at most 536870911 bytes\n"
        "  so:   it was not written\n"
        "  try:  cut it into several records, or store it in a file of its own and its path here"
    )
    assert list(RecordFile(tmp_path / "a.rec")) == [b"short"]


@pytest.mark.parametrize("record", [b"", bytes(23), bytes.fromhex("ffffffff") + bytes(20), b"\x02" + bytes(26)])
def test_a_record_that_is_no_image_record_says_so(record: bytes) -> None:
    with pytest.raises(DataError) as caught:
        unpack_header(record)
    assert f"a record of {len(record)} bytes" in str(caught.value)
    assert "it is not known where the image begins" in str(caught.value)
