"""Our image records read by MXNet, and compared with its own im2rec: UNISONO_MXNET_PYTHON names an interpreter that has
mxnet 1.9.1, numpy below 1.24 and opencv-python-headless."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unisono.data.convert.pack import ImageOptions, pack_images
from unisono.data.image import decode, probe
from unisono.data.recordio import RecordFile, unpack_header

PYTHON = os.environ.get("UNISONO_MXNET_PYTHON")
pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(
        not PYTHON, reason="set UNISONO_MXNET_PYTHON to an interpreter with mxnet==1.9.1: nothing was compared"
    ),
]
READ = """
import json, sys
import numpy as np
np.bool = bool
import mxnet as mx
path = sys.argv[1]
records = mx.recordio.MXIndexedRecordIO(path[:-3] + "idx", path, "r")
images = []
for key in records.keys:
    header, image = mx.recordio.unpack_img(records.read_idx(key))
    np.save(f"{sys.argv[2]}/{key}.npy", image[:, :, ::-1])
    images.append([key, header.id, header.label])
batches = mx.io.ImageRecordIter(
    path_imgrec=path, data_shape=(3, 32, 32), batch_size=5, round_batch=False, preprocess_threads=1, ctx="cpu"
)
labels, sums = [], []
for batch in batches:
    count = 5
    labels += batch.label[0].asnumpy()[:count].tolist()
    sums += batch.data[0].asnumpy()[:count].astype(int).sum((1, 2, 3)).tolist()
print(json.dumps({"images": images, "labels": labels, "sums": sums}))
"""
IM2REC = """
import runpy, sys
import numpy as np
np.bool = bool
import mxnet, os
sys.argv[0] = os.path.join(os.path.dirname(mxnet.__file__), "tools", "im2rec.py")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def peer(script: str, *arguments: str | Path) -> str:
    assert PYTHON is not None
    command = [PYTHON, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def im2rec(album: Path, prefix: Path, *options: str) -> Path:
    peer(IM2REC, "--list", "--recursive", "--no-shuffle", prefix, album)
    peer(IM2REC, *options, "--num-thread", "1", prefix, album)
    return prefix.with_suffix(".rec")


@pytest.mark.parametrize("options", [ImageOptions(tiles=True), ImageOptions(resize=32, center_crop=True)])
def test_mxnet_reads_the_same_labels_and_pixels(album: Path, tmp_path: Path, options: ImageOptions) -> None:
    pack_images(album, tmp_path / "a.rec", options)
    found: dict[str, Any] = json.loads(peer(READ, tmp_path / "a.rec", tmp_path))
    records = [unpack_header(record) for record in RecordFile(tmp_path / "a.rec")]
    assert found["images"] == [[header.id, header.id, header.label] for header, _ in records]
    assert found["labels"] == [header.label for header, _ in records]
    for (header, image), total in zip(records, found["sums"], strict=True):
        theirs = np.load(tmp_path / f"{header.id}.npy")
        ours = decode(image)
        assert theirs.shape == ours.shape
        assert np.abs(theirs.astype(int) - ours).max() <= 2
        if options.resize:  # else the iterator crops
            assert abs(total - int(ours.astype(int).sum())) <= 2 * ours.size


def test_untouched_bytes_make_im2recs_file(album: Path, tmp_path: Path) -> None:
    theirs = im2rec(album, tmp_path / "theirs", "--pass-through")
    pack_images(album, tmp_path / "ours.rec")
    assert (tmp_path / "ours.rec").read_bytes() == theirs.read_bytes()
    assert (tmp_path / "ours.idx").read_bytes() == theirs.with_suffix(".idx").read_bytes()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (["--resize", "33"], ImageOptions(resize=33)),
        (["--resize", "120"], ImageOptions(resize=120)),
        (["--center-crop", "--quality", "80"], ImageOptions(center_crop=True, quality=80)),
        (["--resize", "40", "--center-crop", "--color", "0"], ImageOptions(resize=40, center_crop=True, color="gray")),
        (["--encoding", ".png", "--quality", "3"], ImageOptions(encoding="png")),
    ],
)
def test_options_give_what_im2rec_gives(album: Path, tmp_path: Path, theirs: list[str], ours: ImageOptions) -> None:
    first = RecordFile(im2rec(album, tmp_path / "theirs", *theirs))
    pack_images(album, tmp_path / "ours.rec", ours)
    second = RecordFile(tmp_path / "ours.rec")
    assert len(first) == len(second) == 30
    for one, two in zip(first, second, strict=True):
        (their_header, their_image), (our_header, our_image) = unpack_header(one), unpack_header(two)
        assert (their_header.label, their_header.id) == (our_header.label, our_header.id)
        their_info, our_info = probe(their_image), probe(our_image)
        assert (their_info.format, their_info.height, their_info.width, their_info.mode) == (
            our_info.format,
            our_info.height,
            our_info.width,
            our_info.mode,
        )
        # Pillow's antialiasing is not OpenCV's interpolation, nor is one JPEG another.
        apart = np.abs(decode(their_image).astype(int) - decode(our_image)).mean()
        assert apart < (12 if ours.resize else 2)
