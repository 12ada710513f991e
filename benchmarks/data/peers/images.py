"""Worker: JPEGs to normalised float32 batches [64, 3, 224, 224] by one loader with two workers. Settings: kind, photos, ramps.

Each contestant packs the same photos into its own format, then runs epochs without a pause between them; a step is one batch.
Before the gate opens, the crops it draws are read off a set of ramps, and the mean and spread of its output off the photos.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.data.peers.pixels import BATCH, DECODERS, MEAN, OUT, STD, Photos, crops_of, pixels_of, single_threaded
from benchmarks.data.peers.stubs import without_torchvision
from benchmarks.peers.gate import Gate

WORKERS = 2
Batches = Iterator[Any]
Maker = Callable[[Path, Photos, str], Batches]  # folder, JPEGs, the part of the name behind the first word
CHECKED = 640


# --- unisono -------------------------------------------------------------------------------------------------------


def unisono(folder: Path, photos: Photos, how: str) -> Batches:
    """``untouched``, ``tiles`` (lossless), ``packed`` (short side 256, tiles), ``cached`` (decoded, in memory), each by
    ``torch`` or ``opencv``; ``… batch`` flips and normalises whole batches."""
    from unisono.data import Loader, LoaderOptions
    from unisono.data.combined import mapped
    from unisono.data.image import Augment, ImageTransform
    from unisono.data.loading.sample_cache import cached
    from unisono.data.recordio import RecordDataset

    way, by, *batch_wise = how.split()
    augment = Augment(
        size=(OUT, OUT),
        flip=0.5,
        mean=tuple(MEAN.tolist()),
        std=tuple(STD.tolist()),
        resize="opencv" if by == "opencv" else "torch",
    )
    data: Any = RecordDataset(
        [_packed(folder, photos, way)], encoded, side=[] if way in ("untouched", "cached") else ["tiles"]
    )
    if way == "cached":
        data = cached(mapped(data, decoded), budget_bytes=len(photos) * 600_000)
    loader = Loader(
        data,
        seed=1,
        global_batch=BATCH,
        options=LoaderOptions(num_workers=WORKERS, worker_kind="thread"),
        transform=ImageTransform(augment=augment, pixels_on="device" if batch_wise else "host"),
        batch_transform=partial(finished_batch, augment) if batch_wise else None,
    )
    for batch in loader.iterate(0, 10**9):
        yield batch.micro_batches[0]["image"].numpy()


def finished_batch(augment: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """What a training loop would do on its device, done by the loader's threads."""
    import torch as package

    from unisono.data.image import augment_on_device

    image, draws = (package.from_numpy(batch[name]) for name in ("image", "image_draws"))
    return {"image": augment_on_device(image, draws, augment).numpy()}


def encoded(payload: memoryview) -> dict[str, Any]:
    """A record's bytes as the entry an ImageTransform looks for."""
    return {"image": np.frombuffer(payload, np.uint8)}


def decoded(sample: dict[str, Any]) -> dict[str, Any]:
    """The whole image, once, for the cache."""
    from unisono.data.image import decode

    return {"image": decode(sample["image"])}


def _packed(folder: Path, photos: Photos, way: str) -> Path:
    from unisono.data.image import add_restart_markers, decode, encode_jpeg, tile_grid
    from unisono.data.recordio import RecordWriter

    with RecordWriter(folder / "photos.rec") as writer:
        for jpeg in photos:
            if way in ("untouched", "cached"):
                writer.write(jpeg)
                continue
            tiled = add_restart_markers(jpeg) if way == "tiles" else encode_jpeg(_short_side_256(decode(jpeg)))
            grid = tile_grid(tiled)
            assert grid is not None
            writer.write(tiled, side={"tiles": grid.to_column()})
    return folder / "photos.rec"


