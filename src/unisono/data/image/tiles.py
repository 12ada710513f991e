"""Restart-marker tiles: cut the part of a JPEG under a crop out of the encoded data, and decode only that.

Most of the decoding time of a JPEG is Huffman decoding, which can only start at the beginning or at a restart marker, where all
state is reset (ITU-T T.81, E.1.4 and F.1.1.5.1). If the restart interval divides the rows of MCUs evenly, the runs of MCUs
between markers form a grid of independent tiles. The header with another size, followed by the tiles under a box with
renumbered markers, is a valid small JPEG whose pixels equal those of the whole, bit for bit. OpenSlide reads Hamamatsu's NDPI
slides in this way.

Boxes are (top, left, height, width) in pixels of the whole image.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from unisono.data.image.decoding import (
    MAX_PIXELS,
    Color,
    Pixels,
    check_pixels,
    check_scans,
    dct_factor,
    decode,
    decode_jpeg,
)
from unisono.data.image.jpeg_header import Encoded, JpegHeader, as_view, is_jpeg, read_header
from unisono.errors import DataError

Box = tuple[int, int, int, int]
TileColumn = NDArray[np.unsignedinteger[Any]]  # bytes per tile, uint16 or uint32

_EOI: Final = 0xD9
_TURNS: Final = np.tile(np.arange(0xD0, 0xD8, dtype=np.uint8), 256)  # restart markers 0 to 7
_SIZE: Final = struct.Struct(">HH")


@dataclass(frozen=True, kw_only=True, slots=True)
class TileGrid:
    """The tiles of one JPEG, from ``tile_grid`` or ``TileGrid.from_column``.

    Tile (row, column) is bytes ``offsets[k]`` to ``offsets[k + 1]`` of the file, k = row · columns + column, with the
    two bytes of the marker that ends it.

    Attributes:
        header: The header of the JPEG.
        rows: Number of rows of tiles.
        columns: Number of tiles in a row.
        tile_height: Height of a tile in pixels; tiles at the lower edge show fewer.
        tile_width: Width of a tile in pixels; tiles at the right edge show fewer.
        offsets: int64 [rows · columns + 1], where tiles begin and end in the file.
    """

    header: JpegHeader
    rows: int
    columns: int
    tile_height: int
    tile_width: int
    offsets: NDArray[np.int64]

    def to_column(self) -> TileColumn:
        """Bytes per tile, [rows · columns], in the smallest dtype that fits, to be stored beside the image."""
        sizes = np.diff(self.offsets)
        return sizes.astype(np.uint16 if sizes.max() < 1 << 16 else np.uint32)

    @staticmethod
    def from_column(jpeg: Encoded, column: TileColumn) -> TileGrid:
        """The grid from its column, without a scan of the image. Raises DataError for a column of another JPEG.

        Each tile must end in the expected restart marker, and the last one in the end of the image. There are as many markers as
        tiles, so no other column can pass.
        """
        view = as_view(jpeg)
        header = read_header(view)
        shape = _grid_shape(header)
        if shape is None or column.ndim != 1 or column.dtype.kind != "u" or column.size != shape[0] * shape[1]:
            raise _unlike(
                f"a column of {column.dtype}{list(column.shape)} tile sizes for a JPEG of "
                + (f"{shape[0]}x{shape[1]} tiles" if shape else "no tiles")
            )
        offsets = np.empty(column.size + 1, np.int64)
        offsets[0] = header.scan_at
        offsets[1:] = column
        np.cumsum(offsets, out=offsets)
        if offsets[-1] > len(view):
            raise _unlike(f"tile sizes that end at byte {offsets[-1]} of {len(view)}")
        content = np.frombuffer(view, np.uint8)
        last = offsets[1:] - 1
        wrong = content.take(last) != _markers(column.size)
        wrong |= content.take(last - 1) != 0xFF
        if wrong.any():
            tile = int(wrong.argmax())
            raise _unlike(f"tile {tile}, which should end in its marker at byte {last[tile] - 1}")
        return _grid(header, shape, offsets)


def tile_grid(jpeg: Encoded) -> TileGrid | None:
    """Find the tiles of a JPEG by its markers; None if it has no independent tiles.

    JPEGs without tiles: progressive or arithmetic-coded, with several scans, without restart markers, with an interval
    that does not divide the rows evenly, or with markers other than the header announces (damage, which a full decode
    reports).

    Args:
        jpeg: The encoded image, whole; None is returned for other formats.

    Raises:
        DataError: The header is invalid.
    """
    view = as_view(jpeg)
    if not is_jpeg(view):
        return None
    header = read_header(view)
    shape = _grid_shape(header)
    if shape is None:
        return None
    scan = np.frombuffer(view, np.uint8)[header.scan_at :]
    escapes = np.flatnonzero(scan[:-1] == 0xFF)
    markers = escapes[scan[escapes + 1] != 0]  # FF 00 is the value FF; all else is a marker, or padding before one
    tiles = shape[0] * shape[1]
    if markers.size < tiles or (scan[markers[:tiles] + 1] != _markers(tiles)).any():
        return None
    offsets = np.empty(tiles + 1, np.int64)
    offsets[0] = header.scan_at
    offsets[1:] = markers[:tiles] + (header.scan_at + 2)
    return _grid(header, shape, offsets)


def cut_tiles(jpeg: Encoded, grid: TileGrid, box: Box) -> tuple[bytearray, tuple[int, int]]:
    """A JPEG of the tiles that cover ``box``, and the (top, left) of its first pixel in the whole image.

    Its pixels equal those of the whole, except at the edges if chroma is subsampled: decoders interpolate chroma between
    neighbours. ``decode_region`` therefore cuts a margin. Raises DataError for a box that is empty or not inside the image.
    """
    header = grid.header
    _check_box(box, header.height, header.width)
    top, left, height, width = box
    first_row, last_row = top // grid.tile_height, (top + height - 1) // grid.tile_height
    first, last = left // grid.tile_width, (left + width - 1) // grid.tile_width
    view = as_view(jpeg)
    # [rows, tiles + 1] offsets, a view of the grid's: the tiles of a row are contiguous
    spans: NDArray[np.int64] = np.ndarray(
        (last_row - first_row + 1, last - first + 2),
        np.int64,
        grid.offsets,
        offset=8 * (first_row * grid.columns + first),
        strides=(8 * grid.columns, 8),
    )
    lows, highs = cast("tuple[list[int], list[int]]", (spans[:, 0].tolist(), spans[:, -1].tolist()))
    small = bytearray().join([header.tables, *(view[low:high] for low, high in zip(lows, highs, strict=True))])
    origin = first_row * grid.tile_height, first * grid.tile_width
    size = (
        min((last_row + 1) * grid.tile_height, header.height) - origin[0],
        min((last + 1) * grid.tile_width, header.width) - origin[1],
    )
    _SIZE.pack_into(small, header.size_at, *size)
    # The running sum of the sizes is the end of each tile's marker in the cut.
    ends = (spans[:, 1:] - spans[:, :-1]).cumsum()
    ends += len(header.tables) - 1
    np.frombuffer(small, np.uint8)[ends] = _markers(ends.size)
    return small, origin


def decode_region(
    data: Encoded,
    box: Box,
    grid: TileGrid | None = None,
    *,
    min_size: tuple[int, int] | None = None,
    color: Color = "rgb",
    max_pixels: int = MAX_PIXELS,
) -> Pixels:
    """The pixels of ``box``, bit for bit those of ``decode(data)``, decoding only the tiles under the box.

    Args:
        data: The encoded image, whole: bytes, or uint8 [bytes].
        box: (top, left, height, width) in pixels of the whole image.
        grid: The grid of this image, from ``tile_grid`` or ``TileGrid.from_column``. Without it, and for other formats,
            the whole image is decoded.
        min_size: (height, width): if both sides of a JPEG's box are at least f times as large, f the largest of (8, 4, 2),
            the result is the image decoded at 1/f and cropped to rows ⌊top/f⌋ to ⌈(top + height)/f⌉, and columns
            likewise.
        color: "rgb" gives 3 channels, "gray" 1.
        max_pixels: Pixels of the largest whole image that is accepted.

    Returns:
        uint8 [height, width, channels].

    Raises:
        DataError: ``decode`` would raise it, or the box is not inside the image.
    """
    view = as_view(data)
    if not is_jpeg(view):
        pixels = decode(view, max_pixels=max_pixels, color=color)
        _check_box(box, *pixels.shape[:2])
        return _cropped(pixels, box, (0, 0), 1)
    header = grid.header if grid is not None else read_header(view)
    check_pixels(header.width, header.height, max_pixels)
    _check_box(box, header.height, header.width)
    factor = 1 if min_size is None else dct_factor(box[2], box[3], min_size)
    if grid is None:
        check_scans(view, header)
        return _cropped(decode_jpeg(view, header.height, header.width, color, factor), box, (0, 0), factor)
    small, origin = cut_tiles(view, grid, _with_margin(box, header, factor))
    height, width = _SIZE.unpack_from(small, header.size_at)
    return _cropped(decode_jpeg(small, height, width, color, factor), box, origin, factor)


def _grid(header: JpegHeader, shape: tuple[int, int], offsets: NDArray[np.int64]) -> TileGrid:
    height, width = header.mcu
    return TileGrid(
        header=header,
        rows=shape[0],
        columns=shape[1],
        tile_height=height,
        tile_width=width * header.restart_interval,
        offsets=offsets,
    )


def _with_margin(box: Box, header: JpegHeader, factor: int) -> Box:
    """``box`` with a margin of one sample of the coarsest component, the range of chroma interpolation.

    The left margin is two samples: libjpeg-turbo interpolates only chroma of more than two columns, and a narrow last
    column of tiles alone may have fewer.
    """
    tall, wide = (factor * size // 8 for size in header.mcu)
    top, left = max(0, box[0] - tall), max(0, box[1] - 2 * wide)
    bottom, right = min(header.height, box[0] + box[2] + tall), min(header.width, box[1] + box[3] + wide)
    return top, left, bottom - top, right - left


def _cropped(pixels: Pixels, box: Box, origin: tuple[int, int], factor: int) -> Pixels:
    top, left = box[0] - origin[0], box[1] - origin[1]
    return pixels[top // factor : -(-(top + box[2]) // factor), left // factor : -(-(left + box[3]) // factor)]


def _grid_shape(header: JpegHeader) -> tuple[int, int] | None:
    """(rows, columns) of tiles; None if the header allows none."""
    height, width = header.mcu
    across = -(-header.width // width)
    if not header.sequential or not header.restart_interval or across % header.restart_interval:
        return None
    return -(-header.height // height), across // header.restart_interval


def _markers(tiles: int) -> NDArray[np.uint8]:
    """The second byte of the marker that ends each tile: restart markers 0 to 7 in turn, then the end of the image."""
    due = np.resize(_TURNS, tiles) if tiles > _TURNS.size else _TURNS[:tiles].copy()
    due[-1] = _EOI
    return due


def _check_box(box: Box, height: int, width: int) -> None:
    top, left, tall, wide = box
    if not (0 <= top < top + tall <= height and 0 <= left < left + wide <= width):
        raise DataError(
            given=f"a box of {tall}x{wide} pixels at ({top}, {left}) in an image of {height}x{width}",
            rule="a box, (top, left, height, width), is not empty and lies inside the image",
            consequence="there are no such pixels",
            nearest=f"({min(max(0, top), height - 1)}, {min(max(0, left), width - 1)}, …) with at most the rest",
        )


def _unlike(given: str) -> DataError:
    return DataError(
        given=given,
        rule="a column of tile sizes is the result of to_column() for this JPEG",
        consequence="nothing was decoded, because it could have been another part of the image",
        nearest="tile_grid(jpeg).to_column() computes it",
    )
