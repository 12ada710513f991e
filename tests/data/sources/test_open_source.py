"""``open_source``: values and order are those written, for each format."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from unisono.data import Loader, LoaderOptions, TokenWriter
from unisono.data.image import encode_jpeg
from unisono.data.mindrecord import MindRecordWriter
from unisono.data.recordio import ImageHeader, RecordWriter, pack_header
from unisono.data.sources import open_source
from unisono.errors import DataError

ORDER = np.array([4, 0, 2, 4])


def test_jsonl_over_several_files(tmp_path: Path) -> None:
    for part in range(2):
        lines = [json.dumps({"x": 3 * part + i, "text": f"é{i}"}, ensure_ascii=False) for i in range(3)]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    data = open_source(f"{tmp_path}/*.jsonl")
    assert len(data) == 6
    assert [int(sample["x"]) for sample in data.samples(ORDER)] == ORDER.tolist()
    assert data.samples(ORDER)[2]["text"].tobytes().decode() == "é2"


@pytest.mark.parametrize("shards", [1, 3])
def test_mindrecord(tmp_path: Path, shards: int) -> None:
    path = tmp_path / "a.mindrecord"
    with MindRecordWriter(path, {"x": "int32", "b": "bytes"}, shards=shards) as writer:
        for i in range(6):
            writer.write({"x": i, "b": bytes([i])})
    data = open_source(path if shards == 1 else Path(f"{path}0"), columns={"inputs": "b", "targets": "x"})
    batch = data.read(ORDER)
    assert (batch["inputs"][:, 0] == batch["targets"]).all()
    assert sorted(data.read(np.arange(6))["targets"].tolist()) == list(range(6))


def test_token_shards(tmp_path: Path) -> None:
    with TokenWriter(tmp_path, "t", vocab_size=100, end_of_document=99) as writer:
        writer.add(np.arange(41), np.ones(41, np.uint32))
    data = open_source(tmp_path / "t-00000.bin", seq_len=8)
    assert data.read(np.array([1]))["tokens"].tolist() == [list(range(8, 16))]


def test_image_records_and_folder(tmp_path: Path) -> None:
    jpegs = [encode_jpeg(np.full((16, 16, 3), 40 * i, np.uint8)) for i in range(6)]
    with RecordWriter(tmp_path / "a.rec") as writer:
        for i, jpeg in enumerate(jpegs):
            writer.write(pack_header(ImageHeader(label=i % 2), jpeg))
    for i, jpeg in enumerate(jpegs):
        folder = tmp_path / "images" / "ab"[i // 3]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i}.jpg").write_bytes(jpeg)
    for address, labels in ((tmp_path / "a.rec", [0, 0, 0, 0]), (tmp_path / "images", [1, 0, 0, 1])):
        samples = open_source(address, columns={"image": "image", "label": "targets"}).samples(ORDER)  # type: ignore[attr-defined]
        assert [sample["image"].tobytes() for sample in samples] == [jpegs[i] for i in ORDER]
        assert [int(sample["label"]) for sample in samples] == labels


def test_worker_processes_give_the_same_samples(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"x": {i}}}\n' for i in range(20)))

    def epoch(options: LoaderOptions) -> list[list[int]]:
        loader = Loader(open_source(tmp_path / "a.jsonl"), seed=0, global_batch=5, options=options)
        batches = [batch["x"].tolist() for batch in loader]
        loader.close()
        return batches

    assert epoch(LoaderOptions(num_workers=0)) == epoch(LoaderOptions(num_workers=2, worker_kind="process"))


def test_bad_sources(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"x": \n')
    (tmp_path / "a.csv").write_text("x\n1\n")
    with pytest.raises(DataError, match="line 2 at offset 9"):
        open_source(tmp_path / "a.jsonl").read(np.array([1]))
    with pytest.raises(DataError, match="column 'y' of row 0"):
        open_source(tmp_path / "a.jsonl", columns={"x": "y"})
    for address, given in (("a.csv", "whose suffix is '.csv'"), ("none.rec", "does not exist")):
        with pytest.raises(DataError, match=given) as caught:
            open_source(tmp_path / address)
        assert "nothing was opened" in str(caught.value)
    with pytest.raises(DataError, match="seq_len for"):
        open_source(tmp_path / "a.jsonl", seq_len=8)
