"""RecordIO files as Apache MXNet 1.9.1 writes them; run by hand with an interpreter that has it:

    python tests/peers/make_recordio_fixtures.py

needs mxnet==1.9.1, numpy<1.24, opencv-python-headless==4.7.0.72. Writes tests/data/recordio/fixtures: ``payloads.rec`` and its
``.idx`` (keys neither contiguous nor in order), ``images.rec`` with headers of one and of several labels, and
``expected.json``: what MXNet reads back from them.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import mxnet as mx
import numpy as np

FOLDER = Path(__file__).parents[1] / "data/recordio/fixtures"
MAGIC = bytes.fromhex("0a23d7ce")


def payloads() -> list[bytes]:
    """Every way the escape rule can be hit, and bytes of any length with magic words strewn in."""
    rng = random.Random(0)
    chosen = [b"", b"abc", b"abcd", MAGIC, b"X" + MAGIC, b"ABCD" + MAGIC + b"EF", MAGIC * 2, MAGIC * 3 + b"1"]
    chosen += [b"1234" + MAGIC + MAGIC, b"12345678" + MAGIC + b"x" * 4 + MAGIC, MAGIC[:3] + MAGIC, MAGIC + MAGIC[:3]]
    for length in range(40):
        block = bytearray(rng.randbytes(length))
        for _ in range(length // 10):
            at = rng.randrange(0, length - 4)
            block[at : at + 4] = MAGIC
        chosen.append(bytes(block))
    return chosen


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    made = payloads()
    keys = [3 * number + 7 for number in range(len(made))]
    random.Random(1).shuffle(keys)
    writer = mx.recordio.MXIndexedRecordIO(str(FOLDER / "payloads.idx"), str(FOLDER / "payloads.rec"), "w")
    for key, payload in zip(keys, made, strict=True):
        writer.write_idx(key, payload)
    writer.close()
    reader = mx.recordio.MXIndexedRecordIO(str(FOLDER / "payloads.idx"), str(FOLDER / "payloads.rec"), "r")
    read = {key: reader.read_idx(key).hex() for key in reader.keys}
    assert [bytes.fromhex(read[key]) for key in keys] == made

    writer = mx.recordio.MXIndexedRecordIO(str(FOLDER / "images.idx"), str(FOLDER / "images.rec"), "w")
    rng = np.random.default_rng(0)
    labels = [4.0, 7, [1, 2, 3], [0.5], np.arange(5) / 3]
    for number, label in enumerate(labels):
        image = rng.integers(0, 256, (12 + number, 10, 3), np.uint8)
        header = mx.recordio.IRHeader(0, label, 2574 + number, number)
        writer.write_idx(number, mx.recordio.pack_img(header, image, quality=90))
    writer.write_idx(len(labels), mx.recordio.pack(mx.recordio.IRHeader(0, 4.0, 2574, 0), b"raw"))
    writer.close()
    reader = mx.recordio.MXIndexedRecordIO(str(FOLDER / "images.idx"), str(FOLDER / "images.rec"), "r")
    images = []
    for key in reader.keys:
        header, payload = mx.recordio.unpack(reader.read_idx(key))
        images.append(
            {
                "flag": int(header.flag),
                "label": np.asarray(header.label, np.float32).reshape(-1).tolist(),
                "id": int(header.id),
                "id2": int(header.id2),
                "payload": payload.hex(),
            }
        )
    expected = {"mxnet": mx.__version__, "keys": keys, "payloads": read, "images": images}
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
