"""Make records of inputs in order: in this process, or by worker commands.

    python -m unisono.data.convert.pack.worker images '{"resize": 256, …}' ROOT
    python -m unisono.data.convert.pack.worker image-bytes '{"resize": 256, …}'
    python -m unisono.data.convert.pack.worker function MODULE:NAME SCHEMA

A request is a path, an image's bytes, or an item's text. Paths lie in the folder ROOT, which has no links in its path; links may
lead out if it is empty. The answer is a ``RecordAnswer`` in MessagePack. The result does not
depend on the number of workers.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from unisono.data.convert.pack.image_encoding import ImageOptions, encode_image
from unisono.data.convert.pack.pack_job import RecordAnswer
from unisono.data.convert.pack.record_schema import RecordSchema, rows_of
from unisono.data.loading.subprocess_map import serve_requests, subprocess_map
from unisono.data.loading.worker_pool import allowed_cores
from unisono.dist.interpreter import module_command
from unisono.errors import DataError, UnisonoError
from unisono.storage.files import open_inside, open_regular

_MIN_INPUTS_PER_WORKER = 64  # fewer are not worth the start of another process


RecordMaker = Callable[[bytes], RecordAnswer]
Input = TypeVar("Input")


def make_records(
    requests: Iterable[tuple[Input, bytes | None]], arguments: Sequence[str], *, workers: int
) -> Generator[tuple[Input, RecordAnswer]]:
    """(input, answer) of each (input, request), in order; ``workers`` processes, 0 = this one.

    ``arguments`` are those of the worker command. A request of None is not sent, and its answer is empty.
    """
    if workers == 0:
        make = _record_maker(*arguments)
        for source, request in requests:
            yield source, RecordAnswer() if request is None else make(request)
        return
    command = module_command("unisono.data.convert.pack.worker", *arguments)
    for source, answer in subprocess_map(requests, command, workers=workers, ahead=4, ended=_ended):
        yield source, msgspec.msgpack.decode(answer, type=RecordAnswer) if answer else RecordAnswer()


def worker_count(requested: int | None, inputs: int) -> int:
    """``requested``; by default one per core if there are enough inputs for at least two, else 0."""
    if requested is not None:
        return requested
    workers = min(allowed_cores(), inputs // _MIN_INPUTS_PER_WORKER)
    return workers if workers > 1 else 0


def _record_maker(kind: str, *arguments: str) -> RecordMaker:
    """The function that answers the requests of a worker command with these arguments."""
    if kind == "function":
        return _function_maker(arguments[0], RecordSchema.parse(arguments[1]))
    options = msgspec.json.decode(arguments[0], type=ImageOptions)
    return _image_maker(options, root=arguments[1] if kind == "images" else None)


def _image_maker(options: ImageOptions, *, root: str | None) -> RecordMaker:
    """Makes the record of the image at a path, or with ``root`` None of an image's bytes."""

    def make(request: bytes) -> RecordAnswer:
        try:
            raw = request if root is None else _read_image(Path(os.fsdecode(request)), root)
        except OSError as error:
            return RecordAnswer(reason=f"it cannot be read: {error.strerror}")
        try:
            return encode_image(raw, options)
        except DataError as error:
            return RecordAnswer(reason=given_parts(error))

    return make


def _read_image(path: Path, root: str) -> bytes:
    # the listing looked at links, but a folder of the path can be exchanged by one afterwards
    with open_inside(root, path) if root else open_regular(path) as file:
        return file.read()


def _function_maker(name: str, schema: RecordSchema) -> RecordMaker:
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
    """Import ``module:function``, also from the working folder. Raises DataError if there is none.

    The working folder comes last in the module path, so that its files take the place of no installed module.
    """
    module, _, attribute = name.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module), attribute) if module and attribute else None
    except (ImportError, AttributeError) as error:
        raise _no_function(f"function {name!r}: {error}") from error
    if not callable(function):
        raise _no_function(f"function {name!r}, which is {'no function' if function else 'not module:function'}")
    return function


def given_parts(error: DataError) -> str:
    """The problems of an input, for the report."""
    return "; ".join(problem.given for problem in error.problems)


def _no_function(given: str) -> DataError:
    return DataError(
        given=given,
        rule="it is module:function; Python looks for the module in its own path first, then in the working folder",
        consequence="nothing was packed",
        nearest="python -c 'from MODULE import FUNCTION' says whether it can be found",
    )


def _ended(source: object, code: int) -> UnisonoError:
    return UnisonoError(
        given=f"{source}: its packing process ended with exit code {code}",
        rule="a worker runs until all inputs are packed; its own message, if any, is above",
        consequence="packing stopped; finished shards are kept and not made again",
        nearest="the same command again; -9 often means no memory: fewer --workers",
    )


def _main(*arguments: str) -> None:
    *about, descriptor = arguments
    make = _record_maker(*about)
    serve_requests(Connection(int(descriptor)), lambda request: msgspec.msgpack.encode(make(request)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
