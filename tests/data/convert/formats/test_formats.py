"""What each format's files may be, what they may not, and which files a name stands for."""

from __future__ import annotations

import logging
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.convert import Table, open_table, read_formats, write_table
from unisono.data.convert.formats.crc32c import crc32c, masked_crc32c
from unisono.data.convert.formats.tf_example import read_example
from unisono.data.convert.table_files import convert
from unisono.errors import DataError

FIXTURES = Path(__file__).parent / "fixtures"


def rows_of(path: Path, **options: Any) -> list[Any]:
    return list(open_table(path, **options).rows)


# CSV


def test_csv_takes_types_from_all_of_a_column(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(
        b'\xef\xbb\xbfint,float,zip,quoted,big,id,mixed,nan,"a, ""b"""\r\n'
        b'1,1,007,"1",9223372036854775808,9007199254740993,1,nan,"two\r\nlines"\r\n'
        b"-20,.5e-3,1,2,1,0.5,x,-inf,\r\n"
    )
    table = open_table(path)
    assert table.schema is not None
    assert [field.type for field in table.schema.values()] == [
        *("int64", "float64", "string", "string", "float64", "string", "string", "float64", "string")
    ]
    first, second = table.rows
    assert [*first.values()][:6] == [1, 1.0, "007", "1", 2.0**63, "9007199254740993"]
    assert first['a, "b"'] == "two\r\nlines"
    assert [*second.values()] == [-20, 0.0005, "1", "2", 1.0, "0.5", "x", float("-inf"), ""]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("", "offset 0: an empty file, without header line and rows"),
        ("a,a\n", "offset 0: a header line with the names ['a', 'a']"),
        ("a,\n", "offset 0: a header line with the names ['a', '']"),
        ("a,b\n1,2\n1\n", "offset 8: line 3 has 1 fields, and the header 2"),
        ("a,b\n1,2,3\n", "offset 4: line 2 has 3 fields, and the header 2"),
        ('a\n"x\ny"\n"z\n', "offset 8: line 4 has a quote that nothing closes"),
        ('a,b\n1,x"y"\n', "offset 4: line 2: field 2 has a quote or a line end where none can be"),
        ('a,b\n"x"y,1\n', "offset 4: line 2: field 1 has a quote"),
        ("a,b\n1,x\ry\n", "offset 4: line 2: field 2 has a quote or a line end"),
        ("a,b\n1,2\n1", "offset 8: line 3 has 1 fields, and the header 2"),
        ("a,b", "offset 0: line 1, the header, has no line end"),
        ("id;text\n1;x\n", "offset 0: a header line with the one name 'id;text'"),
        ("id\ttext\n", r"offset 0: a header line with the one name 'id\ttext'"),
    ],
)
def test_csv_that_is_none(tmp_path: Path, content: str, what: str) -> None:
    (tmp_path / "a.csv").write_text(content, newline="")
    with pytest.raises(DataError) as caught:
        rows_of(tmp_path / "a.csv")
    assert str(caught.value).startswith(f"{tmp_path}/a.csv: {what}")


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        ("a,b\n1,2\n3,4", [{"a": 1, "b": 2}, {"a": 3, "b": 4}]),
        ('a,b\r\n1,"x\ny"', [{"a": 1, "b": "x\ny"}]),
        ("a,b\n1,", [{"a": 1, "b": ""}]),
    ],
)
def test_csv_without_a_line_end_behind_its_last_row(tmp_path: Path, content: str, rows: list[dict[str, Any]]) -> None:
    (tmp_path / "a.csv").write_text(content, newline="")
    assert rows_of(tmp_path / "a.csv") == rows


@pytest.mark.parametrize("row", ['text "quoted" x', '5" disk'])
def test_an_error_of_quotes_says_how_they_are_written(tmp_path: Path, row: str) -> None:
    (tmp_path / "a.csv").write_text(f"a\n{row}\n")
    with pytest.raises(DataError) as caught:
        rows_of(tmp_path / "a.csv")
    assert 'try:  such a field as "say ""yes"" or no"' in str(caught.value)


