"""Whole small files of the kinds in ``fuzz.FORMATS`` whose contents are images, samples, models, or the state of a process."""

from __future__ import annotations

import io
import json
import shutil
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

KEY = "a key of 24 bytes, yes! "  # of the encrypted MindRecord file
_INPUTS = 6  # of the packing job


def _pixels(number: int = 0) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (20, 36, 3), np.uint8)


def jpeg(number: int = 0) -> bytes:
    """A JPEG with restart markers, whose tiles can be decoded alone."""
    from unisono.data.image import encode_jpeg

    return encode_jpeg(_pixels(number), quality=60, tile_px=16)


def image(name: str, mode: str = "RGB", **options: Any) -> Callable[[Path], object]:
    """What writes ``a.img`` by Pillow, in the format ``name``."""

    def make(folder: Path) -> None:
        from PIL import Image

        out = io.BytesIO()
        Image.fromarray(_pixels()).convert(mode).save(out, name, **options)
        (folder / "a.img").write_bytes(out.getvalue())

    return make


def tiled_image(folder: Path) -> None:
    (folder / "a.img").write_bytes(jpeg())


def reseal_png(folder: Path, name: str) -> None:
    """The checksum of every chunk that is whole."""
    data = bytearray((folder / name).read_bytes())
    at = 8
    while at + 12 <= len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        if end > len(data):
            break
        data[end - 4 : end] = zlib.crc32(data[at + 4 : end - 4]).to_bytes(4, "big")
        at = end
    (folder / name).write_bytes(data)


def image_records(folder: Path) -> None:
    """Image records with one label and with several. Their sidecar, whose checksums would refuse every change, is deleted."""
    from unisono.data.recordio import ImageHeader, RecordWriter, pack_header

    png = io.BytesIO()
    from PIL import Image

    Image.fromarray(_pixels(9)).save(png, "PNG")
    with RecordWriter(folder / "a.rec") as writer:
        for number in range(4):
            label = number if number < 3 else np.arange(3, dtype=np.float32)
            writer.write(
                pack_header(ImageHeader(label=label, id=number), png.getvalue() if number == 2 else jpeg(number))
            )
    (folder / "a.uidx").unlink()


def class_names(folder: Path) -> None:
    """Packed records of three classes, and the names of these."""
    from unisono.data.recordio import ImageHeader, RecordWriter, pack_header

    with RecordWriter(folder / "a.rec") as writer:
        for number in range(3):
            writer.write(pack_header(ImageHeader(label=number, id=number), jpeg(number)))
    (folder / "a.rec.classes.txt").write_text("cat\ndög\nA third one\n")


def packed_samples(folder: Path) -> None:
    """Samples as the copies of tables in the cache have them, without the sidecar."""
    from unisono.data.packed_sample import pack_sample
    from unisono.data.recordio import RecordWriter

    with RecordWriter(folder / "a.rec") as writer:
        for number in range(5):
            sample = {
                "text": np.frombuffer(b"text" * number, np.uint8),
                "label": np.int64(number),
                "box": np.arange(4 * number, dtype=np.float32).reshape(number, 4),
            }
            writer.write(pack_sample({name: np.asarray(value) for name, value in sample.items()}))
    (folder / "a.uidx").unlink()


def image_list(name: str, lines: list[str]) -> Callable[[Path], object]:
    """What writes a list of images and the images."""

    def make(folder: Path) -> None:
        (folder / "f").mkdir()
        for number in range(4):
            (folder / "f" / f"{number}.jpg").write_bytes(jpeg(number))
        (folder / name).write_text("".join(f"{line}\n" for line in lines))

    return make


