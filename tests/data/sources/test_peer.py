"""Data that other packages wrote or serve: folders of Hugging Face's datasets, and objects of an S3 server (moto)."""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import make_desk
from task_data import SMALL

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
s3 = s3fs.S3FileSystem()
s3.mkdir("bucket")
for i in range(2):
    s3.pipe(f"bucket/a/{i}.jsonl", b'{"x": %d}\\n' % i * 3)
data = open_source("s3://bucket/a/*.jsonl")
assert data.read(np.arange(6))["x"].tolist() == [0, 0, 0, 1, 1, 1]
first = data.fingerprint
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
    source = str(Path(__file__).parents[3] / "src")
    said = run(S3, SERVE, source, str(Path(np.__file__).parents[1]), XDG_CACHE_HOME=str(tmp_path), **keys)
    assert "read records:" in said
