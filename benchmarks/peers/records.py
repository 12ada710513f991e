"""Worker: reads records of one kind of file, all in order or at random. Settings: kind, mode, bytes, count.

A block is one pass over ``count`` reads; what it "loses" is a sum over lengths and first bytes, equal for all kinds.
"""

from __future__ import annotations

import json
import mmap
import sys
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.peers.gate import Gate

Read = Callable[[list[int]], Iterable[Any]]


def payloads(size: int, count: int) -> Iterable[bytes]:
    """Random bytes of lengths around ``size``, the same for every kind."""
    rng = np.random.default_rng(0)
    block = rng.bytes(4 * size)
    for _ in range(count):
        length = int(rng.integers(size // 2, size * 3 // 2))
        begin = int(rng.integers(0, len(block) - length))
        yield block[begin : begin + length]


def limit(folder: Path, settings: dict[str, Any]) -> Read:
    """The floor: offsets in a list, one slice of a mapped file per record, and its checksum if ``kind`` says so."""
    offsets = [0]
    with (folder / "data").open("wb") as file:
        for payload in payloads(settings["bytes"], settings["count"]):
            file.write(payload)
            offsets.append(file.tell())
    file = (folder / "data").open("rb")
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if settings["kind"] == "limit":
        return lambda numbers: (mapped[offsets[i] : offsets[i + 1]] for i in numbers)

    def checked(numbers: list[int]) -> Iterable[bytes]:
        for i in numbers:
            payload = mapped[offsets[i] : offsets[i + 1]]
            zlib.crc32(payload)
            yield payload

    return checked


def unisono(folder: Path, settings: dict[str, Any]) -> Read:
    """Our reader: ``unisono`` copies, checked when first touched; ``always``; ``never``; ``views``; ``batch``."""
    from unisono.data.recordio import RecordFile, RecordWriter

    with RecordWriter(folder / "a.rec") as writer:
        for payload in payloads(settings["bytes"], settings["count"]):
            writer.write(payload)
    way = settings["kind"].removeprefix("unisono ")
    records = RecordFile(folder / "a.rec", check=way if way in ("always", "never") else "first")
    if way == "views":
        return records.views
    if way == "batch":
        return lambda numbers: [memoryview(records.read_many(numbers).data)]
    if settings["mode"] == "sequential":
        return lambda numbers: records.iterate()
    read = records.read
    return lambda numbers: (read(i) for i in numbers)


def lmdb(folder: Path, settings: dict[str, Any]) -> Read:
    """One read transaction, keys of eight bytes."""
    import lmdb as package

    size = 4 * settings["bytes"] * settings["count"] + (1 << 24)
    with package.open(str(folder / "lmdb"), map_size=size) as made, made.begin(write=True) as transaction:
        for number, payload in enumerate(payloads(settings["bytes"], settings["count"])):
            transaction.put(number.to_bytes(8, "big"), payload, append=True)
    environment = package.open(str(folder / "lmdb"), readonly=True, lock=False, readahead=False)
    views = settings["kind"].endswith("views")
    transaction = environment.begin(buffers=views)
    get = transaction.get
    if settings["mode"] == "sequential":
        return lambda numbers: (value for value in transaction.cursor().iternext(keys=False))
    return lambda numbers: (get(i.to_bytes(8, "big")) for i in numbers)


def arrow(folder: Path, settings: dict[str, Any]) -> Read:
    """One column of binary in an IPC file, mapped."""
    import pyarrow as pa

    table = pa.table({"data": pa.array(payloads(settings["bytes"], settings["count"]), pa.large_binary())})
    with pa.OSFile(str(folder / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    column = pa.ipc.open_file(pa.memory_map(str(folder / "a.arrow"))).read_all().column("data").chunk(0)
    if settings["kind"].endswith("views"):
        return lambda numbers: (memoryview(column[i].as_buffer()) for i in numbers)
    return lambda numbers: (column[i].as_py() for i in numbers)


def mxnet(folder: Path, settings: dict[str, Any]) -> Read:
    """MXIndexedRecordIO."""
    import mxnet as package

    record = package.recordio.MXIndexedRecordIO(str(folder / "a.idx"), str(folder / "a.rec"), "w")
    for number, payload in enumerate(payloads(settings["bytes"], settings["count"])):
        record.write_idx(number, payload)
    record.close()
    reader = package.recordio.MXIndexedRecordIO(str(folder / "a.idx"), str(folder / "a.rec"), "r")
    if settings["mode"] == "sequential":

        def in_order(numbers: list[int]) -> Iterable[bytes]:
            reader.reset()
            return (reader.read() for _ in numbers)

        return in_order
    return lambda numbers: (reader.read_idx(i) for i in numbers)


KINDS: dict[str, Callable[[Path, dict[str, Any]], Read]] = {
    "limit": limit,
    "unisono": unisono,
    "lmdb": lmdb,
    "arrow": arrow,
    "mxnet": mxnet,
}


def serve(kinds: dict[str, Callable[[Path, dict[str, Any]], Read]]) -> None:
    """One pass over all records per block, by the kind that the settings name."""
    gate = Gate()
    settings = json.loads(sys.argv[1])
    read = kinds[settings["kind"].split()[0]](Path(settings["folder"]), settings)
    rng = np.random.default_rng(1)
    numbers = list(range(settings["count"]))
    gate.open()
    while True:
        if settings["mode"] == "random":
            numbers = rng.permutation(settings["count"]).tolist()
        found = 0
        if settings["kind"].endswith("batch") or settings["kind"] == "unisono views":
            for first in range(0, len(numbers), 64):
                found += sum(map(len, read(numbers[first : first + 64])))
        else:
            found = sum(map(len, read(numbers)))
        gate.step_done(lambda value=found: float(value))


if __name__ == "__main__":
    serve(KINDS)
