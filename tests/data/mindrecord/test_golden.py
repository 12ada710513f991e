"""Files made by MindSpore 2.10.0 (tests/peers/make_mindrecord_fixtures.py): read as they were given, and as FileReader reads."""

from __future__ import annotations

import json
import shutil
import struct
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from unisono.data.mindrecord import FieldType, MindRecordFile, MindRecordWriter
from unisono.errors import DataError

EXPECTED = json.loads((Path(__file__).parent / "fixtures/expected.json").read_text())
CASES = EXPECTED["cases"]
KEYS = {"encrypted": EXPECTED["key"]}
Told = Callable[[Any], Any]
with_cipher = pytest.mark.skipif(find_spec("cryptography") is None, reason="encrypted files need the extra mindrecord")
EACH = [pytest.param(case, marks=[with_cipher] if case in KEYS else []) for case in CASES]


def loose(rows: Any) -> Any:
    """Rows with floats as FileReader returns them: as int where they are nearly whole, and it takes most for that (fault 5)."""
    if isinstance(rows, list):
        return [loose(row) for row in rows]
    return {
        name: changed(float.fromhex(value["float"])) if isinstance(value, dict) and "float" in value else value
        for name, value in rows.items()
    }


def changed(number: float) -> float:
    if abs(number) >= 2**63:
        return -(2**63)
    return int(number) if abs(number - int(number)) < 2**-23 else number


def given(case: str) -> list[Any]:
    """The rows in the order of the files: MindSpore lays them out by chance where there are several."""
    rows = CASES[case]["given"]
    if len(CASES[case]["read"]) == 1:
        return rows
    order = [row["label"] for found in CASES[case]["read"].values() for row in found]
    return sorted(rows, key=lambda row: order.index(row["label"]))


@pytest.mark.parametrize("case", EACH)
def test_rows_are_read_as_they_were_given(case: str, golden: Path, told: Told) -> None:
    records = MindRecordFile(golden / next(iter(CASES[case]["read"])), key=KEYS.get(case))
    assert told(records) == given(case)
    assert told(records.read_many(range(len(records)))[::-1]) == given(case)[::-1]
    assert told([records.read(-1)]) == given(case)[-1:]
    wanted = CASES[case]["schema"]
    assert records.schema == {
        name: FieldType(type=field["type"], shape=tuple(field["shape"]) if "shape" in field else None)
        for name, field in wanted.items()
    }


@pytest.mark.parametrize("case", EACH)
def test_rows_are_read_as_mindspore_reads_them(case: str, golden: Path, told: Told) -> None:
    for name, wanted in CASES[case]["read"].items():
        rows = told(MindRecordFile([golden / name], key=KEYS.get(case)))
        assert loose(rows) == loose(wanted)


