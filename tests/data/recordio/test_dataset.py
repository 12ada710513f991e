"""Records as samples: any number of files, in a loader, with errors that name the record."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from unisono.data import Loader
from unisono.data.dataset import Dataset
from unisono.data.recordio import ImageHeader, RecordDataset, RecordFile, RecordWriter, pack_header, unpack_header
from unisono.errors import DataError


def decode(payload: memoryview) -> dict[str, object]:
    header, body = unpack_header(payload)
    return {"inputs": np.frombuffer(body, np.uint8), "targets": int(header.label)}


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Ten samples in three files, one of them empty."""
    paths = [tmp_path / f"{name}.rec" for name in "abc"]
    for path, numbers in zip(paths, (range(7), range(0), range(7, 10)), strict=True):
        with RecordWriter(path) as writer:
            for number in numbers:
                writer.write(pack_header(ImageHeader(label=float(number % 3), id=number), bytes([number] * 4)))
    return paths


def test_samples_come_from_all_files_in_the_order_asked_for(files: list[Path]) -> None:
    data = RecordDataset(files, decode)
    assert isinstance(data, Dataset)
    assert len(data) == 10
    batch = data.read(np.array([9, 0, 7, 6, 9]))
    assert batch["inputs"].tolist() == [[9] * 4, [0] * 4, [7] * 4, [6] * 4, [9] * 4]
    assert batch["targets"].tolist() == [0, 0, 1, 0, 0]


def test_ranks_of_a_loader_share_a_step(files: list[Path]) -> None:
    data = RecordDataset([RecordFile(path) for path in files], decode)
    plain = {"seed": 3, "global_batch": 6, "micro_batch": 6}
    whole = Loader(data, rank=0, world_size=1, **plain).batch(5).micro_batches[0]["inputs"]
    parts = [Loader(data, rank=rank, world_size=2, **plain).batch(5).micro_batches[0]["inputs"] for rank in range(2)]
    assert np.concatenate(parts).tolist() == whole.tolist()


def test_the_fingerprint_follows_files_and_decoder(files: list[Path]) -> None:
    data = RecordDataset(files, decode)
    assert data.fingerprint == RecordDataset(files, decode).fingerprint
    others = [
        RecordDataset(files[:1], decode),
        RecordDataset(files, bytes.fromhex),
        RecordDataset(files, decode, fingerprint="2"),
    ]
    assert len({data.fingerprint, *(other.fingerprint for other in others)}) == 4


def test_a_record_that_cannot_be_decoded_is_named(files: list[Path]) -> None:
    with RecordWriter(files[1], overwrite=True) as writer:
        writer.write(b"short")
    data = RecordDataset(files, decode)
    with pytest.raises(DataError) as caught:
        data.read(np.array([0, 7]))
    assert str(caught.value) == (
        f"{files[1]}: record 0 of 5 bytes: decode raised DataError: a record of 5 bytes, read as an image record\n"
        "  rule: an image record begins with 24 bytes of header and 4 bytes for each of several labels\n"
        "  so:   its batch cannot be made\n"
        "  try:  read the payload itself; records that im2rec or pack_header did not write have no such header; "
        f"unisono data cat {files[1]} --index 0 writes the payload to look at"
    )
