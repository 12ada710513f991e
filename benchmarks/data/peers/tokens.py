"""Worker: batches of token windows by one loader. Settings: kind, tokens (a raw uint16 file, a shard of ours).

A step is one batch: inputs and targets of ``BATCH`` windows as integers, int64 unless the loader's own type is another.
Who has a format of its own writes windows of LENGTH + 1 tokens into it first.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.data.peers.pixels import single_threaded
from benchmarks.data.peers.stubs import without_torchvision
from benchmarks.peers.gate import Gate

BATCH, LENGTH = 16, 1024
TUNING_S = 6.0
Batches = Iterator[Any]


def windows(path: Path) -> np.ndarray:
    """[windows, LENGTH + 1]."""
    tokens = np.memmap(path, np.uint16, mode="r")
    return tokens[: tokens.size // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)


def floor(folder: Path, path: Path, how: str) -> Batches:
    """``rows``: np.take of rows into a reused buffer; ``sliding``: of any place, by a strided view."""
    rows = windows(path)
    if how == "sliding":
        rows = np.lib.stride_tricks.sliding_window_view(np.memmap(path, np.uint16, mode="r"), LENGTH + 1)
    rng, raw, out = (
        np.random.default_rng(1),
        np.empty((BATCH, LENGTH + 1), np.uint16),
        np.empty((BATCH, LENGTH + 1), np.int64),
    )
    while True:
        numbers = rng.integers(0, len(rows), BATCH)
        if how == "rows":
            np.take(rows, numbers, axis=0, out=raw, mode="clip")
            out[:] = raw
        else:  # np.take would copy the overlapping view whole
            out[:] = rows[numbers]
        yield out[:, :-1], out[:, 1:]


def unisono(folder: Path, path: Path, how: str) -> Batches:
    """``windows`` side by side, ``sliding`` or ``loader``, ``ignore`` or ``mask`` of documents, and the loader's threads.

    Without a number of threads the loader has its default options, and tunes before the first batch that is measured.
    """
    from unisono.data import Loader, LoaderOptions, TokenWindows, open_tokens

    what, boundaries, *workers = how.split()
    data = TokenWindows(
        open_tokens([path]),
        seq_len=LENGTH,
        stride=1 if what == "sliding" else LENGTH,
        boundaries="ignore" if boundaries == "ignore" else "mask",
    )
    if what != "loader":
        rng = np.random.default_rng(1)
        while True:
            yield data.read(rng.integers(0, len(data), BATCH))
    options = LoaderOptions(num_workers=int(workers[0]), worker_kind="thread") if workers else LoaderOptions()
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")  # nothing remembered
    batches = Loader(data, seed=1, global_batch=BATCH, options=options).iterate(0, 10**9)
    until = time.perf_counter() + (0 if workers else TUNING_S)
    while time.perf_counter() < until:
        next(batches)
    yield from batches


class Rows:
    """Windows as tensors, for torch's DataLoader."""

    def __init__(self, path: Path) -> None:
        self.rows = windows(path)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        import torch as package

        row = package.from_numpy(self.rows[index].astype(np.int64))
        return row[:-1], row[1:]


def torch(folder: Path, path: Path, how: str) -> Batches:
    """DataLoader over the mapped file; ``how`` is the number of workers."""
    return _by_torch(Rows(path), int(how), shuffle=True)


def _by_torch(data: Any, workers: int, *, shuffle: bool | None = None) -> Batches:
    from torch.utils.data import DataLoader

    loader = DataLoader(
        data, batch_size=BATCH, shuffle=shuffle, num_workers=workers, persistent_workers=workers > 0, drop_last=True
    )
    return chain.from_iterable(repeat(loader))


def nanogpt(folder: Path, path: Path, how: str) -> Batches:
    """Its get_batch."""
    import torch as package

    while True:
        data = np.memmap(path, np.uint16, mode="r")
        starts = package.randint(len(data) - LENGTH, (BATCH,))
        yield (
            package.stack([package.from_numpy(data[i : i + LENGTH].astype(np.int64)) for i in starts]),
            package.stack([package.from_numpy(data[i + 1 : i + 1 + LENGTH].astype(np.int64)) for i in starts]),
        )


def litdata(folder: Path, path: Path, how: str) -> Batches:
    """TokensLoader; ``how`` is the number of workers."""
    import torch as package
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.cache import Cache
    from litdata.streaming.item_loader import TokensLoader

    cache = Cache(str(folder / "chunks"), chunk_bytes=64 << 20, item_loader=TokensLoader(block_size=LENGTH + 1))
    rows = windows(path)
    for number, first in enumerate(range(0, len(rows), 1000)):
        cache[number] = package.from_numpy(rows[first : first + 1000].astype(np.int32).reshape(-1))
    cache.done()
    cache.merge()
    data = StreamingDataset(
        str(folder / "chunks"), item_loader=TokensLoader(block_size=LENGTH + 1), shuffle=True, drop_last=True
    )
    loader = StreamingDataLoader(data, batch_size=BATCH, num_workers=int(how), persistent_workers=int(how) > 0)
    while True:
        for batch in loader:
            batch = batch.long()
            yield batch[:, :-1], batch[:, 1:]


