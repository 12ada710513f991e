"""Verify finds all damage, repair saves what is whole, reindex trusts the file, rearrange loses nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from unisono.data.recordio import RecordFile, RecordWriter
from unisono.data.recordio.framing import MAGIC_BYTES
from unisono.data.recordio.maintenance import rearrange, reindex, repair, verify
from unisono.errors import DataError

COUNT, SIZE = 30, 100


def payload(number: int) -> bytes:
    """Every fifth record is split in the file."""
    body = bytes([number]) * SIZE
    return body[:40] + MAGIC_BYTES + body[44:] if number % 5 == 0 else body


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with RecordWriter(tmp_path / "a.rec") as writer:
        for number in range(COUNT):
            writer.write(payload(number), key=100 + number, side={"label": number % 3})
    return tmp_path / "a.rec"


def offsets_of(path: Path) -> list[int]:
    return [int(line.split("\t")[1]) for line in path.with_suffix(".idx").read_text().splitlines()]


def change(path: Path, at: int, new: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(new)] = new
    path.write_bytes(content)


def test_a_good_file_verifies(path: Path) -> None:
    found = verify(path)
    assert (found.records, found.bytes, found.checksums) == (COUNT, path.stat().st_size, "written")
    assert found.findings == []


def test_verify_names_record_and_place(path: Path) -> None:
    offsets = offsets_of(path)
    change(path, offsets[3] + 50, b"!")  # a payload byte
    change(path, offsets[7], b"!")  # a magic word
    change(path, offsets[10] + 8 + 40, b"!!!!")  # the second magic word of a split record
    found = verify(path)
    assert [str(each) for each in found.findings] == [
        f"{path}: record 3 offset {offsets[3]} to {offsets[4]}: the bytes do not have their checksum",
        f"{path}: record 7 offset {offsets[7]} to {offsets[7] + 8}: its head has changed",
        f"{path}: record 10 offset {offsets[10]} to {offsets[10] + 8 + SIZE}: the bytes do not have their checksum",
    ]


def test_verify_without_a_sidecar_sees_the_framing_only(path: Path) -> None:
    offsets = offsets_of(path)
    path.with_suffix(".uidx").unlink()
    change(path, offsets[3] + 50, b"!")
    assert verify(path).findings == []
    assert verify(path).checksums == ""
    change(path, offsets[7] + 4, b"\xff")
    (finding,) = verify(path).findings
    assert (finding.offset, finding.end) == (offsets[7], offsets[8])
    assert "says 255 bytes, and another part begins inside it" in finding.what


def test_verify_reads_both_indexes(path: Path) -> None:
    lines = path.with_suffix(".idx").read_text().splitlines()
    path.with_suffix(".idx").write_text("\n".join([*lines[:3], "7\t12", "rubbish", *lines[3:]]) + "\n")
    assert [finding.what for finding in verify(path).findings] == [
        "line 4 says offset 12, where no record begins",
        "line 5 is not a key, a tab and an offset",
    ]
    path.with_suffix(".idx").write_text("\n".join([*lines, f"{'7' * 5000}\t0", f"1\t{1 << 63}"]) + "\n")
    assert [finding.what for finding in verify(path).findings] == [
        f"line {len(lines) + number} is not a key, a tab and an offset" for number in (1, 2)
    ]
    content = bytearray(path.with_suffix(".uidx").read_bytes())
    content[-200] ^= 1
    path.with_suffix(".uidx").write_bytes(content)
    assert "does not match its digest, so the checksums cannot be used" in verify(path).findings[0].what


def test_repair_with_checksums_saves_every_payload_that_is_whole(path: Path, tmp_path: Path) -> None:
    offsets = offsets_of(path)
    change(path, offsets[3] + 50, b"!")
    change(path, offsets[7], b"????")
    change(path, offsets[12] + 4, b"\xff\xff\xff\xff")  # magic and length may say anything
    change(path, offsets[20] + 4, b"\0\0")
    path.write_bytes(path.read_bytes()[: offsets[28] + 20])
    with pytest.raises(DataError):
        RecordFile(path)
    before = path.read_bytes()
    result = repair(path, tmp_path / "b.rec")
    assert path.read_bytes() == before
    lost = {3, 20, 28, 29}  # 20 is split: its parts cannot be told without their lengths
    assert {finding.record for finding in result.lost} == lost
    assert (result.saved, result.mended) == (COUNT - len(lost), 2)
    saved = RecordFile(tmp_path / "b.rec")
    kept = [number for number in range(COUNT) if number not in lost]
    assert list(saved) == [payload(number) for number in kept]
    assert saved.keys.tolist() == [100 + number for number in kept]
    assert saved.side["label"].tolist() == [number % 3 for number in kept]
    assert verify(tmp_path / "b.rec").findings == []


def test_repair_finds_records_that_have_moved(path: Path, tmp_path: Path) -> None:
    offsets = offsets_of(path)
    content = path.read_bytes()
    path.write_bytes(content[: offsets[5]] + b"!!!!" * 7 + content[offsets[6] :])
    result = repair(path, tmp_path / "b.rec")
    assert [finding.record for finding in result.lost] == [5]
    assert list(RecordFile(tmp_path / "b.rec")) == [payload(number) for number in range(COUNT) if number != 5]


def test_repair_without_checksums_goes_by_the_framing(path: Path, tmp_path: Path) -> None:
    offsets = offsets_of(path)
    path.with_suffix(".uidx").unlink()
    change(path, offsets[7], b"????")  # 6 seems to end nowhere, and both follow from their lengths
    change(path, offsets[12] + 4, b"\xff")
    result = repair(path, tmp_path / "b.rec")
    assert [(finding.offset, finding.end) for finding in result.lost] == [(offsets[12], offsets[13])]
    assert (result.saved, result.mended) == (COUNT - 1, 2)
    saved = RecordFile(tmp_path / "b.rec")
    assert list(saved) == [payload(number) for number in range(COUNT) if number != 12]
    assert saved.keys.tolist() == [100 + number for number in range(COUNT) if number != 12]


def test_repair_never_writes_over_what_it_reads(path: Path) -> None:
    with pytest.raises(DataError) as caught:
        repair(path, path.parent / "." / path.name)
    assert "what is damaged is evidence: it stays as it is" in str(caught.value)
    assert f"{path.parent}/a-repaired.rec" in str(caught.value)


def test_reindex_trusts_the_file_and_keeps_keys_and_columns(path: Path) -> None:
    change(path, offsets_of(path)[3] + 50, b"!")
    assert verify(path).findings
    assert reindex(path) == []
    assert verify(path).findings == []
    records = RecordFile(path)
    assert records.checksums == "computed later"
    assert records.read(3) != payload(3)
    assert records.keys.tolist() == [100 + number for number in range(COUNT)]
    assert records.side["label"].tolist() == [number % 3 for number in range(COUNT)]


def test_reindex_says_what_it_could_not_keep(path: Path) -> None:
    lines = path.with_suffix(".idx").read_text()
    path.with_suffix(".idx").write_text("7\t12\n" + lines)
    content = bytearray(path.with_suffix(".uidx").read_bytes())
    content[-200] ^= 1
    path.with_suffix(".uidx").write_bytes(content)
    dropped = reindex(path)
    assert any(each.startswith("the old sidecar: column ") for each in dropped)
    assert any("line 1 says offset 12, where no record begins" in each for each in dropped)
    assert (path.parent / "a.idx.old").read_text() == "7\t12\n" + lines
    records = RecordFile(path)
    assert list(records.keys) == list(range(COUNT))
    assert list(records) == [payload(number) for number in range(COUNT)]


def test_reindex_of_a_damaged_file_changes_nothing(path: Path) -> None:
    before = {each.name: each.read_bytes() for each in path.parent.iterdir() if each.name != "a.rec"}
    change(path, offsets_of(path)[3], b"!")
    with pytest.raises(DataError, match="cannot be read"):
        reindex(path)
    assert {each.name: each.read_bytes() for each in path.parent.iterdir() if each.name != "a.rec"} == before


@pytest.mark.parametrize("shards", [1, 4, 7, COUNT])
def test_splitting_and_merging_lose_no_record(path: Path, tmp_path: Path, shards: int) -> None:
    parts = rearrange([path], tmp_path / "part", shards)
    sizes = [len(RecordFile(part)) for part in parts]
    assert sum(sizes) == COUNT
    assert max(sizes) - min(sizes) <= 1
    (whole,) = rearrange(parts, tmp_path / "whole", 1)
    assert whole.read_bytes() == path.read_bytes()
    assert whole.with_suffix(".idx").read_bytes() == path.with_suffix(".idx").read_bytes()
    assert RecordFile(whole).side["label"].tolist() == [number % 3 for number in range(COUNT)]


def test_merging_files_of_equal_keys_counts_anew(path: Path, tmp_path: Path) -> None:
    (merged,) = rearrange([path, path], tmp_path / "twice", 1)
    records = RecordFile(merged)
    assert list(records.keys) == list(range(2 * COUNT))
    assert list(records) == 2 * [payload(number) for number in range(COUNT)]


def test_more_shards_than_records_are_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        rearrange([path], tmp_path / "part", COUNT + 1)
    assert f"{COUNT + 1} shards of {COUNT} records" in str(caught.value)
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith("part")] == []


def test_no_files_is_an_error_not_a_crash(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1 shards of 0 records"):
        rearrange([], tmp_path / "part", 1)


def test_repaired_numbers_are_numpy_free(path: Path, tmp_path: Path) -> None:
    result = repair(path, tmp_path / "b.rec")
    assert (result.saved, result.mended, result.lost) == (COUNT, 0, [])
    assert not isinstance(result.saved, np.generic)
