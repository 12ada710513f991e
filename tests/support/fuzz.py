"""Mutations of small real files of the kinds in ``FORMATS``, replayable by kind and number.

    case = FORMATS["csv"]               how a whole file is made, and the files of it that are mutated
    mutate(name, whole, folder, seed)   in ``folder`` the whole files with one mutation, which the name and seed determine

Where a checksum protects what is mutated, half of the mutations get a right one again, so that they come further.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import shutil
import struct
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fuzz_files as files
import fuzz_runs as runs
import mindspore_strategies as made
import numpy as np
import xxhash
from source_files import write_arrow_folder

from unisono.data.convert import Table, write_table
from unisono.data.convert.formats.crc32c import crc32c, masked_crc32c

_EXTREMES = (0, 1, 2, 3, 7, 8, *(2**bits + more for bits in (7, 8, 15, 16, 31, 32, 45, 62, 63, 64) for more in (-1, 0)))
_NUMBERS = (
    *(b"0", b"-1", b"0.5", b"1e308", b"1e999", b"NaN", b"35184372088832", b"9223372036854775808"),
    *(b"9" * 400, b"9" * 5000),
)
_JSON = (
    *(b"null", b"true", b'""', b"[]", b"{}", b"[[]]", b'"x"', b'"\xff"', b'"\\ud800"'),
    *(b"[" * 120, b"[" * 3000, b'{"a":' * 3000),
)
_TOKENS = (
    *(b'"', b",", b"\n", b"\r", b"{", b"}", b"[", b"]", b":", b"\\", b"\0", b"\xff", b"(", b"'", b"-", b"e", b"\x80"),
    *(b"../", b"/"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """How a file of a format is made and read.

    Attributes:
        reader: Name of a reader in ``untrusted.READERS``.
        file: The file or folder that is read.
        make: Writes the whole files into a folder.
        mutated: Names of the files that are mutated.
        text: Whether they are text with numbers, such as JSON.
        reseal: Makes checksums right again; gets the folder and the name of the mutated file.
        rows: What rows of a mutated file may be: "same" (those of the whole file), "some" (of the whole file's rows, any), or
            "any", where nothing tells a changed value from a real one. "any" checks that the file is read or refused by an error
            of four parts, within the limits of time and memory; it does not check that the values are right.
    """

    reader: str
    file: str
    make: Callable[[Path], object]
    mutated: tuple[str, ...]
    text: bool = False
    reseal: Callable[[Path, str], object] | None = None
    rows: str = "any"


ROWS = [
    {"int": n, "txt": f"ü {n}" + "t" * (n % 3), "data": bytes([n]) * 50, "arr": np.arange(3, dtype=np.int64) + n}
    for n in range(6)
]


def record(payload: bytes) -> bytes:
    """A TFRecord."""
    head = struct.pack("<Q", len(payload))
    sums = [struct.pack("<I", masked_crc32c(crc32c(part))) for part in (head, payload)]
    return head + sums[0] + payload + sums[1]


def field(number: int, content: bytes) -> bytes:
    """A field of a protocol buffer, shorter than 128 bytes."""
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


def _tfrecord(folder: Path) -> None:
    records: list[bytes] = []
    for n in range(4):
        values = {
            "i": field(3, field(1, bytes([n, 2, 0x96, 1]))),
            "u": field(3, b"\x08\x01\x08\x96\x01"),
            "f": field(2, field(1, struct.pack("<3f", 1, n, 0.5))),
            "b": field(1, field(1, b"text")),
        }
        entries = b"".join(field(1, field(1, name.encode()) + field(2, value)) for name, value in values.items())
        records.append(record(field(1, entries)))
    (folder / "a.tfrecord").write_bytes(b"".join(records))


def _reseal_tfrecord(folder: Path, name: str) -> None:
    data = bytearray((folder / name).read_bytes())
    at = 0
    while at + 16 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        data[at + 8 : at + 12] = struct.pack("<I", masked_crc32c(crc32c(bytes(data[at : at + 8]))))
        end = at + 12 + length
        if end + 4 > len(data):
            break
        data[end : end + 4] = struct.pack("<I", masked_crc32c(crc32c(bytes(data[at + 12 : end]))))
        at = end + 4
    (folder / name).write_bytes(data)


def _idx(folder: Path, suffix: str = "", pack: Callable[[bytes], bytes] = bytes) -> None:
    images = struct.pack(">4I", 0x803, 5, 4, 3) + bytes(range(60))
    (folder / f"images-idx3-ubyte{suffix}").write_bytes(pack(images))
    (folder / f"labels-idx1-ubyte{suffix}").write_bytes(pack(struct.pack(">2I", 0x801, 5) + bytes(range(5))))


def _cifar(folder: Path) -> None:
    draw = random.Random(0)
    (folder / "test_batch.bin").write_bytes(b"".join(bytes([n]) + draw.randbytes(3072) for n in range(3)))


def _recordio(folder: Path) -> None:
    from unisono.data.recordio import RecordFile, RecordWriter

    with RecordWriter(folder / "a.rec") as writer:
        for n in range(8):
            payload = bytes([n]) * (4 * n) + (b"\x0a\x23\xd7\xce" * 2 if n == 3 else b"")
            writer.write(payload, key=2 * n, side={"label": n, "box": np.arange(n, dtype=np.float32)})
    RecordFile(folder / "a.rec")


def _reseal_sidecar(folder: Path, name: str) -> None:
    path = folder / name
    data = bytearray(path.read_bytes())
    if path.suffix not in (".idx", ".uidx") or len(data) < 40 or data[:4] != b"unis":
        return
    size = struct.unpack_from("<I", data, 12)[0]
    struct.pack_into("<Q", data, 16, len(data))
    data[24:40] = xxhash.xxh3_128(bytes(data[:24] + data[40 : 40 + size])).digest()
    path.write_bytes(data)


def _tokens(folder: Path) -> None:
    from unisono.data.tokens.shards import TokenWriter

    with TokenWriter(folder, "a", vocab_size=300, end_of_document=299, token_bytes=True) as writer:
        for n in range(5):
            ids = np.arange(7 * n + 3) % 290
            writer.add(ids, np.ones(ids.size, np.int64))


def _mindrecord(folder: Path) -> None:
    from unisono.data.mindrecord import MindRecordWriter

    schema = {"array": {"type": "int32", "shape": [-1]}, "blob": "bytes", "label": "int64", "text": "string"}
    with MindRecordWriter(folder / "a", schema, page_bytes=32 << 10, header_bytes=16 << 10) as writer:
        for n in range(6):
            row = {
                "array": np.arange(n + 1, dtype=np.int32) * 1000,
                "blob": bytes([n] * n),
                "label": n,
                "text": "t" * n,
            }
            writer.write(row)


def _checkpoint(folder: Path) -> None:
    import torch
    from states import save_steps

    state = {
        "w": torch.arange(12.0).reshape(3, 4),
        "s": torch.tensor(2.5),
        "e": torch.zeros(0, 5),
        "i": torch.arange(5),
    }
    save_steps(folder, 3, state=state)


def _reseal_checkpoint(folder: Path, name: str) -> None:
    """Digests of the shard in the manifest, and of the manifest in COMMIT."""
    from unisono.checkpoint.manifest import encode_commit_marker

    path = folder / "step-00000003"
    manifest = (path / "manifest.json").read_bytes()
    shard = path / "shard-00000-of-00001.safetensors"
    if name.endswith(".safetensors"):
        facts = json.loads(manifest)
        facts["files"][shard.name] = {
            "bytes": shard.stat().st_size,
            "digest": xxhash.xxh3_128_hexdigest(shard.read_bytes()),
        }
        manifest = json.dumps(facts).encode()
        (path / "manifest.json").write_bytes(manifest)
    if not name.endswith("COMMIT"):
        (path / "COMMIT").write_bytes(encode_commit_marker(manifest, 3))


def _header(folder: Path) -> None:
    header: dict[str, Any] = {"__metadata__": {"a": "b"}}
    header |= {
        f"t{n}": {"dtype": "F32", "shape": [2, n], "data_offsets": [4 * n * (n - 1), 4 * n * (n + 1)]} for n in range(5)
    }
    text = json.dumps(header).encode()
    (folder / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(80))


def _reseal_header(folder: Path, name: str) -> None:
    """The length of the JSON text, as far as it can be seen, and the size of the file."""
    data = (folder / name).read_bytes()
    text = data[8:].rstrip(b"\0")
    (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + len(text) :])


def _events(folder: Path) -> None:
    lines = [{"kind": "run", "t": 1.5, "m": 2.0, "rank": 0, "run": "a", "attempt": 1, "config": {"a": [1, {"b": 2}]}}]
    lines += [{"kind": "step", "step": n, "loss": 1.0 / n, "lr": "NaN", "attempt": 1 + n // 4} for n in range(1, 8)]
    lines += [{"kind": "resumed", "step": 3, "attempt": 2}, {"kind": "checkpoint", "step": 4}]
    (folder / "rank00000.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _strategy(folder: Path) -> None:
    from unisono.plan.options import PlanOptions
    from unisono.plan.resolve import derive_plan
    from unisono.plan.rules import BUILT_IN_RULES

    plan = derive_plan(PlanOptions(device="cpu", tp=2), world_size=4, device="cpu", native_bf16=False)
    plan.updated(tensor_parallel={"rules": BUILT_IN_RULES["bert"]}, fsdp={"ignored_modules": ("**.*a*.b",)}).save(
        folder / "plan.json"
    )


def _mindspore_strategy(folder: Path) -> None:
    made.write(folder / "a.json", made.strategy(dp=4, tp=2, shard=4))


def _mindspore_strategy_protobuf(folder: Path) -> None:
    (folder / "a.ckpt").write_bytes(made.protobuf(made.strategy(dp=4, tp=2, shard=4)))


def _parquet(folder: Path, **options: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "int": list(range(40)),
        "txt": [f"ü {n % 5}" for n in range(40)],
        "data": [bytes([n]) * n for n in range(40)],
        "list": [[float(n)] * (n % 4) for n in range(40)],
        "names": [["a", f"b{n % 3}"] for n in range(40)],
    }
    pq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=20, **options)


def _arrow(folder: Path) -> None:
    import pyarrow as pa

    columns = {
        "int": list(range(20)),
        "txt": [f"ü {n % 5}" for n in range(20)],
        "image": [{"bytes": bytes([n]) * n, "path": None} for n in range(20)],
        "list": [[float(n)] * (n % 4) for n in range(20)],
        "dims": pa.array([[n, n + 1] for n in range(20)], pa.list_(pa.int16(), 2)),
        "flag": [n % 3 == 0 or None for n in range(20)],
        "none": [None] * 20,
    }
    features: dict[str, object] = {
        "int": {"_type": "Value"},
        "list": {"feature": {"names": ["a", "b"], "_type": "ClassLabel"}},
    }
    write_arrow_folder(folder / "d", pa.table(columns), features)


def _tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocab = (
        {"<|endoftext|>": 0, "[PAD]": 1, "[UNK]": 2} | {chr(97 + n): 3 + n for n in range(26)} | {"th": 29, "the": 30}
    )
    whole = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e")], unk_token="[UNK]"))
    whole.pre_tokenizer = pre_tokenizers.Split("[ ,]", "isolated")
    whole.add_special_tokens(["<|endoftext|>", "[PAD]"])
    whole.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    whole.save(str(folder / "tokenizer.json"))


def _toml(folder: Path) -> None:
    (folder / "config.toml").write_text(
        "# of a run\n[model]\nnum_layers = 2\nrope_theta = 1e4\n[run]\ndir = \"a\\u00fc\"\n[optim]\nlr = 1e-3\nkind = 'adamw'\n"
        "[data]\ncorpus = '''stdlib'''\ntrain = ['a', \"b\"]\nseq_len = 1_00\n[launch]\ntimeout_s = 0x20\n"
        '[plan]\ntp = 1\n[train]\n"steps" = 10 # last\n'
    )


def _tar(folder: Path, name: str = "a.tar") -> None:
    write_table(folder / "a.tar", Table(rows=ROWS))
    if name.endswith(".gz"):
        (folder / name).write_bytes(gzip.compress((folder / "a.tar").read_bytes()))
        (folder / "a.tar").unlink()


def _gnu_tar(folder: Path) -> None:
    with tarfile.open(folder / "a.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        for name in ("f/" + "n" * 120 + ".txt", "f/b.cls"):
            member = tarfile.TarInfo(name)
            member.size = 2
            archive.addfile(member, io.BytesIO(b"12"))


def _reseal_tar(folder: Path, name: str) -> None:
    data = bytearray((folder / name).read_bytes())
    for at in range(0, len(data) - 511, 512):
        if data[at + 257 : at + 262] == b"ustar":
            data[at + 148 : at + 156] = b" " * 8
            data[at + 148 : at + 156] = f"{sum(data[at : at + 512]):06o}".encode() + b"\0 "
    (folder / name).write_bytes(data)


def _rows(name: str) -> Callable[[Path], object]:
    rows: list[Any] = (
        [{"txt": row["txt"], "int": row["int"], "f": 0.5} for row in ROWS] if name.endswith(".csv") else ROWS
    )
    return lambda folder: write_table(folder / name, Table(rows=rows))


_SHARD = "step-00000003/shard-00000-of-00001.safetensors"
FORMATS: dict[str, Format] = {
    "recordio": Format(reader="recordio", file="a.rec", make=_recordio, mutated=("a.rec",), rows="same"),
    "recordio_alone": Format(
        reader="recordio", file="a.rec", mutated=("a.rec", "a.idx"), text=True,
        make=lambda folder: (_recordio(folder), (folder / "a.uidx").unlink()),
    ),
    "sidecar": Format(reader="recordio", file="a.rec", make=_recordio, mutated=("a.uidx",), text=True, reseal=_reseal_sidecar),
    "recordio_verified": Format(
        reader="recordio_verified", file="a.rec", make=_recordio, mutated=("a.rec", "a.uidx", "a.idx"), text=True, rows="same"
    ),
    "recordio_repaired": Format(
        reader="recordio_repaired", file="a.rec", make=_recordio, mutated=("a.rec", "a.uidx", "a.idx"), text=True, rows="some"
    ),
    "mindrecord": Format(reader="mindrecord", file="a", make=_mindrecord, mutated=("a",), text=True),
    "mindrecord_index": Format(reader="mindrecord", file="a", make=_mindrecord, mutated=("a.db",), rows="same"),
    "parquet": Format(reader="table", file="a.parquet", make=_parquet, mutated=("a.parquet",)),
    "parquet_v2": Format(
        reader="table", file="a.parquet", mutated=("a.parquet",),
        make=lambda folder: _parquet(folder, data_page_version="2.0", compression="zstd", use_dictionary=["txt"]),
    ),
    "parquet_delta": Format(
        reader="table", file="a.parquet", mutated=("a.parquet",),
        make=lambda folder: _parquet(
            folder, use_dictionary=False, compression="none",
            column_encoding={"int": "DELTA_BINARY_PACKED", "txt": "DELTA_BYTE_ARRAY", "data": "DELTA_LENGTH_BYTE_ARRAY"},
        ),
    ),
    "arrow": Format(reader="arrow", file="d", make=_arrow, mutated=("d/data-00000-of-00001.arrow",)),
    "arrow_folder": Format(
        reader="arrow", file="d", make=_arrow, mutated=("d/state.json", "d/dataset_info.json"), text=True
    ),
    "tar": Format(reader="table", file="a.tar", make=_tar, mutated=("a.tar",), reseal=_reseal_tar),
    "tar_gnu": Format(reader="table", file="a.tar", make=_gnu_tar, mutated=("a.tar",), reseal=_reseal_tar),
    "tar_gz": Format(reader="table", file="a.tar.gz", make=lambda f: _tar(f, "a.tar.gz"), mutated=("a.tar.gz",), rows="some"),
    "csv": Format(reader="table", file="a.csv", make=_rows("a.csv"), mutated=("a.csv",), text=True),
    "jsonl": Format(reader="table", file="a.jsonl", make=_rows("a.jsonl"), mutated=("a.jsonl",), text=True),
    "tfrecord": Format(reader="table", file="a.tfrecord", make=_tfrecord, mutated=("a.tfrecord",), rows="some"),
    "tf_example": Format(
        reader="table", file="a.tfrecord", make=_tfrecord, mutated=("a.tfrecord",), reseal=_reseal_tfrecord
    ),
    "idx": Format(
        reader="table", file="images-idx3-ubyte", make=_idx, mutated=("images-idx3-ubyte", "labels-idx1-ubyte")
    ),
    "idx_gz": Format(
        reader="table", file="images-idx3-ubyte.gz", rows="some", mutated=("images-idx3-ubyte.gz", "labels-idx1-ubyte.gz"),
        make=lambda folder: _idx(folder, ".gz", gzip.compress),
    ),
    "cifar": Format(reader="table", file="test_batch.bin", make=_cifar, mutated=("test_batch.bin",)),
    "tokens": Format(reader="tokens", file="a-00000.bin", make=_tokens, mutated=("a-00000.bin", "a-00000.idx"), rows="same"),
    "tokens_index": Format(
        reader="tokens", file="a-00000.bin", make=_tokens, mutated=("a-00000.idx",), text=True, reseal=_reseal_sidecar
    ),
    "checkpoint": Format(
        reader="checkpoint", file="step-00000003", make=_checkpoint, rows="same",
        mutated=("step-00000003/manifest.json", "step-00000003/COMMIT", _SHARD),
    ),
    "manifest": Format(
        reader="checkpoint", file="step-00000003", make=_checkpoint, mutated=("step-00000003/manifest.json",), text=True,
        reseal=_reseal_checkpoint,
    ),
    "shard": Format(
        reader="checkpoint", file="step-00000003", make=_checkpoint, mutated=(_SHARD,), text=True, reseal=_reseal_checkpoint
    ),
    "safetensors": Format(
        reader="header", file="a.safetensors", make=_header, mutated=("a.safetensors",), text=True, reseal=_reseal_header
    ),
    "events": Format(reader="events", file="rank00000.jsonl", make=_events, mutated=("rank00000.jsonl",), text=True),
    "run_folder": Format(
        reader="run_folder", file="run", make=runs.run_folder, text=True,
        mutated=(
            "run/events/rank00000.jsonl", "run/events/rank00001.jsonl", "run/profile/step-00000003/rank-0.json",
            "run/logs/stacks-rank-0.json", "run/logs/stacks-rank-1.json", "run/launch.json", "calibration.json",
        ),
    ),
    "trace": Format(reader="trace", file="trace.json", make=runs.trace, mutated=("trace.json",), text=True),
    "toml": Format(reader="toml", file="config.toml", make=_toml, mutated=("config.toml",), text=True),
    "tokenizer": Format(reader="tokenizer", file="tokenizer.json", make=_tokenizer, mutated=("tokenizer.json",), text=True),
    "mindspore_strategy": Format(
        reader="mindspore_strategy", file="a.json", make=_mindspore_strategy, mutated=("a.json",), text=True
    ),
    "mindspore_strategy_protobuf": Format(
        reader="mindspore_strategy", file="a.ckpt", make=_mindspore_strategy_protobuf, mutated=("a.ckpt",)
    ),
    "strategy": Format(reader="strategy", file="plan.json", make=_strategy, mutated=("plan.json",), text=True),
    "image_jpeg": Format(reader="image", file="a.img", make=files.tiled_image, mutated=("a.img",)),
    "image_progressive": Format(
        reader="image", file="a.img", make=files.image("JPEG", progressive=True), mutated=("a.img",)
    ),
    "image_png": Format(reader="image", file="a.img", make=files.image("PNG"), mutated=("a.img",), rows="same"),
    "image_png_sealed": Format(
        reader="image", file="a.img", make=files.image("PNG", "P"), mutated=("a.img",), reseal=files.reseal_png
    ),
    "image_gif": Format(reader="image", file="a.img", make=files.image("GIF"), mutated=("a.img",)),
    "image_webp": Format(reader="image", file="a.img", make=files.image("WebP", lossless=True), mutated=("a.img",)),
    "image_bmp": Format(reader="image", file="a.img", make=files.image("BMP", "P"), mutated=("a.img",)),
    "image_ppm": Format(reader="image", file="a.img", make=files.image("PPM"), mutated=("a.img",)),
    "image_record": Format(reader="image_record", file="a.rec", make=files.image_records, mutated=("a.rec",)),
    "class_names": Format(
        reader="class_names", file="a.rec", make=files.class_names, mutated=("a.rec.classes.txt",), text=True
    ),
    "packed_sample": Format(reader="packed_sample", file="a.rec", make=files.packed_samples, mutated=("a.rec",), text=True),
    "image_lst": Format(
        reader="image_list", file="a.lst", mutated=("a.lst",), text=True,
        make=files.image_list("a.lst", [f"{n}\t{n}.5\t-1\tf/{n}.jpg" for n in range(4)]),
    ),
    "image_csv": Format(
        reader="image_list", file="a.csv", mutated=("a.csv",), text=True,
        make=files.image_list("a.csv", ["path,label", *(f'f/{n}.jpg,"class {n % 2}"' for n in range(4))]),
    ),
    "pretrained": Format(
        reader="pretrained", file="m", make=files.pretrained, text=True,
        mutated=(
            "m/config.json", "m/generation_config.json", "m/model.safetensors.index.json",
            "m/model-00001-of-00002.safetensors",
        ),
    ),
    "pretrained_model": Format(
        reader="pretrained_model", file="m", make=files.pretrained_model, mutated=("m/config.json", "m/model.safetensors"),
        text=True,
    ),
    "bert": Format(
        reader="bert", file="m", make=files.bert, mutated=("m/config.json", "m/model.safetensors"), text=True
    ),
    "mxnet_params": Format(
        reader="weights", file="named.params", make=files.weights("named.params"), mutated=("named.params",)
    ),
    "mxnet_npz": Format(
        reader="weights", file="numpy-mode.params", make=files.weights("numpy-mode.params"), mutated=("numpy-mode.params",)
    ),
    "mindspore_checkpoint": Format(
        reader="weights", file="all.ckpt", make=files.weights("all.ckpt"), mutated=("all.ckpt",), reseal=files.reseal_crc
    ),
    "snapshot": Format(
        reader="snapshot", file="s", make=files.snapshots, text=True, rows="same",
        mutated=("s/snapshot-00000001/state.json", "s/snapshot-00000001/state.safetensors"),
    ),
    "optimizer_states": Format(
        reader="optimizer_states", file="a.states", make=files.optimizer_states, mutated=("a.states",), text=True,
        reseal=_reseal_header,
    ),
    "mindrecord_encrypted": Format(
        reader="mindrecord_encrypted", file="a", rows="same", mutated=("a", "a.db"),
        make=lambda folder: (_mindrecord(folder), files.encrypted(folder, "a"), files.encrypted(folder, "a.db")),
    ),
    "packing_journal": Format(
        reader="packing", file="", make=files.interrupted_packing, text=True, rows="same",
        mutated=("a.rec.part/all-00000.json", "a.rec.part/job.json", "a.rec.part/all-00000/part.rec"),
    ),
    "packing_ending": Format(
        reader="packing", file="", make=files.ending_packing, text=True, rows="same",
        mutated=("a.rec.part/ending.json", "a.rec.part/all-00001/part.rec"),
    ),
}  # fmt: skip


def make(name: str, folder: Path) -> None:
    """Write the whole files of a format into a new folder."""
    folder.mkdir(parents=True)
    FORMATS[name].make(folder)


def copy(whole: Path, folder: Path) -> None:
    """Copy the files of ``whole`` into ``folder``, which is emptied. A copy is read, as readers write files beside theirs."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)


def mutate(name: str, whole: Path, folder: Path, seed: int) -> None:
    """Copy the files of ``whole`` into ``folder``, which is emptied, one of them mutated."""
    case, draw = FORMATS[name], random.Random(f"{name}:{seed}")
    copy(whole, folder)
    target = draw.choice(case.mutated)
    data = (folder / target).read_bytes()
    for _ in range(draw.choice((1, 1, 1, 2, 3, 5))):
        data = _mutated(data, draw, text=case.text)
    (folder / target).write_bytes(data)
    if case.reseal is not None and draw.random() < 0.75:
        case.reseal(folder, target)


def _mutated(data: bytes, draw: random.Random, *, text: bool) -> bytes:
    """One change: bits, a length, a truncation, a piece twice, a piece elsewhere, or in text a number or value."""
    out = bytearray(data)
    at = draw.randrange(len(out) + 1)
    if draw.random() < 0.4:  # where heads and footers are
        at = min(len(out), draw.choice((at % 64, max(0, len(out) - 1 - at % 64))))
    match draw.randrange(9 if text else 7):
        case 0 if out:
            out[at % len(out)] ^= 1 << draw.randrange(8)
        case 1 if out:
            out[at % len(out)] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        case 2:
            size = draw.choice((1, 2, 4, 4, 8, 8))
            number = draw.choice(_EXTREMES) & ((1 << 8 * size) - 1)
            out[at : at + size] = number.to_bytes(size, draw.choice(("little", "big")))
        case 3:
            del out[at:]
        case 4:
            piece = out[at : at + draw.choice((1, 4, 16, 64, 512, 4096))]
            out[at:at] = piece * draw.choice((1, 1, 2, 50))
        case 5:
            size = draw.choice((1, 4, 16, 100, 512))
            source = draw.randrange(len(out) + 1)
            out[at : at + size] = out[source : source + size]
        case 6:
            del out[at : at + draw.choice((1, 2, 4, 8, 100, 512))]
        case 7:
            out[at : at + draw.randrange(3)] = draw.choice(_TOKENS)
        case _:
            _change_value(out, at, draw)
    return bytes(out)


def _change_value(out: bytearray, at: int, draw: random.Random) -> None:
    """Replace the next number, or what stands behind the next colon, in a text."""
    begin = next((place for place in range(at, min(len(out), at + 200)) if out[place] in b":0123456789"), None)
    if begin is None:
        return
    begin += out[begin] == ord(":")
    end = begin
    while end < len(out) and end < begin + 30 and out[end] not in b',}]\n "':
        end += 1
    out[begin:end] = draw.choice(draw.choice((_NUMBERS, _JSON)))
