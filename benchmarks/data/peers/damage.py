"""What a format does when its file was changed: one line of JSON. Settings: kind, damage ("", "bit" or "cut").

300 records of 20 kB are written, the file that holds record 150 gets one bit of its payload flipped or loses its last 30 kB
(10 kB of a tar are padding), then all is read and compared with what was written. A crash of this process is an outcome too,
which the parent sees.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from benchmarks.data.peers.stubs import without_torchvision

COUNT, SIZE, CUT = 300, 20_000, 30_000


def payload(number: int) -> bytes:
    return np.random.default_rng(number).bytes(SIZE)


class Format:
    """How to write all payloads into a folder, read them in order, and (perhaps) check the files."""

    def __init__(
        self,
        write: Callable[[Path], None],
        read: Callable[[Path], Iterable[Any]],
        check: Callable[[Path], int] | None = None,
    ) -> None:
        self.write, self.read, self.check = write, read, check


def unisono() -> Format:
    from unisono.data.recordio import RecordFile, RecordWriter
    from unisono.data.recordio.maintenance import verify

    def write(folder: Path) -> None:
        with RecordWriter(folder / "a.rec") as writer:
            for number in range(COUNT):
                writer.write(payload(number))

    return Format(
        write, lambda folder: RecordFile(folder / "a.rec"), lambda folder: len(verify(folder / "a.rec").findings)
    )


def mxnet() -> Format:
    import mxnet as mx

    def write(folder: Path) -> None:
        record = mx.recordio.MXIndexedRecordIO(str(folder / "a.idx"), str(folder / "a.rec"), "w")
        for number in range(COUNT):
            record.write_idx(number, payload(number))
        record.close()

    def read(folder: Path) -> Iterable[Any]:
        record = mx.recordio.MXIndexedRecordIO(str(folder / "a.idx"), str(folder / "a.rec"), "r")
        return (record.read_idx(number) for number in range(COUNT))

    return Format(write, read)


def mindspore() -> Format:
    import mindspore.dataset as ds
    from mindspore.mindrecord import FileWriter

    def write(folder: Path) -> None:
        writer = FileWriter(str(folder / "a.mindrecord"), shard_num=1)
        writer.add_schema({"data": {"type": "bytes"}}, "x")
        writer.write_raw_data([{"data": payload(number)} for number in range(COUNT)])
        writer.commit()

    def read(folder: Path) -> Iterable[Any]:
        data = ds.MindDataset(str(folder / "a.mindrecord"), columns_list=["data"], shuffle=False)
        return (row.tobytes() for (row,) in data.create_tuple_iterator(num_epochs=1, output_numpy=True))

    return Format(write, read)


def mds(hashed: bool) -> Format:
    without_torchvision()
    from streaming import MDSWriter, StreamingDataset

    def write(folder: Path) -> None:
        more: dict[str, Any] = {"hashes": ["xxh3_64"]} if hashed else {}
        with MDSWriter(out=str(folder), columns={"data": "bytes"}, **more) as writer:
            for number in range(COUNT):
                writer.write({"data": payload(number)})

    def read(folder: Path) -> Iterable[Any]:
        # hashes are looked at when a shard is fetched, never when it is there already
        more = {"remote": str(folder), "local": f"{folder}-fetched", "validate_hash": "xxh3_64"}
        data = StreamingDataset(**(more if hashed else {"local": str(folder)}), shuffle=False, batch_size=1)
        return (sample["data"] for sample in data)

    return Format(write, read)


def litdata() -> Format:
    from litdata import StreamingDataset
    from litdata.streaming.writer import BinaryWriter

    def write(folder: Path) -> None:
        writer = BinaryWriter(str(folder), chunk_bytes=64 << 20)
        for number in range(COUNT):
            writer[number] = payload(number)
        writer.done()
        writer.merge()

    return Format(write, lambda folder: StreamingDataset(str(folder), shuffle=False))


def webdataset() -> Format:
    import webdataset as wds

    def write(folder: Path) -> None:
        with wds.TarWriter(str(folder / "a.tar")) as sink:
            for number in range(COUNT):
                sink.write({"__key__": f"{number:06d}", "bin": payload(number)})

    def read(folder: Path) -> Iterable[Any]:
        data = wds.WebDataset(str(folder / "a.tar"), shardshuffle=False, nodesplitter=None, empty_check=False)
        return (sample["bin"] for sample in data)

    return Format(write, read)


def arrayrecord() -> Format:
    from array_record.python.array_record_data_source import ArrayRecordDataSource
    from array_record.python.array_record_module import ArrayRecordWriter

    def write(folder: Path) -> None:
        writer = ArrayRecordWriter(str(folder / "a.array_record"), "group_size:1,uncompressed")
        for number in range(COUNT):
            writer.write(payload(number))
        writer.close()

    def read(folder: Path) -> Iterable[Any]:
        source = ArrayRecordDataSource([str(folder / "a.array_record")])
        return (source[number] for number in range(len(source)))

    return Format(write, read)


def lmdb() -> Format:
    import lmdb as package

    def write(folder: Path) -> None:
        with package.open(str(folder), map_size=1 << 26) as made, made.begin(write=True) as transaction:
            for number in range(COUNT):
                transaction.put(number.to_bytes(4, "big"), payload(number))

    def read(folder: Path) -> Iterable[Any]:
        transaction = package.open(str(folder), readonly=True, lock=False).begin()
        return (bytes(value) for value in transaction.cursor().iternext(keys=False))

    return Format(write, read)


def arrow() -> Format:
    import pyarrow as pa

    def write(folder: Path) -> None:
        table = pa.table({"data": pa.array([payload(number) for number in range(COUNT)], pa.large_binary())})
        with pa.OSFile(str(folder / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)

    def read(folder: Path) -> Iterable[Any]:
        column = pa.ipc.open_file(pa.memory_map(str(folder / "a.arrow"))).read_all().column("data")
        return (value.as_py() for value in column)

    return Format(write, read)


FORMATS: dict[str, Callable[[], Format]] = {
    "unisono RecordIO": unisono,
    "mxnet RecordIO": mxnet,
    "mindspore MindRecord": mindspore,
    "streaming MDS": lambda: mds(False),
    "streaming MDS, hashes": lambda: mds(True),
    "litdata": litdata,
    "webdataset": webdataset,
    "arrayrecord": arrayrecord,
    "lmdb": lmdb,
    "arrow IPC": arrow,
}


def harm(folder: Path, damage: str) -> None:
    """Flip one bit in the middle of record 150's payload, or cut that file short."""
    needle = payload(COUNT // 2)[SIZE // 4 : SIZE // 4 + 64]
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        content = bytearray(path.read_bytes())
        at = content.find(needle)
        if at < 0:
            continue
        if damage == "bit":
            content[at] ^= 1
            path.write_bytes(content)
        else:
            path.write_bytes(content[:-CUT])
        return
    raise AssertionError("record 150 is not in any file as it was written")


def outcome(form: Format, folder: Path) -> dict[str, Any]:
    """What reading all says."""
    found: dict[str, Any] = {"wrong": 0}
    if form.check is not None:
        found["findings of verify"] = form.check(folder)
    number = 0
    try:
        for value in form.read(folder):
            found["wrong"] += bytes(value) != payload(number)
            number += 1
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
    return {**found, "read": number, "missing": COUNT - number}


def main() -> None:
    settings = json.loads(sys.argv[1])
    form, folder = FORMATS[settings["kind"]](), Path(mkdtemp(dir="."))
    form.write(folder)
    if settings["damage"]:
        harm(folder, settings["damage"])
    print(json.dumps(outcome(form, folder)), flush=True)


if __name__ == "__main__":
    main()