def pretrained(folder: Path) -> None:
    """A folder of a pretrained model with its weights in two files, named by an index."""
    model = folder / "m"
    model.mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "vocab_size": 8}
    config |= {"attn_implementation": "sdpa", "rope_scaling": {"type": "linear", "factor": 2.0}, "limit": float("inf")}
    (model / "config.json").write_text(json.dumps(config))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "temperature": 0.5}))
    weight_map: dict[str, str] = {}
    for number in range(2):
        header = {"__metadata__": {"format": "pt"}} | {
            f"layers.{number}.{part}": {"dtype": "F32", "shape": [2, 4], "data_offsets": [32 * at, 32 * at + 32]}
            for at, part in enumerate(("weight", "bias"))
        }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file = model / f"model-{number + 1:05d}-of-00002.safetensors"
        file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(range(64)))
        weight_map |= dict.fromkeys(list(header)[1:], file.name)
    index = {"metadata": {"total_size": 128}, "weight_map": weight_map}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def pretrained_model(folder: Path) -> None:
    """A folder that transformers wrote."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=12, max_position_embeddings=8, **sizes)
    transformers.BertForMaskedLM(config).save_pretrained(folder / "m")


def bert(folder: Path) -> None:
    """A folder of ``BertForMaskedLM`` as a run exports it."""
    import torch
    from safetensors.torch import save_file

    from unisono.interop.bert import bert_config, bert_name
    from unisono.models.bert import BERT, BertOptions

    torch.manual_seed(0)
    model = BERT(BertOptions(vocab_size=12, num_layers=1, dim=8, num_heads=2, ffn_dim=8, max_length=8))
    (folder / "m").mkdir()
    (folder / "m" / "config.json").write_text(json.dumps(bert_config(model)))
    tensors = {bert_name(name): parameter.detach() for name, parameter in model.named_parameters()}
    save_file(tensors, folder / "m" / "model.safetensors")


def snapshots(folder: Path) -> None:
    """The only snapshot of a parameter server."""
    import torch

    from unisono.kvstore.server.snapshot import write_snapshot

    tensors = {"0/value": torch.arange(12.0), "0/step": torch.tensor(3), "1/value": torch.ones(2, 3)}
    facts = {"agreed": {"table": {"a": [[12], "float32"]}}, "clock": 7, "queue": [1, 2, {"item": "x"}]}
    write_snapshot(folder / "s", facts, tensors, after=0)


def optimizer_states(folder: Path) -> None:
    import torch

    from unisono.kvstore.optimizer_file import write_optimizer_file

    state = {"optim/momentum/w": torch.arange(12.0).reshape(3, 4), "optim/step/w": torch.tensor(3)}
    write_optimizer_file(folder / "a.states", "sgd", state)


def encrypted(folder: Path, name: str) -> None:
    """Encrypt a file in blocks of 10,000 bytes, as MindSpore does in blocks of 64 MiB."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    content, blocks = (folder / name).read_bytes(), b""
    for at in range(0, len(content), 10_000):
        nonce = at.to_bytes(16, "little")
        sealed = AESGCM(KEY.encode()).encrypt(nonce[:12], content[at : at + 10_000], None)
        text, tag = sealed[:-16], sealed[-16:]
        head = struct.pack("<I16sII16sI", 0x7F3A5ED8, tag, 24 + len(text), 16, nonce, len(text))
        blocks += struct.pack(">i", len(head) + len(text)) + head + text
    (folder / name).write_bytes(blocks + bytes(4) + b"AES-GCM" + b"ENCRYPT")


def run_packing_job(folder: Path, *, fail_at: int | None = None) -> list[bytes]:
    """Pack six inputs into two shards, or continue the job that is in the folder; returns the records that it wrote.

    ``fail_at``: the number of the input at which it is interrupted.
    """
    from unisono.data.convert.pack.pack_job import PackJob, cut_by_count, run_pack_job
    from unisono.data.convert.pack.partial_target import PackedInput, ShardSeries
    from unisono.data.recordio import RecordFile, RecordWriter

    def source(start: int) -> Any:
        for number in range(start, _INPUTS):
            if number == fail_at:
                raise KeyboardInterrupt
            yield PackedInput(records=(bytes([number]) * 9,), size=9)

    def write(path: Path, records: Any) -> None:
        with RecordWriter(path) as writer:
            for record in records:
                writer.write(record)

    series = ShardSeries(
        source=source, file=lambda _: "part.rec", write=write, cut=cut_by_count(_INPUTS, 2), total=_INPUTS
    )
    job = PackJob(source="six", target=folder / "a.rec", identity={"n": _INPUTS}, on_error="skip")
    result = run_pack_job(job, [series])
    return [payload for file in result.files for payload in RecordFile(file)]


def interrupted_packing(folder: Path) -> None:
    """A job that ended in its second shard."""
    with suppress(KeyboardInterrupt):
        run_packing_job(folder, fail_at=4)


def ending_packing(folder: Path) -> None:
    """A job that ended after all shards, before it moved any."""
    from unisono.data.convert.pack.partial_target import PartialTarget

    with suppress(KeyboardInterrupt), patch.object(PartialTarget, "commit", side_effect=KeyboardInterrupt):
        run_packing_job(folder)


def weights(name: str) -> Callable[[Path], object]:
    """A file of weights that MXNet, MindSpore or NumPy has written."""
    return partial(shutil.copy, Path(__file__).parents[1] / "interop" / "fixtures" / name)


def reseal_crc(folder: Path, name: str) -> None:
    """The CRC-32 at the end of a checkpoint of MindSpore, where there is still one."""
    content, mark, _ = (folder / name).read_bytes().rpartition(b"crc_num")
    if mark:
        (folder / name).write_bytes(content + mark + zlib.crc32(content).to_bytes(10, "big"))
