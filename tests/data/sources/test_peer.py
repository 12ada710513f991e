"""Data that other packages wrote or serve: folders of Hugging Face's datasets, and objects of an S3 server (moto)."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import make_desk
from source_files import write_arrow_folder, write_tar, write_tfrecord
from task_data import SMALL

from unisono.data import TokenWriter
from unisono.data.image import encode_jpeg
from unisono.data.mindrecord import MindRecordWriter
from unisono.data.recordio import ImageHeader, RecordWriter, pack_header
from unisono.data.sources import open_source
from unisono.errors import DataError

DATASETS, S3 = os.environ.get("UNISONO_DATASETS_PYTHON"), os.environ.get("UNISONO_S3_PYTHON")

WRITE = """
import sys
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, LargeList, List, Sequence, Value
rows = {
    "text": [f"row {i}" for i in range(6)],
    "label": [i % 2 for i in range(6)],
    "words": [["a", f"b {i}"] for i in range(6)],
    "image": [{"bytes": b"png%d" % i, "path": None} for i in range(6)],
}
features = {"text": Value("string"), "label": ClassLabel(names=["cat", "dog"]), "words": Sequence(Value("string"))}
features = Features(features | {"image": Image(decode=False)})
data = Dataset.from_dict(rows, features=features)
DatasetDict({"train": data, "test": data.select(range(2))}).save_to_disk(sys.argv[1] + "/both")
data.save_to_disk(sys.argv[1] + "/several", num_shards=2)
tags = ClassLabel(names=["O", "PER", "LOC"])
for name, feature in {"sequence": Sequence(tags), "list": List(tags), "large": LargeList(tags), "raw": [tags]}.items():
    rows = {"tokens": [["Bob", "sees", "Rome"], ["Rome", "runs", "to"]] * 12, "ner_tags": [[1, 0, 2], [2, 0, 0]] * 12}
    features = Features({"tokens": Sequence(Value("string")), "ner_tags": feature})
    Dataset.from_dict(rows, features=features).save_to_disk(sys.argv[1] + "/tagged/" + name)
"""

SERVE = """
import os, sys
sys.path[:0] = [sys.argv[1]]
sys.path.append(sys.argv[2])
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
server.start()
os.environ["AWS_ENDPOINT_URL"] = "http://%s:%d" % server.get_host_and_port()
import numpy as np, s3fs
from unisono.data.sources import open_source
from unisono.errors import DataError
from unisono.data import DataOptions, load_tokenizer, prepare_corpus
s3 = s3fs.S3FileSystem()
s3.mkdir("bucket")
s3.put(sys.argv[3] + "/", "bucket/data/", recursive=True)
addresses = {
    "a.csv": {}, "a-*.jsonl": {}, "a.parquet": {}, "a.tar": {}, "a.tfrecord": {}, "images": {}, "arrow": {},
    "a.rec": {}, "images-*.rec": {}, "rows.rec": {}, "a.mindrecord": {}, "set.mindrecord*[0-9]": {},
    "t-00000.bin": {"seq_len": 8}, "t-*.bin": {"seq_len": 8},
}
for name, options in addresses.items():
    here = open_source(sys.argv[3] + "/" + name, **options)
    data = open_source("s3://bucket/data/" + name, **options)
    assert len(data) == len(here) > 0, name
    assert getattr(data, "class_names", None) == getattr(here, "class_names", None), name
    ids = np.random.default_rng(0).permutation(len(here))
    for i in ids:
        one, two = data.read(ids[i : i + 1]), here.read(ids[i : i + 1])
        assert one.keys() == two.keys(), name
        assert all(np.array_equal(one[key], two[key]) for key in one), (name, i)
first = open_source("s3://bucket/data/a-*.jsonl").fingerprint
there = prepare_corpus(DataOptions(corpus="s3://bucket/data/texts", eval_frac=0.3))
here = prepare_corpus(DataOptions(corpus=sys.argv[3] + "/texts", eval_frac=0.3))
assert there.train.num_tokens == here.train.num_tokens > 0
assert there.report.corpus == "s3://bucket/data/texts"
assert load_tokenizer("s3://bucket/data/tokenizer").fingerprint == load_tokenizer(sys.argv[3] + "/tokenizer").fingerprint
for name in ("none.parquet", "none/*.tar", "none.rec", "none-*.rec", "none", "set.mindrecord0", "p-00000-of-00002.parquet"):
    try:
        open_source("s3://bucket/data/" + name)
    except DataError as error:
        print("refused", str(error).splitlines()[0])
    else:
        raise AssertionError(name)
server.stop()
try:
    open_source("s3://bucket/b/0.jsonl")
except DataError as error:
    assert "nothing was opened" in str(error), error
else:
    raise AssertionError("a server that is gone was not noticed")
