"""Weights of MXNet and MindSpore: files that the real packages wrote (tests/peers/make_weights_fixtures.py), and damaged ones."""

from __future__ import annotations

import io
import json
import random
import struct
import subprocess
import sys
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from states import bits
from tools import peer
from torch import Tensor

from unisono.errors import CheckpointError
from unisono.interop import mindspore_checkpoint
from unisono.interop.weight_file import open_weights, write_weights_file
from unisono.storage.protobuf import encode_varint

FIXTURES = Path(__file__).parent / "fixtures"
MAKER = Path(__file__).parents[1] / "peers" / "make_weights_fixtures.py"
SUFFIXES = {"safetensors": ".safetensors", "mxnet": ".params", "mindspore": ".ckpt"}
WHOLE = [[0, 1, 2], [3, 100, 101]]
FILES = sorted(path.name for path in FIXTURES.iterdir() if path.is_file())


def load(path: Path) -> dict[str, Tensor]:
    with open_weights(path) as weights:
        found = {name: tensor.load() for name, tensor in weights.tensors.items()}
        for name, tensor in weights.tensors.items():
            assert (found[name].dtype, tuple(found[name].shape)) == (tensor.dtype, tensor.shape)
            assert found[name].is_contiguous()
    return found


def write(path: Path, kind: str, tensors: dict[str, Tensor]) -> Path:
    layout = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    write_weights_file(path, kind, layout, tensors.__getitem__)
    return path


def all_dtypes() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(0, 256, (3, 40), dtype=torch.uint8, generator=generator)  # NaN patterns too
    tensors = {
        name: patterns.clone().view(dtype) for name, dtype in mindspore_checkpoint._DTYPES.items() if name != "Bool"
    }
    return tensors | {
        "Bool": patterns > 128,
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "name with ä/…": torch.ones(1),
    }


# --- files of the real packages --------------------------------------------------------------------------------------


def test_arrays_of_mxnet_have_their_values() -> None:
    found = load(FIXTURES / "named.params")
    for name in ("float32", "float64", "float16", "uint8", "int32", "int8", "int64"):
        assert found[name].dtype == getattr(torch, name)
        assert found[name].tolist() == WHOLE
    assert found["bool"].tolist() == [False, True, True]
    assert (found["bfloat16"].dtype, found["bfloat16"].tolist()) == (torch.bfloat16, [1.5, -2.25])
    zero = [0.0, 0.0, 0.0]
    assert found["rows"].tolist() == [zero, [1, 2, 3], zero, zero, [4, 5, 6], zero]
    assert found["no rows"].tolist() == [zero, zero]
    assert found["csr"].tolist() == [[1, 0, 2, 0], [0, 0, 0, 0], [0, 3, 0, 0]]
    assert {name: array.tolist() for name, array in load(FIXTURES / "list.params").items()} == {"0": [1, 2], "1": [[3]]}
    shaped = load(FIXTURES / "numpy.params")
    assert (shaped["number"].shape, shaped["number"].item(), shaped["empty"].shape) == ((), 3.5, (0, 4))


def test_values_of_mindspore_are_the_same() -> None:
    found = load(FIXTURES / "all.ckpt")
    for name in ("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint16"):
        assert found[name].dtype == getattr(torch, name)
        assert found[name].tolist() == WHOLE
    assert [found[name].tolist() for name in ("uint32", "uint64")] == [WHOLE, WHOLE]
    assert found["bool_"].tolist() == [[False, True, True], [True, True, True]]
    assert (found["number"].shape, found["number"].item(), found["epoch"].item()) == ((), 3.5, 3)
    with open_weights(FIXTURES / "all.ckpt") as weights:
        assert (weights.format, dict(weights.texts)) == ("mindspore", {"note": "añb"})
    assert load(FIXTURES / "plain.ckpt")["float32"].tolist() == WHOLE
    assert load(FIXTURES / "plain.safetensors")["float64"].tolist() == WHOLE


def old_params(version: int, array: bytes) -> bytes:
    """A file with one array: version 1, or 0 for arrays before it, which begin with their number of dims."""
    magic = struct.pack("<Iiqq", 0xF993FAC8, 2, 2, 3) if version else struct.pack("<III", 2, 2, 3)
    return (
        struct.pack("<QQQ", 0x112, 0, 1)
        + magic
        + struct.pack("<iii", 1, 0, 0)
        + array
        + struct.pack("<QQ", 1, 1)
        + b"w"
    )


@pytest.mark.parametrize("version", [0, 1])
def test_arrays_of_older_versions_are_read(tmp_path: Path, version: int) -> None:
    values = np.arange(6, dtype="<f4").reshape(2, 3)
    path = tmp_path / "old.params"
    path.write_bytes(old_params(version, values.tobytes()))
    assert load(path)["w"].tolist() == values.tolist()


