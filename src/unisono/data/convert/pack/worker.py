"""Make records of inputs in order: in this process, or by worker commands.

    python -m unisono.data.convert.pack.worker images '{"resize": 256, …}'
    python -m unisono.data.convert.pack.worker image-bytes '{"resize": 256, …}'
    python -m unisono.data.convert.pack.worker function MODULE:NAME SCHEMA

A request is a path, an image's bytes, or an item's text; the answer is a ``RecordAnswer`` in MessagePack. The result does not
depend on the number of workers.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from unisono.data.convert.pack.image_encoding import ImageOptions, encode_image
from unisono.data.convert.pack.record_schema import RecordSchema, rows_of
from unisono.data.loading.subprocess_map import serve_requests, subprocess_map
from unisono.data.loading.worker_pool import allowed_cores
from unisono.errors import DataError, UnisonoError

_MIN_INPUTS_PER_WORKER = 64  # fewer are not worth the start of another process


class RecordAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The records of one input, or the reason why it has none; of an image also width, height and tile sizes."""

    records: list[bytes] = []
    reason: str = ""
    width: int = 0
    height: int = 0
    tiles: bytes | None = None  # little-endian uint32


RecordMaker = Callable[[bytes], RecordAnswer]


def make_records(
    inputs: Iterable[tuple[str, bytes]], make: RecordMaker, arguments: Sequence[str], *, workers: int
) -> Generator[tuple[str, RecordAnswer]]:
    """(name, answer) of each (name, request), in order; ``workers`` processes, 0 = this one.

    ``arguments`` are those of a worker command that answers as ``make`` does.
    """
    if workers == 0:
        for name, request in inputs:
            yield name, make(request)
        return
    command = [sys.executable, "-m", "unisono.data.convert.pack.worker", *arguments]
    for name, answer in subprocess_map(inputs, command, workers=workers, ahead=4, ended=_ended):
        yield name, msgspec.msgpack.decode(answer, type=RecordAnswer)


def worker_count(requested: int | None, inputs: int) -> int:
    """``requested``; by default one per core if there are enough inputs for at least two, else 0."""
    if requested is not None:
        return requested
    workers = min(allowed_cores(), inputs // _MIN_INPUTS_PER_WORKER)
    return workers if workers > 1 else 0


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
    """Makes the record of an image given as bytes."""

    def make(request: bytes) -> RecordAnswer:
        try:
            image = encode_image(request, options)
        except DataError as error:
            return RecordAnswer(reason=given_parts(error))
        tiles = None if image.tiles is None else image.tiles.astype("<u4").tobytes()
        return RecordAnswer(records=[image.data], width=image.width, height=image.height, tiles=tiles)

    return make


def function_maker(name: str, schema: RecordSchema) -> RecordMaker:
    """Makes the records of an item: ``module:function`` returns one row or several for its text."""
    function = find_function(name)

    def make(request: bytes) -> RecordAnswer:
        try:
            return RecordAnswer(records=[schema.encode(row) for row in rows_of(function(request.decode()))])
        except DataError as error:
            return RecordAnswer(reason=given_parts(error))
        except Exception as error:  # whatever the function raises is about this item
            return RecordAnswer(reason=f"{name} raised {type(error).__name__}: {error}")

    return make


def find_function(name: str) -> Callable[..., Any]:
    """Import ``module:function``, also from the working folder. Raises DataError if there is none."""
    module, _, attribute = name.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module), attribute) if module and attribute else None
    except (ImportError, AttributeError) as error:
        raise _no_function(f"function {name!r}: {error}") from error
    if not callable(function):
        raise _no_function(f"function {name!r}, which is {'no function' if function else 'not module:function'}")
    return function


def given_parts(error: DataError) -> str:
    """What was wrong with an input, for the report."""
    return "; ".join(problem.given for problem in error.problems)


def _no_function(given: str) -> DataError:
    return DataError(
        given=given,
        rule="it is module:function, the module found by Python or in the working folder",
        consequence="nothing was packed",
        nearest="python -c 'from MODULE import FUNCTION' says whether it can be found",
    )


def _ended(name: str, code: int) -> UnisonoError:
    return UnisonoError(
        given=f"{name}: its packing process ended with exit code {code}",
        rule="a worker runs until all inputs are packed; its own message, if any, is above",
        consequence="packing stopped; finished shards are kept and not made again",
        nearest="the same command again; -9 often means no memory: fewer --workers",
    )


def _main(kind: str, *arguments: str) -> None:
    if kind == "function":
        make = function_maker(arguments[0], RecordSchema.parse(arguments[1]))
    else:
        image_options = msgspec.json.decode(arguments[0], type=ImageOptions)
        make = {"images": image_maker, "image-bytes": image_bytes_maker}[kind](image_options)
    serve_requests(int(arguments[-1]), lambda request: msgspec.msgpack.encode(make(request)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