def mds(folder: Path, path: Path, how: str) -> Batches:
    """``local``: LocalDataset under torch's DataLoader; ``streaming``: StreamingDataset and its shuffle."""
    without_torchvision()
    from streaming import LocalDataset, MDSWriter, StreamingDataset

    with MDSWriter(out=str(folder / "mds"), columns={"tokens": f"ndarray:uint16:{LENGTH + 1}"}) as writer:
        for row in windows(path):
            writer.write({"tokens": row})
    if how == "local":
        data: Any = LocalDataset(local=str(folder / "mds"))
    else:
        data = StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=BATCH)
    for batch in _by_torch(Int64(data), 0, shuffle=True) if how == "local" else _by_torch(data, 0):
        tokens = batch["tokens"].long()
        yield tokens[:, :-1], tokens[:, 1:]


class Int64:
    """torch has no uint16 collation everywhere; the rows are made int64 one by one."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return {"tokens": self.data[index]["tokens"].astype(np.int64)}


def mxnet(folder: Path, path: Path, how: str) -> Batches:
    """read_idx and numpy."""
    import mxnet as mx

    record = mx.recordio.MXIndexedRecordIO(str(folder / "t.idx"), str(folder / "t.rec"), "w")
    rows = windows(path)
    for number, row in enumerate(rows):
        record.write_idx(number, row.tobytes())
    record.close()
    record = mx.recordio.MXIndexedRecordIO(str(folder / "t.idx"), str(folder / "t.rec"), "r")
    rng = np.random.default_rng(1)
    while True:
        batch = b"".join(record.read_idx(int(i)) for i in rng.integers(0, len(rows), BATCH))
        out = np.frombuffer(batch, np.uint16).reshape(BATCH, -1).astype(np.int64)
        yield out[:, :-1], out[:, 1:]


def grain(folder: Path, path: Path, how: str) -> Batches:
    """ArrayRecord and MapDataset, shuffled."""
    import grain.python as package
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(folder / "t.array_record"), "group_size:1,uncompressed")
    for row in windows(path):
        writer.write(row.tobytes())
    writer.close()
    source = package.ArrayRecordDataSource([str(folder / "t.array_record")])
    rows = package.MapDataset.source(source).seed(1).shuffle().repeat().map(_int64)
    for batch in rows.to_iter_dataset().batch(BATCH):
        yield batch[:, :-1], batch[:, 1:]


def _int64(payload: bytes) -> np.ndarray:
    return np.frombuffer(payload, np.uint16).astype(np.int64)


def mindspore(folder: Path, path: Path, how: str) -> Batches:
    """MindDataset, shuffled, two workers; int32, its reader has no uint16."""
    import mindspore.dataset as ds
    from mindspore.mindrecord import FileWriter

    name = str(folder / "t.mindrecord")
    writer = FileWriter(name, shard_num=1, overwrite=True)
    writer.add_schema({"tokens": {"type": "int32", "shape": [LENGTH + 1]}}, "tokens")
    rows = windows(path)
    for first in range(0, len(rows), 1000):
        writer.write_raw_data([{"tokens": row} for row in rows[first : first + 1000].astype(np.int32)])
    writer.commit()
    data = ds.MindDataset(name, columns_list=["tokens"], num_parallel_workers=2, shuffle=True).batch(
        BATCH, drop_remainder=True
    )
    epochs = data.create_tuple_iterator(num_epochs=10_000, output_numpy=True)
    while True:
        for (batch,) in epochs:
            yield batch[:, :-1], batch[:, 1:]


def megatron(folder: Path, path: Path, how: str) -> Batches:
    """GPTDataset under torch's DataLoader; ``how`` is the number of workers."""
    import torch as package
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from megatron.core.datasets.utils import Split

    class Tokenizer:
        eod, pad, vocab_size, unique_identifiers = 50_256, 50_257, 50_258, {"class": "none"}

    prefix = str(folder / "tokens")
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint16)
    tokens = np.memmap(path, np.uint16, mode="r")
    documents = [tokens[first : first + 2048] for first in range(0, tokens.size, 2048)]
    for document in documents:
        builder.add_document(package.from_numpy(document.astype(np.int32)), [len(document)])
    builder.finalize(prefix + ".idx")
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=LENGTH, blend=([prefix], None), split="1,0,0", tokenizer=Tokenizer(),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
        path_to_cache=str(folder / "cache"),
    )  # fmt: skip
    low = GPTDataset.build_low_level_dataset(prefix, config)
    data = GPTDataset(
        low, prefix, np.arange(len(documents), dtype=np.int32), tokens.size // LENGTH - 1, Split.train, config
    )
    return _by_torch(data, int(how))


KINDS: dict[str, Callable[[Path, Path, str], Batches]] = {
    "floor": floor,
    "unisono": unisono,
    "torch": torch,
    "nanogpt": nanogpt,
    "litdata": litdata,
    "mds": mds,
    "mxnet": mxnet,
    "grain": grain,
    "mindspore": mindspore,
    "megatron": megatron,
}


def main() -> None:
    gate = Gate()
    single_threaded()
    settings = json.loads(sys.argv[1])
    kind, _, how = settings["kind"].partition(" ")
    batches = KINDS[kind](Path(settings["folder"]), Path(settings["tokens"]), how)
    next(batches)
    gate.open()
    while True:
        next(batches)
        gate.step_done(lambda: 0.0)


if __name__ == "__main__":
    main()
