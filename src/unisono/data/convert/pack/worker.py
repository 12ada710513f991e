"""What a worker command does: an image file or an item in, records out, as MessagePack.

    python -m unisono.data.convert.pack.worker images '{"resize": 256, …}'
    python -m unisono.data.convert.pack.worker image-bytes '{"resize": 256, …}'
    python -m unisono.data.convert.pack.worker function MODULE:NAME SCHEMA

Requests are a path, an image's bytes, or an item's text; answers a ``Done``.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from unisono.data.convert.pack.image_encoding import ImageOptions, encode_image
from unisono.data.convert.pack.record_schema import RecordSchema, rows_of
from unisono.data.loading.subprocess_map import serve_requests
from unisono.errors import DataError


class RecordAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What became of one input: records, or a reason why there are none. Of images a width, a height and tile sizes."""

    records: list[bytes] = []
    reason: str = ""
    width: int = 0
    height: int = 0
    tiles: bytes | None = None  # little-endian uint32


RecordMaker = Callable[[bytes], RecordAnswer]


def image_maker(options: ImageOptions) -> RecordMaker:
    """Makes the record of the image at a path."""
    make_bytes = image_bytes_maker(options)

    def make(request: bytes) -> RecordAnswer:
        try:
            raw = Path(os.fsdecode(request)).read_bytes()
        except OSError as error:
            return RecordAnswer(reason=f"it cannot be read: {error.strerror}")
        return make_bytes(raw)

    return make


def image_bytes_maker(options: ImageOptions) -> RecordMaker:
    """Makes the record of the image that is given."""

    def make(request: bytes) -> RecordAnswer:
        try:
            picture = encode_image(request, options)
        except DataError as error:
            return RecordAnswer(reason="; ".join(problem.given for problem in error.problems))
        tiles = None if picture.tiles is None else picture.tiles.astype("<u4").tobytes()
        return RecordAnswer(records=[picture.data], width=picture.width, height=picture.height, tiles=tiles)

    return make


def function_maker(name: str, layout: RecordSchema) -> RecordMaker:
    """Makes the records of an item: ``module:function`` of its text gives one row or several."""
    function = find_function(name)

    def make(request: bytes) -> RecordAnswer:
        try:
            return RecordAnswer(records=[layout.encode(row) for row in rows_of(function(request.decode()))])
        except DataError as error:
            return RecordAnswer(reason="; ".join(problem.given for problem in error.problems))
        except Exception as error:  # whatever the function raises is about this item
            return RecordAnswer(reason=f"{name} raised {type(error).__name__}: {error}")

    return make


def find_function(name: str) -> Callable[..., Any]:
    """``module:function``, also from the working folder. Raises DataError where there is none."""
    module, _, attribute = name.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), attribute) if module and attribute else None
    except (ImportError, AttributeError) as error:
        raise _no_function(f"function {name!r}: {error}") from error
    if not callable(found):
        raise _no_function(f"function {name!r}, which is {'no function' if found else 'not module:function'}")
    return found


def _no_function(given: str) -> DataError:
    return DataError(
        given=given,
        rule="it is module:function, the module found by Python or in the working folder",
        consequence="nothing was packed",
        nearest="python -c 'from MODULE import FUNCTION' says whether it can be found",
    )


_IMAGES = {"images": image_maker, "image-bytes": image_bytes_maker}


def _main(kind: str, *arguments: str) -> None:
    if kind in _IMAGES:
        make = _IMAGES[kind](msgspec.json.decode(arguments[0], type=ImageOptions))
    else:
        make = function_maker(arguments[0], RecordSchema.parse(arguments[1]))
    serve_requests(lambda request: msgspec.msgpack.encode(make(request)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
