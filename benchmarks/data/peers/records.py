"""Worker: reads records by loaders whose own format it writes first. Settings: kind, mode, bytes, count.

As ``benchmarks.peers.records``, with the same payloads; a step is one pass, and its value the sum of lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.data.peers.stubs import without_torchvision
from benchmarks.peers.records import Read, payloads, serve


def mindspore(folder: Path, settings: dict[str, Any]) -> Read:
    """``FileReader``, in order only; ``MindDataset``, its pipeline with two workers, shuffled whole for ``random``."""
    import mindspore.dataset as ds
    from mindspore.mindrecord import FileReader, FileWriter

    path = str(folder / "a.mindrecord")
    writer = FileWriter(path, shard_num=1, overwrite=True)
    writer.add_schema({"data": {"type": "bytes"}}, "records")
    rows = [{"data": payload} for payload in payloads(settings["bytes"], settings["count"])]
    for first in range(0, len(rows), 256):
        writer.write_raw_data(rows[first : first + 256])
    writer.commit()
    if settings["kind"].endswith("FileReader"):
        return lambda numbers: (row["data"] for row in FileReader(path, num_consumer=2).get_next())
    shuffle = ds.Shuffle.GLOBAL if settings["mode"] == "random" else False

    def passed(numbers: list[int]) -> Iterable[Any]:
        data = ds.MindDataset(path, columns_list=["data"], num_parallel_workers=2, shuffle=shuffle)
        # as uint8: an array of numpy bytes drops zeros at the end when it is read
        return (row.view(np.uint8) for (row,) in data.create_tuple_iterator(num_epochs=1, output_numpy=True))

    return passed


def arrayrecord(folder: Path, settings: dict[str, Any]) -> Read:
    """One record per chunk, not compressed; ``batch`` asks for 64 at once."""
    from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

    path = str(folder / "a.array_record")
    writer = ArrayRecordWriter(path, "group_size:1,uncompressed")
    for payload in payloads(settings["bytes"], settings["count"]):
        writer.write(payload)
    writer.close()
    if settings["mode"] == "sequential":
        reader = ArrayRecordReader(path, "readahead_buffer_size:16M")

        def in_order(numbers: list[int]) -> Iterable[bytes]:
            reader.seek(0)
            return (reader.read() for _ in numbers)

        return in_order
    reader = ArrayRecordReader(path, "readahead_buffer_size:0")
    if settings["kind"].endswith("batch"):
        return reader.read
    return lambda numbers: (reader.read([number])[0] for number in numbers)


def mds(folder: Path, settings: dict[str, Any]) -> Read:
    """``StreamingDataset`` iterated for ``sequential``, ``LocalDataset`` by number for ``random``."""
    without_torchvision()
    from streaming import LocalDataset, MDSWriter, StreamingDataset

    with MDSWriter(out=str(folder / "mds"), columns={"data": "bytes"}) as writer:
        for payload in payloads(settings["bytes"], settings["count"]):
            writer.write({"data": payload})
    if settings["mode"] == "sequential":
        stream = StreamingDataset(local=str(folder / "mds"), shuffle=False, batch_size=1)
        return lambda numbers: (sample["data"] for sample in stream)
    local = LocalDataset(local=str(folder / "mds"))
    return lambda numbers: (local[number]["data"] for number in numbers)


def litdata(folder: Path, settings: dict[str, Any]) -> Read:
    """``StreamingDataset``, iterated or by number."""
    from litdata import StreamingDataset
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder / "chunks"), chunk_bytes=64 << 20)
    for number, payload in enumerate(payloads(settings["bytes"], settings["count"])):
        writer[number] = payload
    writer.done()
    writer.merge()
    data = StreamingDataset(str(folder / "chunks"), shuffle=False)
    if settings["mode"] == "sequential":
        return lambda numbers: iter(data)
    return lambda numbers: (data[number] for number in numbers)


def webdataset(folder: Path, settings: dict[str, Any]) -> Read:
    """Tar shards of 100 MB in order."""
    import webdataset as wds

    with wds.ShardWriter(str(folder / "a-%03d.tar"), maxsize=1e8, maxcount=1 << 30, verbose=0) as sink:
        for number, payload in enumerate(payloads(settings["bytes"], settings["count"])):
            sink.write({"__key__": f"{number:08d}", "bin": payload})
    shards = sorted(map(str, folder.glob("*.tar")))

    def in_order(numbers: list[int]) -> Iterable[bytes]:
        data = wds.WebDataset(shards, shardshuffle=False, nodesplitter=None, empty_check=False)
        return (sample["bin"] for sample in data)

    return in_order


KINDS: dict[str, Callable[[Path, dict[str, Any]], Read]] = {
    "mindspore": mindspore,
    "arrayrecord": arrayrecord,
    "mds": mds,
    "litdata": litdata,
    "webdataset": webdataset,
}


if __name__ == "__main__":
    serve(KINDS)