def test_csv_of_other_text_and_of_no_base64(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"a\n\xff\n")
    with pytest.raises(DataError, match=r"offset 2: line 2: byte 2, 0xff, is not UTF-8"):
        rows_of(path)
    path.write_text("a,b\nAAE=,1\nA,2\n")
    with pytest.raises(DataError, match=r"offset 11: line 3: 'A' is no base64"):
        rows_of(path, base64=["a"])
    with pytest.raises(DataError, match=r"base64 for 'c'\n  rule: columns are a, b"):
        rows_of(path, base64=["c"])
    path.write_text("a,b\nAAE=,1\n")
    assert rows_of(path, base64=["a"]) == [{"a": b"\0\1", "b": 1}]
    path.write_text("a,b\n")
    assert rows_of(path) == []


# Parquet


def test_parquet_of_other_writers(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    count = 700  # more than are in memory at once
    columns = {
        "int8": pa.array(range(-50, 50), pa.int8()),
        "uint64": pa.array([2**64 - 1] * 100, pa.uint64()),
        "half": pa.array(np.arange(100, dtype=np.float16)),
        "words": pa.array(["a", "b"] * 50).dictionary_encode(),
        "large": pa.array(["ü"] * 100, pa.large_string()),
        "fixed": pa.array([b"abc"] * 100, pa.binary(3)),
        "flag": pa.array([True, False] * 50),
        "ids": pa.array([list(range(n % 4)) for n in range(100)], pa.list_(pa.uint16())),
        "square": pa.array([[[n, 1.5], [2.0, n]] for n in range(100)], pa.list_(pa.list_(pa.float32()))),
        "fixed_list": pa.array([[n, n] for n in range(100)], pa.list_(pa.int32(), 2)),
        "tags": pa.array([["ü"] * (n % 3) for n in range(100)], pa.list_(pa.large_string())),
        "pair": pa.array([["x", f"{n}"] for n in range(100)], pa.list_(pa.string(), 2)),
    }
    table = pa.concat_tables([pa.table(columns)] * (count // 100))
    pq.write_table(table, path, row_group_size=300, compression="gzip", data_page_version="2.0")
    found = rows_of(path)
    assert len(found) == count
    expected = table.to_pylist()
    for row, other in zip(found, expected, strict=True):
        assert {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in row.items()} == other
    assert (found[1]["ids"].dtype, found[1]["square"].dtype, found[1]["square"].shape) == (
        np.uint16,
        np.float32,
        (2, 2),
    )
    schema = open_table(path).schema
    assert schema is not None
    assert [(field.type, field.shape) for field in schema.values()] == [
        *[("int8", None), ("uint64", None), ("float16", None), ("string", None), ("string", None), ("bytes", None)],
        *[("bool", None), ("uint16", (-1,)), ("float32", (-1, -1)), ("int32", (2,))],
        *[("string", (-1,)), ("string", (2,))],
    ]
    assert convert(path, tmp_path / "b.parquet") == count
    again = rows_of(tmp_path / "b.parquet")
    assert again[699]["square"].tolist() == found[699]["square"].tolist()
    assert [(row["tags"], row["pair"]) for row in again] == [(row["tags"], row["pair"]) for row in expected]
    assert open_table(tmp_path / "b.parquet").schema == schema


@pytest.mark.parametrize(
    ("column", "what"),
    [
        (pa.array([1, None]), "column 'a' with a null, at row 1"),
        (pa.array([[1], [2, None]]), "column 'a' with a null, at row"),
        (pa.array([[[1], [2]], [[1], [2, 3]]]), "row 1, column 'a': lists of different lengths inside a list"),
        (pa.array([1, 2], pa.timestamp("us")), "column 'a' of type timestamp[us]"),
        (pa.array([{"x": 1}, {"x": 2}]), "column 'a' of type struct<x: int64>"),
        (pa.array([[["x"]], [["y"]]]), "column 'a' of type list<element: list<element: string>>"),
        (pa.array([[b"x"], [b"y"]]), "column 'a' of type list<element: binary>"),
        (pa.array([["x"], ["y", None]]), "column 'a' with a null, at row"),
        (
            pa.array([["x"]] * 2, pa.list_(pa.dictionary(pa.int8(), pa.string()))),
            "column 'a' of type list<element: dict",
        ),
        (pa.array([None, None]), "column 'a' of type null"),
    ],
)
def test_parquet_columns_that_are_no_fields(tmp_path: Path, column: Any, what: str) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": column, "b": [1, 2]}), path)
    with pytest.raises(DataError) as caught:
        rows_of(path)
    assert str(caught.value).startswith(f"{path}: {what}")
    assert rows_of(path, columns=["b"]) == [{"b": 1}, {"b": 2}]


def test_parquet_columns_of_one_name(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="two of whose columns have one name"):
        rows_of(tmp_path / "a.parquet")


def test_without_pyarrow_the_extra_is_named(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['pyarrow'] = None\nfrom pathlib import Path\n"
        "from unisono.data.convert import open_table\n"
        "from unisono.errors import ExtraError\n"
        "try: open_table(Path('a.parquet'))\nexcept ExtraError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.endswith("  try:  pip install 'unisono[parquet]'\n")


# TFRecord


def test_crc32c_vectors() -> None:
    """RFC 3720, appendix B.4."""
    vectors = {bytes(32): 0x8A9136AA, b"\xff" * 32: 0x62A8AB43, bytes(range(32)): 0x46DD794E, b"123456789": 0xE3069283}
    for data, crc in vectors.items():
        assert crc32c(data) == crc
    assert (
        masked_crc32c(crc32c(b"foo"))
        == (((crc32c(b"foo") >> 15) | (crc32c(b"foo") << 17) & 0xFFFFFFFF) + 0xA282EAD8) % 2**32
    )


def plain_crc32c(data: bytes) -> int:
    """Bit by bit, as it is defined."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 255, 256, 257, 511, 5000, (1 << 18) - 1, 1 << 18, (1 << 18) + 1])
def test_crc32c_of_all_sizes(size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    assert crc32c(data) == plain_crc32c(data)


def varint(value: int) -> bytes:
    value %= 1 << 64
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def part(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(**features: bytes) -> bytes:
    """An Example of features that are already encoded lists."""
    return part(1, b"".join(part(1, part(1, name.encode()) + part(2, each)) for name, each in features.items()))


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1)), st.lists(st.floats(width=32, allow_nan=False)), st.booleans())
def test_lists_packed_and_not(ints: list[int], floats: list[float], packed: bool) -> None:
    if packed:
        one, two = part(1, b"".join(map(varint, ints))), part(1, struct.pack(f"<{len(floats)}f", *floats))
    else:
        one = b"".join(b"\x08" + varint(each) for each in ints)
        two = b"".join(b"\x0d" + struct.pack("<f", each) for each in floats)
    found = read_example(example(a=part(3, one), b=part(2, two)))
    assert isinstance(found["a"], np.ndarray)
    assert isinstance(found["b"], np.ndarray)
    assert (found["a"].dtype, found["a"].tolist()) == (np.int64, ints)
    assert (found["b"].dtype, found["b"].tolist()) == (np.float32, floats)


@given(st.binary(max_size=60))
def test_any_bytes_are_an_example_or_a_value_error(data: bytes) -> None:
    whole = example(a=part(3, part(1, b"\x01\x02")), b=part(1, part(1, b"xyz")))
    for content in (data, whole[: len(data)] + data, part(1, data), part(1, part(1, data))):
        try:
            read_example(content)
        except ValueError:
            continue


def records(path: Path, *payloads: bytes) -> Path:
    def framed(payload: bytes) -> bytes:
        head = struct.pack("<Q", len(payload))
        return (
            head
            + struct.pack("<I", masked_crc32c(crc32c(head)))
            + payload
            + struct.pack("<I", masked_crc32c(crc32c(payload)))
        )

    path.write_bytes(b"".join(map(framed, payloads)))
    return path


ONE, TWO, NONE = (part(3, part(1, each)) for each in (b"\x01", b"\x01\x02", b""))


def test_features_of_one_value_and_of_others(tmp_path: Path) -> None:
    path = records(tmp_path / "a.tfrecords", example(a=ONE, b=TWO), example(a=ONE, b=ONE), example(a=ONE, b=NONE))
    found = rows_of(path)
    assert [row["a"] for row in found] == [1, 1, 1]
    assert found[1]["b"] == 1
    with pytest.raises(DataError, match=r"row 1, field 'b': 1 \(int\)"):
        convert(path, tmp_path / "b.parquet")
    assert convert(path, tmp_path / "b.parquet", arrays=["b"]) == 3
    assert [row["b"].tolist() for row in rows_of(tmp_path / "b.parquet")] == [[1, 2], [1], []]


def test_records_that_are_no_examples(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = records(tmp_path / "a.tfrecord", b"\xffone", b"", b"three")
    with caplog.at_level(logging.WARNING, "unisono.data"):
        assert rows_of(path) == [{"data": b"\xffone"}, {"data": b""}, {"data": b"three"}]
    assert "the first record is no tf.Example: rows have the records as they are, as 'data'" in caplog.text
    records(path, example(a=ONE), b"\xfftwo")
    with pytest.raises(DataError, match=r"record 1 at offset \d+: "):
        rows_of(path)
    records(path, example(a=part(1, part(1, b"x") + part(1, b"y"))))
    with pytest.raises(DataError, match="feature 'a' is a list of 2 bytes"):
        rows_of(path)
    records(path)
    assert rows_of(path) == []


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (example(a=ONE) + example(a=ONE), "it has feature 'a' twice"),
        (example(a=ONE + ONE), "a feature is one list"),
        (example(a=b""), "a feature is one list"),
        (example(a=part(3, part(1, b"\x80" * 3))), "an integer that does not end"),
        (example(a=part(3, part(1, b"\xff" * 10 + b"\x01"))), "an integer of more than 64 bits"),
        (example(a=part(3, part(1, b"\xff" * 9 + b"\x02"))), "an integer of more than 64 bits"),
        (example(a=part(2, part(1, b"123"))), "a malformed list of floats"),
        (part(2, b""), "field 2 of wire type 2, where only field 1"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "where 0 are left"),
        (b"\x0b", "wire type 3"),
    ],
)
def test_what_is_no_example(data: bytes, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        read_example(data)


# MNIST and CIFAR


def test_images_and_labels_that_do_not_go_together(tmp_path: Path) -> None:
    for file in (FIXTURES / "mnist").iterdir():
        shutil.copy(file, tmp_path)
    images, labels = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"
    with pytest.raises(DataError, match=r"their labels …labels-idx1-ubyte\n.*\n  try:  the file of images"):
        open_table(labels)
    labels.write_bytes(struct.pack(">2I", 0x801, 8) + bytes(8))
    with pytest.raises(DataError, match=f"{images} of 9 images, and {labels} of 8 labels"):
        rows_of(images)
    labels.write_bytes(struct.pack(">2I", 0x803, 9) + bytes(9))
    with pytest.raises(DataError, match="begins with 00000803, where unsigned bytes of 1 dims begin with 00000801"):
        open_table(images)
    labels.unlink()
    with pytest.raises(DataError, match="without train-labels-idx1-ubyte"):
        open_table(images)


def test_cifar_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(5000))
    with pytest.raises(DataError, match=r"a\.bin of 5,000 bytes\n  rule: a CIFAR file is records of 3,073 bytes"):
        open_table(path)
    path.write_bytes(bytes(3073) + b"\x0a" + bytes(3072))
    with pytest.raises(DataError, match=r"a\.bin: record 1 at offset 3073: label 10, where there are 10 classes"):
        rows_of(path)
    both = bytes(3073 * 3074)
    for name, labels in (("test.bin", ["coarse_label", "fine_label"]), ("test_batch.bin", ["label"])):
        (tmp_path / name).write_bytes(both)
        assert list(open_table(tmp_path / name).schema or ()) == ["image", *labels]


# Names


def test_a_shard_stands_for_its_set(tmp_path: Path) -> None:
    names = [f"part-{n:05d}-of-00003.jsonl" for n in range(3)]
    for number, name in enumerate(names):
        (tmp_path / name).write_text(f'{{"a": {number}}}\n')
    assert rows_of(tmp_path / names[1]) == [{"a": 0}, {"a": 1}, {"a": 2}]
    (tmp_path / names[2]).rename(tmp_path / "alone.jsonl")
    with pytest.raises(DataError) as caught:
        rows_of(tmp_path / names[0])
    assert str(caught.value) == (
        f"{tmp_path / names[0]}, one of 3 files, of which 1 are missing: first {names[2]}\n"
        "  rule: naming one file of a set takes all of it, in order\n"
        "  so:   nothing from there on was read\n"
        "  try:  the missing files, or a copy of this one under a name without a number"
    )
    assert rows_of(tmp_path / "alone.jsonl") == [{"a": 2}]
    with pytest.raises(DataError, match="shards are counted from 0"):
        rows_of(tmp_path / "part-00003-of-00003.jsonl")
    with pytest.raises(DataError, match="a name of one of several files"):
        convert(tmp_path / "alone.jsonl", tmp_path / "b-00000-of-00001.jsonl")


def test_tensorflows_names_of_shards(tmp_path: Path) -> None:
    for number in range(2):
        records(tmp_path / f"train.tfrecord-0000{number}-of-00002", example(a=ONE))
    assert rows_of(tmp_path / "train.tfrecord-00001-of-00002") == [{"a": 1}, {"a": 1}]
    records(tmp_path / "train.tfrecord-00000-of-00002")
    assert rows_of(tmp_path / "train.tfrecord-00001-of-00002") == [{"a": 1}]
    records(tmp_path / "train.tfrecord-00000-of-00002", example(a=ONE))
    records(tmp_path / "train.tfrecord-00001-of-00002", example(b=ONE))
    with pytest.raises(DataError, match=r"-00001-of-00002, whose fields are not those of .*-00000-of-00002"):
        rows_of(tmp_path / "train.tfrecord-00001-of-00002")


def test_cifars_five_files_are_a_set(tmp_path: Path) -> None:
    for number in (1, 2, 3, 5):
        shutil.copy(FIXTURES / f"cifar10/data_batch_{number}.bin", tmp_path)
    with pytest.raises(DataError, match=r"one of 5 files, of which 1 are missing: first data_batch_4\.bin"):
        open_table(tmp_path / "data_batch_1.bin")


def test_mindrecords_own_sets(tmp_path: Path) -> None:
    from unisono.data.mindrecord import MindRecordWriter

    with MindRecordWriter(tmp_path / "a.mindrecord", {"a": "int64"}, shards=3) as writer:
        for number in range(6):
            writer.write({"a": number})
    assert sorted(row["a"] for row in rows_of(tmp_path / "a.mindrecord1")) == [*range(6)]
    with pytest.raises(DataError, match="a name of one of several files"):
        write_table(tmp_path / "b.mindrecord0", Table(rows=[{"a": 1}]))


def test_options_without_a_use_and_files_that_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n')
    with pytest.raises(DataError, match="only CSV has bytes as base64"):
        open_table(path, base64=["a"])
    with pytest.raises(DataError, match=r"only tf\.Example leaves that open"):
        open_table(path, arrays=["a"])
    with pytest.raises(DataError, match="only CSV has bytes as base64"):
        convert(path, tmp_path / "b.rec", base64=["a"])
    with pytest.raises(DataError, match="base64 is for fields of bytes"):
        convert(path, tmp_path / "b.csv", base64=["a"])
    names = {"idx": "images-idx3-ubyte"}
    for suffix in read_formats():
        with pytest.raises(DataError, match=r"[Nn]o such file|without"):
            rows_of(tmp_path / names.get(suffix, f"none{suffix}"))