def test_parameters_of_numpy_mode_are_read(tmp_path: Path) -> None:
    """MXNet 2 writes them with ``numpy.savez``, under the same name."""
    arrays = {
        "w": np.arange(6.0).reshape(2, 3),
        "turned": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "n": np.float16(2),
    }
    arrays["big"] = np.arange(3, dtype=">i4")
    with (tmp_path / "net.params").open("wb") as file:
        np.savez(file, **arrays)
    found = load(tmp_path / "net.params")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {k: v.tolist() for k, v in arrays.items()}


# --- written and read again ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SUFFIXES)
def test_every_dtype_comes_back_bit_by_bit(tmp_path: Path, kind: str) -> None:
    tensors = all_dtypes()
    found = load(write(tmp_path / "a", kind, tensors))
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(found[name]) == bits(tensor), name
    shaped = {"number": torch.tensor(2.0), "empty": torch.empty(0, 3), "matrix": torch.ones(2, 2)}
    if kind == "mindspore":
        del shaped["empty"]
    found = load(write(tmp_path / "b", kind, shaped))
    assert {name: tensor.tolist() for name, tensor in found.items()} == {k: v.tolist() for k, v in shaped.items()}
    assert [tuple(tensor.shape) for tensor in found.values()] == [tuple(tensor.shape) for tensor in shaped.values()]


def test_a_tensor_in_several_slices_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mindspore_checkpoint, "_SLICE_BYTES", 10)
    tensors = {"a": torch.arange(9.0), "b": torch.arange(4)}
    path = write(tmp_path / "a.ckpt", "mindspore", tensors)
    assert path.read_bytes().count(b"Float32") == 4
    assert {name: tensor.tolist() for name, tensor in load(path).items()} == {k: v.tolist() for k, v in tensors.items()}


@pytest.mark.parametrize("kind", ["mxnet", "mindspore"])
def test_a_dtype_that_the_format_lacks_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(CheckpointError, match="float8_e4m3fn"):
        write(tmp_path / "a", kind, {"w": torch.ones(2).to(torch.float8_e4m3fn)})
    assert list(tmp_path.iterdir()) == []


READ_MXNET = """
import sys, numpy as np
np.bool = bool
import mxnet as mx
for path in sys.argv[2:]:
    print(sorted((name, str(np.dtype(array.dtype)), array.shape, array.asnumpy().astype(float).ravel().tolist())
                 for name, array in mx.nd.load(path).items()))
with mx.util.np_shape():
    print(sorted((name, array.shape) for name, array in mx.nd.load(sys.argv[1]).items()))
"""
READ_MINDSPORE = """
import sys, mindspore as ms
for path in sys.argv[1:]:
    print(sorted((name, str(array.dtype), array.shape, array.astype(ms.float32).asnumpy().ravel().tolist())
                 for name, array in ms.load_checkpoint(path, crc_check=True).items()))
"""
READABLE = {
    "w": torch.arange(6.0).reshape(2, 3),
    "half": torch.ones(3).half(),
    "i": torch.arange(3),
    "b": torch.tensor([True, False]),
}


