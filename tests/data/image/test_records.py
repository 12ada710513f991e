"""From a record file to batches: the same pixels for any workers, ranks and cache, with tiles or without."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unisono.data.combined import mapped
from unisono.data.image import (
    Augment,
    CenterCrop,
    CutMix,
    ImageTransform,
    Mixup,
    RandomResizedCrop,
    decode,
    encode_jpeg,
    image_records,
    tile_grid,
)
from unisono.data.loading.loader import Loader, eval_batches
from unisono.data.loading.sample_cache import cached
from unisono.data.options import LoaderOptions
from unisono.data.recordio import ImageHeader, RecordWriter, pack_header
from unisono.errors import DataError

TRANSFORM = ImageTransform(
    augment=Augment(size=(32, 32), crop=RandomResizedCrop(), flip=0.5, mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.2))
)


def photo(number: int) -> np.ndarray:
    rng = np.random.default_rng(number)
    coarse = rng.random((6, 8, 3)).repeat(16, 0).repeat(16, 1)[: 70 + number, : 90 + 2 * number]
    return (coarse * 200 + rng.random(coarse.shape) * 40).astype(np.uint8)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Twelve images of several sizes as JPEGs with restart markers, with their tiles beside them and without."""
    folder = tmp_path_factory.mktemp("images")
    jpegs = [encode_jpeg(photo(number), quality=90) for number in range(12)]
    with RecordWriter(folder / "plain.rec") as plain, RecordWriter(folder / "tiled.rec") as tiled:
        for number, jpeg in enumerate(jpegs):
            record = pack_header(ImageHeader(label=number % 3, id=number), jpeg)
            plain.write(record)
            grid = tile_grid(jpeg)
            assert grid is not None
            tiled.write(record, side={"tiles": grid.to_column(), "label": number % 3})
    return {"plain": folder / "plain.rec", "tiled": folder / "tiled.rec"}


def decoded(sample: dict[str, Any]) -> dict[str, Any]:
    return {"image": decode(sample["image"]), "targets": sample["targets"]}


def batches(data: Any, *, world: int = 1, pair: Any = None, **options: Any) -> list[Any]:
    found = []
    for step in range(4):
        images, targets = [], []
        for rank in range(world):
            one = Loader(
                data, seed=4, global_batch=5, rank=rank, world_size=world, transform=TRANSFORM, pair_transform=pair,
                options=LoaderOptions(**{"num_workers": 0, **options}),
            )  # fmt: skip
            for batch in one.iterate(step, step + 1):
                for part in batch.micro_batches:
                    images.append(part["image"].numpy())
                    targets += part["targets"].tolist()
            one.close()
        found.append((np.concatenate(images), targets))
    return found


def same(one: list[Any], other: list[Any]) -> bool:
    return all(np.array_equal(a[0], b[0]) and a[1] == b[1] for a, b in zip(one, other, strict=True))


@pytest.mark.full
def test_pixels_do_not_depend_on_workers_kind_ranks_tiles_or_resume_point(files: dict[str, Path]) -> None:
    plain = image_records([files["plain"]])
    alone = batches(plain)
    assert alone[0][0].shape == (5, 3, 32, 32)
    assert alone[0][0].dtype == np.float32
    assert same(batches(image_records([files["tiled"]])), alone), "what tiles decode is bit-exact"
    assert same(batches(plain, num_workers=3, worker_kind="thread"), alone)
    assert same(batches(image_records([files["tiled"]]), num_workers=2, worker_kind="process"), alone)
    assert same(batches(plain, world=3), alone)


@pytest.mark.parametrize("mix", [Mixup(classes=3), CutMix(classes=3)])
def test_mixing_is_the_same_on_any_number_of_ranks(files: dict[str, Path], mix: Any) -> None:
    data = image_records([files["tiled"]])
    alone = batches(data, pair=mix)
    assert same(batches(data, pair=mix, world=3), alone)
    assert all(sum(target) == pytest.approx(1, abs=1e-6) for _, targets in alone for target in targets)


