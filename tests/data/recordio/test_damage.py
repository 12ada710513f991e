"""Damage is never silent: cut at every byte, every field damaged, every bit flipped, and sidecars that lie."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.recordio import RecordFile, RecordWriter
from unisono.data.recordio.framing import MAGIC_BYTES
from unisono.data.recordio.index import COMPUTED, map_file, read_columns, write_index
from unisono.data.recordio.maintenance import reindex, verify
from unisono.errors import DataError

PAYLOADS = [
    b"",
    b"a",
    b"four",
    MAGIC_BYTES,
    b"1234" + MAGIC_BYTES + b"56",
    b"x" * 37,
    MAGIC_BYTES * 3 + b"end",
    b"y" * 60,
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with RecordWriter(tmp_path / "a.rec") as writer:
        for payload in PAYLOADS:
            writer.write(payload)
    return tmp_path / "a.rec"


def without_indexes(path: Path, content: bytes) -> Path:
    bare = path.with_name("bare.rec")
    bare.write_bytes(content)
    for suffix in (".idx", ".uidx"):
        bare.with_suffix(suffix).unlink(missing_ok=True)
    return bare


def test_cut_at_every_byte(path: Path) -> None:
    """With the sidecar every cut is an error; without one, a cut between records is a shorter file and no other is."""
    whole = path.read_bytes()
    offsets = [int(line.split(b"\t")[1]) for line in path.with_suffix(".idx").read_bytes().splitlines()]
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=f"has {size} bytes where its sidecar says {len(whole)}"):
            RecordFile(path)
        bare = without_indexes(path, whole[:size])
        if size in offsets:
            assert list(RecordFile(bare)) == PAYLOADS[: offsets.index(size)]
            continue
        with pytest.raises(DataError) as caught:
            RecordFile(bare)
        broken = max(offset for offset in offsets if offset < size)
        assert f"bytes {broken} to {size} cannot be read" in str(caught.value)


def test_a_cut_between_the_parts_of_a_record_is_damage(path: Path) -> None:
    """MXNet takes the end of the file there for the end of the record, and drops it without a word."""
    with RecordWriter(path, overwrite=True) as writer:
        writer.write(b"ABCD" + MAGIC_BYTES + b"EF")
    bare = without_indexes(path, path.read_bytes()[:12])
    with pytest.raises(DataError) as caught:
        RecordFile(bare)
    assert str(caught.value) == (
        f"{bare}: the record at offset 0 has no last part: the next record, or the end, comes first\n"
        "  rule: every byte of a RecordIO file belongs to a record\n"
        "  so:   bytes 0 to 12 cannot be read, and nothing of the file is used\n"
        f"  try:  unisono data verify {bare} lists all damage, unisono data repair {bare} NEW saves what is whole"
    )


def test_every_flipped_bit_is_named(path: Path) -> None:
    with RecordWriter(path, overwrite=True) as writer:
        for payload in (b"abc", b"1234" + MAGIC_BYTES + b"56", b"", b"wxyz"):
            writer.write(payload)
    whole = path.read_bytes()
    offsets = [int(line.split(b"\t")[1]) for line in path.with_suffix(".idx").read_bytes().splitlines()]
    for bit in range(8 * len(whole)):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        findings = verify(path).findings
        assert findings, f"bit {bit} was missed"
        # the record that holds the byte is named, by number or by its offset
        holder = max(number for number, offset in enumerate(offsets) if offset <= bit // 8)
        assert any(finding.record == holder or finding.offset <= bit // 8 < finding.end for finding in findings), (
            f"bit {bit} of record {holder}: {findings}"
        )


def test_a_flipped_payload_bit_is_an_error_when_it_is_read(tmp_path: Path) -> None:
    payloads = [bytes([number]) * 5000 for number in range(20)]
    with RecordWriter(tmp_path / "a.rec") as writer:
        for payload in payloads:
            writer.write(payload)
    content = bytearray((tmp_path / "a.rec").read_bytes())
    offset = int((tmp_path / "a.idx").read_text().splitlines()[9].split("\t")[1])
    content[offset + 2000] ^= 4
    (tmp_path / "a.rec").write_bytes(content)
    for way in (
        lambda file: file.read(9),
        lambda file: file.view(9),
        lambda file: file.views([8, 9]),
        lambda file: file.read_many([9, 9]),
        lambda file: list(file),
    ):
        records = RecordFile(tmp_path / "a.rec")
        for _ in range(2):  # seen once is not seen as good
            with pytest.raises(DataError) as caught:
                way(records)
            assert str(caught.value) == (
                f"{tmp_path}/a.rec: record 9 at offset {offset}: its 5000 bytes do not have their checksum\n"
                "  rule: a record is read as it was written, every byte\n"
                "  so:   it is not used\n"
                f"  try:  unisono data verify {tmp_path}/a.rec lists all damage, "
                f"unisono data repair {tmp_path}/a.rec NEW saves what is whole"
            )
        assert records.read(8) == payloads[8]
    unchecked = RecordFile(tmp_path / "a.rec", check="never")
    assert unchecked.read(9) != payloads[9]
    assert len(unchecked.read(9)) == 5000


def test_damage_after_the_first_look_is_seen_by_always(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "a.rec") as writer:
        writer.write(b"a" * 10_000)
        writer.write(b"b" * 10_000)
    first, always = (RecordFile(tmp_path / "a.rec", check=check) for check in ("first", "always"))
    assert first.read(0) == always.read(0)
    with (tmp_path / "a.rec").open("r+b") as file:  # in place: the same pages that are mapped
        file.seek(5000)
        file.write(b"!")
    assert first.read(0)[5000 - 8 : 5001 - 8] == b"!"
    with pytest.raises(DataError, match="record 0 at offset 0: its 10000 bytes do not have their checksum"):
        always.read(0)


@pytest.mark.parametrize("length", [1 << 28, (1 << 29) - 1])
def test_a_length_beyond_the_file_allocates_nothing(path: Path, length: int) -> None:
    bare = without_indexes(path, MAGIC_BYTES + struct.pack("<I", length) + b"data")
    with pytest.raises(DataError, match=f"the part at offset 0 says {length} bytes, and the file ends"):
        RecordFile(bare)


def test_a_bare_file_with_any_byte_of_a_head_changed_is_read_as_written_or_refused(path: Path) -> None:
    """Without checksums a change inside a payload cannot be seen; a change of the framing must be."""
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    heads = [at for at in range(0, len(whole), 4) if whole[at : at + 4] == MAGIC_BYTES]
    refused = 0
    for at in (head + byte for head in heads for byte in range(8)):
        for value in {0, 1, 2, 4, 0x20, 0x40, 0x60, 0xFF, int(rng.integers(256))} - {whole[at]}:
            content = bytearray(whole)
            content[at] = value
            bare = without_indexes(path, bytes(content))
            try:
                found = list(RecordFile(bare))
            except DataError:
                refused += 1
            else:
                # a length that grows into its own padding gives the payload with zeros behind it: nothing can tell
                assert [payload.rstrip(b"\0") for payload in found] == [p.rstrip(b"\0") for p in PAYLOADS]
    assert refused > 8 * 8 * len(heads) * 0.9


@settings(max_examples=200, deadline=None)
@given(
    content=st.binary(max_size=200), words=st.lists(st.sampled_from([MAGIC_BYTES, bytes(4), b"\4\0\0\0"]), max_size=12)
)
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, words: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("any") / "a.rec"
    path.write_bytes(b"".join(words) + content)
    try:
        records = list(RecordFile(path))
    except DataError:
        return
    with RecordWriter(path.with_name("again.rec")) as writer:
        for payload in records:
            writer.write(payload)
    assert path.with_name("again.rec").read_bytes() == path.read_bytes()


def test_a_sidecar_of_another_file_is_refused(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        RecordFile(path)
    assert str(caught.value) == (
        f"{path} does not begin or end with the bytes that its sidecar says\n"
        "  rule: a sidecar is of exactly the file beside it\n"
        "  so:   one of the two was changed or damaged, and nothing of the file is used\n"
        f"  try:  unisono data verify {path} lists the damaged records; "
        f"unisono data reindex {path} trusts the file as it is"
    )
    assert path.with_suffix(".uidx").exists()


def test_a_sidecar_that_lies_leads_nowhere(path: Path) -> None:
    """Its columns are not read when it is opened; whatever they say, no other bytes come out."""
    sidecar = path.with_suffix(".uidx")
    whole = sidecar.read_bytes()
    rng = np.random.default_rng(0)
    begin = whole.index(b"{")
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(int(rng.integers(1, 4))):
            content[int(rng.integers(begin, len(content)))] = int(rng.integers(256))
        sidecar.write_bytes(content)
        try:
            records = RecordFile(path)
        except DataError:
            continue
        for number, payload in enumerate(PAYLOADS):
            with suppress(DataError):
                assert records.read(number) == payload


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("0\t3", "line 1 says offset 3, where no record begins"),
        ("0\t99999", "line 1 says offset 99999, where no record begins"),
        ("0\t0\t1", "3 columns"),
        ("zero\t0", "could not convert string 'zero'"),
    ],
)
def test_a_text_index_that_leads_nowhere_is_refused(path: Path, line: str, what: str) -> None:
    path.with_suffix(".uidx").unlink()
    path.with_suffix(".idx").write_text(line + "\n")
    with pytest.raises(DataError) as caught:
        RecordFile(path)
    assert str(caught.value).startswith(f"{path.with_suffix('.idx')}: {what}")
    assert f"unisono data reindex {path} writes it anew" in str(caught.value)


def test_an_empty_text_index_beside_records_is_refused(path: Path) -> None:
    index, count = path.with_suffix(".idx"), len(PAYLOADS)
    path.with_suffix(".uidx").unlink()
    index.write_bytes(b"")
    with pytest.raises(DataError) as caught:
        RecordFile(path)
    assert str(caught.value) == (
        f"{index} is empty, beside a file of {count} record(s)\n"
        "  rule: an .idx file, if there is one, names the records to read\n"
        "  so:   all records would be left out, so nothing is used\n"
        f"  try:  remove it: the records are then read in order; or unisono data reindex {path}"
    )
    assert [str(finding) for finding in verify(path).findings] == [
        f"{index}: it is empty, which leaves out all records"
    ]
    index.unlink()
    assert [finding.what for finding in verify(path).findings] == []
    assert len(RecordFile(path)) == count


def test_a_sidecar_without_records_beside_records_is_refused(path: Path) -> None:
    """As earlier versions made it of an empty .idx."""
    data = map_file(path)
    columns, payload = read_columns(path, data)
    empty = {name: column[:0] for name, column in columns.items()}
    write_index(path, payload, empty, data, checksums=COMPUTED)
    path.with_suffix(".idx").unlink()
    with pytest.raises(DataError, match=r"a\.rec has \d+ bytes, and its sidecar no record"):
        RecordFile(path)
    assert [finding.what for finding in verify(path).findings] == ["it has no record, which leaves out all of the file"]
    reindex(path)
    assert len(RecordFile(path)) == len(PAYLOADS)


def test_a_file_without_records_has_an_empty_text_index(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "a.rec"):
        pass
    assert (tmp_path / "a.idx").read_bytes() == b""
    assert len(RecordFile(tmp_path / "a.rec")) == 0
    assert verify(tmp_path / "a.rec").findings == []