def _short_side_256(pixels: np.ndarray) -> np.ndarray:
    from PIL import Image

    height, width = pixels.shape[:2]
    size = round(width * 256 / min(height, width)), round(height * 256 / min(height, width))
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))


# --- loaders that take a Python function -----------------------------------------------------------------------------


class Decoded:
    """A map-style data set for torch's and gluon's DataLoader. ``source[number]`` is a JPEG."""

    def __init__(self, source: Any, decoder: str) -> None:
        self.source, self.decoder = source, decoder
        self.rng: np.random.Generator | None = None

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, number: int) -> np.ndarray:
        if self.rng is None:  # in the worker, so that each has its own
            self.rng = np.random.default_rng()
            single_threaded()
        return DECODERS[self.decoder](self.source[number], self.rng)


def torch(folder: Path, photos: Photos, how: str) -> Batches:
    """torch's DataLoader over the mapped file, with worker processes that live on."""
    from torch.utils.data import DataLoader

    loader = DataLoader(
        Decoded(photos, how),
        batch_size=BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=WORKERS,
        persistent_workers=True,
    )
    while True:
        yield from loader


def webdataset(folder: Path, photos: Photos, how: str) -> Batches:
    """Tar shards, shard order and a buffer of 1,000; torch's workers."""
    import webdataset as wds

    with wds.ShardWriter(str(folder / "photos-%03d.tar"), maxcount=250, verbose=0) as sink:
        for number, jpeg in enumerate(photos):
            sink.write({"__key__": f"{number:06d}", "jpg": jpeg})
    shards = sorted(map(str, folder.glob("*.tar")))
    data = (
        wds.WebDataset(shards, shardshuffle=len(shards), nodesplitter=None, empty_check=False)
        .shuffle(1000)
        .to_tuple("jpg")
        .map(partial(_first, Rng(how)))
        .batched(BATCH, partial=False, collation_fn=_stacked)
    )
    loader = wds.WebLoader(data, batch_size=None, num_workers=WORKERS, persistent_workers=True)
    while True:
        yield from loader


class Rng:
    """A decoder with a generator made where it is first used."""

    def __init__(self, decoder: str) -> None:
        self.decoder = decoder
        self.rng: np.random.Generator | None = None

    def __call__(self, jpeg: bytes) -> np.ndarray:
        if self.rng is None:
            self.rng = np.random.default_rng()
            single_threaded()
        return DECODERS[self.decoder](jpeg, self.rng)


def _first(decode: Rng, row: tuple[bytes]) -> np.ndarray:
    return decode(row[0])


def _stacked(rows: list[Any]) -> Any:
    import torch as package

    return package.from_numpy(np.stack([row[0] if isinstance(row, tuple) else row for row in rows]))


def streaming(folder: Path, photos: Photos, how: str) -> Batches:
    """MDS shards, StreamingDataset, torch's DataLoader."""
    without_torchvision()
    from streaming import MDSWriter, StreamingDataset
    from torch.utils.data import DataLoader

    with MDSWriter(out=str(folder / "mds"), columns={"jpg": "bytes"}) as writer:
        for jpeg in photos:
            writer.write({"jpg": jpeg})
    decode = Rng(how)

    class Set(StreamingDataset):
        def __getitem__(self, at: Any) -> Any:
            return decode(super().__getitem__(at)["jpg"])

    data = Set(local=str(folder / "mds"), shuffle=True, batch_size=BATCH)
    loader = DataLoader(data, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True, drop_last=True)
    while True:
        yield from loader


