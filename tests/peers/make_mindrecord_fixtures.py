"""MindRecord files as MindSpore 2.10.0 writes them, and what it reads; run by hand with an interpreter that has it:

    python tests/peers/make_mindrecord_fixtures.py                   writes tests/data/mindrecord/fixtures
    python tests/peers/make_mindrecord_fixtures.py TASK.json OUT     reads other files, for the tests marked ``peer``

needs mindspore==2.10.0, numpy<2. Files are stored gzipped (most of each is room that the format leaves empty);
``expected.json`` has for each case the rows as they were given and, for each file, as ``FileReader`` returns them.
A task lists ``{"read": path}``, ``{"append": path, "rows": …}`` and ``{"write": path, "schema": …, "rows": …}``; what is read
of a path goes to OUT, by FileReader (its files one by one) and by MindDataset.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
import tempfile
from pathlib import Path

import mindspore
import numpy as np
from mindspore.dataset import MindDataset
from mindspore.mindrecord import FileReader, FileWriter, set_enc_key, set_enc_mode

FOLDER = Path(__file__).parents[1] / "data/mindrecord/fixtures"
KEY = "0123456789abcdef"
HEADER_BYTES, PAGE_BYTES = 16 << 10, 32 << 10
WORDS = ["", "plain", "ünïcode", "数据", "🎼 unisono", 'quote " and \\ slash', "line\nbreak\ttab"]


def told(value):
    """A value as JSON that loses nothing; of long bytes and strings their digest."""
    if isinstance(value, np.ndarray):
        return {
            "dtype": value.dtype.name,
            "shape": list(value.shape),
            "data": told(np.ascontiguousarray(value).tobytes()),
        }
    if isinstance(value, bytes):
        return value.hex() if len(value) <= 64 else f"sha256:{len(value)}:{hashlib.sha256(value).hexdigest()}"
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        return {"text": value if len(value) <= 64 else told(value.encode())}
    return {"float": value.hex()} if isinstance(value, float) else value


def told_rows(rows):
    return [{name: told(value) for name, value in row.items()} for row in rows]


def read(paths, key=None):
    """Rows by FileReader, of these files only, in order."""
    set_enc_key(key)
    reader = FileReader([str(path) for path in paths], num_consumer=1)
    rows = list(reader.get_next())
    reader.close()
    set_enc_key(None)
    return rows


def read_set(path):
    """Rows by MindDataset, of the whole set."""
    dataset = MindDataset(str(path), num_parallel_workers=1, shuffle=False)
    rows = []
    for row in dataset.create_dict_iterator(num_epochs=1, output_numpy=True):
        rows.append({name: plain(value) for name, value in row.items()})
    return rows


def plain(value):
    """What MindDataset makes of a value, back."""
    if value.dtype.kind == "S":  # no bytes look like one zero byte
        return b"" if value.tobytes() == b"\0" else value.tobytes()
    if value.dtype.kind == "U":
        return str(value)
    return value.item() if value.ndim == 0 else value


def write(path, schema, calls, *, shards=1, index=None, append=()):
    writer = FileWriter(str(path), shard_num=shards, overwrite=True)
    writer.set_header_size(HEADER_BYTES)
    writer.set_page_size(PAGE_BYTES)
    writer.add_schema(schema, "a description")
    if index:
        writer.add_index(index)
    for rows in calls:
        writer.write_raw_data([dict(row) for row in rows])
    writer.commit()
    for rows in append:
        writer = FileWriter.open_for_append(str(path))
        writer.write_raw_data([dict(row) for row in rows])
        writer.commit()


def cases():
    """name → (schema, calls, options)."""
    scalars = {
        "number": {"type": "int32"},
        "long": {"type": "int64"},
        "single": {"type": "float32"},
        "double": {"type": "float64"},
        "word": {"type": "string"},
    }
    every = [
        {
            "number": (-1) ** n * (2 ** (4 * n) + n) if n < 8 else [2**31 - 1, -(2**31)][n % 2],
            "long": (-1) ** n * (2 ** (8 * n) - n) if n < 8 else [2**63 - 1, -(2**63)][n % 2],
            "single": [0.5, 2.0, -1.25, 0.1, 3.0e38, 1e-30, 7.0][n % 7],
            "double": [0.1, 2.0, -1.25e300, 1 / 3, 1e-300, 5.0, -0.75][n % 7],
            "word": WORDS[n % len(WORDS)],
        }
        for n in range(10)
    ]
    image = {"image": {"type": "bytes"}}
    yield (
        "scalars",
        {**scalars, **image},
        [[{**row, "image": bytes([n] * (3 * n + 1))} for n, row in enumerate(every)]],
        {},
    )
    yield "indexed", {**scalars, **image}, [[{**row, "image": b"x"} for row in every]], {"index": ["word", "long"]}
    yield "noblob", scalars, [every[:4], every[4:]], {}
    yield "noraw", image, [[{"image": bytes(range(n + 1))} for n in range(9)]], {}
    labelled = {"label": {"type": "int64"}, **image}
    yield "pages", labelled, [[{"label": n, "image": bytes([n]) * (700 * (n % 11) + 1)} for n in range(60)]], {}
    texts = {"label": {"type": "int32"}, "text": {"type": "string"}, **image}
    long = [{"label": n, "text": f"{n} " * (40 * (n % 17) + 1), "image": bytes([n]) * (90 * n)} for n in range(1, 121)]
    yield "calls", texts, [long[at : at + 15] for at in range(0, 120, 15)], {}
    yield "append", texts, [long[:40]], {"append": [long[40:41], long[41:90], long[90:]]}
    yield "shards", labelled, [[{"label": n, "image": bytes([n] * (n + 1))} for n in range(10)]], {"shards": 3}
    yield "empty", labelled, [[{"label": n, "image": b"x"} for n in range(2)]], {"shards": 3}
    several = {
        "b": {"type": "bytes"},
        "a": {"type": "bytes"},
        "vector": {"type": "float32", "shape": [-1]},
        "matrix": {"type": "float64", "shape": [2, 3]},
        "id": {"type": "int32"},
    }
    rng = np.random.default_rng(0)
    blobs = [
        {
            "b": bytes(n),
            "a": rng.bytes(n + 1),
            "vector": rng.standard_normal(n + 1, np.float32),
            "matrix": rng.standard_normal((2, 3)),
            "id": n,
        }
        for n in range(8)
    ]
    yield "several", several, [blobs], {}
    packed = {
        "a": {"type": "int32", "shape": [-1]},
        "b": {"type": "int64", "shape": [2, -1]},
        "c": {"type": "float32", "shape": [-1]},
        "d": {"type": "bytes"},
    }
    widths = [2**7 - 1, 2**7, -(2**7), -(2**7) - 1, 2**15, -(2**15), -(2**15) - 1, 2**31 - 1, -(2**31)]
    wide = [*widths, 2**31, -(2**31) - 1, 2**63 - 1, -(2**63), 0]
    integers = [
        {
            "a": np.array(widths[: n + 1], np.int32),
            "b": np.array(wide[n:] + wide[:n], np.int64).reshape(2, 7),
            "c": np.array([n, 0.5], np.float32),
            "d": bytes([n]),
        }
        for n in range(9)
    ]
    yield "packed", packed, [integers], {}
    tokens = {"tokens": {"type": "int64", "shape": [-1]}}
    yield "tokens", tokens, [[{"tokens": np.arange(n + 1) * 300 - 500} for n in range(9)]], {}
    yield "encrypted", labelled, [[{"label": n, "image": bytes([n] * 5)} for n in range(10)]], {}


def make():
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.iterdir():
        old.unlink()
    expected = {"mindspore": mindspore.__version__, "key": KEY, "cases": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name, schema, calls, options in cases():
            key = KEY if name == "encrypted" else None
            set_enc_key(key)
            set_enc_mode("AES-GCM")
            path = Path(folder) / name
            write(path, schema, calls, **options)
            set_enc_key(None)
            shards = options.get("shards", 1)
            files = [path] if shards == 1 else [path.with_name(f"{name}{n}") for n in range(shards)]
            given = [row for rows in [*calls, *options.get("append", ())] for row in rows]
            found = {each.name: told_rows(read([each], key)) for each in files}
            assert sum(map(len, found.values())) == len(given), name
            expected["cases"][name] = {"schema": schema, "given": told_rows(given), "read": found}
            for each in files:
                for part in (each, each.with_name(each.name + ".db")):
                    with gzip.GzipFile(FOLDER / f"{part.name}.gz", "wb", mtime=0) as file:
                        file.write(part.read_bytes())
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=0, ensure_ascii=False) + "\n")


def work(task, out):
    """Do what a test asks for, with files that are not MindSpore's own."""
    found = []
    for each in json.loads(Path(task).read_text()):
        if "write" in each:
            writer = FileWriter(each["write"], 1)
            writer.add_schema(each["schema"], "")
            writer.write_raw_data(each["rows"])
            writer.commit()
            continue
        if "append" in each:
            writer = FileWriter.open_for_append(each["append"])
            writer.write_raw_data(each["rows"])
            writer.commit()
            continue
        path = Path(each["read"])
        reader = FileReader(str(path))
        schema, count = reader.schema(), reader.len()
        reader.close()
        found.append(
            {
                "schema": schema,
                "len": count,
                "files": {name: told_rows(read([path.with_name(name)])) for name in each["files"]},
                "dataset": told_rows(read_set(path)),
            }
        )
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    work(*sys.argv[1:]) if len(sys.argv) == 3 else make()
