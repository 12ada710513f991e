"""Measure this machine's data path on a given file: reads, and of image records decoding and a complete loader.

Each rate is the median of short repeats, with whatever the page cache holds. The first pass over the file is reported separately:
it is the cost of a cold file that is larger than the memory.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from unisono.data.convert.file_kind import MINDRECORD, RECORDIO, TOKENS, file_kind
from unisono.data.convert.table_files import open_file
from unisono.data.loading.loader import Loader
from unisono.data.loading.worker_pool import usable_cores
from unisono.data.mindrecord import MindRecordFile
from unisono.data.options import LoaderOptions
from unisono.data.recordio import RecordDataset, RecordFile, unpack_header
from unisono.data.tokens.shards import open_tokens
from unisono.data.tokens.windows import TokenWindows
from unisono.errors import DataError

_REPEATS = 3
_SEQ_LEN = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """``per_s`` items per second; ``bytes_per_s`` is 0 where it is not meaningful."""

    name: str
    per_s: float
    bytes_per_s: float = 0.0


def measure_throughput(path: Path, *, seconds: float = 1.0, size: int = 224) -> list[Throughput]:
    """Rates of a data file, with ``seconds`` per repeat.

    Of a RecordIO file: random reads with and without checksums and, for image records, decoding and a loader that crops to
    ``size``. Of a MindRecord file: random reads of rows. Of a token shard: random windows. Of a table: rows in order.

    Raises:
        DataError: The file is missing, of no known kind, or damaged.
    """
    kind = file_kind(path)
    if kind == TOKENS:
        return _token_windows(path, seconds)
    if kind == MINDRECORD:
        file = MindRecordFile([path])
        order = np.random.default_rng(0).permutation(len(file))[: 1 << 16].tolist()
        bytes_each = path.stat().st_size / max(1, len(file))
        first = _reads("random rows, first pass", file.read, order, bytes_each, once=True, seconds=seconds)
        return [first, _reads("random rows", file.read, order, bytes_each, once=False, seconds=seconds)]
    if kind != RECORDIO:
        return [_rows_in_order(path, kind, seconds)]
    records = RecordFile(path, check="never")
    order = np.random.default_rng(0).permutation(len(records))[: 1 << 16].tolist()
    bytes_each = float(records.lengths.mean()) if len(records) else 0.0
    rates = [_reads("random reads, first pass", records.read, order, bytes_each, once=True, seconds=seconds)]
    for check in ("never", "always"):
        opened = RecordFile(path, check=check)
        name = "random reads" + (", checksum each" if check == "always" else "")
        rates.append(_reads(name, opened.read, order, bytes_each, once=False, seconds=seconds))
    if _are_images(records):
        rates += _images(path, order, seconds=seconds, size=size)
    return rates


def _reads(
    name: str, read_one: Callable[[int], object], order: list[int], bytes_each: float, *, once: bool, seconds: float
) -> Throughput:
    def read(numbers: list[int]) -> int:
        for number in numbers:
            read_one(number)
        return len(numbers)

    per_s = _rate(lambda at: read(order[at : at + 64]), len(order), 1 if once else _REPEATS, seconds)
    return Throughput(name=name, per_s=per_s, bytes_per_s=per_s * bytes_each)


def _token_windows(path: Path, seconds: float) -> list[Throughput]:
    tokens = open_tokens([path])
    seq_len = max(2, min(_SEQ_LEN, tokens.num_tokens - 1))
    windows = TokenWindows(tokens, seq_len=seq_len)
    order = np.random.default_rng(0).permutation(len(windows))

    def read(at: int) -> int:
        numbers = order[at : at + 16]
        windows.read(numbers)
        return len(numbers)

    per_s = _rate(read, len(order), _REPEATS, seconds)
    bytes_each = float(seq_len * tokens.shards[0].tokens.itemsize)
    return [Throughput(name=f"random windows of {seq_len:,} tokens", per_s=per_s, bytes_per_s=per_s * bytes_each)]


def _rows_in_order(path: Path, kind: str, seconds: float) -> Throughput:
    begin, count = time.perf_counter(), 0
    for _ in open_file(path, kind).rows:
        count += 1
        if time.perf_counter() - begin > seconds * _REPEATS:
            break
    return Throughput(name="rows in order, one pass", per_s=count / (time.perf_counter() - begin))


def _images(path: Path, order: list[int], *, seconds: float, size: int) -> list[Throughput]:
    from unisono.data.image import Augment, ImageTransform, RandomResizedCrop, decode, image_records

    records = RecordFile(path)

    def decoded(at: int) -> int:
        for number in order[at : at + 8]:
            decode(unpack_header(records.view(number))[1])
        return len(order[at : at + 8])

    rates = [Throughput(name="images decoded whole, one thread", per_s=_rate(decoded, len(order), _REPEATS, seconds))]
    data: RecordDataset = image_records([path], classes=False)
    transform = ImageTransform(augment=Augment(size=(size, size), crop=RandomResizedCrop(), flip=0.5))
    for workers in sorted({1, usable_cores(os.environ)}):
        options = LoaderOptions(num_workers=workers, worker_kind="thread")
        with Loader(data, seed=0, global_batch=min(64, len(data)), transform=transform, options=options) as loader:
            steps = loader.iterate(0, 1 << 40)
            next(steps)
            per_s = _rate(lambda _, steps=steps: len(next(steps).sample_ids), 1, _REPEATS, seconds)
            steps.close()
        rates.append(Throughput(name=f"loader, random crops to {size}, {workers} threads", per_s=per_s))
    return rates


def _rate(work: Callable[[int], int], count: int, repeats: int, seconds: float) -> float:
    """Items per second of ``work(at)``, which processes items from ``at`` on and returns how many."""
    rates: list[float] = []
    at = 0
    for _ in range(repeats):
        begin, done = time.perf_counter(), 0
        while (now := time.perf_counter()) - begin < seconds:
            did = work(at)
            done, at = done + did, (at + did) % max(1, count)
        rates.append(done / (now - begin))
    return statistics.median(rates)


def _are_images(records: RecordFile) -> bool:
    from unisono.data.image import probe

    if not len(records):
        return False
    try:
        probe(unpack_header(records.view(0))[1])
    except DataError:
        return False
    return True