def litdata(folder: Path, photos: Photos, how: str) -> Batches:
    """Chunks of 64 MB, StreamingDataset and StreamingDataLoader."""
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder / "chunks"), chunk_bytes=64 << 20)
    for number, jpeg in enumerate(photos):
        writer[number] = jpeg
    writer.done()
    writer.merge()
    decode = Rng(how)

    class Set(StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            return decode(super().__getitem__(index))

    data = Set(str(folder / "chunks"), shuffle=True, drop_last=True)
    loader = StreamingDataLoader(data, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True, drop_last=True)
    while True:
        yield from loader


def grain(folder: Path, photos: Photos, how: str) -> Batches:
    """ArrayRecord, MapDataset with its global shuffle, two read threads that decode."""
    import grain.python as package
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(folder / "photos.array_record"), "group_size:1,uncompressed")
    for jpeg in photos:
        writer.write(jpeg)
    writer.close()
    source = package.ArrayRecordDataSource([str(folder / "photos.array_record")])
    rows = package.MapDataset.source(source).seed(1).shuffle().repeat().random_map(DECODERS[how])
    batches = rows.to_iter_dataset(package.ReadOptions(num_threads=WORKERS, prefetch_buffer_size=2 * BATCH)).batch(
        BATCH
    )
    yield from batches


