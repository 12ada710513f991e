"""Inputs made into records in order, in this process or by worker commands; the result does not depend on which."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Sequence

import msgspec

from unisono.data.convert.pack.worker import RecordAnswer, RecordMaker
from unisono.data.loading.subprocess_map import subprocess_map
from unisono.data.loading.worker_pool import allowed_cores
from unisono.errors import UnisonoError

_PER_WORKER = 64  # inputs for which a process more is worth its start


def make_records(
    inputs: Iterable[tuple[str, bytes]], make: RecordMaker, arguments: Sequence[str], *, workers: int
) -> Generator[tuple[str, RecordAnswer]]:
    """(name, what became of it) of each (name, request), in order. ``arguments`` make the same ``make`` in a process."""
    if workers == 0:
        for name, request in inputs:
            yield name, make(request)
        return
    command = [sys.executable, "-m", "unisono.data.convert.pack.worker", *arguments]
    for name, answer in subprocess_map(inputs, command, workers=workers, ahead=4, ended=_ended):
        yield name, msgspec.msgpack.decode(answer, type=RecordAnswer)


def worker_count(asked: int | None, inputs: int) -> int:
    """As many as asked for, else one per core as far as there is work for them; one alone is this process itself."""
    if asked is not None:
        return asked
    workers = min(allowed_cores(), inputs // _PER_WORKER)
    return workers if workers > 1 else 0


def _ended(name: str, code: int) -> UnisonoError:
    return UnisonoError(
        given=f"{name}: its packing process ended with exit code {code}",
        rule="a worker runs until all inputs are packed; its own message, if any, is above",
        consequence="packing stopped; finished shards are kept and not made again",
        nearest="the same command again; -9 often means no memory: fewer --workers",
    )