@pytest.mark.peer
def test_mxnet_reads_what_is_written(tmp_path: Path) -> None:
    python = peer("UNISONO_MXNET_PYTHON")
    written = write(tmp_path / "new.params", "mxnet", READABLE)
    numbers = write(tmp_path / "numbers.params", "mxnet", {"n": torch.tensor(1.5), "e": torch.empty(0, 2)})
    old = [tmp_path / f"old{version}.params" for version in (0, 1)]
    for version, path in enumerate(old):
        path.write_bytes(old_params(version, np.arange(6, dtype="<f4").tobytes()))
    done = subprocess.run(
        [python, "-c", READ_MXNET, str(numbers), str(written), *map(str, old)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    new, *olds, shapes = done.stdout.splitlines()
    names = [("b", "bool", (2,)), ("half", "float16", (3,)), ("i", "int64", (3,)), ("w", "float32", (2, 3))]
    assert new == str([(*name, READABLE[name[0]].double().flatten().tolist()) for name in names])
    assert olds == [str([("w", "float32", (2, 3), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])])] * 2
    assert shapes == str([("e", (0, 2)), ("n", ())])


@pytest.mark.peer
def test_mindspore_reads_what_is_written(tmp_path: Path) -> None:
    python = peer("UNISONO_MINDSPORE_PYTHON")
    tensors = READABLE | {"n": torch.tensor(1.5), "bf": torch.tensor([1.5, 2.5], dtype=torch.bfloat16)}
    written = write(tmp_path / "new.ckpt", "mindspore", tensors)
    done = subprocess.run([python, "-c", READ_MINDSPORE, str(written)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kinds = {
        torch.bool: "Bool",
        torch.float16: "Float16",
        torch.int64: "Int64",
        torch.float32: "Float32",
        torch.bfloat16: "BFloat16",
    }
    expected = sorted((n, kinds[t.dtype], tuple(t.shape), t.float().flatten().tolist()) for n, t in tensors.items())
    assert done.stdout.splitlines()[-1] == str(expected)


@pytest.mark.peer
@pytest.mark.parametrize("package", ["mxnet", "mindspore"])
def test_the_fixtures_are_what_the_package_writes(tmp_path: Path, package: str) -> None:
    python = peer(f"UNISONO_{package.upper()}_PYTHON")
    subprocess.run([python, str(MAKER), package, str(tmp_path)], check=True, capture_output=True)
    made = sorted(tmp_path.iterdir())
    assert made
    for path in made:
        ours, theirs = load(FIXTURES / path.name), load(path)
        assert {name: tensor.tolist() for name, tensor in ours.items()} == {k: v.tolist() for k, v in theirs.items()}


# --- damaged and hostile files ---------------------------------------------------------------------------------------


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(path)
    (problem,) = caught.value.problems
    assert str(path) in problem.given
    return problem.given


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_ends_early_is_refused(tmp_path: Path, name: str) -> None:
    content = (FIXTURES / name).read_bytes()
    path = tmp_path / name
    for length in range(len(content)):
        path.write_bytes(content[:length])
        try:
            found = load(path)
        except CheckpointError:
            continue
        # a message of a protocol buffer ends anywhere between two values
        assert name.endswith(".ckpt")
        assert len(found) < len(load(FIXTURES / name)) or name == "all.ckpt"


@pytest.mark.parametrize("name", FILES)
def test_changed_bytes_are_an_error_or_other_values_in_little_memory(tmp_path: Path, name: str) -> None:
    content, chance = (FIXTURES / name).read_bytes(), random.Random(0)
    path = tmp_path / name
    tracemalloc.start()
    try:
        for _ in range(300):
            changed = bytearray(content)
            for _ in range(chance.randint(1, 4)):
                changed[chance.randrange(len(changed))] = chance.choice([0, 1, 127, 128, 255, chance.randrange(256)])
            path.write_bytes(changed)
            try:
                load(path)
            except CheckpointError:
                continue
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def value(tag: bytes, dims: list[int], kind: bytes, content: bytes, *more: bytes) -> bytes:
    def part(number: int, text: bytes) -> bytes:
        return encode_varint(number << 3 | 2) + encode_varint(len(text)) + text

    tensor = b"".join(b"\x08" + encode_varint(dim) for dim in dims) + part(2, kind) + part(3, content)
    return part(1, part(1, tag) + part(2, tensor) + b"".join(more))


V2 = struct.pack("<QQQIii", 0x112, 0, 1, 0xF993FAC9, 0, 2)
ROWS = struct.pack("<QQQIiiqq", 0x112, 0, 1, 0xF993FAC9, 1, 2, 1, 3)
DEVICE = struct.pack("<ii", 1, 0)


def no_arrays(names: list[bytes]) -> bytes:
    """A file of arrays that are not there, with these names."""
    arrays = struct.pack("<QQQ", 0x112, 0, len(names)) + struct.pack("<Iii", 0xF993FAC9, 0, 0) * len(names)
    return arrays + struct.pack("<Q", len(names)) + b"".join(struct.pack("<Q", len(name)) + name for name in names)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "an empty file"),
        (b"\x80\x04\x95abcdefghij", "a pickle"),
        (bytes.fromhex("d85e3a7f") + bytes(20), "an encrypted checkpoint"),
        (struct.pack("<QQQ", 0x112, 0, 1 << 60), "arrays, where"),
        (struct.pack("<QQQ", 0x112, 7, 0), "after the magic number"),
        (struct.pack("<QQQQ", 0x112, 0, 0, 5), "5 names of 0 arrays"),
        (no_arrays([b"", b""]), "two arrays are called ''"),
        (V2 + struct.pack("<qq", 1 << 40, 1 << 40), "whose size is no int64"),
        (V2 + struct.pack("<qq", 1 << 30, 1 << 20) + DEVICE + struct.pack("<i", 0), "are left"),
        (V2 + struct.pack("<qq", 2, -3), "whose size is no int64"),
        (V2 + struct.pack("<qq", 2, 3) + DEVICE + struct.pack("<i", 13), "dtype 13, where 0 to 12 are known"),
        (struct.pack("<QQQIi", 0x112, 0, 1, 0xF993FAC9, 9), "storage type 9"),
        (struct.pack("<QQQI", 0x112, 0, 1, 1 << 20), "dims, where 64 are the most"),
        (
            ROWS + struct.pack("<iqq", 2, 1 << 40, 3) + DEVICE + struct.pack("<iiiq", 0, 6, 1, 1) + bytes(20),
            "of values, for which 67,108,864 are the most",
        ),
        (
            ROWS + struct.pack("<iqq", 2, 4, 3) + DEVICE + struct.pack("<iiiq", 0, 6, 1, 1) + bytes(12) + b"\x09" + bytes(7),
            "rows that do not rise",
        ),
        (value(b"w", [2], b"Float8", b"abcd"), "dtype 'Float8'"),
        (value(b"w", [2], b"Float32", b"abcd"), "takes 8 bytes, and has 4"),
        (value(b"w", [1 << 40, 1 << 40], b"Float32", b"abcd"), "whose size is no int64"),
        (value(b"w", [(1 << 64) - 1], b"Float32", b"abcd"), "whose size is no int64"),
        (value(b"w", [1] * 70, b"Float32", b"abcd"), "more than 64 dims"),
        (b"".join(value(tag, [1], b"Float32", b"abcd") for tag in (b"w", b"v", b"w")), "another tensor 'w'"),
        (value(b"w", [1], b"Float32", b"abcd", b"\x1a\x00"), "a map parameter"),
        (b"\x0a\xff\xff\xff\xff\x7f", "are left"),
        (value(b"w", [1], b"Float32", b"abcd") + b"crc_num" + bytes(10), "its CRC-32 is"),
        (struct.pack("<Q", 1 << 62) + b"{" + bytes(30), "does not fit"),
    ],
)  # fmt: skip
def test_hostile_files_are_refused_in_words(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "hostile"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        assert words in refused(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def safetensors(metadata: object, length: int) -> bytes:
    """A file with one tensor and a header of so many bytes."""
    header = json.dumps({"__metadata__": metadata, "w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}})
    assert len(header) <= length
    return struct.pack("<Q", length) + header.ljust(length).encode() + b"ab"


@pytest.mark.parametrize("length", [128, 0x112, 10 + 256])
def test_the_length_of_a_header_is_no_other_formats_mark(tmp_path: Path, length: int) -> None:
    """0x80 begins a pickle, 0x112 is MXNet's number, 10 begins a checkpoint of MindSpore."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors({}, length))
    assert load(path)["w"].tolist() == [97, 98]


def test_metadata_of_any_kind_is_read_and_numbers_of_4_bits_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for metadata in (None, [], "text", {"format": "ms"}, {"w": 3}):
        path.write_bytes(safetensors(metadata, 200))
        assert load(path)["w"].tolist() == [97, 98]
    path.write_bytes(safetensors({"w": "Int4"}, 200))
    assert "'w' has two numbers of 4 bits in a byte" in refused(path)


def test_a_checksum_is_compared(tmp_path: Path) -> None:
    content = value(b"w", [1], b"Float32", b"abcd")
    path = tmp_path / "a.ckpt"
    path.write_bytes(content + b"crc_num" + zlib.crc32(content).to_bytes(10, "big"))
    assert load(path)["w"].shape == (1,)


def npz(path: Path, name: str, content: bytes, method: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr(name, content)


def npy(array: object) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(array), allow_pickle=True)
    return file.getvalue()


def test_archives_with_other_contents_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.params"
    npz(path, "archive/data.pkl", b"\x80\x02.")
    assert "arrays of NumPy alone" in refused(path)
    torch.save({"w": torch.ones(2)}, path)
    assert "arrays of NumPy alone" in refused(path)
    npz(path, "w.npy", npy([{"an": "object"}]))
    assert "'w': " in refused(path)
    npz(path, "w.npy", npy(np.zeros(3, [("a", "i4")])))
    assert "'w': no array of plain numbers" in refused(path)
    npz(path, "w.npy", npy(np.arange(5.0))[:-3])
    assert "37 bytes of values, where shape [5] needs 40" in refused(path)
    npz(path, "w.npy", npy(np.zeros(1 << 22, np.uint8)), zipfile.ZIP_DEFLATED)
    assert "'w.npy' is compressed or encrypted" in refused(path)


def test_a_damaged_member_of_an_archive_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.params"
    with path.open("wb") as file:
        np.savez(file, w=np.arange(1000.0))
    content = bytearray(path.read_bytes())
    content[2000] ^= 1
    path.write_bytes(content)
    assert "its CRC-32 is another" in refused(path)


def test_reading_imports_no_other_framework() -> None:
    code = "import sys; import unisono.interop.weight_file; print({'mxnet', 'mindspore', 'google.protobuf'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_one_name_of_many_that_is_there_twice(tmp_path: Path) -> None:
    """Each name is looked at once: with a search of all for each of them, this test takes minutes."""
    path = tmp_path / "many.params"
    path.write_bytes(no_arrays([*(b"%d" % number for number in range(200_000)), b"199999"]))
    assert "two arrays are called '199999'" in refused(path)