def spdl(folder: Path, photos: Photos, how: str) -> Batches:
    """A pipeline of threads, eight JPEGs a task."""
    from spdl.pipeline import PipelineBuilder

    rng = np.random.default_rng(1)

    def numbers() -> Iterator[list[int]]:
        while True:
            order = rng.permutation(len(photos))
            yield from (order[first : first + 8].tolist() for first in range(0, len(order) // BATCH * BATCH, 8))

    def some(tasks: list[int]) -> list[np.ndarray]:
        mine = np.random.default_rng()
        return [DECODERS[how](photos[number], mine) for number in tasks]

    pipeline = (
        PipelineBuilder()
        .add_source(numbers())
        .pipe(some, concurrency=WORKERS)
        .aggregate(BATCH // 8)
        .pipe(_joined)
        .add_sink(2)
        .build(num_threads=WORKERS)
    )
    with pipeline.auto_stop():
        yield from pipeline.get_iterator(timeout=60)


def _joined(groups: list[list[np.ndarray]]) -> np.ndarray:
    return np.stack([row for group in groups for row in group])


# --- loaders with decoders of their own --------------------------------------------------------------------------------


def mxnet(folder: Path, photos: Photos, how: str) -> Batches:
    """``ImageRecordIter`` with two decoding threads; ``gluon``: its DataLoader with two processes and its own transforms."""
    import mxnet as mx

    record = mx.recordio.MXIndexedRecordIO(str(folder / "p.idx"), str(folder / "p.rec"), "w")
    for number, jpeg in enumerate(photos):
        record.write_idx(number, mx.recordio.pack(mx.recordio.IRHeader(0, 0.0, number, 0), jpeg))
    record.close()
    if how == "ImageRecordIter":
        r, g, b = (255 * MEAN).tolist(), (255 * STD).tolist(), None
        iterator = mx.io.ImageRecordIter(
            path_imgrec=str(folder / "p.rec"), path_imgidx=str(folder / "p.idx"), data_shape=(3, OUT, OUT), batch_size=BATCH,
            shuffle=True, rand_mirror=True, random_resized_crop=True, min_random_area=0.08, max_random_area=1.0,
            min_aspect_ratio=3 / 4, max_aspect_ratio=4 / 3, mean_r=r[0], mean_g=r[1], mean_b=r[2],
            std_r=g[0], std_g=g[1], std_b=g[2], preprocess_threads=WORKERS, prefetch_buffer=4, round_batch=True,
        )  # fmt: skip
        del b
        while True:
            for batch in iterator:
                yield batch.data[0].asnumpy()
            iterator.reset()
    from mxnet.gluon.data.vision import ImageRecordDataset, transforms

    change = transforms.Compose(
        [
            transforms.RandomResizedCrop(OUT, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3)),
            transforms.RandomFlipLeftRight(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN.tolist(), STD.tolist()),
        ]
    )
    data = ImageRecordDataset(str(folder / "p.rec")).transform_first(change)
    loader = mx.gluon.data.DataLoader(data, batch_size=BATCH, shuffle=True, last_batch="discard", num_workers=WORKERS)
    while True:
        for images, _ in loader:
            yield images.asnumpy()


def mindspore(folder: Path, photos: Photos, how: str) -> Batches:
    """``MindDataset`` and its fused decode and crop, two parallel workers."""
    import mindspore.dataset as ds
    from mindspore.dataset import vision
    from mindspore.mindrecord import FileWriter

    path = str(folder / "photos.mindrecord")
    writer = FileWriter(path, shard_num=1, overwrite=True)
    writer.add_schema({"image": {"type": "bytes"}}, "photos")
    for number in range(0, len(photos), 64):
        writer.write_raw_data([{"image": photos[i]} for i in range(number, min(number + 64, len(photos)))])
    writer.commit()
    ds.config.set_prefetch_size(2)
    data = ds.MindDataset(path, columns_list=["image"], num_parallel_workers=1, shuffle=True)
    steps = [
        vision.RandomCropDecodeResize(OUT, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3)),
        vision.RandomHorizontalFlip(0.5),
        vision.Normalize((255 * MEAN).tolist(), (255 * STD).tolist()),
        vision.HWC2CHW(),
    ]
    data = data.map(steps, input_columns="image", num_parallel_workers=WORKERS).batch(BATCH, drop_remainder=True)
    rows = data.create_tuple_iterator(num_epochs=10_000, output_numpy=True)
    while True:
        for (images,) in rows:
            yield images


def ffcv(folder: Path, photos: Photos, how: str) -> Batches:
    """Beton in JPEG mode, its own random resized crop."""
    import io

    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter
    from PIL import Image

    class Set:
        def __len__(self) -> int:
            return len(photos)

        def __getitem__(self, number: int) -> Any:
            return Image.open(io.BytesIO(photos[number])).convert("RGB"), 0

    path = str(folder / "photos.beton")
    writer = DatasetWriter(
        path, {"image": RGBImageField(write_mode="jpg", jpeg_quality=90), "label": IntField()}, num_workers=1
    )
    writer.from_indexed_dataset(Set())
    steps = [
        RandomResizedCropRGBImageDecoder((OUT, OUT), scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3)),
        RandomHorizontalFlip(),
        NormalizeImage(255 * MEAN, 255 * STD, np.float32),
        ToTensor(),
        ToTorchImage(),
    ]
    loader = Loader(
        path, batch_size=BATCH, num_workers=WORKERS, order=OrderOption.RANDOM, drop_last=True,
        pipelines={"image": steps, "label": None},
    )  # fmt: skip
    while True:
        for (images,) in loader:
            yield images.numpy()


KINDS: dict[str, Maker] = {
    "unisono": unisono,
    "torch": torch,
    "webdataset": webdataset,
    "streaming": streaming,
    "litdata": litdata,
    "grain": grain,
    "spdl": spdl,
    "mxnet": mxnet,
    "mindspore": mindspore,
    "ffcv": ffcv,
}


def main() -> None:
    gate = Gate()
    single_threaded()
    settings = json.loads(sys.argv[1])
    kind, _, how = settings["kind"].partition(" ")
    folders = Path(settings["folder"]) / "ramps", Path(settings["folder"]) / "photos"
    for folder in folders:
        folder.mkdir()
    checks = KINDS[kind](folders[0], Photos(settings["ramps"]), how)
    crops = crops_of(checks, CHECKED)
    checks.close()  # type: ignore[attr-defined]
    del checks
    batches = KINDS[kind](folders[1], Photos(settings["photos"]), how)
    pixels = pixels_of(batches, CHECKED)
    gate.open(crops=crops, pixels=pixels)
    while True:
        batch = next(batches)
        assert tuple(batch.shape) == (BATCH, 3, OUT, OUT), batch.shape
        gate.step_done(lambda value=batch: float(value[0, 0, 0, 0]))


if __name__ == "__main__":
    main()