def test_a_cache_of_decoded_pixels_crops_like_the_full_decode(files: dict[str, Path]) -> None:
    data = image_records([files["plain"]])
    kept = cached(mapped(data, decoded), budget_bytes=8 << 20)
    first, again = batches(kept), batches(kept)
    assert same(first, again)
    assert same(first, batches(mapped(data, decoded)))


def test_held_out_images_are_a_data_set_of_centre_crops(files: dict[str, Path]) -> None:
    fixed = ImageTransform(augment=Augment(size=(32, 32), crop=CenterCrop()))
    data = mapped(image_records([files["plain"]]), fixed)
    found = [part["image"] for rank in range(2) for part in eval_batches(data, 4, rank, 2)]
    assert sum(len(images) for images in found) == 12
    assert np.array_equal(data.read(np.array([3]))["image"][0], found[0][3].numpy())
    other = mapped(image_records([files["plain"]]), ImageTransform(augment=Augment(size=(16, 16), crop=CenterCrop())))
    assert data.fingerprint != other.fingerprint


def test_a_damaged_image_is_named_or_weighs_nothing(files: dict[str, Path], tmp_path: Path) -> None:
    rec = tmp_path / "bad.rec"
    with RecordWriter(rec) as writer:
        for number in range(12):
            jpeg = encode_jpeg(photo(number), quality=90)
            whole = number != 7
            writer.write(pack_header(ImageHeader(label=number % 3), jpeg if whole else jpeg[: len(jpeg) // 2]))
    data = image_records([rec])
    with pytest.raises(DataError, match="reading sample 7 of step") as caught:
        batches(data)
    assert "ends before" in str(caught.value) or "truncated" in str(caught.value).lower() or "JPEG" in str(caught.value)
    one = Loader(
        data,
        seed=4,
        global_batch=12,
        transform=TRANSFORM,
        options=LoaderOptions(num_workers=0, max_bad_sample_frac=0.1),
    )
    batch = one.batch(0)
    assert batch.skipped_ids == [7]
    assert batch.micro_batches[0]["weights"].tolist() == [float(i != 7) for i in batch.sample_ids.tolist()]


def test_labels_that_are_no_class_are_told(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "a.rec") as writer:
        writer.write(pack_header(ImageHeader(label=0.5), b"x"))
        writer.write(pack_header(ImageHeader(label=np.array([1, 2], np.float32)), b"x"))
        writer.write(pack_header(ImageHeader(label=float("inf")), b"x"))
        writer.write(pack_header(ImageHeader(label=float("nan")), b"x"))
    for number, said in ((2, r"label \[inf\]"), (3, r"label \[nan\]")):
        with pytest.raises(DataError, match=said):
            image_records([tmp_path / "a.rec"]).read(np.array([number]))
    with pytest.raises(DataError, match=r"decode raised DataError: label \[0.5\]"):
        image_records([tmp_path / "a.rec"]).read(np.array([0]))
    with pytest.raises(DataError, match=r"label \[1.0, 2.0\]"):
        image_records([tmp_path / "a.rec"]).read(np.array([1]))
    (sample,) = image_records([tmp_path / "a.rec"], classes=False).samples(np.array([1]))
    assert sample["targets"].tolist() == [1, 2]


@pytest.mark.skipif(shutil.which("jpegtran") is None, reason="needs jpegtran (apt install libjpeg-turbo-progs)")
def test_markers_put_in_afterwards_change_no_pixel(tmp_path: Path) -> None:
    from io import BytesIO

    from PIL import Image

    from unisono.data.image import add_restart_markers

    buffer = BytesIO()
    Image.fromarray(photo(3)).save(buffer, "JPEG", quality=88)
    untouched = buffer.getvalue()
    assert tile_grid(untouched) is None
    marked = add_restart_markers(untouched)
    assert tile_grid(marked) is not None
    assert np.array_equal(decode(marked), decode(untouched))