print("read", first)
"""


def run(python: str, *arguments: str, **environ: str) -> str:
    done = subprocess.run(
        [python, "-c", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, **environ},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.peer
@pytest.mark.skipif(
    not DATASETS, reason="set UNISONO_DATASETS_PYTHON to an interpreter with datasets: nothing was compared"
)
def test_folders_of_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert DATASETS is not None
    run(DATASETS, WRITE, str(tmp_path), HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hf"))
    for name in ("both/train", "several"):
        data: Any = open_source(tmp_path / name)
        assert (len(data), data.classes, data.class_column) == (6, ("cat", "dog"), "label")
        for i, sample in enumerate(data.samples(np.arange(6))):
            texts = {key: sample[key].tobytes().decode() for key in ("text", "words", "image")}
            assert texts == {"text": f"row {i}", "words": f"a\nb {i}", "image": f"png{i}"}
            assert int(sample["label"]) == i % 2
    for folder in sorted((tmp_path / "tagged").iterdir()):
        tagged: Any = open_source(folder)
        assert (tagged.classes, tagged.class_column) == (("O", "PER", "LOC"), "ner_tags")
        assert tagged.samples(np.array([1]))[0]["ner_tags"].tolist() == [2, 0, 0]
    assert len(list((tmp_path / "tagged").iterdir())) == 4
    address = f"--set=data.train={tmp_path / 'tagged' / 'list'}"
    settings = ("--set=task.kind=sequence_labelling", "--set=data.seq_len=24", *SMALL, "--set=train.steps=2")
    (tmp_path / "desk").mkdir()
    desk = make_desk(tmp_path / "desk", tmp_path / "cache")
    done = desk.here("train", "--debug", f"--set=run.dir={tmp_path / 'run'}", address, *settings)
    assert done.code == 0, done.err
    assert desk.here("eval", str(tmp_path / "run")).code == 0
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["task"]["classes"] == ["O", "PER", "LOC"]
    assert len(open_source(tmp_path / "both" / "test")) == 2
    with pytest.raises(DataError, match="which has the splits"):
        open_source(tmp_path / "both")


@pytest.mark.peer
@pytest.mark.skipif(not S3, reason="set UNISONO_S3_PYTHON to an interpreter with s3fs and moto: nothing was read")
def test_objects_of_an_s3_server(tmp_path: Path) -> None:
    assert S3 is not None
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    write_sources(tmp_path / "data")
    source, packages = str(Path(__file__).parents[3] / "src"), str(Path(np.__file__).parents[1])
    said = run(S3, SERVE, source, packages, str(tmp_path / "data"), XDG_CACHE_HOME=str(tmp_path), **keys)
    assert "read records:" in said
    refused = [line for line in said.splitlines() if line.startswith("refused")]
    assert len(refused) == 7, said
    # of a set, one file is copied: the others are missed, not left out
    assert "files" in refused[-1]
    assert (tmp_path / "unisono" / "remote").is_dir(), "records are read as they are asked for"


def write_sources(folder: Path) -> None:
    """The same few samples in each format."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from tokenizers import Tokenizer, models

    folder.mkdir()
    rows: list[dict[str, Any]] = [{"text": f"row {i} é", "label": i % 2} for i in range(12)]
    table = pa.Table.from_pylist([{**row, "words": ["a", row["text"]]} for row in rows])
    (folder / "a.csv").write_text("text,label\n" + "".join(f'"{row["text"]}",{row["label"]}\n' for row in rows))
    for part in range(2):
        lines = [json.dumps(row) + "\n" for row in rows[part * 6 : part * 6 + 6]]
        (folder / f"a-{part}.jsonl").write_text("".join(lines))
    pq.write_table(table, folder / "a.parquet")
    for part in range(2):
        pq.write_table(table, folder / f"p-0000{part}-of-00002.parquet")
    files = {f"{i}.{ext}": row[key] for i, row in enumerate(rows) for ext, key in (("txt", "text"), ("cls", "label"))}
    write_tar(folder / "a.tar", {name: str(value).encode() for name, value in files.items()})
    write_tfrecord(folder / "a.tfrecord", rows)
    labels: dict[str, object] = {"names": ["no", "yes"], "_type": "ClassLabel"}
    write_arrow_folder(folder / "arrow", table, {"label": labels})
    jpegs = [encode_jpeg(np.full((16, 16, 3), 20 * i, np.uint8)) for i in range(12)]
    for i, jpeg in enumerate(jpegs):
        (folder / "images" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        (folder / "images" / "ab"[i % 2] / f"{i}.jpg").write_bytes(jpeg)
    for name, numbers in (("a", range(12)), ("images-0", range(6)), ("images-1", range(6, 12))):
        with RecordWriter(folder / f"{name}.rec") as writer:
            for i in numbers:
                writer.write(pack_header(ImageHeader(label=i % 2), jpegs[i]))
    with RecordWriter(folder / "rows.rec") as writer:
        for row in rows:
            writer.write(row["text"].encode(), side={"label": row["label"]})
    for name, shards in (("a", 1), ("set", 2)):
        with MindRecordWriter(
            folder / f"{name}.mindrecord", {"text": "string", "label": "int64"}, shards=shards
        ) as writer:
            for row in rows:
                writer.write(row)
    with TokenWriter(folder, "t", vocab_size=100, end_of_document=99, shard_tokens=60) as writer:
        for _ in range(3):
            writer.add(np.arange(41), np.ones(41, np.uint32))
    (folder / "texts" / "more").mkdir(parents=True)
    for i in range(8):
        (folder / "texts" / ("more" if i % 2 else "") / f"{i}.txt").write_text(f"text {i}\n" * 20)
    (folder / "tokenizer").mkdir()
    Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1}, unk_token="[UNK]")).save(
        str(folder / "tokenizer/tokenizer.json")
    )