@pytest.mark.parametrize("case", EACH)
def test_rows_are_found_without_an_index(
    case: str, golden: Path, told: Told, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault 12: a missing index is fatal to MindSpore."""
    for name in CASES[case]["read"]:
        shutil.copy(golden / name, tmp_path / name)
    first = tmp_path / next(iter(CASES[case]["read"]))
    assert told(MindRecordFile(first, key=KEYS.get(case))) == given(case)
    assert f"{first}.db is missing: the rows of {first.name} are found by reading its pages" in caplog.text


@pytest.mark.parametrize("case", EACH)
def test_the_same_rows_give_the_same_bytes_of_each_row(case: str, golden: Path, told: Told, tmp_path: Path) -> None:
    theirs = MindRecordFile(golden / next(iter(CASES[case]["read"])), key=KEYS.get(case))
    with MindRecordWriter(
        tmp_path / "ours", CASES[case]["schema"], page_bytes=32 << 10, header_bytes=16 << 10
    ) as writer:
        for row in theirs:
            writer.write(row)
    ours = MindRecordFile(tmp_path / "ours")
    assert told(ours) == told(theirs)
    assert parts(ours) == parts(theirs)


def parts(records: MindRecordFile) -> list[tuple[bytes, bytes]]:
    return [
        (bytes(shard.raw(row)[0]), bytes(shard.blob(row)[0])) for shard in records._shards for row in range(shard.rows)
    ]


def test_the_cases_have_what_they_are_for(golden: Path) -> None:
    def kinds(name: str) -> list[str]:
        return [page.page_type for page in MindRecordFile(golden / name)._shards[0].head.page]

    assert kinds("pages").count("BLOB_DATA") > 3
    interleaved = kinds("calls")
    assert interleaved.count("RAW_DATA") > 1
    assert "RAW_DATA" in interleaved[: len(interleaved) - 1 - interleaved[::-1].index("BLOB_DATA")]
    assert kinds("append").count("RAW_DATA") > 1
    assert MindRecordFile(golden / "packed")._shards[0].head.packed
    assert not MindRecordFile(golden / "several")._shards[0].head.packed


def test_a_set_is_read_whole_from_any_file_and_in_part_from_a_list(golden: Path, told: Told) -> None:
    names = list(CASES["shards"]["read"])
    whole = MindRecordFile(golden / names[0])
    assert len(names) == 3
    assert whole.paths == [golden / name for name in names]
    for name in names:
        assert told(MindRecordFile(golden / name)) == told(whole)
    part = MindRecordFile([golden / names[2], golden / names[0]])
    assert told(part) == given_of(names[2]) + given_of(names[0])


def given_of(name: str) -> list[Any]:
    return CASES["shards"]["read"][name]


@with_cipher
def test_an_encrypted_file_needs_its_key_and_no_other_file_takes_one(golden: Path) -> None:
    path = golden / "encrypted"
    for key, given, nearest in (
        (None, f"{path}, which is encrypted, and no key", "key= the key given to MindSpore's set_enc_key"),
        (
            "fedcba9876543210",
            f"{path}: the block at offset 0 does not have its tag under this key",
            "the key that encrypted it; if this is it, a whole copy of the file",
        ),
        ("short", f"a key of 5 bytes for {path}", "the key of 16, 24 or 32 bytes that encrypted it"),
    ):
        with pytest.raises(DataError) as caught:
            MindRecordFile(path, key=key)
        assert str(caught.value) == (
            f"{given}\n"
            "  rule: an encrypted file is read with the key that encrypted it (AES-GCM), any other file without one\n"
            "  so:   nothing was read\n"
            f"  try:  {nearest}"
        )
    with pytest.raises(DataError, match="which is not encrypted, and a key"):
        MindRecordFile(golden / "pages", key=KEYS["encrypted"])


@with_cipher
def test_no_plain_copy_of_an_encrypted_file_is_left(golden: Path, tmp_path: Path) -> None:
    for name in ("encrypted", "encrypted.db"):
        shutil.copy(golden / name, tmp_path / name)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    records = MindRecordFile(tmp_path / "encrypted", key=KEYS["encrypted"])
    assert records.read(3)["image"] == bytes([3] * 5)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def encrypted(content: bytes, key: str, sizes: int) -> bytes:
    """A file in blocks of ``sizes`` bytes, as MindSpore encrypts it in blocks of 64 MiB."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    blocks = b""
    for at in range(0, len(content), sizes):
        nonce = at.to_bytes(16, "little")
        sealed = AESGCM(key.encode()).encrypt(nonce[:12], content[at : at + sizes], None)
        text, tag = sealed[:-16], sealed[-16:]
        head = struct.pack("<I16sII16sI", 0x7F3A5ED8, tag, 24 + len(text), 16, nonce, len(text))
        blocks += struct.pack(">i", len(head) + len(text)) + head + text
    return blocks + bytes(4) + b"AES-GCM" + b"ENCRYPT"


@with_cipher
def test_several_encrypted_blocks_are_one_file_and_a_damaged_one_is_named(
    golden: Path, told: Told, tmp_path: Path
) -> None:
    key = "a key of 24 bytes, yes! "
    for name in ("pages", "pages.db"):
        (tmp_path / name).write_bytes(encrypted((golden / name).read_bytes(), key, 10_000))
    assert told(MindRecordFile(tmp_path / "pages", key=key)) == given("pages")
    whole = (tmp_path / "pages").read_bytes()
    for at, what in (
        (0, "at offset 0: a block of "),
        (4, "at offset 0: what begins here is not the head of an encrypted block"),
        (34, "the block at offset 0 does not have its tag under this key"),
        (10_052, "at offset 10052: a block of "),
        (10_110, "the block at offset 10052 does not have its tag under this key"),
    ):
        content = bytearray(whole)
        content[at] ^= 0x80
        (tmp_path / "pages").write_bytes(content)
        with pytest.raises(DataError) as caught:
            MindRecordFile(tmp_path / "pages", key=key)
        assert what in str(caught.value)
    for size in range(len(whole) - 200, len(whole)):
        (tmp_path / "pages").write_bytes(whole[:size])
        with pytest.raises(DataError, match="which is not encrypted, and a key"):
            MindRecordFile(tmp_path / "pages", key=key)


def test_version_2_packs_no_integers(golden: Path, told: Told, tmp_path: Path) -> None:
    content = (golden / "several").read_bytes()
    assert content.count(b'"version":"3.0"') == 1
    (tmp_path / "several").write_bytes(content.replace(b'"version":"3.0"', b'"version":"2.0"'))
    shutil.copy(golden / "several.db", tmp_path / "several.db")
    assert told(MindRecordFile(tmp_path / "several")) == given("several")
    (tmp_path / "several").write_bytes(content.replace(b'"version":"3.0"', b'"version":"4.0"'))
    with pytest.raises(DataError, match=r"at offset 8: the header has version '4\.0', and there are 2\.0 and 3\.0"):
        MindRecordFile(tmp_path / "several")


@with_cipher
def test_without_cryptography_an_encrypted_file_names_the_extra(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(Exception, match=r"pip install 'unisono\[mindrecord\]'"):
        MindRecordFile(golden / "encrypted", key=KEYS["encrypted"])
