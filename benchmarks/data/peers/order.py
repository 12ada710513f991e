"""The order in which a loader gives samples, as one line of JSON. Settings: kind, part, samples, shards, batch, worlds.

``part`` "mixing": numbers of one epoch's samples in the order they come, one process. "resume": by world size, how many of an
epoch's samples come twice and how many never, when 37 steps of 8 ranks (2 nodes of 4) are followed by the rest on another number.
Shard k holds samples [k · samples / shards, (k + 1) · samples / shards).
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from benchmarks.data.peers.stubs import without_torchvision

STEPS_BEFORE, RANKS_BEFORE, NODES_BEFORE, PER_RANK = 37, 8, 2, 8
Settings = dict[str, Any]


def payloads(settings: Settings) -> Iterable[bytes]:
    """A sample is its number in 8 bytes and 248 more."""
    return (number.to_bytes(8, "little") + bytes(248) for number in range(settings["samples"]))


def number_of(payload: bytes) -> int:
    return int.from_bytes(payload[:8], "little")


class Numbers:
    """A data set whose sample i is i."""

    fingerprint = "numbers"

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index

    def read(self, indices: Any) -> dict[str, Any]:
        return {"number": indices}


# --- mixing ----------------------------------------------------------------------------------------------------------


def unisono(folder: Path, settings: Settings, how: str) -> Iterable[int]:
    """``global``, or ``block N``: that many neighbours stay together."""
    from unisono.data import Loader

    loader = Loader(
        Numbers(settings["samples"]),
        seed=1,
        global_batch=settings["batch"],
        shuffle_block=int(how.partition(" ")[2] or 0),
    )
    ids = (int(i) for step in range(len(loader)) for i in loader.sample_ids(step))
    return islice(ids, settings["samples"])  # the last batch goes on into the next epoch


def torch(folder: Path, settings: Settings, how: str) -> Iterable[int]:
    """randperm."""
    from torch.utils.data import DataLoader

    return (
        int(i)
        for batch in DataLoader(Numbers(settings["samples"]), batch_size=settings["batch"], shuffle=True)
        for i in batch
    )


def grain(folder: Path, settings: Settings, how: str) -> Iterable[int]:
    """Its index shuffle."""
    import grain.python as package

    return iter(package.MapDataset.range(settings["samples"]).seed(1).shuffle())


def streaming(folder: Path, settings: Settings, how: str) -> Iterable[int]:
    """Defaults, or ``block N``."""
    without_torchvision()
    from streaming import MDSWriter, StreamingDataset

    each = settings["samples"] // settings["shards"]
    for shard in range(settings["shards"]):
        with MDSWriter(out=str(folder / f"{shard:02d}"), columns={"data": "bytes"}) as writer:
            for number in range(shard * each, (shard + 1) * each):
                writer.write({"data": number.to_bytes(8, "little")})
    from streaming.base.util import merge_index

    merge_index(str(folder), keep_local=True)
    size = how.partition(" ")[2]
    more = {"shuffle_block_size": int(size)} if size else {}
    data = StreamingDataset(local=str(folder), shuffle=True, batch_size=settings["batch"], **more)
    return (number_of(sample["data"]) for sample in data)


def litdata(folder: Path, settings: Settings, how: str) -> Iterable[int]:
    """Defaults, or ``chunk``: as it does on network file systems, where it shuffles and resumes by chunks."""
    from litdata import StreamingDataset

    return (number_of(payload) for payload in StreamingDataset(_chunks(folder, settings), shuffle=True))


def _chunks(folder: Path, settings: Settings) -> str:
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder / "chunks"), chunk_size=settings["samples"] // settings["shards"])
    for number, payload in enumerate(payloads(settings)):
        writer[number] = payload
    writer.done()
    writer.merge()
    return str(folder / "chunks")


def webdataset(folder: Path, settings: Settings, how: str) -> Iterable[int]:
    """Shard order and a buffer of ``how`` samples."""
    import webdataset as wds

    each = settings["samples"] // settings["shards"]
    with wds.ShardWriter(str(folder / "a-%03d.tar"), maxcount=each, verbose=0) as sink:
        for number, payload in enumerate(payloads(settings)):
            sink.write({"__key__": f"{number:08d}", "bin": payload})
    shards = sorted(map(str, folder.glob("*.tar")))
    data = wds.WebDataset(shards, shardshuffle=len(shards), nodesplitter=None, empty_check=False).shuffle(
        int(how.split()[1])
    )
    return (number_of(sample["bin"]) for sample in data)


def mindspore(folder: Path, settings: Settings, how: str) -> Iterable[int]:
    """MindDataset over as many files, ADAPTIVE shuffle (its default)."""
    import mindspore.dataset as ds
    from mindspore.mindrecord import FileWriter

    paths: list[str] = []
    each = settings["samples"] // settings["shards"]
    for shard in range(settings["shards"]):
        paths.append(str(folder / f"{shard}.mindrecord"))
        writer = FileWriter(paths[-1], shard_num=1, overwrite=True)
        writer.add_schema({"number": {"type": "int64"}}, "numbers")
        writer.write_raw_data([{"number": shard * each + i} for i in range(each)])
        writer.commit()
    data = ds.MindDataset(paths, columns_list=["number"], shuffle=True)
    return (int(number) for (number,) in data.create_tuple_iterator(num_epochs=1, output_numpy=True))


KINDS: dict[str, Callable[[Path, Settings, str], Iterable[int]]] = {
    "unisono": unisono,
    "torch": torch,
    "grain": grain,
    "streaming": streaming,
    "litdata": litdata,
    "webdataset": webdataset,
    "mindspore": mindspore,
}


# --- resume ----------------------------------------------------------------------------------------------------------


def resume_unisono(folder: Path, settings: Settings, world: int) -> Iterable[int]:
    """The global batch is a setting of the run and stays."""
    from unisono.data import Loader

    data, size = Numbers(settings["samples"]), RANKS_BEFORE * PER_RANK
    for ranks, steps in (
        (RANKS_BEFORE, range(STEPS_BEFORE)),
        (world, range(STEPS_BEFORE, settings["samples"] // size)),
    ):
        for rank in range(ranks):
            loader = Loader(data, seed=1, global_batch=size, rank=rank, world_size=ranks)
            yield from (int(i) for step in steps for i in loader.sample_ids(step))


def resume_streaming(folder: Path, settings: Settings, world: int) -> Iterable[int]:
    """Its ``relaxed`` partitioning by itself: positions in the shuffled order; 8 samples a rank, so the global batch changes."""
    without_torchvision()
    from streaming.base.partition import get_partitions

    done = STEPS_BEFORE * RANKS_BEFORE * PER_RANK

    def positions(nodes: int, ranks: int, skipped: int) -> Any:
        # [nodes, ranks, workers, batches, batch]
        return get_partitions(
            "relaxed",
            settings["samples"],
            NODES_BEFORE,
            nodes,
            ranks,
            1,
            PER_RANK,
            skipped,
            initial_physical_nodes=NODES_BEFORE,
        )

    before = positions(NODES_BEFORE, RANKS_BEFORE // NODES_BEFORE, 0)[:, :, :, :STEPS_BEFORE]
    nodes = 2 if world % 2 == 0 else 1
    after = positions(nodes, world // nodes, done)
    return (int(i) for i in np.concatenate([before.reshape(-1), after.reshape(-1)]) if i >= 0)


def resume_litdata(folder: Path, settings: Settings, world: int) -> Iterable[int]:
    """StreamingDataLoader of each rank in turn, 8 samples a rank; the state is rank 0's. ``chunk`` as above."""
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.utilities.env import _DistributedEnv

    path = folder / "chunks"
    if not path.exists():
        _chunks(folder, settings)

    def loader(rank: int, ranks: int, nodes: int) -> Any:
        data = StreamingDataset(str(path), shuffle=True, drop_last=True)
        data.distributed_env = _DistributedEnv(ranks, rank, nodes)
        return StreamingDataLoader(data, batch_size=PER_RANK, num_workers=0, collate_fn=list)

    state: Any = None
    for rank in range(RANKS_BEFORE):
        made = loader(rank, RANKS_BEFORE, NODES_BEFORE)
        batches = iter(made)
        for _ in range(STEPS_BEFORE):
            yield from map(number_of, next(batches))
        state = made.state_dict() if rank == 0 else state
    for rank in range(world):
        made = loader(rank, world, 2 if world % 2 == 0 else 1)
        made.load_state_dict(json.loads(json.dumps(state)))
        for batch in made:
            yield from map(number_of, batch)


RESUMED: dict[str, Callable[[Path, Settings, int], Iterable[int]]] = {
    "unisono": resume_unisono,
    "streaming": resume_streaming,
    "litdata": resume_litdata,
}


def main() -> None:
    settings = json.loads(sys.argv[1])
    kind, _, how = settings["kind"].partition(" ")
    folder = Path(mkdtemp(dir="."))
    if (kind, how) == ("litdata", "chunk"):
        os.environ["LITDATA_POSIX_FAST"] = "1"
    if settings["part"] == "mixing":
        print(json.dumps(list(KINDS[kind](folder, settings, how))))
        return
    found: dict[str, Any] = {}
    for world in settings["worlds"]:
        seen = Counter(RESUMED[kind](folder, settings, world))
        found[str(world)] = {
            "repeated": sum(seen.values()) - len(seen),
            "lost": settings["samples"] - len(seen),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
