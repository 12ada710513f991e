"""Files of other formats as their own packages write them, and what these read of them; run by hand:

    python tests/peers/make_formats_fixtures.py write     needs webdataset==1.0.2, tfrecord==1.14.6
    python tests/peers/make_formats_fixtures.py read      needs mindspore==2.10.0, numpy<2

``write`` makes tests/data/convert/formats/fixtures: tar archives by webdataset, with what webdataset's own decoders read of them;
TFRecord by the tfrecord package; idx and CIFAR files as their authors' pages describe them. ``read`` adds what MindSpore reads
of the last three; it takes CIFAR only in files of as many records as the original ones, so ours are repeated for it.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import struct
import sys
import tempfile
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parents[1] / "data/convert/formats/fixtures"
# MindSpore fails on a value of no bytes, so there is none
EXAMPLES = [
    {
        "image": (bytes(range(n, n + 40 * n + 1)), "byte"),
        "label": (n * (-1) ** n * 10**n, "int"),
        "score": (n / 3, "float"),
        "ids": ([n, 0, -n, 2**62 + n, -(2**63)], "int"),
        "box": ([n / 7, -0.0, 1e-40, 3e38], "float"),
        "text": (f"ünïcode {n}".encode(), "byte"),
    }
    for n in range(6)
]


def told(value):
    """A value as JSON that loses nothing."""
    if isinstance(value, np.ndarray):
        return {
            "dtype": value.dtype.name,
            "shape": list(value.shape),
            "sha256": hashlib.sha256(value.tobytes()).hexdigest(),
        }
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return {"float": value.hex()} if isinstance(value, float) else value


def write() -> None:
    import webdataset
    from tfrecord.writer import TFRecordWriter

    FOLDER.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    samples = [
        {
            "__key__": ("folder/" + "long" * 30 if n == 3 else f"sample{n:04d}"),
            "jpg": rng.bytes(700 if n == 1 else 20),
            "cls": n - 2,
            "txt": f"text ünïcode {n}\n",
            "json": {"n": n, "of": [1, 2]},
            "mask.npy": rng.integers(0, 255, (2, n + 1, 3)).astype(np.uint8),
            "seg.png": rng.bytes(8),
        }
        for n in range(5)
    ]
    expected = {}
    for name, compress in (("samples.tar", False), ("samples.tar.gz", True)):
        # an open file, as webdataset would take the suffix for a question of compression itself
        with (FOLDER / name).open("wb") as file:
            packed = gzip.GzipFile(fileobj=file, mode="wb", mtime=0) if compress else file
            with webdataset.TarWriter(packed, mtime=0) as sink:
                for sample in samples:
                    sink.write(sample)
            packed.close()
        found = webdataset.WebDataset(str(FOLDER / name), shardshuffle=False).decode()
        expected[name] = [
            {name: told(value) for name, value in row.items() if name not in ("__url__", "__local_path__")}
            for row in found
        ]
    writer = TFRecordWriter(str(FOLDER / "examples.tfrecord"))
    for example in EXAMPLES:
        writer.write(example)
    writer.close()
    mnist(FOLDER / "mnist")
    cifar(FOLDER / "cifar10", "data_batch_{}", 5, [(10,)])
    cifar(FOLDER / "cifar100", "train", 1, [(20,), (100,)])
    (FOLDER / "webdataset.json").write_text(json.dumps(expected, indent=1) + "\n")


def pattern(count, *shape):
    """Pictures that differ in every pixel of any row, and that compress."""
    size = int(np.prod(shape))
    return ((np.arange(size) * 7 + np.arange(count)[:, None] * 13) % 251).astype(np.uint8).reshape(count, *shape)


def mnist(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    images, labels = pattern(9, 28, 28), np.arange(9, dtype=np.uint8)
    files = {
        "train-images-idx3-ubyte": struct.pack(">IIII", 0x803, 9, 28, 28) + images.tobytes(),
        "train-labels-idx1-ubyte": struct.pack(">II", 0x801, 9) + labels.tobytes(),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)


def cifar(folder: Path, name: str, files: int, classes) -> None:
    folder.mkdir(exist_ok=True)
    for file in range(files):
        images = pattern(2, 3, 32, 32) + np.uint8(file)
        records = b"".join(
            bytes((file * 2 + n + k) % count for k, (count,) in enumerate(classes)) + image.tobytes()
            for n, image in enumerate(images)
        )
        (folder / f"{name.format(file + 1)}.bin").write_bytes(records)


def read() -> None:
    import mindspore.dataset as ds

    def rows(dataset):
        return [
            {name: told(np.asarray(value)) for name, value in row.items()}
            for row in dataset.create_dict_iterator(num_epochs=1, output_numpy=True)
        ]

    found = {"mnist": rows(ds.MnistDataset(str(FOLDER / "mnist"), usage="train", shuffle=False))}
    for name, kind, records in (("cifar10", ds.Cifar10Dataset, 10_000), ("cifar100", ds.Cifar100Dataset, 50_000)):
        with tempfile.TemporaryDirectory() as folder:
            for file in (FOLDER / name).iterdir():
                (Path(folder) / file.name).write_bytes(file.read_bytes() * (records // 2))
            every = rows(kind(folder, usage="train", shuffle=False))
        assert len(every) == 50_000
        found[name] = [every[begin + n] for begin in range(0, 50_000, records) for n in range(2)]
    examples = ds.TFRecordDataset(str(FOLDER / "examples.tfrecord"), shuffle=False)
    found["examples"] = [
        # a value of bytes comes as an array of them
        {
            name: [told(value.tobytes())] if value.dtype == np.uint8 else [told(each) for each in value.tolist()]
            for name, value in row.items()
        }
        for row in examples.create_dict_iterator(num_epochs=1, output_numpy=True)
    ]
    (FOLDER / "mindspore.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]]()
