"""A region cut from tiles is the whole image cropped, bit for bit; columns that lie are errors."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from unisono.data.image import TileGrid, add_restart_markers, decode, decode_region, encode_jpeg, tile_grid
from unisono.data.image.tiles import cut_tiles
from unisono.errors import DataError

Photo = Callable[..., NDArray[np.uint8]]
Saved = Callable[..., bytes]

needs_jpegtran = pytest.mark.skipif(
    shutil.which("jpegtran") is None, reason="jpegtran: apt install libjpeg-turbo-progs"
)


def cropped_by_rule(data: bytes, box: tuple[int, int, int, int], factor: int, color: str) -> NDArray[np.uint8]:
    """What ``decode_region`` promises, by simplejpeg alone."""
    height, width = simplejpeg.decode_jpeg_header(data)[:2]
    least = {"min_height": -(-height // factor), "min_width": -(-width // factor)} if factor > 1 else {}
    whole = simplejpeg.decode_jpeg(data, "RGB" if color == "rgb" else "GRAY", **least)
    top, left, tall, wide = box
    return whole[top // factor : -(-(top + tall) // factor), left // factor : -(-(left + wide) // factor)]


def check_regions(data: bytes, seed: int, count: int) -> None:
    grid = tile_grid(data)
    assert grid is not None
    again = TileGrid.from_column(data, grid.to_column())
    height, width = grid.header.height, grid.header.width
    rng = np.random.default_rng(seed)
    for turn in range(count):
        tall, wide = int(rng.integers(1, height + 1)), int(rng.integers(1, width + 1))
        box = int(rng.integers(0, height - tall + 1)), int(rng.integers(0, width - wide + 1)), tall, wide
        factor = (1, 1, 2, 4, 8)[turn % 5]
        min_size = None if factor == 1 else (tall // factor, wide // factor)
        if factor > 1 and (min(box[2:]) < 16 or min(min_size or (0, 0)) < 1 or tall >= 2 * factor * (tall // factor)):
            continue
        got = decode_region(
            data, box, again if turn % 2 else grid, min_size=min_size, color="gray" if turn % 7 == 6 else "rgb"
        )
        want = cropped_by_rule(data, box, factor, "gray" if turn % 7 == 6 else "rgb")
        assert np.array_equal(got, want), (box, factor, grid.header)


@settings(max_examples=120, deadline=None)
@given(
    subsampling=st.sampled_from(["4:4:4", "4:2:2", "4:2:0", "gray"]),
    height=st.integers(1, 150),
    width=st.integers(1, 200),
    tile_px=st.sampled_from([8, 32, 64, 400]),
    seed=st.integers(0, 1000),
)
def test_regions_are_bit_exact(
    subsampling: str, height: int, width: int, tile_px: int, seed: int, photo: Photo
) -> None:
    pixels = photo(height, width, seed=seed)
    if subsampling == "gray":
        data = encode_jpeg(pixels[:, :, :1], tile_px=tile_px)
    else:
        data = encode_jpeg(pixels, subsampling=subsampling, tile_px=tile_px)
    check_regions(data, seed, 25)


@pytest.mark.parametrize("subsampling", ["4:2:2", "4:2:0"])
@pytest.mark.parametrize("width", [34, 35, 36, 37, 66, 67])
def test_a_last_column_of_few_chroma_samples_is_bit_exact(subsampling: str, width: int, photo: Photo) -> None:
    """libjpeg-turbo replicates chroma of at most two columns and interpolates wider chroma."""
    data = encode_jpeg(photo(20, width, seed=505), subsampling=subsampling, tile_px=8)
    whole = decode(data)
    for left in range(width - 4, width):
        assert np.array_equal(decode_region(data, (3, left, 9, width - left), tile_grid(data)), whole[3:12, left:])


def test_grey_with_sampling_factors(photo: Photo) -> None:
    """With one component they mean nothing (T.81 A.2.2), yet some encoders write 2x2."""
    data = bytearray(encode_jpeg(photo(50, 72)[:, :, :1], tile_px=24))
    plain = decode(data)
    factors = data.index(b"\xff\xc0") + 11
    assert data[factors] == 0x11
    data[factors] = 0x22
    grid = tile_grid(data)
    assert grid is not None
    assert (grid.rows, grid.columns, grid.tile_width) == (7, 3, 24)
    assert np.array_equal(decode_region(data, (9, 30, 33, 40), grid), plain[9:42, 30:70])


@needs_jpegtran
@pytest.mark.parametrize("subsampling", ["444", "422", "420", "440", "411", "Gray"])
@pytest.mark.parametrize("size", [(97, 131), (64, 128), (9, 210)])
def test_regions_of_marked_jpegs_are_bit_exact(photo: Photo, subsampling: str, size: tuple[int, int]) -> None:
    pixels = photo(*size)
    if subsampling == "Gray":
        plain = simplejpeg.encode_jpeg(pixels[:, :, :1].copy(), colorspace="GRAY", colorsubsampling="Gray")
    else:
        plain = simplejpeg.encode_jpeg(pixels, colorsubsampling=subsampling)
    data = add_restart_markers(plain, tile_px=32)
    assert np.array_equal(decode(data), decode(plain))
    check_regions(data, 1, 80)


def test_scaled_regions_lie_on_the_scaled_grid(photo: Photo) -> None:
    data = encode_jpeg(photo(200, 300))
    grid = tile_grid(data)
    for factor, min_size in ((1, (60, 20)), (2, (50, 20)), (4, (25, 20)), (8, (12, 12))):
        got = decode_region(data, (33, 51, 101, 102), grid, min_size=min_size)
        assert got.shape[:2] == (-(-134 // factor) - 33 // factor, -(-153 // factor) - 51 // factor)
        assert np.array_equal(got, decode_region(data, (33, 51, 101, 102), min_size=min_size))
        assert np.array_equal(got, cropped_by_rule(data, (33, 51, 101, 102), factor, "rgb"))


def test_without_tiles_the_whole_is_decoded(photo: Photo, saved: Saved) -> None:
    pixels = photo(60, 90)
    for name in ("JPEG", "PNG"):
        data = saved(pixels, name)
        assert np.array_equal(decode_region(data, (10, 20, 30, 40)), decode(data)[10:40, 20:60])


def test_a_cut_is_a_jpeg_for_others_and_smaller(photo: Photo) -> None:
    data = encode_jpeg(photo(300, 400), subsampling="4:4:4", tile_px=64)
    grid = tile_grid(data)
    assert grid is not None
    small, (top, left) = cut_tiles(data, grid, (100, 130, 90, 70))
    peer = np.asarray(Image.open(io.BytesIO(small)))
    assert (top, left) == (96, 80)  # tiles of 8x80 pixels: 10 divides the 50 MCUs of a row, 8 does not
    assert np.array_equal(peer, decode(data)[top : top + peer.shape[0], left : left + peer.shape[1]])
    assert len(small) < len(data) / 4


def test_metadata_is_not_in_a_cut(photo: Photo, saved: Saved) -> None:
    exif = Image.Exif()
    exif[0x010E] = "a secret" * 1000
    data = saved(photo(64, 64), "JPEG", exif=exif, restart_marker_blocks=1)
    grid = tile_grid(data)
    assert grid is not None
    small, _ = cut_tiles(data, grid, (0, 0, 64, 64))
    assert b"secret" in data
    assert b"secret" not in small
    assert np.array_equal(decode(small), decode(data))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "no restart markers"),
        ({"restart_marker_blocks": 3}, "8 MCUs in a row"),
        ({"restart_marker_rows": 2}, "more than a row"),
        ({"restart_marker_blocks": 4, "progressive": True}, "progressive"),
    ],
)
def test_what_has_no_grid(photo: Photo, saved: Saved, options: dict[str, object], why: str) -> None:
    data = saved(photo(64, 128), "JPEG", subsampling="4:2:0", **options)
    assert tile_grid(data) is None, why
    with pytest.raises(DataError, match="for a JPEG of no tiles"):
        TileGrid.from_column(data, np.ones(8, np.uint16))


def test_other_formats_have_no_grid(photo: Photo, saved: Saved) -> None:
    assert tile_grid(saved(photo(20, 20), "PNG")) is None


def test_damaged_markers_are_no_grid(photo: Photo) -> None:
    data = encode_jpeg(photo(64, 128), tile_px=64)
    grid = tile_grid(data)
    assert grid is not None
    marker = int(grid.offsets[3]) - 1
    for damaged in (
        data[: marker - 1] + data[marker + 1 :],  # one is missing
        data[:marker] + b"\xd0" + data[marker + 1 :],  # out of turn
        data[: marker + 1] + b"\xff\xd3" + data[marker + 1 :],  # one too many
        data[:-2],
        data[: len(data) // 2],
    ):
        assert tile_grid(damaged) is None
        with pytest.raises(DataError):
            TileGrid.from_column(damaged, grid.to_column())


def test_columns_are_as_narrow_as_they_can_be(photo: Photo) -> None:
    narrow = encode_jpeg(photo(64, 128), tile_px=64)
    noise = np.random.default_rng(0).integers(0, 256, (16, 4000, 3), dtype=np.uint8)
    wide = encode_jpeg(noise, quality=100, subsampling="4:4:4", tile_px=4000)
    for data, dtype in ((narrow, np.uint16), (wide, np.uint32)):
        grid = tile_grid(data)
        assert grid is not None
        column = grid.to_column()
        assert column.dtype == dtype
        assert np.array_equal(TileGrid.from_column(data, column).offsets, grid.offsets)


def test_more_tiles_than_the_table_of_markers(photo: Photo) -> None:
    data = encode_jpeg(photo(400, 408), subsampling="4:4:4", tile_px=8)
    grid = tile_grid(data)
    assert grid is not None
    assert grid.rows * grid.columns == 50 * 51
    assert np.array_equal(decode_region(data, (7, 9, 390, 395), grid), decode(data)[7:397, 9:404])


@settings(max_examples=200, deadline=None)
@given(
    changes=st.lists(st.tuples(st.integers(0, 7), st.integers(-300, 300)), min_size=1, max_size=4),
    shift_back=st.booleans(),
)
def test_a_column_that_lies_is_an_error(changes: list[tuple[int, int]], shift_back: bool, photo: Photo) -> None:
    data = encode_jpeg(photo(64, 128), tile_px=64)
    grid = tile_grid(data)
    assert grid is not None
    column = grid.to_column().astype(np.int64)
    assert column.size == 8
    for place, change in changes:
        column[place % column.size] += change
        if shift_back:  # the sum stays, so that the end is right
            column[(place + 1) % column.size] -= change
    lied = np.clip(column, 0, 65535).astype(np.uint16)
    if np.array_equal(lied, grid.to_column()):
        return
    with pytest.raises(DataError, match="a column of tile sizes is the result of to_column"):
        TileGrid.from_column(data, lied)


def test_a_value_that_looks_like_a_marker_s_number_is_none() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 256, 3), dtype=np.uint8)
    data = encode_jpeg(noise, tile_px=128)
    grid = tile_grid(data)
    assert grid is not None
    low, high = grid.offsets[2:4].tolist()
    at = data.index(b"\xd2", low + 1)  # the marker behind tile 2 is FF D2
    assert data[at - 1] != 0xFF
    assert at + 1 < high
    column = grid.to_column()
    column[2] -= high - (at + 1)
    column[3] += high - (at + 1)
    with pytest.raises(DataError, match=f"tile 2, which should end in its marker at byte {at - 1}"):
        TileGrid.from_column(data, column)


def test_columns_of_other_kinds_and_images(photo: Photo) -> None:
    data = encode_jpeg(photo(64, 128), tile_px=64)
    grid = tile_grid(data)
    assert grid is not None
    column = grid.to_column()
    huge = np.full(column.size, 2**32 - 1, np.uint32)
    swapped = column.copy()
    swapped[:2] = swapped[1::-1]
    for wrong in (column.astype(np.int32), column[None], column[:-1], np.zeros_like(column), huge, swapped):
        with pytest.raises(DataError):
            TileGrid.from_column(data, wrong)
    with pytest.raises(DataError, match="a column of tile sizes is the result of"):
        TileGrid.from_column(encode_jpeg(photo(64, 128, seed=1), tile_px=64), column)
    with pytest.raises(
        DataError, match=rf"tile 0, which should end in its marker at byte {grid.offsets[0] + column[1] - 2}"
    ):
        TileGrid.from_column(data, swapped)
    with pytest.raises(DataError) as caught:
        TileGrid.from_column(data, column[:-1])
    assert str(caught.value) == (
        "a column of uint16[7] tile sizes for a JPEG of 4x2 tiles\n"
        "  rule: a column of tile sizes is the result of to_column() for this JPEG\n"
        "  so:   nothing was decoded, because it could have been another part of the image\n"
        "  try:  tile_grid(jpeg).to_column() computes it"
    )


@pytest.mark.parametrize("box", [(-1, 0, 5, 5), (0, 0, 0, 5), (0, 0, 65, 5), (60, 120, 4, 9), (0, 0, 5, -1)])
@pytest.mark.parametrize("tiled", [True, False])
def test_boxes_outside(photo: Photo, saved: Saved, box: tuple[int, int, int, int], tiled: bool) -> None:
    data = encode_jpeg(photo(64, 128), tile_px=64)
    grid = tile_grid(data) if tiled else None
    for image in (data, *(() if tiled else (saved(photo(64, 128), "PNG"),))):
        with pytest.raises(DataError) as caught:
            decode_region(image, box, grid)
        assert f"a box of {box[2]}x{box[3]} pixels at ({box[0]}, {box[1]}) in an image of 64x128" in str(caught.value)


def test_damage_inside_a_tile_is_an_error_there_and_nowhere_else(photo: Photo) -> None:
    data = bytearray(encode_jpeg(photo(64, 128), subsampling="4:4:4", tile_px=64))
    grid = tile_grid(data)
    assert grid is not None
    whole = decode(data)
    low, high = int(grid.offsets[2]), int(grid.offsets[3]) - 2
    data[low:high] = bytes(high - low)  # codes of tile 2, in the second row of tiles, run out of step
    with pytest.raises(DataError, match="Corrupt JPEG data"):
        decode_region(data, (8, 0, 8, 60), grid)
    assert np.array_equal(decode_region(data, (40, 0, 8, 128), grid), whole[40:48])


def test_the_cap_is_for_the_whole_image(photo: Photo) -> None:
    data = encode_jpeg(photo(64, 128), tile_px=64)
    with pytest.raises(DataError, match="an image of 128x64 = 8192 pixels"):
        decode_region(data, (0, 0, 8, 8), tile_grid(data), max_pixels=8191)
